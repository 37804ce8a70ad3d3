"""The number of groups of a pass: public, and chosen so that filling up passes wastes little.

Every pass has the same number of groups, whatever was drawn (`dpgcl_core.clipping.clipper`). The groups that
fill up a step's last pass are wasted work. The number depends on the law of the number of groups, which is
public, and never on a realised draw.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

from dpgcl_core.mechanism.numbers import RECORDS, PublicNumbers
from dpgcl_core.sampling.groups import BATCH

_QUANTILES = tuple(NormalDist().inv_cdf((i + 0.5) / 32) for i in range(32))
"""32 equally likely values of a standard normal."""

_FIXED_COST = 1 / 12
"""The fixed cost of a pass, as a share of the cost of the groups of the largest pass. Measured on a CPU: a
step of small networks took 1.7 to 1.9 times as long in passes of an eighth of its groups."""


def groups_of_a_pass(numbers: PublicNumbers, *, limit: int | None = None, num_workers: int = 1) -> int:
    """Return the number of groups of every pass, at most `limit`, that makes a step cheapest on average.

    Args:
      numbers: the mechanism's public numbers, which fix the distribution of a step's number of groups.
      limit: the number of groups that fit into memory; None for no limit.
      num_workers: the number of workers that share the groups.

    >>> from dpgcl_core.mechanism.mechanism import Mechanism
    >>> exactly = Mechanism(
    ...     num_records_public=512, sampling_prob=1.0, group_size=8, l2_clip_norm=1.0, noise_multiplier=1.0,
    ...     num_steps=1, target_delta=1e-4,
    ... )
    >>> groups_of_a_pass(exactly), groups_of_a_pass(exactly, limit=48)
    (64, 32)
    """
    if numbers.group_size == BATCH:
        return 1
    size = int(numbers.group_size)
    unit = size if numbers.sampling == RECORDS else 1  # records per group, or 1 if groups are sampled
    mean = numbers.sampling_prob * (numbers.num_records_public * unit // size)
    std = math.sqrt(mean * (1 - numbers.sampling_prob))
    group_counts = tuple(
        math.ceil(max(0, math.floor(round(mean + std * z, 6)) // unit) / num_workers) for z in _QUANTILES
    )
    largest = max(1, *group_counts)
    return _cheapest(group_counts, largest if limit is None else max(1, min(limit, largest)))


@lru_cache(maxsize=64)
def _cheapest(group_counts: tuple[int, ...], limit: int) -> int:
    """Return the cheapest number of groups per pass for these steps, up to `limit`; the largest of equals."""
    fixed, sizes = _FIXED_COST * limit, range(1, limit + 1)
    costs = {size: sum(math.ceil(num / size) for num in group_counts) * (size + fixed) for size in sizes}
    return min(costs, key=lambda size: (round(costs[size], 9), -size))
