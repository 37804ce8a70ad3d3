"""Station 2 with a public cap on the batch: truncated Poisson sampling, and batches of a fixed size.

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
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray
from scipy import stats

from dpgcl_core.accounting import composition as accounting
from dpgcl_core.errors import ConfigError
from dpgcl_core.noise.sources import Draws
from dpgcl_core.sampling.poisson import PoissonSampler

REPLACE_ONE = "replace one record"


@dataclass(frozen=True, kw_only=True)
class TruncatedPoissonSampler:
    """Poisson sampling, cut down to a uniformly random subset of `batch_cap` records where it draws more.

    Raises:
      ConfigError: `sampling_prob` is outside (0, 1], or `batch_cap` below 1.
    """

    sampling_prob: float
    batch_cap: int

    def __post_init__(self) -> None:
        PoissonSampler(sampling_prob=self.sampling_prob)
        if self.batch_cap < 1:
            raise ConfigError(f"batch_cap must be at least 1; got {self.batch_cap}")

    def sample(self, num_records: int, generator: Draws) -> NDArray[np.int64]:
        """Returns the rows of the sampled records, `[≤ batch_cap]`, ascending.

        >>> sampler = TruncatedPoissonSampler(sampling_prob=1.0, batch_cap=3)
        >>> len(sampler.sample(10, np.random.default_rng()))
        3
        """
        drawn = PoissonSampler(sampling_prob=self.sampling_prob).sample(num_records, generator)
        if len(drawn) <= self.batch_cap:
            return drawn
        return np.sort(generator.permutation(drawn)[: self.batch_cap])


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampler:
    """A uniformly random set of exactly `batch_size` records, drawn afresh for every step.

    Raises:
      ConfigError: `batch_size` is below 1, or above the number of records.
    """

    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1; got {self.batch_size}")

    def sample(self, num_records: int, generator: Draws) -> NDArray[np.int64]:
        """Returns the rows of the sampled records, `[batch_size]`, ascending.

        >>> FixedSizeSampler(batch_size=3).sample(3, np.random.default_rng())
        array([0, 1, 2])
        """
        if self.batch_size > num_records:
            raise ConfigError(
                f"batch_size must be at most the number of records; got {self.batch_size}, lower it"
            )
        return np.sort(generator.permutation(np.arange(num_records))[: self.batch_size])


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
        _check_noise(self.noise_multiplier)

    @property
    def overflow_prob(self) -> float:
        """p = P[Bin(n, q) ≥ cap]: bounds, for every N ≤ n, how often a record that joins can push one out."""
        return float(stats.binom.sf(self.batch_cap - 1, self.num_records_public, self.sampling_prob))

    @property
    def added_delta(self) -> float:
        """T·p, what plain Poisson accounting of all steps leaves out."""
        return self.num_steps * self.overflow_prob

    def epsilon(self, delta: float, *, grid: float = accounting.GRID) -> float:
        """Returns an upper bound on ε at `delta` by PLD, for every N ≤ n (way 1 of the module).

        >>> cut = Truncation(num_records_public=1000, sampling_prob=0.1, batch_cap=150, noise_multiplier=1.0,
        ...     num_steps=10)
        >>> plain = accounting.poisson_gaussian_event(sampling_prob=0.1, noise_multiplier=1.0, num_steps=10)
        >>> abs(cut.epsilon(1e-5, grid=1e-3) / accounting.epsilon_pld(plain, 1e-5, grid=1e-3) - 1) < 1e-3
        True
        """
        if self.noise_multiplier == 0:
            return math.inf
        pld = _truncated_pld(self.sampling_prob, self.noise_multiplier, self.overflow_prob, grid)
        return float(pld.self_compose(self.num_steps).get_epsilon_for_delta(delta))

    def delta(self, epsilon: float, *, grid: float = accounting.GRID) -> float:
        """Returns an upper bound on δ at `epsilon`, as `epsilon` does."""
        if self.noise_multiplier == 0:
            return 1.0
        pld = _truncated_pld(self.sampling_prob, self.noise_multiplier, self.overflow_prob, grid)
        return float(pld.self_compose(self.num_steps).get_delta_for_epsilon(epsilon))

    def epsilon_by_added_delta(self, delta: float, *, grid: float = accounting.GRID) -> float:
        """Returns an upper bound on ε at `delta`, for every N ≤ n (way 2); inf if T·p leaves no δ."""
        if self.added_delta >= delta:
            return math.inf
        return accounting.epsilon_of_steps(
            sampling_prob=self.sampling_prob,
            noise_multiplier=self.noise_multiplier,
            num_steps=self.num_steps,
            delta=delta - self.added_delta,
            grid=grid,
        )

    def rdp_of_step(self, orders: Sequence[float]) -> NDArray[np.float64]:
        """Returns an upper bound on one step's RDP at each order above 1, for every N ≤ n; it adds up.

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
        """Returns dp_accounting's event, valid only if the data set holds **exactly** n records (way 3).

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
        accounting.poisson_gaussian_event(
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
    """Returns the least noise found whose `Truncation.epsilon` meets the target, for every N ≤ n.

    The returned ε is computed with the grid of record and never exceeds the target.

    Raises:
      ConfigError: the target is not positive, or no noise multiplier in [0.1, 1e5] meets it.
    """
    _check_target(target_epsilon)

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

    low = target_epsilon * (1 - accounting.CALIBRATION_TOLERANCE)
    for grid in (1e-3, accounting.GRID):
        noise = accounting.search_noise_multiplier(partial(epsilon, grid=grid), low, target_epsilon)
        if low <= epsilon(noise, accounting.GRID) <= target_epsilon:
            return with_noise(noise)
    raise ConfigError(f"no noise multiplier verified for target_epsilon = {target_epsilon}; raise it")


def _truncated_pld(
    sampling_prob: float, noise_multiplier: float, overflow_prob: float, grid: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns the PLD of (1 − p)·A(q) + p·B(q)."""
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


