"""Accounting of truncated Poisson sampling: stage 2 with a public cap on the batch.

Methods whose sensitivity grows with the batch need such a cap. N is the true number of records, n =
`num_records_public` a declared public number, q = `sampling_prob`, cap = `batch_cap`, and Δ the largest
change of the sum when one record joins a batch that stays within the cap.

Guarantee, for **adding or removing one record**. A record that joins a full batch pushes another one out: a
swap, which moves the sum by up to 2Δ. Let A and B be the hockey-stick divergences of one
Poisson(q)-subsampled Gaussian step with shift Δ and 2Δ, and p = P[Bin(n, q) ≥ cap]. There are three ways to
account for T steps:

1. `Truncation.epsilon`: δ ≤ (1 − p)·A + p·B per step, composed by PLD. **Valid for every N ≤ n.**
2. `Truncation.added_delta`: charge plain Poisson steps at δ − T·p (`Method.epsilon` does so). **Valid for
   every N ≤ n**: B is bounded by 1. Any accountant will do, but T·p must be small compared with δ.
3. `Truncation.event`: dp_accounting's `TruncatedSubsampledGaussianDpEvent`. **Valid for dataset_size = N
   exactly**: for a larger data set its ε may be *smaller*. Use it where N itself is public.

Sketch. Condition on the number X of *other* records that are drawn. If X < cap, r joins with probability q:
A. Otherwise it enters with a smaller probability, in the place of another record: at most B. The divergence
is jointly convex, and P[X ≥ cap] ≤ p since N − 1 ≤ n. ∎ The whole proofs: docs/theory/truncated-poisson.md.

None of the three holds if N > n. Where the sensitivity already covers a swap, as 2·cap·C in
`dpgcl_core.methods.baselines.path_clipping`, the plain Poisson event is enough and n is not needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from dpgcl_core.accounting import composition
from dpgcl_core.accounting.composition import check_noise_multiplier
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
        """p = P[Bin(n, q) ≥ cap], a bound for every N ≤ n on how often a record that joins pushes one out."""
        return float(stats.binom.sf(self.batch_cap - 1, self.num_records_public, self.sampling_prob))

    @property
    def added_delta(self) -> float:
        """T·p, the part of δ that plain Poisson accounting of all steps leaves out (way 2 of the module)."""
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


def _truncated_pld(
    sampling_prob: float, noise_multiplier: float, overflow_prob: float, grid: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return the PLD of (1 − p)·A + p·B, as named in the module."""
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
