"""Sampled groups on small data sets: the exact law of a step against its claim, and each wrong one caught.

Contributions are numbers in [−C, C], so a release is a mixture of normal laws on the line. Both worlds are
enumerated: every cut of the slots into blocks, every set of kept ones. Their hockey-stick divergence is
integrated numerically and compared, in each direction and at several ε, with that of the pair
((1 − q)·N(0) + q·N(C), N(0)), which has a closed form. No proof is trusted: what the module says voids the
argument must show here as a violation.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dpgcl_core.errors import ConfigError
from dpgcl_core.noise.chacha20 import SecureGenerator
from dpgcl_core.noise.randomness import Draws, SeededNonPrivateRandomness
from dpgcl_core.sampling.slots import (
    MOST_BLOCKS_LOST,
    SampledGroups,
    ShardedGroups,
    distinct,
    empty_step_prob,
    most_empty,
    shard_ranges,
    share_lost,
)

EMPTY = None
R = 9
"""The record that one world has and the other has not."""
Slots = tuple[int | None, ...]
Block = tuple[int | None, ...]
Blocks = tuple[Block, ...]
Law = dict[tuple[object, float, float], float]
"""(what is visible besides, mean, std) → probability, C = 1."""
Term = Callable[[Block], float]
Scheme = Callable[[Slots, int, float, Term], Law]

EPSILONS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
EXACT = 1e-5
"""What the integration may be wrong by."""


# Enumeration


@cache
def cuts(num_slots: int, size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Every way to cut slots into ⌊N/S⌋ blocks, in no order; all are equally likely."""

    def blocks(left: tuple[int, ...], spare: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        if len(left) < size:
            yield ()
            return
        first, rest = left[0], left[1:]
        for others in itertools.combinations(rest, size - 1):
            remaining = tuple(slot for slot in rest if slot not in others)
            for found in blocks(remaining, spare):
                yield ((first, *others), *found)
        if spare:  # the slot is in no block
            yield from blocks(rest, spare - 1)

    return tuple(blocks(tuple(range(num_slots)), num_slots % size))


def kept_sets(slots: Slots, size: int, q: float) -> Iterator[tuple[float, Blocks, Blocks]]:
    """Every (probability, blocks that are kept, all blocks), as their slots are filled."""
    ways = cuts(len(slots), size)
    for cut in ways:
        blocks = tuple(tuple(slots[slot] for slot in block) for block in cut)
        for bits in itertools.product((False, True), repeat=len(blocks)):
            probability = math.prod(q if bit else 1 - q for bit in bits) / len(ways)
            if probability:
                yield probability, tuple(itertools.compress(blocks, bits)), blocks


def law_of(outcomes: Iterator[tuple[float, object, float, float]]) -> Law:
    law: Law = Counter()  # type: ignore[assignment]
    for probability, seen, mean, std in outcomes:
        law[seen, round(mean, 12), std] += probability
    return law


def complete(blocks: Blocks) -> Blocks:
    return tuple(block for block in blocks if EMPTY not in block)


def as_written(slots: Slots, size: int, q: float, term: Term) -> Law:
    """Blocks are kept independently, and those with an empty slot contribute zero."""
    return law_of(
        (probability, "", sum(map(term, complete(kept))), 1.0)
        for probability, kept, _ in kept_sets(slots, size, q)
    )


def terms(kind: str, seed: int) -> Term:
    """A number for every block's records, whatever their order."""

    def term(block: Block) -> float:
        members = sorted(record for record in block if record is not EMPTY)
        if kind == "of r alone":
            return (-1.0) ** seed if R in members else 0.0
        drawn = np.random.default_rng([seed, *members]).uniform(-1, 1)
        return drawn if kind == "random" else math.copysign(1.0, drawn)

    return cache(term)


# The divergence, and the claim


def hockey_stick(one: Law, other: Law, epsilon: float, sigma: float) -> float:
    """∫ max(0, p − e^ε·q), over each of the visible outcomes."""
    total = 0.0
    for seen in {key[0] for key in (*one, *other)}:
        parts = [{key[1:]: law[key] for key in law if key[0] == seen} for law in (one, other)]
        means, stds = zip(*(key for part in parts for key in part), strict=True)
        step, wide = sigma * min(stds) / 40, 8 * sigma * max(stds)
        x = np.arange(min(means) - wide, max(means) + wide, step)
        p, q = (_density(part, x, sigma) for part in parts)
        total += _positive_part(p - math.exp(epsilon) * q) * step
    return total


def _density(
    law: dict[tuple[float, float], float], x: NDArray[np.float64], sigma: float
) -> NDArray[np.float64]:
    if not law:
        return np.zeros_like(x)
    means, stds = (np.array(column)[:, None] for column in zip(*law, strict=True))
    weights = np.array(list(law.values())) / (math.sqrt(2 * math.pi) * sigma * stds[:, 0])
    found: NDArray[np.float64] = weights @ np.exp(-(((x - means) / (sigma * stds)) ** 2) / 2)
    return found


def _positive_part(values: NDArray[np.float64]) -> float:
    """The integral of what is above zero of the line through the values, at distance 1."""
    a, b = values[:-1], values[1:]
    high, low = np.maximum(a, b), np.minimum(a, b)
    crossing = (low < 0) & (high > 0)
    part = np.where(low >= 0, (a + b) / 2, 0.0)
    part[crossing] = high[crossing] ** 2 / (2 * (high - low)[crossing])
    return float(part.sum())


def claimed(q: float, sigma: float, epsilon: float, *, with_r_first: bool) -> float:
    """δ(ε) of ((1 − q)·N(0) + q·N(C), N(0)), or of the two exchanged; all ε are allowed."""
    above = stats.norm.sf
    if with_r_first:
        ratio = (math.exp(epsilon) - 1 + q) / q
        at = sigma**2 * math.log(ratio) + 0.5 if ratio > 0 else -math.inf
        mixed = (1 - q) * above(at / sigma) + q * above((at - 1) / sigma)
        return float(mixed - math.exp(epsilon) * above(at / sigma))
    ratio = (math.exp(-epsilon) - 1 + q) / q
    if ratio <= 0:
        return 0.0
    at = sigma**2 * math.log(ratio) + 0.5
    mixed = (1 - q) * above(-at / sigma) + q * above(-(at - 1) / sigma)
    return float(above(-at / sigma) - math.exp(epsilon) * mixed)


def violation(with_r: Law, without: Law, q: float, sigma: float, *, stated: float | None = None) -> float:
    """By how much the claim is exceeded at most, in δ, over all ε and both directions.

    The noise is σ·C; the claim is for a noise multiplier `stated`, σ unless given.
    """
    return max(
        hockey_stick(*pair, epsilon, sigma) - claimed(q, stated or sigma, epsilon, with_r_first=with_r_first)
        for epsilon in EPSILONS
        for with_r_first, pair in ((True, (with_r, without)), (False, (without, with_r)))
    )


def worlds(num_slots: int, num_empty: int, row: int = 0) -> tuple[Slots, Slots]:
    """D' = D ∪ {r} with empty slots, and D with one more: r's."""
    others: list[int | None] = list(range(num_slots - num_empty - 1))
    tail = [EMPTY] * num_empty
    return (*others[:row], R, *others[row:], *tail), (*others[:row], EMPTY, *others[row:], *tail)


SETTINGS = [(0.1, 0.4), (0.3, 1.0), (0.6, 2.0), (1.0, 0.7), (0.1, 1.0), (0.5, 0.5)]
"""(q, σ)."""
TERMS = [("random", 0), ("random", 1), ("extreme", 0), ("extreme", 1), ("of r alone", 0), ("of r alone", 1)]


# The scheme as it is


@pytest.mark.parametrize("num_empty", [0, 1, 2])
@pytest.mark.parametrize(
    ("size", "num_slots"), [(2, 3), (2, 4), (2, 5), (2, 6), (3, 3), (3, 4), (3, 5), (3, 6)]
)
def test_no_law_of_a_step_exceeds_the_claim(size: int, num_slots: int, num_empty: int) -> None:
    shift = size + num_slots + num_empty
    for turn, (kind, seed) in enumerate(TERMS):
        for q, sigma in (SETTINGS[(shift + turn) % 6], SETTINGS[(shift + turn + 2) % 6]):
            laws = [as_written(each, size, q, terms(kind, seed)) for each in worlds(num_slots, num_empty)]
            assert violation(laws[0], laws[1], q, sigma) < EXACT


@pytest.mark.parametrize(("q", "sigma"), SETTINGS)
def test_claim_is_reached_where_no_slot_is_empty(q: float, sigma: float) -> None:
    """A smaller sensitivity, or a smaller q, would be refuted by the same check."""
    laws = [as_written(each, 2, q, terms("of r alone", 0)) for each in worlds(4, 0)]
    assert violation(laws[0], laws[1], q, sigma) == pytest.approx(0.0, abs=EXACT)
    assert violation(laws[0], laws[1], q, sigma, stated=1.25 * sigma) > 1e-3
    assert violation(laws[0], laws[1], 0.7 * q, sigma) > 1e-3


@pytest.mark.parametrize("size", [2, 3])
def test_zeroing_any_record_out_keeps_the_claim_where_the_number_is_public(size: int) -> None:
    """N = n: all slots are filled, and any of the records may be blank."""
    records = tuple(range(5))
    for record, (kind, seed), (q, sigma) in itertools.product(
        records, (("random", 2), ("extreme", 3)), SETTINGS[:3]
    ):
        blank = tuple(EMPTY if each == record else each for each in records)
        laws = [as_written(each, size, q, terms(kind, seed)) for each in (records, blank)]
        assert violation(laws[0], laws[1], q, sigma) < EXACT


def _fixed_slots(slots: Slots, size: int, q: float, term: Term) -> Law:
    """The placement is the same at every step, and known: slot by slot."""
    blocks = [slots[start : start + size] for start in range(0, len(slots) - size + 1, size)]
    return law_of(
        (
            math.prod(q if bit else 1 - q for bit in bits),
            "",
            sum(map(term, complete(tuple(itertools.compress(blocks, bits))))),
            1.0,
        )
        for bits in itertools.product((False, True), repeat=len(blocks))
    )


def _two_shards(slots: Slots, size: int, q: float, term: Term) -> Law:
    """Two workers keep blocks of their own ranges of slots, by a table that is known; the noise is one."""
    parts = [slots[part.start : part.stop] for part in shard_ranges(len(slots), 2)]
    return _summed(*(as_written(part, size, q, term) for part in parts))


def _two_shards_of_any_table(slots: Slots, size: int, q: float, term: Term) -> Law:
    """The same, by a table that is drawn: every set of places is the first range as often."""
    first = list(itertools.combinations(range(len(slots)), len(shard_ranges(len(slots), 2)[0])))
    law: Law = Counter()  # type: ignore[assignment]
    for places in first:
        rest = [place for place in range(len(slots)) if place not in places]
        for key, weight in _two_shards(tuple(slots[i] for i in (*places, *rest)), size, q, term).items():
            law[key] += weight / len(first)
    return law


def _summed(one: Law, other: Law) -> Law:
    return law_of(
        (p * w, "", mean + more, 1.0) for (_, mean, _), p in one.items() for (_, more, _), w in other.items()
    )


@pytest.mark.parametrize("scheme", [_fixed_slots, _two_shards, _two_shards_of_any_table])
def test_known_slots_and_ranges_of_slots_keep_the_claim(scheme: Scheme) -> None:
    assert found_violation(scheme) < EXACT


@pytest.mark.parametrize(("size", "num_slots"), [(2, 5), (2, 7), (3, 7)])
@pytest.mark.parametrize("num_empty", [0, 1])
def test_shards_of_different_sizes_keep_the_claim_whichever_holds_the_record(
    size: int, num_slots: int, num_empty: int
) -> None:
    for turn, row in enumerate(range(num_slots - num_empty)):
        (kind, seed), (q, sigma) = TERMS[turn % 6], SETTINGS[(turn + size) % 6]
        laws = [_two_shards(each, size, q, terms(kind, seed)) for each in worlds(num_slots, num_empty, row)]
        assert violation(laws[0], laws[1], q, sigma) < EXACT


# The schemes that are wrong


def _incomplete_counts(slots: Slots, size: int, q: float, term: Term) -> Law:
    return law_of(
        (probability, "", sum(term(block) for block in kept if set(block) != {EMPTY}), 1.0)
        for probability, kept, _ in kept_sets(slots, size, q)
    )


def _filled_up(slots: Slots, size: int, q: float, term: Term) -> Law:
    def filled(block: Block) -> Block:
        there = [record for record in block if record is not EMPTY]
        return tuple(there[place % len(there)] for place in range(size))

    return law_of(
        (probability, "", sum(term(filled(block)) for block in kept if set(block) != {EMPTY}), 1.0)
        for probability, kept, _ in kept_sets(slots, size, q)
    )


def _fixed_number(slots: Slots, size: int, q: float, term: Term) -> Law:
    num_kept = max(1, round(q * (len(slots) // size)))
    found = [
        (1.0, "", sum(map(term, complete(chosen))), 1.0)
        for cut in cuts(len(slots), size)
        for chosen in itertools.combinations(
            [tuple(slots[slot] for slot in block) for block in cut], num_kept
        )
    ]
    return law_of((each[0] / len(found), *each[1:]) for each in found)


def _complete_ones_fill_in(slots: Slots, size: int, q: float, term: Term) -> Law:
    """The keep bits follow the data: complete blocks are kept more often where others are incomplete."""

    def outcomes() -> Iterator[tuple[float, object, float, float]]:
        ways = cuts(len(slots), size)
        for cut in ways:
            blocks = complete(tuple(tuple(slots[slot] for slot in block) for block in cut))
            rate = min(1.0, q * len(cut) / len(blocks)) if blocks else 0.0
            for bits in itertools.product((False, True), repeat=len(blocks)):
                probability = math.prod(rate if bit else 1 - rate for bit in bits) / len(ways)
                yield probability, "", sum(map(term, itertools.compress(blocks, bits))), 1.0

    return law_of(outcomes())


def _realised_divisor(slots: Slots, size: int, q: float, term: Term) -> Law:
    """Sum and noise over the number of groups that were kept, in place of a constant."""

    def outcomes() -> Iterator[tuple[float, object, float, float]]:
        for probability, kept, blocks in kept_sets(slots, size, q):
            scale = q * len(blocks) / max(1, len(complete(kept)))
            yield probability, "", scale * sum(map(term, complete(kept))), scale

    return law_of(outcomes())


def _known(slots: Slots, size: int, q: float, term: Term) -> Law:
    """The number of kept blocks is published."""
    return law_of(
        (probability, len(kept), sum(map(term, complete(kept))), 1.0)
        for probability, kept, _ in kept_sets(slots, size, q)
    )


def _compacted(slots: Slots, size: int, q: float, term: Term) -> Law:
    """Slot i holds the i-th record that is there."""
    there = tuple(record for record in slots if record is not EMPTY)
    return _fixed_slots((*there, *[EMPTY] * (len(slots) - len(there))), size, q, term)


def _capacity_of_the_world(slots: Slots, size: int, q: float, term: Term) -> Law:
    """N is each world's own number of records."""
    return as_written(tuple(record for record in slots if record is not EMPTY), size, q, term)


def _shards_by_hash(slots: Slots, size: int, q: float, term: Term) -> Law:
    """Two shards of the records that are there, chosen by their ids, each with its own size as capacity."""
    there = [record for record in slots if record is not EMPTY]
    parts = [tuple(record for record in there if record % 2 == shard) for shard in range(2)]
    return _summed(*(as_written(part, size, q, term) for part in parts))


def _shards_of_rows(slots: Slots, size: int, q: float, term: Term) -> Law:
    """Two shards of public capacity, each with every second row that is there, as loaders cut them."""
    there = tuple(record for record in slots if record is not EMPTY)
    parts = [(*rows, *[EMPTY] * (len(slots) // 2 - len(rows))) for rows in (there[::2], there[1::2])]
    return _summed(*(as_written(part, size, q, term) for part in parts))


def _each_worker_draws(slots: Slots, size: int, q: float, term: Term) -> Law:
    """Two workers keep blocks of all slots, each by a draw of its own, at half the probability."""
    own = as_written(slots, size, q / 2, term)
    return _summed(own, own)


WRONG = [
    _incomplete_counts,
    _filled_up,
    _fixed_number,
    _complete_ones_fill_in,
    _realised_divisor,
    _known,
    _compacted,
    _capacity_of_the_world,
    _shards_by_hash,
    _shards_of_rows,
    _each_worker_draws,
]


def found_violation(scheme: Scheme) -> float:
    """The largest violation over a few data sets."""
    found = 0.0
    for size, num_slots, num_empty, row in ((2, 4, 0, 0), (2, 4, 1, 1), (2, 6, 0, 2), (3, 6, 0, 1)):
        for (kind, seed), (q, sigma) in itertools.product(TERMS[2:5], ((0.3, 0.7), (0.5, 1.0))):
            slots = worlds(num_slots, num_empty, row)
            laws = [scheme(each, size, q, terms(kind, seed)) for each in slots]
            assert all(sum(law.values()) == pytest.approx(1.0) for law in laws)
            found = max(found, violation(laws[0], laws[1], q, sigma))
    return found


@pytest.mark.parametrize("scheme", WRONG, ids=lambda scheme: scheme.__name__.strip("_"))
def test_wrong_scheme_is_caught(scheme: Scheme) -> None:
    assert found_violation(scheme) > 1e-3


def test_worker_that_draws_for_itself_counts_a_record_twice() -> None:
    assert max(mean for _, mean, _ in _each_worker_draws((R, 0), 2, 0.5, terms("of r alone", 0))) == 2.0


@pytest.mark.parametrize(("q", "sigma"), [(0.1, 1.0), (0.3, 0.7), (0.5, 2.0)])
def test_keep_bits_of_two_steps_must_differ(q: float, sigma: float) -> None:
    """The same bits at both steps: with the same contribution, that is one step at σ/√2, not two steps."""
    laws = [as_written(each, 2, q, terms("of r alone", 0)) for each in worlds(4, 0)]
    x = np.arange(-8 * sigma, 1 + 8 * sigma, sigma / 40)
    without, with_r = (
        _density({(m, 1.0): w for m, w in law}, x, sigma) for law in ([(0.0, 1.0)], [(0.0, 1 - q), (1.0, q)])
    )
    excess = []
    for epsilon in EPSILONS:
        rest = [
            claimed(q, sigma, epsilon - math.log(b / a), with_r_first=True)
            for a, b in zip(without, with_r, strict=True)
        ]
        charged = float(np.sum(with_r * rest) * sigma / 40)  # what the second step adds, given the first
        excess.append(hockey_stick(laws[0], laws[1], epsilon, sigma / math.sqrt(2)) - charged)
    assert max(excess) > 2e-3


# The implementation


def _generators() -> list[Draws]:
    return [np.random.default_rng(5), SecureGenerator(fixed_key_for_tests=bytes(31) + b"\1")]


def _p_value(observed: Counter[object], expected: dict[object, float], num_draws: int) -> float:
    """Of a chi-square test; outcomes expected fewer than five times are taken together."""
    assert set(observed) <= set(expected)
    rare = [key for key, share in expected.items() if share * num_draws < 5]
    common = [key for key, share in expected.items() if share * num_draws >= 5]
    shares = [expected[key] for key in common] + [sum(expected[key] for key in rare)]
    counts = [observed[key] for key in common] + [sum(observed[key] for key in rare)]
    if not rare:
        shares, counts = shares[:-1], counts[:-1]
    return float(stats.chisquare(counts, num_draws * np.array(shares) / sum(shares)).pvalue)


def _drawn_law(num_slots: int, num_records: int, size: int, q: float) -> dict[object, float]:
    """The exact law of the rows that are drawn, with their mask."""
    law: Counter[object] = Counter()
    for probability, kept, _ in kept_sets(tuple(range(num_slots)), size, q):
        groups = [(_rows(block, num_records), max(block) < num_records) for block in kept]  # type: ignore[type-var, operator]
        law[tuple(sorted(groups))] += probability  # type: ignore[assignment]
    return dict(law)  # type: ignore[arg-type]


def _rows(block: Block, num_records: int) -> tuple[int, ...]:
    return tuple(sorted(slot if slot is not None and slot < num_records else 0 for slot in block))


@pytest.mark.parametrize(
    ("num_slots", "num_records", "size", "q"),
    [(5, 4, 2, 0.5), (6, 6, 3, 0.3), (6, 4, 2, 0.4), (7, 6, 3, 1.0), (8, 7, 2, 0.2), (9, 8, 2, 0.15)],
)
def test_drawn_groups_have_the_enumerated_law(num_slots: int, num_records: int, size: int, q: float) -> None:
    """In the last two cases one kept block is drawn sparsely: few of many slots."""
    stage = SampledGroups(capacity=num_slots, group_size=size, sampling_prob=q)
    expected = _drawn_law(num_slots, num_records, size, q)
    for generator in _generators():
        observed: Counter[object] = Counter()
        for _ in range(6000):
            drawn = stage.draw(num_records, sampling=generator, permutation=generator)
            rows, mask = np.sort(drawn.rows, axis=1).tolist(), drawn.complete.tolist()
            observed[tuple(sorted((tuple(row), whole) for row, whole in zip(rows, mask, strict=True)))] += 1
        assert _p_value(observed, expected, 6000) > 1e-4


@pytest.mark.parametrize(
    ("slots", "num_slots", "size", "q"),
    [
        ((6, 0, 2, 5, 3, 4), 7, 2, 0.5),
        ((3, 5, 0, 1, 4), 6, 1, 0.4),
        ((1, 4, 2, 3), 4 + 2, 3, 0.6),
        ((4, 3), 5, 2, 0.7),
    ],
)
def test_drawn_shards_have_the_enumerated_law(
    slots: tuple[int, ...], num_slots: int, size: int, q: float
) -> None:
    """In the last case no record is in the first range."""
    stage = ShardedGroups(capacity=num_slots, group_size=size, sampling_prob=q, num_shards=2)
    rows = stage.rows_of(np.array(slots))
    row_of_slot = {slot: row for row, slot in enumerate(slots)}
    law: Counter[object] = Counter({(): 1.0})  # type: ignore[dict-item]
    for own, part in zip(rows, stage.ranges, strict=True):
        instead = own[0] if len(own) else 0
        filled, longer = tuple(row_of_slot.get(slot, EMPTY) for slot in part), Counter()
        for (known, p), (w, kept, _) in itertools.product(law.items(), kept_sets(filled, size, q)):
            groups = [
                (tuple(sorted(instead if row is EMPTY else row for row in block)), EMPTY not in block)
                for block in kept
            ]
            longer[tuple(sorted([*known, *groups]))] += p * w  # type: ignore[misc, has-type]
        law = longer
    for generator in _generators():
        observed: Counter[object] = Counter()
        for _ in range(6000):
            drawn = stage.draw(rows, range(2), lambda _, generator=generator: generator)  # type: ignore[misc]
            drawn_rows, mask = np.sort(drawn.rows, axis=1).tolist(), drawn.complete.tolist()
            observed[tuple(sorted((tuple(r), whole) for r, whole in zip(drawn_rows, mask, strict=True)))] += 1
        assert _p_value(observed, dict(law), 6000) > 1e-4


def test_all_shards_at_once_are_the_shards_one_by_one() -> None:
    stage = ShardedGroups(capacity=30, group_size=3, sampling_prob=0.5, num_shards=3)
    rows = stage.rows_of(np.random.default_rng(3).permutation(30)[:28])
    assert sorted(np.concatenate(rows).tolist()) == list(range(28))
    purposes = []

    def generator(purpose: str) -> Draws:
        purposes.append(purpose)
        return SeededNonPrivateRandomness(4).generator(0, purpose)

    together = stage.draw(rows, range(3), generator)
    assert len(set(purposes)) == 2 * 3, "every range has bits and a placement of its own"
    apart = [stage.draw(rows, [shard], generator) for shard in range(3)]
    assert together.rows.tolist() == [row for each in apart for row in each.rows.tolist()]
    assert together.complete.tolist() == [bit for each in apart for bit in each.complete.tolist()]
    assert together.batch_size == sum(each.batch_size for each in apart) == together.rows.size
    for own, drawn in zip(rows, apart, strict=True):
        assert set(drawn.rows.flatten().tolist()) <= set(own.tolist())
    assert stage.draw(rows, [], generator).rows.shape == (0, 3)


def test_groups_that_fit_into_no_shard_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most 3, .* shards = 2\); got 4\. Lower group_size or shards"):
        ShardedGroups(capacity=7, group_size=4, sampling_prob=0.5, num_shards=2)


@pytest.mark.parametrize(("count", "below"), [(2, 8), (3, 4), (1, 5)])
def test_distinct_numbers_are_uniform_in_choice_and_order(count: int, below: int) -> None:
    ways = list(itertools.permutations(range(below), count))
    for generator in _generators():
        observed: Counter[object] = Counter(
            tuple(distinct(count, below, generator).tolist()) for _ in range(5000)
        )
        assert _p_value(observed, dict.fromkeys(ways, 1 / len(ways)), 5000) > 1e-4


def test_sparse_draw_is_uniform_at_every_place_and_never_repeats() -> None:
    """Collisions are frequent here: 50 of 200, of which a tenth comes twice at first."""
    for generator in _generators():
        drawn = np.array([distinct(50, 200, generator) for _ in range(1000)])
        assert all(len(set(row)) == 50 for row in drawn.tolist())
        for place in (0, 25, 49):
            assert stats.chisquare(np.bincount(drawn[:, place], minlength=200)).pvalue > 1e-4


def test_integers_of_the_stream_are_uniform_where_words_do_not_divide_evenly() -> None:
    """2^64 words over 3·2^61 numbers: without refusals the lower two thirds would come at 3/4."""
    count, size = 3 * 2**61, 8000
    drawn = SecureGenerator(fixed_key_for_tests=bytes(32)).integers(-5, count - 5, size)
    assert drawn.min() >= -5
    assert drawn.max() < count - 5
    low = int(np.count_nonzero(drawn < 2**62 - 5))
    assert stats.binomtest(low, size, 2 / 3).pvalue > 1e-4
    assert stats.binomtest(low, size, 3 / 4).pvalue < 1e-9


@pytest.mark.parametrize("below", [1, 2, 7, 256, 60_000])
def test_integers_of_the_stream_reach_all_of_their_range(below: int) -> None:
    drawn = SecureGenerator(fixed_key_for_tests=bytes(32)).integers(10, 10 + below, 20 * below)
    assert stats.chisquare(np.bincount(drawn - 10, minlength=below)).pvalue > 1e-4 or below == 1
    assert (drawn.min(), drawn.max()) == (10, 9 + below)
    assert drawn.dtype == np.int64


def test_integers_of_an_empty_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="high must be above low; got 3 and 3"):
        SecureGenerator().integers(3, 3, 1)


@pytest.mark.parametrize(("num_slots", "size", "q"), [(40, 3, 0.5), (400, 3, 0.02)])
def test_removed_record_changes_the_mask_of_its_group_and_nothing_else(
    num_slots: int, size: int, q: float
) -> None:
    """The same secrets, one record less: the same shapes and rows but for its own, whose group is masked."""
    stage = SampledGroups(capacity=num_slots, group_size=size, sampling_prob=q)
    touched = 0
    for seed in range(200):
        more, less = (
            stage.draw(
                num_records,
                sampling=np.random.default_rng([seed, 0]),
                permutation=np.random.default_rng([seed, 1]),
            )
            for num_records in (num_slots - 2, num_slots - 3)
        )
        gone = more.rows == num_slots - 3
        assert np.array_equal(np.where(gone, 0, more.rows), less.rows)
        assert np.array_equal(more.complete & ~gone.any(axis=1), less.complete)
        assert more.batch_size == less.batch_size == more.rows.size
        touched += bool((more.complete & gone.any(axis=1)).any())
    assert touched > 2


def test_more_records_than_slots_are_refused_without_their_number() -> None:
    stage = SampledGroups(capacity=10, group_size=2, sampling_prob=0.5)
    with pytest.raises(ConfigError, match="num_records_public = 10") as raised:
        stage.draw(11, sampling=np.random.default_rng(), permutation=np.random.default_rng())
    assert "11" not in str(raised.value)


@pytest.mark.parametrize(("capacity", "size"), [(8, 2), (9, 4), (30, 3), (5, 5)])
def test_share_lost_is_that_of_the_blocks_with_an_empty_slot(capacity: int, size: int) -> None:
    for num_empty in range(capacity + 1):
        whole = math.comb(capacity - num_empty, size) / math.comb(capacity, size)
        assert share_lost(capacity, num_empty, size) == pytest.approx(1 - whole)
    most = most_empty(capacity, size)
    assert most == max(1, *(e for e in range(capacity) if share_lost(capacity, e, size) <= MOST_BLOCKS_LOST))


def test_empty_steps_are_as_frequent_as_said() -> None:
    stage = SampledGroups(capacity=20, group_size=4, sampling_prob=0.2)
    generator = np.random.default_rng(3)
    draws = [len(stage.draw(20, sampling=generator, permutation=generator)) for _ in range(4000)]
    assert stats.binomtest(draws.count(0), 4000, empty_step_prob(20, 4, 0.2)).pvalue > 1e-4
