"""The privacy cost of a whole sweep, in each release mode, as numbers and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from dpgcl_core.accounting.tuning.cost import (
    TrialClass,
    TuningCost,
    not_accounted,
    open_cost,
    sealed_cost,
    sealed_threshold_cost,
)
from dpgcl_core.accounting.tuning.modes import OPEN, SEALED
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.numbers import ADD_OR_REMOVE_ONE, ZERO_OUT_ONE
from dpgcl_core.release.statement import OpenTrials, delta_text, rounded_up
from sweeps.service.options.release_options import ReleaseOptions, trial_law
from sweeps.service.planning.trials import ChargedSteps, Trial, is_proven, trial_class


def delta_of(trials: Sequence[Trial]) -> float:
    """Return the δ of the whole sweep: the smallest δ of its trials."""
    return min(trial.config.mechanism.target_delta for trial in trials)


def trial_classes(
    trials: Sequence[Trial], draws: Mapping[str, ChargedSteps] | None = None
) -> list[TrialClass]:
    """Return the classes of the proven trials, with their counts; trials of one class cost the same.

    Args:
      trials: the trials of an open sweep.
      draws: the charged steps by trial name, for trials that drew more steps than planned.
    """
    draws = draws or {}
    counts = Counter(trial_class(trial, draws.get(trial.name)) for trial in filter(is_proven, trials))
    return [replace(each, count=count) for each, count in counts.items()]


def candidates_of(trials: Sequence[Trial]) -> tuple[list[TrialClass], list[float]]:
    """Return the distinct candidates of a sealed sweep and their probabilities."""
    classes = trial_classes(trials)
    total = sum(each.count for each in classes)
    return [replace(each, count=1) for each in classes], [each.count / total for each in classes]


def cost_of(
    release: ReleaseOptions,
    trials: Sequence[Trial],
    draws: Mapping[str, ChargedSteps] | None = None,
    max_trials: int | None = None,
    delta: float | None = None,
) -> TuningCost | None:
    """Return the cost of the whole sweep; None if no trial has a guarantee.

    Args:
      release: the sweep's mode, and the parameters of a sealed sweep.
      trials: all trials of an open sweep, or the equally probable candidates of a sealed sweep.
      draws: the charged steps by trial name, for trials of an open sweep that drew more steps than planned.
      max_trials: the largest number of trials that a sealed sweep can draw.
      delta: δ; the smallest δ of the trials by default.
    """
    proven = [trial for trial in trials if is_proven(trial)]
    if not proven:
        return None
    delta = delta_of(proven) if delta is None else delta
    try:
        if release.mode == OPEN:
            return _open_cost(proven, draws or {}, delta)
        relation = proven[0].config.mechanism.neighboring_relation  # the same for every candidate
        return replace(_sealed_cost(release, proven, delta, max_trials), neighboring_relation=relation)
    except ConfigError as error:  # no finite ε covers the sweep: the statement gives the reason
        worst = max(trial.config.epsilon() for trial in proven)
        return not_accounted(release.mode, reason=str(error).rstrip("."), delta=delta, training_epsilon=worst)


def _sealed_cost(
    release: ReleaseOptions, trials: Sequence[Trial], delta: float, max_trials: int | None
) -> TuningCost:
    candidates, probabilities = candidates_of(trials)
    if release.mode == SEALED:
        return sealed_cost(
            candidates,
            law=trial_law(release, max_trials),
            delta=delta,
            bound=release.bound,
            probabilities=probabilities,
        )
    return sealed_threshold_cost(
        candidates,
        halting_prob=release.halting_prob,
        delta=delta,
        probabilities=probabilities,
        max_trials=max_trials,
    )


def _open_cost(trials: Sequence[Trial], draws: Mapping[str, ChargedSteps], delta: float) -> TuningCost:
    """Return the cost of releasing all trials, whatever their methods.

    If all trials use add-or-remove, or all use zero-out (both have the same dominating pair), the steps
    compose as Poisson-subsampled Gaussians. They are accounted at the total δ minus the sum over all trials
    of the δ that batch caps use up (`Method.added_delta`). With probability at most this sum, some cap
    exchanges a record; otherwise every step is the accounted Poisson-subsampled Gaussian.
    If all k trials use replace, their guarantees, each (ε, δ/k), are added by basic composition. If the
    trials use two relations, no total is claimed, because data sets that are neighbours under one relation
    are not neighbours under the other.
    """
    relations = sorted({trial.config.mechanism.neighboring_relation for trial in trials})
    worst = max(trial.config.epsilon() for trial in trials)
    if len(relations) > 1:
        reason = (
            f"some trainings are accounted for the neighbouring relation '{relations[0]}', others for "
            f"'{relations[1]}'. Run the methods of each relation in a separate sweep"
        )
        cost = not_accounted(OPEN, reason=reason, delta=delta, training_epsilon=worst)
        return replace(cost, neighboring_relation=" or ".join(relations))
    if relations not in ([ADD_OR_REMOVE_ONE], [ZERO_OUT_ONE]):
        return _basic_composition(trials, draws, delta, relations[0])
    caps_delta = sum(_added_delta(trial, draws.get(trial.name)) for trial in trials)
    if caps_delta >= delta:
        raise ConfigError(f"all trials' batch caps must use less than δ = {delta:.2g}; got {caps_delta:.2g}")
    cost = open_cost(trial_classes(trials, draws), delta=delta - caps_delta)
    cost = replace(cost, neighboring_relation=relations[0])
    if not caps_delta:
        return cost
    theorem = f"{cost.theorem}, at δ minus {caps_delta:.2g} for batches that reach their cap"
    return replace(cost, delta=delta, theorem=theorem)


def _added_delta(trial: Trial, counts: ChargedSteps | None) -> float:
    mechanism = trial.config.mechanism
    num_steps = max(mechanism.num_steps_charged, counts.num_steps if counts else 0)
    return mechanism.rules.added_delta(mechanism, num_steps)


def _basic_composition(
    trials: Sequence[Trial], draws: Mapping[str, ChargedSteps], delta: float, relation: str
) -> TuningCost:
    """Return the sum of the trainings' ε, each at an equal share of δ."""
    counts_by_kind: Counter[tuple[Mechanism, int]] = Counter()
    for trial in trials:
        mechanism, counts = trial.config.mechanism, draws.get(trial.name)
        num_steps = max(mechanism.num_steps_charged, counts.num_steps if counts else 0)
        counts_by_kind[replace(mechanism, target_delta=delta / len(trials)), num_steps] += 1
    total = sum(count * mechanism.epsilon(steps) for (mechanism, steps), count in counts_by_kind.items())
    return TuningCost(
        mode=OPEN,
        delta=delta,
        training_epsilon=max(trial.config.epsilon() for trial in trials),
        tuned_epsilon=total,
        theorem="basic composition of the trainings, each at its share of δ",
        rdp_epsilon=None,
        planned=tuple(
            {"method": m.method, "noise_multiplier": m.noise_multiplier, "num_steps": steps, "count": count}
            for (m, steps), count in counts_by_kind.items()
        ),
        neighboring_relation=relation,
    )


