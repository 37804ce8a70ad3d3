"""What the driver does at Tune's call-backs and on signals, without a Ray; `test_run` has one."""

from __future__ import annotations

import os
import pickle
import signal
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sweeps.service.options.service import ServiceOptions
from sweeps.service.running import tune as execution
from sweeps.service.running.supervision import Supervisor
from sweeps.service.running.tune import Stopped, TrialQueue, _callback, _Listed, _signals_noted
from sweeps.service.storage.folder import Starts, SweepFolder
from trainers.config.training import PerformanceConfig

CONFIG: Any = SimpleNamespace(
    performance=PerformanceConfig(), mechanism=SimpleNamespace(num_restart_steps=None)
)
GIVEN: Any = SimpleNamespace(name="one", config=CONFIG, checkpoint_folder=Path("none"))
TRIAL: Any = SimpleNamespace(
    config={"trial": "one", "given": GIVEN},
    temporary_state=SimpleNamespace(ray_actor=None),
    error_file=None,
)


class Budget:
    """Notes what the driver asks the ledger."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def confirm(self) -> None:
        self.asked.append("confirm")

    def restarted(self, name: str) -> None:
        self.asked.append(f"restarted {name}")


@pytest.fixture
def heard() -> list[tuple[str, dict[str, Any]]]:
    return []


@pytest.fixture
def budget() -> Budget:
    return Budget()


@pytest.fixture
def callback(heard: list[tuple[str, dict[str, Any]]], budget: Budget, tmp_path: Path) -> Any:
    (tmp_path / "one").mkdir()
    capacity: Any = SimpleNamespace(trials_at_once=lambda: 1, follow=lambda *_: None)
    queue, folder = TrialQueue(_Listed([]), 0, capacity), SweepFolder(tmp_path / "one")
    supervisor = Supervisor(folder, ServiceOptions(), None)
    return _callback(lambda *given: heard.append(given), budget, folder, queue, supervisor)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_sweep_at_tunes_next_step(number: signal.Signals, callback: Any) -> None:
    before = signal.getsignal(number)
    with _signals_noted(callback):
        callback.on_step_begin(1, [])
        os.kill(os.getpid(), number)
        with pytest.raises(Stopped) as stopped:
            callback.on_step_begin(2, [])
    assert stopped.value.signal_number == number
    assert signal.getsignal(number) == before


def test_ledger_is_asked_at_every_step(callback: Any, budget: Budget) -> None:
    for iteration in range(3):
        callback.on_step_begin(iteration, [])
    assert budget.asked == ["confirm"] * 3


def test_start_is_counted_before_the_training_can_draw(callback: Any, tmp_path: Path) -> None:
    callback.on_trial_start(1, [], TRIAL)
    callback.on_trial_start(2, [], TRIAL)
    folder = SweepFolder(tmp_path / "one")
    assert folder.starts("one") == Starts(num_starts=2, num_lost=0)
    folder.count_file("one").unlink()  # that was there before the first start: somebody took it away
    assert folder.starts("one") == Starts(num_starts=2, num_lost=2)


def test_restart_of_a_dead_training_is_charged(callback: Any, budget: Budget) -> None:
    callback.on_trial_recover(1, [], TRIAL)
    assert budget.asked == ["restarted one"]


def test_result_is_handed_over_once(callback: Any, heard: list[tuple[str, dict[str, Any]]]) -> None:
    result = {"metrics": {"epsilon": 1.0}, "series": {}, "time_total_s": 3.0}
    for _ in range(2):
        callback.on_trial_result(1, [], TRIAL, result)
    assert heard == [("one", {"metrics": {"epsilon": 1.0}, "series": {}})]
    assert callback.done == {"one"}


def test_failed_and_dead_trainings_are_told_apart(
    callback: Any, heard: list[tuple[str, dict[str, Any]]]
) -> None:
    callback.on_trial_result(1, [], TRIAL, {"error": "its words"})
    assert callback.errors == {"one": "its words"}
    callback.on_trial_error(1, [], TRIAL)
    assert "died, or could not be started, more often than --max-restarts" in callback.errors["one"]
    assert heard == []


def test_what_the_driver_holds_is_not_written_down_by_tune(callback: Any) -> None:
    assert not hasattr(pickle.loads(pickle.dumps(callback)), "budget")


def test_scratch_folder_is_for_its_user_alone_and_goes_with_the_sweep() -> None:
    with execution._scratch_folder() as scratch:
        assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
        execution._remove_left_folders(scratch.parent)
        assert scratch.is_dir(), "its driver lives"
    assert not scratch.exists()


def test_scratch_folder_of_a_killed_driver_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    left, others = tmp_path / "dpgcl-ray-left", tmp_path / "dpgcl-ray-of-something-else"
    (left / "state" / "draw-3").mkdir(parents=True)
    (left / "owner.lock").touch()
    others.mkdir()
    execution._remove_left_folders(tmp_path)
    assert (left.exists(), others.exists()) == (False, True)


@pytest.mark.parametrize(
    ("failures", "why"),
    [
        (["killed due to the node running low on memory"], "killed for want of memory"),
        (["killed due to the node running low on memory", "its node died"], "worker lost"),
    ],
)
def test_why_a_process_was_lost_follows_its_last_failure_alone(
    failures: list[str], why: str, callback: Any, tmp_path: Path
) -> None:
    text = "".join(f"Failure # {number} (occurred at …)\n{said}\n" for number, said in enumerate(failures, 1))
    (tmp_path / "error.txt").write_text(text)
    callback.on_trial_error(1, [], SimpleNamespace(**vars(TRIAL) | {"error_file": tmp_path / "error.txt"}))
    assert callback.errors["one"].startswith(f"{why}; its processes died")
