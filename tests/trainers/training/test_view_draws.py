"""Several draws of the views in a training: fresh views, one microbatch of them, unchanged accounting."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch

from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.sampling.stage import DrawnGroups
from tests.trainers.conftest import make_config, make_data
from trainers.config.training import NetworkConfig, PerformanceConfig
from trainers.training import loop
from trainers.training.loop import train
from trainers.training.workers import SingleWorker

GROUPS = np.arange(24).reshape(6, 4)


def _run(**changes: object) -> loop._Run:
    return loop._prepare(make_config(**changes), make_data(), SingleWorker())


def _sum(run: loop._Run, groups: np.ndarray, num_augmentations: int = 1) -> torch.Tensor:
    total = torch.zeros(num_trainable(run.encoder))
    loop._add_clipped_sum(run, DrawnGroups.all_complete(groups), total, num_augmentations)
    return total


def test_step_embeds_every_draw_of_every_record(monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = _run(num_view_draws=3), []
    original = loop._inputs

    def spy(*given: object) -> torch.Tensor:
        seen.append(original(*given))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(loop, "_inputs", spy)
    _sum(run, GROUPS)
    assert {views.shape[2] for views in seen} == {run.task.num_views(run.config, 1)} == {9}
    one = seen[0][0, 0].flatten(1)
    assert float(torch.pdist(one).min()) > 0  # no two of a record's views are the same


def test_sum_of_several_draws_is_not_that_of_one() -> None:
    sums = [_sum(_run(num_view_draws=draws), GROUPS) for draws in (1, 2)]
    assert float((sums[0] - sums[1]).norm() / sums[0].norm()) > 0.01


def test_several_draws_leave_less_to_the_accident_of_a_view() -> None:
    """The gradient at one step's views, around its mean over many steps' views, without clipping."""
    spreads = []
    for draws in (1, 4):
        run = _run(num_view_draws=draws, noise_multiplier=0.0, l2_clip_norm=math.inf)
        found = []
        for run.step in range(1, 9):
            found.append(_sum(run, GROUPS))
        spreads.append(float(torch.stack(found).var(0).sum()))
    assert spreads[1] < 0.5 * spreads[0]


@pytest.mark.parametrize("method", ["dp_gcl", "group_clip", "dp_sgd", "byol_groups"])
def test_microbatch_size_changes_no_sum_over_draws(method: str) -> None:
    changes = {"method": method, "num_view_draws": 2}
    if method in ("dp_sgd", "group_clip"):
        changes |= {"batch_cap": 60}
    if method == "byol_groups":
        network = NetworkConfig(name="small_cnn", embedding_dim=8, predictor=True)
        changes |= {"num_augmentations": 0, "network": network}
    sums = []
    for size in (6, 96):
        performance = PerformanceConfig(max_views_per_microbatch=size, device="cpu")
        run = _run(performance=performance, **changes)
        groups = GROUPS.reshape(1, -1) if method == "dp_sgd" else GROUPS
        sums.append(_sum(run, groups, run.config.num_augmentations))
    assert float((sums[0] - sums[1]).norm() / sums[0].norm()) < 1e-5


def test_snr_without_augmentation_is_that_of_the_same_pairs() -> None:
    metrics = train(make_config(num_augmentations=0, num_view_draws=2), make_data()).metrics
    assert metrics["snr_first_step"] == pytest.approx(metrics["snr_first_step_no_augmentation"], rel=1e-6)
    with_copies = _run(num_augmentations=2, num_view_draws=2)
    without = _run(num_augmentations=0, num_view_draws=2)
    assert torch.allclose(_sum(with_copies, GROUPS, 0), _sum(without, GROUPS, 0), atol=1e-6)


def test_several_draws_cost_no_epsilon() -> None:
    one, several = make_config(), make_config(num_view_draws=5)
    assert several.mechanism.sensitivity == one.mechanism.sensitivity
    assert several.epsilon() == one.epsilon()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_several_draws_keep_the_fast_way_in_low_precision(
    precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    network = NetworkConfig(name="small_cnn", embedding_dim=8, precision=precision)
    with caplog.at_level(logging.WARNING):
        loop._step(_run(num_view_draws=2, network=network))
    assert "one by one" not in caplog.text
