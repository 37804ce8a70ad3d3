"""An adaptive search: each trial is chosen by what earlier ones scored, and all of it is paid in advance.

Guarantee. Let σ be the smallest noise multiplier that any trial of the space may have. All that an open
search of K trials releases, the choices among them included, is (ε, δ)-DP for adding or removing one record,
with the ε of K·T steps of the Poisson-subsampled Gaussian of (q, σ). That is what `SearchPlan.cost` states
and what a ledger reserves before the first trial starts.

Proof. The settings of a trial are a function of public numbers, the public seed and earlier trials' visible
scores: what public records say of released models, or noised scores, which are charged themselves. Given all
that was released before,
1. the next step is one of a training with this q (all trials share q and T), some sensitivity Δ and some
   noise multiplier σ' ≥ σ. Its divergences are those of the pair of `dpgcl_core.mechanism.mechanism`,
   whatever S, N_a, C, τ and learning rate are: ((1 − q)·N(0, σ'²) + q·N(1, σ'²), N(0, σ'²)), in units of Δ.
2. Adding an independent N(0, σ'² − σ²) to both sides of the pair of σ gives the pair of σ'. So the pair of σ
   dominates it, for adding and for removing alike: the other one is post-processing.
3. Mechanisms that one fixed pair dominates, whatever came before, are dominated together by its K·T-fold
   product (adaptive composition of dominating pairs, Zhu, Dong and Wang 2022). K and T are set in advance,
   and a trial that fails or never starts only takes away.
A step that also releases its noised norm has the joint noise multiplier of σ', which rises with σ'; noised
counts have the same noise in all trials. So 2 holds for them, too. The methods are those whose steps are of
this kind (`Method.plain_event`); `searched_trial` takes no less noise than σ, and steps that restarts
repeat are charged on top at σ.

What is proposed is written down before it is trained, one file per trial, `suggested/trial-3.json`. A resume
proposes it again, tells the sampler what was found, and goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpgcl_core.errors import ConfigError, StorageError, unknown_choice
from dpgcl_core.ledger.report import LedgerStatement
from dpgcl_core.release.statement import PrivacyStatement
from sweeps.service.budget import SweepBudget
from sweeps.service.data import load_training_data
from sweeps.service.execution import RaySession, run_trials, say
from sweeps.service.options import SweepOptions
from sweeps.service.plan import Earlier, Point, SweepPlan, Trial, build_plan, trial_at
from sweeps.service.proposals import EPSILON, Proposals
from sweeps.service.release import Charged, is_proven
from sweeps.service.run import Figure, OpenSweep
from sweeps.service.scores import visible_scores
from sweeps.service.search_space import SearchOptions, Space, without_invalid
from sweeps.service.storage import CalibrationCache, SweepFolder, config_hash, write_json
from trainers.data.dataset import TrainingData
from trainers.files.checkpoint import sync_folder
from trainers.tracking.runs import Tracker


@dataclass(frozen=True, kw_only=True)
class SearchPlan(SweepPlan):
    """A search before it runs: `trials` are as many as it will have, each one the costliest of the space.

    Attributes:
      options: as given.
      space: what is chosen from.
    """

    options: SearchOptions
    space: Space

    @property
    def fingerprint(self) -> str:
        """As of every sweep; the space, the sampler and the objectives decide the results, too."""
        space = [dataclasses.astuple(each) for each in self.space.searched]
        text = json.dumps([super().fingerprint, space, self.options.sampler, self.options.objectives])
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def params(self) -> dict[str, Any]:
        """Returns the params of the parent run: what all trials share, and what is searched."""
        varied = {*self.space.columns, "sensitivity"}
        if self.space.moves_epsilon:
            varied |= {"noise_multiplier", "target_epsilon"}
        shared = {name: value for name, value in super().params().items() if name not in varied}
        scores = [name for name in self.options.objectives if name != EPSILON]
        return shared | {
            "searched": ", ".join(self.space.columns),
            "space": self.space.text,
            "objective": scores[0],
            "objectives": ", ".join(self.options.objectives),
            "sampler": self.options.sampler,
        }


def plan_search(question: str, options: SearchOptions, calibration_folder: Path) -> SearchPlan:
    """Returns the plan of a search: every setting it may come to is known to be one, and all are paid for.

    Raises:
      ConfigError: an option breaks a rule, an objective cannot be had, or the method's steps are not those
        of the guarantee.
      DataError: the data are missing or unusable.
    """
    data, notes = load_training_data(options)
    num_records = len(data.train) + (len(data.scored) if data.scored is not None else 0)
    space, left_out = without_invalid(Space.of(options), options, num_records)
    check_objectives(options, data, space)
    point = Point(label="trial", changes=space.costliest())
    loaded = data, [*notes, *left_out]
    plan = build_plan(question, options, [point], calibration_folder=calibration_folder, loaded=loaded)
    mechanism = plan.trials[0].config.mechanism
    if not mechanism.rules.plain_event:
        raise ConfigError(
            "an adaptive choice is accounted for Poisson-sampled Gaussian steps and adding or removing one "
            f"record, and {mechanism.method} has others: give another method, or a grid sweep"
        )
    for each in space.searched:
        if each.option == EPSILON:  # the largest one is met: see whether the smallest one is
            lowest = Point(label="trial", changes=space.corner(epsilon=each.low))
            trial_at(options, lowest, data, calibration_folder)
    trials = tuple(
        dataclasses.replace(plan.trials[0], name=f"trial-{k}") for k in range(1, options.num_trials + 1)
    )
    notes = list(plan.notes)
    if is_proven(trials[0]):
        notes.append(
            f"Settings are chosen while the search runs, by {options.sampler}; its cost is that of "
            f"{len(trials)} trainings with the least noise of all, σ = {mechanism.noise_multiplier:.5g}, "
            "whatever is chosen."
        )
    planned = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return SearchPlan(**{**planned, "trials": trials, "notes": tuple(notes), "space": space})


def check_objectives(options: SearchOptions, data: TrainingData, space: Space) -> None:
    """Refuses objectives that no trial will have.

    Raises:
      ConfigError: there is none, one is named twice or unknown, or ε is one and does not differ.
    """
    given = options.objectives
    if len(set(given)) != len(given) or not set(given) - {EPSILON}:
        raise ConfigError(
            "objectives must be one or more different scores, and epsilon beside them for a Pareto front; "
            f"got {' '.join(given) or 'none'}"
        )
    possible = [*visible_scores(data), EPSILON]
    for name in given:
        if name not in possible:
            raise ConfigError(unknown_choice("objective", name, possible))
    if EPSILON in given and options.seeded_non_private:
        raise ConfigError("a seeded training has no ε: leave epsilon out of the objectives")
    if EPSILON in given and not space.moves_epsilon:
        raise ConfigError(
            "epsilon is the same in all trials and no objective: give --epsilon-range or "
            "--noise-multiplier-range, or leave it out"
        )


class SearchSweep(OpenSweep):
    """One search under way: it names its trials as it comes to them."""

    _plan: SearchPlan

    @staticmethod
    def planned(
        question: str,
        options: SweepOptions,
        points: Sequence[Point],
        calibration_folder: Path,
        earlier: Earlier | None,
    ) -> SweepPlan:
        assert isinstance(options, SearchOptions)
        return plan_search(question, options, calibration_folder)

    @staticmethod
    def show(plan: SweepPlan) -> None:
        assert isinstance(plan, SearchPlan)
        print_search(plan)

    def __init__(
        self,
        plan: SweepPlan,
        folder: SweepFolder,
        found: CalibrationCache,
        uri: str,
        budget: SweepBudget | None,
        account: dict[str, Any] | None,
    ) -> None:
        super().__init__(plan, folder, found, uri, budget, account)
        self._costliest = plan.trials[0]
        self._proposals = Proposals(self._plan.space, self._plan.options)
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
        """Runs what is left of the search, and returns the exit code."""
        done = self.results()
        for trial in self._begun:
            if trial.name in done:
                self._proposals.tell(trial.params["trial_number"], done[trial.name]["metrics"])
        self._begun = [trial for trial in self._begun if trial.name not in done]
        return super().run(opened, figure)

    def next_trial(self) -> Trial:
        """Returns a trial that an earlier process had begun, or a new one, once it is written down."""
        if self._begun:
            return self._begun.pop(0)
        number, values = self._proposals.num_asked + 1, self._proposals.ask()
        trial = self._named(number, values)
        write_suggestion(self._folder, number, values)
        self._found.keep()
        return trial

    def ended(self, name: str) -> None:
        """Tells the sampler how a trial ended, by the result that was kept."""
        result = self.results().get(name, {})
        self._proposals.tell(self._trials[name].params["trial_number"], result.get("metrics"))

    def _named(self, number: int, values: Mapping[str, Any]) -> Trial:
        """Returns trial `number`, which the sweep knows from now on by its real settings."""
        trial = searched_trial(self._plan, number, values, self._found.folder)
        self._trials[trial.name] = trial
        self._hashes[trial.name] = config_hash(trial.config)
        return trial

    def _train(self, session: RaySession, remaining: Sequence[Trial]) -> dict[str, str]:
        told = self._on_result, self._budget
        return run_trials(session, self._plan, self._folder, remaining, *told, source=self)

    def _statement(self, drawn: Mapping[str, Charged], ledger: LedgerStatement | None) -> PrivacyStatement:
        """As of every sweep, with the mechanisms that were trained in place of the costliest one."""
        trained = [self._trials[name] for name in drawn if is_proven(self._trials[name])]
        mechanisms = list(dict.fromkeys(trial.config.mechanism for trial in trained))
        return dataclasses.replace(super()._statement(drawn, ledger), mechanisms=mechanisms)

    def _end(self, failed: dict[str, str], figure: Figure | None) -> int:
        code = super()._end(failed, figure)
        for line in self._best():
            say(line)
        return code

    def _best(self) -> list[str]:
        """What the search found, for people to type again."""
        best, objectives = self._proposals.best(), self._plan.options.objectives
        if not best:
            return [f"no trial has a value of {', '.join(objectives)}"]
        front = f"{len(best)} trials that none beats in all of {', '.join(objectives)}"
        lines = [f"Pareto front, {front}:" if len(objectives) > 1 else f"best by {objectives[0]}:"]
        for number, found in best:
            params = self._trials[f"trial-{number}"].params
            scores = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            settings = ", ".join(f"{name} = {params[name]}" for name in self._plan.space.columns)
            lines.append(f"  trial-{number}: {scores} with {settings}")
        return lines


def searched_trial(
    plan: SearchPlan, number: int, values: Mapping[str, Any], calibration_folder: Path
) -> Trial:
    """Returns trial `number` at these values, with no less noise than the budget is for.

    A calibration is exact to its tolerance only, so that of a target just below the largest one may find
    less noise; such a trial takes the noise of the largest one.
    """
    least = plan.trials[0].config.mechanism.noise_multiplier
    changes, params = plan.space.changes(values), {"trial_number": number}
    point = Point(label=f"trial-{number}", changes=changes, params=params)
    trial = trial_at(plan.options, point, plan.data, calibration_folder)
    if trial.config.mechanism.noise_multiplier < least:
        point = dataclasses.replace(point, changes={**changes, EPSILON: None, "noise_multiplier": least})
        trial = trial_at(plan.options, point, plan.data, calibration_folder)
    return trial


def suggestion_file(folder: SweepFolder, number: int) -> Path:
    """Returns where the settings of a trial are written down before it starts."""
    return folder.path / "suggested" / f"trial-{number}.json"


def write_suggestion(folder: SweepFolder, number: int, values: Mapping[str, Any]) -> None:
    """Writes the settings of a trial down, durably.

    Raises:
      StorageError: they cannot be written.
    """
    path = suggestion_file(folder, number)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.path)
        write_json(path, values)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def read_suggestions(folder: SweepFolder) -> list[dict[str, Any]]:
    """Returns the values of all trials that were written down, the first one first.

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


def print_search(plan: SearchPlan) -> None:
    """Prints what is searched, by what, and what it costs at most."""
    for note in plan.notes:
        say(f"note: {note}")
    config, options = plan.trials[0].config, plan.options
    mechanism = config.mechanism
    say(
        f"n = {plan.num_records_public}, q = {mechanism.sampling_prob:.5g}, T = {mechanism.num_steps}, "
        f"to {mechanism.neighboring_relation}"
    )
    say(f"{options.num_trials} trials by {options.sampler}, for {', '.join(options.objectives)}, over")
    for each in plan.space.searched:
        say(f"  {each.option:<20} {each.text}")
    if config.guarantee_label == "proven":
        at_most = f"σ at least {mechanism.noise_multiplier:.5g}, ε at most {config.epsilon():.5g}"
        say(f"every trial: {at_most}; the whole search, whatever it chooses:")
    say(plan.tags()["tuning_cost"])
