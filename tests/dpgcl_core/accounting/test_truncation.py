"""Capped samplers: their exact laws by enumeration, and their accounting against brute force.

The mechanism that is brute-forced sums +1 for the record at hand and −1 for every other one, so a record
that joins moves the sum by Δ = 1 and a swap moves it by 2.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray
from scipy import stats

from dpgcl_core.accounting.composition import CALIBRATION_TOLERANCE, epsilon_pld, poisson_gaussian_event
from dpgcl_core.accounting.fixed_size_accounting import FixedSizeGaussians, calibrate_fixed_size
from dpgcl_core.accounting.truncation import added_delta
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.sampling.fixed_size import FixedSizeSampler
from dpgcl_core.sampling.groups import BATCH
from dpgcl_core.sampling.truncated import TruncatedPoissonSampler

Law = dict[tuple[int, ...], Fraction]
GRID = 1e-3


class _Scripted:
    """Draws that say which records join and in which order they are permuted."""

    def __init__(self, joins: tuple[bool, ...], order: tuple[int, ...]) -> None:
        self._joins, self._order = joins, order

    def random(self, size: int, /) -> NDArray[np.float64]:
        return np.where(self._joins, 0.0, 1 - 2**-53)

    def permutation(self, x: NDArray[np.int64], /) -> NDArray[np.int64]:
        return x[list(self._order)]

    def standard_normal(self, size: int, /) -> NDArray[np.float64]:
        raise AssertionError("a sampler draws no normals")


@cache
def _truncated_law(sampling_prob: Fraction, batch_cap: int, num_records: int) -> Law:
    """The exact law of what `TruncatedPoissonSampler` returns: all inclusions times all permutations."""
    sampler = TruncatedPoissonSampler(sampling_prob=float(sampling_prob), batch_cap=batch_cap)
    law: Counter[tuple[int, ...]] = Counter()
    for joins in itertools.product((False, True), repeat=num_records):
        count = sum(joins)
        weight = sampling_prob**count * (1 - sampling_prob) ** (num_records - count)
        for order in itertools.permutations(range(count)):
            sample = sampler.sample(num_records, _Scripted(joins, order))
            law[tuple(sample.tolist())] += weight / math.factorial(count)
    return dict(law)


@cache
def _fixed_size_law(batch_size: int, num_records: int) -> Law:
    sampler, law = FixedSizeSampler(batch_size=batch_size), Counter()
    for order in itertools.permutations(range(num_records)):
        sample = sampler.sample(num_records, _Scripted((), order))
        law[tuple(sample.tolist())] += Fraction(1, math.factorial(num_records))
    return dict(law)


@pytest.mark.parametrize("batch_cap", [1, 2, 3, 5])
def test_truncated_sampler_has_the_exact_law(batch_cap: int) -> None:
    q, n = Fraction(3, 10), 5
    law = _truncated_law(q, batch_cap, n)
    assert sum(law.values()) == 1
    for size in range(batch_cap):
        for subset in itertools.combinations(range(n), size):
            assert law[subset] == q**size * (1 - q) ** (n - size)
    for subset in itertools.combinations(range(n), batch_cap):
        assert law[subset] == sum(
            math.comb(n - batch_cap, k - batch_cap) * q**k * (1 - q) ** (n - k) / math.comb(k, batch_cap)
            for k in range(batch_cap, n + 1)
        )


def test_truncated_sampler_without_the_new_record_has_the_law_of_the_smaller_data_set() -> None:
    """With records 0…3 and r = 4: given that r is not in the batch **and was not drawn**, nothing differs."""
    q = Fraction(3, 10)
    smaller, larger = _truncated_law(q, 2, 4), _truncated_law(q, 2, 5)
    without = {batch: p for batch, p in larger.items() if 4 not in batch}
    # r was drawn but cut off in what remains; both parts have uniform subsets, so batches of a full size
    # are more likely than (1 − q) times before, and smaller ones exactly that.
    for batch, p in without.items():
        assert p == (1 - q) * smaller[batch] if len(batch) < 2 else p > (1 - q) * smaller[batch]


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_fixed_size_sampler_is_uniform_over_subsets(batch_size: int) -> None:
    law = _fixed_size_law(batch_size, 4)
    assert set(law) == set(itertools.combinations(range(4), batch_size))
    assert set(law.values()) == {Fraction(1, math.comb(4, batch_size))}


X = np.linspace(-20, 14, 3401)  # spacing 0.01: smooth integrands, so sums are integrals to 1e-10


def _density(law: Law, values: list[int], std: float) -> NDArray[np.float64]:
    density = np.zeros_like(X)
    for batch, p in law.items():
        density += float(p) * stats.norm.pdf(X, sum(values[r] for r in batch), std)
    return density * (X[1] - X[0])


def _true_delta(epsilon: float, q: Fraction, cap: int, num_records: int, std: float = 1.0) -> float:
    """δ between N records and N − 1, the worse direction, from the sampler's enumerated laws."""
    others = [-1] * (num_records - 1)
    without = _density(_truncated_law(q, cap, num_records - 1), others, std)
    with_it = _density(_truncated_law(q, cap, num_records), [*others, 1], std)
    return max(
        float(np.clip(a - math.exp(epsilon) * b, 0, None).sum())
        for a, b in ((without, with_it), (with_it, without))
    )


