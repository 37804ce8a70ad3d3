"""Running an adaptive search, which chooses each trial by the scores of earlier trials.

A proposal is stored before it is trained, one file per trial, `suggested/trial-3.json`. A resume repeats
the stored proposals in order, records their scores with the sampler, and continues. The study for Optuna's
tools is only written: the search's proposals never depend on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpgcl_core.durable_files import make_folder, storage_errors, sync_folder
from dpgcl_core.errors import StorageError
from dpgcl_core.ledger.report import LedgerStatement
from dpgcl_core.release.statement import PrivacyStatement, rounded_up
from sweeps.service.cluster.trial_queue import TrialSource
from sweeps.service.console.terminal import count, print_line, print_notes, steps_text, warn
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.inputs import EarlierSweep, PlanInputs, earlier_trials
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.search_plan import SearchPlan, costliest_trials, plan_search, searched_trial
from sweeps.service.planning.space import SearchOptions, Space
from sweeps.service.planning.trials import ChargedSteps, Trial, is_proven
from sweeps.service.running.earlier_sweeps import read_charged, read_earlier_sweeps
from sweeps.service.running.proposals import Proposals
from sweeps.service.running.study import SearchStudy
from sweeps.service.running.sweep_trials import Results, SweepTrials
from sweeps.service.running.trial_policy import TrialPolicy
from sweeps.service.storage.calibrations import CalibrationCache
from sweeps.service.storage.sweep_folder import SweepFolder, named_folder, write_json


@dataclass(frozen=True)
class OwnScore:
    """A score that a function of the user computes from a trial's metrics.

    Attributes:
      name: the name of the score among the metrics.
      function: maps the visible metrics of a trial to a number, the larger the better.
    """

    name: str
    function: Callable[[Mapping[str, float]], float]

    def of(self, trial: str, metrics: Mapping[str, float]) -> float:
        """Return the score of a trial, or nan and a warning if the function fails; the search continues."""
        try:
            return float(self.function(dict(metrics)))
        except Exception as error:  # the user's own code
            warn(f"warning: {trial} has no score: {type(error).__name__}: {error}")
            return math.nan


@dataclass(frozen=True, kw_only=True)
class SearchPolicy(TrialPolicy):
    """A policy that proposes trials one after the other, each by the scores of earlier trials.

    Attributes:
      space: the search space; None for the space in the options.
      own_score: the user's function that scores each trial; None to rank by a metric.
    """

    space: Space | None = None
    own_score: OwnScore | None = None

    def read_earlier(
        self, options: SweepOptions, root: Path, facts: Mapping[str, Any]
    ) -> tuple[EarlierSweep, ...]:
        """Return the sweeps that the options name, as they are now, or as they were when the search began."""
        assert isinstance(options, SearchOptions)
        if options.earlier and options.storage.resume and options.storage.name is not None:
            folder = named_folder(root, options.storage.name)
            if folder.read_plan() is not None:
                return read_charged(folder).earlier
        return read_earlier_sweeps(root, options.earlier, facts)

    def trials(self, inputs: PlanInputs) -> Sequence[Trial]:
        """Return as many trials as the search has, each with the least noise that the space allows."""
        return costliest_trials(inputs, self._space_of(inputs))

    def fixes_noise(self, inputs: PlanInputs) -> bool:
        """Whether options or space set ε or the noise multiplier of every private training."""
        return super().fixes_noise(inputs) or self._space_of(inputs).moves_epsilon

    def plan(self, inputs: PlanInputs) -> SweepPlan:
        """Return the plan. Raises as in `plan_search`."""
        return plan_search(inputs, self.space, () if self.own_score is None else (self.own_score.name,))

    def print_plan(self, plan: SweepPlan, *, in_full: bool) -> None:
        """Print the space and the sampler of a search, and its largest cost."""
        assert isinstance(plan, SearchPlan)
        print_search(plan, in_full=in_full)

    def start(self, plan: SweepPlan, folder: SweepFolder, calibrations: CalibrationCache) -> SweepTrials:
        """Return the trials of the search, with the proposals that an earlier process stored."""
        assert isinstance(plan, SearchPlan)
        return SearchTrials(plan, folder, calibrations, self.own_score)

    def _space_of(self, inputs: PlanInputs) -> Space:
        assert isinstance(inputs.options, SearchOptions)
        return self.space or Space.of(inputs.options)


class SearchTrials(SweepTrials):
    """The trials of one search, and the `TrialSource` that proposes them.

    Args:
      plan: the search's plan.
      folder: the sweep's folder, held by this process.
      calibrations: the cache of noise multipliers, which proposals of new ε add to.
      own_score: the user's score; it is stored with the metrics, so that a resume and MLflow have it.

    Raises:
      StorageError: the stored proposals are damaged, or belong to another search.
    """

    def __init__(
        self,
        plan: SearchPlan,
        folder: SweepFolder,
        calibrations: CalibrationCache,
        own_score: OwnScore | None = None,
    ) -> None:
        super().__init__(plan, folder)
        self._search, self._calibrations, self._own_score = plan, calibrations, own_score
        self._proposals = Proposals(plan.space, plan.options, plan.observations)
        self._values: dict[str, Mapping[str, Any]] = {}
        self._study = SearchStudy(folder.path, plan.options.objectives, plan.space.axes)
        self._to_repeat: list[Trial] = []
        for number, values in enumerate(read_suggestions(folder), start=1):
            try:
                self._proposals.repeat(values)
            except (ValueError, KeyError) as error:
                raise StorageError(
                    f"{suggestion_file(folder, number)} belongs to another search: {error}"
                ) from error
            self._to_repeat.append(self._register_trial(number, values))

    def source(self, remaining: Sequence[Trial]) -> TrialSource:
        """Return this object, which proposes the trials; `remaining` is ignored."""
        return self

    def keep(self, name: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Store a result, with the user's own score if it is finite, and return what is stored."""
        metrics, own_score = result["metrics"], self._own_score
        if own_score is not None and math.isfinite(value := own_score.of(name, metrics)):
            metrics = metrics | {own_score.name: value}
        return super().keep(name, {**result, "metrics": metrics})

    def next_trial(self) -> Trial:
        """Return the next stored trial without a result; else store a new proposal and return its trial."""
        if self._to_repeat:
            return self._to_repeat.pop(0)
        number, values = self._proposals.num_suggestions + 1, self._proposals.suggest()
        trial = self._register_trial(number, values)
        write_suggestion(self._folder, number, values)
        self._calibrations.keep()
        return trial

    def note_end(self, name: str) -> None:
        """Report an ended trial's stored scores to the sampler, and add them to the stored study."""
        result = self._folder.result(name, self._hashes[name])
        metrics = None if result is None else result["metrics"]
        self._proposals.record_scores(self.by_name[name].params["trial_number"], metrics)
        if result is not None:
            self._record({name: result})

    def begin(self) -> None:
        """Report the trials that earlier processes ended to the sampler, and complete the stored study."""
        results, excluded = self.results(), self.excluded()
        ended = [trial for names in (results, excluded) for trial in self._to_repeat if trial.name in names]
        for trial in ended:
            metrics = results[trial.name]["metrics"] if trial.name in results else None
            self._proposals.record_scores(trial.params["trial_number"], metrics)
        self._to_repeat = [trial for trial in self._to_repeat if trial not in ended]
        self._record(results)

    def axes(self, trial: Trial) -> dict[str, Any]:
        """Return the trial's values of the searched settings."""
        return {name: trial.params[name] for name in self._search.space.columns}

    def statement(
        self, draws: Mapping[str, ChargedSteps], ledger: LedgerStatement | None
    ) -> PrivacyStatement:
        """Return the statement, with the trained mechanisms in place of the one with the least noise."""
        names, earlier = [name for name in draws if name in self.by_name], self._search.earlier
        trained = [*(self.by_name[name] for name in names), *earlier_trials(earlier)]
        mechanisms = list(dict.fromkeys(trial.config.mechanism for trial in filter(is_proven, trained)))
        statement = super().statement(draws, ledger)
        notes, num_settings = statement.notes, len({str(self._values[name]) for name in names})
        if num_settings < len(names):
            counts_text = f"{count(len(names), 'training')} of {count(num_settings, 'setting')}"
            notes = (
                *notes,
                f"{counts_text}: repeats of one setting are ranked by their mean, and all are charged.",
            )
        sweeps = tuple(sweep.sweep for sweep in earlier)
        return replace(statement, mechanisms=mechanisms, notes=notes, earlier=sweeps)

    def finish(self) -> None:
        """Add the finished trials that the stored study still lacks."""
        self._record(self.results())

    def closing_lines(self) -> Iterator[str]:
        """Yield lines with the best settings; for several objectives, with the Pareto front."""
        best, objectives = self._proposals.best(), self._search.options.objectives
        if not best:
            yield f"no trial has a value of {', '.join(objectives)}"
            return
        settings = count(len(best), "setting")
        front = f"{settings} that no other beats in all of {', '.join(objectives)}"
        yield f"Pareto front, {front}:" if len(objectives) > 1 else f"highest {objectives[0]}:"
        for numbers, values in best:
            names = [f"trial-{number}" for number in numbers]
            params = self.by_name[names[0]].params
            scores = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            scores += f" (mean of {len(names)} trainings)" * (len(names) > 1)
            settings = ", ".join(f"{name} = {params[name]}" for name in self._search.space.columns)
            yield f"  {', '.join(names)}: {scores} with {settings}"

    def _record(self, results: Results) -> None:
        """Add finished trials to the stored study; on failure warn, because `finish` tries again."""
        try:
            for name, result in results.items():
                label = self.by_name[name].config.guarantee_label
                self._study.add(name, self._values[name], result, label)
        except StorageError as error:
            warn(f"warning: {error}; it is added at the end of the search, or by --resume")

    def _register_trial(self, number: int, values: Mapping[str, Any]) -> Trial:
        """Create trial `number` with the proposed values, add it to the sweep, and return it."""
        trial = searched_trial(self._search, number, values)
        self._values[trial.name] = values
        self.add(trial)
        return trial


