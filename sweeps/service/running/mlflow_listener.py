"""An open sweep in MLflow: a parent run with a run for each finished trial, sent while the sweep runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from dashboards.report.report_content import LEFT_BEFORE
from dpgcl_core.errors import LedgerError, TrackingError
from sweeps.service.cluster.stopping import stopped_at
from sweeps.service.console.terminal import run_name, warn
from sweeps.service.planning.plan import cross_checks
from sweeps.service.planning.trials import ChargedSteps, Trial, is_proven, trial_class
from sweeps.service.privacy.sweep_statement import count_draws_of, steps_left_out
from sweeps.service.running.listeners import SweepBeginning, SweepEnd, TrialResult
from sweeps.service.running.outbox import Outbox, Patience, patiently
from sweeps.service.running.prepare import PreparedSweep
from sweeps.service.running.sweep_trials import SweepTrials
from sweeps.service.storage.log import SweepLog
from trainers.files.launch_record import CONFIG_FILE
from trainers.tracking.mlflow_server import NoAnswer
from trainers.tracking.runs import STOPPED_TAG, Tracker

_BEGINNING = ""
"""The name in the outbox for the sweep's configuration, which is sent before any trial."""


class MlflowListener:
    """Sends one sweep to MLflow.

    Args:
      sweep: the sweep to send.
      trials: the sweep's trials.
      tracker: a future of the server's tracker, which opens in another thread.

    Attributes:
      outbox: a context manager; within it, results are sent while the sweep continues.
      untracked: the names that the server has not accepted when `finish` returns.
    """

    tracker: Tracker

    def __init__(self, sweep: PreparedSweep, trials: SweepTrials, tracker: Future[Tracker]) -> None:
        self._sweep, self._trials, self._tracker_future = sweep, trials, tracker
        self.outbox = Outbox(self._send, warn, str(sweep.folder.path))
        self.untracked: list[str] = []
        self.parent = ""
        self._start_metrics: dict[str, float] | None = None
        self._run_statuses: dict[str, str] | None = None
        self._cross_check_values: dict[Any, dict[str, float]] = {}

    def open(self) -> None:
        """Open the parent run, before anything is charged.

        Raises:
          TrackingError: the server refuses, or does not answer for a minute.
        """
        self.tracker, sweep = self._tracker_future.result(), self._sweep
        question = f"Sweep {sweep.plan.question} on {sweep.plan.source.dataset}."
        shared = sweep.folder.name, sweep.plan.params(), sweep.plan.tags(), question
        self.parent = patiently(lambda: self.tracker.start_sweep(*shared, sweep_id=sweep.sweep_id), warn)
        if sweep.is_new:
            self._start_metrics = {}
            with suppress(LedgerError):  # the ledger's remaining ε before the charge, for the report
                if sweep.budget is not None and (epsilon := sweep.budget.remaining_budget()[0]) is not None:
                    self._start_metrics = {LEFT_BEFORE: epsilon}

    def on_begin(self, sweep: SweepBeginning) -> None:
        """Queue the sweep's configuration, and the results of earlier processes."""
        for name in (_BEGINNING, *self._trials.results()):
            self.outbox.put(name)

    def on_result(self, result: TrialResult) -> None:
        """Queue a result, which is sent while the sweep continues."""
        self.outbox.put(result.name)

    def finish(self, patience: Patience) -> None:
        """Wait until everything is sent, or the server accepts nothing for too long."""
        self.untracked = self.outbox.finish(patience)

    @property
    def lost_results(self) -> list[str]:
        """The results that the server did not accept."""
        return [name for name in self.untracked if name != _BEGINNING]

    def on_end(self, end: SweepEnd) -> None:
        """Set the status of the parent run, unless the server currently accepts no results."""
        if self.untracked:
            return
        try:
            self.tracker.finish_sweep(self.parent, end.status)
        except TrackingError as error:
            warn(f"warning: {error}")

    def log_artifact(self, path: Path) -> None:
        """Store a file with the parent run. Raises `TrackingError` if the server failed."""
        self.tracker.log_artifact(self.parent, path)

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Store metrics with the parent run. Raises `TrackingError` if the server failed."""
        self.tracker.log_metrics(self.parent, metrics)

    def _send(self, name: str) -> None:
        """Send a finished trial, or for `_BEGINNING` the configuration. Raises as in `Tracker.log_trial`."""
        if name == _BEGINNING:
            self._send_beginning()
            return
        if (self._run_statuses or {}).get(name) == "FINISHED":
            return
        trial, result = self._trials.by_name[name], self._trials.results()[name]
        is_new = self._run_statuses is not None and name not in self._run_statuses
        try:
            self.tracker.log_trial(
                self.parent,
                name,
                trial.params,
                _without_constants(trial, result["metrics"]) | self._cross_checks(trial, result["metrics"]),
                result["series"],
                self._tags_of(trial, result["metrics"]),
                axes=self._trials.axes(trial),
                run_name=run_name(trial),
                times_ms=times_ms(result),
                is_new=is_new,
            )
        except TrackingError:
            self._run_statuses = None  # the server may have created a run for the trial
            raise

    def _send_beginning(self) -> None:
        """Send the sweep's configuration, and read which trials already have runs.

        If the server answers with an error, the trials are still sent, and each run is looked up separately.

        Raises:
          NoAnswer: the server does not answer; call again.
        """
        try:
            if self._start_metrics is not None:
                self.log_artifact(self._sweep.folder.path / CONFIG_FILE)
                self.log_metrics(self._start_metrics)
                self._start_metrics = None
            self._run_statuses = self.tracker.trial_statuses(self.parent)
        except NoAnswer:
            raise
        except TrackingError:
            return

    def _tags_of(self, trial: Trial, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return the tags of a trial's run, with its restarts unless they are charged in advance.

        A training with R restart steps is charged T + R steps whatever happens, so no released value may
        reveal its restarts.
        """
        tags = self._sweep.plan.tags() | {"guarantee_label": trial.config.guarantee_label}
        in_advance = trial.config.mechanism.num_restart_steps is not None
        restarts = [] if in_advance else SweepLog(self._sweep.folder.path).restarts(trial.name)
        if (step := stopped_at(trial, metrics)) is not None:
            tags |= {STOPPED_TAG: str(step)}
        return tags | {"restarts": "; ".join(restarts)} if restarts else tags

    def _cross_checks(self, trial: Trial, metrics: dict[str, float]) -> dict[str, float]:
        if not is_proven(trial):
            return {}
        counts = count_draws_of(trial, self._sweep.folder, {"metrics": metrics})
        lost_metrics = lost_attempt_metrics(trial, counts, metrics)
        if not trial.config.mechanism.rules.plain_event:
            return lost_metrics
        key = (trial_class(trial, counts), trial.config.mechanism.target_delta)
        if key not in self._cross_check_values:
            self._cross_check_values[key] = {
                name: value for name, value in cross_checks(*key).items() if math.isfinite(value)
            }
        return self._cross_check_values[key] | lost_metrics


