"""Accounting of truncated Poisson sampling: stage 2 with a public cap on the batch.

Methods whose sensitivity grows with the batch need such a cap. N is the true number of records, and n =
`num_records_public` is a declared public number. Let q = `sampling_prob` and cap = `batch_cap`. Δ is the
largest change of the sum when one record joins a batch that stays within the cap.

Guarantee, for **adding or removing one record**. A record that joins a full batch displaces another record.
This swap moves the sum by up to 2Δ. Let A and B be the hockey-stick divergences of one
Poisson(q)-subsampled Gaussian step with shift Δ and 2Δ, and p = P[Bin(n, q) ≥ cap]. Plain Poisson steps are
charged at δ − T·p (`Method.epsilon` does so), which is **valid for every N ≤ n**. Any accountant is suitable,
but T·p must be small compared with δ.

Sketch. Condition on the number X of *other* records that are drawn. If X < cap, the record joins with
probability q, and the divergence is A. Otherwise it joins with a smaller probability, in the place of another
record, and the divergence is at most B, which is bounded by 1. The divergence is jointly convex, and
P[X ≥ cap] ≤ p since N − 1 ≤ n. ∎ docs/theory/truncated-poisson.md has the whole proof, and two tighter bounds
that the library does not need.

The guarantee does not hold if N > n. If the sensitivity already covers a swap, as 2·cap·C does in
`dpgcl_core.methods.baselines.path_clipping`, the plain Poisson event is enough and n is not needed.
"""

from __future__ import annotations

from scipy import stats

from dpgcl_core.errors import ConfigError
from dpgcl_core.sampling.truncated import TruncatedPoissonSampler


def added_delta(*, num_records_public: int, sampling_prob: float, batch_cap: int, num_steps: int) -> float:
    """Return T·p, the δ of full batches, which accounting as plain Poisson sampling omits.

    p = P[Bin(n, q) ≥ cap] bounds the probability that a batch is full; see the module for the proof.

    Args:
      num_records_public: n, a public number that the true number of records does not exceed.
      sampling_prob: q, each record's probability of joining a step.
      batch_cap: the largest number of records in a batch.
      num_steps: T.

    Raises:
      ConfigError: a number is outside its range.

    >>> cut = {"num_records_public": 1000, "sampling_prob": 0.1, "batch_cap": 150}
    >>> 1e-7 < added_delta(**cut, num_steps=10) < 1e-5, added_delta(**cut, num_steps=0)
    (True, 0.0)
    """
    TruncatedPoissonSampler(sampling_prob=sampling_prob, batch_cap=batch_cap)
    if num_records_public < 1:
        raise ConfigError(f"num_records_public must be at least 1; got {num_records_public}")
    if num_steps < 0:
        raise ConfigError(f"num_steps must not be negative; got {num_steps}")
    return num_steps * float(stats.binom.sf(batch_cap - 1, num_records_public, sampling_prob))
