"""Series from MLflow: histories, relative loss, and what private data withhold."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from dashboards.__main__ import main
from dashboards.compose.figure import content_of, numbers_of
from dashboards.dashboard_error import DashboardError
from dashboards.figures import load_for
from dashboards.query.trial_frames import load_trials, series_of
from tests.trainers.databases import open_tracker

PARAMS = {"target_epsilon": 10.0, "dataset": "digits", "target_delta": 1e-5}
LOSSES = {0: [4.0, 3.0, 1.0], 1: [2.0, 1.0, 1.0]}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Address of a sweep with two repeats, and of one that recorded nothing on the way."""
    folder = tmp_path_factory.mktemp("mlflow")
    tracker = open_tracker(folder)
    tags = {"data_is": "public", "guarantee_label": "proven"}
    for sweep in ("silent", "told"):
        parent = tracker.start_sweep(sweep, {}, {})
        for repeat, losses in LOSSES.items():
            series = {
                "train_loss": [(10 * i, loss) for i, loss in enumerate(losses)],
                "knn_accuracy_during": [(0, 0.5), (20, 0.7 + 0.1 * repeat)],
            }
            params = PARAMS | {"repeat": repeat}
            told = series if sweep == "told" else {}
            tracker.log_trial(parent, f"t{repeat}", params, {"knn_accuracy": 0.7}, told, tags)
    return f"sqlite:///{folder / 'mlflow.db'}"


def test_series_returns_a_row_per_trial_and_step(recorded):
    series = series_of(recorded, load_trials(recorded, "told"), "train_loss")
    found = {repeat: list(rows["train_loss"]) for repeat, rows in series.groupby("repeat")}
    assert found == LOSSES
    assert list(series["step"].unique()) == [0, 10, 20]


def test_series_keeps_the_trials_settings(recorded):
    assert set(series_of(recorded, load_trials(recorded, "told"), "train_loss")["target_epsilon"]) == {10.0}


def test_series_of_an_unrecorded_metric_is_empty(recorded):
    assert series_of(recorded, load_trials(recorded, "silent"), "train_loss").empty


def test_convergence_of_a_sweep_without_series_says_what_to_do(recorded):
    with pytest.raises(DashboardError, match="record_every_steps"):
        load_for("convergence", recorded, "silent")


def test_convergence_loss_is_relative_to_each_trials_first_step(recorded):
    content = content_of(load_for("convergence", recorded, "told"), "convergence")
    curve = content.panels[1].curves[0]
    assert curve.mean == pytest.approx([1.0, (3 / 4 + 1 / 2) / 2, (1 / 4 + 1 / 2) / 2])
    assert curve.standard_error[1] == pytest.approx(abs(3 / 4 - 1 / 2) / 2)


def test_convergence_scores_are_means_over_repeats_in_per_cent(recorded):
    content = content_of(load_for("convergence", recorded, "told"), "convergence")
    assert content.panels[0].y_label == "k-NN accuracy (%)"
    assert content.panels[0].curves[0].mean == pytest.approx([50, 75])


def test_convergence_of_private_data_has_no_loss(recorded):
    series = load_for("convergence", recorded, "told").assign(data_is="private")
    assert [p.y_label for p in content_of(series, "convergence").panels] == ["k-NN accuracy (%)"]
    assert not [name for name in numbers_of(series, "convergence") if "loss" in name]


def test_convergence_counts_trials_and_not_rows(recorded):
    numbers = numbers_of(load_for("convergence", recorded, "told"), "convergence")
    assert set(numbers["num_trials"]) == {2}


def test_convergence_of_a_first_loss_of_zero_is_left_out(recorded):
    series = load_for("convergence", recorded, "told").replace({"train_loss": {4.0: 0.0}})
    curve = content_of(series, "convergence").panels[1].curves[0]
    assert all(math.isfinite(mean) for mean in curve.mean)
    assert set(curve.num_repeats) == {1}


@pytest.mark.ci
def test_command_draws_convergence_of_the_latest_sweep(recorded, tmp_path):
    arguments = ["--question", "convergence", "--tracking-uri", recorded, "--output", str(tmp_path)]
    assert main(["figure", *arguments]) == 0
    assert (tmp_path / "convergence.csv").exists()


def test_convergence_of_any_sweep_has_a_curve_for_each_setting(recorded):
    series = load_for("convergence", recorded, "told")
    both = pd.concat(
        [series.assign(group_size=size, run_id=series["run_id"] + str(size)) for size in (16, 2, "batch")]
    )
    labels = [c.style.label for c in content_of(both, "convergence").panels[0].curves]
    assert labels == ["ε = 10, S = 2", "ε = 10, S = 16", "ε = 10, S = batch"]
