"""Privacy filters: how much may still be spent if each σ, q and T is chosen after seeing earlier results.

Composition theorems fix the parameters of all steps in advance. A budget that charges an event, refuses at
the cap and refunds unused steps lets the next event depend on earlier outputs. Then "the privacy loss
distributions charged so far stay within (ε, δ)" is **not** a valid filter (a counterexample is computed in
`tests/dpgcl_core/accounting/test_filters.py`). The two filters below are valid. Both are fixed together with
the cap, for **adding or removing one record**. docs/theory/ledger.md has the proofs.

`RdpFilter`. It has one order α and the budget B that converts to (ε, δ) at that order. An event is admitted
if the sum of the RDP at that order stays within B (Feldman and Zrnic 2021, Theorem 4.3; Rogers, Roth, Ullman
and Vadhan 2016 define filters). Sketch: the likelihood ratio to the power α, discounted by the RDP spent, is
a supermartingale, so the whole interaction has Rényi divergence at most B at order α. Conversion to (ε, δ) is
done once, at that order; minimising over orders afterwards would be a choice that depends on the outputs.

`QuotaFilter`. It has a number of steps for every class (q, σ); all quotas together are (ε, δ)-DP by PLD.
Sketch: every class gets a tape of independent draws from its dominating pair. Every choice made after seeing
outputs reads each draw at most once, so the interaction is post-processing of a fixed product.

Settling. Both proofs are about **executed** steps: a step that was reserved and did not run adds nothing. So
unused steps may be refunded to the same order's sum, or to the same class's quota, and to nothing else.
While trials run at the same time, their reservations count in full. A step counts as executed from the moment
its noise may have been seen: after a crash, count the largest possible number. The budget is the guarantee;
the amount really spent under adaptive stopping is not an (ε, δ) statement.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType

import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_epsilon
from numpy.typing import NDArray

from dpgcl_core.accounting.composition import (
    GRID,
    MIN_NOISE_MULTIPLIER,
    check_delta_range,
    epsilon_pld,
    poisson_gaussian_event,
)
from dpgcl_core.errors import ConfigError, require_whole
from dpgcl_core.sampling.poisson import PoissonSampler

# More than dp_accounting's own orders: caps below ε = 0.02 need them.
FILTER_ORDERS: tuple[float, ...] = (*DEFAULT_RDP_ORDERS, 2048.0, 4096.0, 8192.0)
# The (q, σ) that a cap's order is fitted to if no planned steps are known. Fitted to the plain Gaussian
# (q = 1) only, the order would make a subsampled Gaussian of little noise cost fifty times the necessary RDP.
_TYPICAL_STEPS = ((1.0, 1.0), (0.01, 1.0), (0.04, 1.0), (0.01, 0.6), (0.1, 2.0))
# Every cost is increased by this fraction, so that a sum of up to a million rounded costs is never too small.
_ROUNDING = 1e-10


@dataclass(frozen=True)
class StepClass:
    """The parameters of a Poisson-subsampled Gaussian step; all steps of a class have the same cost.

    Attributes:
      sampling_prob: q, each record's probability of joining a step.
      noise_multiplier: σ = noise std / sensitivity.

    Raises:
      ConfigError: q is outside (0, 1], or σ is not finite or below 0.1.
    """

    sampling_prob: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        PoissonSampler(sampling_prob=self.sampling_prob)
        if not (MIN_NOISE_MULTIPLIER <= self.noise_multiplier < math.inf):
            raise ConfigError(
                f"noise_multiplier must be finite and at least {MIN_NOISE_MULTIPLIER} (smaller values "
                f"protect nothing); got {self.noise_multiplier}"
            )

    @property
    def text(self) -> str:
        """The class as text for messages.

        >>> StepClass(0.01, 1.0).text
        'q = 0.01, σ = 1'
        """
        return f"q = {self.sampling_prob:.6g}, σ = {self.noise_multiplier:.6g}"


def composed_event(steps: Mapping[StepClass, int]) -> dp_event.DpEvent:
    """Return the composed event of `steps`: the number of steps of every class, fixed in advance.

    Raises:
      ConfigError: a number of steps is not a whole number of at least 0.
    """
    return dp_event.ComposedDpEvent(
        [
            poisson_gaussian_event(
                sampling_prob=step_class.sampling_prob,
                noise_multiplier=step_class.noise_multiplier,
                num_steps=_checked_steps(num_steps),
            )
            for step_class, num_steps in steps.items()
        ]
    )


@dataclass(frozen=True, init=False)
class RdpFilter:
    """Admits steps while their RDP at one fixed order stays within the budget; see the module.

    Attributes:
      target_epsilon, target_delta: the cap, passed as `epsilon` and `delta`.
      order: α > 1, fixed together with the cap. The default is a compromise for typical steps: it may admit
        only a third of the steps that the best order would. `for_steps` fits the order to planned steps.
      rdp_budget: B, the largest RDP at `order` that converts to (epsilon, delta); rounded down.

    Raises:
      ConfigError: the cap or the order is out of range, or the order leaves no RDP budget for the cap.

    >>> budget = RdpFilter(epsilon=8.0, delta=1e-5)
    >>> steps = StepClass(sampling_prob=0.01, noise_multiplier=1.0)
    >>> budget.admits(0.0, budget.cost(steps, 1000)), budget.admits(0.0, budget.cost(steps, 50_000))
    (True, False)
    """

    target_epsilon: float
    target_delta: float
    order: float
    rdp_budget: float

    def __init__(self, epsilon: float, delta: float, order: float | None = None) -> None:
        check_cap(epsilon, delta)
        if order is None:
            order = _fitted_order(epsilon, delta, tuple(StepClass(*typical) for typical in _TYPICAL_STEPS))
        elif not 1.01 < order < math.inf:
            raise ConfigError(f"order must be finite and above 1.01 to convert RDP to epsilon; got {order}")
        budget = _rdp_within(epsilon, delta, order) * (1 - _ROUNDING)
        if not budget > 0:
            raise ConfigError(
                f"order {order:g} leaves no RDP budget for epsilon = {epsilon:g} at delta = {delta:g}; "
                "raise the order, epsilon or delta, or leave the order out"
            )
        object.__setattr__(self, "target_epsilon", float(epsilon))
        object.__setattr__(self, "target_delta", float(delta))
        object.__setattr__(self, "order", float(order))
        object.__setattr__(self, "rdp_budget", budget)

    @classmethod
    def for_steps(cls, epsilon: float, delta: float, step_classes: Iterable[StepClass]) -> RdpFilter:
        """Return the filter whose order admits the most steps of the planned classes.

        For each class, take the ratio of the steps that an order admits to the steps that the class's own
        best order admits. The returned order has the largest minimum of this ratio over the classes. It
        depends on no training's output.

        >>> RdpFilter.for_steps(8.0, 1e-5, [StepClass(0.01, 1.0)]).order
        3.7
        """
        check_cap(epsilon, delta)
        return cls(epsilon, delta, _fitted_order(epsilon, delta, tuple(step_classes)))

    def cost(self, step_class: StepClass, num_steps: int) -> float:
        """Return the RDP of `num_steps` steps at the filter's order, rounded up; `inf` on overflow."""
        rdp_per_step = float(_rdp_at_orders(step_class, (self.order,))[0])
        return rdp_per_step * _checked_steps(num_steps) * (1 + _ROUNDING) if num_steps else 0.0

    def total_cost(self, steps: Mapping[StepClass, int]) -> float:
        """Return the summed cost of `steps`, the numbers of executed or reserved steps by class.

        After every settlement, call it with the new counts instead of adding single costs, whose rounding
        would accumulate.
        """
        return math.fsum(self.cost(step_class, num_steps) for step_class, num_steps in steps.items())

    def admits(self, charged_rdp: float, cost: float) -> bool:
        """Return whether `charged_rdp` + `cost` ≤ `rdp_budget`, in exact arithmetic.

        Raises:
          ConfigError: an argument is negative or not a number.
        """
        for name, value in (("charged_rdp", charged_rdp), ("cost", cost)):
            if not value >= 0:
                raise ConfigError(f"{name} must be an RDP value of at least 0; got {value}")
        if math.isinf(charged_rdp) or math.isinf(cost):
            return False
        return Fraction(charged_rdp) + Fraction(cost) <= Fraction(self.rdp_budget)

    def epsilon(self, rdp: float) -> float:
        """Return ε at `target_delta` of a total cost `rdp`, for information: the guarantee is the cap."""
        if not rdp >= 0:
            raise ConfigError(f"rdp must be a number of at least 0; got {rdp}")
        return math.inf if math.isinf(rdp) else _epsilon_at(self.order, rdp, self.target_delta)


