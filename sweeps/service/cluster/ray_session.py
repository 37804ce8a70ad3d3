"""Connecting to Ray, or starting a private one, and waiting until it has room for one training."""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from dpgcl_core.addresses import masked, text_of_error
from dpgcl_core.errors import ClusterError, ConfigError
from sweeps.service.cluster.capacity import Capacity, Cluster, Node, TrialNeeds, max_concurrent_trials
from sweeps.service.cluster.file_visibility import NeededFile, check_files_visible
from sweeps.service.console.display import doing
from sweeps.service.console.terminal import print_line
from sweeps.service.options.service import ServiceOptions
from sweeps.service.storage.probe import check_shared
from trainers.config.nodes import PerformanceConfig
from trainers.files.storage import CODE_ROOT, inside_ray_job, runs_uploaded_copy

# Environment variables; they are set before Ray is imported, because Ray reads them once.
_RAY_SETTINGS = {
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
    "TUNE_MAX_PENDING_TRIALS_PG": "200",  # `TrialQueue` limits the actual number
}

_MAX_TRIES = 2
_SCRATCH_PREFIX, _OWNER_LOCK = "dpgcl-ray-", "owner.lock"
_AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True)
class RaySession:
    """A connected Ray that can hold at least one training.

    Attributes:
      scratch: a folder for Ray's temporary files.
      capacity: the number of trainings that it can hold, as nodes join and leave.
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
    """Connect to Ray, wait until one training fits, and check storage and files on the nodes.

    Args:
      service: resources of the sweep.
      performance: performance options of every training.
      storage: a folder that all nodes must share; None to check no folder.
      files: the files that trainings read on their nodes.

    Raises:
      ConfigError: `RAY_ADDRESS` names no cluster that answers, or the nodes are too small for one training.
      ClusterError: Ray did not start, or the training did not fit in time.
      StorageError: the nodes do not share the folder.
      DataError: files are missing or differ on a node.
    """
    with connected_ray() as scratch:
        for name in ("ray.tune", "ray.train"):  # the driver reports failures itself
            logging.getLogger(name).setLevel(logging.CRITICAL)
        capacity = capacity_of(service, performance)
        capacity.wait_for_room(service.wait_for_resources)
        if storage is not None and joins_cluster():
            check_shared(storage, print_line)
        if joins_cluster():
            check_files_visible(files)
        yield RaySession(scratch, capacity, service)


@contextmanager
def connected_ray() -> Iterator[Path]:
    """Connect to the cluster of `RAY_ADDRESS` or the job, or start a private Ray; yield the scratch folder.

    Raises:
      ConfigError: `RAY_ADDRESS` names no cluster that answers, or one of other versions.
      ClusterError: Ray did not start or did not answer.
    """
    os.environ.update({k: v for k, v in _RAY_SETTINGS.items() if k not in os.environ})
    doing("joining the Ray cluster" if joins_cluster() else "starting Ray")
    import ray  # noqa: F401  # here, after the environment is set

    _check_address()
    with _scratch_folder() as scratch, _connected(scratch):
        yield scratch


def capacity_of(service: ServiceOptions, performance: PerformanceConfig) -> Capacity:
    """Return the capacity of the Ray that this process is connected to."""
    needs, limit = TrialNeeds.of(service, performance), service.max_concurrent_trials
    return Capacity(needs, limit, Cluster(), grows=joins_cluster())


def check_this_machine(service: ServiceOptions, performance: PerformanceConfig) -> None:
    """Check that the cluster answers, or that a private Ray on this machine could hold one training.

    Raises:
      ConfigError: `RAY_ADDRESS` names no cluster that answers, or this machine is too small for one training.
    """
    _check_address()
    if not joins_cluster():
        max_concurrent_trials(service, performance, [_this_machine()])


def trials_at_once(service: ServiceOptions, performance: PerformanceConfig) -> int:
    """Return how many trainings will run in parallel, estimated before Ray is started; at least one."""
    if joins_cluster():
        return service.max_concurrent_trials or 1
    try:
        return max_concurrent_trials(service, performance, [_this_machine()])
    except ConfigError:  # starting Ray raises it again
        return 1


def _this_machine() -> Node:
    return {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """Yield a folder for Ray's temporary files; its path is short, because it contains sockets.

    Ray's logs and Tune's state contain names, scores and times of trials. So only this user can access the
    folder (mode 0700). It is removed at the end of the sweep; a killed sweep's folder, by the next sweep.
    """
    base = Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())
    _remove_stale_folders(base)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=base, ignore_cleanup_errors=True) as path:
        lock = FileLock(Path(path) / _OWNER_LOCK, fallback_to_soft=False)
        with lock:
            yield Path(path)


def _remove_stale_folders(base: Path) -> None:
    """Remove this user's scratch folders whose drivers have ended; a running driver holds a lock."""
    for path in base.glob(f"{_SCRATCH_PREFIX}*"):
        with suppress(OSError, Timeout):
            if path.lstat().st_uid != os.getuid() or path.is_symlink() or not (path / _OWNER_LOCK).is_file():
                continue
            with FileLock(path / _OWNER_LOCK, timeout=0, fallback_to_soft=False):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _connected(scratch: Path) -> Iterator[None]:
    """Join the cluster of `RAY_ADDRESS` or the job, else start a private Ray; never search for one."""
    shared: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    folder = Path.cwd()
    authentication = {name: os.environ.get(name) for name in _AUTHENTICATION}
    if not runs_uploaded_copy():
        os.chdir(CODE_ROOT)  # Ray puts the driver's folder first on its workers' import path
        user_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # the user's network may be there
        paths = [str(CODE_ROOT), *(str(folder / path) for path in user_paths if path)]
        shared["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}
    try:
        if joins_cluster():
            _start(shared, scratch)
            yield
        else:
            if not any(authentication.values()):
                os.environ["RAY_AUTH_TOKEN"] = _private_token()
            private = {"address": "local", "include_dashboard": False, "_temp_dir": str(scratch / "ray")}
            from trainers.ray_internals import loopback_only

            with loopback_only():
                _start(shared | private, scratch)
                yield
    finally:
        try:
            _shut_down()
            os.chdir(folder)
        finally:
            for name, value in authentication.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})


