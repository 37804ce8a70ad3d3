"""The audit through a training in one's own loop: its steps keep the claim of one step."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.audit.canary import standard_cases
from benchmarks.audit.judging import Releases, judge
from benchmarks.audit.result import AuditResult
from benchmarks.audit.worst_cases import CANARY, Crafted, crafted_inputs, foreign
from dpgcl_core.clipping.types import GroupReport
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.randomness import SeededNonPrivateRandomness
from dpgcl_core.private_step import PrivateStep
from dpgcl_core.private_training import PrivateTraining

CASE = next(case for case in standard_cases() if case.name == "many-groups")
DIM = 4


class _NotingStep(PrivateStep):
    """Notes the clean sum of its last step."""

    noted: ClassVar[list[NDArray[np.float64]]] = []

    def add_clipped_sum(self, total: Tensor, *given: Any) -> list[GroupReport]:
        reports = super().add_clipped_sum(total, *given)
        self.noted[:] = [total.numpy().copy()]
        return reports


def _trained(ids: list[int], num_steps: int, seed: int) -> Releases:
    """The steps of one training of a linear network, each of which is a run."""
    mechanism = dataclasses.replace(CASE.mechanism, num_steps=num_steps)
    model = Crafted(DIM)

    def loss(inputs: Tensor) -> Tensor:
        members = inputs[..., 0].long().numpy()
        gradient = partial(foreign, group_size=2, dim=DIM)
        return model(crafted_inputs(members, gradient, l2_clip_norm=1.0))  # type: ignore[no-any-return]

    records = [torch.tensor([float(each)]) for each in ids]
    loader = DataLoader(
        TensorDataset(torch.stack(records)), collate_fn=lambda some: torch.stack([r for (r,) in some])
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    randomness = SeededNonPrivateRandomness(seed)
    training = PrivateTraining(mechanism, model, optimizer, loader, loss=loss, randomness=randomness)
    object.__setattr__(training._private_step, "__class__", _NotingStep)
    noisy, clean = [], []
    for inputs in training:
        before = model.layer.weight.detach().double().flatten().numpy().copy()
        training.step(inputs)
        moved = before - model.layer.weight.detach().double().flatten().numpy()
        noisy.append(moved * mechanism.divisor)
        clean.append(_NotingStep.noted[0])
    shape = (num_steps, 1, 1, DIM)
    return Releases(np.reshape(noisy, shape), np.reshape(clean, shape))


def _audited(runs: int) -> AuditResult:
    """With the canary in each of 13 rows in turn, `runs` times each."""
    present = list(range(12))
    claim = CASE.claim
    without = _trained(present, 13 * runs, 0)
    rows = [_trained([*present[:row], CANARY, *present[row:]], runs, 1 + row) for row in range(13)]
    mixed = np.random.default_rng(0).permutation(13 * runs)  # rows in every part of the runs
    with_canary = Releases(
        np.concatenate([each.noisy for each in rows])[mixed],
        np.concatenate([each.clean for each in rows])[mixed],
    )
    return judge("own loop", without, with_canary, claim, confidence=0.95)


@pytest.mark.parametrize("runs", [8, pytest.param(40, marks=pytest.mark.ci)])
def test_step_of_ones_own_loop_keeps_its_claim(runs: int) -> None:
    assert _audited(runs).as_expected


@pytest.mark.ci
def test_step_of_ones_own_loop_without_noise_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GaussianNoise.draw
    monkeypatch.setattr(GaussianNoise, "draw", lambda self, *given: 0.0 * right(self, *given))
    result = _audited(8)
    assert result.exceeds
    assert not result.noise_as_claimed
