"""Stage 12: runs in MLflow are written once, survive resumes, and failures are quick and plain."""

from __future__ import annotations

import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from dpgcl_core.errors import ConfigError, TrackingError
from dpgcl_core.release.markdown import escaped
from tests.trainers.databases import copy_empty_database
from trainers.tracking import mlflow_server as mlflow_server
from trainers.tracking import runs as tracking_runs
from trainers.tracking.runs import (
    CHANGED_TAG,
    MASKED_TIMES,
    NO_TUNING_COST,
    NOTE_TAG,
    PARENT_TAG,
    Tracker,
    search_runs,
)

PARAMS = {"group_size": 8, "target_epsilon": 10.0, "num_augmentations": 1, "repeat": 0}
METRICS = {"knn_accuracy": 0.8, "epsilon": 9.9}
SERIES = {"snr": [(0, 1.5), (10, 1.25)]}
SOON = 25.0  # seconds, on a busy machine as well: MLflow by itself waits 30 for an answer and asks again


@pytest.fixture
def storage(tmp_path):
    copy_empty_database(tmp_path)
    return tmp_path


@pytest.fixture
def tracker(storage):
    return Tracker.open(None, storage, "experiment")


def log(tracker, parent, trial="t0", **changes):
    arguments = {"params": PARAMS, "metrics": METRICS, "series": SERIES, "tags": {}} | changes
    return tracker.log_trial(parent, trial, **arguments)


def children(tracker, parent):
    return search_runs(tracker.client, [tracker.experiment_id], {PARENT_TAG: parent})


@pytest.mark.ci
def test_sweep_resumed_continues_the_same_parent_run(storage):
    first = Tracker.open(None, storage, "experiment")
    parent = first.start_sweep("s", {"target_delta": 1e-6}, {})
    first.finish_sweep(parent, "KILLED")
    again = Tracker.open(None, storage, "experiment")
    assert again.start_sweep("s", {"target_delta": 1e-6}, {}) == parent
    assert again.client.get_run(parent).info.status == "RUNNING"


def test_sweep_of_another_name_gets_its_own_parent_run(tracker):
    assert tracker.start_sweep("a", {}, {}) != tracker.start_sweep("b", {}, {})


def test_find_sweep_is_none_for_an_unknown_name(tracker):
    tracker.start_sweep("a", {}, {})
    assert tracker.find_sweep("b") is None


