"""The trials of one open sweep while it runs: which are left, and what is kept of each one."""

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
from sweeps.service.planning.trials import Charged, Trial
from sweeps.service.privacy.sweep_statement import build_statement
from sweeps.service.storage.sweep_folder import SweepFolder, config_hash
from trainers.files.checkpoint import CheckpointFolder

Results = Mapping[str, Mapping[str, Any]]
"""What finished trials came to, by name."""


class SweepTrials:
    """The trials of a sweep whose plan names all of them.

    Args:
      plan: of the sweep.
      folder: of the sweep, held by this process.

    Attributes:
      by_name: all trials that are known so far.
    """

    def __init__(self, plan: SweepPlan, folder: SweepFolder) -> None:
        self._plan, self._folder = plan, folder
        self.by_name = {trial.name: trial for trial in plan.trials}
        self._hashes = dict(plan.hashes)
        self._results: dict[str, dict[str, Any]] | None = None

    def add(self, trial: Trial) -> None:
        """Know a trial from now on, or know it by its real settings."""
        self.by_name[trial.name] = trial
        self._hashes[trial.name] = config_hash(trial.config)

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the results of finished trials, by name; read once, as only this driver writes here."""
        if self._results is None:
            self._results = self._folder.finished(self._hashes)
        return self._results

    def keep(self, name: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the result of a trial that has just ended, durably, and return what is kept."""
        more = {"config_hash": self._hashes[name], "params": self.by_name[name].params}
        kept = {**result, **more, "ended_ms": int(time.time() * 1000)}
        self._folder.keep(name, kept)
        self.results()[name] = kept
        return kept

    def excluded(self) -> dict[str, str]:
        """Return the trainings that no attempt may continue any more, by name, and why.

        What the others release is charged for all trainings, these included, so they go on without them.
        """
        found = {}
        for name, trial in self._begun(self.results()):
            mechanism = trial.config.mechanism
            checkpoints = self._checkpoints(trial)
            if why := checkpoints.refusal(mechanism.num_steps, mechanism.num_restart_steps):
                found[name] = why
        return found

    def restart_notes(self, finished_or_excluded: Collection[str]) -> Iterator[str]:
        """Yield, for every training that goes on, how much of R is left, the steps charged in advance."""
        for name, trial in self._begun(finished_or_excluded):
            restarts, checkpoints = trial.config.mechanism.num_restart_steps, self._checkpoints(trial)
            if restarts is not None and checkpoints.read_counts().num_attempts:
                yield f"{name}: {checkpoints.goes_on_text(restarts)}"

    def source(self, remaining: Sequence[Trial]) -> TrialSource:
        """Return what decides which of the remaining trials comes next."""
        return ListedTrials(remaining)

    def begin(self) -> None:
        """Prepare for the first training, or for the next one of a resumed sweep."""

    def finish(self) -> None:
        """Complete what is kept of the trials, once all have ended."""

    def axes(self, trial: Trial) -> dict[str, Any]:
        """Return what the sweep's question is about, of one training."""
        question = QUESTIONS.get(self._plan.question.removesuffix("-tuning"), OWN)
        if question is OWN:
            return {POINT: trial.name.rpartition("-r")[0]}
        if question.axis.column in trial.params:
            return {question.axis.column: trial.params[question.axis.column]}
        every = [each.params for each in self._plan.trials]
        varied = [name for name in question.splits if len({str(params.get(name)) for params in every}) > 1]
        return {name: trial.params[name] for name in varied if name in trial.params}

    def statement(self, drawn: Mapping[str, Charged], ledger: LedgerStatement | None) -> PrivacyStatement:
        """Return the sweep's privacy statement.

        Args:
          drawn: what each trial may have drawn, by name.
          ledger: the ledger's lines; None without one.
        """
        return build_statement(self._plan, self._folder.name, drawn=drawn, ledger=ledger)

    def closing_lines(self) -> Iterable[str]:
        """Return what the sweep ends with, below its answer."""
        return ()

    def _begun(self, without: Collection[str]) -> Iterator[tuple[str, Trial]]:
        for name, trial in self.by_name.items():
            if name not in without and self._folder.starts(name).num_starts:
                yield name, trial

    def _checkpoints(self, trial: Trial) -> CheckpointFolder:
        every = trial.config.performance.checkpoint_every_steps
        return self._folder.checkpoints(trial.name, every_steps=every)
