"""Stage 3, groups: the sampled records are permuted in secret and cut into groups of exactly S.

Proposition (sensitivity 2C). Let h map a group of S records to a vector of norm ≤ C, and let
f(B) = Σ h(G) over the ⌊|B|/S⌋ groups that a uniformly random permutation of B cuts off, the remainder
of fewer than S records being dropped. For B' = B ∪ {r} there is a coupling of f(B) and f(B') with
‖f(B') − f(B)‖ ≤ 2C, always.

Proof. Write n = |B| and K = ⌊n/S⌋. A permutation of B *places* its first K·S records in groups and
leaves over the rest.

Case 1, n + 1 is not a multiple of S: B and B' have the same number K of groups. Draw a uniformly random
permutation of B and insert r by exchange: with probability 1/(n + 1) put r last, otherwise put r at
the position of a uniformly random record x and put x last. This is one step of the Fisher-Yates shuffle,
so the result is a uniformly random permutation of B', and both marginals are right. Position n + 1 is
left over. If r took a placed record's position, one group G became G' and ‖h(G) − h(G')‖ ≤ 2C; otherwise
no group changed.

Case 2, n + 1 is a multiple of S: every record of B' is placed, in K + 1 groups. Draw the groups of B'
and delete the one that holds r; its S − 1 other records become the remainder of B. Given any ordered
choice of K·S records of B, exactly one set completes it (r and the S − 1 others), and all choices are
equally likely by symmetry, so the K groups have the same law as the groups of a permutation of B. One
whole group differs: ‖f(B') − f(B)‖ ≤ C. For S = 1 only this case occurs. ∎

The argument fails if the group membership is published, or if a short last group is kept
(`tests/dpgcl_core/sampling/test_neighbours.py` shows the latter by exact enumeration).

`WholeBatch` makes the realised batch one group, clipped once: f changes by at most 2C.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import require_least
from dpgcl_core.noise.randomness import Draws

BATCH: Literal["batch"] = "batch"
GroupSize = int | Literal["batch"]


class Grouper(Protocol):
    """Cuts one step's sample into disjoint groups."""

    def group(self, sample: NDArray[np.int64], generator: Draws) -> NDArray[np.int64]:
        """Return groups of records, `[num_groups, records_per_group]`, each of `sample` at most once."""


@dataclass(frozen=True, kw_only=True)
class FixedSizeGroups:
    """Cuts groups of exactly `group_size` records and drops the remainder.

    Sensitivity: 2C, or C for groups of one; the module docstring has the proof.

    Raises:
      ConfigError: `group_size` is below 1.
    """

    group_size: int

    def __post_init__(self) -> None:
        require_least(self, 1, "group_size")

    def group(self, sample: NDArray[np.int64], generator: Draws) -> NDArray[np.int64]:
        """Return groups `[num_groups, group_size]`, cut from a permutation that must stay secret.

        >>> FixedSizeGroups(group_size=2).group(np.arange(5), np.random.default_rng()).shape
        (2, 2)
        """
        num_groups = len(sample) // self.group_size
        permuted = generator.permutation(sample)
        return permuted[: num_groups * self.group_size].reshape(num_groups, self.group_size)


@dataclass(frozen=True, kw_only=True)
class WholeBatch:
    """Makes the whole realised batch one group; an empty sample gives no group."""

    def group(self, sample: NDArray[np.int64], generator: Draws) -> NDArray[np.int64]:
        """Return the group, `[1, realised_batch_size]`, or `[0, 0]` for an empty sample."""
        return sample[None] if len(sample) else np.empty((0, 0), dtype=np.int64)


def build_grouper(group_size: GroupSize) -> Grouper:
    """Return the grouper of a group size or of `"batch"`."""
    return WholeBatch() if group_size == BATCH else FixedSizeGroups(group_size=int(group_size))


@lru_cache(maxsize=256)  # called at every step
def expected_num_groups(num_records_public: int, sampling_prob: float, group_size: GroupSize) -> float:
    """Return the expected number of groups E⌊X/S⌋, for a batch size X ~ Binomial(n, q) and group size S.

    n is `num_records_public` and q is `sampling_prob`. For "batch" it is the probability that the batch is
    not empty. The noisy sum is divided by this public constant: the realised number of groups is secret.

    >>> round(expected_num_groups(100, 0.2, 1), 6), expected_num_groups(100, 0.2, "batch") > 0.99
    (20.0, True)
    """
    if group_size == BATCH:
        return float(-np.expm1(num_records_public * np.log1p(-sampling_prob))) if sampling_prob < 1 else 1.0
    counts, probabilities = _batch_size_law(num_records_public, sampling_prob)
    return float(np.sum((counts // int(group_size)) * probabilities))


def expected_dropped_share(num_records_public: int, sampling_prob: float, group_size: int) -> float:
    """Return the share of sampled records that grouping drops, E[X mod S] / E[X] for a batch size X.

    >>> expected_dropped_share(64, 1.0, 16), round(expected_dropped_share(1437, 0.1, 128), 2)
    (0.0, 0.18)
    """
    counts, probabilities = _batch_size_law(num_records_public, sampling_prob)
    return float(np.sum((counts % group_size) * probabilities) / (num_records_public * sampling_prob))


def _batch_size_law(
    num_records_public: int, sampling_prob: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the batch sizes within 12 standard deviations of the mean, and their binomial probabilities."""
    from scipy import stats  # imported here, because command lines do not need it

    law = stats.binom(num_records_public, sampling_prob)
    spread = int(12 * law.std()) + 12
    low, high = max(0, int(law.mean()) - spread), min(num_records_public, int(law.mean()) + spread)
    counts = np.arange(low, high + 1)
    return counts, law.pmf(counts)
