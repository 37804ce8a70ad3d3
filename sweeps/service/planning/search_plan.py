"""An adaptive search: earlier trials' scores choose each trial, and the whole search is paid in advance.

Guarantee. All trials of the space share the sampling probability q and the number of steps T. Let σ be the
smallest noise multiplier that any of them may have. All that an open search of K trials releases, including
the choices among them, is (ε, δ)-DP for adding or removing one record, with the ε of K·T steps of the
Poisson-subsampled Gaussian of (q, σ). `SearchPlan.cost` states this cost, and a ledger reserves it before the
first trial starts.

Proof. The settings of a trial are a function of public numbers, the public seed and earlier trials' visible
scores. These are scores of released models on public records, or noised scores, which are charged themselves.
Given all that was released before,
1. the next step is a step of a training with this q, some sensitivity Δ and some noise multiplier σ' ≥ σ. Its
   divergences are those of the pair of `dpgcl_core.mechanism.mechanism`, whatever group size, augmentations,
   clip norm, temperature and learning rate are: ((1 − q)·N(0, σ'²) + q·N(1, σ'²), N(0, σ'²)), in units of Δ.
2. Adding an independent N(0, σ'² − σ²) to both sides of the pair of σ gives the pair of σ'. So the pair of σ
   dominates the pair of σ', for adding and for removing alike: the pair of σ' is its post-processing.
3. Mechanisms that one fixed pair dominates, whatever came before, are dominated together by its K·T-fold
   product (adaptive composition of dominating pairs, Zhu, Dong and Wang 2022). K and T are fixed in advance,
   and a trial that fails or never starts only removes steps.
A step that also releases its noised norm has the joint noise multiplier of σ', which rises with σ'. Noised
counts have the same noise in all trials. So 2 holds for both, too. Permitted methods are those whose steps
are of this kind (`Method.plain_event`). `searched_trial` uses no less noise than σ, and steps that restarts
repeat are charged additionally at σ.

*Earlier sweeps.* A search may start from the results of earlier open sweeps on the same records. All that
they and the search release is (ε, δ)-DP with the ε of all steps that the earlier sweeps planned or have drawn
and of the K·T steps, **if K, q, σ and T do not depend on the earlier results**. Proof: the pairs of all these
steps are then fixed in advance, and 3 holds for them in their order. The settings of a trial may depend on
the earlier results, as on the results of earlier trials. If a person chose K, q, σ or T after seeing them,
the composition by PLD is no guarantee (docs/theory/ledger.md has a counterexample). Then only the ledger's
(ε, δ) covers the sweeps together: its rule allows this choice, and it has charged the earlier sweeps already.
The statement of such a search states this condition.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from dpgcl_core.errors import ConfigError, require_choice
from sweeps.service.options.score_options import visible_scores
from sweeps.service.planning.inputs import PlanInputs, num_records
from sweeps.service.planning.plan import SweepPlan, build_plan, trial_at
from sweeps.service.planning.space import EPSILON, SearchOptions, Space, without_invalid
from sweeps.service.planning.trials import Point, Trial, is_proven
from sweeps.service.storage.sweep_folder import config_hash, content_hash, differences_text
from trainers.config.networks import NetworkOptions
from trainers.config.tree import leaves
from trainers.data.dataset import TrainingData

Observation = tuple[Mapping[str, Any], Mapping[str, float]]
"""A finished trial of an earlier sweep: its values of the searched options, and its metrics."""


@dataclass(frozen=True, kw_only=True)
class SearchPlan(SweepPlan):
    """A search before it runs; `trials` has the space's costliest trial, once for each trial of the search.

    Attributes:
      options: the search's options.
      inputs: the inputs of the search, from which each trial is planned.
      space: the space of its settings.
      observations: the settings and metrics of earlier sweeps' trials that the sampler learns from.
    """

    options: SearchOptions
    inputs: PlanInputs
    space: Space
    observations: tuple[Observation, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the sweep, including the space, the sampler and the objectives."""
        space = [astuple(axis) for axis in self.space.axes]
        names = [self.options.earlier] if self.options.earlier else []
        return content_hash(
            [super().fingerprint, space, self.options.sampler, self.options.objectives, *names]
        )

    def params(self) -> dict[str, Any]:
        """Return the params of the parent run: the params that all trials share, and the search's own."""
        varied = {*self.space.columns, "sensitivity", "sampling"}
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


