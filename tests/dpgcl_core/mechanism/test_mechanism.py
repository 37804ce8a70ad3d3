"""The one frozen object: its parts agree, its rules hold."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from dp_accounting import dp_event
from scipy import stats

from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.numbers import GROUPS, RECORDS, default_delta
from dpgcl_core.noise.randomness import SecretRandomness, SeededNonPrivateRandomness
from dpgcl_core.sampling.groups import expected_dropped_share, expected_num_groups
from dpgcl_core.sampling.slots import SampledGroups, ShardedGroups


def _mechanism(**changes: object) -> Mechanism:
    values: dict[str, object] = {
        "num_records_public": 1000,
        "sampling_prob": 0.1,
        "group_size": 4,
        "l2_clip_norm": 0.5,
        "noise_multiplier": 1.5,
        "num_steps": 20,
        "target_delta": 1e-4,
    }
    return Mechanism(**(values | changes))  # type: ignore[arg-type]


BOTH = pytest.mark.parametrize("sampling", [GROUPS, RECORDS])


def _factor(sampling: str) -> int:
    """The sensitivity in units of C, for groups of at least two."""
    return 1 if sampling == GROUPS else 2


def test_event_and_sampler_share_the_sampling_probability() -> None:
    mechanism = _mechanism(sampling=RECORDS)
    event = mechanism.dp_event()
    assert isinstance(event, dp_event.SelfComposedDpEvent)
    assert event.count == mechanism.num_steps
    assert event.event.sampling_probability == mechanism.sampler().sampling_prob
    assert event.event.event.noise_multiplier == mechanism.noise_multiplier
    groups = _mechanism(sampling=GROUPS)
    assert groups.dp_event() == event
    assert groups.group_stage().sampling_prob == event.event.sampling_probability


@pytest.mark.parametrize("num_shards", [2, 3, 7])
def test_shards_change_the_number_of_blocks_and_nothing_of_the_claim(num_shards: int) -> None:
    one, sharded = _mechanism(), _mechanism(num_shards=num_shards)
    assert sharded.dp_event() == one.dp_event()
    assert sharded.sensitivity == one.sensitivity
    stage = sharded.group_stage()
    assert isinstance(stage, ShardedGroups)
    assert stage.sampling_prob == one.sampling_prob
    assert sharded.divisor == pytest.approx(0.1 * sum(len(slots) // 4 for slots in stage.ranges))
    sizes = [len(slots) for slots in stage.ranges]
    assert (len(sizes), sum(sizes), max(sizes) - min(sizes) <= 1) == (num_shards, 1000, True)


def test_groups_are_sampled_unless_the_whole_batch_is_one() -> None:
    assert _mechanism().sampling == GROUPS
    assert _mechanism().group_stage() == SampledGroups(capacity=1000, group_size=4, sampling_prob=0.1)
    assert _mechanism(group_size="batch").sampling == RECORDS
    assert _mechanism(method="dp_clip", group_size=20, sampling=GROUPS).sensitivity == 0.5


@pytest.mark.parametrize(("group_size", "expected"), [(1, 0.5), (2, 1.0), (16, 1.0), ("batch", 1.0)])
def test_sensitivity_of_sampled_records_is_2c_except_for_groups_of_one(
    group_size: object, expected: float
) -> None:
    assert _mechanism(group_size=group_size, sampling=RECORDS).sensitivity == expected


@pytest.mark.parametrize("group_size", [1, 2, 16])
def test_sensitivity_of_sampled_groups_is_c(group_size: int) -> None:
    assert _mechanism(group_size=group_size).sensitivity == 0.5


@BOTH
def test_noise_std_is_the_multiplier_times_the_sensitivity(sampling: str) -> None:
    mechanism = _mechanism(sampling=sampling)
    draw = mechanism.noise().draw(200_000, SecretRandomness().generator(0, "noise")).double()
    expected = mechanism.noise_multiplier * _factor(sampling) * mechanism.l2_clip_norm
    error = expected / math.sqrt(2 * len(draw))
    assert abs(float(draw.std()) - expected) < 5 * error
    assert abs(float(draw.std()) - expected / 2) > 5 * error  # noise scaled to half of it is rejected
    assert abs(float(draw.std()) - expected * 2) > 5 * error
    assert abs(float(draw.mean())) < 5 * expected / math.sqrt(len(draw))


@BOTH
def test_noise_of_the_sum_is_not_divided(sampling: str) -> None:
    mechanism = _mechanism(sampling=sampling)
    assert mechanism.noise().std == pytest.approx(1.5 * 0.5 * _factor(sampling))
    assert mechanism.divisor > 1


def test_noise_is_uncorrelated_across_tensors_and_steps() -> None:
    noise, source = _mechanism().noise(), SecretRandomness()
    first = noise.draw(40_000, source.generator(0, "noise"))
    second = noise.draw(40_000, source.generator(0, "noise"))
    halves = np.corrcoef(first[:20_000], first[20_000:])[0, 1]
    steps = np.corrcoef(first, second)[0, 1]
    assert abs(halves) < 5 / math.sqrt(20_000)
    assert abs(steps) < 5 / math.sqrt(40_000)
    assert stats.kstest(first.numpy() / noise.std, "norm").pvalue > 1e-4


def test_seeded_randomness_repeats_and_secret_randomness_does_not() -> None:
    seeded = [SeededNonPrivateRandomness(3).generator(7, "sampling").random() for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert seeded[0] != SeededNonPrivateRandomness(3).generator(7, "noise").random()
    assert seeded[0] != SeededNonPrivateRandomness(3).generator(8, "sampling").random()
    secret = [SecretRandomness().generator(7, "sampling").random() for _ in range(2)]
    assert secret[0] != secret[1]


def test_secret_generators_carry_256_bits_of_entropy() -> None:
    for _ in range(8):
        sequence = SecretRandomness().generator(0, "noise").bit_generator.seed_seq
        assert sequence.pool_size == 8
        assert sequence.entropy.bit_length() > 200  # shorter by chance once in 2^56 draws


@pytest.mark.parametrize("sampling_prob", [0.02, 0.3])
def test_inclusion_rate_is_the_sampling_probability(sampling_prob: float) -> None:
    mechanism = _mechanism(sampling_prob=sampling_prob)
    generator = SecretRandomness().generator(0, "sampling")
    draws = [len(mechanism.sampler().sample(1000, generator)) for _ in range(300)]
    error = math.sqrt(sampling_prob * (1 - sampling_prob) / 300_000)
    assert abs(np.mean(draws) / 1000 - sampling_prob) < 5 * error
    assert abs(np.mean(draws) / 1000 - 1.2 * sampling_prob) > 5 * error  # a wrong rate is rejected
    assert stats.chisquare(*_binned(draws, sampling_prob)).pvalue > 1e-5  # as a Binomial, not a fixed size


def _binned(draws: list[int], sampling_prob: float) -> tuple[np.ndarray, np.ndarray]:
    law = stats.binom(1000, sampling_prob)
    edges = np.array([-np.inf, *law.ppf([0.2, 0.4, 0.6, 0.8]), np.inf])
    observed = np.histogram(draws, bins=np.where(np.isfinite(edges), edges + 0.5, edges))[0]
    return observed, 300 * np.diff(law.cdf(edges))


def test_divisor_of_sampled_groups_is_the_expected_number_of_kept_blocks() -> None:
    assert _mechanism().divisor == pytest.approx(0.1 * 250)
    assert _mechanism(group_size=3).divisor == pytest.approx(0.1 * 333)  # the last slot is in no block


def test_divisor_is_a_public_constant_of_the_declared_size() -> None:
    mechanism = _mechanism(sampling=RECORDS)
    law = stats.binom(1000, 0.1)
    counts = np.arange(1001)
    assert mechanism.divisor == pytest.approx(np.sum(counts // 4 * law.pmf(counts)))
    assert expected_num_groups(1000, 0.1, "batch") == pytest.approx(1 - 0.9**1000)


def test_dropped_share_counts_the_remainder() -> None:
    law = stats.binom(500, 0.2)
    counts = np.arange(501)
    assert expected_dropped_share(500, 0.2, 64) == pytest.approx(np.sum(counts % 64 * law.pmf(counts)) / 100)


def test_non_private_mechanism_has_no_guarantee() -> None:
    mechanism = _mechanism().calibrated(math.inf)
    assert not mechanism.is_private
    assert mechanism.guarantee_label == "none"
    assert mechanism.noise().std == 0
    assert mechanism.epsilon() == math.inf


def test_calibrated_mechanism_meets_the_target() -> None:
    assert 1.99 <= _mechanism().calibrated(2.0).epsilon() <= 2.0


def test_more_steps_charged_cost_more() -> None:
    mechanism = _mechanism()
    assert mechanism.epsilon(25) > mechanism.epsilon() > mechanism.epsilon(15)


def test_mechanism_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        _mechanism().noise_multiplier = 0.1  # type: ignore[misc]


def test_default_delta_is_the_papers() -> None:
    assert default_delta(60_000) == pytest.approx(1 / (60_000 * math.log(60_000)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_prob": 0.0}, "sampling_prob must be in"),
        ({"sampling_prob": 1.2}, "sampling_prob must be in"),
        ({"sampling_prob": math.nan}, "sampling_prob must be in"),
        ({"group_size": 0}, "group_size must be"),
        ({"group_size": "all"}, "group_size must be"),
        ({"l2_clip_norm": 0.0}, r"l2_clip_norm must be at least 1e-10 .*; got 0\.0"),
        ({"l2_clip_norm": math.inf}, "noise without clipping"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
        ({"noise_multiplier": 0.05}, r"at least 0\.1 \(smaller values protect nothing\); got 0\.05"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"target_delta": 0.0}, "target_delta must be in"),
        ({"target_delta": 1.0}, "target_delta must be in"),
        ({"target_delta": 0.002}, "at most 1/num_records_public"),
        ({"group_size": 500, "sampling": "records"}, "expected number of groups"),
        ({"group_size": 500, "sampling_prob": 0.04}, "expected number of groups"),
        ({"group_size": 1001}, "from 1 to num_records_public = 1000; got 1001"),
        ({"sampling": "groups", "group_size": "batch"}, 'needs a fixed group_size; got "batch"'),
        ({"sampling": "record"}, "unknown sampling 'record'"),
        ({"sampling": "groups", "method": "group_clip", "batch_cap": 400}, "group_clip samples records"),
        ({"num_records_public": 2}, "num_records_public must be at least 3"),
        ({"num_shards": 0}, "shards must be at least 1; got 0"),
        ({"num_shards": 2.5}, "num_shards must be a whole number"),
        ({"num_shards": 300}, r"at most 3, .* shards = 300\); got 4\."),
        (
            {"num_shards": 2, "sampling": "records"},
            'must be 1 .*; got 2 and dp_gcl with sampling = "records"',
        ),
        ({"num_shards": 2, "method": "group_clip", "batch_cap": 400}, r"group_clip .* one of dp_gcl, "),
    ],
)
def test_mechanism_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _mechanism(**changes)
