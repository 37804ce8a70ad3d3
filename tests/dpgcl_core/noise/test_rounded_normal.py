"""Rounded normals have the law of rounded real normals: each integer is that of its words' bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from mpmath import mp
from numpy.typing import NDArray
from scipy import stats

from dpgcl_core.errors import ConfigError
from dpgcl_core.noise import rounded_normal as module
from dpgcl_core.noise.chacha20 import SecureGenerator
from dpgcl_core.noise.rounded_normal import PAIRS_AT_ONCE, TOLERANCE, rounded_normals

Additional = Callable[[int, int], bytes]


def _no_bits(pair: int, num_bytes: int) -> bytes:
    return bytes(num_bytes)


def _words(uniform: list[int], angles: list[int]) -> NDArray[np.uint64]:
    """Return a piece's words: pairs (u·2^64, angle word), and one word u for the rest."""
    words = np.full(2 * PAIRS_AT_ONCE, 2**63, dtype="<u8")
    words[: len(uniform)] = np.array(uniform, dtype="<u8")
    words[PAIRS_AT_ONCE : PAIRS_AT_ONCE + len(angles)] = np.array(angles, dtype="<i8").view("<u8")
    return words


def _draw(
    words: NDArray[np.uint64], scale: float, size: int, additional: Additional = _no_bits
) -> NDArray[np.float64]:
    multiples = np.full(size, np.nan)
    rounded_normals(multiples, words, scale, additional)
    return multiples


def _scaled_ends(words: NDArray[np.uint64], scale: float, place: int) -> list[mp.mpf]:
    """Return scale·z at the four corners of the words' cells, with 300 bits."""
    is_sine, pair = divmod(place, PAIRS_AT_ONCE)
    upper, angle = int(words[pair]) >> 1, int(words[PAIRS_AT_ONCE + pair].view("<i8"))
    with mp.workprec(300):
        trig = mp.sin if is_sine else mp.cos
        return [
            scale * mp.sqrt(-2 * mp.log(mp.mpf(u) / 2**63)) * trig(mp.pi * a / 2**63)
            for u in (max(upper, mp.mpf(2) ** -300), upper + 1)
            for a in (angle, angle + 1)
        ]


@pytest.mark.parametrize("scale", [1.3, 1.7 * 2**24, 2.0**40])
def test_every_integer_is_that_of_the_words(scale: float) -> None:
    """At 2^40 one coordinate in two is too near to an edge for float64."""
    generator = SecureGenerator(fixed_key_for_tests=(30).to_bytes(32, "big"))
    words = generator._words(2 * PAIRS_AT_ONCE)
    drawn = _draw(words, scale, 2 * PAIRS_AT_ONCE)
    num_checked = 0
    for place in range(0, 2 * PAIRS_AT_ONCE, 13):
        nearest = {int(mp.nint(end)) for end in _scaled_ends(words, scale, place)}
        if len(nearest) == 1:  # else further bits decide
            num_checked += 1
            assert drawn[place] == nearest.pop()
    assert num_checked > 2500