@dataclass(frozen=True, kw_only=True)
class FixedSizeGaussians:
    """Accounting of steps that apply Gaussian mechanisms to one sample of fixed size, replacing one record.

    Attributes:
      num_records: N, public by this relation.
      batch_size: records in every sample.
      noise_multipliers: std / replace-one sensitivity of each mechanism that looks at the step's sample.
      num_steps: T.

    Raises:
      ConfigError: a field is outside its range.
    """

    num_records: int
    batch_size: int
    noise_multipliers: tuple[float, ...]
    num_steps: int

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.num_records:
            raise ConfigError(
                f"batch_size must be from 1 to num_records = {self.num_records}; got {self.batch_size}"
            )
        if not self.noise_multipliers:
            raise ConfigError("noise_multipliers must name at least one mechanism; got none")
        for noise_multiplier in self.noise_multipliers:
            _check_noise(noise_multiplier)
        if self.num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1; got {self.num_steps}")

    def event(self) -> dp_event.DpEvent:
        """Returns one event per step, with all the step's mechanisms inside."""
        if 0 in self.noise_multipliers:
            return dp_event.NonPrivateDpEvent()
        gaussians = [dp_event.GaussianDpEvent(noise) for noise in self.noise_multipliers]
        step = dp_event.SampledWithoutReplacementDpEvent(
            self.num_records, self.batch_size, dp_event.ComposedDpEvent(gaussians)
        )
        return dp_event.SelfComposedDpEvent(step, self.num_steps)

    def epsilon(self, delta: float) -> float:
        """Returns an upper bound on ε at `delta` by RDP, replacing one record.

        >>> FixedSizeGaussians(num_records=60_000, batch_size=512, noise_multipliers=(2.0, 2.0, 2.0),
        ...     num_steps=1000).epsilon(1e-5) < 2.56
        True
        """
        return _epsilon_replace_one(self, delta)


@lru_cache(maxsize=256)
def _epsilon_replace_one(what: FixedSizeGaussians, delta: float) -> float:
    event = what.event()
    if isinstance(event, dp_event.NonPrivateDpEvent):
        return math.inf
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.compose(event).get_epsilon(delta))


def calibrate_fixed_size(
    *,
    num_records: int,
    batch_size: int,
    num_steps: int,
    target_epsilon: float,
    target_delta: float,
    shares: Sequence[float] = (1.0,),
) -> FixedSizeGaussians:
    """Returns the least noise found that meets (target_epsilon, target_delta) in RDP, replacing one record.

    Args:
      num_records, batch_size, num_steps: as in `FixedSizeGaussians`.
      target_epsilon, target_delta: the target; never exceeded, and met within `CALIBRATION_TOLERANCE`.
      shares: noise multipliers of the step's mechanisms in proportion; equal ones split the budget equally.

    Raises:
      ConfigError: the target or a share is not positive, or no noise multiplier in [0.1, 1e5] meets it.
    """
    _check_target(target_epsilon)
    if not shares or not all(share > 0 and math.isfinite(share) for share in shares):
        raise ConfigError(f"shares must be positive and finite, one per mechanism; got {list(shares)}")

    def scaled(noise: float) -> FixedSizeGaussians:
        return FixedSizeGaussians(
            num_records=num_records,
            batch_size=batch_size,
            noise_multipliers=tuple(noise * share for share in shares),
            num_steps=num_steps,
        )

    low = target_epsilon * (1 - accounting.CALIBRATION_TOLERANCE)
    noise = accounting.search_noise_multiplier(
        lambda noise: scaled(noise).epsilon(target_delta), low, target_epsilon
    )
    return scaled(noise)


def _check_target(target_epsilon: float) -> None:
    if not target_epsilon > 0 or math.isinf(target_epsilon):
        raise ConfigError(f"target_epsilon must be positive and finite; got {target_epsilon}")


def _check_noise(noise_multiplier: float) -> None:
    if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
        raise ConfigError(f"noise_multiplier must be finite and not negative; got {noise_multiplier}")
