"""One trial on Ray: a Tune trial function around one Ray Train run. The only Ray Train file.

A training on one worker is a Ray Train run in local mode: `TorchTrainer.fit` calls the worker's function
inside the trial's own process, which saves the ten seconds that starting a worker group takes. With
`worker_processes`, or W > 1 workers, it starts a worker group: W processes with resources of their own
and a gloo or nccl process group.

The records come from Ray's object store: put there once by the driver, mapped read-only by every
process of a machine, never copied per trial.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch.distributed as dist
from ray import cloudpickle as _cloudpickle
from ray import tune
from ray.train import RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchTrainer

from dpgcl_core.errors import ConfigError, DpgclError
from dpgcl_core.mechanism.registry import METHODS, is_installed, method_named, register
from trainers.config.training import TrainingConfig
from trainers.files.checkpoint import CheckpointFolder
from trainers.training.workers import current_workers

if TYPE_CHECKING:
    from trainers.data.dataset import TrainingData

cloudpickle: Any = _cloudpickle  # without types

# "[…/gloo/transport/tcp/pair.cc:547] Connection closed by peer"; or a class of its own.
_FROM_GLOO = re.compile(r"^\[[^\]\n]*gloo/[^\]\n]*\]")


@dataclass(frozen=True, kw_only=True)
class RayTrial:
    """What a trial's processes need besides the records.

    Attributes:
      name: the trial's name.
      config: the training.
      checkpoint_folder: where it saves and resumes; seen by all nodes.
      count_file: where its steps are counted before they are drawn, outside that folder; likewise.
      ray_folder: where Ray Train keeps its own state; seen by all nodes.
      code_root: the copy of the code that the driver runs, which every process must run too; None where
        nodes have copies of their own.
      gpus_per_worker: GPUs of one worker.
      memory_share: the part of its machine's free memory that one worker may use.
      charged: whether a ledger pays for it: then no step is drawn that the driver has not reserved.
      method: the training's method, where the program registered it itself, by `packed_method`.
    """

    name: str
    config: TrainingConfig
    checkpoint_folder: Path
    count_file: Path
    ray_folder: Path
    code_root: Path | None
    gpus_per_worker: float
    memory_share: float
    charged: bool = False
    method: bytes | None = None


def packed_method(name: str) -> bytes | None:
    """Return a method for processes that do not know it; None for those that every process finds by itself.

    Its class travels whole, with the module that defines it; what that module imports must be found by the
    workers, too.

    Raises:
      ConfigError: it cannot be sent to another process.
    """
    if is_installed(name):
        return None
    method = method_named(name)
    module = sys.modules.get(type(method).__module__)
    ours = module is None or module.__name__ == "__main__" or module.__name__.startswith("dpgcl_core.")
    try:
        if ours:  # cloudpickle sends what a script defines as a whole
            return bytes(cloudpickle.dumps(method))
        cloudpickle.register_pickle_by_value(module)
        try:
            return bytes(cloudpickle.dumps(method))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
    except Exception as error:  # a user's class may refuse in any way
        raise ConfigError(
            f"the method {name!r} must be sent to the workers, and cannot be pickled: "
            f"{type(error).__name__}: {error}"
        ) from error


def know_method(trial: RayTrial) -> None:
    """Register the method that came with a trial, where this process does not know it yet."""
    if trial.method is not None and trial.config.mechanism.method not in METHODS:
        register(cloudpickle.loads(trial.method))


def run_trial(
    tune_config: Mapping[str, Any],
    *,
    trials: Mapping[str, RayTrial],
    records: list[ray.ObjectRef[TrainingData]],
) -> None:
    """Tune's trial function: train `trials[tune_config["trial"]]` and report its result once.

    Args:
      tune_config: Tune's sample; `trial` names the training.
      trials: all trainings of the sweep.
      records: one reference to the `TrainingData`, in a list so that Ray passes it on unread.
    """
    trial = trials[tune_config["trial"]]
    know_method(trial)
    in_place = runs_in_place(trial)
    worker: Callable[..., Any] = train_worker  # what it returns is handed on, against the declared type
    trainer = TorchTrainer(
        worker,
        train_loop_config={"trial": trial, "records": records},
        scaling_config=ScalingConfig(
            num_workers=0 if in_place else trial.config.performance.num_workers,
            use_gpu=trial.gpus_per_worker > 0,
            resources_per_worker=None if in_place else resources_per_worker(trial),
        ),
        run_config=RunConfig(name=trial.name, storage_path=str(trial.ray_folder)),
    )
    try:
        fitted: Any = trainer.fit()  # a process that dies raises here, and Tune starts over
        result = fitted.return_value
    except WorkerGroupError as error:
        told = [each for each in error.worker_failures.values() if isinstance(each, TrainingFailed)]
        if not told:
            raise
        result = {"error": str(told[0])}
    tune.report(result)


class TrainingFailed(Exception):  # noqa: N818
    """One of several workers failed by itself; carries what may be told of it."""


class WorkerLost(Exception):  # noqa: N818
    """Another worker's process died: the training is worth another attempt."""


