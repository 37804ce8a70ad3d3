"""The cryptographic stream and what is drawn from it. Keys are fixed, so no test can fail by chance."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import struct

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray
from scipy import stats

from dpgcl_core.errors import ConfigError
from dpgcl_core.noise import chacha20 as secure_randomness
from dpgcl_core.noise.chacha20 import SecureGenerator, SecureRandomness, choose_randomness
from dpgcl_core.noise.randomness import SecretRandomness, SeededNonPrivateRandomness
from dpgcl_core.noise.rounded_normal import PAIRS_AT_ONCE
from dpgcl_core.sampling.groups import FixedSizeGroups
from dpgcl_core.sampling.poisson import PoissonSampler

SIGNIFICANCE = 1e-3
"""With a fixed key a p-value is one number; under a right law one key in a thousand falls below this."""

RFC_8439_KEYSTREAMS = {
    (0, 0): "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    (0, 1): "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
    "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    (1, 1): "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
    "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
}
"""RFC 8439, appendix A.1, test vectors 1 to 3: by the last byte of the key and the block counter."""


def _generator(key: int = 0) -> SecureGenerator:
    return SecureGenerator(fixed_key_for_tests=key.to_bytes(32, "big"))


class _Scripted(SecureGenerator):
    """Gives the words of a script in place of the stream's."""

    def __init__(self, *words: int) -> None:
        super().__init__(fixed_key_for_tests=bytes(32))
        self.script = list(words)

    def _words(self, count: int) -> NDArray[np.uint64]:
        taken, self.script = self.script[:count], self.script[count:]
        assert len(taken) == count
        return np.array(taken, dtype=np.uint64)


