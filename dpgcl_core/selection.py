"""What a sweep costs in privacy, apart from what each of its trainings costs.

Three ways to release a sweep on private data, from `open`, which allows any search, to `sealed`:

| mode | what leaves the trusted side | search | ε of the sweep |
|---|---|---|---|
| open | every trial | any, adaptive too | composition of all trials |
| sealed | the best trial alone; K stays secret | independent draws, K random | `selection_bounds` |
| sealed-threshold | the first trial with score ≥ s, or nothing | as sealed | `threshold_bound` |

*Open.* All steps that the trials may take are capped **in advance**, per class (q, σ), and composed by
PLD with RDP beside it. Then everything else may follow the results: learning rates, networks, pruning,
which trial gets the next step. Each step is a kernel, which may know all earlier outputs, applied to the
next unused draw of its class; so early stopping, ASHA and the like cost their cap and no more (the proof
stands in `filters`, for `QuotaFilter`). Grids are open: a fixed number of trials whose best one alone is
released has no discount in the worst case. If q, σ or T follow the results beyond any cap, use `filters`.

*Sealed.* `selection_laws` has the laws of K, `selection_bounds` the theorems and what breaks them. The
trials must be independent draws of (candidate, training) from one fixed law; candidates of different
privacy are drawn from a fixed π, and one trial then has the mixture of their profiles (never the
winner's own ε).

Report the cost set in advance. What an adaptive sweep really spent is not an (ε, δ) statement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray

from dpgcl_core.accounting import GRID, epsilon_pld, epsilon_rdp
from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.filters import StepClass, composed_event
from dpgcl_core.selection_bounds import (
    dp_hypo_bound,
    papernot_steinke_bound,
    pointwise_bound,
    profile_bound,
    threshold_bound,
)
from dpgcl_core.selection_laws import PoissonTrials, TrialCountLaw, TruncatedNegativeBinomial
from dpgcl_core.selection_profile import PrivacyProfile, check_probabilities

Array = NDArray[np.float64]

NEIGHBORING_RELATION = "add or remove one record"
OPEN: Final = "open"
SEALED: Final = "sealed"
SEALED_THRESHOLD: Final = "sealed-threshold"
_LARGEST_EPSILON = 1000.0
Mode = Literal["open", "sealed", "sealed-threshold"]
THEOREMS = {
    "profile": "profile bound c* (proof in dpgcl_core/selection_bounds.py)",
    "pointwise": "pointwise supremum over the privacy loss distribution (dpgcl_core/selection_bounds.py)",
    "ps22": "Papernot and Steinke (2022), Theorem 2 (truncated negative binomial) or 6 (Poisson)",
}


@dataclass(frozen=True, kw_only=True)
class TrialClass:
    """Trials that cost the same, planned in advance.

    Attributes:
      sampling_prob: q.
      noise_multiplier: σ = noise std / sensitivity.
      num_steps: T, the cap on one trial's steps.
      count: number of such trials; 1 for a candidate of a sealed sweep.

    Raises:
      ConfigError: a field is out of range.
    """

    sampling_prob: float
    noise_multiplier: float
    num_steps: int
    count: int = 1

    def __post_init__(self) -> None:
        StepClass(self.sampling_prob, self.noise_multiplier)
        for name, value in (("num_steps", self.num_steps), ("count", self.count)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1; got {value!r}")

    @property
    def steps_of_one(self) -> dict[StepClass, int]:
        """The steps of one trial."""
        return {StepClass(self.sampling_prob, self.noise_multiplier): self.num_steps}


@dataclass(frozen=True, kw_only=True)
class TuningCost:
    """The cost of a sweep as a privacy statement carries it.

    Attributes:
      mode: open, sealed or sealed-threshold.
      delta: δ of both figures.
      training_epsilon: ε of one training by PLD; of several classes, the largest (open) or that of the
        candidate drawn from π (sealed).
      tuned_epsilon: ε of the whole sweep; None where it is not accounted.
      theorem: what `tuned_epsilon` rests on.
      rdp_epsilon: the RDP figure beside it; None where RDP has no theorem for the case.
      planned: the trials set in advance, with the probability of each candidate if sealed.
      law: law of K with its parameters, never K; None if open.
      accounted: whether every hypothesis of the theorem holds.
      reason: why it is not accounted; None if it is.
      neighboring_relation: what δ and both ε are about.
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
            raise ConfigError("a cost is either accounted or carries the reason why not; got both or neither")
        if self.accounted and (self.tuned_epsilon is None or not math.isfinite(self.tuned_epsilon)):
            raise ConfigError(
                f"an accounted cost needs a finite tuned_epsilon; got {self.tuned_epsilon} at delta = "
                f"{self.delta:g} (raise delta or the noise, or choose another law or bound)"
            )

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, for a report."""
        return asdict(self)


def open_cost(trials: Sequence[TrialClass], *, delta: float) -> TuningCost:
    """Returns the cost of releasing every trial, adaptive search and early stopping included.

    Guarantee: (tuned_epsilon, delta)-DP for adding or removing one record, of all outputs of all trials
    together, if no class of trials takes more than `num_steps`·`count` steps in total and every step
    samples and adds noise independently.

    Raises:
      ConfigError: there is no trial, δ is out of range, or no finite ε holds at δ.

    >>> trial = TrialClass(sampling_prob=0.01, noise_multiplier=1.0, num_steps=100, count=10)
    >>> round(open_cost([trial], delta=1e-5).tuned_epsilon, 3)
    1.828
    """
    check_delta(delta)
    _check_some(trials)
    steps: Counter[StepClass] = Counter()
    for trial in trials:
        for step_class, num_steps in trial.steps_of_one.items():
            steps[step_class] += num_steps * trial.count
    event = composed_event(steps)
    check_affordable(event, delta)
    each = [_profile(trial).epsilon(delta) for trial in trials]
    return TuningCost(
        mode=OPEN,
        delta=delta,
        training_epsilon=max(each),
        tuned_epsilon=epsilon_pld(event, delta),
        theorem="composition of all planned steps by PLD",
        rdp_epsilon=epsilon_rdp(event, delta),
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
    """Returns the cost of releasing the best of K secret trials alone.

    Guarantee: (tuned_epsilon, delta)-DP for adding or removing one record of the released trial, under
    the hypotheses of `selection_bounds`: independent draws, K from `law` and secret, a score that is
    itself part of the private output or uses public data only.

    Args:
      candidates: what one trial may be, `count` = 1 each.
      law: of K.
      delta: δ.
      bound: profile, pointwise or ps22.
      probabilities: π over the candidates, fixed without the data; uniform unless given.

    Raises:
      ConfigError: an argument is out of range, the bound has no form for the law, or no finite ε holds.
    """
    check_delta(delta)
    if bound not in THEOREMS:
        raise ConfigError(unknown_choice("bound", bound, THEOREMS))
    weights = _weights(candidates, probabilities, delta)
    profile, (orders, rdp) = _drawn_profile(candidates, weights), _drawn_rdp(candidates, weights)
    published = isinstance(law, TruncatedNegativeBinomial | PoissonTrials)
    beside = papernot_steinke_bound(orders, rdp, law, delta, profile) if published else None
    if bound == "ps22":
        tuned = papernot_steinke_bound(orders, rdp, law, delta, profile)
    else:
        tuned = (profile_bound if bound == "profile" else pointwise_bound)(profile, law, delta)
    return TuningCost(
        mode=SEALED,
        delta=delta,
        training_epsilon=profile.epsilon(delta),
        tuned_epsilon=tuned,
        theorem=THEOREMS[bound],
        rdp_epsilon=beside,
        planned=_planned(candidates, weights),
        law=law.parameters(),
    )


def sealed_threshold_cost(
    candidates: Sequence[TrialClass],
    *,
    halting_prob: float,
    delta: float,
    probabilities: Sequence[float] | None = None,
) -> TuningCost:
    """Returns the cost of releasing the first trial that reaches a public score, or nothing.

    After each miss the sweep halts with probability `halting_prob`. Guarantee and hypotheses as
    `sealed_cost`; the number of trials stays secret here too.

    Raises:
      ConfigError: an argument is out of range.
    """
    check_delta(delta)
    weights = _weights(candidates, probabilities, delta)
    profile = _drawn_profile(candidates, weights)
    return TuningCost(
        mode=SEALED_THRESHOLD,
        delta=delta,
        training_epsilon=profile.epsilon(delta),
        tuned_epsilon=threshold_bound(profile, halting_prob, delta),
        theorem="threshold bound c* (proof in dpgcl_core/selection_bounds.py)",
        rdp_epsilon=None,
        planned=_planned(candidates, weights),
        law={"name": "halting after a miss", "halting_prob": halting_prob, "max_mean": 1 / halting_prob},
    )


def experimental_dp_hypo_cost(
    candidates: Sequence[TrialClass],
    *,
    law: TruncatedNegativeBinomial,
    density_ratio: float,
    delta: float,
    probabilities: Sequence[float] | None = None,
) -> TuningCost:
    """Returns the cost of adaptive proposals within `density_ratio` of fixed ones; never accounted.

    See `dp_hypo_bound`.
    """
    check_delta(delta)
    weights = _weights(candidates, probabilities, delta)
    orders, rdp = _drawn_rdp(candidates, weights)
    return not_accounted(
        SEALED,
        reason="DP-HyPO is experimental: its theorem is cited, not verified here",
        delta=delta,
        training_epsilon=_drawn_profile(candidates, weights).epsilon(delta),
        rdp_epsilon=dp_hypo_bound(orders, rdp, law, delta, density_ratio=density_ratio),
        planned=_planned(candidates, weights),
        law={**law.parameters(), "density_ratio": density_ratio},
    )


def not_accounted(
    mode: Mode,
    *,
    reason: str,
    delta: float,
    training_epsilon: float,
    rdp_epsilon: float | None = None,
    planned: tuple[Mapping[str, Any], ...] = (),
    law: Mapping[str, str | float] | None = None,
) -> TuningCost:
    """Returns the record of a sweep whose cost no theorem here covers; a statement must show the reason."""
    return TuningCost(
        mode=mode,
        delta=delta,
        training_epsilon=training_epsilon,
        tuned_epsilon=None,
        theorem="none",
        rdp_epsilon=rdp_epsilon,
        planned=planned,
        law=law,
        accounted=False,
        reason=reason,
    )


def check_delta(delta: float) -> None:
    """Raises ConfigError unless δ is in (0, 1)."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta must be in (0, 1); got {delta}")


