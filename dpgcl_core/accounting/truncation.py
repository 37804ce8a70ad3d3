"""Stage 2 with a public cap on the batch: truncated Poisson sampling, and batches of a fixed size.

Methods whose sensitivity grows with the batch need such a cap. N is the true number of records, n =
`num_records_public` a declared public number, q = `sampling_prob`, cap = `batch_cap`, and Δ the largest
change of the sum when one record joins a batch that stays within the cap.

**Truncated Poisson, adding or removing one record.** D' = D ∪ {r} holds N ≤ n records. Let X ~ Bin(N − 1, q)
count the *others* that Poisson sampling draws; it does not depend on r. If X < cap, r joins with probability
q and no one leaves: shift Δ. If X ≥ cap, the batch without r is a uniform cap-subset W of the drawn others,
and r enters with probability s = q·cap/(X + 1), in the place of a uniform member of W: a swap, shift ≤ 2Δ.
Joint convexity of the hockey-stick divergence H over (X, W, the member) gives, for one step in both
directions, with A(s) and B(s) the divergences of the Poisson(s)-subsampled Gaussian with shift Δ and 2Δ,

    δ(ε) ≤ Σ_x P[X = x]·( A(q) if x < cap else B(q·cap/(x + 1)) )                                        (1)

Three ways to account follow; each is a dominating pair per step, so each composes adaptively.

1. `Truncation.epsilon`: with p = P[Bin(n, q) ≥ cap], δ ≤ (1 − p)·A(q) + p·B(q). **Valid for every N ≤ n.**
   Proof: B(s) grows with s, so B(q·cap/(x + 1)) ≤ B(q). A(q) ≤ B(q), since scaling by a half and adding
   N(0, ¾σ²) turns the pair of shift 2Δ into that of shift Δ. So (1) is at most
   A(q) + P[X ≥ cap]·(B(q) − A(q)), and P[X ≥ cap] ≤ p since N − 1 ≤ n. ∎
2. `Truncation.epsilon_by_added_delta`: charge plain Poisson steps at δ − T·p. **Valid for every N ≤ n**:
   bound B by 1 in (1). Over T steps the loss is infinite with probability at most 1 − (1 − p)^T ≤ T·p, and
   else that of T Poisson steps. Any accountant will do, but T·p must be small beside δ.
3. `Truncation.event`: dp_accounting's `TruncatedSubsampledGaussianDpEvent`, which replaces s in (1) by its
   mean given X ≥ cap, cap·P[Bin(N, q) > cap]/(N·P[X ≥ cap]): given X ≥ cap alone, a batch with r is r and a
   uniform (cap − 1)-subset of the others, whatever X. **Valid for dataset_size = N exactly**: a larger data
   set overflows more often but then lets r in less often, so its ε may be *smaller* (q = 0.5, cap = 2,
   σ = 1, ε = 1: δ = .0955 for 6 records, .0043 for 50). Use it where N itself is public.

None of the three holds if N > n. Where the sensitivity already covers a swap, as 2·cap·C in
`dpgcl_core.methods.baselines.path_clipping`, the plain Poisson event is enough and n is not needed.

**Fixed size, replacing one record** (N is public). A uniform subset of fixed size holds the replaced record
with probability m/N: dp_accounting's `SampledWithoutReplacementDpEvent` by RDP (Wang, Balle and
Kasiviswanathan 2019). The PLD accountant and the add-or-remove relation refuse it. Several mechanisms that
look at the **same** sample go inside one such event; amplifying each by itself and adding is too low
(ε 2.20 for 2.55 at N = 60,000, m = 512, T = 1,000, three mechanisms of σ = 2, δ = 1e-5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray
from scipy import stats

from dpgcl_core.accounting import composition
from dpgcl_core.accounting.composition import check_noise_multiplier, check_target
from dpgcl_core.errors import ConfigError
from dpgcl_core.sampling.truncated import TruncatedPoissonSampler


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Accounting of `num_steps` Gaussian steps on truncated Poisson samples, adding or removing one record.

    Attributes:
      num_records_public: n, a public number that the true number of records does not exceed.
      sampling_prob: q.
      batch_cap: the cap.
      noise_multiplier: noise std / Δ, with Δ for one record that **joins**; a swap may move the sum by 2Δ.
      num_steps: T.

    Raises:
      ConfigError: a field is outside its range.
    """

    num_records_public: int
    sampling_prob: float
    batch_cap: int
    noise_multiplier: float
    num_steps: int

    def __post_init__(self) -> None:
        TruncatedPoissonSampler(sampling_prob=self.sampling_prob, batch_cap=self.batch_cap)
        if self.num_records_public < 1:
            raise ConfigError(f"num_records_public must be at least 1; got {self.num_records_public}")
        if self.num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1; got {self.num_steps}")
        check_noise_multiplier(self.noise_multiplier)

    @property
    def overflow_prob(self) -> float:
        """p = P[Bin(n, q) ≥ cap]: bounds, for every N ≤ n, how often a record that joins can push one out."""
        return float(stats.binom.sf(self.batch_cap - 1, self.num_records_public, self.sampling_prob))

    @property
    def added_delta(self) -> float:
        """T·p, what plain Poisson accounting of all steps leaves out."""
        return self.num_steps * self.overflow_prob

    def epsilon(self, delta: float, *, grid: float = composition.GRID) -> float:
        """Return an upper bound on ε at `delta` by PLD, for every N ≤ n (way 1 of the module).

        >>> cut = Truncation(num_records_public=1000, sampling_prob=0.1, batch_cap=150, noise_multiplier=1.0,
        ...     num_steps=10)
        >>> plain = composition.poisson_gaussian_event(sampling_prob=0.1, noise_multiplier=1.0, num_steps=10)
        >>> abs(cut.epsilon(1e-5, grid=1e-3) / composition.epsilon_pld(plain, 1e-5, grid=1e-3) - 1) < 1e-3
        True
        """
        if self.noise_multiplier == 0:
            return math.inf
        pld = _truncated_pld(self.sampling_prob, self.noise_multiplier, self.overflow_prob, grid)
        return float(pld.self_compose(self.num_steps).get_epsilon_for_delta(delta))

    def delta(self, epsilon: float, *, grid: float = composition.GRID) -> float:
        """Return an upper bound on δ at `epsilon`, as `epsilon` does."""
        if self.noise_multiplier == 0:
            return 1.0
        pld = _truncated_pld(self.sampling_prob, self.noise_multiplier, self.overflow_prob, grid)
        return float(pld.self_compose(self.num_steps).get_delta_for_epsilon(epsilon))

    def epsilon_by_added_delta(self, delta: float, *, grid: float = composition.GRID) -> float:
        """Return an upper bound on ε at `delta`, for every N ≤ n (way 2); inf if T·p leaves no δ."""
        if self.added_delta >= delta:
            return math.inf
        return composition.epsilon_of_steps(
            sampling_prob=self.sampling_prob,
            noise_multiplier=self.noise_multiplier,
            num_steps=self.num_steps,
            delta=delta - self.added_delta,
            grid=grid,
        )

    def rdp_of_step(self, orders: Sequence[float]) -> NDArray[np.float64]:
        """Return an upper bound on one step's RDP at each order above 1, for every N ≤ n; it adds up.

        The argument of way 1, for E[(P/Q)^α] in place of δ: it is jointly convex, too, so its logarithm over
        α − 1 is at most that of (1 − p)·e^((α−1)·RDP at σ) + p·e^((α−1)·RDP at σ/2).
        """
        if self.noise_multiplier == 0:
            return np.full(len(orders), math.inf)
        alphas = np.asarray(orders, dtype=np.float64)
        joins, swaps = (
            (alphas - 1) * _poisson_rdp(self.sampling_prob, noise, orders)
            for noise in (self.noise_multiplier, self.noise_multiplier / 2)
        )
        with np.errstate(divide="ignore"):
            log_p, log_rest = np.log(self.overflow_prob), np.log1p(-self.overflow_prob)
        return np.asarray(np.logaddexp(joins + log_rest, swaps + log_p) / (alphas - 1), dtype=np.float64)

    def event(self) -> dp_event.DpEvent:
        """Return dp_accounting's event, valid only if the data set holds **exactly** n records (way 3).

        By the event's convention that is the larger of the two neighbours. PLD alone takes it.
        """
        step = dp_event.TruncatedSubsampledGaussianDpEvent(
            dataset_size=self.num_records_public,
            sampling_probability=self.sampling_prob,
            truncated_batch_size=self.batch_cap,
            noise_multiplier=self.noise_multiplier,
        )
        return dp_event.SelfComposedDpEvent(step, self.num_steps)


