"""MLflow → table: types, order and choice of the sweep."""

from __future__ import annotations

import math

import pytest

from dashboards.__main__ import main
from dashboards.dashboard_error import DashboardError
from dashboards.query.sweeps import list_sweeps
from dashboards.query.trial_frames import load_trials
from dpgcl_core.errors import TrackingError
from tests.trainers.databases import open_tracker
from trainers.tracking.runs import PARENT_TAG, search_runs


@pytest.fixture(scope="module")
def loaded(tracking):
    return load_trials(tracking[0], "new")


def test_load_trials_returns_one_row_per_finished_trial(tracking, loaded):
    assert len(loaded) == len(tracking[1])


def test_load_trials_takes_the_sweep_started_last_by_default(tracking, loaded):
    assert set(load_trials(tracking[0])["sweep"]) == {"new"}


def test_load_trials_of_a_named_sweep_returns_only_its_trials(tracking):
    assert len(load_trials(tracking[0], "old")) == 1


def test_load_trials_types_the_params(loaded):
    row = loaded.iloc[0]
    assert (row["group_size"], row["target_epsilon"], row["target_delta"]) == (2, 10.0, 1.5e-6)


def test_load_trials_keeps_group_sizes_as_numbers_and_batch_as_text(loaded):
    assert list(dict.fromkeys(loaded["group_size"])) == [2, 8, 64, "batch"]
    assert {type(size) for size in loaded["group_size"]} == {int, str}


def test_load_trials_sorts_batch_last(loaded):
    assert loaded["group_size_order"].is_monotonic_increasing
    assert loaded["group_size"].iloc[-1] == "batch"


def test_load_trials_returns_the_metrics_to_the_last_digit(tracking, loaded):
    assert sorted(loaded["knn_accuracy"]) == sorted(tracking[1]["knn_accuracy"])


def test_load_trials_returns_infinite_epsilon_as_infinity(loaded):
    spent = loaded.loc[loaded["target_epsilon"] == math.inf, "epsilon"]
    assert set(spent) == {math.inf}


def test_load_trials_fills_what_only_the_sweep_knows(loaded):
    assert set(loaded["dataset"]) == {"fashion_mnist"}


def test_load_trials_leaves_a_missing_metric_missing(loaded):
    assert loaded.loc[loaded["target_epsilon"] == math.inf, "snr_first_step"].isna().all()


def test_load_trials_leaves_out_unfinished_trials(tmp_path):
    tracker = open_tracker(tmp_path)
    parent = tracker.start_sweep("s", {}, {})
    for name in ("a", "b"):
        tracker.log_trial(parent, name, {"repeat": 0}, {"epsilon": 1.0}, {}, {})
    runs = search_runs(tracker.client, [tracker.experiment_id], {PARENT_TAG: parent})
    tracker.client.update_run(runs[0].info.run_id, status="RUNNING")
    assert list(load_trials(f"sqlite:///{tmp_path}/mlflow.db")["trial"]) == ["a"]


def test_load_trials_of_an_unknown_sweep_names_the_nearest(tracking):
    with pytest.raises(DashboardError, match="did you mean 'new'"):
        load_trials(tracking[0], "nwe")


def test_load_trials_of_a_sweep_without_finished_trials_says_so(tracking):
    with pytest.raises(DashboardError, match="no finished trial"):
        load_trials(tracking[0], "empty")


def test_load_trials_from_a_missing_database_makes_none(tmp_path):
    with pytest.raises(TrackingError, match="no MLflow database"):
        load_trials(f"sqlite:///{tmp_path}/mlflow.db")
    assert not list(tmp_path.iterdir())


def test_list_sweeps_has_the_newest_first_with_its_finished_trials(tracking):
    sweeps = list_sweeps(tracking[0])
    assert list(sweeps["sweep"]) == ["new", "old", "empty"]
    assert list(sweeps["num_finished_trials"]) == [len(tracking[1]), 1, 0]


@pytest.fixture
def with_sealed(tmp_path):
    """An open sweep without trials, and a sealed one, whose run has no time."""
    tracker = open_tracker(tmp_path)
    tracker.start_sweep("visible", {}, {})
    tags = {"release_mode": "sealed", "tuned_epsilon": "2.87"}
    tracker.log_sealed("hidden", {}, {"knn_accuracy": 0.8}, tags, sweep_id="1")
    return f"sqlite:///{tmp_path}/mlflow.db"


def test_list_sweeps_shows_a_sealed_sweep_without_time_and_number(with_sealed):
    sweeps = list_sweeps(with_sealed).set_index("sweep")
    assert list(sweeps["release_mode"]) == ["open", "sealed"]
    assert sweeps.loc["hidden", "tuned_epsilon"] == "2.87"
    assert sweeps.loc["hidden", ["started", "num_finished_trials"]].isna().all()


@pytest.mark.parametrize(
    ("labels", "shown"),
    [(["proven"], "3.5"), (["proven", "none"], "3.5, proven trials only"), ([], "3.5 planned")],
)
def test_list_sweeps_says_what_its_epsilon_is_of(tmp_path, labels, shown):
    tracker = open_tracker(tmp_path)
    parent = tracker.start_sweep("sweep", {}, {"tuned_epsilon": "3.5"})
    for number, label in enumerate(labels):
        tracker.log_trial(parent, f"t{number}", {}, {}, {}, {"guarantee_label": label})
    assert list(list_sweeps(f"sqlite:///{tmp_path}/mlflow.db")["tuned_epsilon"]) == [shown]


def test_load_trials_of_a_sealed_sweep_says_why_there_are_none(with_sealed):
    with pytest.raises(DashboardError, match="sealed: it published one run"):
        load_trials(with_sealed, "hidden")


def test_list_command_prints_a_sealed_sweep(with_sealed, capsys):
    assert main(["list", "--tracking-uri", with_sealed]) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row == ["hidden", "sealed", "FINISHED", "sealed", "sealed", "2.87", "experiment"]


def test_list_sweeps_without_any_is_an_error(tmp_path):
    open_tracker(tmp_path)
    with pytest.raises(DashboardError, match="no sweep"):
        list_sweeps(f"sqlite:///{tmp_path}/mlflow.db")
