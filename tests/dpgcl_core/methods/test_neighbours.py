"""Every method of the registry on neighbouring batches, coupled as its proof couples them.

Inputs are found by gradient ascent on the slow oracle's distance, then given to the real rule. A `proven`
method must stay within its sensitivity, and reach a share of it that a smaller claim would not cover; an
`as-published` one must be seen to exceed what it claims, given the same released statistics.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.numbers import GROUPS, RECORDS
from dpgcl_core.mechanism.registry import METHODS
from tests.dpgcl_core.adversary import LinearEncoder, farthest
from tests.dpgcl_core.dpcl_oracle import barlow_counterexample, simclr_counterexample
from tests.dpgcl_core.method_oracles import (
    CASES,
    NOISE,
    TAU,
    TRAINING,
    Step,
    clipped_sum,
    mechanism_of,
    rule_sum,
    target_of,
)
from tests.oracles import Groups, grouping_law

CLIP = 1e-3  # small, so that every term is clipped and counts in full
MODEL, SLOW = LinearEncoder(3), LinearEncoder(3).double()
TARGET, SLOW_TARGET = target_of(MODEL), target_of(SLOW)
Rows = list[list[int]]
"""Groups of rows of a pool of records."""


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Two batches of one pool of records, and how far apart they must come, in multiples of C."""

    pool: int
    one: Rows
    other: Rows
    apart: float
    bound: Callable[[Mechanism], float] = lambda mechanism: mechanism.sensitivity
    sampling: str = RECORDS

    @property
    def num_records(self) -> int:
        return max(sum(map(len, rows)) for rows in (self.one, self.other))


def coupled_groups(order: Sequence[int], newcomer: int, size: int) -> tuple[Rows, Rows]:
    """The groups of a permuted batch, and those of the batch without the newcomer, as the proof couples them.

    If some record is left over, one of them takes the newcomer's place; else its group falls apart.
    """
    num_groups = len(order) // size
    groups = [list(order[start : start + size]) for start in range(0, num_groups * size, size)]
    left_over = [record for record in order[num_groups * size :] if record != newcomer]
    mine = next((group for group in groups if newcomer in group), None)
    if mine is None:
        return groups, groups
    if left_over:
        swapped = [left_over[0] if record == newcomer else record for record in mine]
        return groups, [swapped if group is mine else group for group in groups]
    return groups, [group for group in groups if group is not mine]


def _joins(records: int) -> tuple[Rows, Rows]:
    return [list(range(records))], [list(range(records - 1))]


def _ones(records: int) -> tuple[Rows, Rows]:
    return [[i] for i in range(records)], [[i] for i in range(records - 1)]


_EXCHANGED, _COMPLETED = coupled_groups([0, 1, 2, 3, 4], 3, 2), coupled_groups([0, 1, 2, 3], 3, 2)
_IN_GROUPS = (
    Neighbours(pool=5, one=_EXCHANGED[0], other=_EXCHANGED[1], apart=1.5),
    Neighbours(pool=4, one=_COMPLETED[0], other=_COMPLETED[1], apart=0.99),
)
# Groups are sampled: the newcomer's is there or contributes nothing, and no other is touched.
_SWITCHED = Neighbours(pool=4, one=[[0, 1], [2, 3]], other=[[0, 1]], apart=0.99, sampling=GROUPS)
_THREE, _TWO_OF_THREE = [[1, 2, 3]], [[0, 1, 2]]
_REPLACED = Neighbours(pool=4, one=_THREE, other=[[0, 2, 3]], apart=3.0)
_JOINS = Neighbours(pool=4, one=_joins(4)[0], other=_joins(4)[1], apart=2.0)
_SWAPPED_PAIRS = Neighbours(
    pool=4, one=_THREE, other=_TWO_OF_THREE, apart=2.5, bound=lambda mechanism: 2 * mechanism.sensitivity
)

