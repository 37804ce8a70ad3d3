"""An adaptive search under way: each trial is chosen by what earlier ones scored.

What is proposed is written down before it is trained, one file per trial, `suggested/trial-3.json`. A resume
proposes it again, tells the sampler what was found, and goes on. The study that is kept for Optuna's tools is
written alone: whatever becomes of it, the search proposes the same.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from dpgcl_core.errors import StorageError
from dpgcl_core.ledger.report import LedgerStatement
from dpgcl_core.release.statement import PrivacyStatement, rounded_up
from sweeps.service.options.service import ServiceOptions
from sweeps.service.options.sweep import SweepOptions
from sweeps.service.planning.plan import Earlier, SweepPlan
from sweeps.service.planning.search import SearchPlan, costliest_trials, plan_search, searched_trial
from sweeps.service.planning.space import SearchOptions, Space
from sweeps.service.planning.trials import Charged, Point, Trial, is_proven
from sweeps.service.privacy.budget import SweepBudget
from sweeps.service.running.proposals import Proposals
from sweeps.service.running.study import SearchStudy
from sweeps.service.running.sweep import Figure, OpenSweep, times_ms
from sweeps.service.running.terminal import count, print_notes, say, steps_text, warn
from sweeps.service.running.total import fixes_noise
from sweeps.service.running.tune import RaySession, run_trials
from sweeps.service.storage.calibrations import CalibrationCache
from sweeps.service.storage.folder import Repetition, SweepFolder, config_hash, write_json
from trainers.data.dataset import TrainingData
from trainers.files.durable import make_folder, sync_folder
from trainers.tracking.runs import Tracker


class SearchSweep(OpenSweep):
    """One search under way: it names its trials as it comes to them."""

    _plan: SearchPlan

    @staticmethod
    def trials(
        options: SweepOptions, points: Sequence[Point], data: TrainingData, calibration_folder: Path
    ) -> Sequence[Trial]:
        assert isinstance(options, SearchOptions)
        return costliest_trials(options, data, calibration_folder, Space.of(options))

    @staticmethod
    def fixes_noise(options: SweepOptions, points: Sequence[Point]) -> bool:
        assert isinstance(options, SearchOptions)
        return fixes_noise(options, points) or Space.of(options).moves_epsilon

    @staticmethod
    def planned(
        question: str,
        options: SweepOptions,
        points: Sequence[Point],
        data: TrainingData,
        *,
        notes: Sequence[str],
        calibration_folder: Path,
        earlier: Earlier | None,
    ) -> SweepPlan:
        assert isinstance(options, SearchOptions)
        return plan_search(question, options, data, notes=notes, calibration_folder=calibration_folder)

    @staticmethod
    def show(plan: SweepPlan, *, in_full: bool) -> None:
        assert isinstance(plan, SearchPlan)
        print_search(plan, in_full=in_full)

    def __init__(
        self,
        plan: SweepPlan,
        folder: SweepFolder,
        found: CalibrationCache,
        uri: str,
        budget: SweepBudget | None,
        account: dict[str, Any] | None,
        service: ServiceOptions,
        again: Repetition,
    ) -> None:
        super().__init__(plan, folder, found, uri, budget, account, service, again)
        self._costliest = plan.trials[0]
        self._proposals = Proposals(self._plan.space, self._plan.options)
        self._values: dict[str, Mapping[str, Any]] = {}
        self._study = SearchStudy(folder.path, self._plan.options.objectives, self._plan.space.searched)
        self._begun: list[Trial] = []
        for number, values in enumerate(read_suggestions(folder), start=1):
            try:
                self._proposals.repeat(values)
            except (ValueError, KeyError) as error:
                raise StorageError(
                    f"{suggestion_file(folder, number)} is of another search: {error}"
                ) from error
            self._begun.append(self._named(number, values))

    def run(self, opened: Future[Tracker], figure: Figure | None) -> int:
        """Run what is left of the search, and return the exit code."""
        done = self.results()
        for trial in self._begun:
            if trial.name in done:
                self._proposals.tell(trial.params["trial_number"], done[trial.name]["metrics"])
        left_out = self._left_out(done)
        for trial in self._begun:
            if trial.name in left_out:
                self._proposals.tell(trial.params["trial_number"], None)
        self._begun = [trial for trial in self._begun if trial.name not in done.keys() | left_out.keys()]
        return super().run(opened, figure)

    def next_trial(self) -> Trial:
        """Return a trial that an earlier process had begun, or a new one, once it is written down."""
        if self._begun:
            return self._begun.pop(0)
        number, values = self._proposals.num_asked + 1, self._proposals.ask()
        trial = self._named(number, values)
        write_suggestion(self._folder, number, values)
        self._found.keep()
        return trial

    def ended(self, name: str) -> None:
        """Tell the sampler how a trial ended, by the result that was kept."""
        result = self._folder.result(name, self._hashes[name])
        metrics = None if result is None else result["metrics"]
        self._proposals.tell(self._trials[name].params["trial_number"], metrics)
        if result is not None:
            self._record({name: result})

    def _begin(
        self, opened: Future[Tracker], done: dict[str, dict[str, Any]], remaining: Sequence[Trial]
    ) -> None:
        super()._begin(opened, done, remaining)
        self._record(done)

    def _record(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Add trials with a result to the kept study; those that it does not take are tried at the end."""
        try:
            for name, result in results.items():
                label = self._trials[name].config.guarantee_label
                self._study.add(name, self._values[name], result, label, times_ms(result))
        except StorageError as error:
            warn(f"warning: {error}; the end of the search, or --resume, adds it")

    def _named(self, number: int, values: Mapping[str, Any]) -> Trial:
        """Return trial `number`, which the sweep knows from now on by its real settings."""
        trial = searched_trial(self._plan, number, values, self._found.folder)
        self._trials[trial.name], self._values[trial.name] = trial, values
        self._hashes[trial.name] = config_hash(trial.config)
        return trial

    def _axes(self, trial: Trial) -> dict[str, Any]:
        return {name: trial.params[name] for name in self._plan.space.columns}

    def _train(self, session: RaySession, remaining: Sequence[Trial]) -> dict[str, str]:
        told = self._on_result, self._budget
        return run_trials(session, self._plan, self._folder, remaining, *told, source=self)

    def _statement(self, drawn: Mapping[str, Charged], ledger: LedgerStatement | None) -> PrivacyStatement:
        """As of every sweep, with the mechanisms that were trained in place of the costliest one."""
        trained = [self._trials[name] for name in drawn if is_proven(self._trials[name])]
        mechanisms = list(dict.fromkeys(trial.config.mechanism for trial in trained))
        statement = super()._statement(drawn, ledger)
        notes, num_settings = statement.notes, len({str(self._values[name]) for name in drawn})
        if num_settings < len(drawn):
            told = f"{count(len(drawn), 'training')} of {count(num_settings, 'setting')}"
            notes = (*notes, f"{told}: repeats of one setting are ranked by their mean, and all are charged.")
        return dataclasses.replace(statement, mechanisms=mechanisms, notes=notes)

    def _end(self, failed: dict[str, str], figure: Figure | None) -> int:
        self._record(self.results())
        code = super()._end(failed, figure)
        for line in self._best():
            warn(line)
        return code

    def _best(self) -> list[str]:
        """What the search found, for people to type again."""
        best, objectives = self._proposals.best(), self._plan.options.objectives
        if not best:
            return [f"no trial has a value of {', '.join(objectives)}"]
        settings = count(len(best), "setting")
        front = f"{settings} that none beats in all of {', '.join(objectives)}"
        lines = [f"Pareto front, {front}:" if len(objectives) > 1 else f"highest {objectives[0]}:"]
        for numbers, found in best:
            names = [f"trial-{number}" for number in numbers]
            params = self._trials[names[0]].params
            scores = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            scores += f" (mean of {len(names)} trainings)" * (len(names) > 1)
            settings = ", ".join(f"{name} = {params[name]}" for name in self._plan.space.columns)
            lines.append(f"  {', '.join(names)}: {scores} with {settings}")
        return lines