def _reference_chacha20_block(key: bytes, counter: int) -> bytes:
    """RFC 8439, section 2.3, word by word, with a nonce of zeros."""

    def rotate(value: int, bits: int) -> int:
        return (value << bits | value >> (32 - bits)) & 0xFFFFFFFF

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[x] = (state[x] + state[y]) & 0xFFFFFFFF
            state[z] = rotate(state[z] ^ state[x], bits)

    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter, 0, 0, 0]
    state = list(start)
    for _ in range(10):
        for column in range(4):
            quarter(column, 4 + column, 8 + column, 12 + column)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return struct.pack("<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(state, start, strict=True)))


@pytest.mark.parametrize(("key", "counter"), RFC_8439_KEYSTREAMS)
def test_stream_is_that_of_rfc_8439(key: int, counter: int) -> None:
    words = _generator(key)._words(16)
    expected = bytes.fromhex(RFC_8439_KEYSTREAMS[key, counter])
    assert words[8 * counter : 8 * counter + 8].astype("<u8").tobytes() == expected


def test_stream_agrees_with_a_reference_and_with_the_cipher_itself() -> None:
    key = bytes(range(32))
    drawn = SecureGenerator(fixed_key_for_tests=key)._words(8 * 40).tobytes()
    assert drawn == b"".join(_reference_chacha20_block(key, counter) for counter in range(40))
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    assert drawn == cipher.update(bytes(len(drawn)))


@pytest.mark.parametrize("count", [0, 1, 2**15, 2**15 + 1, 3 * 2**15 + 7])
def test_stream_does_not_depend_on_how_it_is_cut(count: int) -> None:
    whole, cut = _generator(), _generator()
    parts = [cut._words(count // 3), cut._words(count - count // 3)]
    assert np.array_equal(whole._words(count), np.concatenate(parts))


def test_no_word_of_the_stream_is_drawn_twice() -> None:
    generator = _generator()
    generator.random(5)
    generator.permutation(np.arange(4))
    generator.standard_normal(6)  # a whole piece of 2^15 words
    assert np.array_equal(generator._words(3), _generator()._words(2**15 + 12)[-3:])


def test_stream_ends_before_its_counter_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_randomness, "_MAX_WORDS", 10)
    generator = _generator()
    generator.random(10)
    with pytest.raises(ConfigError, match="before its stream repeats"):
        generator.random(1)


def test_two_generators_with_the_same_arguments_are_independent() -> None:
    source = SecureRandomness()
    first, second = (source.generator(3, "noise")._words(1000) for _ in range(2))
    assert not np.isin(first, second).any()  # one equal word in 20,000,000,000,000 tests


def test_every_generator_takes_its_own_key_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def token_bytes(count: int) -> bytes:
        asked.append(count)
        return bytes([len(asked)]) * count

    monkeypatch.setattr(secure_randomness.secrets, "token_bytes", token_bytes)
    source = SecureRandomness()
    drawn = [source.generator(0, "noise").random(1)[0] for _ in range(3)]
    assert asked == [32, 32, 32]
    expected = [SecureGenerator(fixed_key_for_tests=bytes([i]) * 32).random(1)[0] for i in (1, 2, 3)]
    assert drawn == expected


def test_key_is_not_stored_or_shown() -> None:
    key = bytes(range(100, 132))
    generator = SecureGenerator(fixed_key_for_tests=key)
    generator.random(1)
    shown = f"{generator!r} {generator} {vars(generator)!r}"
    assert not any(form in shown for form in (key.hex(), repr(key)[2:-1], str(list(key))))
    assert set(vars(generator)) == {"_stream", "_additional_bytes", "_key_on", "_num_words_left"}
    assert not hasattr(generator._stream, "key")
    assert not hasattr(generator._stream, "algorithm")


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_generator_is_neither_copied_nor_stored(duplicate: object) -> None:
    with pytest.raises(TypeError, match="repeat its draws"):
        duplicate(_generator())  # type: ignore[operator]


def test_fixed_key_of_wrong_length_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="32 bytes; got 9") as refused:
        SecureGenerator(fixed_key_for_tests=b"too short")
    assert "too short" not in str(refused.value)


def test_uniforms_are_the_upper_53_bits() -> None:
    drawn = _Scripted(0, 2**11 - 1, 2**11, 2**63, 2**64 - 1).random(5)
    assert drawn.tolist() == [0.0, 0.0, 2.0**-53, 0.5, 1 - 2.0**-53]


def test_uniforms_pass_kolmogorov_and_smirnov() -> None:
    drawn = _generator(1).random(100_000)
    assert stats.kstest(drawn, "uniform").pvalue > SIGNIFICANCE
    assert stats.kstest(drawn**1.05, "uniform").pvalue < SIGNIFICANCE / 100  # a wrong law is rejected


def test_bits_of_words_are_balanced() -> None:
    words = _generator(2)._words(50_000).astype("<u8")
    ones = np.unpackbits(words.view(np.uint8)).reshape(len(words), 64).sum(axis=0)
    statistic = float(((ones - len(words) / 2) ** 2 / (len(words) / 4)).sum())
    assert stats.chi2(64).sf(statistic) > SIGNIFICANCE


@pytest.mark.parametrize("sampling_prob", [0.001, 0.02, 0.3])
def test_inclusion_rate_is_the_sampling_probability(sampling_prob: float) -> None:
    sampler, num_records, generator = PoissonSampler(sampling_prob=sampling_prob), 2_000_000, _generator(3)
    rate = len(sampler.sample(num_records, generator)) / num_records
    error = math.sqrt(sampling_prob * (1 - sampling_prob) / num_records)
    assert abs(rate - sampling_prob) < 4 * error
    assert abs(rate - 1.15 * sampling_prob) > 4 * error  # a wrong rate is rejected


def test_sample_sizes_are_binomial() -> None:
    sampler, generator = PoissonSampler(sampling_prob=0.1), _generator(4)
    sizes = [len(sampler.sample(200, generator)) for _ in range(2000)]
    edges = [-1, 14, 16, 18, 20, 22, 24, 26, 200]
    seen, _ = np.histogram(sizes, bins=np.array(edges) + 0.5)
    expected = 2000 * np.diff(stats.binom(200, 0.1).cdf(edges))
    assert stats.chisquare(seen, expected).pvalue > SIGNIFICANCE


def test_permutations_of_four_are_equally_likely() -> None:
    generator, counts = _generator(5), dict.fromkeys(itertools.permutations(range(4)), 0)
    for _ in range(12_000):
        counts[tuple(generator.permutation(np.arange(4)).tolist())] += 1
    assert stats.chisquare(list(counts.values())).pvalue > SIGNIFICANCE


def test_permutation_follows_the_order_of_its_keys() -> None:
    assert _Scripted(30, 2**64 - 1, 10, 20).permutation(np.array([5, 6, 7, 8])).tolist() == [7, 8, 5, 6]


def test_permutation_with_equal_keys_is_drawn_again() -> None:
    generator = _Scripted(9, 9, 1, 3, 1, 2)
    assert generator.permutation(np.array([5, 6, 7])).tolist() == [6, 7, 5]
    assert not generator.script


@pytest.mark.parametrize("length", [0, 1])
def test_permutation_of_nothing_or_one_is_itself(length: int) -> None:
    assert _generator().permutation(np.arange(length)).tolist() == list(range(length))


def test_groups_from_the_stream_hold_each_record_once() -> None:
    groups = FixedSizeGroups(group_size=4).group(np.arange(41) + 7, _generator(6))
    assert groups.shape == (10, 4)
    assert len(set(groups.ravel().tolist())) == 40
    assert set(groups.ravel().tolist()) <= set(range(7, 48))


@pytest.mark.parametrize("size", [0, 1, 3, 2**15 - 1, 2**15, 2**15 + 1, 2**17 + 5])
def test_normals_have_the_size_asked_for(size: int) -> None:
    drawn = _generator().standard_normal(size)
    assert drawn.shape == (size,)
    assert drawn.dtype == np.float64
    assert np.isfinite(drawn).all()
    assert len(np.unique(drawn)) >= 0.995 * size  # no part of the array is left or repeated


def test_normals_pass_kolmogorov_and_smirnov() -> None:
    drawn = _generator(7).standard_normal(100_000)
    assert stats.kstest(drawn, "norm").pvalue > SIGNIFICANCE
    assert stats.kstest(1.04 * drawn, "norm").pvalue < SIGNIFICANCE / 100  # a wrong scale is rejected


@pytest.mark.parametrize(("power", "moment"), [(1, 0), (2, 1), (3, 0), (4, 3), (6, 15), (8, 105)])
def test_normals_have_the_moments_of_a_normal(power: int, moment: int) -> None:
    drawn = _generator(8).standard_normal(1_000_000)
    variance = math.prod(range(1, 2 * power, 2)) - moment**2
    assert abs(float((drawn**power).mean()) - moment) < 3.3 * math.sqrt(variance / len(drawn))


def test_normals_have_the_tail_of_a_normal() -> None:
    drawn = np.abs(_generator(9).standard_normal(2_000_000))
    for bound in (2.0, 3.0, 4.0):
        expected = 2 * stats.norm.sf(bound) * len(drawn)
        assert abs(int((drawn > bound).sum()) - expected) < 3.3 * math.sqrt(expected)


@pytest.mark.parametrize("lag", [1, 2, PAIRS_AT_ONCE, 2 * PAIRS_AT_ONCE])
def test_normals_are_uncorrelated_within_a_draw(lag: int) -> None:
    """Also with the other one of the same pair, and so are their squares."""
    drawn = _generator(10).standard_normal(400_000)
    bound = 3.3 / math.sqrt(len(drawn) - lag)
    for values in (drawn, drawn**2):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < bound


def test_normals_of_different_keys_are_uncorrelated() -> None:
    steps = np.stack([_generator(key).standard_normal(100_000) for key in range(20, 26)])
    apart = np.abs(np.corrcoef(steps) - np.eye(len(steps)))
    assert apart.max() < 4 / math.sqrt(steps.shape[1])


@pytest.mark.parametrize(
    ("asked", "private", "expected"),
    [
        (None, True, SecureRandomness),
        (True, True, SecureRandomness),
        (True, False, SecureRandomness),
        (None, False, SecretRandomness),
        (False, False, SecretRandomness),
    ],
)
def test_plain_generator_is_the_default_for_public_data_only(
    asked: bool | None, private: bool, expected: type
) -> None:
    assert type(choose_randomness(secure_noise=asked, data_are_private=private)) is expected


def test_private_data_are_refused_without_the_stream() -> None:
    with pytest.raises(ConfigError, match="cryptographic stream only"):
        choose_randomness(secure_noise=False, data_are_private=True)


@pytest.mark.parametrize("asked", [None, True, False])
def test_private_data_are_refused_with_a_seed(asked: bool | None) -> None:
    with pytest.raises(ConfigError, match="cryptographic stream only"):
        choose_randomness(secure_noise=asked, data_are_private=True, public_seed=0)


def test_seeded_run_is_seeded_and_has_no_stream() -> None:
    chosen = choose_randomness(secure_noise=None, data_are_private=False, public_seed=0)
    assert isinstance(chosen, SeededNonPrivateRandomness)
    with pytest.raises(ConfigError, match=r"secure_noise = True and a seed\. Leave out one of them"):
        choose_randomness(secure_noise=True, data_are_private=False, public_seed=0)


def test_exact_noise_belongs_to_the_stream_alone() -> None:
    sources = (SecureRandomness(), SecretRandomness(), SeededNonPrivateRandomness(0))
    assert [source.is_exact for source in sources] == [True, False, False]


def test_a_gpu_draws_from_secret_seeds_for_public_data_and_from_the_stream_for_private_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cpu")
    public = SecretRandomness().gpu_generators(gpu)
    seeds = {public("noise").initial_seed() for _ in range(200)}
    assert len(seeds) == 200
    assert 2**58 < max(seeds) < 2**63
    monkeypatch.setattr(secure_randomness, "has_gpu_stream", lambda device: device == gpu)
    private = choose_randomness(secure_noise=None, data_are_private=True)
    generator_of = private.gpu_generators(gpu)
    assert generator_of is not None
    first, second = (generator_of("noise") for _ in range(2))
    assert isinstance(first, SecureGenerator)
    assert first.random(1) != second.random(1)
    assert private.gpu_generators(torch.device("meta")) is None


def test_a_gpu_draws_nothing_of_a_seeded_run() -> None:
    assert SeededNonPrivateRandomness(0).gpu_generators(torch.device("cpu")) is None
