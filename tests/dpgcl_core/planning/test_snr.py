"""The expected SNR: against the tables that are committed, and against itself."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.answers import RESULTS, Summary, read_answer
from dashboards.compose.decision import HIGHER, LOWER
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.planning import snr
from dpgcl_core.planning.snr import alignment_size_of, expected_snr, group_alignment, too_small
from dpgcl_core.sampling.groups import BATCH
from tests.dpgcl_core.planning.alignment import TABLES, measured, size_of_table

ROWS = [row for table in TABLES for row in measured(table)]
CALIBRATION = "calibration"
ANSWERED = (
    *("group_size_fashion_mnist", "group_size_samplings_fashion_mnist"),
    *("regime_epsilon_10", f"{CALIBRATION}/regime_epsilon_1"),
)
"""Tables with first-step SNRs, a row of the whole batch and an answer; those on Fashion-MNIST first."""


def mechanism(**changes: Any) -> Mechanism:
    """A training on 60,000 records, some of its numbers replaced."""
    numbers = {
        "num_records_public": 60_000,
        "sampling_prob": 1024 / 60_000,
        "group_size": 16,
        "l2_clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "num_steps": 100,
        "target_delta": 1.5e-6,
    }
    return Mechanism(**{**numbers, **changes})  # type: ignore[arg-type]


def header(table: str, symbol: str) -> float:
    """A number of a table's header, such as σ."""
    found = re.search(rf"\b{symbol} = ([\d.]+)", (RESULTS / f"{table}.md").read_text())
    assert found is not None
    return float(found.group(1))


@dataclass(frozen=True)
class Answered:
    """A private setting of an answered table.

    Attributes:
      snr: expected over the training, with the table's own noise on all weights.
      gains: distinguishable above its start.
      is_lower: distinguishable below the highest at its ε.
    """

    snr: float
    gains: bool
    is_lower: bool


def answered(table: str) -> list[Answered]:
    """The settings of a table that holds rows of the whole batch, whose alignment is 1."""
    summary, found = Summary(RESULTS / f"{table}.csv"), []
    batch, num_steps = header(table, "B"), header(table, "T")
    whole = summary.settings[summary.settings["group_size"] == BATCH].set_index("target_epsilon")
    for each in read_answer(table).settings:
        size, assumed = each.values["group_size"], batch
        unit = float(whole["snr_first_step_mean"][each.cost.epsilon])
        if size != BATCH:
            assumed = size
            unit *= batch / size * (2 if each.values.get("sampled") == "groups" else 1)
        expected = unit * math.sqrt(num_steps * snr.common_share(assumed))
        start, best = each.over_start, each.over_best
        assert start is not None
        found.append(Answered(expected, start.verdict == HIGHER, best is not None and best.verdict == LOWER))
    return found


def test_alignment_size_is_that_of_the_tables() -> None:
    sizes = [size_of_table(measured(table)) for table in TABLES]
    assert statistics.geometric_mean(sizes) == pytest.approx(snr.ALIGNMENT_SIZE, rel=0.01)


def test_noise_has_the_norm_that_the_model_says() -> None:
    """The whole batch as one group has a clipped norm of C, so its SNR is C/(σΔ√d), with d = 8,280."""
    table = f"{CALIBRATION}/group_size_fashion_mnist"
    told = mechanism(
        group_size="batch", sampling_prob=header(table, "B") / 60_000, noise_multiplier=header(table, "σ")
    )
    line = next(each for each in (RESULTS / f"{table}.csv").read_text().splitlines() if "batch,10.0" in each)
    assert expected_snr(told, 8280).bound == pytest.approx(float(line.split(",")[10]), rel=0.01)


def test_expected_snr_of_a_step_is_near_every_measured_one() -> None:
    shares = [group_alignment(row.num_groups, row.group_size) / row.alignment for row in ROWS]
    assert len(shares) == 9
    assert min(shares) > 0.66
    assert max(shares) < 2


def test_least_snr_lies_between_the_rows_without_and_with_a_gain() -> None:
    rows = [row for table in ANSWERED for row in answered(table)]
    low = [row for row in rows if row.snr < snr.LEAST_TRAINING_SNR]
    largest, smallest = max(row.snr for row in low), min(row.snr for row in rows if row.gains)
    assert (largest, smallest) == pytest.approx((0.10, 0.99), abs=0.005)
    assert math.sqrt(largest * smallest) == pytest.approx(snr.LEAST_TRAINING_SNR, rel=0.1)
    assert (sum(row.is_lower for row in low), len(low)) == (5, 6)
    on_fashion = [row for table in ANSWERED[:2] for row in answered(table)]
    above = [row for row in on_fashion if row.snr > snr.LEAST_TRAINING_SNR]
    assert min(row.snr for row in above) == pytest.approx(0.42, abs=0.005)
    assert not any(row.is_lower for row in above)


