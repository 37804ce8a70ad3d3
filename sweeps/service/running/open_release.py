"""An open sweep: every trial is charged, stored and shown as it ends, and the sweep's ε covers all trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from dpgcl_core.errors import LedgerError
from sweeps.service.cluster.interruption import StopRequest
from sweeps.service.cluster.trial_failure import TrialFailure
from sweeps.service.cluster.trial_queue import TrialSource
from sweeps.service.console.display import doing
from sweeps.service.console.terminal import count, print_line, warn
from sweeps.service.options.data import data_path
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.sweep_statement import count_draws_of, withdraw_statement
from sweeps.service.running.conclude import Conclusion, Figure, conclude
from sweeps.service.running.earlier_sweeps import store_charged
from sweeps.service.running.listeners import (
    Listeners,
    SweepBeginning,
    SweepEnd,
    TrialResult,
)
from sweeps.service.running.mlflow_listener import MlflowListener, lost_attempt_metrics
from sweeps.service.running.outbox import AT_A_STOP, AT_THE_END
from sweeps.service.running.prepare import PreparedSweep
from sweeps.service.running.progress_listeners import LogListener, TerminalListener
from sweeps.service.running.reporting import ReportListener
from sweeps.service.storage.log import FAILED, SweepLog
from trainers.config.training import TrainingConfig
from trainers.files.launch_record import resume_line
from trainers.tracking.runs import Tracker


class OpenRelease:
    """The `ReleasePolicy` of an open sweep, which charges, stores and shows every trial.

    Args:
      sweep: the prepared sweep; this process holds the lock on its folder.
      tracker: a future of MLflow's tracker, which opens in another thread.
      figure: draws the figure at the end; None for no figure.

    Attributes:
      trials: the sweep's trials, with their results.
      conclusion: the statement and answer; without both until the sweep has ended without interruption.
    """

    def __init__(
        self,
        sweep: PreparedSweep,
        tracker: Future[Tracker],
        figure: Figure | None,
    ) -> None:
        self._sweep, self._figure = sweep, figure
        self.plan, self.folder = sweep.plan, sweep.folder
        self.budget, self.service = sweep.budget, sweep.service
        self.trials = sweep.policy.start(sweep.plan, sweep.folder, sweep.calibrations)
        self.conclusion = Conclusion()
        self._excluded: dict[str, str] = {}
        self._log = SweepLog(sweep.folder.path)
        self.mlflow = MlflowListener(sweep, self.trials, tracker)
        self._report = ReportListener(sweep.tracking_uri, sweep.folder.path, self.mlflow)
        self._recorders = Listeners(LogListener(self._log, self.trials), self.mlflow)
        self._listeners = Listeners(
            self._recorders,
            TerminalListener(self.trials),
            *sweep.listeners,
            self._report,
        )

    def remaining(self) -> list[Trial]:
        """Return the trials to train: without a result, and permitted to begin or continue."""
        self._excluded = self.trials.excluded()
        ended_names = self.trials.results().keys() | self._excluded.keys()
        for line in self.trials.restart_notes(ended_names):
            print_line(line)
        return [trial for trial in self.plan.trials if trial.name not in ended_names]

    def begin(self, remaining: Sequence[Trial]) -> None:
        """Open the parent run in MLflow, create the folder, charge the ledger, and call the listeners.

        Raises:
          TrackingError: MLflow does not accept the sweep; nothing is charged.
          LedgerError: the ledger refuses; no worker starts.
        """
        sweep, results = self._sweep, self.trials.results()
        if not remaining:
            doing("opening MLflow")
        self.mlflow.open()
        sweep.calibrations.keep()
        if sweep.is_new:
            store_charged(self.folder, self.plan, sweep.facts)
            facts = {"fingerprint": self.plan.fingerprint, "params": self.plan.params()}
            facts |= {"data_is": self.plan.tags()["data_is"], "sweep_id": sweep.sweep_id}
            self.folder.create(facts | {"account": sweep.facts["account"]}, sweep.repetition)
        self._charge(remaining)
        if remaining:
            withdraw_statement(self.folder.path, self.plan.question)
            self._report.withdraw()
        for name, result in results.items():
            self._settle(name, result)
        self.trials.begin()
        self._listeners.on_begin(
            SweepBeginning(
                name=self.folder.name,
                question=self.plan.question,
                params=self.plan.params(),
                num_trials=len(self.trials.by_name),
                num_done=len(results),
            )
        )

    def source(self, remaining: Sequence[Trial]) -> TrialSource:
        """Return the source that hands out the remaining trials one by one."""
        return self.trials.source(remaining)

    def on_result(self, name: str, result: Mapping[str, Any]) -> None:
        """Store a result, refund its unused steps in the ledger, and call the listeners."""
        stored_result = self.trials.keep(name, result)
        self._settle(name, stored_result)
        trial, metrics = self.trials.by_name[name], stored_result["metrics"]
        counts = count_draws_of(trial, self.folder, stored_result)
        self._listeners.on_result(
            TrialResult(
                name=name,
                params=dict(stored_result["params"]),  # copies: listeners must not change the result
                metrics={**metrics, **lost_attempt_metrics(trial, counts, metrics)},
                num_done=len(self.trials.results()),
            )
        )

    def interrupt(self, stop: StopRequest | None) -> str:
        """End early, after sending results to MLflow; return a note on the steps that a resume may repeat."""
        self.mlflow.finish(AT_A_STOP)
        self._listeners.on_end(SweepEnd(status="KILLED", folder=self.folder.path))
        if stop is None:
            return ""
        return _stop_note(self.plan.trials[0].config, is_saved=stop.is_saved)

    def conclude(self, failures: Mapping[str, TrialFailure]) -> int:
        """Write statement, answer, figure and report.

        Returns:
          The exit code: 1 if a resume can complete the sweep, or no training finished; else 0.
        """
        for name, why in self._excluded.items():
            warn(f"{name}: {why}")
        self.trials.finish()
        doing("writing the statement, the answer and the figure", as_line=False)
        self.mlflow.finish(AT_THE_END)
        for name, failure in failures.items():
            warn(f"failed: {name} ({failure})")
            self._log.write(FAILED, name, str(failure))
        if lost_results := self.mlflow.lost_results:
            warn(f"MLflow did not accept {count(len(lost_results), 'result')}; kept in {self.folder.path}.")
        is_unfinished = self._print_unfinished(failures)
        if self.budget is not None and self.budget.outage is not None:
            outage = self.budget.outage
            warn(f"the ledger is unreachable; every training stopped at its next checkpoint: {outage}")
        conclusion = self.conclusion = conclude(self._sweep, self.trials, self.mlflow, self._figure)
        status, line = "FINISHED", ""
        if failures or self.mlflow.untracked or is_unfinished or not conclusion.is_stated:
            status = "KILLED" if is_unfinished and not failures else "FAILED"
            line = f"continue with {resume_line(self.folder.path)}"
        elif not self.trials.results():
            status, line = "FAILED", "no training was finished"
        for text in filter(None, (line, *self.trials.closing_lines())):
            warn(text)
        self._listeners.on_end(
            SweepEnd(
                status=status,
                folder=self.folder.path,
                is_concluded=True,
                statement=conclusion.statement,
                answer=conclusion.answer,
            )
        )
        print_line(f"files: {self.folder.path}")
        return 0 if status == "FINISHED" else 1

    def _charge(self, remaining: Sequence[Trial]) -> None:
        if self.budget is None:
            return
        source = self.plan.source  # public data may be charged, but get no ledger mark
        try:
            self.budget.begin(remaining, data_path(source.dataset) if source.are_private else None)
        except LedgerError:
            self._recorders.on_end(SweepEnd(status="FAILED", folder=self.folder.path))
            raise

    def _settle(self, name: str, result: Mapping[str, Any]) -> None:
        """Refund a finished trial's unused steps; if the ledger is unreachable, a resume does so."""
        try:
            if self.budget is not None:
                self.budget.settle(name, result["metrics"])
        except LedgerError as error:
            warn(f"warning: {name} is not settled: {error}")

    def _print_unfinished(self, failures: Mapping[str, TrialFailure]) -> bool:
        """Print how many trainings did not finish within the time budget; return whether there are any.

        Their reservations are kept for a resume.
        """
        ended_names = self.trials.results().keys() | failures.keys() | self.trials.excluded().keys()
        unfinished = [name for name in self.trials.by_name if name not in ended_names]
        if self.service.time_budget is None or not unfinished:
            return False
        begun = [name for name in unfinished if self.folder.starts(name).num_starts]
        print_line(
            f"the time is over (--time-budget {self.service.time_budget:g} min): "
            f"{count(len(begun), 'training')} stopped and saved, {len(unfinished) - len(begun)} not begun"
        )
        if self.budget is not None:
            print_line("their reservations stay in the ledger for a resume; sweeps.settle closes them")
        return True


def _stop_note(config: TrainingConfig, *, is_saved: bool) -> str:
    """Return a note on the steps that are charged if stopped trainings repeat them."""
    if is_saved:
        return (
            "a training that has saved its step repeats none; a lost training is charged for repeated steps"
        )
    restarts = config.mechanism.num_restart_steps
    if restarts is None:
        steps = count(config.performance.checkpoint_every_steps, "repeated step")
        return f"an interrupted private training is also charged for up to {steps}"
    steps = count(restarts, "repeated step")
    return f"each training has {steps}, charged in advance; a training that would need more is left out"