def cost_tags(release: ReleaseOptions, trials: Sequence[Trial], cost: TuningCost | None) -> dict[str, str]:
    """Return the tags about the tuning cost for every run."""
    tags = {
        "release_mode": release.mode,
        "tuning_cost": cost_line(release.mode, cost, open_trials(trials)),
        "tuned_epsilon": "none",
        "tuning_theorem": "none",
    }
    if cost is not None:
        tuned = "not accounted" if cost.tuned_epsilon is None else rounded_up(cost.tuned_epsilon, 6)
        delta = rounded_up(cost.delta, 6)
        tags |= {"tuned_epsilon": tuned, "tuned_delta": delta, "tuning_theorem": cost.theorem}
    return tags


def cost_line(mode: str, cost: TuningCost | None, trials: OpenTrials) -> str:
    """Return one sentence on the tuning cost, for figures, tags and the terminal."""
    if cost is None:
        return "Tuning cost: none, because no trial has a guarantee."
    if cost.tuned_epsilon is None:
        return f"Tuning cost not accounted: {cost.reason}."
    tuned, delta = rounded_up(cost.tuned_epsilon, 4), delta_text(cost.delta)
    if mode != OPEN:
        return (
            f"{mode.capitalize()} release: including the choice among secret trials, ε = {tuned} at "
            f"δ = {delta} ({cost.theorem}); one trial alone ε = {rounded_up(cost.training_epsilon, 4)}."
        )
    count = sum(planned["count"] for planned in cost.planned)
    everything = f"all {count} trials together" if count > 1 else "its one trial"
    others = f"; not included: {trials.without_guarantee_text()}" if trials.without_guarantee else ""
    return (
        f"Open release: {everything} ε = {tuned} at δ = {delta} ({cost.theorem}){others}; "
        "each ε shown is for one training."
    )


def open_trials(
    trials: Sequence[Trial], draws: Mapping[str, ChargedSteps] = MappingProxyType({}), num_started: int = 0
) -> OpenTrials:
    """Return the numbers of trials for an open sweep's statement.

    Args:
      trials: all planned trials.
      draws: the charged steps by trial name, for trials that drew more steps than planned.
      num_started: the number of trials that may have drawn a step.
    """
    proven = [trial for trial in trials if is_proven(trial)]
    planned = {trial.name: trial.config.mechanism.num_steps_charged for trial in proven}
    num_drawn = {name: draws[name].num_steps if name in draws else 0 for name in planned}
    num_repeated = sum(max(0, num_drawn[name] - steps) for name, steps in planned.items())
    unproven = [trial.config for trial in trials if not is_proven(trial)]
    return OpenTrials(
        planned=len(trials),
        without_guarantee=len(trials) - len(proven),
        num_started=num_started,
        steps_planned=sum(planned.values()),
        steps_repeated=num_repeated,
        references=sum(not config.mechanism.is_private for config in unproven),
        as_published=sum(config.guarantee_label == "as-published" for config in unproven),
    )
