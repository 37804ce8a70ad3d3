"""One record more through the real step: the coupled sums differ by at most what the mechanism claims."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.sampling.stage import DrawnGroups
from dpgcl_core.workers import SingleWorker
from tests.trainers.conftest import add_clipped_sum, inputs_of_rows, make_config, make_data
from trainers.training.step import Training, prepare

CLIP = 0.1  # far below every group's gradient norm, so that each contributes its full C


def _run(group_size: object, **changes: object) -> Training:
    config = make_config(group_size=group_size, l2_clip_norm=CLIP, temperature=0.05, **changes)
    return prepare(config, make_data(), SingleWorker())


def _clipped_sum(run: Training, groups: np.ndarray) -> torch.Tensor:
    total = torch.zeros(num_trainable(run.encoder))
    add_clipped_sum(run, DrawnGroups.all_complete(groups), total, 1)
    return total.double()


@pytest.mark.parametrize("seed", range(5))
def test_exchanged_record_moves_the_clipped_sum_by_at_most_2c(seed: int) -> None:
    run = _run(4, sampling="records")
    order = np.random.default_rng(seed).permutation(60)
    groups, new = order[:20].reshape(5, 4), order[-1]
    exchanged = groups.copy()
    exchanged[seed % 5, seed % 4] = (
        new  # Fisher-Yates: the new record takes one place, its owner is left over
    )
    distance = float((_clipped_sum(run, exchanged) - _clipped_sum(run, groups)).norm())
    assert 0 < distance <= run.config.mechanism.sensitivity == 2 * CLIP


@pytest.mark.parametrize("seed", range(3))
def test_record_that_fills_a_slot_moves_the_clipped_sum_by_at_most_c(seed: int) -> None:
    """The coupling of sampled groups: one slot filled or empty, all else alike, by the stage's own mask."""
    run = _run(4)
    stage, num_records = run.config.mechanism.group_stage(), 59
    pair = [
        stage.draw(n, sampling=np.random.default_rng(seed), permutation=np.random.default_rng(seed))
        for n in (num_records, num_records + 1)
    ]
    if not np.array_equal(pair[0].complete, pair[1].complete):  # the slot of the last record was drawn
        assert int((pair[0].complete != pair[1].complete).sum()) == 1
    sums = []
    for drawn in pair:
        total = torch.zeros(num_trainable(run.encoder))
        add_clipped_sum(run, drawn, total, 1)
        sums.append(total.double())
    moved = float((sums[1] - sums[0]).norm())
    assert pair[0].rows.shape == pair[1].rows.shape
    assert (moved > 0) == (not np.array_equal(pair[0].complete, pair[1].complete))
    assert moved <= run.config.mechanism.sensitivity == CLIP


def test_additional_group_moves_the_clipped_sum_by_at_most_c() -> None:
    run = _run(4)
    groups = np.arange(24).reshape(6, 4)
    distance = float((_clipped_sum(run, groups) - _clipped_sum(run, groups[:5])).norm())
    assert 0.9 * CLIP < distance <= CLIP


def test_record_more_moves_the_whole_batch_by_at_most_2c() -> None:
    run = _run("batch")
    rows = np.arange(30)
    distance = float((_clipped_sum(run, rows[None]) - _clipped_sum(run, rows[None, :29])).norm())
    assert 0 < distance <= run.config.mechanism.sensitivity


def test_views_of_other_records_are_bit_equal_next_to_a_new_record() -> None:
    run = _run(4)
    groups = np.arange(8).reshape(2, 4)
    exchanged = groups.copy()
    exchanged[0, 0] = 50
    before, after = inputs_of_rows(run, groups, 3), inputs_of_rows(run, exchanged, 3)
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[0, 1:], after[0, 1:])
    assert not torch.equal(before[0, 0], after[0, 0])