def check_affordable(event: dp_event.DpEvent, delta: float) -> None:
    """Raises ConfigError where ε would be so large that PLD needs gigabytes to say so."""
    epsilon = epsilon_rdp(event, delta)
    if not epsilon <= _LARGEST_EPSILON:
        raise ConfigError(
            f"epsilon must stay below {_LARGEST_EPSILON:g}, for more protects nothing; got {epsilon:.4g} by "
            "RDP (take fewer steps or trials, or more noise)"
        )


def _check_some(trials: Sequence[TrialClass]) -> None:
    if not trials:
        raise ConfigError("a sweep needs at least one trial; got none")


def _weights(
    candidates: Sequence[TrialClass], probabilities: Sequence[float] | None, delta: float
) -> Sequence[float]:
    _check_some(candidates)
    for candidate in candidates:
        check_affordable(composed_event(candidate.steps_of_one), delta)
        if candidate.count != 1:
            raise ConfigError(f"a candidate's count must be 1, for K is drawn; got {candidate.count}")
    weights = [1 / len(candidates)] * len(candidates) if probabilities is None else probabilities
    check_probabilities(weights, len(candidates))
    return weights


def _planned(candidates: Sequence[TrialClass], weights: Sequence[float]) -> tuple[Mapping[str, Any], ...]:
    pairs = zip(candidates, weights, strict=True)
    return tuple({**asdict(candidate), "probability": weight} for candidate, weight in pairs)


def _drawn_profile(candidates: Sequence[TrialClass], weights: Sequence[float]) -> PrivacyProfile:
    return PrivacyProfile.mixture([_profile(candidate) for candidate in candidates], weights)


def _drawn_rdp(candidates: Sequence[TrialClass], weights: Sequence[float]) -> tuple[Array, Array]:
    """RDP of a trial that draws its candidate: E[(p/q)^λ] is the mixture of the candidates'."""
    curves = [_rdp(candidate) for candidate in candidates]
    orders = curves[0][0]
    moments = [math.log(w) + (orders - 1) * rdp for w, (_, rdp) in zip(weights, curves, strict=True)]
    return orders, np.asarray(np.logaddexp.reduce(moments, axis=0) / (orders - 1))


@lru_cache(maxsize=32)
def _profile(trial: TrialClass) -> PrivacyProfile:
    return PrivacyProfile.from_steps(trial.steps_of_one, grid=GRID)


@lru_cache(maxsize=32)
def _rdp(trial: TrialClass) -> tuple[Array, Array]:
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(composed_event(trial.steps_of_one))
    return np.asarray(accountant.orders), np.asarray(accountant.rdp)