def _poisson_rdp(
    sampling_prob: float, noise_multiplier: float, orders: Sequence[float]
) -> NDArray[np.float64]:
    accountant = RdpAccountant(list(orders), NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(
        composition.poisson_gaussian_event(
            sampling_prob=sampling_prob, noise_multiplier=noise_multiplier, num_steps=1
        )
    )
    return np.asarray(accountant.rdp, dtype=np.float64)


def calibrate_truncated(
    *,
    num_records_public: int,
    sampling_prob: float,
    batch_cap: int,
    num_steps: int,
    target_epsilon: float,
    target_delta: float,
) -> Truncation:
    """Return the least noise found whose `Truncation.epsilon` meets the target, for every N ≤ n.

    The returned ε is computed with the grid of record and never exceeds the target.

    Raises:
      ConfigError: the target is not positive, or no noise multiplier in [0.1, 1e5] meets it.
    """
    check_target(target_epsilon)

    def epsilon(noise: float, grid: float) -> float:
        return with_noise(noise).epsilon(target_delta, grid=min(grid, target_epsilon / 500))

    def with_noise(noise: float) -> Truncation:
        return Truncation(
            num_records_public=num_records_public,
            sampling_prob=sampling_prob,
            batch_cap=batch_cap,
            noise_multiplier=noise,
            num_steps=num_steps,
        )

    low = target_epsilon * (1 - composition.CALIBRATION_TOLERANCE)
    for grid in (1e-3, composition.GRID):
        noise = composition.search_noise_multiplier(partial(epsilon, grid=grid), low, target_epsilon)
        if low <= epsilon(noise, composition.GRID) <= target_epsilon:
            return with_noise(noise)
    raise ConfigError(f"no noise multiplier verified for target_epsilon = {target_epsilon}; raise it")


def _truncated_pld(
    sampling_prob: float, noise_multiplier: float, overflow_prob: float, grid: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return the PLD of (1 − p)·A(q) + p·B(q)."""
    subsampled = partial(
        privacy_loss_distribution.from_gaussian_mechanism,
        value_discretization_interval=grid,
        sampling_prob=sampling_prob,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    joins = subsampled(standard_deviation=noise_multiplier)
    if overflow_prob == 0:
        return joins
    swaps = subsampled(standard_deviation=noise_multiplier / 2)
    return swaps.compute_mixture(joins, overflow_prob)
