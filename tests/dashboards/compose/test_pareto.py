"""Utility against ε: of one training, and of the whole sweep with its tuning."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from dashboards.compose.fronts import EPSILON_ONE, EPSILON_WHOLE
from dashboards.compose.pareto import pareto_of
from dashboards.dashboard_error import DashboardError

SHARED = {"data_is": "public", "target_delta": 1e-5, "dataset": "digits", "scored_on": "digits", "repeat": 0}


def sweep(name, tuned, rows, **changes):
    """Trials from (ε, guarantee, score)."""
    return pd.DataFrame(
        [
            SHARED
            | {"sweep": name, "sweep_run_id": name, "tuned_epsilon": tuned, "trial": f"t{i}"}
            | {"target_epsilon": epsilon, "epsilon": epsilon, "guarantee_label": label, "knn_accuracy": score}
            | changes
            for i, (epsilon, label, score) in enumerate(rows)
        ]
    )


CHEAP = sweep("cheap", "3.5", [(1.0, "proven", 0.5), (2.0, "proven", 0.55), (2.0, "proven", 0.4)])
COSTLY = sweep("costly", "20", [(1.0, "proven", 0.6), (4.0, "proven", 0.7), (math.inf, "none", 0.9)])


def on(numbers, column):
    rows = numbers[numbers[f"on_front_{column}"]]
    return {(row["sweep"], row["trial"]) for _, row in rows.iterrows()}


def test_fronts_of_one_training_and_of_the_sweep_differ():
    _, numbers = pareto_of([CHEAP, COSTLY])
    assert on(numbers, EPSILON_ONE) == {("costly", "t0"), ("costly", "t1")}
    assert on(numbers, EPSILON_WHOLE) == {("cheap", "t1"), ("costly", "t1")}


def test_epsilon_of_the_sweep_is_the_recorded_one_of_all_its_trainings():
    _, numbers = pareto_of([CHEAP, COSTLY])
    private = numbers[numbers["guarantee"] == "proven"]
    assert private.groupby("sweep")[EPSILON_WHOLE].unique().map(list).to_dict() == {
        "cheap": [3.5],
        "costly": [20.0],
    }


def test_trial_without_guarantee_or_sweep_without_account_is_on_no_front():
    lost = sweep("lost", "none", [(0.5, "proven", 0.99)])
    _, numbers = pareto_of([COSTLY, lost])
    assert ("costly", "t2") not in on(numbers, EPSILON_ONE)
    assert ("lost", "t0") in on(numbers, EPSILON_ONE)
    assert ("lost", "t0") not in on(numbers, EPSILON_WHOLE)


def test_both_panels_share_one_scale():
    content, _ = pareto_of([CHEAP, COSTLY])
    first, second = content.panels
    assert (first.axis.low, first.axis.high) == (second.axis.low, second.axis.high)
    assert first.axis.ticks == second.axis.ticks


def test_private_data_show_no_trial_without_a_guarantee():
    content, numbers = pareto_of([COSTLY.assign(data_is="private")])
    assert set(numbers["guarantee"]) == {"proven"}
    assert any("not shown" in note for note in content.notes)


def test_scores_of_different_data_are_refused():
    with pytest.raises(DashboardError, match="data sets"):
        pareto_of([CHEAP, COSTLY.assign(dataset="cifar10")])
