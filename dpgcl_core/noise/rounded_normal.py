"""Normals from uniform words, rounded to integers with exactly the right probabilities.

Box and Muller (1958): if u is uniform in (0, 1) and θ in (−π, π), then √(−2 ln u)·(cos θ, sin θ) is a pair
of independent N(0, 1). One word gives the upper 63 bits of u, and one word the upper 64 bits of θ, its sign
included. All lower bits are drawn only where they decide.

**Proposition.** If all bits are independent and uniform, the integers are independent, and each is k with
probability P(k − ½ < scale·Z < k + ½) for Z ~ N(0, 1), up to the assumption below. *Proof.* Let z be the real
number that the infinite bits of u and θ define. The result is the integer nearest to scale·z, found in one of
two ways. (1) Float64 gives a number less than `TOLERANCE` from z, which times `scale` is farther than
`TOLERANCE`·scale from every k + ½: both have the same nearest integer. (2) Otherwise interval arithmetic
encloses scale·z for all continuations of the bits. While a k + ½ lies inside, 256 more bits are drawn for
each of u and θ. They are the next bits of this pair, for its cosine and its sine alike. This ends with
probability 1. ∎ The words alone decide which way is taken, not the data. Its time shows something of the
noise, though: whoever can time a draw learns more than the release. Nothing is approximated, so no total
variation is charged to δ, for any number of coordinates.

*Error of float64, for 2^-20 ≤ u ≤ 1 − 2^-19; way (2) takes all other pairs.* u is known to 2^-63 and rounded
twice, so |δ ln u| ≤ 2^-52 + 2^-63/u. This moves r = √(−2 ln u) ≥ 2^-9 by |δ ln u|/r: by at most 2^-43 for u
near 1, and 2^-45 for small u. The angle is known to 2^-63·π and rounded three times, which moves z by less
than 2^-49·r < 2^-46. **Assumption:** the libraries' log, sin and cos err by at most 4 units in the last place
(by less than 1 where measured), mpmath's log with p bits by at most 2^(8−p) of itself, and all other
operations are rounded as documented. Together these add less than 2^-45. The sum is below 2^-42;
`tests/dpgcl_core/noise/test_rounded_normal.py` compares with 300 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
from mpmath import libmp
from mpmath.libmp import libmpi
from numpy.typing import NDArray

PAIRS_AT_ONCE = 2**14
"""The number of pairs computed at a time: they fit into the cache, and torch uses one thread."""

TOLERANCE = 2.0**-42
"""More than the largest error of a normal computed in float64."""

SMALLEST, LARGEST = 2.0**-20, 1 - 2.0**-19
"""The uniform numbers between which the error is below `TOLERANCE`."""

_ADDED_BITS = 256

LARGEST_SCALE = 2.0**40
"""The largest standard deviation before rounding; with larger ones float64 decides ever fewer integers."""

for _constant in (libmp.pi_fixed, libmp.ln2_fixed):
    _constant(2**12)  # mpmath keeps a constant's digits; threads that extend them together could mix them up

Words = NDArray[np.uint64]
AdditionalBytes = Callable[[int, int], bytes]
"""Returns the first bytes of the additional bits of a pair: (index of the pair, number of bytes)."""


def rounded_normals(
    multiples: NDArray[np.float64], words: Words, scale: float, additional_bytes: AdditionalBytes
) -> None:
    """Fill `multiples` with independent draws from N(0, scale²), each rounded to the nearest integer.

    The first `PAIRS_AT_ONCE` places have cosines, and the others sines of the same pairs.

    Args:
      multiples: float64 `[at most 2 · PAIRS_AT_ONCE]`; no zero in it is negative.
      words: uniform words `[2 · PAIRS_AT_ONCE]`, for the uniform numbers and then for the angles.
      scale: the standard deviation before rounding.
      additional_bytes: further uniform bits of a pair.
    """
    import torch  # imported here, because options are checked without loading torch

    num_pairs = min(len(multiples), PAIRS_AT_ONCE)
    upper_bits = (words[:num_pairs] >> np.uint64(1)).view("<i8")  # signed numbers become floats faster
    angle_words = words[PAIRS_AT_ONCE : PAIRS_AT_ONCE + num_pairs].view("<i8")
    uniform = upper_bits.astype(np.float64)
    uniform *= 2.0**-63
    uniform += 2.0**-63
    radius = np.log(uniform)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    radius *= scale
    normals = np.empty((2, num_pairs))
    # torch's sine is ten times as fast as numpy's
    angle, rows = torch.from_numpy(angle_words * (math.pi * 2.0**-63)), torch.from_numpy(normals)
    torch.cos(angle, out=rows[0])
    torch.sin(angle, out=rows[1])
    normals *= radius
    rounded = np.rint(normals)
    np.add(rounded.ravel()[: len(multiples)], 0.0, out=multiples)
    normals -= rounded
    np.abs(normals, out=normals)
    is_undecided = normals > 0.5 - TOLERANCE * scale
    is_undecided |= (uniform < SMALLEST) | (uniform > LARGEST)
    for place in np.flatnonzero(is_undecided.ravel()[: len(multiples)]).tolist():
        is_sine, pair = divmod(place, num_pairs)
        words_of_pair = int(upper_bits[pair]), int(angle_words[pair])
        multiples[place] = nearest_integer(*words_of_pair, scale, is_sine, pair, additional_bytes)


def nearest_integer(
    upper_bits: int, angle_word: int, scale: float, is_sine: int, pair: int, additional_bytes: AdditionalBytes
) -> int:
    """Return the integer nearest to the real number of a pair, by interval arithmetic."""
    for num_added in count(0, _ADDED_BITS):
        added = additional_bytes(pair, num_added // 4) if num_added else b""
        shares = [added[start : start + 32] for start in range(0, len(added), 32)]
        uniform, angle = (
            int.from_bytes(
                bits.to_bytes(8, "big", signed=True) + b"".join(shares[half::2]), "big", signed=True
            )
            for half, bits in enumerate((upper_bits, angle_word))
        )
        if uniform == 0:
            continue  # ln 0 has no interval
        precision = 128 + num_added
        pi = libmp.mpf_pi(precision, "f"), libmp.mpf_pi(precision, "c")  # rounded down, and up
        theta = libmpi.mpi_mul(pi, _cell(angle, 63 + num_added), precision)
        # mpmath does not prove the direction in which it rounds a logarithm
        widening = (libmp.from_man_exp(2 ** (precision - 8) + sign, 8 - precision) for sign in (-1, 1))
        log = libmpi.mpi_log(_cell(uniform, 63 + num_added), precision)
        log = libmpi.mpi_mul(log, tuple(widening), precision)
        radius = libmpi.mpi_sqrt(libmpi.mpi_mul(_point(-2.0), log, precision), precision)
        direction = (libmpi.mpi_sin if is_sine else libmpi.mpi_cos)(theta, precision)
        scaled = libmpi.mpi_mul(libmpi.mpi_mul(radius, direction, precision), _point(scale), precision)
        edges = libmpi.mpi_add(scaled, _point(0.5), precision)
        low, high = (libmp.to_int(libmp.mpf_floor(edge)) for edge in edges)
        if low == high:
            return int(low)
    raise AssertionError("unreachable")


def _cell(number: int, num_bits: int) -> tuple[Any, Any]:
    """Return the interval [number, number + 1]·2^-num_bits."""
    return libmp.from_man_exp(number, -num_bits), libmp.from_man_exp(number + 1, -num_bits)


def _point(number: float) -> tuple[Any, Any]:
    return libmp.from_float(number), libmp.from_float(number)
