"""Running a plan's trials on Ray Tune, one Ray Train run each, and hearing of each as it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from filelock import FileLock, Timeout

from dpgcl_core.addresses import masked, text_of_error
from dpgcl_core.errors import ClusterError, ConfigError, DpgclError, is_disk_full
from sweeps.service.options.service import ServiceOptions
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.budget import SweepBudget
from sweeps.service.running.capacity import Capacity, Cluster, TrialNeeds, max_concurrent_trials
from sweeps.service.running.display import doing, leave_terminal_usable, watching
from sweeps.service.running.seen import NeededFile, check_seen
from sweeps.service.running.stopping import Stopping
from sweeps.service.running.supervision import Supervisor, with_advice
from sweeps.service.running.terminal import say, warn
from sweeps.service.running.watching import SealedWatch, SweepWatch
from sweeps.service.storage.folder import SweepFolder
from sweeps.service.storage.log import SweepLog
from sweeps.service.storage.probe import check_shared
from trainers.config.training import PerformanceConfig
from trainers.data.dataset import modality_of
from trainers.failures import NO_ROOM
from trainers.files.resuming import resume_line
from trainers.files.storage import CODE_ROOT, inside_ray_job, runs_uploaded_copy

if TYPE_CHECKING:
    from trainers.ray_worker import RayTrial

# Before Ray is imported: it reads these once.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",  # a busy machine, or a cluster that grows
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_MAX_PENDING_TRIALS_PG": "200",  # how many there are, the driver decides
}

_TRIES = 2
_SCRATCH, _OWNER_LOCK = "dpgcl-ray-", "owner.lock"
# Of a private Ray alone: its servers bind to 127.0.0.1 where Ray takes the machine for one that is no part of
# a cluster, which it asks of this variable; and nothing answers `/metrics`, whose readers need no token (a
# port that is none keeps a server from starting).
_ALONE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}

OnResult = Callable[[str, dict[str, Any]], None]


_PATIENCE_SECONDS = {signal.SIGINT: math.inf, signal.SIGTERM: 2.0}
"""How long a stop waits until trainings have saved: who presses Ctrl-C can do so again; who sends SIGTERM
kills soon, a Ray job after three seconds."""


class Stopped(BaseException):
    """The user or the system asked the sweep to stop.

    Attributes:
      signal_number: how.
      is_saved: whether every training has saved all that it drew.
    """

    def __init__(self, signal_number: int, *, is_saved: bool = False) -> None:
        super().__init__(signal_number)
        self.signal_number, self.is_saved = signal_number, is_saved


class DiskFull(BaseException):
    """No space is left for what must last: the sweep ends, and a resume continues it."""


def stopping_text(num_drawing: int) -> str:
    """Return what is said when a stop waits for trainings.

    >>> stopping_text(2)
    'stopping when 2 trainings have saved the step that they are in; Ctrl-C again stops at once'
    """
    whose = (
        "1 training has saved the step that it is"
        if num_drawing == 1
        else (f"{num_drawing} trainings have saved the step that they are")
    )
    return f"stopping when {whose} in; Ctrl-C again stops at once"


def no_room_text(folder: SweepFolder) -> str:
    """Return what is said of a sweep that ended because no space was left."""
    return (
        f"stopped: no space is left in {folder.root}, and nothing that was finished is lost; make room, then "
        f"continue with {resume_line(folder.path)}"
    )


class TrialSource(Protocol):
    """Decide trial after trial what is trained next."""

    def next_trial(self) -> Trial:
        """Return the next trial; which one it is has been written down by then."""

    def ended(self, name: str) -> None:
        """Hear that a trial ended; its result was handed over before, or there is none."""


@dataclass(frozen=True)
class RaySession:
    """A Ray that is connected and large enough.

    Attributes:
      scratch: a folder for what Ray writes and nobody needs later.
      capacity: how many trainings it holds.
      service: resources and limits of the trainings.
    """

    scratch: Path
    capacity: Capacity
    service: ServiceOptions


@contextmanager
def ray_session(
    service: ServiceOptions,
    performance: PerformanceConfig,
    storage: Path | None = None,
    files: Sequence[NeededFile] = (),
) -> Iterator[RaySession]:
    """Connect to Ray and wait for room; nothing of the sweep is started yet.

    Args:
      service: resources of the sweep.
      performance: of every training.
      storage: a folder that all nodes must share; None for none.
      files: that trainings read by themselves.

    Raises:
      ConfigError: the nodes are too small for one training.
      ClusterError: Ray did not start, or too few nodes came in time.
      StorageError: the nodes do not share the folder.
      DataError: a node does not see the files.
    """
    with connected_ray() as scratch:
        for name in ("ray.tune", "ray.train"):  # the driver says itself what failed
            logging.getLogger(name).setLevel(logging.CRITICAL)
        capacity = capacity_of(service, performance)
        capacity.wait_for_room(service.wait_for_resources)
        if storage is not None and _joins_cluster():
            check_shared(storage, say)
        if _joins_cluster():
            check_seen(files)
        yield RaySession(scratch, capacity, service)


@contextmanager
def connected_ray() -> Iterator[Path]:
    """Connect to the Ray that a sweep would use, or start its private one; yields the scratch folder.

    Raises:
      ConfigError: `RAY_ADDRESS` leads nowhere.
      ClusterError: Ray did not start, or refuses this process.
    """
    os.environ.update({k: v for k, v in _QUIET.items() if k not in os.environ})
    doing("joining the Ray cluster" if _joins_cluster() else "starting Ray")
    import ray  # noqa: F401  # after the environment is set; takes a second

    _check_address()
    with _scratch_folder() as scratch, _connected(scratch):
        yield scratch


def capacity_of(service: ServiceOptions, performance: PerformanceConfig) -> Capacity:
    """Return the capacity of the Ray that this process is connected to."""
    needs, limit = TrialNeeds.of(service, performance), service.max_concurrent_trials
    return Capacity(needs, limit, Cluster(), grows=_joins_cluster())


def check_this_machine(service: ServiceOptions, performance: PerformanceConfig) -> None:
    """Refuse a cluster that does not answer and what a private Ray cannot hold, before any is started.

    Raises:
      ConfigError: `RAY_ADDRESS` leads nowhere, or this machine is too small for one training.
    """
    _check_address()
    if not _joins_cluster():
        have = {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}
        max_concurrent_trials(service, performance, [have])


def trials_at_once(service: ServiceOptions, performance: PerformanceConfig) -> int:
    """Return how many trainings run side by side, as far as known before Ray is started: at least one."""
    if _joins_cluster():
        return service.max_concurrent_trials or 1
    have = {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}
    try:
        return max_concurrent_trials(service, performance, [have])
    except ConfigError:  # refused when it is started
        return 1


def run_trials(
    session: RaySession,
    plan: SweepPlan,
    folder: SweepFolder,
    trials: Sequence[Trial],
    on_result: OnResult,
    budget: SweepBudget | None = None,
    source: TrialSource | None = None,
) -> dict[str, str]:
    """Run `trials` and call `on_result(name, result)` in this process as each one ends.

    Every start is counted in `folder` before it can draw. With a budget, the ledger is asked all along
    whether it still stands, and charged before a restart. With a source, `trials` are the names that it
    gives its trials, and what each may cost at most.

    Returns:
      The trials that failed for good, and why; their checkpoints stay. When the sweep's time is over, those
      that were stopped or did not begin are in it neither, nor have they a result.

    Raises:
      Stopped: a signal came; everything finished has been reported.
      DiskFull: no space is left; every result that could be kept has been.
    """
    import ray

    records, public = [ray.put(plan.data)], plan.data.train_is_public
    is_open = plan.release.is_open
    queue = TrialQueue(source or _Listed(trials), len(trials), session.capacity, tells_left=is_open)
    stopping = Stopping(folder, session.service, modality_of(plan.data.train))
    stopping.begin(plan.trials)
    supervisor = Supervisor(folder, session.service, log_of(plan, folder), _ray_logs())
    watch = _watch(plan, len(plan.trials) - len(trials))
    callback = _callback(on_result, budget, folder, queue, supervisor, stopping, watch)
    with watching(watch):
        return _tune(folder, trials, session, records, callback, data_are_public=public)


def _watch(plan: SweepPlan, num_over: int) -> SweepWatch | SealedWatch:
    """Return who looks at the trainings; of a sealed sweep's, nobody."""
    if not plan.release.is_open:
        return SealedWatch(time.monotonic())
    return SweepWatch(len(plan.trials), num_over, tells_times=plan.data.train_is_public)


