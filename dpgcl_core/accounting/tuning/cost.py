"""The tuning cost: the privacy cost of a sweep beyond the cost of each of its trainings.

A sweep on private data can be released in three modes; `open` allows any search:

| mode | what leaves the trusted side | search | ε of the sweep |
|---|---|---|---|
| open | every trial | any, adaptive too | composition of all trials |
| sealed | only the best trial; K stays secret | independent draws, K random | `tuning.bounds` |
| sealed-threshold | the first trial with score ≥ s, or nothing | as in sealed | `threshold_bound` |

*Open.* All steps that the trials may take are capped **in advance**, per class (q, σ), and composed by
PLD, and by RDP as a cross-check. Everything else may then depend on the results: learning rates, networks,
pruning, and the choice of the trial that gets the next step. Early stopping, ASHA and the like cost exactly
their cap, as in `accounting.filters.QuotaFilter`. Grids are open: releasing only the best of a fixed number
of trials has no discount in the worst case. If q, σ or T depend on the results beyond any cap, use a privacy
filter.

*Sealed.* `tuning.laws` has the laws of K; `tuning.bounds` has the theorems and the ways to break them. The
trials must be independent draws of (candidate, training) from one fixed distribution. Candidates of different
privacy are drawn from a fixed π. One trial then has the mixture of their profiles (never the winner's ε).

*Noised releases.* Noised norms and noised counts on held-out records are accounted in two cases, one for a
record that is trained on and one for a record that is scored; the larger tuned ε counts
(`tuning.trial_release`).

Report the cost set in advance: the amount that an adaptive sweep really spent is not an (ε, δ) statement.
docs/theory/tuning.md has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray

from dpgcl_core.accounting.composition import GRID, check_delta_range, epsilon_pld, epsilon_rdp
from dpgcl_core.accounting.filters import StepClass, composed_event
from dpgcl_core.accounting.tuning.bounds import (
    is_published,
    papernot_steinke_bound,
    pointwise_bound,
    profile_bound,
    threshold_bound,
)
from dpgcl_core.accounting.tuning.laws import TrialCountLaw
from dpgcl_core.accounting.tuning.modes import OPEN, SEALED, SEALED_THRESHOLD, THEOREMS, Mode
from dpgcl_core.accounting.tuning.profile import PrivacyProfile, check_probabilities
from dpgcl_core.accounting.tuning.trial_release import TrialClass as TrialClass
from dpgcl_core.accounting.tuning.trial_release import cases_of, total_steps
from dpgcl_core.errors import ConfigError, require_choice

Array = NDArray[np.float64]

NEIGHBORING_RELATION = "add or remove one record"
_LARGEST_EPSILON = 1000.0
_LARGER_OF_CASES = "; the larger of the ε for training and the ε for scoring, whose records are disjoint"
_BY_PLD = "composition of all planned steps by PLD"
COMPOSITION = (_BY_PLD, f"{_BY_PLD}{_LARGER_OF_CASES}")
"""The theorem of an open sweep, without and with noised scores."""


@dataclass(frozen=True, kw_only=True)
class TuningCost:
    """The cost of a sweep in a privacy statement.

    Attributes:
      mode: open, sealed or sealed-threshold.
      delta: δ of every ε below.
      training_epsilon: ε of one training by PLD. With several classes of trials: the largest ε (open), or
        the ε of a training whose class is drawn at random (sealed).
      tuned_epsilon: ε of the whole sweep; None if it is not accounted.
      theorem: the theorem that proves `tuned_epsilon`.
      rdp_epsilon: ε of the whole sweep by RDP, as a cross-check; None if no RDP theorem covers the sweep.
      planned: the trials set in advance; in a sealed sweep, the candidates with their probabilities.
      law: the law of the secret number of trials K and its parameters, never K itself; None if open.
      accounted: whether every hypothesis of the theorem holds.
      reason: why the sweep is not accounted; None if it is accounted.
      neighboring_relation: the relation that δ and both ε refer to.
    """

    mode: Mode
    delta: float
    training_epsilon: float
    tuned_epsilon: float | None
    theorem: str
    rdp_epsilon: float | None
    planned: tuple[Mapping[str, Any], ...]
    law: Mapping[str, str | float] | None = None
    accounted: bool = True
    reason: str | None = None
    neighboring_relation: str = field(default=NEIGHBORING_RELATION)

    def __post_init__(self) -> None:
        if self.accounted != (self.reason is None):
            raise ConfigError("a cost must be accounted or have a reason why it is not; got both or neither")
        if self.accounted and (self.tuned_epsilon is None or not math.isfinite(self.tuned_epsilon)):
            raise ConfigError(
                f"an accounted cost needs a finite tuned_epsilon; got {self.tuned_epsilon} at delta = "
                f"{self.delta:g}. Raise delta or the noise, or choose another law or bound"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for a report."""
        return asdict(self)