def _shut_down() -> None:
    """Disconnect this process from Ray, with garbage collected before and none collected meanwhile.

    Ray ends the whole process, at once and with code 1, if the collector of another thread finds one of Ray's
    handles during the shutdown, which takes seconds if a node is disconnected.
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
    """Start or join Ray in at most two tries; the processes of a failed try are ended.

    Raises:
      ConfigError: the cluster runs another version of Ray or Python.
      ClusterError: Ray did not start or did not answer.
    """
    import ray

    for _ in range(_MAX_TRIES):  # a busy machine may need longer than Ray waits for its own processes
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray raises plain Exceptions, too
            _check_versions(str(error))
            problem = text_of_error(error, os.environ.get("RAY_ADDRESS", ""))
        ray.shutdown()
        _end_processes_of(scratch)
    raise ClusterError(
        "Ray did not start or did not answer, so nothing was trained or charged. This machine may be short "
        "of processor time, memory or space in /tmp. Try again later, or set RAY_ADDRESS to a cluster that "
        f"answers. Ray's error: {problem.partition('. ')[0][:300]}"
    )


def _check_versions(message: str) -> None:
    """Raise ConfigError if Ray's error message reports another version of Ray or Python on the cluster."""
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", message)
    if "Version mismatch" in message and len(versions) == 2:
        (ray, python), (own_ray, own_python) = versions
        raise ConfigError(
            f"the cluster must run the same versions as this process, Ray {own_ray} and Python "
            f"{own_python}; got Ray {ray} and Python {python}. Install the versions of constraints.txt on "
            "all nodes; python -m sweeps.doctor lists the nodes that differ"
        )


def _end_processes_of(scratch: Path) -> None:
    """Kill the child processes of a private Ray, whose command lines contain the scratch folder."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(str(scratch) in argument for argument in child.cmdline()):
                child.kill()


def joins_cluster() -> bool:
    return inside_ray_job() or os.environ.get("RAY_ADDRESS", "local") not in ("", "local")


def _check_address() -> None:
    """Raise ConfigError if `RAY_ADDRESS` names no cluster that answers; Ray itself would wait forever."""
    address = os.environ.get("RAY_ADDRESS", "")
    if inside_ray_job() or not joins_cluster():
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
        return
    except (OSError, ValueError, OverflowError) as error:
        problem = text_of_error(error, address)
    raise ConfigError(
        "RAY_ADDRESS must be the host:port of a cluster that answers, or unset for a private Ray; "
        f"got {masked(address)!r} ({problem})"
    )


@functools.cache
def _private_token() -> str:
    """Return the access token of this process's private Rays; Ray would write its own to the home folder.

    There is one token per process, because Ray keeps the first that it reads.
    """
    return secrets.token_hex(32)