def plan_search(inputs: PlanInputs, space: Space | None = None, own_scores: Sequence[str] = ()) -> SearchPlan:
    """Return the plan of a search: every setting that it may choose is valid and covered by its cost.

    Args:
      inputs: the search's inputs, with `SearchOptions`.
      space: the space to search, in place of the options' own lists and ranges.
      own_scores: names of scores that the caller computes from each trial's visible metrics.

    Raises:
      ConfigError: an option breaks a rule, trials lack an objective, or the guarantee does not cover the
        method's steps.
    """
    options = inputs.options
    assert isinstance(options, SearchOptions)
    space, removal_notes = without_invalid(space or Space.of(options), options, num_records(inputs.data))
    check_objectives(options, inputs.data, space, own_scores)
    point = Point(label="trial", changes=space.costliest())
    plan = build_plan(replace(inputs, points=[point], notes=[*inputs.notes, *removal_notes]))
    if inputs.earlier and plan.cost is not None and plan.cost.reason is not None:
        raise ConfigError(f"a search and its earlier sweeps need a known total cost: {plan.cost.reason}.")
    mechanism = plan.trials[0].config.mechanism
    if not mechanism.rules.plain_event:
        raise ConfigError(
            "a search needs Poisson-sampled Gaussian steps and adding or removing one record, because its "
            f"cost is proven only for these; got {mechanism.method}. Use another method, or a grid sweep."
        )
    for axis in space.axes:
        if axis.option == EPSILON:  # the largest ε is feasible; check the smallest, too
            trial_at(inputs, Point(label="trial", changes=space.corner(epsilon=axis.low)))
        for value in axis.choices if axis.option in leaves(NetworkOptions) else ():
            trial_at(inputs, Point(label="trial", changes=space.corner(**{axis.option: value})))
    trials = tuple(_repeat_trial(plan.trials[0], options))
    notes = list(plan.notes)
    if is_proven(trials[0]):
        notes.append(
            f"The sampler {options.sampler} chooses settings while the search runs. Whatever it chooses, the "
            f"search costs as much as {len(trials)} trainings with the smallest noise multiplier, "
            f"σ = {mechanism.noise_multiplier:.5g}."
        )
    plan_fields = {field.name: getattr(plan, field.name) for field in fields(plan)}
    replacements = {"trials": trials, "notes": tuple(notes)}
    search = SearchPlan(**{**plan_fields, **replacements}, options=options, inputs=inputs, space=space)
    return _with_observations(search) if inputs.earlier else search


def _with_observations(plan: SearchPlan) -> SearchPlan:
    """Return the plan with the finished trials of earlier sweeps that are trials of the space, and notes.

    Raises:
      ConfigError: there is none, so the search would pay for results that it does not use.
    """
    observations, counts = list[Observation](), Counter[str]()
    for sweep in plan.earlier:
        for result in sweep.results.values():
            values = {axis.option: result["params"].get(axis.column) for axis in plan.space.axes}
            if (reason := _reason_to_skip(plan, values, result)) is None:
                observations.append((values, result["metrics"]))
            else:
                counts[f"results of the sweep {sweep.sweep} are not used: {reason}."] += 1
    notes = [f"{number} {text}" for text, number in counts.items()]
    if not observations:
        raise ConfigError(
            "earlier sweeps must have a result in the space of the search, as their ε is added; got none. "
            f"{' '.join(notes)} Leave them out, or search their space, with their options"
        )
    notes.append(
        "The ε of the whole search holds if earlier results did not decide its number of trials, q, σ and T, "
        "as if all had been planned together. Otherwise only a ledger's (ε, δ) covers them together."
    )
    return replace(plan, observations=tuple(observations), notes=(*plan.notes, *notes))


