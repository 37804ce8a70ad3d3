"""Tuning before comparing: each candidate has a grid of settings, and the best setting is trained again.

A candidate is one row of a comparison, for example a method at one ε. A first sweep trains every setting of
every candidate once. A second sweep trains each candidate's best setting with its own seeds, so that the
reported scores are not the scores that decided the choice. Both are open sweeps: all trials of both are
released, and the stated cost of the second covers both together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpgcl_core.errors import ConfigError, StorageError
from dpgcl_core.mechanism.method import Method
from dpgcl_core.mechanism.registry import METHODS, method_named
from sweeps.service.console.terminal import count, print_line
from sweeps.service.options.data import DataOptions
from sweeps.service.options.score_options import scores_to_compare
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.inputs import EarlierSweep, PlanInputs
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.sweep_cost import cost_of
from sweeps.service.planning.trials import Point, Trial, is_proven, trial_class
from sweeps.service.running.conclude import Figure
from sweeps.service.running.earlier_sweeps import configs_of, earlier_sweep
from sweeps.service.running.prepare import sweep_prefix
from sweeps.service.running.sweep import Outcome, execute
from sweeps.service.running.total_epsilon import fixes_noise
from sweeps.service.running.trial_policy import TrialPolicy
from sweeps.service.storage.sweep_folder import named_folder, unused_name
from sweeps.service.storage.sweep_lock import check_not_running
from trainers.config.tree import replace_options
from trainers.files.storage import storage_root

_ROUNDING = 1 + 1e-6
TUNING_SUFFIX, PROXY_SUFFIX = "-tuning", "-proxy"
"""The ends of the names of sweeps that come first: on the same records, and on public data."""


@dataclass(frozen=True, kw_only=True)
class FirstOfTwo(TrialPolicy):
    """The policy of the first sweep, which trains every setting of a grid; it also plans the second sweep.

    The ε of both sweeps is known in advance, because no setting of a grid changes it, unless the grid varies
    σ, B or T. So plan and dry run state the total, and a ledger without room for both sweeps fails the check
    before anything is trained. On a resume the second sweep is not checked, as it may already be reserved.

    Attributes:
      question, options, points: the second sweep's question, options and points.
    """

    question: str
    options: SweepOptions
    points: Sequence[Point]
    has_answer: bool = False

    def trials(self, inputs: PlanInputs) -> Sequence[Trial]:
        """Return the trials of both sweeps."""
        return [*super().trials(inputs), *super().trials(self._second_inputs(inputs))]

    def fixes_noise(self, inputs: PlanInputs) -> bool:
        """Whether options or points set ε or the noise multiplier of the second sweep's trainings."""
        return fixes_noise(inputs.options, self.points)

    def plan(self, inputs: PlanInputs) -> SweepPlan:
        """Return the first sweep's plan, with the second sweep's trials. Raises as in `build_plan`."""
        plan, after = super().plan(inputs), super().plan(self._second_inputs(inputs))
        note = (
            f"A sweep of {count(len(after.trials), 'more trial')} follows. Its privacy statement covers the "
            "trials of both sweeps; sign that statement."
        )
        name, folder = inputs.options.storage.name, inputs.options.storage.folder
        has_second_begun = name is not None and has_begun(folder, self.resumed_name(name))
        return replace(plan, notes=(*plan.notes, note), later=() if has_second_begun else after.trials)

    def resumed_name(self, name: str) -> str:
        """Return the name of the second sweep."""
        return name.removesuffix(TUNING_SUFFIX)

    def _second_inputs(self, inputs: PlanInputs) -> PlanInputs:
        """Return the inputs of the second sweep's plan, with the first sweep's mechanism options."""
        second = replace(self.options, mechanism=inputs.options.mechanism)
        return replace(inputs, question=self.question, options=second, points=self.points, notes=())


@dataclass(frozen=True, kw_only=True)
class SecondOfTwo(TrialPolicy):
    """The policy of the second sweep, whose (q, σ, T) were fixed before the first sweep began.

    A composition of privacy loss distributions is a guarantee only if no result changes what a later step
    costs (`dpgcl_core.accounting.filters`). The first sweep's results may choose everything else. Steps that
    restarts repeat are not in the plan; the statement counts them, and only a ledger's cap binds them, unless
    R such steps are charged in advance.

    Attributes:
      planned: the trials that the first sweep's plan had in place of this sweep's; empty if this sweep has
        begun, whose fingerprint then decides.
      total_epsilon: the total that both plans must stay within; None without one.
    """

    planned: Sequence[Trial]
    total_epsilon: float | None = None

    def plan(self, inputs: PlanInputs) -> SweepPlan:
        """Return the plan. Raises ConfigError if its charges are not those planned, or exceed the total."""
        plan = super().plan(inputs)
        if self.total_epsilon is not None:
            cost = cost_of(plan.release, plan.charged_trials)
            epsilon = math.inf if cost is None or cost.tuned_epsilon is None else cost.tuned_epsilon
            if epsilon > self.total_epsilon * _ROUNDING:
                raise ConfigError(
                    f"both sweeps must stay within --total-epsilon {self.total_epsilon:g}; their plans cost "
                    f"{epsilon:.4g}. Restore the plan of the first sweep, or start another sweep"
                )
        charges, planned_charges = (
            Counter(trial_class(trial) for trial in trials if is_proven(trial))
            for trials in (plan.trials, self.planned)
        )
        if self.planned and charges != planned_charges:
            raise ConfigError(
                "results must not choose the sampling probability, noise or steps of a later training, or "
                "the total ε would not hold; got settings that differ in them. Vary only options such as "
                "the learning rate, C or the schedule"
            )
        return plan


