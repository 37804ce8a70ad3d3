"""The private step apart from both loops: what an update may see, and what rules are called by."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpgcl_core import workers
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.noise import chunked_draw
from dpgcl_core.noise.chacha20 import SecureRandomness
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.randomness import Draws, SeededNonPrivateRandomness
from dpgcl_core.private_step import PrivateStep
from dpgcl_core.sampling.stage import DrawnGroups
from dpgcl_core.workers import DistributedWorkers

GROUPS = DrawnGroups(rows=np.arange(6).reshape(3, 2), complete=np.array([True, False, True]), batch_size=6)
RECORDS = torch.arange(24.0).reshape(6, 1, 4) + 1


def private_step(**changes: Any) -> PrivateStep:
    model = nn.Linear(4, 1, bias=False)
    mechanism = Mechanism(
        num_records_public=6,
        sampling_prob=0.5,
        group_size=2,
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        num_steps=3,
        target_delta=1e-3,
    )
    usual: dict[str, Any] = {
        "mechanism": mechanism,
        "model": model,
        "objective": lambda views: model(views).flatten(1).sum(1),
        "rule": GroupClipper(l2_clip_norm=1.0),
        "groups_at_once": 2,
        "randomness": SeededNonPrivateRandomness(1),
    }
    return PrivateStep(**(usual | changes))


def inputs_of(part: slice) -> Tensor:
    return RECORDS[torch.from_numpy(GROUPS.rows[part])]


RELEASED = 3.0


@pytest.fixture(params=range(3))
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DistributedWorkers:
    """One of three workers of four weights in parts of two, so that the last one has no share.

    The others' sums are zero, and their noisy sums `RELEASED`.
    """

    def receive(values: Tensor, src: int) -> None:
        if src != request.param:
            values.fill_(RELEASED)

    group = SimpleNamespace(
        get_rank=lambda: request.param,
        get_world_size=lambda: 3,
        get_backend=lambda: "gloo",
        all_reduce=lambda values: None,
        reduce=lambda values, dst: None,
        broadcast=receive,
    )
    monkeypatch.setattr(chunked_draw, "PART", 2)
    monkeypatch.setattr(workers, "dist", group)
    return DistributedWorkers()


def test_update_holds_no_number_without_noise(worker: DistributedWorkers) -> None:
    """Neither in the gradient nor in the memory behind it, where the worker's own sum has been."""
    clean: list[Tensor] = []
    memory: list[Tensor] = []
    observer = SimpleNamespace(
        on_clipped_sum=lambda groups, reports, total: clean.append(total.clone()), on_noise=lambda norm: None
    )
    total, step = torch.zeros(4, dtype=torch.float64), private_step(workers=worker)

    def keep_memory(gradient: Tensor) -> None:
        memory.extend([gradient * step.mechanism.divisor, total[2:].clone()])

    replace(step, total=total).take(0, GROUPS, inputs_of, keep_memory, observer)
    is_own = torch.tensor([2 * worker.rank <= coordinate < 2 * worker.rank + 2 for coordinate in range(4)])
    (sums,), (noisy, behind) = clean, memory
    assert torch.equal(sums != 0, is_own)
    assert noisy[~is_own].tolist() == [RELEASED] * int((~is_own).sum())
    assert all((noisy - sums)[is_own].abs() > 1e-3)
    assert torch.allclose(behind, torch.where(is_own, noisy.double(), 0.0)[2:])


def test_worker_draws_the_noise_of_its_share_with_the_charge_for_the_whole_sum(
    worker: DistributedWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[GaussianNoise, int]] = []
    draw = GaussianNoise.draw

    def spy(law: GaussianNoise, num_coordinates: int, generator: Draws, *gpu: Any) -> Tensor:
        drawn.append((law, num_coordinates))
        return draw(law, num_coordinates, generator, *gpu)

    monkeypatch.setattr(GaussianNoise, "draw", spy)
    step = private_step(workers=worker, randomness=SecureRandomness())
    step.take(0, GROUPS, inputs_of, lambda gradient: None)
    law = step.mechanism.noise(num_grid_coordinates=4)
    assert law != step.mechanism.noise(num_grid_coordinates=2)
    assert drawn == ([] if worker.rank == 2 else [(law, 2)])


def test_incomplete_group_adds_nothing_whatever_stands_in_its_place() -> None:
    step, sums = private_step(), []
    for shift in (0.0, 1e6):
        records = RECORDS.clone()
        records[2:4] += shift
        sums.append(torch.zeros(4, dtype=torch.float64))
        groups = records[torch.from_numpy(GROUPS.rows)]
        step.add_clipped_sum(sums[-1], 0, GROUPS, groups.__getitem__)
    assert torch.equal(*sums)
    assert 0 < float(sums[0].norm()) <= 2.0


class RuleOfVersion1:
    """A rule that takes its draws before the mask, as rules of 0.1 did."""

    whole_batch, needs_draws = False, False

    def add_clipped_sum(
        self, total: Tensor, model: Any, objective: Any, inputs: Any, generator: Any, complete: Any = None
    ) -> Any:
        pytest.fail("it was called, with the mask for its draws")


def test_rule_of_the_earlier_signature_is_not_called_with_the_mask_for_its_draws() -> None:
    with pytest.raises(TypeError, match="draws"):
        private_step(rule=RuleOfVersion1()).take(0, GROUPS, inputs_of, lambda gradient: None)


@pytest.mark.parametrize("scale", [0.0, 3.0, -2.0, math.inf, math.nan, 2.0**-40])
def test_scale_of_gradients_that_would_break_the_bound_is_refused(scale: float) -> None:
    """The last one is a power of two, and leaves C below the smallest norm whose square float32 holds."""
    with pytest.raises(ConfigError, match=r"gradient_scale must be a power of two|at least 1e-10"):
        GroupClipper(l2_clip_norm=1e-9, gradient_scale=scale)
    assert replace(GroupClipper(l2_clip_norm=1e-9), gradient_scale=1024.0).gradient_scale == 1024
