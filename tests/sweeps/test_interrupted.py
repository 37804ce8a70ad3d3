"""A real sweep that is stopped four times in its second training, and whose third fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dashboards.query.trial_frames import load_trials
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps import watched
from tests.sweeps.support import ROOT, Driver, contents, tracked_runs
from trainers.files.launch_record import resume_line
from trainers.tracking.mlflow_server import connect

pytestmark = [pytest.mark.ray, pytest.mark.long]

QUICK = ("--tiny", "--noise-multiplier", "1")


def parent_status(uri: str) -> str:
    client = connect(uri)
    runs = tracked_runs(client, "tags.`dpgcl.role` = 'sweep'")
    assert len(runs) == 1
    return str(runs[0].info.status)


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
        found.attempts[stage] = json.loads((found.folder / "drawn" / "S4-Na1-private-r1.json").read_text())
        found.first_result.append((found.folder / "trials" / "S4-Na1-private-r0.json").stat().st_mtime)

    held = (top / "held").exists
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        driver = start(*([] if number == signal.SIGINT else ["--resume"]))
        driver.wait_for(held)
        driver.kill(number)
        if number == signal.SIGINT:  # the current step does not end: at once
            driver.wait_for((found.folder / "drawn" / "S4-Na1-private-r1.stop").exists)
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
    assert f"stopped by {name}; continue with {resume_line(disturbed.folder)}\n" in disturbed.said[name]
    assert "Traceback" not in disturbed.said[name]
    assert disturbed.statuses[name] == "KILLED"


def test_killed_sweep_is_free_to_be_resumed(disturbed: Disturbed) -> None:
    assert "sweep: one (1 of 3 trials done)" in disturbed.said["training killed"]


def test_resume_trains_no_finished_trial_again(disturbed: Disturbed) -> None:
    assert len(set(disturbed.first_result)) == 1
    assert all("-r0:" not in said for stage, said in disturbed.said.items() if stage != "SIGINT")


@pytest.mark.parametrize(("stage", "num_restarts"), [("SIGINT", 0), ("SIGTERM", 1), ("SIGKILL", 2)])
def test_every_resume_is_counted_as_a_restart(stage: str, num_restarts: int, disturbed: Disturbed) -> None:
    assert disturbed.attempts[stage]["num_attempts"] == 1 + num_restarts


def test_resume_continues_from_the_checkpoint(disturbed: Disturbed) -> None:
    # Every attempt writes one checkpoint, of four more steps, and is stopped in the step after it.
    drawn = [disturbed.attempts[stage]["num_steps"] for stage in ("SIGINT", "SIGTERM", "SIGKILL")]
    assert drawn == [8, 16, 24]
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
    assert f"continue with {resume_line(disturbed.folder)}\n" in said


def test_failing_trial_is_not_repeated(disturbed: Disturbed) -> None:
    """One start before it was mended, which failed before its first step, and one after."""
    assert SweepFolder(disturbed.folder).starts("S4-Na1-private-r2").num_starts == 2
    assert disturbed.result(2)["num_restarts"] == 0


def test_mended_sweep_ends_with_code_0(disturbed: Disturbed) -> None:
    assert disturbed.codes["failure mended"] == 0, disturbed.said["failure mended"]
    assert disturbed.statuses["failure mended"] == "FINISHED"
    assert len(load_trials(disturbed.uri, "one")) == 3


def test_driver_writes_nothing_beside_the_code(disturbed: Disturbed) -> None:
    assert disturbed.elsewhere == []
