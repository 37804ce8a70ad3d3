"""Stages 2 and 3 for sampling of *groups*: one more record adds at most one group, and changes no other.

The capacity of N slots, the group size S and the keep probability q are public, fixed before the data are
seen and the same for both neighbours. At every step the records are placed in the slots by a uniformly random
injection, the slots are cut into K = ⌊N/S⌋ blocks of S, and every block is kept independently with
probability q. A kept block whose slots are all filled is a group and contributes h(G), of norm ≤ C. A kept
block with an empty slot contributes exactly zero.

Proposition (sensitivity C). For D' = D ∪ {r} with |D'| ≤ N, the released sum Σ h(G) + N(0, σ²C²·I) is
dominated, in both directions, by the Poisson-subsampled Gaussian of sampling probability q and noise
multiplier σ.

Proof. Draw the placement of D'. Restricted to D it is the placement of D, so it couples the two: the same
records in the same slots, and the slot of r empty under D. Fix the placement, the views, and the keep bits of
all blocks except G*, the block that contains the slot of r; if that slot is in no block, nothing differs.
Write N(μ) for the normal law of covariance σ²C²·I. Under D the block G* has an empty slot and contributes
zero, kept or not: the release is N(μ). Under D' it is kept with probability q, independently of everything
fixed, so the release is (1 − q)·N(μ) + q·N(μ + h) with ‖h‖ ≤ C, or N(μ) again if another slot of G* is empty.
The hockey-stick divergence is jointly convex, so the average over everything fixed is dominated by the pair
((1 − q)·N(0) + q·N(C), N(0)). ∎

Each of these changes voids the argument (`tests/dpgcl_core/sampling/test_slots.py` shows it by exact
enumeration): an incomplete block that contributes, or is filled up; a fixed number of blocks; keep bits that
depend on the data or are known; a placement that numbers the *present* records, so that r moves others; N
computed anew from each of the two data sets.

The rows of a data set number the present records, and the draw below uses a row number as a slot. This does
not void the argument, for one reason: slots are drawn again at every step, by a law that no renumbering of
them changes. A caller that keeps a placement for longer must number slots.

If N is computed from the data once, it is public, and the relation is then zero-out: any one of the n records
may be blank, its slot empty, and n stays the same. The same proof holds. See docs/theory/group-sampling.md.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError
from dpgcl_core.noise.randomness import Draws
from dpgcl_core.sampling.poisson import PoissonSampler
from dpgcl_core.sampling.stage import DrawnGroups

MOST_BLOCKS_LOST = 0.2
"""The largest share of the blocks that may be lost to empty slots."""


@dataclass(frozen=True, kw_only=True)
class SampledGroups:
    """Samples groups of slots; groups with an empty slot are computed like the others but contribute zero.

    Guarantee: see the module. Which slots are drawn depends only on the fields below. Empty slots change only
    which groups are complete, so shapes and work reveal nothing about the records.

    Attributes:
      capacity: N, the public number of slots.
      group_size: S. At every step the slots are cut into K = ⌊N/S⌋ blocks of S.
      sampling_prob: q, the probability that a block is kept and becomes a group.

    Raises:
      ConfigError: `sampling_prob` is outside (0, 1], or `group_size` outside [1, N].

    >>> stage = SampledGroups(capacity=6, group_size=2, sampling_prob=1.0)
    >>> drawn = stage.draw(5, sampling=np.random.default_rng(), permutation=np.random.default_rng())
    >>> drawn.rows.shape, drawn.batch_size, int(drawn.complete.sum())
    ((3, 2), 6, 2)
    """

    capacity: int
    group_size: int
    sampling_prob: float
    yields_incomplete: ClassVar[bool] = True

    def __post_init__(self) -> None:
        PoissonSampler(sampling_prob=self.sampling_prob)
        if not 1 <= self.group_size <= self.capacity:
            raise ConfigError(
                f"group_size must be from 1 to num_records_public = {self.capacity}; got {self.group_size}"
            )

    def draw(self, num_records: int, *, sampling: Draws, permutation: Draws) -> DrawnGroups:
        """Return the kept blocks of one step as groups, with row 0 in place of an empty slot.

        Slots below `num_records` hold the records. Cutting permuted slots into blocks and keeping each block
        with probability q has the same law as this draw: the number of kept blocks is Binomial(K, q), and
        their slots are distinct slots in uniformly random order.

        Raises:
          ConfigError: there are more records than slots; the message contains no number of records.
        """
        if num_records > self.capacity:
            raise ConfigError(more_records_than_slots(self.capacity))
        bits = sampling.random(num_blocks(self.capacity, self.group_size)) < self.sampling_prob
        num_kept = int(np.count_nonzero(bits))
        slots = distinct(num_kept * self.group_size, self.capacity, permutation)
        groups = slots.reshape(num_kept, self.group_size)
        filled = groups < num_records
        return DrawnGroups(
            rows=np.where(filled, groups, 0),
            complete=np.logical_and.reduce(filled, axis=1),
            batch_size=len(slots),
        )


@dataclass(frozen=True, kw_only=True)
class ShardedGroups:
    """Samples groups separately in each of W ranges of a slot table, so that W workers need no common draw.

    The table (`dpgcl_core.sampling.slot_table`) keeps each record in one of N slots. Range w has the slots
    from ⌊w·N/W⌋ up to, but not including, ⌊(w + 1)·N/W⌋, which are N_w slots. Its records are drawn as by
    `SampledGroups` with capacity N_w: K_w = ⌊N_w/S⌋ blocks, a placement and keep bits of their own. The
    clipped sums of all ranges are added, and one noise is drawn.

    Guarantee: Σ h(G) + N(0, σ²C²·I) is dominated, in both directions, by the Poisson-subsampled Gaussian of
    (q, σ), as in the module's proposition.

    Proof. Let D' = D ∪ {r}. The table of D', restricted to D, has the law of the table of D, so it couples
    the two. Condition on it. Let v be the range that contains the slot of r. Every other range has the same
    N_w and the same records in both, and secret draws of its own: couple them, and fix the sum m of their
    groups. In range v, N_v is the same in both, and D' has exactly one record more than D, at most N_v. A
    step places the records of the range in its N_v slots by a *fresh* uniformly random injection. So the
    proposition holds there with capacity N_v, shifted by m, and the average over m is dominated, too. The
    number of a record within its range may be used as a slot, although r changes the numbers of others: the
    fresh injection has the same law however the records are numbered, so r may have the last number. Given
    the table, which all steps share, every step is thus dominated, and the steps compose adaptively. The
    hockey-stick divergence is jointly convex, so the average over the table is dominated by the same pairs. ∎

    Ranges must be cut by slots. A shard of the records with certain hashes, with their number as its
    capacity, and a shard of the present records with certain row numbers void the argument: r would change
    a capacity, or move other records to another shard.

    Attributes:
      capacity: N, the public number of slots.
      group_size: S.
      sampling_prob: q, the probability that a block is kept and becomes a group.
      num_shards: W.

    Raises:
      ConfigError: as `SampledGroups`, or a range has fewer than S slots.

    >>> stage = ShardedGroups(capacity=7, group_size=2, sampling_prob=1.0, num_shards=2)
    >>> stage.ranges, [rows.tolist() for rows in stage.rows_of(np.array([6, 0, 2, 3]))]
    ([range(0, 3), range(3, 7)], [[1, 2], [0, 3]])
    """

    capacity: int
    group_size: int
    sampling_prob: float
    num_shards: int
    yields_incomplete: ClassVar[bool] = True

    def __post_init__(self) -> None:
        smallest = len(self.ranges[0])
        if self.group_size > smallest:
            raise ConfigError(
                f"group_size must be at most {smallest}, the slots of a shard (num_records_public = "
                f"{self.capacity}, shards = {self.num_shards}); got {self.group_size}. Lower group_size or "
                "shards"
            )
        self._stage(0)

    @property
    def ranges(self) -> list[range]:
        """The slots of each range."""
        return shard_ranges(self.capacity, self.num_shards)

    def rows_of(self, slots: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the rows of the records in each range, ascending; `slots` has each record's slot."""
        return [np.flatnonzero((slots >= part.start) & (slots < part.stop)) for part in self.ranges]

    def draw(
        self, rows: Sequence[NDArray[np.int64]], shards: Iterable[int], generator: Callable[[str], Draws]
    ) -> DrawnGroups:
        """Return the kept blocks of some ranges in one step, as groups.

        Args:
          rows: the rows of the records in each range, from `rows_of`.
          shards: the ranges to draw; over all workers, each range once.
          generator: returns the secret draws of a purpose, such as "sampling in range 0".
        """
        groups, complete = [np.empty((0, self.group_size), dtype=np.int64)], [np.empty(0, dtype=np.bool_)]
        for shard in shards:
            step_groups = self._stage(shard).draw(
                len(rows[shard]),
                sampling=generator(f"sampling in range {shard}"),
                permutation=generator(f"permutation in range {shard}"),
            )
            groups.append(rows[shard][step_groups.rows] if len(rows[shard]) else step_groups.rows)
            complete.append(step_groups.complete)
        all_groups = np.concatenate(groups)
        return DrawnGroups(rows=all_groups, complete=np.concatenate(complete), batch_size=all_groups.size)

    def _stage(self, shard: int) -> SampledGroups:
        return SampledGroups(
            capacity=len(self.ranges[shard]), group_size=self.group_size, sampling_prob=self.sampling_prob
        )


