"""Trainings that are lost, hang or take too long: what is said, what is logged, and who is told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpgcl_core.errors import ConfigError
from sweeps.service.cluster.supervision import Supervisor
from sweeps.service.cluster.trial_failure import TrialFailure, why_lost
from sweeps.service.cluster.trial_runner import log_of
from sweeps.service.options.service import ServiceOptions
from sweeps.service.running.mlflow_listener import MlflowListener
from sweeps.service.storage.log import RESTARTED, SweepLog
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps.support import given, run
from trainers.config.training import PerformanceConfig

OF_RAY = """The actor died unexpectedly before finishing this task. Worker exit type: SYSTEM_ERROR. There are
some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage."""


@dataclass
class Watched:
    """Supervisor of one sweep, with a clock that a test sets."""

    top: Path
    service: ServiceOptions
    in_advance: int | None = None
    is_sealed: bool = False
    now: float = 0.0
    num_ended: int = 0

    def __post_init__(self) -> None:
        self.folder = SweepFolder(self.top / "one")
        self.folder.path.mkdir()
        log = None if self.is_sealed else SweepLog(self.folder.path)
        self.supervisor = Supervisor(self.folder, self.service, log, clock=lambda: self.now)

    def start(self, *, in_place: bool = True) -> None:
        self.folder.mark_start("t")
        config = SimpleNamespace(
            performance=PerformanceConfig(checkpoint_every_steps=5),
            mechanism=SimpleNamespace(num_restart_steps=self.in_advance),
        )
        found: Any = SimpleNamespace(
            name="t", config=config, checkpoint_folder=self.folder.checkpoint_folder("t")
        )
        self.supervisor.note_start(found, self._end, in_place=in_place)

    def _end(self) -> None:
        self.num_ended += 1

    def draw(self, start_step: int = 0) -> None:
        self.folder.checkpoints("t", every_steps=5).begin_attempt(start_step, 20)

    def save(self) -> None:
        """What a training does that goes on."""
        path, time = self.folder.checkpoint_folder("t") / "checkpoint.pt", int(1e9 * (1000 + self.now))
        path.touch()
        os.utime(path, ns=(time, time))

    def at(self, minutes: float) -> None:
        self.now = 60 * minutes
        self.supervisor.check_attempts()


@pytest.fixture
def watched(tmp_path: Path) -> Callable[..., Watched]:
    def make(in_advance: int | None = None, is_sealed: bool = False, **limits: Any) -> Watched:
        return Watched(tmp_path, ServiceOptions(**limits), in_advance, is_sealed)

    return make


def test_restart_is_told_once_with_step_and_charge(
    watched: Callable[..., Watched], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = watched()
    for _ in range(2):
        sweep.start()
    assert capsys.readouterr().out == "", "it was not lost"
    sweep.draw()
    sweep.supervisor.note_loss("t", OF_RAY)
    sweep.start()
    assert capsys.readouterr().out == "t: worker lost, restarted at step 0, 5 steps charged\n"
    (line,) = map(json.loads, (sweep.folder.path / "log.jsonl").read_text().splitlines())
    assert (line["sweep"], line["trial"], line["event"], line["num_steps_repeated"]) == (
        *("one", "t", RESTARTED),
        5,
    )


def test_restart_that_was_charged_in_advance_says_so(
    watched: Callable[..., Watched], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = watched(in_advance=8)
    sweep.start()
    sweep.draw()
    sweep.supervisor.note_loss("t", OF_RAY)
    sweep.start()
    said = "t: worker lost, restarted at step 0, 5 of the R = 8 restart steps used\n"
    assert capsys.readouterr().out == said


def test_sealed_sweep_says_nothing_and_keeps_no_log(
    watched: Callable[..., Watched], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = watched(is_sealed=True)
    sweep.supervisor._ray_logs = "/logs"
    sweep.start()
    sweep.draw()
    sweep.at(1)
    sweep.at(60)
    sweep.supervisor.note_loss("t", OF_RAY)
    sweep.start()
    sweep.supervisor.give_up("t", "worker lost")
    assert not (sweep.folder.path / "log.jsonl").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("limit", ["trial_timeout", "stall_timeout"])
def test_training_that_hangs_is_ended_and_told(
    limit: str, watched: Callable[..., Watched], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = watched(**{limit: 10.0})
    sweep.start()
    sweep.draw()
    for minutes, num_ended in ((1, 0), (10, 0), (11, 1), (30, 1)):
        sweep.at(minutes if limit == "stall_timeout" else minutes - 1)
        assert sweep.num_ended == num_ended
    assert sweep.supervisor.note_loss("t", OF_RAY).startswith("ended after 10 min")
    sweep.start()
    assert f"(--{limit.replace('_', '-')}), restarted at step 0" in capsys.readouterr().out


def test_training_that_goes_on_is_not_ended_for_a_stall(watched: Callable[..., Watched]) -> None:
    sweep = watched(stall_timeout=10.0)
    sweep.start()
    sweep.draw()
    for minutes in range(1, 60, 9):
        sweep.now = 60 * minutes
        sweep.save()
        sweep.at(minutes)
    assert sweep.num_ended == 0
    sweep.at(66)
    assert sweep.num_ended == 1


def test_training_whose_workers_wait_for_room_cannot_hang(watched: Callable[..., Watched]) -> None:
    sweep = watched(trial_timeout=10.0, stall_timeout=10.0)
    sweep.start(in_place=False)
    sweep.at(60)
    assert (sweep.num_ended, sweep.supervisor.num_begun) == (0, 0)
    sweep.draw()
    for minutes in (61, 62):
        sweep.at(minutes)
        assert (sweep.num_ended, sweep.supervisor.num_begun) == (0, 1)
    sweep.at(72)
    assert sweep.num_ended == 1


def test_death_for_want_of_memory_says_what_helps(watched: Callable[..., Watched]) -> None:
    sweep = watched()
    sweep.start()
    why = sweep.supervisor.note_loss("t", "Task was killed due to the node running low on memory.")
    told = str(sweep.supervisor.give_up("t", why))
    assert told.startswith("killed for lack of memory; its processes died")
    for failure in (told, str(TrialFailure.of_worker("OutOfMemoryError (its message is withheld: …)"))):
        assert "--max-views-per-microbatch" in failure
    assert why_lost(OF_RAY) == "worker lost", "Ray names memory among all causes of any death"


@pytest.mark.parametrize("limit", ["trial_timeout", "stall_timeout"])
def test_sealed_sweep_ends_no_training_by_the_clock(limit: str) -> None:
    with pytest.raises(ConfigError, match="must not stop a training by time"):
        given(release="sealed", **{limit: 5.0})
    with pytest.raises(ConfigError, match=f"{limit} must be a positive number of minutes"):
        given(**{limit: 0.0})


def test_log_tells_all_restarts_and_skips_half_a_line(tmp_path: Path) -> None:
    log = SweepLog(tmp_path)
    assert log.restarts("t") == []
    SweepLog(tmp_path).write(RESTARTED, "t", "first")
    assert log.restarts("t") == ["first"]
    with log.path.open("a") as file:
        file.write('{"event": "rest\n')
    SweepLog(tmp_path).write(RESTARTED, "t", "second")
    assert log.restarts("t") == log.restarts("t") == ["first", "second"]


@pytest.mark.parametrize(("in_advance", "told"), [(None, {"restarts": "one; two"}), (8, {})])
def test_restarts_that_were_charged_in_advance_stay_with_the_operator(
    in_advance: int | None, told: dict[str, str], tmp_path: Path
) -> None:
    log = SweepLog(tmp_path)
    for text in ("one", "two"):
        log.write(RESTARTED, "t", text)
    prepared = SimpleNamespace(plan=SimpleNamespace(tags=dict), folder=SimpleNamespace(path=tmp_path))
    sweep: Any = SimpleNamespace(_sweep=prepared)
    config = SimpleNamespace(
        guarantee_label="proven", mechanism=SimpleNamespace(num_restart_steps=in_advance)
    )
    trial: Any = SimpleNamespace(name="t", config=config)
    assert MlflowListener._tags_of(sweep, trial, {}) == {"guarantee_label": "proven"} | told


@pytest.mark.parametrize("is_open", [True, False])
def test_only_open_sweeps_have_a_log(is_open: bool, tmp_path: Path) -> None:
    plan: Any = SimpleNamespace(release=SimpleNamespace(is_open=is_open))
    assert (log_of(plan, SweepFolder(tmp_path)) is not None) == is_open


# On a private Ray

COMMON = ("--tiny", "--noise-multiplier=1", "--no-non-private", "--name=one", "--no-references")


@pytest.mark.ci
@pytest.mark.ray
def test_training_that_hangs_is_ended_restarted_and_at_last_a_failure(tmp_path: Path) -> None:
    """Its third draw never comes, in any attempt, and a slow machine may not even let it begin."""
    (tmp_path / "hold-0").write_text("3")
    code, driver = run(
        *(*COMMON, "--network=tests.sweeps.faulty:network", "--max-restarts=1", "--stall-timeout=0.25"),
        *("--num-steps=8", "--checkpoint-every-steps=2", f"--storage={tmp_path / 'storage'}"),
        home=tmp_path / "home",
        env={"DPGCL_TEST_FOLDER": str(tmp_path)},
    )
    said = driver.stdout + driver.stderr
    assert code == 1, said
    why = "ended after 0.25 min without a checkpoint (--stall-timeout)"
    assert f"S4-Na1-private-r0: {why}, restarted at step " in said
    assert (
        f"failed: S4-Na1-private-r0 ({why}; its processes died, or could not be started, more often" in said
    )
    assert "Traceback" not in said
    folder, journal = SweepFolder(tmp_path / "storage/sweeps/one"), tmp_path / "journal-0"
    assert folder.starts("S4-Na1-private-r0").num_starts == 2
    counted, drawn = (
        folder.read_counts("S4-Na1-private-r0"),
        journal.stat().st_size if journal.exists() else 0,
    )
    assert (counted.num_steps if counted is not None else 0) >= drawn


@pytest.mark.ci
@pytest.mark.ray
def test_training_that_ray_kills_for_want_of_memory_says_what_helps(tmp_path: Path) -> None:
    code, driver = run(
        *(*COMMON, "--max-restarts=0", f"--storage={tmp_path / 'storage'}", "--num-steps=2000"),
        home=tmp_path / "home",
        env={"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "200"},
    )
    said = driver.stdout + driver.stderr
    assert code == 1, said
    assert "failed: S4-Na1-private-r0 (killed for lack of memory; " in said
    assert "--max-views-per-microbatch" in said
