"""Ray Tune's part of a sweep: it requests trials, starts their processes, and returns their results.

Import this module after Ray is connected, because Tune reads its environment when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.search import Searcher

from dpgcl_core.sampling.slots import ShardedGroups
from sweeps.service.cluster.execution import Execution
from sweeps.service.cluster.interruption import (
    DiskFull,
    Interruption,
    StopRequest,
    full_disk_ends_sweep,
    stop_trainings,
)
from sweeps.service.cluster.ray_session import RaySession
from sweeps.service.cluster.trial_failure import UNKNOWN, FailureKind, TrialFailure
from sweeps.service.cluster.trial_queue import TrialQueue
from sweeps.service.planning.trials import Trial
from trainers.data.dataset import TrainingData
from trainers.files.storage import CODE_ROOT, runs_uploaded_copy
from trainers.ray_internals import trial_actor, tune_state_in
from trainers.ray_worker import (
    RayTrial,
    packed_method,
    resources_of_trial_function,
    run_trial,
    runs_in_place,
)


class QueueSearcher(Searcher):
    """Tune's searcher, which takes every trial from the queue and reports ended trials to it.

    Args:
      queue: the queue of the sweep's trials.
      worker_input: maps a trial to the input of its processes.
    """

    def __init__(self, queue: TrialQueue, worker_input: Callable[[Trial], RayTrial]) -> None:
        super().__init__()
        self._queue, self._worker_input = queue, worker_input

    def __reduce__(self) -> tuple[type[Any], tuple[()]]:
        """Pickle as an empty `Searcher`, because the sweep stores its trials itself."""
        return Searcher, ()

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial; None if the cluster has no room for another trial."""
        if self._queue.is_closed:
            return Searcher.FINISHED
        trial = self._queue.next_trial(trial_id)
        return None if trial is None else {"trial": self._worker_input(trial)}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Report the ended trial to the queue, which makes room for the next."""
        self._queue.note_end(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Save nothing, because proposals and results are in the sweep's folder."""


