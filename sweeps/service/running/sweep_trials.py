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
      by_name: all trials that are known so far.
    """

    def __init__(self, plan: SweepPlan, folder: SweepFolder) -> None:
        self._plan, self._folder = plan, folder
        self.by_name = {trial.name: trial for trial in plan.trials}
        self._hashes = dict(plan.hashes)
        self._results: dict[str, dict[str, Any]] | None = None

    def add(self, trial: Trial) -> None:
        """Add a trial, or replace the trial of its name by one with its real settings."""
        self.by_name[trial.name] = trial
        self._hashes[trial.name] = config_hash(trial.config)

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the results of finished trials, by name; read once, because only this driver writes them."""
        if self._results is None:
            self._results = self._folder.read_results(self._hashes)
        return self._results

    def keep(self, name: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Store the result of a trial that has just ended, durably, and return the stored result."""
        more = {"config_hash": self._hashes[name], "params": self.by_name[name].params}
        record = {**result, **more, "ended_ms": int(time.time() * 1000)}
        self._folder.keep(name, record)
        self.results()[name] = record
        return record

    def excluded(self) -> dict[str, str]:
        """Return the reasons why no attempt may continue a training, by the training's name.

        The sweep continues without these trainings: its charge covers all trainings, including these.
        """
        reasons = {}
        for name, trial in self._begun_trials(self.results()):
            mechanism = trial.config.mechanism
            checkpoints = self._checkpoints(trial)
            if why := checkpoints.refusal(mechanism.num_steps, mechanism.num_restart_steps):
                reasons[name] = why
        return reasons

    def restart_notes(self, finished_or_excluded: Collection[str]) -> Iterator[str]:
        """Yield a note on the rest of R, the steps charged in advance, for every training that continues."""
        for name, trial in self._begun_trials(finished_or_excluded):
            restarts, checkpoints = trial.config.mechanism.num_restart_steps, self._checkpoints(trial)
            if restarts is not None and checkpoints.read_counts().num_attempts:
                yield f"{name}: {checkpoints.resume_text(restarts)}"

    def source(self, remaining: Sequence[Trial]) -> TrialSource:
        """Return the source of the remaining trials."""
        return ListedTrials(remaining)

    def begin(self) -> None:
        """Prepare for the first training, or for the next training of a resumed sweep."""

    def finish(self) -> None:
        """Complete the stored files, after all trials have ended."""

    def axes(self, trial: Trial) -> dict[str, Any]:
        """Return the params of a training that the sweep's question is about."""
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
          draws: counts of the draws that each trial may have made, by name.
          ledger: the ledger's lines; None without a ledger.
        """
        return build_statement(self._plan, self._folder.name, draws=draws, ledger=ledger)

    def closing_lines(self) -> Iterable[str]:
        """Return the sweep's last printed lines, below its answer."""
        return ()

    def _begun_trials(self, without: Collection[str]) -> Iterator[tuple[str, Trial]]:
        for name, trial in self.by_name.items():
            if name not in without and self._folder.starts(name).num_starts:
                yield name, trial

    def _checkpoints(self, trial: Trial) -> CheckpointFolder:
        every = trial.config.performance.checkpoint_every_steps
        return self._folder.checkpoints(trial.name, every_steps=every)