def run_two_sweeps(
    options: SweepOptions,
    first_points: Sequence[Point],
    first: FirstOfTwo,
    choose: Callable[[Outcome], Sequence[Point]],
    figure: Figure | None,
    *,
    choice: str,
) -> Outcome:
    """Run two sweeps on the same records, the second on points that the first one's results chose.

    Args:
      options: the user's options; `name` names the second sweep, and the first sweep's name adds `-tuning`.
      first_points: the points of the first sweep.
      first: the policy of the first sweep, with the provisional points of the second.
      choose: returns the second sweep's points from the first sweep's outcome.
      figure: draws the second sweep's figure, as in `execute`.
      choice: a sentence for the statement on how the points were chosen.

    Raises:
      ConfigError: the chosen points are charged differently from the provisional ones.
      DpgclError: as in `execute`.
    """
    name, root = options.storage.name, options.storage.folder
    assert name is not None
    if has_begun(root, name) and not has_begun(root, f"{name}{TUNING_SUFFIX}"):
        raise StorageError(
            f"the sweep {name}{TUNING_SUFFIX} is lost, whose results chose the settings of {name}"
        )
    first_options = with_name(replace_options(options, repeats=1), f"{name}{TUNING_SUFFIX}")
    tuning = execute(
        f"{first.question}-tuning", first_options, first_points, None, policy=first, repeat_options=options
    )
    if tuning.code or options.service.dry_run:
        return tuning
    second = with_name(replace_options(first.options, total_epsilon=None), name)
    if (fit := tuning.plan.fit) is not None and fit.epsilon is not None:
        second = replace_options(second, epsilon=fit.epsilon)
    return execute(
        first.question,
        second,
        choose(tuning),
        figure,
        policy=SecondOfTwo(
            planned=tuning.plan.later,
            total_epsilon=options.service.total_epsilon,
            earlier=(_earlier_sweep(tuning, choice),),
        ),
        repeat_options=options,
    )


def with_name(options: SweepOptions, name: str) -> SweepOptions:
    """Return the options of a sweep with this name, which is resumed if it has begun and is to be resumed."""
    resume = options.storage.resume and has_begun(options.storage.folder, name)
    return replace_options(options, name=name, resume=resume)


def has_begun(folder: Path | None, name: str) -> bool:
    """Return whether a storage folder has a plan of the sweep with this name."""
    return (named_folder(storage_root(folder), name).path / "plan.json").is_file()


def run_tuned_sweep(
    question: str,
    options: SweepOptions,
    candidates: Sequence[Point],
    grid: Sequence[Mapping[str, Any]],
    figure: Figure,
) -> int:
    """Tune every candidate on the same grid, run the best setting of each, and return the exit code.

    Args:
      question: the name of the sweep's question.
      options: the user's options; `name` names the second sweep, and the first sweep's name adds `-tuning`.
      candidates: the candidates to compare; the changes of a candidate apply to all its settings.
      grid: the settings to try for each candidate, as option values by name.
      figure: draws the second sweep's figure, as in `execute`.

    Raises:
      ConfigError: the release mode is not open, or private data have no public data set to score on.
    """
    if not options.release.is_open:
        raise ConfigError(
            "a comparison shows every trial, so its release must be open; got "
            f"{options.release.mode}. For one private model, use another sweep"
        )
    check_scored(options.data, "a comparison of tuned settings")
    if options.data.are_private:
        candidates = [each for each in candidates if each.changes.get("epsilon") != math.inf]
    options = replace_options(options, name=second_name(question, options))
    methods = [candidate.changes.get("method", options.mechanism.method) for candidate in candidates]
    settings = {
        candidate.label: _grid_points(candidate, grid if method_named(method).trains else grid[:1])
        for candidate, method in zip(candidates, methods, strict=True)
    }
    print_line(f"tuning: {len(grid)} settings for each of {len(candidates)} candidates")
    provisional_points = [
        _final_point(candidate, settings[candidate.label][0], len(grid)) for candidate in candidates
    ]

    def choose(tuning: Outcome) -> list[Point]:
        scores = scores_to_compare(tuning.plan.data, methods)
        return [
            _best_point(settings[candidate.label], tuning, candidate, scores.get(method, ""))
            for candidate, method in zip(candidates, methods, strict=True)
        ]

    second = replace_options(options, seed=options.service.seed + 1)
    grid_text = "; ".join(", ".join(f"{name} = {value:g}" for name, value in each.items()) for each in grid)
    return run_two_sweeps(
        options,
        [point for points in settings.values() for point in points],
        FirstOfTwo(question=question, options=second, points=provisional_points),
        choose,
        figure,
        choice=f"Each row's setting is the best of the same grid ({grid_text}).",
    ).code