def test_error_of_float64_is_below_half_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the ends of the uniform numbers that float64 decides, at all angles, and in between."""
    monkeypatch.setattr(module, "TOLERANCE", 0.0)
    angles = [0, 1, -1, 2**62, -(2**62), 2**62 + 1, 2**61 + 12345, 2**63 - 1, -(2**63), 3 * 2**60 + 77]
    ends = [2**44 + 1, 2**44 + 9999, 2**45 + 1, 2**50 + 3, 2**60 + 5, 2**63 + 7, 2**64 - 2**46, 2**64 - 2**45]
    near_one = [2**64 - 2**45 - k * 12347 for k in range(200)]
    pairs = [(u, a) for u in [*ends, *near_one] for a in angles]
    words, scale = _words([u for u, _ in pairs], [a for _, a in pairs]), 2.0**40
    drawn = _draw(words, scale, 2 * PAIRS_AT_ONCE)
    furthest = 0.0
    for pair in range(len(pairs)):
        for place in (pair, PAIRS_AT_ONCE + pair):
            end, *_ = _scaled_ends(words, scale, place)
            furthest = max(furthest, float(abs(int(drawn[place]) - end)) - 0.5)
    assert furthest < 0.5 * TOLERANCE * scale
    assert furthest > 0  # the test reaches the errors of float64


@pytest.mark.parametrize("num_zeros", [319, 575])
def test_normals_have_no_last_value(num_zeros: int) -> None:
    """The lowest cell of u has further bits: 256 of u, 256 of the angle, and so on. Here u = 2^-num_zeros."""
    further = bytes(31 if num_zeros == 319 else 95) + b"\1" + bytes(1000)
    (drawn,) = _draw(_words([0], [0]), 2.0**20, 1, lambda pair, num_bytes: further[:num_bytes])
    assert drawn == round(2.0**20 * math.sqrt(2 * num_zeros * math.log(2)))


@pytest.mark.parametrize("is_sine", [0, 1])
def test_further_bits_decide_between_two_integers(is_sine: int) -> None:
    """An edge inside the words' cell: the first further bit of u chooses the side."""
    words = _words([2**24], [2**61])
    place = PAIRS_AT_ONCE * is_sine
    low, high = (float(end) for end in sorted(_scaled_ends(words, 1.0, place))[::3])
    scale = 0.5 / ((low + high) / 2)
    for first, expected in ((0x00, 1.0), (0xFF, 0.0)):  # a smaller u has the larger radius
        drawn = _draw(words, scale, 2 * PAIRS_AT_ONCE, lambda _, n, first=first: bytes([first]) * n)
        assert drawn[place] == expected


def test_pair_has_one_continuation() -> None:
    """Cosine and sine of pair 5 read the same further bits, or they would not be one pair's."""
    asked: list[int] = []

    def additional(pair: int, num_bytes: int) -> bytes:
        asked.append(pair)
        return b"\1" * num_bytes

    _draw(_words([2**63] * 5 + [0], [2**61] * 6), 2.0**10, 2 * PAIRS_AT_ONCE, additional)
    assert asked == [5, 5]


def test_zeros_are_positive() -> None:
    drawn = _draw(SecureGenerator(fixed_key_for_tests=bytes(32))._words(2 * PAIRS_AT_ONCE), 0.1, 1000)
    assert (drawn == 0).any()
    assert not np.signbit(drawn[drawn == 0]).any()


@pytest.mark.parametrize("scale", [0.4, 1.0, 3.0])
def test_integers_have_the_probabilities_of_their_cells(scale: float) -> None:
    drawn = SecureGenerator(fixed_key_for_tests=bytes(31) + b"\7").rounded_normal(1_000_000, scale)
    top = math.ceil(3 * scale)
    counts = np.array([(drawn == k).sum() for k in range(-top, top + 1)])
    for factor, is_right in ((1.0, True), (1.02, False)):
        edges = np.arange(-top, top + 2) - 0.5
        shares = np.diff(stats.norm(scale=factor * scale).cdf(edges))
        expected = shares / shares.sum() * counts.sum()
        assert (stats.chisquare(counts, expected).pvalue > 1e-3) == is_right


@pytest.mark.parametrize("size", [1, 100, PAIRS_AT_ONCE, PAIRS_AT_ONCE + 1, 2 * PAIRS_AT_ONCE + 5])
def test_draw_of_a_place_does_not_depend_on_the_size(size: int) -> None:
    drawn, longer = (
        SecureGenerator(fixed_key_for_tests=bytes(32)).rounded_normal(n, 2.0**24)
        for n in (size, 5 * PAIRS_AT_ONCE)
    )
    assert np.array_equal(drawn, longer[:size])


def test_additional_bits_are_of_the_key_and_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second piece's pair 0 has another continuation than the first one's."""
    asked: list[bytes] = []

    def spy(_: NDArray[np.float64], words: NDArray[np.uint64], scale: float, additional: Additional) -> None:
        asked.append(additional(0, 64))

    monkeypatch.setattr("dpgcl_core.noise.chacha20.rounded_normals", spy)
    for key in (1, 1, 2):
        SecureGenerator(fixed_key_for_tests=bytes([key]) * 32).rounded_normal(3 * PAIRS_AT_ONCE, 1.0)
    assert asked[:2] == asked[2:4]
    assert len(set(asked)) == 4


@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0**41, math.nan, math.inf])
def test_scale_that_float64_cannot_serve_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="scale must be between"):
        SecureGenerator().rounded_normal(1, scale)