def log_of(plan: SweepPlan, folder: SweepFolder) -> SweepLog | None:
    """Return the log of an open sweep; None for a sealed one, of which a file's time would tell."""
    return SweepLog(folder.path) if plan.release.is_open else None


def _ray_logs() -> str:
    """Where Ray's logs lie on this machine; those of a private Ray go with it."""
    from ray._private import worker

    of_ray: Any = worker
    path = of_ray.global_worker.node.get_logs_dir_path()
    return f"{path}" if _joins_cluster() else f"{path}, until the sweep ends"


class _Listed:
    """A source of trials that are all known."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._left = iter(trials)

    def next_trial(self) -> Trial:
        return next(self._left)

    def ended(self, name: str) -> None:
        """Hear nothing: no trial depends on another one's result."""


class TrialQueue:
    """The trials of one sweep: those that are left, and those that have been handed to Ray.

    Args:
      source: of the trials.
      number: of them.
      capacity: how many may be with Ray at once.
      tells_left: whether Ray, whose requests all users of a cluster see, may know how many are left; not of a
        sealed sweep, whose number of trials is secret: it uses nodes that join, and asks for none.
    """

    def __init__(
        self, source: TrialSource, number: int, capacity: Capacity, *, tells_left: bool = True
    ) -> None:
        self._source, self._capacity, self._tells_left = source, capacity, tells_left
        self._num_left = number
        self._live: dict[str, Trial] = {}
        self._is_closed = False

    @property
    def running(self) -> dict[str, Trial]:
        """The trials that are with Ray, by name."""
        return {trial.name: trial for trial in self._live.values()}

    @property
    def is_closed(self) -> bool:
        """Whether no more trials are handed out."""
        return self._is_closed

    def close(self) -> None:
        """Hand out no more trials: the sweep's time is over."""
        self._is_closed = True

    def next_trial(self, trial_id: str) -> Trial | None:
        """Return the next trial; None where the cluster has no room for one more."""
        if len(self._live) >= self._capacity.trials_at_once():
            return None
        trial = self._source.next_trial()
        self._live[trial_id], self._num_left = trial, self._num_left - 1
        return trial

    def ended(self, trial_id: str) -> None:
        """Hear that a trial ended."""
        self._capacity.let_go()
        self._source.ended(self._live.pop(trial_id).name)

    def look(self, num_begun: int) -> None:
        """Let the cluster follow what is left.

        Args:
          num_begun: trials that run, of those that have been handed to Ray.
        """
        num_left = self._num_left if self._tells_left else 0
        self._capacity.follow(num_begun, len(self._live) - num_begun, num_left)

    def node_number(self, node_id: str) -> int:
        """Return the number by which messages name a node."""
        return self._capacity.number_of(node_id)


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A folder for what Ray writes and nobody needs later; its path is short, for sockets lie in it.

    Ray's logs and Tune's state hold names, scores and times of trials, so it is for this user alone (mode
    0700), and goes with the sweep; what a killed one left goes when the next one starts.
    """
    base = Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())
    _remove_left_folders(base)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=base, ignore_cleanup_errors=True) as path:
        lock = FileLock(Path(path) / _OWNER_LOCK, fallback_to_soft=False)
        with lock:
            yield Path(path)


def _remove_left_folders(base: Path) -> None:
    """Remove the scratch folders of this user whose drivers have ended: a living one holds a lock."""
    for path in base.glob(f"{_SCRATCH}*"):
        with suppress(OSError, Timeout):
            if path.lstat().st_uid != os.getuid() or path.is_symlink() or not (path / _OWNER_LOCK).is_file():
                continue
            with FileLock(path / _OWNER_LOCK, timeout=0, fallback_to_soft=False):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _connected(scratch: Path) -> Iterator[None]:
    """A Ray of this process's own, unless `RAY_ADDRESS` or a job names a cluster; never by discovery."""

    shared: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    folder = Path.cwd()
    if not runs_uploaded_copy():
        os.chdir(CODE_ROOT)  # Ray puts the driver's folder first on its workers' path
        own = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # the user's network may be there
        found = [str(CODE_ROOT), *(str(folder / path) for path in own if path)]
        shared["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(found)}}
    try:
        if _joins_cluster():
            _start(shared, scratch)
            yield
        else:
            _keep_token_out_of_home()
            private = {"address": "local", "include_dashboard": False, "_temp_dir": str(scratch / "ray")}
            with _alone():
                _start(shared | private, scratch)
                yield
    finally:
        _shut_down()
        os.chdir(folder)


def _shut_down() -> None:
    """End this process's part in Ray, its garbage first; none is collected meanwhile.

    Ray ends the whole process, at once and with code 1, where the collector of another thread comes upon a
    handle of Ray's while it shuts down: with a node that is cut off that takes seconds.
    """
    import ray

    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        ray.shutdown()
    finally:
        if was_enabled:
            gc.enable()


def _start(options: Mapping[str, Any], scratch: Path) -> None:
    """Start or join Ray, at the second try if need be; what a failed start has begun is ended.

    Raises:
      ClusterError: it did not start in the time that Ray gives its own processes, or not at all.
    """
    import ray

    for _ in range(_TRIES):  # a busy machine may need longer than Ray waits for its own processes
        try:
            ray.init(**options)
        except Exception as error:  # Ray raises plain Exceptions, too
            _refuse_other_versions(str(error))
            said = text_of_error(error, os.environ.get("RAY_ADDRESS", ""))
        else:
            return
        ray.shutdown()
        _end_processes_of(scratch)
    raise ClusterError(
        "Ray must start, or answer, before anything is trained, and did not; nothing was charged. This "
        "machine may have no processor time, memory or room in /tmp left: try again when it has, or set "
        f"RAY_ADDRESS to a cluster that answers. Ray says: {said.partition('. ')[0][:300]}"
    )


def _refuse_other_versions(said: str) -> None:
    """Refuse a cluster of another Ray or Python, which Ray tells in a paragraph.

    Raises:
      ConfigError: names both.
    """
    found = re.findall(r"Ray: (\S+)\s+Python: (\S+)", said)
    if "Version mismatch" in said and len(found) == 2:
        (ray, python), (own_ray, own_python) = found
        raise ConfigError(
            "the cluster must run the Ray and the Python of this process, Ray "
            f"{own_ray} and Python {own_python}; got Ray {ray} and Python {python}: install what "
            "constraints.txt pins on all nodes; python -m sweeps.doctor names them"
        )


def _end_processes_of(scratch: Path) -> None:
    """End this process's children that a private Ray has started: their command lines name its folder."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(str(scratch) in argument for argument in child.cmdline()):
                child.kill()


@contextmanager
def _alone() -> Iterator[None]:
    """Within it, a Ray that is started binds to the loopback address, and serves no metrics."""
    from ray._private import ray_constants

    before = {name: os.environ.get(name) for name in _ALONE}
    constants: Any = ray_constants
    enabled = constants.ENABLE_RAY_CLUSTER  # read when Ray was imported, perhaps by the user's own code
    os.environ.update(_ALONE)
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _joins_cluster() -> bool:
    return inside_ray_job() or os.environ.get("RAY_ADDRESS", "local") not in ("", "local")


def _check_address() -> None:
    """Refuse a `RAY_ADDRESS` that names no cluster or does not answer; Ray itself would wait for good."""
    address = os.environ.get("RAY_ADDRESS", "")
    if inside_ray_job() or not _joins_cluster():
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        said = text_of_error(error, address)
    else:
        return
    raise ConfigError(
        "RAY_ADDRESS must be the host:port of a cluster that answers, or unset for a private Ray; "
        f"got {masked(address)!r} ({said})"
    )


def _keep_token_out_of_home() -> None:
    """Give a private Ray a token of its own; Ray would write one under the home folder for good."""
    if not any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _tune(
    folder: SweepFolder,
    trials: Sequence[Trial],
    session: RaySession,
    records: list[Any],
    callback: Any,
    *,
    data_are_public: bool,
) -> dict[str, str]:
    from ray import tune

    from trainers.ray_worker import resources_of_trial_function, run_trial

    def given(trial: Trial) -> RayTrial:
        charged = callback.budget is not None
        found = _ray_trial(
            trial,
            folder,
            session,
            charged=charged,
            data_are_public=data_are_public,
            is_open=callback.watch.is_open,
        )
        if not callback.watch.is_open:  # nothing may end it
            return found
        return dataclasses.replace(found, oversight=callback.stopping.oversight(trial.name))

    def run_given(tune_config: Mapping[str, Any], *, records: list[Any]) -> None:
        run_trial(tune_config, trials={tune_config["trial"]: tune_config["given"]}, records=records)

    function = tune.with_parameters(run_given, records=records)
    tuner = tune.Tuner(
        tune.with_resources(function, resources_of_trial_function(given(trials[0]))),
        tune_config=tune.TuneConfig(
            search_alg=_searcher(callback.queue, given),
            num_samples=len(trials),
            reuse_actors=True,
            trial_name_creator=_nameless,  # by itself it has the trial's own name, and so its place
            trial_dirname_creator=_nameless,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(session.scratch),
            callbacks=[callback],
            failure_config=tune.FailureConfig(max_failures=session.service.max_restarts),
            verbose=0,
        ),
    )
    with _state_in(session.scratch), _signals_noted(callback):
        tuner.fit()
    if callback.ending.signals:
        raise Stopped(callback.ending.signals[0], is_saved=True)
    names = [trial.name for trial in trials if trial.name not in callback.done]
    if callback.queue.is_closed:  # the time was over: what did not end has not failed
        names = [name for name in names if name in callback.errors]
    return {name: callback.errors.get(name, "unknown error") for name in names}


@contextmanager
def _state_in(scratch: Path) -> Iterator[None]:
    """Have Tune keep its state in the scratch folder; by itself it takes Ray's, which a whole cluster reads.

    Tune has no option for it: the function that names the folder is replaced.
    """
    from ray.train._internal import storage as of_ray

    storage: Any = of_ray
    folder = scratch / "state"
    folder.mkdir(exist_ok=True)
    before = storage._get_ray_train_session_dir
    storage._get_ray_train_session_dir = lambda: str(folder)
    try:
        yield
    finally:
        storage._get_ray_train_session_dir = before


def _ray_trial(
    trial: Trial,
    folder: SweepFolder,
    session: RaySession,
    *,
    charged: bool,
    data_are_public: bool,
    is_open: bool,
) -> RayTrial:
    from trainers.ray_worker import RayTrial, packed_method

    return RayTrial(
        name=trial.name,
        config=trial.config,
        checkpoint_folder=folder.checkpoint_folder(trial.name),
        count_file=folder.count_file(trial.name),
        ray_folder=folder.path / "ray"
        if trial.config.performance.num_workers > 1
        else session.scratch / "train",
        code_root=None if runs_uploaded_copy() else CODE_ROOT,
        gpus_per_worker=session.service.gpus_per_worker,
        memory_share=1 / session.capacity.workers_per_node(),
        charged=charged,
        scratch=session.scratch,
        method=packed_method(trial.config.mechanism.method),
        data_are_public=data_are_public,
        progress_file=folder.progress_file(trial.name) if is_open else None,
    )


def _nameless(trial: Any) -> str:
    """Return Tune's id of a trial, for its folders."""
    return str(trial.trial_id)


def _searcher(queue: TrialQueue, given: Callable[[Trial], RayTrial]) -> Any:
    from ray.tune.search import Searcher

    class Ask(Searcher):
        """Ask the queue for every trial, and tell it how each one ended."""

        def __reduce__(self) -> tuple[type[Any], tuple[()]]:
            """Tune writes its searcher down; what this one holds stays here, and lasts by itself."""
            return Searcher, ()

        def suggest(self, trial_id: str) -> Any:
            if queue.is_closed:
                return Searcher.FINISHED
            trial = queue.next_trial(trial_id)
            return None if trial is None else {"trial": trial.name, "given": given(trial)}

        def on_trial_complete(
            self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
        ) -> None:
            queue.ended(trial_id)

        def save(self, checkpoint_path: str) -> None:
            """Save nothing: what was proposed and found is in the sweep's folder."""

    return Ask()


def _callback(
    on_result: OnResult,
    budget: SweepBudget | None,
    folder: SweepFolder,
    queue: TrialQueue,
    supervisor: Supervisor,
    stopping: Stopping,
    watch: SweepWatch | SealedWatch,
) -> Any:
    from ray import tune

    class Hear(tune.Callback):
        """Hand every trial's one result to the driver, and follow its attempts."""

        def __init__(self) -> None:
            self.budget, self.queue, self.stopping, self.watch = budget, queue, stopping, watch
            self.done: set[str] = set()
            self.errors: dict[str, str] = {}
            self.ending = Ending(queue, supervisor, stopping, saves=watch.is_open)

        def __reduce__(self) -> tuple[type[Any], tuple[()]]:
            """Tune writes its callbacks down; what this one holds, records and ledger, stays here."""
            return tune.Callback, ()

        def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
            _confirm(budget)
            with _ended_by_full_disk():
                self.ending.look()
                supervisor.look()
                _stop_what_must(queue, stopping)
            queue.look(supervisor.num_begun)

        def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            with _ended_by_full_disk():
                folder.mark_start(trial.config["trial"])  # Tune asks the process to train only after this
            _note_start(trial, queue, supervisor)
            given = trial.config["given"]
            watch.started(given.name, given.config.mechanism.num_steps, given.progress_file)

        def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            supervisor.lost(trial.config["trial"], _last_words(trial))
            if budget is not None:
                with _ended_by_full_disk():
                    budget.restarted(trial.config["trial"])

        def on_trial_result(
            self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
        ) -> None:
            name = trial.config["trial"]
            _end_where_full(result)
            if "error" in result:
                self.errors[name] = with_advice(result["error"])
            elif name not in self.done and "metrics" in result:
                with _ended_by_full_disk():
                    on_result(name, {"metrics": result["metrics"], "series": result["series"]})
                self.done.add(name)

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            supervisor.ended(trial.config["trial"])
            watch.ended(trial.config["trial"])

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            name = trial.config["trial"]
            why = supervisor.lost(name, _last_words(trial))
            self.errors[name] = supervisor.given_up(name, why)
            supervisor.ended(name)
            watch.ended(name)

    return Hear()


def _end_where_full(result: Mapping[str, Any]) -> None:
    if result.get("error") == NO_ROOM:
        raise DiskFull


@contextmanager
def _ended_by_full_disk() -> Iterator[None]:
    """End the sweep where no space is left; Tune would take the error for that of a training."""
    try:
        yield
    except (DpgclError, OSError) as error:
        if not is_disk_full(error):
            raise
        raise DiskFull from error


def _stop_what_must(queue: TrialQueue, stopping: Stopping, *, must_end: bool = False) -> None:
    """Answer trainings that ask whether they go on; end all, and begin none, when the time is over."""
    stopping.look(queue.running, must_end=must_end)
    if stopping.is_over:
        queue.close()


def _confirm(budget: SweepBudget | None) -> None:
    """Ask the ledger whether the reservations stand."""
    if budget is not None:
        budget.confirm()


def _last_words(trial: Any) -> str:
    """What Ray says of a trial's last failure; Tune's file holds all of them."""
    file = Path(trial.error_file or "none")  # `get_error` looks where it arrives later
    return file.read_text(errors="replace").rpartition("Failure # ")[2] if file.is_file() else ""


def _note_start(trial: Any, queue: TrialQueue, supervisor: Supervisor) -> None:
    """Tell of a start what Tune knows: the process, its node, and how it is ended."""
    import ray
    from ray._private.state import actors

    from trainers.ray_worker import runs_in_place

    given, actor, ray_actors = trial.config["given"], trial.temporary_state.ray_actor, actors
    in_place, found = runs_in_place(given), None
    if in_place and actor is not None:
        found = ray_actors(actor._actor_id.hex()).get("Address", {}).get("NodeID")
    node = queue.node_number(found) if found else None
    supervisor.started(given, lambda: ray.kill(actor), node, in_place=in_place)


class Ending:
    """End a sweep that a signal asks to stop: an open one once its trainings have saved.

    Args:
      queue, supervisor, stopping: of the sweep.
      saves: whether anything is gained by waiting; not in a sealed sweep, whose interrupted trials are over.

    Attributes:
      signals: those that came; after a second one nothing is waited for.
    """

    def __init__(self, queue: TrialQueue, supervisor: Supervisor, stopping: Stopping, *, saves: bool) -> None:
        self._queue, self._supervisor, self._stopping, self._saves = queue, supervisor, stopping, saves
        self._waits_until: float | None = None
        self.signals: list[int] = []

    def look(self) -> None:
        """Raise Stopped where the sweep ends now; let no training begin or go on where it ends soon."""
        if not self.signals:
            return
        number, now = self.signals[0], time.monotonic()
        if not self._saves:
            raise Stopped(number)
        _stop_what_must(self._queue, self._stopping, must_end=True)
        num_drawing = len(self._supervisor.drawing)
        if self._waits_until is None:
            self._waits_until = now + _PATIENCE_SECONDS[signal.Signals(number)]
            if num_drawing:
                warn(stopping_text(num_drawing))
        if not num_drawing or len(self.signals) > 1 or now >= self._waits_until:
            raise Stopped(number, is_saved=not num_drawing)


@contextmanager
def _signals_noted(callback: Any) -> Iterator[None]:
    """SIGINT and SIGTERM end the sweep at one of Tune's next steps, which are fractions of a second.

    Raising in the handler itself would break whatever call into Ray's core it interrupts. A third signal ends
    the process at once; `--resume` copes with that, too.
    """

    def note(number: int, frame: Any) -> None:
        callback.ending.signals.append(number)
        if len(callback.ending.signals) > 2:
            leave_terminal_usable()
            os._exit(128 + number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