def test_experiment_that_another_user_makes_at_the_same_moment_is_used(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    name = tracker.client.get_experiment(tracker.experiment_id).name
    kind, first = type(tracker.client), [None]
    look = kind.get_experiment_by_name
    monkeypatch.setattr(
        kind, "get_experiment_by_name", lambda self, name: first.pop() if first else look(self, name)
    )
    assert Tracker.open(tracker.uri, tmp_path, name).experiment_id == tracker.experiment_id


def test_sweep_is_found_again_by_its_id(tracker: Tracker) -> None:
    parent = tracker.start_sweep("s", {}, {}, sweep_id="mine")
    assert tracker.start_sweep("s", {}, {}, sweep_id="mine") == parent


def test_sweep_of_the_same_name_in_another_folder_is_refused(tracker: Tracker) -> None:
    """Its finished trials would be taken for those of this one."""
    log(tracker, tracker.start_sweep("s", {}, {}, sweep_id="mine"))
    with pytest.raises(
        TrackingError, match=r"has a sweep 's' from another storage folder. Choose another --name"
    ):
        tracker.start_sweep("s", {}, {}, sweep_id="yours")


@pytest.mark.parametrize("sweep_id", ["", "begun by a driver that was killed at once"])
def test_run_that_is_nobodys_is_taken(sweep_id: str, tracker: Tracker) -> None:
    parent = tracker.start_sweep("s", {}, {}, sweep_id=sweep_id)
    assert tracker.start_sweep("s", {}, {}, sweep_id="mine") == parent
    log(tracker, parent)
    assert tracker.start_sweep("s", {}, {}, sweep_id="mine") == parent


@pytest.mark.parametrize("name", ["it's", 'say "x"', "S=8 ε=∞; `a` and b"])
def test_find_sweep_takes_any_ordinary_name(tracker, name):
    parent = tracker.start_sweep(name, {}, {})
    assert tracker.find_sweep(name) == parent


def test_sweep_with_other_settings_keeps_the_first_and_says_so(tracker):
    parent = tracker.start_sweep("s", {"num_steps": 100, "temperature": 0.2}, {})
    tracker.start_sweep("s", {"num_steps": 200, "temperature": 0.2}, {})
    data = tracker.client.get_run(parent).data
    assert (data.params["num_steps"], data.tags[CHANGED_TAG]) == ("100", "num_steps: 100 → 200")


def test_sweep_note_states_epsilon_delta_and_the_tuning_cost(tracker):
    parent = tracker.start_sweep("s", {"target_epsilons": (10.0, math.inf), "target_delta": 1.5e-6}, {})
    note = tracker.client.get_run(parent).data.tags[NOTE_TAG]
    assert all(part in note for part in ("ε: 10, ∞", "δ: 1.5e-06", NO_TUNING_COST))


def test_note_begins_with_what_was_said_last_and_a_resume_takes_it_back(tracker):
    parent = tracker.start_sweep("s", {"target_delta": 1e-6}, {})
    plain = tracker.client.get_run(parent).data.tags[NOTE_TAG]
    for first in (["one", "ε = 1"], ["two", "ε = 2"]):
        tracker.set_note(parent, first)
    said = tracker.client.get_run(parent).data.tags[NOTE_TAG]
    assert said.split("\n\n")[:2] == ["two", "ε = 2"]
    assert said.endswith(plain)
    assert "one" not in said.partition("---")[0]
    tracker.start_sweep("s", {"target_delta": 1e-6}, {})
    assert tracker.client.get_run(parent).data.tags[NOTE_TAG] == plain


def test_experiment_says_what_it_is_about(storage):
    found = Tracker.open(None, storage, "group-size on digits", "Which <S>?")
    experiment = found.client.get_experiment(found.experiment_id)
    assert experiment.tags[NOTE_TAG] == "Which &lt;S&gt;?"


def test_trial_has_the_times_that_are_given(tracker):
    parent = tracker.start_sweep("s", {}, {})
    run = tracker.client.get_run(log(tracker, parent, times_ms=(1000, 4000)))
    assert (run.info.start_time, run.info.end_time) == (1000, 4000)


def test_params_that_do_not_apply_are_left_out(tracker):
    parent = tracker.start_sweep("s", {"warm_start": None}, {})
    run = tracker.client.get_run(log(tracker, parent, params=PARAMS | {"warm_start": None}))
    assert "warm_start" not in {**run.data.params, **tracker.client.get_run(parent).data.params}


def test_sealed_run_says_why_its_times_are_masked(tracker):
    run = tracker.client.get_run(tracker.log_sealed("s", {}, {}, {}, sweep_id="1", first=["The answer."]))
    note = run.data.tags[NOTE_TAG]
    assert note.startswith("The answer.")
    assert escaped(MASKED_TIMES) in note


def test_finish_sweep_sets_the_status(tracker):
    parent = tracker.start_sweep("s", {}, {})
    tracker.finish_sweep(parent, "FAILED")
    assert tracker.client.get_run(parent).info.status == "FAILED"


def test_trial_run_is_finished_under_its_parent_with_its_tags(tracker):
    parent = tracker.start_sweep("s", {}, {})
    run = tracker.client.get_run(log(tracker, parent, tags={"data_is": "public"}))
    wanted = {
        PARENT_TAG: parent,
        "dpgcl.sweep": "s",
        "dpgcl.trial": "t0",
        "dpgcl.role": "trial",
        "data_is": "public",
    }
    assert run.info.status == "FINISHED"
    assert wanted.items() <= run.data.tags.items()


def test_trial_run_name_tells_trials_of_equal_groups_and_epsilon_apart(tracker):
    parent = tracker.start_sweep("s", {}, {})
    names = ("Q+V-private-r0", "Q-private-r0")
    found = [tracker.client.get_run(log(tracker, parent, name)).info.run_name for name in names]
    assert found == ["Q+V-private-r0: S=8 ε=10 Na=1", "Q-private-r0: S=8 ε=10 Na=1"]


def test_trial_run_name_without_settings_is_the_trials_own(tracker):
    parent = tracker.start_sweep("s", {}, {})
    assert tracker.client.get_run(log(tracker, parent, params={})).info.run_name == "t0"


def test_sealed_run_name_is_that_of_the_sweep(tracker):
    run_id = tracker.log_sealed("hidden", PARAMS, METRICS, {}, sweep_id="1")
    assert tracker.client.get_run(run_id).info.run_name == "hidden"


def test_sealed_run_is_written_once_and_another_sweep_of_that_name_has_its_own(tracker):
    statements = {"1": "ε = 1", "2": "ε = 2"}  # of neither a model was published

    def log_all():
        given = {sweep: {"statement": text} for sweep, text in statements.items()}
        return [tracker.log_sealed("hidden", {}, {}, {}, given[sweep], sweep_id=sweep) for sweep in given]

    runs = log_all()
    assert log_all() == runs
    found = {run: tracker.client.get_run(run).data.tags["statement"] for run in runs}
    assert list(found.values()) == ["ε = 1", "ε = 2"]


def test_trial_keeps_params_metrics_and_series(tracker):
    parent = tracker.start_sweep("s", {}, {})
    run_id = log(tracker, parent)
    run = tracker.client.get_run(run_id)
    history = tracker.client.get_metric_history(run_id, "training.snr")
    assert run.data.params["target_epsilon"] == "10.0"
    assert run.data.metrics == {"knn_accuracy": 0.8, "privacy.epsilon": 9.9, "training.snr": 1.25}
    assert [(point.step, point.value) for point in history] == SERIES["snr"]


def test_first_metric_and_first_param_of_a_trial_are_its_score_and_what_the_sweep_varies(tracker):
    metrics = {"epsilon": 9.9, "num_steps_charged": 12.0, "train_seconds": 3.0}
    scores = {"untrained_view_retrieval_top1": 0.1, "view_retrieval_top1": 0.8}
    changes = {"metrics": metrics | scores, "series": {}, "axes": {"temperature": 0.5}}
    run_id = log(tracker, tracker.start_sweep("s", {}, {}), **changes)
    data = tracker.client.get_run(run_id).data
    assert next(iter(data.metrics)) == "view_retrieval_top1"  # of Compare's parallel coordinates
    assert min(data.params) == "Axis: temperature"
    assert data.params["num_steps_charged"] == "12"  # nothing to compare runs by
    assert set(data.metrics) == {"privacy.epsilon", "training.train_seconds", *scores}


def test_final_value_is_at_step_0_so_that_mlflow_draws_bars(tracker):
    run_id = log(tracker, tracker.start_sweep("s", {}, {}))
    assert [point.step for point in tracker.client.get_metric_history(run_id, "knn_accuracy")] == [0]


def test_trial_without_times_has_no_duration(tracker, monkeypatch):
    hours = itertools.count(1)
    monkeypatch.setattr(tracking_runs.time, "time", lambda: 3600 * next(hours))
    run = tracker.client.get_run(log(tracker, tracker.start_sweep("s", {}, {})))
    assert run.info.end_time == run.info.start_time > 0


def test_trial_logged_again_makes_no_second_run(tracker):
    parent = tracker.start_sweep("s", {}, {})
    first = log(tracker, parent)
    assert log(tracker, parent) == first
    assert len(children(tracker, parent)) == 1


def test_trial_of_the_same_name_in_another_sweep_is_another_run(tracker):
    parents = [tracker.start_sweep(name, {}, {}) for name in "ab"]
    assert len({log(tracker, parent) for parent in parents}) == 2


def test_trial_left_unfinished_is_replaced(tracker, monkeypatch):
    parent = tracker.start_sweep("s", {}, {})
    with monkeypatch.context() as patch:
        patch.setattr(
            type(tracker.client), "set_terminated", lambda *_, **__: (_ for _ in ()).throw(OSError())
        )
        with pytest.raises(TrackingError):
            log(tracker, parent, metrics={"knn_accuracy": 0.1})
    log(tracker, parent)
    runs = children(tracker, parent)
    assert [(run.info.status, run.data.metrics["knn_accuracy"]) for run in runs] == [("FINISHED", 0.8)]


def test_trial_with_more_numbers_than_one_request_takes_is_complete(tracker):
    parent = tracker.start_sweep("s", {}, {})
    params = {f"p{i}": i for i in range(130)}
    run_id = log(tracker, parent, params=params, series={"snr": [(i, float(i)) for i in range(2100)]})
    assert len(tracker.client.get_run(run_id).data.params) == 130
    assert len(tracker.client.get_metric_history(run_id, "training.snr")) == 2100


def test_trial_is_one_request_for_its_numbers(tracker, monkeypatch):
    calls = []
    kind = type(tracker.client)
    real = kind.log_batch
    monkeypatch.setattr(kind, "log_batch", lambda *a, **k: (calls.append(k), real(*a, **k))[1])
    log(tracker, tracker.start_sweep("s", {}, {}))
    assert len(calls) == 1


def test_trial_refuses_a_metric_that_is_also_a_series(tracker):
    parent = tracker.start_sweep("s", {}, {})
    with pytest.raises(ConfigError, match="snr"):
        log(tracker, parent, metrics={"snr": 1.0})


def test_figure_is_stored_under_the_artifact_root(tracker, storage, tmp_path):
    picture = tmp_path / "f.png"
    picture.write_bytes(b"picture")
    parent = tracker.start_sweep("s", {}, {})
    tracker.log_artifact(parent, picture, "figures")
    assert [path.read_bytes() for path in (storage / "mlartifacts").rglob("figures/f.png")] == [b"picture"]


def test_log_artifact_of_a_missing_file_is_a_tracking_error(tracker, tmp_path):
    parent = tracker.start_sweep("s", {}, {})
    with pytest.raises(TrackingError, match=r"nowhere\.png"):
        tracker.log_artifact(parent, tmp_path / "nowhere.png")


@pytest.mark.parametrize("uri", ["file:///tmp/x", "mlruns", "ftp://host", "databricks", "127.0.0.1:5000"])
def test_open_refuses_other_addresses_and_lists_the_valid(uri, tmp_path):
    with pytest.raises(TrackingError, match=r"sqlite, postgresql.*https"):
        Tracker.open(uri, tmp_path, "experiment")


def test_open_refuses_an_sqlite_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match="failed while connecting"):
        Tracker.open(f"sqlite:///{tmp_path}/file/below/mlflow.db", tmp_path, "experiment")