def _reason_to_skip(plan: SearchPlan, values: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """Return why an earlier result is no result of the search's own trial at these values; None if it is."""
    try:
        for axis in plan.space.axes:
            axis.proposal(values[axis.option])
    except (ValueError, TypeError):
        return "they are outside the space"
    params = result["params"]
    config = replace(searched_trial(plan, 0, values).config, public_seed=params["public_seed"])
    if config_hash(config) != result["config_hash"]:
        own = config.as_params()
        return f"other options differ{differences_text({name: params.get(name) for name in own}, own)}"
    scores = [result["metrics"].get(name, math.nan) for name in plan.options.objectives]
    return None if all(map(math.isfinite, scores)) else f"they lack {' or '.join(plan.options.objectives)}"


def costliest_trials(inputs: PlanInputs, space: Space) -> list[Trial]:
    """Return the trials that bound a search's cost: its number of trials, each the costliest of its space."""
    assert isinstance(inputs.options, SearchOptions)
    space, _ = without_invalid(space, inputs.options, num_records(inputs.data))
    return _repeat_trial(trial_at(inputs, Point(label="trial", changes=space.costliest())), inputs.options)


def _repeat_trial(trial: Trial, options: SearchOptions) -> list[Trial]:
    return [replace(trial, name=f"trial-{k}") for k in range(1, options.num_trials + 1)]


def check_objectives(
    options: SearchOptions, data: TrainingData, space: Space, own_scores: Sequence[str] = ()
) -> None:
    """Check that the objectives are scores of the trials, or ε if it varies.

    Raises:
      ConfigError: no objective is a score, one is repeated or unknown, or ε is one but is absent or fixed.
    """
    objectives = options.objectives
    if len(set(objectives)) != len(objectives) or not set(objectives) - {EPSILON}:
        raise ConfigError(
            "objectives must be one or more different scores, plus epsilon for a Pareto front; "
            f"got {' '.join(objectives) or 'none'}"
        )
    possible = [*visible_scores(data, options.mechanism.method), *own_scores, EPSILON]
    for name in objectives:
        require_choice("objective", name, possible)
    if EPSILON in objectives and options.randomness.seeded_non_private:
        raise ConfigError("a seeded training has no ε. Leave epsilon out of the objectives.")
    if EPSILON in objectives and not space.moves_epsilon:
        raise ConfigError(
            "an objective must vary, and epsilon is the same in all trials. Set --epsilon-range or "
            "--noise-multiplier-range, or leave epsilon out of the objectives."
        )


def searched_trial(plan: SearchPlan, number: int, values: Mapping[str, Any]) -> Trial:
    """Return trial `number` at these values, with at least the noise that was budgeted.

    A calibration is exact only to its tolerance, so a target ε just below the largest may get less noise than
    the largest target. Such a trial uses the noise of the largest target.
    """
    floor = plan.trials[0].config.mechanism.noise_multiplier
    changes, params = plan.space.changes(values), {"trial_number": number, **plan.space.extra_params(values)}
    point = Point(label=f"trial-{number}", changes=changes, params=params)
    trial = trial_at(plan.inputs, point)
    if trial.config.mechanism.noise_multiplier < floor:
        undivided = _before_division(floor, plan.options.mechanism.tan_factor)
        point = replace(point, changes={**changes, EPSILON: None, "noise_multiplier": undivided})
        trial = trial_at(plan.inputs, point)
    if trial.config.mechanism.noise_multiplier < floor:
        raise ConfigError(
            f"every trial's noise_multiplier must be at least the budgeted {floor:.6g}; trial {number} would "
            f"have {trial.config.mechanism.noise_multiplier:.6g}, so it was not trained"
        )
    return trial


def _before_division(noise_multiplier: float, factor: float) -> float:
    """Return the value whose quotient by `factor` is `noise_multiplier`, or larger by a rounding.

    >>> _before_division(0.3, 3.0) / 3.0 >= 0.3
    True
    """
    undivided = noise_multiplier * factor
    while undivided / factor < noise_multiplier:
        undivided = math.nextafter(undivided, math.inf)
    return undivided