NEIGHBOURS: dict[str, tuple[Neighbours, ...]] = {
    "dp_gcl": (*_IN_GROUPS, _SWITCHED),
    "siglip_groups": (*_IN_GROUPS, _SWITCHED),
    "byol_groups": (Neighbours(pool=3, one=_ones(3)[0], other=_ones(3)[1], apart=0.99), _SWITCHED),
    "dp_mae": (Neighbours(pool=3, one=_ones(3)[0], other=_ones(3)[1], apart=0.99),),
    "dp_cap": (Neighbours(pool=3, one=_ones(3)[0], other=_ones(3)[1], apart=0.99),),
    "dp_classifier": (Neighbours(pool=3, one=_ones(3)[0], other=_ones(3)[1], apart=0.99),),
    "dp_clip": (Neighbours(pool=3, one=_joins(3)[0], other=_joins(3)[1], apart=1.5), _SWITCHED),
    "dp_sgd": (
        Neighbours(pool=3, one=_joins(3)[0], other=_joins(3)[1], apart=2.2),
        Neighbours(pool=4, one=_THREE, other=_TWO_OF_THREE, apart=3.5),
    ),
    "group_clip": (
        Neighbours(pool=6, one=[[0, 1], [2, 3], [4, 5]], other=[[0, 1], [2, 3]], apart=4.0),
        Neighbours(pool=5, one=[[0, 1], [2, 3]], other=[[0, 1], [2, 4]], apart=3.5),
    ),
    "logit_dp": (_JOINS, _SWAPPED_PAIRS),
    "logit_dp_spread_out": (_JOINS, _SWAPPED_PAIRS),
    "dpcl_simclr_rigorous": (_REPLACED,),
    "dpcl_barlow_rigorous": (_REPLACED,),
}


def _mechanism(name: str, records: int, sampling: str = RECORDS) -> Mechanism:
    """The method's, with a cap as tight as the method accepts."""
    changes: dict[str, object] = {"l2_clip_norm": CLIP, "sampling": RECORDS}
    mechanism = mechanism_of(name, records=records, **changes)
    if sampling == GROUPS:
        return dataclasses.replace(mechanism, sampling=GROUPS, group_size=2)
    if name in ("dp_sgd", "group_clip"):
        return Mechanism(**{**mechanism.__dict__, "batch_cap": records})
    return mechanism


def _slow_sum(mechanism: Mechanism, x: Tensor, rows: Rows) -> Tensor:
    step = Step(mechanism=mechanism, model=SLOW, views=x[torch.tensor(rows)], target=SLOW_TARGET, graph=True)
    return clipped_sum(step, CASES[mechanism.method].terms)


def _shift(mechanism: Mechanism, x: Tensor, case: Neighbours) -> float:
    one, other = (
        rule_sum(mechanism, MODEL, x[torch.tensor(rows)].float(), (), TARGET)
        for rows in (case.one, case.other)
    )
    return float((one - other).norm())


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in NEIGHBOURS.items() for case in cases]
)
def test_proven_sensitivity_holds_for_the_worst_neighbours_found(name: str, case: Neighbours) -> None:
    mechanism = _mechanism(name, case.num_records, case.sampling)

    def distance(x: Tensor) -> Tensor:
        return (_slow_sum(mechanism, x, case.one) - _slow_sum(mechanism, x, case.other)).norm() / CLIP

    x = farthest(distance, (case.pool, CASES[name].shape[2], 3), enough=case.apart, starts=1, steps=15)
    shift = _shift(mechanism, x, case)
    assert shift > case.apart * CLIP
    assert shift <= case.bound(mechanism)


@pytest.mark.parametrize("name", list(NEIGHBOURS))
def test_proven_sensitivity_holds_for_random_neighbours_of_any_scale(name: str) -> None:
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        for case in NEIGHBOURS[name]:
            mechanism = _mechanism(name, case.num_records, case.sampling)
            x = torch.randn(case.pool, CASES[name].shape[2], 3, generator=generator)
            x = x * 10 ** (3 * torch.rand(case.pool, 1, 1, generator=generator) - 1.5)
            assert _shift(mechanism, x, case) <= case.bound(mechanism)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("num_records", [1, 2, 3, 4, 5])