def open_cost(trials: Sequence[TrialClass], *, delta: float) -> TuningCost:
    """Return the cost of releasing every trial, adaptive search and early stopping included.

    Guarantee: all outputs of all trials together are (tuned_epsilon, delta)-DP for adding or removing one
    record, under three conditions. No class of trials takes more than `num_steps`·`count` steps in total, of
    which `num_joint_steps`·`count` release their noised norm, and `num_scores`·`count` noised counts. Every
    step samples and adds noise independently. The scored records are those that no trial trains on.

    Raises:
      ConfigError: there is no trial, δ is out of range, or no finite ε holds at δ.

    >>> trial = TrialClass(sampling_prob=0.01, noise_multiplier=1.0, num_steps=100, count=10)
    >>> round(open_cost([trial], delta=1e-5).tuned_epsilon, 3)
    1.828
    """
    check_delta_range(delta)
    _check_not_empty(trials)
    events = list(map(composed_event, total_steps(trials)))
    for event in events:
        check_affordable(event, delta)
    epsilons = [_profile(_frozen(steps)).epsilon(delta) for case in cases_of(trials) for steps in case]
    return TuningCost(
        mode=OPEN,
        delta=delta,
        training_epsilon=max(epsilons),
        tuned_epsilon=max(epsilon_pld(event, delta) for event in events),
        theorem=COMPOSITION[len(events) - 1],
        rdp_epsilon=max(epsilon_rdp(event, delta) for event in events),
        planned=tuple(asdict(trial) for trial in trials),
    )


def sealed_cost(
    candidates: Sequence[TrialClass],
    *,
    law: TrialCountLaw,
    delta: float,
    bound: str = "profile",
    probabilities: Sequence[float] | None = None,
) -> TuningCost:
    """Return the cost of releasing only the best of K trials, where K is secret.

    Guarantee: the released trial is (tuned_epsilon, delta)-DP for adding or removing one record, under the
    hypotheses of `tuning.bounds`: independent draws, K drawn from `law` and secret, and a score that is
    itself part of the private output or uses only public data.

    Args:
      candidates: the classes that each trial draws its own from, each with `count` = 1.
      law: the law of K.
      delta: δ.
      bound: profile, pointwise or ps22.
      probabilities: the probability of each candidate, fixed without the data; uniform by default.

    Raises:
      ConfigError: an argument is out of range, the bound does not cover the law, or no finite ε holds.
    """
    check_delta_range(delta)
    require_choice("bound", bound, THEOREMS)
    weights = _checked_weights(candidates, probabilities, delta)
    trials = [_CandidateDraw.of(case, weights) for case in cases_of(candidates)]

    def published_bound(trial: _CandidateDraw) -> float:
        return papernot_steinke_bound(trial.orders, trial.rdp, law, delta, trial.profile)

    published_epsilon = max(map(published_bound, trials)) if is_published(law) else None
    if bound == "ps22":
        tuned_epsilon = max(map(published_bound, trials))
    else:
        epsilon_bound = profile_bound if bound == "profile" else pointwise_bound
        tuned_epsilon = max(epsilon_bound(trial.profile, law, delta) for trial in trials)
    return TuningCost(
        mode=SEALED,
        delta=delta,
        training_epsilon=max(trial.profile.epsilon(delta) for trial in trials),
        tuned_epsilon=tuned_epsilon,
        theorem=f"{THEOREMS[bound]}{_LARGER_OF_CASES if len(trials) > 1 else ''}",
        rdp_epsilon=published_epsilon,
        planned=_planned(candidates, weights),
        law=law.parameters(),
    )


