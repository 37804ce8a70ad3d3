"""Differences of a setting that was picked for being the best are judged by Tukey's test in blocks."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dashboards.compose.blocks import Blocks

GRID = [(k, r) for k in (2, 5, 10) for r in (2, 3, 5)]


def share_resolved(
    num_settings: int,
    num_repeats: int,
    *,
    num_sweeps: int,
    spread_of_start: float = 1.0,
    spread_of_last: float = 1.0,
) -> float:
    """The share of flat sweeps in which the best is told from any other setting or from the start."""
    generator = np.random.default_rng([num_settings, num_repeats])
    found = 0
    for _ in range(num_sweeps):
        repeats = generator.normal(0, 3, (num_repeats, 1))
        spreads = np.append(np.ones(num_settings - 1), spread_of_last)
        scores = repeats + spreads * generator.normal(size=(num_repeats, num_settings))
        start = repeats + spread_of_start * generator.normal(size=(num_repeats, 1))
        found += says_resolved(scores, np.repeat(start, num_settings, axis=1))
    return found / num_sweeps


def says_resolved(scores: NDArray[np.float64], starts: NDArray[np.float64]) -> bool:
    blocks, best = Blocks(scores, starts), int(scores.mean(axis=0).argmax())
    over_start = blocks.over_start(best, "start")
    assert over_start is not None
    others = (i for i in range(scores.shape[1]) if i != best)
    return over_start.is_resolved or any(blocks.between(best, i, "").is_resolved for i in others)


def test_best_of_equal_settings_is_hardly_ever_resolved() -> None:
    assert share_resolved(5, 3, num_sweeps=40) <= 0.1


@pytest.mark.ci
@pytest.mark.parametrize("spreads", [(1.0, 1.0), (2.0, 1.0), (0.5, 1.0), (1.0, 1.5), (0.7, 0.5)])
def test_flat_sweeps_are_not_resolved_in_95_of_100(spreads: tuple[float, float]) -> None:
    start, last = spreads
    each = [share_resolved(k, r, num_sweeps=60, spread_of_start=start, spread_of_last=last) for k, r in GRID]
    assert sum(each) / len(each) <= 0.065  # 540 sweeps: 0.05 and 1.5 standard errors


def test_uncorrected_verdicts_would_resolve_flat_sweeps() -> None:
    generator = np.random.default_rng(0)
    scores = generator.normal(size=(100, 3, 10))
    best, worst = scores.mean(axis=1).argmax(axis=1), scores.mean(axis=1).argmin(axis=1)
    rows = np.arange(100)
    difference = scores[rows, :, best] - scores[rows, :, worst]
    errors = difference.std(axis=1, ddof=1) / 3**0.5
    assert (difference.mean(axis=1) > 2 * errors).mean() > 0.5


def planted(gain: float, lead: float, num_settings: int = 6, num_repeats: int = 3) -> Blocks:
    """A sweep whose settings gain over the start, the first one more than the others; noise is 1."""
    generator = np.random.default_rng(1)
    repeats = generator.normal(0, 3, (num_repeats, 1))
    scores = repeats + gain + generator.normal(size=(num_repeats, num_settings))
    scores[:, 0] += lead
    start = repeats + generator.normal(size=(num_repeats, 1))
    return Blocks(scores, np.repeat(start, num_settings, axis=1))


def test_gain_that_is_large_against_the_noise_is_resolved() -> None:
    gained = planted(gain=12, lead=0).over_start(0, "the untrained network")
    assert gained is not None
    assert gained.verdict == "higher"
    lost = planted(gain=-12, lead=0).over_start(0, "the untrained network")
    assert lost is not None
    assert lost.verdict == "lower"


def test_lead_that_is_large_against_the_noise_is_resolved_whatever_the_repeats_share() -> None:
    found = planted(gain=0, lead=8)
    assert all(found.between(0, other, "").verdict == "higher" for other in range(1, 6))
    assert not found.between(1, 2, "").is_resolved


def test_one_repeat_resolves_nothing() -> None:
    found = Blocks(np.array([[0.1, 0.9]]), np.zeros((1, 2)))
    assert not found.between(1, 0, "").is_resolved
    over_start = found.over_start(1, "")
    assert over_start is not None
    assert not over_start.is_resolved


def test_two_settings_without_a_start_are_judged_by_the_paired_t_test() -> None:
    first = np.array([0.0, 0.0, 0.0, 0.0])
    for second in ([1.0, 2.0, 3.0, 0.2], [1.0, 2.0, 3.0, -0.4]):
        expected = stats.ttest_rel(second, first).pvalue < 0.05
        found = Blocks(np.stack([first, np.array(second)], axis=1)).between(1, 0, "")
        assert found.is_resolved == expected


def test_one_setting_against_its_start_is_judged_by_the_paired_t_test() -> None:
    for scores in ([1.0, 2.0, 3.0], [1.0, 1.2, 1.1]):
        expected = stats.ttest_1samp(scores, 0).pvalue < 0.05
        found = Blocks(np.array(scores)[:, None], np.zeros((3, 1))).over_start(0, "")
        assert found is not None
        assert found.is_resolved == expected