def shard_ranges(capacity: int, num_shards: int) -> list[range]:
    """Return the slots of each shard: ranges of N = `capacity` slots whose sizes differ by at most one.

    >>> shard_ranges(7, 2)
    [range(0, 3), range(3, 7)]
    """
    bounds = [shard * capacity // num_shards for shard in range(num_shards + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def more_records_than_slots(capacity: int) -> str:
    """Return the error message for a data set that is too large, without its number of records."""
    return (
        f"the data set has more records than num_records_public = {capacity}, the capacity that the "
        "guarantee covers. Declare a larger num_records_public before any training"
    )


def distinct(count: int, below: int, generator: Draws) -> NDArray[np.int64]:
    """Return `count` distinct numbers in [0, below), uniformly random in choice and order.

    If `count` is small, numbers are drawn and repeated ones dropped, so time and memory grow with `count`.

    >>> sorted(distinct(4, 4, np.random.default_rng()).tolist())
    [0, 1, 2, 3]
    """
    if 4 * count > below:
        return generator.permutation(np.arange(below, dtype=np.int64))[:count]
    numbers = np.empty(0, dtype=np.int64)
    while len(numbers) < count:
        candidates = np.concatenate([numbers, generator.integers(0, below, 2 * (count - len(numbers)))])
        first = np.unique(candidates, return_index=True)[1]
        numbers = candidates[np.sort(first)]
    return numbers[:count]


def num_blocks(capacity: int, group_size: int, num_shards: int = 1) -> int:
    """Return K, the number of blocks of a step, over all shards.

    >>> num_blocks(7, 2), num_blocks(7, 2, num_shards=3)
    (3, 3)
    """
    return sum(len(slots) // group_size for slots in shard_ranges(capacity, num_shards))


def empty_step_prob(capacity: int, group_size: int, sampling_prob: float, num_shards: int = 1) -> float:
    """Return the probability (1 − q)^K that a step keeps none of its K blocks, q being `sampling_prob`.

    >>> round(empty_step_prob(60_000, 1024, 1024 / 60_000), 2)
    0.37
    """
    return float((1 - sampling_prob) ** num_blocks(capacity, group_size, num_shards))


def share_lost(capacity: int, num_empty: int, group_size: int) -> float:
    """Return the expected share of blocks of S slots that have an empty slot, 1 − C(N − e, S)/C(N, S).

    N is the capacity, e the number of empty slots, and C(·, ·) the binomial coefficient.

    >>> round(share_lost(60_000, 600, 16), 2), round(share_lost(60_000, 600, 256), 2)
    (0.15, 0.92)
    """
    if num_empty > capacity - group_size:
        return 1.0 if num_empty else 0.0
    log_share_kept = sum(
        math.log1p(-num_empty / (capacity - slot)) for slot in range(group_size)
    )  # the slots of one block are drawn one by one
    return -math.expm1(log_share_kept)


def most_empty(capacity: int, group_size: int) -> int:
    """Return the most slots that may be empty without exceeding `MOST_BLOCKS_LOST`, but at least one.

    With no empty slot allowed, the guarantee would cover no neighbouring data set.

    >>> most_empty(60_000, 16), most_empty(60_000, 256), most_empty(8, 4)
    (830, 52, 1)
    """
    # The share lost grows with the number of empty slots.
    share_of = partial(share_lost, capacity, group_size=group_size)
    return max(1, bisect_right(range(1, capacity + 1), MOST_BLOCKS_LOST, key=share_of))
