"""One trial on Ray: a Tune trial function around one Ray Train run.

A training on one worker is a Ray Train run in local mode: `TorchTrainer.fit` calls the worker's function
inside the trial's own process, which saves the ten seconds that starting a worker group takes. With
`worker_processes`, or W > 1 workers, it starts a worker group: W processes with their own resources
and a gloo or nccl process group.

The records come from Ray's object store. The driver puts them there once, every process of a machine
maps them read-only, and they are never copied per trial. With shards, a worker fetches only its own part.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle as _cloudpickle
from ray import tune
from ray.train import RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer

from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.registry import METHODS, is_installed, method_named, register
from dpgcl_core.workers import current_workers, is_lost_connection
from trainers.config.training import TrainingConfig
from trainers.failures import Stage, describe_error
from trainers.files.checkpoint import CheckpointFolder
from trainers.files.outcome_file import write_outcomes
from trainers.files.oversight import Oversight, TrainingStopped
from trainers.files.progress import ProgressWriter
from trainers.files.storage import details_kept
from trainers.ray_internals import TorchBackend, set_torch_distributed_env_vars, setup_torch_process_group

if TYPE_CHECKING:
    from trainers.data.dataset import TrainingData

cloudpickle: Any = _cloudpickle  # the module has no types


@dataclass(frozen=True, kw_only=True)
class RayTrial:
    """The inputs of a trial's processes besides the records.

    Attributes:
      name: the trial's name.
      config: the training's configuration.
      checkpoint_folder: the folder where the training saves and resumes; visible to all nodes.
      count_file: the file, outside `checkpoint_folder`, in which steps are counted before they are drawn;
        visible to all nodes.
      storage_root: the storage folder; details of an error on records are written below it.
      ray_folder: the folder where Ray Train keeps its own state; visible to all nodes.
      code_root: the folder of the driver's copy of the code, which every process must import, too; None if
        nodes have their own copies.
      gpus_per_worker: number of GPUs of one worker.
      memory_share: the share of its machine's free memory that each worker may use.
      is_paid: whether the training is charged to a ledger. If so, no step is drawn that the driver has not
        reserved there.
      scratch: the driver's temporary folder, in which workers on its machine set up their process group.
      method: the training's pickled method, from `packed_method`; None if every process has it installed.
      data_are_public: whether the training data are public, so that a failure may be described in full.
      oversight: decides whether the training continues; None to train to the end.
      progress_file: the file to which the first worker writes the number of steps done; None if nobody may
        see it.
    """

    name: str
    config: TrainingConfig
    checkpoint_folder: Path
    count_file: Path
    storage_root: Path
    ray_folder: Path
    code_root: Path | None
    gpus_per_worker: float
    memory_share: float
    is_paid: bool = False
    scratch: Path | None = None
    method: bytes | None = None
    data_are_public: bool = False
    oversight: Oversight | None = None
    progress_file: Path | None = None


def packed_method(name: str) -> bytes | None:
    """Pickle a registered method for the workers; None for an installed method, which they can import.

    The pickle holds the method's class and the module that defines it. The workers must be able to import
    the other modules that this module imports.

    Raises:
      ConfigError: the method cannot be sent to another process.
    """
    if is_installed(name):
        return None
    method = method_named(name)
    module = sys.modules.get(type(method).__module__)
    is_script_or_core = (
        module is None or module.__name__ == "__main__" or module.__name__.startswith("dpgcl_core.")
    )
    try:
        if is_script_or_core:  # cloudpickle sends a script's classes whole, and workers have dpgcl_core
            return bytes(cloudpickle.dumps(method))
        cloudpickle.register_pickle_by_value(module)
        try:
            return bytes(cloudpickle.dumps(method))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
    except Exception as error:  # a user's class may refuse pickling with any exception
        raise ConfigError(
            f"the method {name!r} must be sent to the workers, but cannot be pickled: "
            f"{type(error).__name__}: {error}"
        ) from error


def register_trial_method(trial: RayTrial) -> None:
    """Register the pickled method of a trial, unless this process already has a method of its name."""
    if trial.method is not None and trial.config.mechanism.method not in METHODS:
        register(cloudpickle.loads(trial.method))


def run_trial(tune_config: Mapping[str, RayTrial], *, records: list[ray.ObjectRef[TrainingData]]) -> None:
    """Train one trial and report its result once to Tune, of which this is the trial function.

    Args:
      tune_config: Tune's configuration of the trial: a mapping from "trial" to the `RayTrial`.
      records: one reference to the `TrainingData`, or with shards one to each worker's, in a list so that Ray
        passes references, not data.
    """
    trial = tune_config["trial"]
    in_place = runs_in_place(trial)
    worker: Callable[..., Any] = train_worker  # Ray returns its result, unlike the declared type
    trainer = TorchTrainer(
        worker,
        train_loop_config={"trial": trial, "records": records},
        scaling_config=ScalingConfig(
            num_workers=0 if in_place else trial.config.performance.num_workers,
            use_gpu=trial.gpus_per_worker > 0,
            resources_per_worker=None if in_place else resources_per_worker(trial),
        ),
        # Ray makes a folder of this name, which other users of a cluster can list. The trial's own name would
        # reveal its place in the sweep.
        run_config=RunConfig(name=f"training-{secrets.token_hex(6)}", storage_path=str(trial.ray_folder)),
        torch_config=FileStoreConfig(folder=None if trial.scratch is None else str(trial.scratch)),
    )
    try:
        fit_result: Any = trainer.fit()  # raises if a process dies, and Tune then repeats the trial
        result = fit_result.return_value
    except WorkerGroupError as error:
        failures = [each for each in error.worker_failures.values() if isinstance(each, TrainingFailed)]
        if not failures:
            raise
        result = {"error": str(failures[0])}
    tune.report(result)


@dataclass
class FileStoreConfig(TorchConfig):
    """Ray's settings of torch's process group, which is set up through a file if workers share a machine.

    By default, Ray sets up the group through a TCP store, which torch opens on all interfaces and without a
    password. Whoever connects can read and rewrite its keys, and so the addresses to which gradients are
    sent. If all workers are on one machine, they use a file instead, in a folder that only its user may
    enter, and their own connections are bound to the loopback interface. Workers on several machines use the
    TCP store, so the computer network that connects them must be closed to others.

    Attributes:
      folder: the parent of the file's folder; if it is None or does not exist, the machine's folder for
        temporary files.
    """

    folder: str | None = None

    @property
    def backend_cls(self) -> type[Any]:
        """The class that sets up the process group."""
        return _FileBackend


class _FileBackend(TorchBackend):
    share_cuda_visible_devices = False  # each worker sees only its own GPU, as `cuda`

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        if len(set(worker_group.execute(_node_id))) > 1:
            super().on_start(worker_group, backend_config)
            return
        on_gpu = worker_group.get_resources_per_worker().get("GPU", 0) > 0
        url = f"file://{worker_group.execute_single(0, _make_store_path, backend_config.folder)}"
        worker_group.execute(set_torch_distributed_env_vars)
        futures = [
            worker_group.execute_single_async(
                rank,
                _join_process_group,
                backend=backend_config.backend or ("nccl" if on_gpu else "gloo"),
                world_rank=rank,
                world_size=len(worker_group),
                init_method=url,
                timeout_s=backend_config.timeout_s,
            )
            for rank in range(len(worker_group))
        ]
        ray.get(futures)


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _make_store_path(folder: str | None) -> str:
    """Make a folder that only this user may enter (mode 0700), and return the path of a file in it."""
    parent = folder if folder is not None and Path(folder).is_dir() else None
    return str(Path(tempfile.mkdtemp(prefix="dpgcl-workers-", dir=parent)) / "store")


def _join_process_group(**options: Any) -> None:
    if sys.platform == "linux":
        os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"})
    setup_torch_process_group(**options)


class TrainingFailed(Exception):  # noqa: N818
    """One of several workers failed; carries the text that may be disclosed about the failure."""


class WorkerLost(Exception):  # noqa: N818
    """Another worker's process died, so Ray should repeat the training."""


