"""Importance of a search's settings, by Optuna's evaluators."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dashboards.compose import importance
from dashboards.compose.importance import importance_of
from dashboards.errors import DashboardError


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(importance, "_RESAMPLES", 2)


def search(num_trials, **changes):
    """Trials whose score follows the learning rate and nothing else."""
    random = np.random.default_rng(0)
    rates = 10 ** random.uniform(-4, -1, num_trials)
    return pd.DataFrame(
        {
            "trial_number": range(1, num_trials + 1),
            "learning_rate": rates,
            "temperature": random.uniform(0.1, 1, num_trials),
            "group_size": pd.Series(random.choice([4, 16, "batch"], num_trials), dtype=object),
            "knn_accuracy": 0.9 - 0.1 * (np.log10(rates) + 2.5) ** 2,
            "searched": "learning_rate, temperature, group_size",
            "objective": "knn_accuracy",
            "target_epsilon": 10.0,
            "guarantee_label": "proven",
            "data_is": "public",
            "dataset": "digits",
            "repeat": 0,
            "run_id": [f"run{i}" for i in range(num_trials)],
        }
        | changes
    )


@pytest.mark.ci
def test_setting_that_the_score_follows_is_the_most_important():
    _, numbers = importance_of(search(60))
    shares = numbers.pivot_table(index="setting", columns="evaluator", values="importance")
    assert (shares.idxmax() == "learning_rate").all()
    assert shares.sum().to_list() == pytest.approx([1.0] * 3)


def test_too_few_trials_are_said_and_fewer_refused():
    content, _ = importance_of(search(6))
    assert content.notes[0].startswith("TOO FEW TRIALS: 6 for 3 settings")
    with pytest.raises(DashboardError, match="got 3"):
        importance_of(search(3))


def test_trials_without_noise_do_not_count_beside_private_ones():
    trials = search(8)
    trials.loc[:1, ["target_epsilon", "guarantee_label", "knn_accuracy"]] = [np.inf, "none", 0.99]
    _, numbers = importance_of(trials)
    assert set(numbers["num_trials"]) == {6}


def test_search_without_a_score_or_a_setting_that_varies_is_refused():
    with pytest.raises(DashboardError, match="no trial has a score"):
        importance_of(search(8, knn_accuracy=float("nan")))
    with pytest.raises(DashboardError, match="none"):
        importance_of(search(8, searched="network_name"))