def _plain_delta(epsilon: float, q: float, noise_multiplier: float = 1.0, num_steps: int = 1) -> float:
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, GRID)
    event = poisson_gaussian_event(sampling_prob=q, noise_multiplier=noise_multiplier, num_steps=num_steps)
    return float(accountant.compose(event).get_delta(epsilon))


def test_plain_poisson_accounting_of_a_truncated_sample_is_too_low() -> None:
    truth, plain = _true_delta(2.0, Fraction(3, 5), 2, 6), _plain_delta(2.0, 0.6)
    assert truth == pytest.approx(0.0222, abs=5e-5)
    assert plain == pytest.approx(0.0042, abs=5e-5)


@pytest.mark.parametrize("cap", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("q", "epsilon"), [(Fraction(3, 5), 2.0), (Fraction(1, 5), 0.5), (Fraction(1, 50), 3.0)]
)
def test_added_delta_covers_the_truth_of_every_data_set_up_to_the_public_number(
    cap: int, q: Fraction, epsilon: float
) -> None:
    claimed = _plain_delta(epsilon, float(q)) + _added_delta(6, float(q), cap)
    for num_records in range(1, 7):
        assert _true_delta(epsilon, q, cap, num_records) <= claimed


def _added_delta(num_records: int, q: float, cap: int, num_steps: int = 1) -> float:
    return added_delta(num_records_public=num_records, sampling_prob=q, batch_cap=cap, num_steps=num_steps)


def _true_two_step_delta(epsilon: float, q: Fraction, cap: int, num_records: int) -> float:
    others = [-1] * (num_records - 1)
    without = _density(_truncated_law(q, cap, num_records - 1), others, 1.0)[::3] * 3
    with_it = _density(_truncated_law(q, cap, num_records), [*others, 1], 1.0)[::3] * 3
    a, b = np.outer(with_it, with_it), np.outer(without, without)
    return max(float(np.clip(p - math.exp(epsilon) * r, 0, None).sum()) for p, r in ((a, b), (b, a)))


def test_added_delta_covers_what_plain_accounting_of_two_steps_leaves_out() -> None:
    q, cap, epsilon = Fraction(1, 10), 1, 1.0
    truth = _true_two_step_delta(epsilon, q, cap, 3)
    plain = _plain_delta(epsilon, float(q), num_steps=2)
    assert plain < truth <= plain + _added_delta(3, float(q), cap, num_steps=2)


def test_method_with_a_cap_charges_plain_steps_at_what_is_left_of_delta() -> None:
    mechanism = Mechanism(
        num_records_public=1000,
        sampling_prob=0.1,
        group_size=BATCH,
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        num_steps=2,
        target_delta=1e-3,
        method="logit_dp",
        batch_cap=150,
        temperature=0.5,
    )
    left = 1e-3 - 2 * float(stats.binom.sf(149, 1050, 0.1))  # 5 % more records than declared
    event = poisson_gaussian_event(sampling_prob=0.1, noise_multiplier=1.0, num_steps=2)
    assert mechanism.epsilon() != pytest.approx(epsilon_pld(event, 1e-3), rel=1e-9)
    assert mechanism.epsilon() == pytest.approx(epsilon_pld(event, left), rel=1e-9)