class TrialCallback(tune.Callback):
    """Hands each trial's result to the driver once, and monitors the trial's attempts.

    Attributes:
      finished_names: the names of the trials with a result.
      failures: the failures of trials that will not be tried again, by name.
      interruption: ends the sweep after a signal.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self.finished_names: set[str] = set()
        self.failures: dict[str, TrialFailure] = {}
        self.interruption = Interruption(
            execution.queue, execution.supervisor, execution.stopping, saves=execution.is_open
        )

    def __reduce__(self) -> tuple[type[Any], tuple[()]]:
        """Pickle as an empty `Callback`: Tune must not store the ledger or anything about the records."""
        return tune.Callback, ()

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Confirm the reservations, end what must stop, and update the requests for resources."""
        running = self._execution
        if running.budget is not None:
            running.budget.confirm()
        with full_disk_ends_sweep():
            self.interruption.check()
            running.supervisor.check_attempts()
            stop_trainings(running.queue, running.stopping)
        running.queue.update_requests(running.supervisor.num_begun)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Count the start durably, and monitor the attempt; Tune lets the process train only after this."""
        running, task = self._execution, trial.config["trial"]
        with full_disk_ends_sweep():
            running.folder.mark_start(task.name)
        actor = trial_actor(trial)
        running.supervisor.note_start(task, lambda: ray.kill(actor), in_place=runs_in_place(task))
        if running.watch is not None:
            running.watch.note_start(task.name, task.config.mechanism.num_steps, task.progress_file)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Charge the restart of a training whose process died."""
        name, budget = trial.config["trial"].name, self._execution.budget
        self._execution.supervisor.note_loss(name, _last_error_text(trial))
        if budget is not None:
            with full_disk_ends_sweep():
                budget.restarted(name)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Hand a result to the driver once, or note the failure; a full disk ends the sweep."""
        name = trial.config["trial"].name
        if "error" in result:
            failure = TrialFailure.of_worker(result["error"])
            if failure.kind is FailureKind.DISK_FULL:
                raise DiskFull
            self.failures[name] = failure
        elif name not in self.finished_names and "metrics" in result:
            with full_disk_ends_sweep():
                self._execution.on_result(name, {"metrics": result["metrics"], "series": result["series"]})
            self.finished_names.add(name)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Stop monitoring the trial."""
        self._note_end(trial.config["trial"].name)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Note the failure of a lost training that will not be restarted."""
        name, supervisor = trial.config["trial"].name, self._execution.supervisor
        self.failures[name] = supervisor.give_up(name, supervisor.note_loss(name, _last_error_text(trial)))
        self._note_end(name)

    def _note_end(self, name: str) -> None:
        self._execution.supervisor.note_end(name)
        if (watch := self._execution.watch) is not None:
            watch.note_end(name)


def tune_trials(
    execution: Execution, session: RaySession, trials: Sequence[Trial], data: TrainingData
) -> dict[str, TrialFailure]:
    """Run trials until all have ended or the sweep's time is over; as `trial_runner.run_trials`."""

    def worker_input(trial: Trial) -> RayTrial:
        return ray_trial(execution, session, trial, data_are_public=data.train_is_public)

    callback = TrialCallback(execution)
    stage = trials[0].config.mechanism.group_stage()  # all trials of a sweep have the same shards
    parts = data.parts(stage) if isinstance(stage, ShardedGroups) else [data]
    function = tune.with_parameters(run_trial, records=[ray.put(part) for part in parts])
    tuner = tune.Tuner(
        tune.with_resources(function, resources_of_trial_function(worker_input(trials[0]))),
        tune_config=tune.TuneConfig(
            search_alg=QueueSearcher(execution.queue, worker_input),
            num_samples=len(trials),
            reuse_actors=True,
            trial_name_creator=_tune_trial_id,  # Tune's default would reveal the trial's position
            trial_dirname_creator=_tune_trial_id,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(session.scratch),
            callbacks=[callback],
            failure_config=tune.FailureConfig(max_failures=session.service.max_restarts),
            verbose=0,
        ),
    )
    state = session.scratch / "state"
    state.mkdir(exist_ok=True)
    with tune_state_in(state), callback.interruption.handling_signals():
        tuner.fit()
    if signals := callback.interruption.signals:
        raise StopRequest(signals[0], is_saved=True)
    names = [trial.name for trial in trials if trial.name not in callback.finished_names]
    if execution.queue.is_closed:  # the time is over: trials that did not end have not failed
        names = [name for name in names if name in callback.failures]
    return {name: callback.failures.get(name, UNKNOWN) for name in names}


def ray_trial(execution: Execution, session: RaySession, trial: Trial, *, data_are_public: bool) -> RayTrial:
    """Return the input for the processes of a trial.

    Trainings of a sealed sweep write no progress, and are never ended early.
    """
    folder, is_open = execution.folder, execution.is_open
    return RayTrial(
        name=trial.name,
        config=trial.config,
        checkpoint_folder=folder.checkpoint_folder(trial.name),
        count_file=folder.count_file(trial.name),
        storage_root=folder.root,
        ray_folder=folder.path / "ray"
        if trial.config.performance.num_workers > 1
        else session.scratch / "train",
        code_root=None if runs_uploaded_copy() else CODE_ROOT,
        gpus_per_worker=session.service.gpus_per_worker,
        memory_share=1 / session.capacity.workers_per_node(),
        is_paid=execution.budget is not None,
        scratch=session.scratch,
        method=packed_method(trial.config.mechanism.method),
        data_are_public=data_are_public,
        oversight=execution.stopping.oversight(trial.name) if is_open else None,
        progress_file=folder.progress_file(trial.name) if is_open else None,
    )


def _tune_trial_id(trial: Any) -> str:
    """Return Tune's random id of a trial, as the name of its folders."""
    return str(trial.trial_id)


def _last_error_text(trial: Any) -> str:
    """Return Ray's message on a trial's last failure, from the file to which Tune appends all of them."""
    file = Path(trial.error_file or "none")  # `get_error` reads a path where the file arrives later
    return file.read_text(errors="replace").rpartition("Failure # ")[2] if file.is_file() else ""
