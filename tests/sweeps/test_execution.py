"""What the driver does at Tune's call-backs and on signals, without a Ray; `test_run` has one."""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import stat
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dpgcl_core.errors import ConfigError
from sweeps.service.cluster import interruption, ray_session, trial_runner
from sweeps.service.cluster.execution import Execution
from sweeps.service.cluster.interruption import StopRequest
from sweeps.service.cluster.stopping import Stopping
from sweeps.service.cluster.supervision import Supervisor
from sweeps.service.cluster.training_progress import SweepWatch
from sweeps.service.cluster.trial_failure import FailureKind, TrialFailure
from sweeps.service.cluster.trial_queue import ListedTrials, TrialQueue
from sweeps.service.options.service import ServiceOptions
from sweeps.service.storage.sweep_folder import Starts, SweepFolder
from trainers.config.training import PerformanceConfig
from trainers.files.checkpoint import CheckpointFolder
from trainers.files.oversight import Oversight

CONFIG: Any = SimpleNamespace(
    performance=PerformanceConfig(), mechanism=SimpleNamespace(num_restart_steps=None, num_steps=4)
)
GIVEN: Any = SimpleNamespace(name="one", config=CONFIG, checkpoint_folder=Path("none"), progress_file=None)
TRIAL: Any = SimpleNamespace(
    config={"trial": GIVEN},
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
    folder, asked = SweepFolder(tmp_path / "one"), cast("Any", budget)
    running = Execution(
        folder=folder,
        queue=TrialQueue(ListedTrials([]), 0, capacity),
        on_result=lambda *given: heard.append(given),
        budget=asked,
        supervisor=Supervisor(folder, ServiceOptions(), None),
        stopping=Stopping(folder, ServiceOptions(), "image"),
        watch=None,
        is_open=False,
    )
    from sweeps.service.cluster.ray_tune import TrialCallback  # imports Ray

    return TrialCallback(running)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_sweep_at_tunes_next_step(number: signal.Signals, callback: Any) -> None:
    before = signal.getsignal(number)
    with callback.interruption.handling_signals():
        callback.on_step_begin(1, [])
        os.kill(os.getpid(), number)
        with pytest.raises(StopRequest) as stopped:
            callback.on_step_begin(2, [])
    assert stopped.value.signal_number == number
    assert signal.getsignal(number) == before


@pytest.fixture
def drawing(callback: Any, tmp_path: Path) -> CheckpointFolder:
    """The checkpoints of a training that draws: it has counted its steps up to the first checkpoint."""
    callback.interruption._saves = True
    callback.on_trial_start(1, [], TRIAL)
    callback._execution.queue._handed_out["one"] = SimpleNamespace(name="one")
    checkpoints = SweepFolder(tmp_path / "one").checkpoints("one", every_steps=4)
    checkpoints.begin_attempt(0, 8)
    return checkpoints


def test_stop_waits_until_a_training_that_draws_has_saved(
    callback: Any, drawing: CheckpointFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    callback.interruption.signals.append(signal.SIGINT)
    for iteration in range(3):
        callback.on_step_begin(iteration, [])
    assert Oversight(count_file=drawing.count_file).must_stop()
    assert capsys.readouterr().out.count("Ctrl-C again") == 1
    assert callback._execution.queue.is_closed
    callback.on_trial_complete(4, [], TRIAL)
    with pytest.raises(StopRequest) as stopped:
        callback.on_step_begin(5, [])
    assert stopped.value.is_saved


@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)])
def test_stop_that_is_asked_for_twice_or_by_the_system_waits_no_longer(
    signals: tuple[signal.Signals, ...],
    callback: Any,
    drawing: CheckpointFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(interruption._PATIENCE_SECONDS, signal.SIGTERM, 0.0)
    callback.interruption.signals += signals
    with pytest.raises(StopRequest) as stopped:
        callback.on_step_begin(1, [])
    assert not stopped.value.is_saved


def test_stop_of_a_sealed_sweep_waits_for_none_of_its_trainings(
    callback: Any, drawing: CheckpointFolder
) -> None:
    """One that was interrupted counts as the worst score, saved or not."""
    callback.interruption._saves = False
    callback.interruption.signals.append(signal.SIGINT)
    with pytest.raises(StopRequest) as stopped:
        callback.on_step_begin(1, [])
    assert not stopped.value.is_saved


def test_training_that_has_not_begun_to_draw_is_not_waited_for(callback: Any) -> None:
    callback.interruption._saves = True
    callback.on_trial_start(1, [], TRIAL)
    callback.interruption.signals.append(signal.SIGINT)
    with pytest.raises(StopRequest) as stopped:
        callback.on_step_begin(2, [])
    assert stopped.value.is_saved


def test_no_thread_collects_garbage_of_rays_while_it_shuts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends the process, unfinished as the sweep is, where another thread's collector finds any."""
    import ray

    class Handle:
        itself: Handle

    handle, seen = Handle(), list[tuple[bool, bool]]()
    handle.itself, gone = handle, weakref.ref(handle)
    del handle
    monkeypatch.setattr(ray, "shutdown", lambda: seen.append((gone() is None, gc.isenabled())))
    ray_session._shut_down()
    assert seen == [(True, False)]
    assert gc.isenabled()


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
    assert callback.finished_names == {"one"}


def test_failed_and_dead_trainings_are_told_apart(
    callback: Any, heard: list[tuple[str, dict[str, Any]]]
) -> None:
    callback.on_trial_result(1, [], TRIAL, {"error": "its words"})
    assert callback.failures == {"one": TrialFailure(kind=FailureKind.RAISED, reason="its words")}
    callback.on_trial_error(1, [], TRIAL)
    assert "died, or could not be started, more often than --max-restarts" in str(callback.failures["one"])
    assert heard == []


def test_what_the_driver_holds_is_not_written_down_by_tune(callback: Any) -> None:
    assert not hasattr(pickle.loads(pickle.dumps(callback)), "_execution")


MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.40.0
    Python: 3.11.7
This process on node 10.0.0.1 was started with:
    Ray: 2.60.0
    Python: 3.12.1
"""


def test_cluster_of_another_ray_is_told_in_one_line() -> None:
    said = "Ray 2.60.0 and Python 3.12.1; got Ray 2.40.0 and Python 3.11.7. Install the versions of "
    with pytest.raises(ConfigError, match=re.escape(said)):
        ray_session._check_versions(MISMATCH)
    ray_session._check_versions("Can't find a node_ip_address.json file")


def test_scratch_folder_is_for_its_user_alone_and_goes_with_the_sweep() -> None:
    with ray_session._scratch_folder() as scratch:
        assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
        ray_session._remove_stale_folders(scratch.parent)
        assert scratch.is_dir(), "its driver lives"
    assert not scratch.exists()


def test_scratch_folder_of_a_killed_driver_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    left, others = tmp_path / "dpgcl-ray-left", tmp_path / "dpgcl-ray-of-something-else"
    (left / "state" / "draw-3").mkdir(parents=True)
    (left / "owner.lock").touch()
    others.mkdir()
    ray_session._remove_stale_folders(tmp_path)
    assert (left.exists(), others.exists()) == (False, True)


@pytest.mark.parametrize(
    ("failures", "why"),
    [
        (["killed due to the node running low on memory"], "killed for lack of memory"),
        (["killed due to the node running low on memory", "its node died"], "worker lost"),
    ],
)
def test_why_a_process_was_lost_follows_its_last_failure_alone(
    failures: list[str], why: str, callback: Any, tmp_path: Path
) -> None:
    text = "".join(f"Failure # {number} (occurred at …)\n{said}\n" for number, said in enumerate(failures, 1))
    (tmp_path / "error.txt").write_text(text)
    callback.on_trial_error(1, [], SimpleNamespace(**vars(TRIAL) | {"error_file": tmp_path / "error.txt"}))
    assert str(callback.failures["one"]).startswith(f"{why}; its processes died")


def given_to_worker(tmp_path: Path, *, is_open: bool) -> Any:
    mechanism = SimpleNamespace(method="dp_gcl")
    config: Any = SimpleNamespace(performance=PerformanceConfig(), mechanism=mechanism)
    trial: Any = SimpleNamespace(name="one", config=config)
    capacity = SimpleNamespace(workers_per_node=lambda: 1)
    session: Any = SimpleNamespace(scratch=tmp_path, capacity=capacity, service=ServiceOptions())
    folder = SweepFolder(tmp_path)
    stopping = Stopping(folder, ServiceOptions(), "image")
    running: Any = SimpleNamespace(folder=folder, budget=None, stopping=stopping, is_open=is_open)
    from sweeps.service.cluster.ray_tune import ray_trial

    return ray_trial(running, session, trial, data_are_public=True)


def test_trainings_of_a_sealed_sweep_tell_no_steps(tmp_path: Path) -> None:
    assert given_to_worker(tmp_path, is_open=False).progress_file is None
    assert given_to_worker(tmp_path, is_open=True).progress_file == tmp_path / "checkpoints/one/progress.json"


@pytest.mark.parametrize(("is_open", "kind"), [(True, SweepWatch), (False, type(None))])
def test_trainings_of_a_sealed_sweep_are_not_watched(is_open: bool, kind: type) -> None:
    release, data = SimpleNamespace(is_open=is_open), SimpleNamespace(train_is_public=True)
    plan: Any = SimpleNamespace(release=release, data=data, trials=())
    watch = trial_runner._watch(plan, 0)
    assert type(watch) is kind