def test_open_explains_a_deleted_experiment(tracker, storage):
    tracker.client.delete_experiment(tracker.experiment_id)
    with pytest.raises(TrackingError, match="restore"):
        Tracker.open(None, storage, "experiment")


def test_open_fails_within_seconds_when_nothing_listens(tmp_path):
    address = f"http://user:secret@127.0.0.1:{free_port()}"
    begin = time.monotonic()
    with pytest.raises(TrackingError, match="Connection refused") as caught:
        Tracker.open(address, tmp_path, "experiment")
    assert time.monotonic() - begin < SOON
    assert "secret" not in str(caught.value)


def test_open_asks_a_server_that_never_answers_once_for_a_short_while(tmp_path, monkeypatch):
    monkeypatch.setattr(mlflow_server, "HEALTH_CHECK_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        with pytest.raises(TrackingError, match=r"tim(ed )?e?out"):
            Tracker.open(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, "experiment")
        assert time.monotonic() - begin < SOON
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_open_leaves_the_request_limits_as_the_user_set_them(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    with pytest.raises(TrackingError):
        Tracker.open(f"http://127.0.0.1:{free_port()}", tmp_path, "experiment")
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"


@pytest.mark.server
@pytest.mark.ci
@pytest.mark.timeout(300)
def test_server_killed_midway_is_a_tracking_error_and_the_same_call_later_succeeds(storage):
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    server = start_server(storage, port)
    try:
        tracker = Tracker.open(address, storage, "experiment")
        parent = tracker.start_sweep("s", {}, {})
        log(tracker, parent, "t0")
        end(server)
        with pytest.raises(TrackingError, match=r"127\.0\.0\.1"):
            log(tracker, parent, "t1")
        server = start_server(storage, port)
        log(tracker, parent, "t1")
        assert sorted(run.data.tags["dpgcl.trial"] for run in children(tracker, parent)) == ["t0", "t1"]
    finally:
        end(server)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def start_server(storage, port, *more):
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{storage / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(storage / "mlartifacts"), *more]
    with (storage / "server.log").open("w") as log_file:
        server = subprocess.Popen(command, stdout=log_file, stderr=log_file, start_new_session=True)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
        except OSError:
            time.sleep(0.5)
        else:
            return server
    end(server)
    raise RuntimeError((storage / "server.log").read_text()[-2000:])


def end(server):
    """Ends the server's own process group, workers included."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