def suggestion_file(folder: SweepFolder, number: int) -> Path:
    """Return where the settings of a trial are written down before it starts."""
    return folder.path / "suggested" / f"trial-{number}.json"


def write_suggestion(folder: SweepFolder, number: int, values: Mapping[str, Any]) -> None:
    """Write the settings of a trial down, durably.

    Raises:
      StorageError: they cannot be written.
    """
    path = suggestion_file(folder, number)
    try:
        make_folder(path.parent)
        sync_folder(folder.path)
        write_json(path, values)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def read_suggestions(folder: SweepFolder) -> list[dict[str, Any]]:
    """Return the values of all trials that were written down, the first one first.

    Raises:
      StorageError: one is damaged or gone; a trial of other settings must not take its name.
    """
    count = len(list((folder.path / "suggested").glob("trial-*.json")))
    found = []
    for number in range(1, count + 1):
        path = suggestion_file(folder, number)
        try:
            found.append(dict(json.loads(path.read_text())))
        except (OSError, ValueError, TypeError) as error:
            raise StorageError(f"{path} is gone or damaged; restore it, or choose another --name") from error
    return found


def print_search(plan: SearchPlan, *, in_full: bool) -> None:
    """Print what is searched, by what, and what it costs at most."""
    print_notes(plan, in_full=in_full)
    config, options = plan.trials[0].config, plan.options
    mechanism = config.mechanism
    say(
        f"n = {plan.num_records_public}, q = {mechanism.sampling_prob:.5g}, {steps_text(mechanism)}, "
        f"to {mechanism.neighboring_relation}"
    )
    say(f"{options.num_trials} trials by {options.sampler}, for {', '.join(options.objectives)}, over")
    for each in plan.space.searched:
        say(f"  {each.option:<20} {each.text}")
    if config.guarantee_label == "proven":
        at_most = f"σ at least {mechanism.noise_multiplier:.5g}, ε at most {rounded_up(config.epsilon(), 5)}"
        say(f"every trial: {at_most}; the whole search, whatever it chooses:")
    say(plan.tags()["tuning_cost"])
