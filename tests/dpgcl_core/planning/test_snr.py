"""The expected SNR: against the tables that are committed, and against itself."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from typing import Any

import pytest

from benchmarks import alignment
from benchmarks.alignment import RESULTS, TABLES, measured, size_of_table
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.planning import snr
from dpgcl_core.planning.snr import alignment_size_of, expected_snr, group_alignment, too_small

ROWS = [row for table in TABLES for row in measured(table)]
MAIN_SCORES = ("knn_accuracy", "Image → text recall at 10", "Text → image recall at 10")


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


def over_training(table: str) -> dict[tuple[str, str], float]:
    """Expected SNR over the training by (S, what is sampled), with the table's own noise on all weights."""
    unit, num_steps = None, header(table, "T")
    for line in (RESULTS / f"{table}.csv").read_text().splitlines()[1:]:
        if line.startswith("batch,") and ",inf," not in line:
            names = (RESULTS / f"{table}.csv").read_text().splitlines()[0].split(",")
            unit = float(line.split(",")[names.index("snr_first_step_mean")])
    assert unit is not None
    batch = header(table, "B")
    found = {("batch", "records"): unit * math.sqrt(num_steps * snr.common_share(batch))}
    for row in measured(table):
        bound = unit * row.num_groups * (2 if row.sampled == "groups" else 1)
        common = math.sqrt(num_steps * snr.common_share(row.group_size))
        found[str(row.group_size), row.sampled] = bound * common
    return found


def gains(table: str) -> dict[tuple[str, str], bool]:
    """Whether any main score of a private row is resolved above the network that it started from."""
    found: dict[tuple[str, str], bool] = {}
    for line in (RESULTS / f"{table}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        start = next((cell for cell in ("untrained", "public start") if cell in cells), None)
        if cells[0] not in MAIN_SCORES or cells[1] == "∞" or start is None:
            continue
        key = cells[cells.index(start) - 1], "groups" if "groups" in cells else "records"
        found[key] = found.get(key, False) or cells[-1] == "higher"
    return found


def test_alignment_size_is_that_of_the_tables() -> None:
    sizes = [size_of_table(measured(table)) for table in TABLES]
    assert statistics.geometric_mean(sizes) == pytest.approx(snr.ALIGNMENT_SIZE, rel=0.01)


def test_noise_has_the_norm_that_the_model_says() -> None:
    """The whole batch as one group has a clipped norm of C, so its SNR is C/(σΔ√d), with d = 8,280."""
    table = "group_size_fashion_mnist"
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
    gained, not_gained = [], []
    for table in TABLES:
        expected, found = over_training(table), gains(table)
        assert set(found) <= set(expected)
        for key, has in found.items():
            (gained if has else not_gained).append(expected[key])
    assert (len(gained), len(not_gained)) == (9, 3)
    assert max(not_gained) == pytest.approx(0.10, abs=0.005)
    assert min(gained) == pytest.approx(0.98, abs=0.005)
    assert pytest.approx(math.sqrt(max(not_gained) * min(gained)), rel=0.1) == snr.LEAST_TRAINING_SNR


def test_enough_snr_is_that_of_the_largest_group_that_is_not_resolved_below_the_best() -> None:
    page = (RESULTS / "group_size_fashion_mnist.md").read_text()
    rows = re.findall(r"^\| \w+ \| 10 \| 1 \| (\d+) \| best, S = 2 \|.*\| ([\w ]+) \|$", page, re.MULTILINE)
    lower = {size for size, verdict in rows if verdict == "lower"}
    largest = max({size for size, _ in rows} - lower, key=int)
    assert largest == "16"
    expected = over_training("group_size_fashion_mnist")[largest, "records"]
    assert expected == pytest.approx(snr.ENOUGH_TRAINING_SNR, rel=0.03)


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
    assert "no ε with noise that protects would do" in warning


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


def test_command_that_the_constant_comes_from_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert alignment.show(json=True) == 0
    assert json.loads(capsys.readouterr().out)["alignment_size"] == pytest.approx(138, abs=0.5)
    assert alignment.show() == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("S0 = 138")