def train_worker(loop_config: Mapping[str, Any]) -> dict[str, Any]:
    """One worker of one training; the first one's return value is the trial's result.

    An exception is returned, not raised: repeating a training that fails by itself would fail again and
    be charged again. Only the death of a process is worth another attempt. SystemExit and its like are
    failures as well: Ray would end the process with their text in its logs and on the terminal.
    """
    trial: RayTrial = loop_config["trial"]
    know_method(trial)
    data = ray.get(loop_config["records"][0])
    try:
        return _train(trial, data)
    except BaseException as error:
        text = describe_error(error, data_are_public=data.train_is_public)
        if current_workers().count == 1:
            return {"error": text}
        if _lost_another_worker(error):
            raise WorkerLost("a worker of this training was lost") from None  # its text goes to Ray's logs
        raise TrainingFailed(text) from None  # the other workers wait for this one: end the group
    finally:
        _give_memory_back()


def _give_memory_back() -> None:
    """Return freed memory to the system, where the C library can: the process runs trial after trial.

    Without it the heap stays as large as the largest trial made it (`batch` on Fashion-MNIST: 906 MB
    against 573 MB after fourteen trials).
    """
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _train(trial: RayTrial, data: TrainingData) -> dict[str, Any]:
    from trainers.training.loop import (
        train,  # torch and scikit-learn: not needed by the processes that only wait
    )

    _check_code(trial.code_root)
    every_steps = trial.config.performance.checkpoint_every_steps
    result = train(
        trial.config,
        data,
        workers=current_workers(),
        checkpoints=CheckpointFolder(
            trial.checkpoint_folder,
            every_steps=every_steps,
            charged=trial.charged,
            count_file=trial.count_file,
        ),
        memory_share=min(1.0, trial.gpus_per_worker) or trial.memory_share,
    )
    return {"metrics": result.metrics, "series": result.series}


def _lost_another_worker(error: BaseException) -> bool:
    """Whether this worker failed only because another one's process died: what torch itself says then."""
    return isinstance(error, dist.DistBackendError) or (
        type(error) is RuntimeError and _FROM_GLOO.match(str(error)) is not None
    )


def describe_error(error: BaseException, *, data_are_public: bool) -> str:
    """Return what may be told of an exception: with private records its text may carry one.

    >>> describe_error(KeyError("a name from a record"), data_are_public=False)
    'KeyError (its message is withheld: the training data are private)'
    """
    if isinstance(error, DpgclError):
        return str(error)
    if data_are_public:
        return "".join(traceback.format_exception(error)).strip()
    return f"{type(error).__name__} (its message is withheld: the training data are private)"


def runs_in_place(trial: RayTrial) -> bool:
    """Whether the trial function trains itself, as the one worker."""
    performance = trial.config.performance
    return performance.num_workers == 1 and not performance.worker_processes


def resources_per_worker(trial: RayTrial) -> dict[str, float]:
    """Return what Ray sets aside for one worker."""
    resources: dict[str, float] = {"CPU": trial.config.performance.threads_per_worker}
    if trial.gpus_per_worker:
        resources["GPU"] = trial.gpus_per_worker
    return resources


def resources_of_trial_function(trial: RayTrial) -> dict[str, float]:
    """Return what Tune sets aside for the trial function.

    In front of a worker group it only waits: it takes some memory and no CPU, so that it can never hold
    the CPU its own workers wait for.
    """
    if runs_in_place(trial):
        return resources_per_worker(trial)
    return {"memory": 200 * 2**20}


def _check_code(code_root: Path | None) -> None:
    """Refuse to train with another copy of the code than the driver's."""
    here = Path(__file__).resolve().parents[1]
    if code_root is not None and here != code_root:
        raise RuntimeError(f"this process imported {here}, but the sweep runs {code_root}")