def test_enough_snr_is_between_those_of_the_smallest_that_are_within_noise_of_the_highest() -> None:
    smallest = [
        min(row.snr for row in answered(table) if not row.is_lower)
        for table in ("group_size_fashion_mnist", "regime_epsilon_10")
    ]
    assert smallest == pytest.approx([0.99, 5.1], abs=0.04)
    assert statistics.geometric_mean(smallest) == pytest.approx(snr.ENOUGH_TRAINING_SNR, rel=0.03)


def test_sampled_groups_have_twice_the_snr_of_sampled_records() -> None:
    groups, records = (expected_snr(mechanism(sampling=each), 5000) for each in ("groups", "records"))
    assert groups.bound == pytest.approx(2 * records.bound, rel=0.02)  # of whom a remainder is dropped


def test_snr_of_a_training_grows_with_the_root_of_the_steps() -> None:
    few, many = (expected_snr(mechanism(num_steps=steps), 5000) for steps in (100, 400))
    assert (few.per_step, 2 * few.over_training) == pytest.approx((many.per_step, many.over_training))


def test_one_group_agrees_with_itself_and_adds_up_no_faster_for_it() -> None:
    """A single group's gradient has the norm C, but only its common part is there in the next step, too."""
    found = expected_snr(mechanism(group_size=1024), 5000)
    assert found.per_step == pytest.approx(found.bound)
    assert found.over_training < 10 * found.bound


@pytest.mark.parametrize("method", ["dp_sgd", "logit_dp", "non_private"])
def test_other_methods_have_no_expected_snr_and_no_warning(method: str) -> None:
    private = method_named(method).label != "none"
    cap = {"batch_cap": 2000, "temperature": 0.5, "sampling": None} if private else {"noise_multiplier": 0.0}
    told = mechanism(method=method, group_size="batch", l2_clip_norm=1.0, **cap)
    assert too_small(told, 10**12) is None
    with pytest.raises(ConfigError, match="clip one gradient per disjoint group"):
        expected_snr(told, 10)


def test_warning_comes_below_the_least_snr_alone() -> None:
    told = mechanism(sampling_prob=0.125, num_steps=400, noise_multiplier=4.0)
    at_one = int(10_000 * (expected_snr(told, 10_000).over_training / snr.LEAST_TRAINING_SNR) ** 2)
    assert too_small(told, at_one) is None
    warning = too_small(told, int(1.05 * at_one))
    assert warning is not None
    assert "n and ε are too small" in warning
    assert f"at most {round(at_one, -4) // 10_000}" in warning


def test_epsilon_that_would_be_enough_is_enough() -> None:
    told, weights = mechanism(noise_multiplier=4.0), 2_000_000
    epsilon = snr.enough_epsilon(told, expected_snr(told, weights))
    assert epsilon is not None
    there = expected_snr(told.calibrated(epsilon), weights)
    assert there.over_training == pytest.approx(snr.LEAST_TRAINING_SNR, rel=0.03)


def test_no_epsilon_is_told_where_no_noise_would_do() -> None:
    warning = too_small(mechanism(), 10**12)
    assert warning is not None
    assert "no ε with protective noise would suffice" in warning


@pytest.mark.parametrize(("alignment", "groups"), [(0.5, 1), (0.05, 64), (1.1, 64)])
def test_alignment_that_no_groups_can_have_is_refused(alignment: float, groups: float) -> None:
    with pytest.raises(ConfigError, match="alignment"):
        alignment_size_of(alignment, groups, 16)


@pytest.mark.parametrize("given", [{"num_weights": 0}, {"alignment_size": 0.0}, {"alignment_size": math.nan}])
def test_numbers_out_of_range_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        expected_snr(mechanism(), **{"num_weights": 10, **given})


def test_clip_norm_changes_no_snr() -> None:
    told = mechanism()
    found = expected_snr(dataclasses.replace(told, l2_clip_norm=0.01), 5000)
    assert found.over_training == pytest.approx(expected_snr(told, 5000).over_training)


def test_warning_tells_the_batch_and_the_steps_from_n_and_epsilon() -> None:
    """At the same n and ε more records and steps would do, up to so many weights."""
    told, weights = mechanism(num_steps=2), 20_000
    warning = too_small(told, weights)
    assert warning is not None
    assert warning.startswith("B and T are too small")
    larger = snr.with_larger_steps(told)
    assert larger is not None
    assert 0.9 * told.epsilon() < larger.epsilon() <= told.epsilon()
    assert f"B = {larger.expected_batch_size:.0f} and T = {larger.num_steps} have" in warning
    more = too_small(told, 100 * weights)
    assert more is not None
    assert more.startswith("n and ε are too small")


def test_large_steps_are_left_as_they_are() -> None:
    assert snr.with_larger_steps(mechanism(sampling_prob=0.125, num_steps=400)) is None