def check_scored(data: DataOptions, chooser: str) -> None:
    """Raise ConfigError if no score may be shown that the chooser, a part of the message, could choose by."""
    if data.are_private and data.evaluate_on is None:
        raise ConfigError(
            f"{chooser} chooses by scores that may be shown; got private data without any. Set --evaluate-on "
            "to a public data set"
        )


def select_methods(names: Sequence[str], data: DataOptions) -> list[Method]:
    """Return the methods of these names, or without names all methods that fit the sweep's data.

    A method fits if it has a loss for the kind of record and learns without labels. On private data only
    methods remain that have a proven guarantee and the neighbouring relation of the first such method,
    because trainings with two relations have no total ε.
    """
    methods = [method_named(name) for name in dict.fromkeys(names)] or _methods_for(data)
    if not data.are_private:
        return methods
    proven = [m for m in methods if m.label == "proven"]
    comparable = [m for m in proven if m.neighboring_relation == proven[0].neighboring_relation]
    left_out = ", ".join(m.name for m in methods if m not in comparable)
    if left_out:
        print_line(f"note: left out on private data (no guarantee, or another relation): {left_out}")
    return comparable


def _methods_for(data: DataOptions) -> list[Method]:
    """Return all methods without labels that can train on the data's modality; print the others."""
    of_images = data.modality == "image"
    kind = "images without texts" if of_images else "pairs of images and texts"
    unlabelled = [method for method in METHODS.values() if not method.takes_labels]
    fitting = [method for method in unlabelled if (method.takes_images if of_images else method.takes_pairs)]
    left_out = ", ".join(method.name for method in unlabelled if method not in fitting)
    print_line(f"note: left out, because they have no loss for {kind}: {left_out}")
    return fitting


def second_name(question: str, options: SweepOptions) -> str:
    """Return the second sweep's name: `--name`, or a new name. Raises StorageError if `--name` is taken."""
    storage, root = options.storage, storage_root(options.storage.folder)
    if storage.name is None:
        return unused_name(
            root / "sweeps", sweep_prefix(question, options), ends=("", TUNING_SUFFIX, PROXY_SUFFIX)
        )
    second = named_folder(root, storage.name)
    check_not_running(second)
    if not storage.resume and second.path.exists():
        raise StorageError(
            f"the sweep {storage.name!r} exists already; add --resume to continue it, or choose another "
            "--name"
        )
    return storage.name


def _grid_points(candidate: Point, grid: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return a point of the first sweep for each setting of the grid."""
    return [
        Point(
            label=f"tune-{candidate.label}-{number}",
            changes={**setting, **candidate.changes},
            params=candidate.params,
        )
        for number, setting in enumerate(grid)
    ]


def _best_point(points: Sequence[Point], tuning: Outcome, candidate: Point, name: str) -> Point:
    """Return the candidate's final point: its setting with the highest score `name`, the first among ties."""

    def score(point: Point) -> float:
        value = tuning.score(f"{point.label}-r0", name)
        return value if math.isfinite(value) else -math.inf

    best = max((point for point in points if f"{point.label}-r0" in tuning.results), key=score, default=None)
    if best is None:
        raise ConfigError(
            f"no setting of {candidate.label} can be run on these data; leave it out of the comparison"
        )
    return _final_point(candidate, best, len(points))


def _final_point(candidate: Point, setting: Point, num_tried: int) -> Point:
    """Return the candidate's point in the second sweep, with this setting's options."""
    params = {**candidate.params, "tuning_grid_size": num_tried}
    return Point(label=candidate.label, changes=setting.changes, params=params)


def _earlier_sweep(tuning: Outcome, choice: str) -> EarlierSweep:
    assert tuning.folder is not None
    note = (
        f"{choice} The {len(tuning.plan.trials)} trainings of the sweep {tuning.folder.name} chose it; their "
        "cost is part of the cost of the whole sweep."
    )
    return earlier_sweep(tuning.folder, configs_of(tuning.plan), note)
