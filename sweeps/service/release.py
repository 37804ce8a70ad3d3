"""Release modes: what a sweep may do in each, and what the whole of it costs in privacy.

*Open* is the default, for a tracking page that shows trials is a release of them. *Sealed* and
*sealed-threshold* publish one trial; how many there were stays secret (`sealed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dpgcl_core.accounting.tuning.cost import (
    OPEN,
    SEALED,
    SEALED_THRESHOLD,
    THEOREMS,
    TrialClass,
    TuningCost,
    not_accounted,
    open_cost,
    sealed_cost,
    sealed_threshold_cost,
)
from dpgcl_core.accounting.tuning.laws import TruncatedNegativeBinomial
from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import ADD_OR_REMOVE_ONE
from dpgcl_core.release import noised_counts
from dpgcl_core.release.statement import OpenTrials, rounded_up
from sweeps.service.scores import NOISED_SCORES, final_scores, visible_scores

if TYPE_CHECKING:
    from sweeps.service.options import SweepOptions
    from sweeps.service.plan import SweepPlan, Trial

MODES = (OPEN, SEALED, SEALED_THRESHOLD)
GRID, INDEPENDENT = "grid", "independent"
_FORBIDDEN_WHEN_SEALED = {
    GRID: "a grid runs a fixed list of trials, and the best of a fixed number costs as much as all of them",
    "tpe": "TPE proposes each trial by looking at earlier ones, so the draws are not independent",
    "bayesian": "it proposes each trial by looking at earlier ones, so the draws are not independent",
    "asha": "ASHA compares running trials with each other and stops some of them",
    "hyperband": "Hyperband compares running trials with each other and stops some of them",
    "median": "the median rule compares running trials with each other and stops some of them",
}


def check_search(mode: str, search: str) -> str:
    """Returns the search to use, or refuses one that the release mode forbids.

    >>> check_search("open", "auto"), check_search("sealed", "auto")
    ('grid', 'independent')

    Raises:
      ConfigError: the mode or the search is unknown, or forbidden in this mode.
    """
    if mode not in MODES:
        raise ConfigError(unknown_choice("release mode", mode, MODES))
    if search == "auto":
        return GRID if mode == OPEN else INDEPENDENT
    if mode != OPEN and search in _FORBIDDEN_WHEN_SEALED:
        raise ConfigError(
            f"search {search!r} is forbidden with --release {mode}: {_FORBIDDEN_WHEN_SEALED[search]}; use "
            "--search independent, which draws settings at random from the same values, or --release open"
        )
    if mode == OPEN and search == INDEPENDENT:
        raise ConfigError(
            "search 'independent' is for sealed sweeps, which draw their number of trials, too; "
            "use --search grid, or --release sealed"
        )
    if search not in (GRID, INDEPENDENT):
        raise ConfigError(unknown_choice("search", search, ("auto", GRID, INDEPENDENT)))
    return search


def check_release(options: SweepOptions) -> None:
    """Refuses options that contradict the release mode.

    Raises:
      ConfigError: as `check_search`; or the selection's law, bound or score breaks a rule.
    """
    check_search(options.release, options.search)
    threshold = options.release == SEALED_THRESHOLD
    if threshold != (options.min_score is not None):
        raise ConfigError(
            "min_score is the public score that ends a sealed-threshold sweep: give it with --release "
            f"{SEALED_THRESHOLD} and with no other; got {options.min_score} with --release {options.release}"
        )
    if options.release == OPEN:
        return
    if options.bound not in THEOREMS:
        raise ConfigError(unknown_choice("bound", options.bound, THEOREMS))
    trial_law(options)
    if options.select_by not in final_scores():
        raise ConfigError(unknown_choice("score to select by", options.select_by, final_scores()))
    if options.select_by in NOISED_SCORES and not options.score_on_held_out:
        raise ConfigError(
            f"{options.select_by} is a noised score of held-out private records: give --score-on-held-out "
            "and --score-noise-multiplier, too, or select by a score on public data"
        )
    if options.seeded_non_private:
        raise ConfigError(
            f"--release {options.release} needs trainings with a guarantee; leave seeded_non_private out"
        )


def check_sealed_plan(plan: SweepPlan) -> None:
    """Refuses candidates without a guarantee, or without a score to select by that is public or noised.

    Raises:
      ConfigError: as said.
    """
    for trial in plan.trials:
        if not is_proven(trial):
            raise ConfigError(
                f"a sealed sweep draws among trainings with a guarantee only, and {trial.name} has label "
                f"{trial.config.guarantee_label!r}; give a finite epsilon and methods that are proven"
            )
        if not trial.config.mechanism.rules.plain_event:
            raise ConfigError(
                f"the bounds on a secret choice are for Poisson-sampled Gaussian steps, and "
                f"{trial.config.mechanism.method} has others: use --release open"
            )
    if plan.data.queries is None or not plan.data.evaluation_is_public:
        raise ConfigError(
            "a sealed sweep selects by a score on public data, or by a noised one, for a bare score on "
            "private records would release them through the choice; give --evaluate-on a public labelled "
            "data set"
        )
    if plan.options.select_by not in (found := visible_scores(plan.data)):
        raise ConfigError(
            f"no trial on these data has the score to select by, {plan.options.select_by!r}; they have "
            f"{', '.join(found)}"
        )


def trial_law(options: SweepOptions) -> TruncatedNegativeBinomial:
    """Returns the public law of the secret number of trials.

    For a threshold, halting with probability γ after each miss is a geometric number of trials of which
    the first good one is released: the number can be drawn first.

    Raises:
      ConfigError: a parameter is out of range.
    """
    if options.release == SEALED_THRESHOLD:
        if not 0 < options.halting_prob < 1:
            raise ConfigError(f"halting_prob must be in (0, 1); got {options.halting_prob}")
        return TruncatedNegativeBinomial(eta=1.0, gamma=options.halting_prob)
    return TruncatedNegativeBinomial.from_mean(options.mean_trials, eta=options.eta)


def is_proven(trial: Trial) -> bool:
    """Whether a trial has a guarantee."""
    return trial.config.guarantee_label == "proven"


@dataclass(frozen=True, kw_only=True)
class Charged:
    """What one training of an open sweep may have drawn, what restarts repeated included.

    Attributes:
      num_steps: steps.
      num_first_steps: of these, first ones, whose noised SNR is released where the training releases it.
      num_scorings: times its noised scores were drawn.
    """

    num_steps: int
    num_first_steps: int = 1
    num_scorings: int = 1


def trial_class(trial: Trial, charged: Charged | None = None) -> TrialClass:
    """Returns what one training releases, as the accountants see it: what is planned, and charged on top."""
    mechanism, evaluation = trial.config.mechanism, trial.config.evaluation
    charged = charged or Charged(num_steps=mechanism.num_steps)
    num_steps, joint = max(mechanism.num_steps, charged.num_steps), None
    if evaluation.snr_noise_multiplier is not None:
        joint = noised_counts.joint_noise_multiplier(
            mechanism.noise_multiplier, evaluation.snr_noise_multiplier
        )
    return TrialClass(
        sampling_prob=mechanism.sampling_prob,
        noise_multiplier=mechanism.noise_multiplier,
        num_steps=num_steps,
        joint_noise_multiplier=joint,
        num_joint_steps=0 if joint is None else min(num_steps, max(1, charged.num_first_steps)),
        score_noise_multiplier=evaluation.score_noise_multiplier,
        num_scores=evaluation.num_noised_scores * max(1, charged.num_scorings),
    )


def delta_of(trials: Sequence[Trial]) -> float:
    """Returns the δ of the whole sweep: the smallest one of its trials."""
    return min(trial.config.mechanism.target_delta for trial in trials)


def trial_classes(trials: Sequence[Trial], charged: Mapping[str, Charged] | None = None) -> list[TrialClass]:
    """Returns the proven trials, those that cost the same together.

    Args:
      trials: of an open sweep.
      charged: what was drawn by trial name, where more than planned.
    """
    found = charged or {}
    counts = Counter(trial_class(trial, found.get(trial.name)) for trial in filter(is_proven, trials))
    return [replace(each, count=count) for each, count in counts.items()]


def candidates_of(trials: Sequence[Trial]) -> tuple[list[TrialClass], list[float]]:
    """Returns the distinct candidates of a sealed sweep and the probability of each."""
    classes = trial_classes(trials)
    total = sum(each.count for each in classes)
    return [replace(each, count=1) for each in classes], [each.count / total for each in classes]


def cost_of(
    options: SweepOptions, trials: Sequence[Trial], charged: Mapping[str, Charged] | None = None
) -> TuningCost | None:
    """Returns what the whole sweep costs; None where no trial has a guarantee.

    Args:
      options: the sweep's.
      trials: all trials of an open sweep, or the candidates of a sealed one, equally probable.
      charged: what was drawn by trial name, where more than planned; for open sweeps.
    """
    proven = [trial for trial in trials if is_proven(trial)]
    if not proven:
        return None
    delta = delta_of(proven)
    try:
        if options.release == OPEN:
            return _open_cost(proven, charged or {}, delta)
        candidates, probabilities = candidates_of(proven)
        if options.release == SEALED:
            return sealed_cost(
                candidates,
                law=trial_law(options),
                delta=delta,
                bound=options.bound,
                probabilities=probabilities,
            )
        return sealed_threshold_cost(
            candidates, halting_prob=options.halting_prob, delta=delta, probabilities=probabilities
        )
    except ConfigError as error:  # so much that no finite ε holds: said, never hidden
        worst = max(trial.config.epsilon() for trial in proven)
        return not_accounted(options.release, reason=str(error), delta=delta, training_epsilon=worst)


def _open_cost(trials: Sequence[Trial], charged: Mapping[str, Charged], delta: float) -> TuningCost:
    """Returns the cost of releasing all trials, of whatever methods.

    One relation: add or remove. Steps are Poisson-subsampled Gaussians and compose as such, at what is left
    of δ once the δ that caps take (`Method.added_delta`) is set aside for every trial: the probability that
    any cap ever exchanges a record is at most their sum, and otherwise the steps are what the event says.
    One relation: replace. (ε, δ/k) of each of k trainings add up, by basic composition. Two relations:
    nothing is claimed, for neighbours by one are none by the other.
    """
    relations = sorted({trial.config.mechanism.neighboring_relation for trial in trials})
    worst = max(trial.config.epsilon() for trial in trials)
    if len(relations) > 1:
        reason = (
            f"some trainings are accounted to {relations[0]}, others to {relations[1]}; run the methods of "
            "each in a sweep of their own"
        )
        cost = not_accounted(OPEN, reason=reason, delta=delta, training_epsilon=worst)
        return replace(cost, neighboring_relation=" or ".join(relations))
    if relations != [ADD_OR_REMOVE_ONE]:
        return _basic_composition(trials, charged, delta, relations[0])
    set_aside = sum(_added_delta(trial, charged.get(trial.name)) for trial in trials)
    if set_aside >= delta:
        raise ConfigError(f"the caps of all trials together take δ = {set_aside:.2g} of {delta:.2g}")
    cost = open_cost(trial_classes(trials, charged), delta=delta - set_aside)
    if not set_aside:
        return cost
    theorem = f"{cost.theorem}, at δ less {set_aside:.2g} for batches that reach their cap"
    return replace(cost, delta=delta, theorem=theorem)


def _added_delta(trial: Trial, charged: Charged | None) -> float:
    mechanism = trial.config.mechanism
    num_steps = max(mechanism.num_steps, charged.num_steps if charged else 0)
    return mechanism.rules.added_delta(mechanism, num_steps)


def _basic_composition(
    trials: Sequence[Trial], charged: Mapping[str, Charged], delta: float, relation: str
) -> TuningCost:
    kinds: Counter[tuple[Mechanism, int]] = Counter()
    for trial in trials:
        mechanism, drawn = trial.config.mechanism, charged.get(trial.name)
        num_steps = max(mechanism.num_steps, drawn.num_steps if drawn else 0)
        kinds[replace(mechanism, target_delta=delta / len(trials)), num_steps] += 1
    total = sum(count * mechanism.epsilon(steps) for (mechanism, steps), count in kinds.items())
    return TuningCost(
        mode=OPEN,
        delta=delta,
        training_epsilon=max(trial.config.epsilon() for trial in trials),
        tuned_epsilon=total,
        theorem="basic composition of the trainings, each at its share of δ",
        rdp_epsilon=None,
        planned=tuple(
            {"method": m.method, "noise_multiplier": m.noise_multiplier, "num_steps": steps, "count": count}
            for (m, steps), count in kinds.items()
        ),
        neighboring_relation=relation,
    )


def cost_tags(options: SweepOptions, trials: Sequence[Trial], cost: TuningCost | None) -> dict[str, str]:
    """Returns what every run says of the tuning cost."""
    tags = {
        "release_mode": options.release,
        "tuning_cost": cost_line(options.release, cost, sum(not is_proven(trial) for trial in trials)),
        "tuned_epsilon": "none",
        "tuning_theorem": "none",
    }
    if cost is not None:
        tuned = "not accounted" if cost.tuned_epsilon is None else rounded_up(cost.tuned_epsilon, 6)
        delta = rounded_up(cost.delta, 6)
        tags |= {"tuned_epsilon": tuned, "tuned_delta": delta, "tuning_theorem": cost.theorem}
    return tags


def cost_line(mode: str, cost: TuningCost | None, num_without_guarantee: int) -> str:
    """Returns the tuning cost in one sentence, for figures, tags and the terminal."""
    if cost is None:
        return "Tuning cost: none, for no trial has a guarantee."
    if cost.tuned_epsilon is None:
        return f"Tuning cost not accounted: {cost.reason}."
    tuned, delta = rounded_up(cost.tuned_epsilon, 4), rounded_up(cost.delta, 3)
    if mode != OPEN:
        return (
            f"{mode.capitalize()} release: with the choice among secret trials ε = {tuned} at δ = {delta} "
            f"({cost.theorem}); one trial alone ε = {rounded_up(cost.training_epsilon, 4)}."
        )
    count = sum(planned["count"] for planned in cost.planned)
    everything = f"all {count} trials together" if count > 1 else "its one trial"
    others = f", {num_without_guarantee} more without any guarantee" if num_without_guarantee else ""
    return (
        f"Open release: {everything} ε = {tuned} at δ = {delta} ({cost.theorem}{others}); "
        "each ε shown is that of one training."
    )


def open_trials(trials: Sequence[Trial], charged: Mapping[str, Charged], num_started: int) -> OpenTrials:
    """Returns the numbers of an open sweep's statement.

    Args:
      trials: all that were planned.
      charged: what was drawn by trial name, where more than planned.
      num_started: trials that may have drawn a step.
    """
    proven = [trial for trial in trials if is_proven(trial)]
    planned = {trial.name: trial.config.mechanism.num_steps for trial in proven}
    drawn = {name: charged[name].num_steps if name in charged else 0 for name in planned}
    repeated = sum(max(0, drawn[name] - steps) for name, steps in planned.items())
    return OpenTrials(
        planned=len(trials),
        without_guarantee=len(trials) - len(proven),
        started=num_started,
        steps_planned=sum(planned.values()),
        steps_repeated=repeated,
    )


def score_text(plan: SweepPlan) -> str:
    """Returns how scores were evaluated, for the statement."""
    options = plan.options
    probes = ", ".join(options.probe_datasets)
    if plan.data.queries is None:
        return f"on {probes} (public data), without noise" if probes else "none were computed"
    where = options.evaluate_on or f"the held-out part of {options.dataset}"
    kind = "public data" if plan.data.evaluation_is_public else "no public data"
    chosen = "" if options.release == OPEN else f"; the score that selects is {options.select_by}"
    if options.release == SEALED_THRESHOLD:
        chosen += f", at least {options.min_score:g}"
    also = f"; features also on {probes} (public data)" if probes else ""
    return f"on {where} ({kind}), without noise{also}{_noised_text(plan)}{chosen}"


def _noised_text(plan: SweepPlan) -> str:
    noises = {trial.config.evaluation.score_noise_multiplier for trial in plan.trials} - {None}
    if not noises:
        return ""
    shown = ", ".join(f"{noise:g}" for noise in sorted(noise for noise in noises if noise is not None))
    return (
        f"; and on {plan.options.score_on_held_out:.3g} of the private records, by record id, that no trial "
        f"trains on, as counts with Gaussian noise of standard deviation {shown}, charged in ε"
    )