@dataclass(frozen=True)
class QuotaFilter:
    """Admits steps while every class stays within its own quota; see the module.

    Attributes:
      epsilon, delta: the cap.
      quotas: largest number of steps of every class, fixed with the cap.

    Raises:
      ConfigError: the cap is out of range, there is no quota, or all quotas together exceed the cap.

    >>> noisy, quiet = StepClass(0.01, 1.0), StepClass(0.01, 2.0)
    >>> budget = QuotaFilter(epsilon=2.0, delta=1e-5, quotas={noisy: 600, quiet: 600})
    >>> budget.admits({noisy: 500}, noisy, 100), budget.admits({noisy: 500}, noisy, 101)
    (True, False)
    """

    epsilon: float
    delta: float
    quotas: Mapping[StepClass, int]

    def __post_init__(self) -> None:
        check_cap(self.epsilon, self.delta)
        if not self.quotas:
            raise ConfigError("quotas must contain at least one class of steps; got none")
        object.__setattr__(self, "quotas", MappingProxyType(dict(self.quotas)))
        quota_epsilon = self.epsilon_of_quotas
        if not quota_epsilon <= self.epsilon:
            raise ConfigError(
                f"all quotas together reach epsilon = {quota_epsilon:.6g} at delta = {self.delta:g}, above "
                f"the cap {self.epsilon:g}; take fewer steps, add noise or raise the cap"
            )

    @property
    def epsilon_of_quotas(self) -> float:
        """ε at `delta` of all quotas together by PLD, which the filter guarantees."""
        return _epsilon_of_steps(frozenset(self.quotas.items()), self.delta, min(GRID, self.epsilon / 500))

    def admits(self, spent_steps: Mapping[StepClass, int], step_class: StepClass, num_steps: int) -> bool:
        """Return whether `num_steps` more of `step_class` keep every class within its quota.

        Args:
          spent_steps: executed and reserved steps by class.
          step_class: the class of the new steps; the result is False if this class has no quota.
          num_steps: the number of new steps.
        """
        total_steps = {other: _checked_steps(num) for other, num in spent_steps.items()}
        total_steps[step_class] = total_steps.get(step_class, 0) + _checked_steps(num_steps)
        return all(num <= self.quotas.get(other, 0) for other, num in total_steps.items() if num) and (
            step_class in self.quotas
        )