def train_worker(loop_config: Mapping[str, Any]) -> dict[str, Any]:
    """Run one worker of one training; the first worker's return value is the trial's result.

    It works in the two stages of `trainers.failures`: everything that can fail without records is done before
    they are fetched. A single worker returns the text of an exception instead of raising it, because a
    repeated training would fail and be charged again. One of several workers raises `TrainingFailed`, or
    `WorkerLost` if the training is worth another attempt. SystemExit and similar exceptions are caught, too:
    Ray would end the process with their text in its logs and on the terminal.

    Args:
      loop_config: the `RayTrial` under "trial", and the `records` of `run_trial` under "records".
    """
    trial: RayTrial = loop_config["trial"]
    stage, result, failure, is_lost = Stage.BEFORE_DATA, dict[str, Any](), "", False
    try:
        _prepare(trial)
        stage = Stage.WITH_DATA
        records = loop_config["records"]
        result = _train(trial, ray.get(records[current_workers().rank % len(records)]))
    except TrainingStopped as stopped:
        result = {"stopped": stopped.step}
    except BaseException as error:
        failure = describe_error(error, data_are_public=trial.data_are_public, stage=stage)
        is_lost = is_lost_connection(error)
    finally:
        _release_heap()
    # Raised here, because inside the `except` block it would carry the caught exception as its context.
    if failure and current_workers().count == 1:
        return {"error": failure}
    if failure and is_lost:
        raise WorkerLost("a worker of this training was lost")  # its text goes to Ray's logs
    if failure:
        raise TrainingFailed(failure)  # ends the group, because the other workers wait for this one
    return result