def suggestion_file(folder: SweepFolder, number: int) -> Path:
    """Return the file with the settings that were proposed for trial `number`."""
    return folder.path / "suggested" / f"trial-{number}.json"


def write_suggestion(folder: SweepFolder, number: int, values: Mapping[str, Any]) -> None:
    """Store the proposed settings of trial `number`, durably.

    Raises:
      StorageError: the settings cannot be written.
    """
    path = suggestion_file(folder, number)
    with storage_errors(path):
        make_folder(path.parent)
        sync_folder(folder.path)
        write_json(path, values)


def read_suggestions(folder: SweepFolder) -> list[dict[str, Any]]:
    """Return the proposed settings of trials 1, 2, …, each by option.

    Raises:
      StorageError: a file is damaged or missing, so another trial might get its name.
    """
    num_suggestions = len(list((folder.path / "suggested").glob("trial-*.json")))
    suggestions = []
    for number in range(1, num_suggestions + 1):
        path = suggestion_file(folder, number)
        try:
            suggestions.append(dict(json.loads(path.read_text())))
        except (OSError, ValueError, TypeError) as error:
            raise StorageError(f"{path} is lost or damaged; restore it, or choose another --name") from error
    return suggestions


def print_search(plan: SearchPlan, *, in_full: bool) -> None:
    """Print the notes, space and sampler of a search, and an upper bound on its cost."""
    print_notes(plan, in_full=in_full)
    config, options = plan.trials[0].config, plan.options
    mechanism = config.mechanism
    print_line(
        f"n = {plan.num_records_public}, q = {mechanism.sampling_prob:.5g}, {steps_text(mechanism)}, "
        f"neighbours: {mechanism.neighboring_relation}"
    )
    print_line(f"{options.num_trials} trials by {options.sampler} for {', '.join(options.objectives)}, over:")
    for axis in plan.space.axes:
        print_line(f"  {axis.option:<20} {axis.text}")
    if config.guarantee_label == "proven":
        at_most = f"σ at least {mechanism.noise_multiplier:.5g}, ε at most {rounded_up(config.epsilon(), 5)}"
        print_line(f"every trial: {at_most}; the whole search, whatever it chooses:")
    print_line(plan.tags()["tuning_cost"])
