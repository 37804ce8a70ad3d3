"""Differences are paired over repeats and called resolved above two standard errors only."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from dashboards.compose import differences
from dashboards.compose.questions import QUESTIONS


def _trials(scores: dict[object, list[float]], untrained: list[float]) -> pd.DataFrame:
    rows = [
        {
            "group_size": size,
            "target_epsilon": 10.0,
            "num_augmentations": 1,
            "repeat": repeat,
            "data_is": "public",
            "knn_accuracy": value,
            "untrained_knn_accuracy": untrained[repeat],
        }
        for size, values in scores.items()
        for repeat, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def differences_table(trials: pd.DataFrame) -> pd.DataFrame:
    return differences.differences_table(trials, QUESTIONS["group-size"])


def _row(table: pd.DataFrame, size: object, minus: str) -> pd.Series:
    (row,) = (r for _, r in table.iterrows() if r["group_size"] == size and r["minus"] == minus)
    return row


TRIALS = _trials({4: [0.70, 0.80, 0.90], 8: [0.71, 0.78, 0.91], "batch": [0.60, 0.71, 0.79]}, [0.5, 0.6, 0.7])


def test_difference_is_paired_over_repeats() -> None:
    row = _row(differences_table(TRIALS), 4, "batch")
    assert row["difference"] == pytest.approx(0.1)
    assert row["standard_error"] == pytest.approx(0.01 / math.sqrt(3), rel=1e-6)
    assert row["verdict"] == "higher"  # unpaired, with standard errors of 0.06, it would not be resolved


def test_small_difference_is_not_resolved() -> None:
    assert _row(differences_table(TRIALS), 8, "best, S = 4")["verdict"] == "not resolved"


def test_worse_group_size_is_lower() -> None:
    assert _row(differences_table(TRIALS), "batch", "untrained")["verdict"] == "higher"
    worse = _trials({4: [0.4, 0.5, 0.6], "batch": [0.6, 0.7, 0.8]}, [0.5, 0.6, 0.701])
    assert _row(differences_table(worse), 4, "untrained")["verdict"] == "lower"


def test_sampled_groups_are_held_against_sampled_records_and_the_whole_batch() -> None:
    groups = _trials({4: [0.75, 0.86, 0.94]}, [0.5, 0.6, 0.7]).assign(sampled="groups")
    table = differences_table(pd.concat([groups, TRIALS.assign(sampled="records")], ignore_index=True))
    ours, theirs = (table[table["sampled"] == name] for name in ("groups", "records"))
    assert _row(ours, 4, "records sampled")["difference"] == pytest.approx(0.05)
    assert _row(ours, 4, "records sampled")["verdict"] == "higher"
    assert _row(ours, 4, "batch")["difference"] == pytest.approx(0.15)
    assert "records sampled" not in set(theirs["minus"])
    at_another_epsilon = TRIALS.assign(sampled="records", target_epsilon=1.0)
    table = differences_table(pd.concat([groups, at_another_epsilon], ignore_index=True))
    assert set(table.loc[table["sampled"] == "groups", "minus"]) == {"untrained"}


def test_one_repeat_resolves_nothing() -> None:
    table = differences_table(TRIALS[TRIALS["repeat"] == 0])
    assert set(table["verdict"]) == {"not resolved"}
