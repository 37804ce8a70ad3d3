"""Whole sweeps, each on a private Ray of its own: from start to figure, stopped, killed and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dashboards.query.trials import load_trials
from tests.sweeps import watched
from tests.sweeps.support import ROOT, Driver, contents, environment, run, write_npz
from trainers.tracking.server import connect

pytestmark = [pytest.mark.ray, pytest.mark.slow]

QUICK = ("--tiny", "--noise-multiplier", "1")


def parent_status(uri: str) -> str:
    client = connect(uri)
    experiment = client.get_experiment_by_name("dpgcl")
    runs = client.search_runs([experiment.experiment_id], "tags.`dpgcl.role` = 'sweep'")
    assert len(runs) == 1
    return str(runs[0].info.status)


# A sweep that nothing disturbs, and then the same with --resume


@dataclass
class Whole:
    """What a sweep left, and what resuming it changed."""

    code: int
    driver: Driver
    home: Path
    folder: Path
    uri: str
    written: dict[str, float]
    resumed_code: int
    resumed: Driver


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    top = tmp_path_factory.mktemp("whole")
    home, storage = top / "home", top / "storage"
    arguments = (*QUICK, "--storage", str(storage), "--name", "one")
    code, driver = run(*arguments, home=home)
    folder = storage / "sweeps" / "one"
    written = {path.name: path.stat().st_mtime for path in (folder / "trials").glob("*.json")}
    resumed_code, resumed = run(*arguments, "--resume", home=home)
    return Whole(code, driver, home, folder, f"sqlite:///{storage}/mlflow.db", written, resumed_code, resumed)


def test_sweep_ends_with_code_0_and_silent_stderr(whole: Whole) -> None:
    assert (whole.code, whole.driver.stderr) == (0, ""), whole.driver.stdout


def test_sweep_tells_progress_and_time_left(whole: Whole) -> None:
    assert "sweep: one (0 of 2 trials done)" in whole.driver.stdout
    assert "[1/2] " in whole.driver.stdout
    assert "(0 min 00 s left)" in whole.driver.stdout.split("[2/2] ")[1].splitlines()[0]


def test_sweep_writes_figure_and_table(whole: Whole) -> None:
    for name in ("group_size.png", "group_size.html", "group_size.csv", "group_size.md"):
        assert (whole.folder / name).stat().st_size > 100
        assert f"written: {whole.folder / name}" in whole.driver.stdout


def test_sweep_logs_figure_and_table_to_its_parent_run(whole: Whole) -> None:
    client = connect(whole.uri)
    experiment = client.get_experiment_by_name("dpgcl")
    (parent,) = client.search_runs([experiment.experiment_id], "tags.`dpgcl.role` = 'sweep'")
    logged = {Path(entry.path).name for entry in client.list_artifacts(parent.info.run_id)}
    assert {"group_size.png", "group_size.html", "group_size.csv", "group_size.md"} <= logged


def test_sweep_says_on_every_run_what_tuning_costs(whole: Whole) -> None:
    client = connect(whole.uri)
    runs = client.search_runs([client.get_experiment_by_name("dpgcl").experiment_id])
    assert len(runs) == 3
    (line,) = {run.data.tags["tuning_cost"] for run in runs}
    assert line.startswith("Open release: its one trial ε = ")
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert line in (whole.folder / "group_size.md").read_text()


def test_sweep_tracks_params_and_metrics_of_its_trials(whole: Whole) -> None:
    trials = load_trials(whole.uri, "one").set_index("noise_multiplier").sort_index()
    assert list(trials.index) == [0.0, 1.0]
    assert set(trials["group_size"]) == {4}
    assert set(trials["num_steps_charged"]) == {10}
    assert (trials["knn_accuracy"] > 0.2).all()
    private = trials.loc[1.0]
    assert private["epsilon"] == pytest.approx(private["epsilon_prv"], rel=0.05)
    assert private["snr_first_step"] > 0
    assert private["snr_first_step_no_augmentation"] > 0


def test_sweep_writes_nothing_to_the_home_folder(whole: Whole) -> None:
    assert contents(whole.home) == []


def test_sweep_keeps_all_in_the_storage_folder(whole: Whole) -> None:
    kept = {path.split("/")[0] for path in contents(whole.folder.parents[1])}
    assert kept == {"mlartifacts", "mlflow.db", "sweeps"}
    assert {path.name for path in whole.folder.iterdir() if path.is_dir()} == {
        "checkpoints",
        "started",
        "trials",
    }


def test_resume_of_a_finished_sweep_trains_nothing(whole: Whole) -> None:
    assert whole.resumed_code == 0, whole.resumed.stderr
    assert "sweep: one (2 of 2 trials done)" in whole.resumed.stdout
    assert "[" not in whole.resumed.stdout.split("trials done)")[1]
    now = {path.name: path.stat().st_mtime for path in (whole.folder / "trials").glob("*.json")}
    assert now == whole.written


# A sweep that is stopped four times in its second training, and whose third fails


@dataclass
class Disturbed:
    """What happened, in order; the codes are those of the driver."""

    storage: Path
    uri: str
    codes: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    first_result: list[float] = field(default_factory=list)
    attempts: dict[str, dict[str, Any]] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.storage / "sweeps" / "one"

    def result(self, repeat: int) -> dict[str, Any]:
        path = self.folder / "trials" / f"S4-Na1-private-r{repeat}.json"
        return json.loads(path.read_text())["metrics"]  # type: ignore[no-any-return]


ARGUMENTS = (
    *QUICK,
    "--no-non-private",
    "--repeats=3",
    "--num-steps=20",
    "--checkpoint-every-steps=4",
    "--max-concurrent-trials=1",
    "--network=watched:network",
    "--name=one",
)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    top = tmp_path_factory.mktemp("disturbed")
    for name in ("modules", "work"):
        (top / name).mkdir()
    shutil.copy(watched.__file__, top / "modules")
    found = Disturbed(top / "storage", f"sqlite:///{top}/work/own.db")
    before = contents_of_code()
    # Both are relative on purpose: the driver of a private Ray changes its folder.
    checkpoints = found.folder / "checkpoints" / "S4-Na1-private-r1"
    env = {
        "PYTHONPATH": "../modules",
        "DPGCL_TEST_FOLDER": str(top),
        "DPGCL_TEST_CHECKPOINT": str(checkpoints / "checkpoint.pt"),
    }
    arguments = (*ARGUMENTS, f"--storage={found.storage}", "--tracking-uri=sqlite:///own.db")
    (top / "hold").touch()
    (top / "fail").touch()

    def start(*more: str) -> Driver:
        (top / "held").unlink(missing_ok=True)
        return Driver(*arguments, *more, home=top / "home", cwd=top / "work", env=env)

    def note(stage: str, driver: Driver) -> None:
        found.codes[stage], found.said[stage] = driver.wait(), driver.stdout + driver.stderr
        found.statuses[stage] = parent_status(found.uri)
        found.attempts[stage] = json.loads((checkpoints / "attempts.json").read_text())
        found.first_result.append((found.folder / "trials" / "S4-Na1-private-r0.json").stat().st_mtime)

    held = (top / "held").exists
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        driver = start(*([] if number == signal.SIGINT else ["--resume"]))
        driver.wait_for(held)
        driver.kill(number)
        note(number.name, driver)
    driver = start("--resume")
    driver.wait_for(held)
    training = int((top / "held").read_text())
    assert training != driver.pid
    (top / "hold").unlink()
    os.kill(training, signal.SIGKILL)
    note("training killed", driver)
    (top / "fail").unlink()
    note("failure mended", start("--resume"))
    found.elsewhere = sorted(set(contents_of_code()) - set(before))
    return found


def contents_of_code() -> list[str]:
    return [str(path) for path in ROOT.iterdir()] + contents(ROOT / "results")


def test_stopped_sweep_ends_with_the_code_of_its_signal(disturbed: Disturbed) -> None:
    codes = {name: disturbed.codes[name] for name in ("SIGINT", "SIGTERM", "SIGKILL")}
    assert codes == {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}, disturbed.said


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_stopped_sweep_says_how_to_continue(name: str, disturbed: Disturbed) -> None:
    assert f"stopped by {name}; continue with --resume --name one" in disturbed.said[name]
    assert "Traceback" not in disturbed.said[name]
    assert disturbed.statuses[name] == "KILLED"


def test_killed_sweep_is_free_to_be_resumed(disturbed: Disturbed) -> None:
    assert "sweep: one (1 of 3 trials done)" in disturbed.said["training killed"]


def test_resume_trains_no_finished_trial_again(disturbed: Disturbed) -> None:
    assert len(set(disturbed.first_result)) == 1
    assert all("-r0:" not in said for stage, said in disturbed.said.items() if stage != "SIGINT")


@pytest.mark.parametrize(("stage", "num_restarts"), [("SIGINT", 0), ("SIGTERM", 1), ("SIGKILL", 2)])
def test_every_resume_is_counted_as_a_restart(stage: str, num_restarts: int, disturbed: Disturbed) -> None:
    assert disturbed.attempts[stage]["num_restarts"] == num_restarts


def test_resume_continues_from_the_checkpoint(disturbed: Disturbed) -> None:
    # Every attempt writes one checkpoint, of four more steps, and is stopped in the step after it.
    saved = [disturbed.attempts[stage]["saved_step"] for stage in ("SIGINT", "SIGTERM", "SIGKILL")]
    assert saved == [4, 8, 12]
    assert disturbed.result(1)["num_steps_done"] == 20


def test_killed_training_is_restarted_by_the_same_driver(disturbed: Disturbed) -> None:
    assert disturbed.result(1)["num_restarts"] == 4
    assert "-r1: " in disturbed.said["training killed"]


def test_every_repeated_step_is_charged(disturbed: Disturbed) -> None:
    # Four attempts were stopped, each with up to four steps since its checkpoint.
    assert disturbed.result(1)["num_steps_charged"] == 20 + 4 * 4
    assert disturbed.result(0)["num_steps_charged"] == 20


def test_restarts_cost_more_than_the_plan_said(disturbed: Disturbed) -> None:
    planned = json.loads((disturbed.folder / "plan.json").read_text())["params"]["target_epsilon"]
    assert disturbed.result(0)["epsilon"] == pytest.approx(planned, abs=1e-3)
    assert disturbed.result(1)["epsilon"] > planned * 1.05


def test_failing_trial_stops_no_other_and_is_told(disturbed: Disturbed) -> None:
    said = disturbed.said["training killed"]
    assert disturbed.codes["training killed"] == 1
    assert disturbed.statuses["training killed"] == "FAILED"
    assert "failed: S4-Na1-private-r2 (" in said
    assert "RuntimeError: the words of a record" in said  # public data: all may be told
    assert "continue with --resume --name one" in said


def test_failing_trial_is_not_repeated(disturbed: Disturbed) -> None:
    # One attempt before it was mended, one after.
    assert disturbed.result(2)["num_restarts"] == 1


def test_mended_sweep_ends_with_code_0(disturbed: Disturbed) -> None:
    assert disturbed.codes["failure mended"] == 0, disturbed.said["failure mended"]
    assert disturbed.statuses["failure mended"] == "FINISHED"
    assert len(load_trials(disturbed.uri, "one")) == 3


def test_driver_writes_nothing_beside_the_code(disturbed: Disturbed) -> None:
    assert disturbed.elsewhere == []


# Two workers, private data


@dataclass
class Pair:
    """A sweep of two trainings on two workers each, of which the second fails."""

    code: int
    said: str
    folder: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    top = tmp_path_factory.mktemp("pair")
    (top / "fail").touch()
    (top / "modules").mkdir()
    shutil.copy(watched.__file__, top / "modules")
    data = write_npz(top / "own.npz", 128)
    code, driver = run(
        *QUICK,
        *("--dataset", data, "--num-records-public", "128", "--num-workers", "2", "--name", "one"),
        *(
            "--no-ledger",
            "--seed",
            "1",
            "--repeats",
            "2",
            "--network",
            "watched:network",
            "--storage",
            str(top / "storage"),
        ),
        home=top / "home",
        env={"PYTHONPATH": str(top / "modules"), "DPGCL_TEST_FOLDER": str(top)},
    )
    return Pair(code, driver.stdout + driver.stderr, top / "storage" / "sweeps" / "one")


def test_two_workers_train_one_trial(pair: Pair) -> None:
    assert list(path.stem for path in (pair.folder / "trials").iterdir()) == ["S4-Na1-private-r0"], pair.said
    metrics = json.loads((pair.folder / "trials" / "S4-Na1-private-r0.json").read_text())["metrics"]
    assert metrics["num_steps_charged"] == 10


def test_private_training_releases_only_what_may_be_released(pair: Pair) -> None:
    kept = json.loads((pair.folder / "trials" / "S4-Na1-private-r0.json").read_text())
    assert set(kept["metrics"]) == {"epsilon", "num_steps_done", "num_steps_charged", "num_restarts"}
    assert kept["series"] == {}


def test_failure_on_two_workers_is_told_and_not_repeated(pair: Pair) -> None:
    assert pair.code == 1
    assert "failed: S4-Na1-private-r1 (RuntimeError (its message is withheld" in pair.said
    attempts = json.loads((pair.folder / "checkpoints" / "S4-Na1-private-r1" / "attempts.json").read_text())
    assert attempts["num_restarts"] == 0


def test_failure_on_private_data_leaves_its_words_nowhere(pair: Pair) -> None:
    assert "the words of a record" not in pair.said
    files = [path for path in pair.folder.parents[1].rglob("*") if path.is_file()]
    assert [path for path in files if b"the words of a record" in path.read_bytes()] == []


# What needs less than a sweep


def test_unreachable_server_ends_the_sweep_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    code, driver = run(
        *QUICK,
        *("--storage", str(tmp_path / "storage"), "--tracking-uri", "http://127.0.0.1:9"),
        home=tmp_path / "home",
    )
    assert code == 2
    assert driver.stderr.startswith("error: MLflow at http://127.0.0.1:9 failed while connecting")
    assert driver.stderr.count("\n") == 1
    assert time.monotonic() - started < 45  # most of it imports, on a busy machine
    assert not (tmp_path / "storage").exists()


SHARED = """
import json
import ray
from sweeps.service.execution import ray_session
from tests.sweeps.support import options, plan

with ray_session(options("--tiny")):
    records = [ray.put(plan("--tiny", "--noise-multiplier", "1").data)]

    @ray.remote(num_cpus=1)
    def look(records):
        import time
        from trainers.training.loop import TrainingData
        data = ray.get(records[0])
        assert isinstance(data, TrainingData)
        time.sleep(1)  # until the other one looks, too
        arrays = [data.train.images, data.train.ids, data.queries.images]
        flags = [(array.flags.owndata, array.flags.writeable) for array in arrays]
        return ray.get_runtime_context().get_worker_id(), flags

    print(json.dumps(ray.get([look.remote(records), look.remote(records)])))
"""


def test_records_are_shared_by_the_trials_of_a_machine(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SHARED],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(tmp_path / "home"),
        timeout=300,
        check=True,
    )
    (one, flags), (other, other_flags) = json.loads(ended.stdout.splitlines()[-1])
    assert one != other
    assert flags == other_flags == [[False, False]] * 3