def test_added_delta_counts_samples_from_the_cap_on() -> None:
    reached = sum(math.comb(6, k) for k in range(2, 7)) / 2**6
    assert _added_delta(6, 0.5, 2, num_steps=3) == pytest.approx(3 * reached, rel=1e-12)


def test_truncation_that_never_happens_costs_nothing() -> None:
    assert _added_delta(100, 0.1, 101, num_steps=5) == 0
    assert _added_delta(100, 0.1, 100, num_steps=5) < 1e-90


def _fixed(noise: float = 2.0, num_mechanisms: int = 3) -> FixedSizeGaussians:
    return FixedSizeGaussians(
        num_records=60_000,
        batch_size=512,
        noise_multiplier=noise,
        num_mechanisms=num_mechanisms,
        num_steps=1000,
    )


def test_mechanisms_on_one_sample_cost_more_than_amplified_apart() -> None:
    apart = dp_event.SampledWithoutReplacementDpEvent(60_000, 512, dp_event.GaussianDpEvent(2.0))
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp_event.SelfComposedDpEvent(apart, 3000))
    assert accountant.get_epsilon(1e-5) == pytest.approx(2.20, abs=0.005)
    assert _fixed().epsilon(1e-5) == pytest.approx(2.55, abs=0.005)


@pytest.mark.parametrize("delta", [0.3, 0.05])
def test_fixed_size_epsilon_bounds_the_truth_of_two_mechanisms_on_one_sample(delta: float) -> None:
    """Sum of ±1 over 2 of 4 records, noised twice with std 2: replacing −1 by +1 moves each by 2."""
    what = FixedSizeGaussians(
        num_records=4, batch_size=2, noise_multiplier=1.0, num_mechanisms=2, num_steps=1
    )
    epsilon = what.epsilon(delta)
    law, sum_of = _fixed_size_law(2, 4), ([-1, -1, -1, -1], [-1, -1, -1, 1])
    grid = np.linspace(-16, 14, 601)

    def density(values: list[int]) -> NDArray[np.float64]:
        total = np.zeros((len(grid), len(grid)))
        for batch, p in law.items():
            one = stats.norm.pdf(grid, sum(values[r] for r in batch), 2.0) * (grid[1] - grid[0])
            total += float(p) * np.outer(one, one)
        return total

    p, r = (density(values) for values in sum_of)
    truth = max(float(np.clip(a - math.exp(epsilon) * b, 0, None).sum()) for a, b in ((p, r), (r, p)))
    assert 0 < truth <= delta


def test_two_gaussians_at_sigma_cost_one_at_sigma_over_root_two() -> None:
    one = _fixed(2.0 / math.sqrt(2), 1).epsilon(1e-5)
    assert _fixed(2.0, 2).epsilon(1e-5) == pytest.approx(one, rel=1e-9)


@pytest.mark.ci
def test_calibrated_fixed_size_meets_its_target() -> None:
    found = calibrate_fixed_size(_fixed(), target_epsilon=2.0, target_delta=1e-5)
    assert 2.0 * (1 - CALIBRATION_TOLERANCE) <= found.epsilon(1e-5) <= 2.0


def test_no_noise_is_no_privacy() -> None:
    assert math.isinf(_fixed(0.0).epsilon(1e-5))


def test_fixed_size_of_more_than_all_records_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most the number of records"):
        FixedSizeSampler(batch_size=4).sample(3, np.random.default_rng())
    with pytest.raises(ConfigError, match="batch_size must be from 1"):
        FixedSizeGaussians(num_records=3, batch_size=4, noise_multiplier=1.0, num_mechanisms=1, num_steps=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_records_public", 0), ("sampling_prob", 0.0), ("batch_cap", 0), ("num_steps", -1)],
)
def test_added_delta_refuses_numbers_out_of_range(field: str, value: float) -> None:
    numbers = {"num_records_public": 10, "sampling_prob": 0.5, "batch_cap": 2, "num_steps": 1}
    with pytest.raises(ConfigError, match=field):
        added_delta(**(numbers | {field: value}))  # type: ignore[arg-type]