def times_ms(result: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return a training's start and end, in milliseconds since the epoch; None if they are withheld.

    Results on private records have no durations.
    """
    seconds = [result["metrics"].get(name) for name in ("train_seconds", "evaluation_seconds")]
    if "ended_ms" not in result or seconds[0] is None:
        return None
    return result["ended_ms"] - int(1000 * sum(s or 0.0 for s in seconds)), result["ended_ms"]


def _without_constants(trial: Trial, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics; the number of steps done is omitted if it is the planned number, a param."""
    planned = trial.config.mechanism.num_steps
    return {name: value for name, value in metrics.items() if (name, value) != ("num_steps_done", planned)}


def lost_attempt_metrics(
    trial: Trial, counts: ChargedSteps | None, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return a training's charged steps and ε if lost attempts raise them; {} if they do not.

    A lost attempt has left no trace in the checkpoints, so the training itself does not count its steps.

    Args:
      trial: a trial of the sweep.
      counts: upper bounds on all its draws, including lost attempts; None if it has not begun.
      metrics: the metrics that the training itself reports.
    """
    left_out = steps_left_out(trial, metrics)
    if not is_proven(trial) or counts is None or counts.num_steps <= metrics["num_steps_charged"] + left_out:
        return {}
    epsilon = trial.config.epsilon(
        counts.num_steps, num_restarts=counts.num_first_steps - 1, num_scorings=counts.num_scorings
    )
    return {"num_steps_charged": float(counts.num_steps - left_out), "epsilon": epsilon}