def _prepare(trial: RayTrial) -> None:
    """Run the checks that need no records, before the process fetches any.

    Raises:
      ConfigError: this process runs another copy of the code, or cannot register the method.
      LedgerError: the ledger has not granted the training's steps.
      StorageError: the files next to the checkpoint are damaged, or another process holds them.
    """
    _check_code(trial.code_root)
    register_trial_method(trial)
    if trial.is_paid and current_workers().rank == 0:
        checkpoints = _checkpoint_folder(trial)
        with checkpoints.hold():
            checkpoints.check_grant(trial.config.mechanism.num_steps)


def _checkpoint_folder(trial: RayTrial) -> CheckpointFolder:
    every_steps = trial.config.performance.checkpoint_every_steps
    return CheckpointFolder(
        trial.checkpoint_folder, every_steps=every_steps, is_paid=trial.is_paid, count_file=trial.count_file
    )


def _release_heap() -> None:
    """Return freed memory to the system, if the C library can, because the process runs trial after trial.

    Otherwise the heap stays as large as the largest trial made it (`batch` on Fashion-MNIST: 906 MB
    against 573 MB after fourteen trials).
    """
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _train(trial: RayTrial, data: TrainingData) -> dict[str, Any]:
    # Imports torch and scikit-learn, which the processes that only wait do not need.
    from trainers.training.loop import train

    with details_kept(trial.storage_root):
        result = train(
            trial.config,
            data,
            workers=current_workers(),
            checkpoints=_checkpoint_folder(trial),
            oversight=trial.oversight,
            memory_share=min(1.0, trial.gpus_per_worker) or trial.memory_share,
            progress=_progress_writer(trial),
        )
    if result.outcomes is not None:  # written before the result, so that every finished training has them
        write_outcomes(trial.checkpoint_folder, result.outcomes)
    return {"metrics": result.metrics, "series": result.series}


def _progress_writer(trial: RayTrial) -> Callable[[int], object]:
    if trial.progress_file is None or current_workers().rank > 0:
        return lambda step: None
    return ProgressWriter(trial.progress_file, trial.config.mechanism.num_steps)


def runs_in_place(trial: RayTrial) -> bool:
    """Whether the trial function itself trains, as the only worker."""
    performance = trial.config.performance
    return performance.num_workers == 1 and not performance.worker_processes


def resources_per_worker(trial: RayTrial) -> dict[str, float]:
    """Return the resources that Ray reserves for one worker."""
    resources: dict[str, float] = {"CPU": trial.config.performance.threads_per_worker}
    if trial.gpus_per_worker:
        resources["GPU"] = trial.gpus_per_worker
    return resources


def resources_of_trial_function(trial: RayTrial) -> dict[str, float]:
    """Return the resources that Tune reserves for the trial function.

    With a worker group the trial function only waits: it takes some memory and no CPU, so that it can never
    hold the CPU that its own workers wait for.
    """
    if runs_in_place(trial):
        return resources_per_worker(trial)
    return {"memory": 200 * 2**20}


def _check_code(code_root: Path | None) -> None:
    """Refuse to train with another copy of the code than the driver's.

    Raises:
      ConfigError: the copies differ; names both.
    """
    here = Path(__file__).resolve().parents[1]
    if code_root is not None and here != code_root:
        raise ConfigError(f"every process must import the sweep's copy of the code, {code_root}; got {here}")
