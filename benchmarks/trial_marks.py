"""When a trial's phases begin and end: wrapped around the trial function and around the worker's.

Ray pickles these functions by reference, so they stand in a module that its processes can import. Times
are of the wall clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import time

IMPORT_STARTED = time.time()
"""When this process began to import what a worker's function needs: Ray does so before it calls it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
from ray import tune

from dpgcl_core.mechanism.mechanism import Mechanism
from trainers import ray_worker
from trainers.files.checkpoint import CheckpointFolder

IMPORT_ENDED = time.time()

run_trial = ray_worker.run_trial
train_worker = ray_worker.train_worker


def marked_run_trial(
    tune_config: Mapping[str, Any],
    *,
    trials: Mapping[str, ray_worker.RayTrial],
    records: list[ray.ObjectRef[Any]],
) -> None:
    """`run_trial` of a sweep, with its phases marked beside the trial's checkpoints."""
    trial = trials[tune_config["trial"]]
    mark(trial, "function")
    ray_worker.train_worker = marked_train_worker
    report = tune.report

    def marked_report(*arguments: Any, **named: Any) -> None:
        mark(trial, "fitted")
        report(*arguments, **named)

    with patch.object(tune, "report", marked_report):
        run_trial(tune_config, trials=trials, records=records)


def marked_train_worker(loop_config: Mapping[str, Any]) -> dict[str, Any]:
    """`train_worker` of a trial; imports and records come first, one by one, to be told apart."""
    trial = loop_config["trial"]
    mark(trial, "worker", import_started=IMPORT_STARTED, import_seconds=IMPORT_ENDED - IMPORT_STARTED)
    from trainers.training import loop

    mark(trial, "imported")
    ray.get(loop_config["records"][0])
    mark(trial, "data")
    with (
        _TimedCalls(loop, "all_scores") as evaluations,
        _TimedCalls(Mechanism, "epsilon") as accounting,
        _TimedCalls(CheckpointFolder, "save") as checkpoints,
    ):
        result = train_worker(loop_config)
    mark(
        trial,
        "trained",
        all_evaluation_seconds=evaluations.seconds,
        accounting_seconds=accounting.seconds,
        checkpoint_seconds=checkpoints.seconds,
    )
    return result


class _TimedCalls:
    """Adds up the seconds spent in a function of a module or a method of a class."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name, self.seconds = owner, name, 0.0

    def __enter__(self) -> _TimedCalls:
        self._function: Callable[..., Any] = getattr(self._owner, self._name)

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return self._function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - started

        setattr(self._owner, self._name, timed)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._function)


def mark(trial: ray_worker.RayTrial, phase: str, **values: float) -> None:
    """Note that `phase` of `trial` is reached now."""
    path = marks_file(trial.checkpoint_folder, trial.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"phase": phase, "time": time.time(), **values}) + "\n")


def marks_file(checkpoint_folder: Path, name: str) -> Path:
    """Return where the marks of the trial `name` lie."""
    return checkpoint_folder.parent.parent / "marks" / f"{name}.jsonl"


def empty_worker() -> None:
    """A Ray Train worker that does nothing."""


def empty_trial(tune_config: Mapping[str, Any], *, storage: str) -> None:
    """A trial that does nothing: a Tune function that launches a TorchTrainer with one worker."""
    from ray import tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        empty_worker,
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name=f"empty-{tune_config['index']}", storage_path=storage),
    ).fit()
    tune.report({"done": 1})
