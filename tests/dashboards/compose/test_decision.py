"""The decision rule: its critical values, its two sources of chance, and how often it errs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks.decision import Cell, cells, draw_layout, has_gain, has_winner
from dashboards.compose.decision import (
    HIGHER,
    LEVEL,
    LEVEL_SHARE,
    LOWER,
    WITHIN_NOISE,
    Cost,
    Layout,
    RecordSpread,
    critical_value,
    critical_value_of_any_share,
    critical_value_of_winners,
)


def sweep(lead: float = 0.0, gain: float = 0.0, *, num_repeats: int = 3, num_settings: int = 6) -> Layout:
    """A sweep whose settings gain over the start, the first one more than the others; noise is 1."""
    generator = np.random.default_rng(1)
    repeats = generator.normal(0, 3, (num_repeats, 1))
    scores = repeats + gain + generator.normal(size=(num_repeats, num_settings))
    scores[:, 0] += lead
    start = repeats + generator.normal(size=(num_repeats, 1))
    return Layout(scores, np.repeat(start, num_settings, axis=1))


def outcomes(num_repeats: int, num_settings: int, num_records: int, seed: int = 0) -> np.ndarray:
    """Outcomes with effects of records, of setting and record, and of chance."""
    generator = np.random.default_rng(seed)
    record = generator.normal(0, 0.3, num_records)
    own = generator.normal(0, 0.2, (num_settings, num_records))
    return record + own + generator.normal(0, 0.3, (num_repeats, num_settings, num_records))


# Dunnett (1955), table 1a: one-sided, level 0.05.
@pytest.mark.parametrize(
    ("num_comparisons", "degrees", "expected"),
    [(1, 5, 2.02), (2, 5, 2.44), (9, 5, 3.30), (3, 10, 2.34), (5, 20, 2.39), (9, 60, 2.48)],
)
def test_critical_values_are_dunnetts(num_comparisons: int, degrees: int, expected: float) -> None:
    assert critical_value(num_comparisons, float(degrees), 0.05) == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(("num_others", "degrees"), [(1, 2), (2, 4), (5, 12)])
def test_critical_values_of_winners_are_those_of_equal_settings(num_others: int, degrees: int) -> None:
    generator = np.random.default_rng(0)
    scores = np.sort(generator.normal(size=(200_000, num_others + 1)), axis=1)
    error = np.sqrt(2 * generator.chisquare(degrees, len(scores)) / degrees)
    value = critical_value_of_winners(num_others, float(degrees), 0.05)
    assert ((scores[:, -1] - scores[:, -2]) / error > value).mean() == pytest.approx(0.05, abs=0.003)


def test_two_settings_are_judged_by_the_paired_t_test() -> None:
    first = np.array([0.0, 0.0, 0.0, 0.0])
    for second in ([1.0, 2.0, 3.0, 1.2], [1.0, 2.0, 3.0, -0.4]):
        expected = stats.ttest_rel(second, first).pvalue < LEVEL_SHARE * LEVEL
        found = Layout(np.stack([first, np.array(second)], axis=1)).between(1, 0, "")
        assert found.is_distinguishable == expected


@pytest.mark.parametrize("scores", [[1.0, 1.3, 1.1], [1.0, 1.9, 1.1]])
def test_gain_with_a_variance_of_its_own_is_judged_by_the_t_test(scores: list[float]) -> None:
    within = (float(np.var(scores, ddof=1)), 2)
    layout = Layout(
        np.array([[np.mean(scores)]]), np.zeros((1, 1)), within=within, counts=(3,), within_gains=within
    )
    found = layout.over_start(0, "")
    assert found is not None
    assert found.standard_error == pytest.approx(stats.sem(scores))
    assert found.is_distinguishable == (stats.ttest_1samp(scores, 0).pvalue / 2 < LEVEL_SHARE * LEVEL)


@pytest.mark.parametrize("shared", [0.0, 1.0, 4.0])
def test_unpaired_gains_are_called_wrongly_as_seldom_as_is_allowed(shared: float) -> None:
    """Whatever the settings have in common: settings and starts are all alike, and all starts are zero."""
    num_sweeps, num_repeats, num_settings = 4000, 5, 6
    generator = np.random.default_rng(0)
    repeats = generator.normal(0, shared, (num_sweeps, num_repeats, 1))
    gains = repeats + generator.normal(size=(num_sweeps, num_repeats, num_settings))
    errors = np.sqrt(gains.var(axis=1, ddof=1).mean(axis=1) / num_repeats)
    value = critical_value_of_any_share(num_settings, num_repeats - 1.0, LEVEL_SHARE * LEVEL)
    wrong = float((gains.mean(axis=1).max(axis=1) > value * errors).mean())
    assert wrong <= LEVEL_SHARE * LEVEL + 2 * np.sqrt(LEVEL_SHARE * LEVEL / num_sweeps)


def test_one_setting_is_judged_against_its_start_by_the_paired_t_test() -> None:
    for scores in ([1.0, 1.3, 1.1], [1.0, 1.9, 1.1]):
        expected = stats.ttest_1samp(scores, 0).pvalue / 2 < LEVEL_SHARE * LEVEL
        found = Layout(np.array(scores)[:, None], np.zeros((3, 1))).over_start(0, "")
        assert found is not None
        assert found.is_distinguishable == expected


def test_lead_that_is_large_against_the_noise_is_distinguishable_whatever_the_repeats_share() -> None:
    found = sweep(lead=8)
    assert all(found.between(0, other, "").verdict == HIGHER for other in range(1, 6))
    assert found.between(1, 0, "").verdict == LOWER
    assert found.between(1, 2, "").verdict == WITHIN_NOISE


def test_gain_that_is_large_against_the_noise_is_distinguishable() -> None:
    verdicts = [sweep(gain=gain).over_start(0, "start") for gain in (20, 0, -20)]
    assert [each and each.verdict for each in verdicts] == [HIGHER, WITHIN_NOISE, LOWER]


def test_variance_of_a_difference_is_that_of_the_crossed_layout() -> None:
    whole = outcomes(3, 2, 40)
    difference = whole[:, 0] - whole[:, 1]
    repeats, records = difference.shape
    residual = difference - difference.mean(0) - difference.mean(1, keepdims=True) + difference.mean()
    mean_squares = (
        records * difference.mean(1).var(ddof=1),
        repeats * difference.mean(0).var(ddof=1),
        (residual**2).sum() / ((repeats - 1) * (records - 1)),
    )
    by_repeat, by_record, both = (each / (repeats * records) for each in mean_squares)
    found = Layout(whole.mean(axis=2), None, RecordSpread.of(whole)).between(0, 1, "")
    assert found.standard_error is not None
    expected = max(by_repeat + by_record - both, by_repeat, by_record)
    assert found.standard_error**2 == pytest.approx(expected)


def test_few_records_make_a_lead_uncertain_that_all_repeats_agree_on() -> None:
    settled = np.tile(outcomes(1, 3, 100), (3, 1, 1))  # all repeats give the same answers
    lead = settled.mean(axis=2)
    assert lead[0].argmax() != lead[0].argmin()
    best, worst = int(lead[0].argmax()), int(lead[0].argmin())
    assert Layout(lead).between(best, worst, "").is_distinguishable  # repeats alone: no chance at all
    assert not Layout(lead, None, RecordSpread.of(settled)).between(best, worst, "").is_distinguishable


def test_one_repeat_is_judged_by_the_records_alone() -> None:
    whole = outcomes(1, 3, 200)
    alone = Layout(whole.mean(axis=2), None, RecordSpread.of(whole))
    assert alone.sources == "test records"
    found = alone.between(0, 1, "").standard_error
    assert found == pytest.approx((whole[0, 0] - whole[0, 1]).std(ddof=1) / 200**0.5)


def test_one_repeat_without_records_tells_nothing() -> None:
    found = Layout(np.array([[0.1, 0.9]]), np.zeros((1, 2)))
    over_start = found.over_start(1, "")
    assert over_start is not None
    assert found.sources == "nothing"
    for each in (found.between(1, 0, ""), over_start):
        assert (each.verdict, each.standard_error) == (WITHIN_NOISE, None)


def test_start_without_outcomes_counts_as_independent() -> None:
    whole = outcomes(3, 2, 50) + 0.5
    starts = np.full((3, 2), 0.5)
    found = Layout(whole.mean(axis=2), starts, RecordSpread.of(whole)).over_start(0, "")
    assert found is not None
    assert found.standard_error is not None
    assert found.standard_error**2 >= 0.25 / 50


def test_known_noise_is_the_least_chance_of_a_score() -> None:
    scores = np.array([[0.5, 0.6], [0.51, 0.61]])
    assert Layout(scores).between(0, 1, "").is_distinguishable
    assert not Layout(scores, noise_variance=0.1**2).between(0, 1, "").is_distinguishable


def test_setting_that_saves_is_taken_within_one_standard_error() -> None:
    scores = np.array([[0.80, 0.799, 0.70], [0.82, 0.819, 0.72], [0.81, 0.8101, 0.71]])
    dear, cheap = Cost(epsilon=1.0, num_views=300), Cost(epsilon=1.0, num_views=100)
    near = np.array([[0.1], [-0.1], [0.0]]) * [[1, -1, 0]] * 0.02 + scores
    assert Layout(near).recommend([dear, cheap, dear]) == 1
    assert Layout(near).recommend([dear, dear, cheap]) == 0  # beyond one standard error
    assert Layout(near).recommend([dear, Cost(epsilon=1.0, num_views=201), dear]) == 0  # saves too little
    assert Layout(near).recommend([cheap, Cost(epsilon=0.5, num_views=300), dear]) == 0  # costs more views


def test_lowest_setting_is_never_taken() -> None:
    scores = np.array([[0.80, 0.81], [0.82, 0.81]]) + np.array([0.001, 0.0])
    costs = [Cost(epsilon=1.0, num_views=300), Cost(epsilon=1.0, num_views=100)]
    assert Layout(scores).recommend(costs) == 0


def test_repeats_that_are_said_to_be_needed_show_the_lead() -> None:
    generator = np.random.default_rng(4)
    scores = generator.normal([2.0, 0.0, 0.0], 1.0, (3, 3))
    order = np.argsort(scores.mean(axis=0))
    layout = Layout(scores)
    best, second = int(order[-1]), int(order[-2])
    needed = layout.repeats_to_show(best, second)
    assert needed is not None
    lead, error = float(scores.mean(0)[best] - scores.mean(0)[second]), layout.between(best, second, "")
    assert error.standard_error is not None
    for repeats, shown in ((needed - 1, False), (needed, True)):
        value = critical_value(2, 2.0 * (repeats - 1), LEVEL)
        value = max(value, critical_value_of_winners(2, 2.0 * (repeats - 1), LEVEL_SHARE * LEVEL))
        assert (lead > value * error.standard_error * (3 / repeats) ** 0.5) == shown


def share_of_errors(cell: Cell, num_sweeps: int) -> float:
    generator, flat = np.random.default_rng(0), np.zeros(cell.num_settings)
    layouts = (draw_layout(cell, flat, 0.0, generator) for _ in range(num_sweeps))
    return sum(has_winner(each) or has_gain(each) for each in layouts) / num_sweeps


@pytest.mark.ci
def test_flat_sweeps_have_no_winner_and_no_gain_in_95_of_100() -> None:
    some = list(cells())[::13]
    shares = [share_of_errors(cell, 200) for cell in some]
    assert sum(shares) / len(shares) <= LEVEL
    assert max(shares) <= LEVEL + 3 * (LEVEL / 200) ** 0.5