def sealed_threshold_cost(
    candidates: Sequence[TrialClass],
    *,
    halting_prob: float,
    delta: float,
    probabilities: Sequence[float] | None = None,
    max_trials: int | None = None,
) -> TuningCost:
    """Return the cost of releasing the first trial that reaches a public score, or nothing.

    After each trial below the score, the sweep halts with probability `halting_prob`. Guarantee and
    hypotheses are the same as for `sealed_cost`; the number of trials stays secret here, too. With
    `max_trials`, the number of trials is drawn first, from `bounds.halting_law`.

    Raises:
      ConfigError: an argument is out of range.
    """
    check_delta_range(delta)
    weights = _checked_weights(candidates, probabilities, delta)
    profiles = [_CandidateDraw.of(case, weights).profile for case in cases_of(candidates)]
    theorem = "threshold bound c* (proof in dpgcl_core/accounting/tuning/bounds.py)"
    law: dict[str, str | float] = {"name": "halting after a miss", "halting_prob": halting_prob}
    return TuningCost(
        mode=SEALED_THRESHOLD,
        delta=delta,
        training_epsilon=max(profile.epsilon(delta) for profile in profiles),
        tuned_epsilon=max(threshold_bound(profile, halting_prob, delta, max_trials) for profile in profiles),
        theorem=f"{theorem}{_LARGER_OF_CASES if len(profiles) > 1 else ''}",
        rdp_epsilon=None,
        planned=_planned(candidates, weights),
        law=law | ({"max_mean": 1 / halting_prob} if max_trials is None else {"max_trials": max_trials}),
    )


def not_accounted(mode: Mode, *, reason: str, delta: float, training_epsilon: float) -> TuningCost:
    """Return the cost of a sweep that no theorem of this package covers; a statement must show the reason."""
    return TuningCost(
        mode=mode,
        delta=delta,
        training_epsilon=training_epsilon,
        tuned_epsilon=None,
        theorem="none",
        rdp_epsilon=None,
        planned=(),
        accounted=False,
        reason=reason,
    )


def check_affordable(event: dp_event.DpEvent, delta: float) -> None:
    """Raise ConfigError if ε is so large that computing it by PLD would need gigabytes of memory."""
    epsilon = epsilon_rdp(event, delta)
    if not epsilon <= _LARGEST_EPSILON:
        raise ConfigError(
            f"epsilon must stay below {_LARGEST_EPSILON:g} (larger values protect nothing); got "
            f"{epsilon:.4g} by RDP. Take fewer steps or trials, or add noise"
        )


def _check_not_empty(trials: Sequence[TrialClass]) -> None:
    if not trials:
        raise ConfigError("a sweep needs at least one trial; got none")


def _checked_weights(
    candidates: Sequence[TrialClass], probabilities: Sequence[float] | None, delta: float
) -> Sequence[float]:
    """Return the candidates' probabilities, uniform by default, after checking every candidate."""
    _check_not_empty(candidates)
    for candidate in candidates:
        for steps in (candidate.steps_of_one, candidate.scores_of_one):
            check_affordable(composed_event(steps), delta)
        if candidate.count != 1:
            raise ConfigError(f"a candidate's count must be 1, because K is drawn; got {candidate.count}")
    weights = [1 / len(candidates)] * len(candidates) if probabilities is None else probabilities
    check_probabilities(weights, len(candidates))
    return weights


def _planned(candidates: Sequence[TrialClass], weights: Sequence[float]) -> tuple[Mapping[str, Any], ...]:
    pairs = zip(candidates, weights, strict=True)
    return tuple({**asdict(candidate), "probability": weight} for candidate, weight in pairs)


@dataclass(frozen=True, kw_only=True)
class _CandidateDraw:
    """One trial that draws its candidate at random: its profile, and its RDP at `orders`.

    The drawn candidate is part of the output, so the moments exp((α − 1)·RDP) are averaged, as the profiles.
    """

    profile: PrivacyProfile
    orders: Array
    rdp: Array

    @classmethod
    def of(cls, case: Sequence[dict[StepClass, int]], weights: Sequence[float]) -> _CandidateDraw:
        """Return the draw for one case of `cases_of`, from each candidate's steps and probability."""
        profiles = [_profile(_frozen(steps)) for steps in case]
        curves = [_rdp_curve(_frozen(steps)) for steps in case]
        orders = curves[0][0]
        moments = [math.log(w) + (orders - 1) * rdp for w, (_, rdp) in zip(weights, curves, strict=True)]
        return cls(
            profile=PrivacyProfile.mixture(profiles, weights),
            orders=orders,
            rdp=np.asarray(np.logaddexp.reduce(moments, axis=0) / (orders - 1)),
        )


_Steps = tuple[tuple[StepClass, int], ...]


def _frozen(steps: Mapping[StepClass, int]) -> _Steps:
    return tuple(steps.items())


@lru_cache(maxsize=32)
def _profile(steps: _Steps) -> PrivacyProfile:
    return PrivacyProfile.from_steps(dict(steps), grid=GRID)


@lru_cache(maxsize=32)
def _rdp_curve(steps: _Steps) -> tuple[Array, Array]:
    """Return the accountant's orders, and the RDP of the steps at each."""
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(composed_event(dict(steps)))
    return np.asarray(accountant.orders), np.asarray(accountant.rdp)