def check_cap(epsilon: float, delta: float) -> None:
    """Raise ConfigError unless ε is positive and finite and δ in (0, 1)."""
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"epsilon must be positive and finite; got {epsilon}")
    check_delta_range(delta)


def _checked_steps(num_steps: int) -> int:
    require_whole("num_steps", num_steps, least=0)
    return num_steps


def _rdp_within(epsilon: float, delta: float, order: float) -> float:
    """Solve r + ln(1 − 1/α) − ln(δα)/(α − 1) = ε for the RDP r at order α (Canonne et al. 2020, Prop. 12)."""
    return epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)


def _fitted_order(epsilon: float, delta: float, step_classes: tuple[StepClass, ...]) -> float:
    """Return the order that maximises the smallest ratio over the classes; see `RdpFilter.for_steps`."""
    if not step_classes:
        raise ConfigError("step_classes must contain at least one class of steps; got none")
    budgets = np.array([_rdp_within(epsilon, delta, order) for order in FILTER_ORDERS])
    admitted = np.maximum(budgets, 0) / np.array(
        [_rdp_at_orders(each, FILTER_ORDERS) for each in step_classes]
    )
    shares = admitted / np.maximum(admitted.max(axis=1, keepdims=True), 1e-300)
    return float(FILTER_ORDERS[int(shares.min(axis=0).argmax())])


def _epsilon_at(order: float, rdp: float, delta: float) -> float:
    return float(compute_epsilon([order], [rdp], delta)[0])


@lru_cache(maxsize=1024)
def _rdp_at_orders(step_class: StepClass, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the RDP of one step at each order `[orders]`."""
    accountant = RdpAccountant(list(orders), NeighboringRelation.ADD_OR_REMOVE_ONE)
    with warnings.catch_warnings(action="ignore"):
        accountant.compose(composed_event({step_class: 1}))
    rdp = np.asarray(accountant.rdp, dtype=np.float64)
    return np.where(rdp > 0, rdp, np.inf)  # a NaN, zero or negative value would admit everything


@lru_cache(maxsize=64)
def _epsilon_of_steps(steps: frozenset[tuple[StepClass, int]], delta: float, grid: float) -> float:
    return epsilon_pld(composed_event(dict(steps)), delta, grid=grid)