def test_coupled_groups_without_the_newcomer_have_the_law_of_the_grouper(num_records: int, size: int) -> None:
    newcomer, orders = num_records - 1, math.factorial(num_records)
    law: Counter[Groups] = Counter()
    for order in itertools.permutations(range(num_records)):
        _, without = coupled_groups(order, newcomer, size)
        law[frozenset(frozenset(group) for group in without)] += 1
    expected = grouping_law(list(range(num_records - 1)), size)
    assert {groups: Fraction(count, orders) for groups, count in law.items()} == expected


@pytest.mark.parametrize("num_records", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["dp_gcl", "siglip_groups"])
def test_wherever_a_record_lands_coupled_groups_move_the_sum_within_the_sensitivity(
    name: str, num_records: int
) -> None:
    mechanism = _mechanism(name, num_records)
    x = torch.randn(num_records, 3, 3, generator=torch.Generator().manual_seed(num_records))
    for newcomer in range(num_records):
        one, other = coupled_groups(range(num_records), newcomer, 2)
        sums = [
            rule_sum(mechanism, MODEL, x[torch.tensor(rows)]) if rows else torch.zeros(9)
            for rows in (one, other)
        ]
        assert float((sums[0] - sums[1]).norm()) <= mechanism.sensitivity


def test_neighbours_of_sampled_records_exceed_the_sensitivity_of_sampled_groups() -> None:
    """C is true because groups are sampled: with records it would be too little."""
    groups = _mechanism("dp_gcl", 4, GROUPS)
    pools = [torch.randn(5, 3, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    assert max(_shift(groups, x, _IN_GROUPS[0]) for x in pools) > 1.2 * groups.sensitivity
    assert max(_shift(groups, x, _SWITCHED) for x in pools) <= groups.sensitivity


def test_every_method_that_claims_a_bound_has_neighbours() -> None:
    assert set(NEIGHBOURS) == {name for name in TRAINING if METHODS[name].label == "proven"}


@pytest.mark.parametrize("batch_size", [4, 8])
def test_published_bound_of_simclr_is_exceeded_at_the_same_released_similarities(batch_size: int) -> None:
    mechanism = mechanism_of("dpcl_simclr", records=batch_size, l2_clip_norm=1e-5)
    std = NOISE * 4 * math.sqrt(2 * batch_size - 1)
    sums = []
    for sign in (1.0, -1.0):
        inputs, normals = simclr_counterexample(batch_size, sign, temperature=TAU, noise_std=std)
        sums.append(rule_sum(mechanism, LinearEncoder(2, unit=False), inputs, [normals]))
    shift = float((sums[0] - sums[1]).norm())
    rigorous = mechanism_of("dpcl_simclr_rigorous", records=batch_size, l2_clip_norm=1e-5).sensitivity
    assert 3 * mechanism.sensitivity < shift <= rigorous


@pytest.mark.parametrize("batch_size", [4, 8])
def test_published_bound_of_barlow_twins_is_exceeded_at_the_same_released_statistics(batch_size: int) -> None:
    mechanism = mechanism_of("dpcl_barlow", records=batch_size, l2_clip_norm=1e-5)
    sums = []
    for sign in (1.0, -1.0):
        inputs, *normals = barlow_counterexample(
            batch_size, sign, mean_std=NOISE * 2 / batch_size, square_std=NOISE * 6
        )
        sums.append(rule_sum(mechanism, LinearEncoder(2, unit=False), inputs, normals))
    shift = float((sums[0] - sums[1]).norm())
    rigorous = mechanism_of("dpcl_barlow_rigorous", records=batch_size, l2_clip_norm=1e-5).sensitivity
    assert 2.9 * mechanism.sensitivity < shift <= rigorous
