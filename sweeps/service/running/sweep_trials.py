"""The trials of one open sweep while it runs: the remaining trials, and the stored results."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dashboards.compose.answer import OWN, POINT
from dashboards.compose.questions import QUESTIONS
from dpgcl_core.ledger.report import LedgerStatement
from dpgcl_core.release.statement import PrivacyStatement
from sweeps.service.cluster.trial_queue import ListedTrials, TrialSource
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import ChargedSteps, Trial
from sweeps.service.privacy.sweep_statement import build_statement
from sweeps.service.storage.sweep_folder import SweepFolder, config_hash
from trainers.files.checkpoint import CheckpointFolder

Results = Mapping[str, Mapping[str, Any]]
"""The results of finished trials, by name."""


class SweepTrials:
    """The trials of a sweep whose plan names all of them.

    Args:
      plan: the sweep's plan.
      folder: the sweep's folder, held by this process.

    Attributes:
      by_name: the trials by name; a search adds trials while it runs.
    """

    def __init__(self, plan: SweepPlan, folder: SweepFolder) -> None:
        self._plan, self._folder = plan, folder
        self.by_name = {trial.name: trial for trial in plan.trials}
        self._hashes = dict(plan.hashes)
        self._results: dict[str, dict[str, Any]] | None = None

    def add(self, trial: Trial) -> None:
        """Add a trial, or replace the planned trial of the same name by one with the proposed settings."""
        self.by_name[trial.name] = trial
        self._hashes[trial.name] = config_hash(trial.config)

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the finished trials' results by name; read once, as only this driver writes them."""
        if self._results is None:
            self._results = self._folder.read_results(self._hashes)
        return self._results

    def keep(self, name: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Store a result with the trial's params, config hash and end time; return what is stored."""
        more = {"config_hash": self._hashes[name], "params": self.by_name[name].params}
        record = {**result, **more, "ended_ms": int(time.time() * 1000)}
        self._folder.keep(name, record)
        self.results()[name] = record
        return record

    def excluded(self) -> dict[str, str]:
        """Return the begun trainings that must not continue: name → reason.

        The sweep continues without these trainings, and they stay charged.
        """
        reasons = {}
        for name, trial in self._begun_trials(self.results()):
            mechanism = trial.config.mechanism
            checkpoints = self._checkpoints(trial)
            if why := checkpoints.refusal(mechanism.num_steps, mechanism.num_restart_steps):
                reasons[name] = why
        return reasons

    def restart_notes(self, finished_or_excluded: Collection[str]) -> Iterator[str]:
        """Yield how many of R, the restart steps charged in advance, remain for each training to continue."""
        for name, trial in self._begun_trials(finished_or_excluded):
            restarts, checkpoints = trial.config.mechanism.num_restart_steps, self._checkpoints(trial)
            if restarts is not None and checkpoints.read_counts().num_attempts:
                yield f"{name}: {checkpoints.resume_text(restarts)}"

    def source(self, remaining: Sequence[Trial]) -> TrialSource:
        """Return the source that hands out the remaining trials one by one."""
        return ListedTrials(remaining)

    def begin(self) -> None:
        """Prepare for the first training of a new or resumed sweep; here a no-op."""

    def finish(self) -> None:
        """Complete the stored files, after all trials have ended; here a no-op."""

    def axes(self, trial: Trial) -> dict[str, Any]:
        """Return a training's values of the params that the sweep's question compares, by param."""
        question = QUESTIONS.get(self._plan.question.removesuffix("-tuning"), OWN)
        if question is OWN:
            return {POINT: trial.name.rpartition("-r")[0]}
        if question.axis.column in trial.params:
            return {question.axis.column: trial.params[question.axis.column]}
        rows = [each.params for each in self._plan.trials]
        varied = [name for name in question.splits if len({str(params.get(name)) for params in rows}) > 1]
        return {name: trial.params[name] for name in varied if name in trial.params}

    def statement(
        self, draws: Mapping[str, ChargedSteps], ledger: LedgerStatement | None
    ) -> PrivacyStatement:
        """Return the sweep's privacy statement.

        Args:
          draws: the charged steps of each begun trial, by trial name.
          ledger: the ledger's part of the statement; None without a ledger.
        """
        return build_statement(self._plan, self._folder.name, draws=draws, ledger=ledger)

    def closing_lines(self) -> Iterable[str]:
        """Return lines to print below the sweep's answer; here none."""
        return ()

    def _begun_trials(self, without: Collection[str]) -> Iterator[tuple[str, Trial]]:
        for name, trial in self.by_name.items():
            if name not in without and self._folder.starts(name).num_starts:
                yield name, trial

    def _checkpoints(self, trial: Trial) -> CheckpointFolder:
        every = trial.config.performance.checkpoint_every_steps
        return self._folder.checkpoints(trial.name, every_steps=every)
