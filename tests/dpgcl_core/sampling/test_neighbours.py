"""Neighbouring data sets through sampling, grouping and clipping: exact laws, and the wrong ones caught.

`coupling_distance` decides by maximum flow whether **any** coupling of the two exact laws keeps the
number of changed groups within the claim, so no proof is trusted and no sampling error remains. Each
group's clipped gradient may be any vector of norm ≤ C, so two changed groups are worth 2C.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting import dp_event

from dpgcl_core.accounting.composition import epsilon_pld
from dpgcl_core.sampling.groups import FixedSizeGroups
from dpgcl_core.sampling.poisson import PoissonSampler
from dpgcl_core.sampling.record_ids import ids_from_names
from tests.oracles import coupling_distance, grouping_law, positional_shard_law

CLAIMED = 2  # sensitivity 2C: at most two group gradients of norm C in the symmetric difference


@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_records", range(7))
def test_groups_neighbouring_batches_couple_within_2c(group_size: int, num_records: int) -> None:
    records = list(range(num_records))
    with_one_more = [*records, num_records]
    distance = coupling_distance(
        grouping_law(records, group_size), grouping_law(with_one_more, group_size), CLAIMED
    )
    assert distance == 1


def test_groups_of_one_couple_within_c() -> None:
    assert coupling_distance(grouping_law([0, 1, 2], 1), grouping_law([0, 1, 2, 3], 1), 1) == 1


@pytest.mark.parametrize("num_records", [2, 3, 4, 5])
def test_groups_keeping_short_last_group_is_caught(num_records: int) -> None:
    records = list(range(num_records))
    kept = coupling_distance(
        grouping_law(records, 3, keep_short_last_group=True),
        grouping_law([*records, num_records], 3, keep_short_last_group=True),
        CLAIMED,
    )
    exceeds = num_records in (3, 4)  # with 2 or 5 the new record only completes the short group
    assert (kept < 1) == exceeds


def test_groups_short_last_group_needs_3c_for_two_and_three_records() -> None:
    distance = coupling_distance(
        grouping_law([0, 1], 2, keep_short_last_group=True),
        grouping_law([0, 1, 2], 2, keep_short_last_group=True),
        CLAIMED,
    )
    assert distance == Fraction(1, 3)  # a 3C shift with probability 2/3, as the method sheet works out


def test_groups_implementation_has_the_exact_law() -> None:
    exact = grouping_law(list(range(5)), 2)
    generator = np.random.default_rng(7)
    drawn = Counter(
        frozenset(frozenset(g) for g in FixedSizeGroups(group_size=2).group(np.arange(5), generator).tolist())
        for _ in range(30_000)
    )
    assert set(drawn) == set(exact)
    expected = np.array([30_000 * float(exact[groups]) for groups in exact])
    observed = np.array([drawn[groups] for groups in exact])
    assert ((observed - expected) ** 2 / expected).sum() < 36.1  # chi-square, 14 degrees, p = .001


@pytest.mark.parametrize("scheme", ["contiguous", "strided"])
def test_positional_shards_are_caught(scheme: str) -> None:
    def shard_by_position(position: int, record: int) -> int:
        return position // 3 if scheme == "contiguous" else position % 2

    whole = list(range(6))
    distances = [
        coupling_distance(
            positional_shard_law([r for r in whole if r != removed], 2, 2, shard_by_position),
            positional_shard_law(whole, 2, 2, shard_by_position),
            CLAIMED,
        )
        for removed in whole
    ]
    assert min(distances) < 1


def test_shards_by_id_couple_within_2c() -> None:
    ids = ids_from_names([f"record {i}" for i in range(6)])
    shards = ids % 2
    for removed in range(6):
        kept = [r for r in range(6) if r != removed]
        distance = coupling_distance(
            positional_shard_law(kept, 2, 2, lambda _, r: int(shards[r])),
            positional_shard_law(list(range(6)), 2, 2, lambda _, r: int(shards[r])),
            CLAIMED,
        )
        assert distance == 1


def test_sampler_inclusions_are_independent_of_other_records() -> None:
    sampler, draws = PoissonSampler(sampling_prob=0.3), 40_000
    generator = np.random.default_rng(11)
    masks = np.zeros((draws, 3), dtype=bool)
    for mask in masks:
        mask[sampler.sample(3, generator)] = True
    joint = np.bincount(masks @ [1, 2, 4], minlength=8) / draws
    p = np.array([0.7, 0.3])
    exact = np.array([p[b & 1] * p[b >> 1 & 1] * p[b >> 2] for b in range(8)])
    assert np.abs(joint - exact).max() < 5 * np.sqrt(0.25 / draws)


def test_sampler_seed_shared_between_trials_costs_more_than_composition() -> None:
    """Ten trials on one and the same sample are one step at σ/√10, not ten independent draws."""
    q, sigma, trials, delta = 0.01, 1.0, 10, 1e-5
    one_step = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma))
    charged = epsilon_pld(dp_event.SelfComposedDpEvent(one_step, trials), delta, grid=1e-3)
    shared = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma / np.sqrt(trials)))
    assert epsilon_pld(shared, delta, grid=1e-3) > 3 * charged
