"""Sealed sweeps: K trials in secret, of which one is published.

The theorems of `dpgcl_core.accounting.tuning.bounds` require this order. The tuned cost is charged. K and all
draws are made from the operating system's entropy and stored. Then the trials run, each a fresh independent
draw of (setting, training). Only the best trial is published, with ties broken by coins drawn beforehand. A
trial that fails, or that a crash interrupts, counts as the worst score and is never repeated.

The moment of publication is fixed before K is drawn (`sweeps.service.planning.publication`). Until the moment
nothing is written outside `trusted/`, nothing is sent to MLflow, and the process keeps running. The published
files are prepared before the moment, so that publishing takes the same time whatever K was; then the process
ends.

Visibility. The operator, the terminal, the cluster's logs and `trusted/` in the sweep's folder, which holds K
and the progress, are trusted. Readers of MLflow, of the statement, of the ledger and of `release/` find one
run, without its position among the others. Times that servers and file systems record automatically show the
start or the moment.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from dashboards.compose.answer import Answer
from dashboards.dashboard_error import DashboardError
from dpgcl_core.accounting.tuning.modes import SEALED_THRESHOLD
from dpgcl_core.release.metrics import Release, find_metric
from dpgcl_core.release.statement import RESEARCH, PrivacyStatement
from sweeps.service.cluster.interruption import StopRequest
from sweeps.service.cluster.trial_failure import INTERRUPTED, TrialFailure
from sweeps.service.cluster.trial_queue import ListedTrials, TrialSource
from sweeps.service.console.display import doing
from sweeps.service.console.terminal import duration, print_line, warn
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.budget import SweepBudget
from sweeps.service.privacy.sweep_statement import STATEMENT, build_statement, statement_text, write_statement
from sweeps.service.running.answer_file import answer_text, sweep_answer, write_answer
from sweeps.service.running.clock import SystemClock
from sweeps.service.running.listeners import Listeners, SweepEnd
from sweeps.service.running.prepare import PreparedSweep
from sweeps.service.running.sealed_draws import RESULT, SealedFolder, choose, trials_of_draws
from sweeps.service.storage.sweep_folder import config_hash, write_json
from trainers.export.sweep_results import PUBLISHED, released_state
from trainers.files.checkpoint import CheckpointFolder
from trainers.files.weights import write_weights
from trainers.tracking.runs import SEALED_TIME_MS, Tracker

_HIDDEN_METRICS = ("epsilon", "epsilon_rdp", "epsilon_prv", "num_restarts")


@dataclass(frozen=True, kw_only=True)
class _SealedRun:
    """The content of the one MLflow run that a sealed sweep publishes."""

    outcome: str
    params: Mapping[str, Any]
    metrics: Mapping[str, float]
    statement: PrivacyStatement
    answer: Answer | None


class SealedRelease:
    """The `ReleasePolicy` of a sealed sweep, which charges it once and publishes one trial.

    Args:
      sweep: the prepared sweep; this process holds the lock on its folder.
      tracker: a future of MLflow's tracker, which opens in another thread.
      clock: the clock that times the moment of publication.
    """

    budget: SweepBudget | None = None

    def __init__(self, sweep: PreparedSweep, tracker: Future[Tracker], clock: SystemClock) -> None:
        self._sweep, self._tracker_future, self._clock = sweep, tracker, clock
        self._listeners = Listeners(*sweep.listeners)
        publication = () if sweep.plan.publication is None else (sweep.plan.publication.note(),)
        self._plan = replace(sweep.plan, notes=(*sweep.plan.notes, *publication))
        self._folder, self._name = SealedFolder(sweep.folder), sweep.folder.name
        self.folder = self._folder.trusted
        self.service = replace(sweep.service, max_restarts=0)

    def remaining(self) -> list[Trial]:
        """Charge the sweep and draw its trials, unless an earlier process did; return the trials to run.

        Raises:
          LedgerError: the sweep cannot be charged; nothing was drawn.
          TrackingError: MLflow does not answer; nothing was charged.
        """
        doing("opening MLflow")
        self._tracker = self._tracker_future.result()
        self._start = self._folder.begin(self._sweep, self._plan, self._clock.now())
        if self._plan.publication is not None:
            print_line(self._plan.publication.text(self._start.time))
        self.plan = replace(self._plan, trials=trials_of_draws(self._plan.trials, self._start.draws))
        print_line(f"sealed sweep: {self._name}; this output reveals the number of trials: keep it secret")
        self._hashes = {trial.name: config_hash(trial.config) for trial in self.plan.trials}
        self._fail_interrupted()
        results = self._results()
        return [trial for trial in self.plan.trials if trial.name not in results]

    def begin(self, remaining: Sequence[Trial]) -> None:
        """No-op: `remaining` has charged the sweep already."""

    def source(self, remaining: Sequence[Trial]) -> TrialSource:
        """Return a source that hands out the trials in the order of their draws."""
        return ListedTrials(remaining)

    def on_result(self, name: str, result: Mapping[str, Any]) -> None:
        """Store a result in `trusted/`."""
        self._store(name, result)
        print_line(f"done: {name}")

    def interrupt(self, stop: StopRequest | None) -> str:
        """End early; return the note that begun trials count as the worst score."""
        return "trials that had begun count as the worst score; the number of trials does not change"

    def conclude(self, failures: Mapping[str, TrialFailure]) -> int:
        """Choose one trial or none, publish it at the moment of publication, and return 0."""
        for name, failure in failures.items():
            warn(f"failed: {name} ({failure}); it counts as the worst score")
            self._store(name, {"failed": str(failure)})
        run = self._prepare()
        self._wait_for_moment(self._start.time)
        self._publish(run)
        return 0

    def _store(self, name: str, result: Mapping[str, Any]) -> None:
        self.folder.keep(name, {**result, "config_hash": self._hashes[name]})

    def _results(self) -> dict[str, dict[str, Any]]:
        return self.folder.read_results(self._hashes)

    def _fail_interrupted(self) -> None:
        """Store a failure, which counts as the worst score, for each trial that an earlier process had begun.

        A recorded start is enough: the trial's checkpoints and its count of steps may be lost.
        """
        results = self._results()
        for trial in self.plan.trials:
            if trial.name not in results and self.folder.has_begun(trial.name):
                self._store(trial.name, {"failed": str(INTERRUPTED)})

    def _prepare(self) -> _SealedRun:
        """Choose the trial, and write all files to be released to `trusted/outgoing/`."""
        options, outgoing, start = self._plan.release, self._folder.outgoing, self._start
        trial = choose(
            self.plan.trials,
            start.draws,
            self._results(),
            select_by=options.select_by,
            min_score=options.min_score if options.mode == SEALED_THRESHOLD else None,
        )
        outcome = "one model" if trial is not None else "no model"
        metrics = self._published_metrics(trial)
        params = trial.params if trial is not None else {}
        statement = build_statement(self._plan, self._name, ledger=start.ledger)
        for path in outgoing.iterdir():  # files of a process that ended before the moment of publication
            path.unlink()
        write_statement(statement, outgoing)
        if trial is not None:
            self._copy_model(trial)
        write_json(outgoing / RESULT, {"outcome": outcome, "params": params, "metrics": metrics})
        answer = self._make_answer(params, metrics) if trial is not None else None
        if answer is not None:
            write_answer(answer, outgoing)
        return _SealedRun(outcome=outcome, params=params, metrics=metrics, statement=statement, answer=answer)

    def _make_answer(self, params: Mapping[str, Any], metrics: Mapping[str, float]) -> Answer | None:
        """Return the answer from the published run alone; None, after a warning, if it fails."""
        row = {"guarantee_label": "proven", "params": params, "metrics": metrics}
        tags = {"data_is": self._plan.tags()["data_is"]}
        try:
            return sweep_answer(self._plan.question, [row], tags, self._plan.cost, self._start.budget)
        except DashboardError as error:
            warn(f"warning: the answer failed: {error}")
            return None

    def _wait_for_moment(self, start_time: float) -> None:
        """Wait for the next moment of publication, unless the sweep is already published."""
        if self._plan.publication is None or (self._folder.release / RESULT).exists():
            return
        now = self._clock.now()
        moment = self._plan.publication.moment(start_time, now)
        when = datetime.fromtimestamp(moment)
        print_line(f"all is ready; publication at {when:%Y-%m-%d %H:%M:%S}, in {duration(moment - now)}")
        self._clock.sleep_until(moment)

    def _publish(self, run: _SealedRun) -> None:
        """Copy the prepared files to `release/`, `result.json` last, then send the run to MLflow."""
        outgoing, release = self._folder.outgoing, self._folder.release
        release.mkdir(exist_ok=True)
        names = sorted((path.name for path in outgoing.iterdir()), key=lambda name: (name == RESULT, name))
        for name in names:
            part = release / f".{name}.part"
            shutil.copyfile(outgoing / name, part)  # a moved file would keep its creation time
            part.replace(release / name)
            self._hide_times()
        statement = run.statement
        tags = self._plan.tags() | {"outcome": run.outcome, "guarantee_label": statement.guarantee_label}
        texts = {STATEMENT: statement.to_json(), f"{STATEMENT}_page": statement.to_markdown()}
        self._tracker.log_sealed(
            self._name,
            run.params,
            run.metrics,
            tags,
            texts,
            sweep_id=self._sweep.sweep_id,
            first=run.answer.first_lines() if run.answer is not None else (),
        )
        print_line(statement_text(statement))
        if run.answer is not None:
            warn(answer_text(run.answer))
        print_line(f"published: {run.outcome} in {release}")
        self._listeners.on_end(
            SweepEnd(
                status="FINISHED",
                folder=release,
                is_concluded=True,
                statement=statement,
                answer=run.answer,
            )
        )

    def _hide_times(self) -> None:
        """Set the times of `release/` and its files to a constant; call it after every write there."""
        release = self._folder.release
        for path in (*release.iterdir(), release):
            os.utime(path, ns=(SEALED_TIME_MS * 10**6,) * 2)

    def _published_metrics(self, trial: Trial | None) -> dict[str, float]:
        """Return the trial's metrics that may be published, without its own ε, which is not the sweep's ε."""
        if trial is None:
            return {}
        metrics = self._results()[trial.name]["metrics"]
        return {
            name: value
            for name, value in metrics.items()
            if (metric := find_metric(name))
            and metric.release is not Release.PRIVATE_ONLY
            and name not in _HIDDEN_METRICS
        }

    def _copy_model(self, trial: Trial) -> None:
        path = self.folder.checkpoint_folder(trial.name)
        checkpoint = CheckpointFolder(path, every_steps=1).load() if path.is_dir() else None
        if checkpoint is not None:
            is_averaged = trial.config.optimizer.ema_decay > 0
            data = "private" if self._plan.source.are_private else RESEARCH
            note = json.dumps({"data": data, "sweep": self._name})
            state = released_state(checkpoint, averaged=is_averaged)
            write_weights(self._folder.outgoing / PUBLISHED, state, note=note)
