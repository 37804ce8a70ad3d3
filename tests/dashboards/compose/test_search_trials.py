"""What a search found: its trials in order, searched settings, and the fronts of private trials."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from dashboards.compose.figure import content_of, numbers_of
from dashboards.compose.search_trials import searched_columns


def trials_of(rows, **shared):
    """Trials from (learning rate, ε, guarantee, score)."""
    fixed = {"data_is": "public", "target_delta": 1e-5, "dataset": "digits", "repeat": 0, "public_seed": 0}
    fixed |= {"sweep": "one", "tuned_epsilon": "20"}
    return pd.DataFrame(
        [
            fixed
            | {"trial": f"t{i}", "run_id": f"run{i}", "learning_rate": rate, "target_epsilon": epsilon}
            | {"guarantee_label": label, "knn_accuracy": score, "epsilon": epsilon, "sensitivity": rate}
            | shared
            for i, (rate, epsilon, label, score) in enumerate(rows, start=1)
        ]
    )


FRONT = [
    (0.1, 1.0, "proven", 0.5),
    (0.2, 2.0, "proven", 0.7),
    (0.3, 2.0, "proven", 0.6),
    (0.4, 4.0, "proven", 0.65),
    (0.5, 0.5, "as-published", 0.9),
    (0.6, math.inf, "none", 0.95),
]


def curve(content, label, panel):
    return next(c for c in content.panels[panel].curves if c.style.label == label)


def test_search_lists_its_trials_by_score():
    rows = [(0.1 * i, 10.0, "proven", 0.5 + 0.01 * i) for i in range(1, 13)]
    shuffled = trials_of(rows).sample(frac=1, random_state=0)
    table = content_of(shuffled, "search").tables[0][1]
    assert [row[0] for row in table.rows] == [f"t{number}" for number in range(12, 0, -1)]
    assert not table.bold


def test_search_keeps_the_numbers_that_the_sweep_recorded():
    trials = trials_of(FRONT[:3]).assign(trial_number=[4, 1, 2])  # the third one failed
    assert set(numbers_of(trials, "search")["trial_number"]) == {1, 2, 4}


def test_search_front_has_the_private_trials_that_none_beats():
    content = content_of(trials_of(FRONT), "search")
    rings = next(c for c in content.panels[0].curves if c.style.ring)
    assert list(zip(rings.names, rings.mean, strict=True)) == [
        ("1, t1", pytest.approx(50)),
        ("2, t2", pytest.approx(70)),
    ]


def test_search_front_at_the_cost_of_its_tuning_is_the_best_trial_alone():
    """Every trial of one search costs the same once the choice among them is counted."""
    rings = next(c for c in content_of(trials_of(FRONT), "search").panels[1].curves if c.style.ring)
    assert list(zip(rings.names, rings.mean, strict=True)) == [("20, t2", pytest.approx(70))]


def test_search_places_unproven_trials_at_no_epsilon():
    content = content_of(trials_of(FRONT), "search")
    assert curve(content, "one, no proven guarantee", 0).names == ["none, t5", "none, t6"]


def test_search_draws_both_epsilons_and_leaves_its_settings_to_optuna():
    labels = [panel.axis.label for panel in content_of(trials_of(FRONT), "search").panels]
    assert labels == ["ε of one training", "ε of the whole sweep"]


def test_search_takes_the_settings_that_the_sweep_names():
    trials = trials_of(FRONT, searched="learning_rate").assign(temperature=[0.1 * i for i in range(1, 7)])
    shown = trials.assign(guarantee=trials["guarantee_label"], trial_number=range(1, 7))
    assert searched_columns(shown) == ["learning_rate"]


def test_search_draws_the_objective_that_the_sweep_names():
    trials = trials_of(FRONT, objective="linear_probe_accuracy").assign(linear_probe_accuracy=0.1)
    assert content_of(trials, "search").panels[0].y_label == "Linear probe accuracy (%)"


def test_search_of_private_data_shows_proven_trials_alone():
    numbers = numbers_of(trials_of(FRONT, data_is="private"), "search")
    assert set(numbers["guarantee"]) == {"proven"}


def test_search_without_scores_says_so():
    content = content_of(trials_of(FRONT).drop(columns="knn_accuracy"), "search")
    assert content.rows == []
    assert "No scores: none was recorded." in content.notes
