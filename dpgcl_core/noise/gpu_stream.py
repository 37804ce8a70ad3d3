# mypy: ignore-errors
"""The stream's rounded normals on a GPU, in Triton: the CPU's numbers, bit for bit.

Only `SecureGenerator.rounded_normal_on` imports this module, because PyTorch for CPUs comes without Triton.

**Proposition.** For one key, scale and size, the result is that of `SecureGenerator.rounded_normal`, whatever
the GPU and the number of blocks per program. *Proof.* Programs compute the same words, by integer arithmetic.
Each draw is the integer nearest to the same real number scale·z. Where float64 decides, both sides have it
by the argument of `dpgcl_core.noise.rounded_normal`, because both err by less than `TOLERANCE`. The GPU lists
the other places, and the CPU decides them from the same words and additional bits. ∎ **Assumption** of that
argument: log, sin and cos err by at most 4 units in the last place. Triton calls libdevice, for which NVIDIA
documents 1, 2 and 2. A fused multiplication and addition rounds once instead of twice, and errs less.

The key is a buffer on the device, never a number in the program, for which a compiler could specialise it.
The buffer is overwritten after the draw. The memory of host and driver, through which it came, is not.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpgcl_core.noise.rounded_normal import (
    LARGEST,
    PAIRS_AT_ONCE,
    SMALLEST,
    TOLERANCE,
    AdditionalBytes,
    nearest_integer,
)

_BLOCKS = 128
"""Blocks of 64 bytes of each half of a piece that a program computes, a power of two."""
_HALF = PAIRS_AT_ONCE // 8
"""Blocks of each half of a piece."""


def rounded_multiples(
    key: Tensor, size: int, scale: float, additional_bytes: AdditionalBytes
) -> Tensor | None:
    """Return the first draws of a key's stream from N(0, scale²), rounded to integers, float64 `[size]`.

    Args:
      key: int32 `[8]` on the device; zeros afterwards.
      size: the number of draws, at most 2^35, the length of the stream.
      scale: the standard deviation before rounding.
      additional_bytes: further uniform bits of a pair, by the place of its u in the stream.

    Returns:
      The draws; None if float64 cannot decide more of them than there is room for.
    """
    device = key.device
    room = size // 1024 + 64  # at scale 2^24 one draw in 50,000 is undecided
    numbers = [scale, math.pi * 2.0**-63, 0.5 - TOLERANCE * scale, SMALLEST, LARGEST]
    programs = triton.cdiv(size, 2 * PAIRS_AT_ONCE), _HALF // _BLOCKS
    try:
        multiples = torch.empty(size, dtype=torch.float64, device=device)
        undecided = torch.zeros(room + 1, 3, dtype=torch.int64, device=device)
        numbers = torch.tensor(numbers, dtype=torch.float64, device=device)  # Triton narrows scalars
        with torch.cuda.device_of(key):
            _draw[programs](key, numbers, multiples, undecided, size, room, blocks=_BLOCKS, half=_HALF)
    finally:
        key.zero_()
    (count, *_), *rows = undecided.tolist()
    if count > room:
        return None
    places, integers = [], []
    for place, upper_bits, angle_word in rows[:count]:
        is_sine = place // PAIRS_AT_ONCE % 2
        u_place = place - is_sine * PAIRS_AT_ONCE
        places.append(place)
        integers.append(nearest_integer(upper_bits, angle_word, scale, is_sine, u_place, additional_bytes))
    integers = torch.tensor(integers, dtype=torch.float64, device=device)
    multiples[torch.tensor(places, dtype=torch.int64, device=device)] = integers
    return multiples


@triton.jit
def _rotated(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _quarter_round(a, b, c, d):
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _word(low, low_start, high, high_start):
    return (low + low_start).to(tl.uint64) | ((high + high_start).to(tl.uint64) << 32)


@triton.jit
def _words(key, first_block, blocks: tl.constexpr):
    """Return the 8 · `blocks` words of 64 bits from a block on, with a nonce of zeros (RFC 8439, 2.3)."""
    counter = (first_block + tl.arange(0, blocks)).to(tl.uint32)
    zero = counter ^ counter
    s0, s1, s2, s3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    s4 = zero + tl.load(key + 0).to(tl.uint32, bitcast=True)
    s5 = zero + tl.load(key + 1).to(tl.uint32, bitcast=True)
    s6 = zero + tl.load(key + 2).to(tl.uint32, bitcast=True)
    s7 = zero + tl.load(key + 3).to(tl.uint32, bitcast=True)
    s8 = zero + tl.load(key + 4).to(tl.uint32, bitcast=True)
    s9 = zero + tl.load(key + 5).to(tl.uint32, bitcast=True)
    s10 = zero + tl.load(key + 6).to(tl.uint32, bitcast=True)
    s11 = zero + tl.load(key + 7).to(tl.uint32, bitcast=True)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, counter, zero, zero, zero
    for _ in range(10):
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    # The minor index of each `interleave` is a bit of the word's number, the highest first.
    w04 = tl.interleave(_word(x0, s0, x1, s1), _word(x8, s8, x9, s9))
    w15 = tl.interleave(_word(x2, s2, x3, s3), _word(x10, s10, x11, s11))
    w26 = tl.interleave(_word(x4, s4, x5, s5), _word(x12, counter, x13, zero))
    w37 = tl.interleave(_word(x6, s6, x7, s7), _word(x14, zero, x15, zero))
    return tl.interleave(tl.interleave(w04, w26), tl.interleave(w15, w37))


@triton.jit
def _draw(key, numbers, multiples, undecided, size, room, blocks: tl.constexpr, half: tl.constexpr):
    scale, angle_unit, edge = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    smallest, largest = tl.load(numbers + 3), tl.load(numbers + 4)
    first_block = 2 * half * tl.program_id(0).to(tl.int64) + blocks * tl.program_id(1)
    upper_bits = (_words(key, first_block, blocks) >> 1).to(tl.int64)
    angle_word = _words(key, first_block + half, blocks).to(tl.int64, bitcast=True)
    uniform = upper_bits.to(tl.float64) * 2.0**-63 + 2.0**-63
    is_extreme = (uniform < smallest) | (uniform > largest)
    radius = tl.sqrt(-2.0 * tl.log(uniform)) * scale
    angle = angle_word.to(tl.float64) * angle_unit
    place = 8 * first_block + tl.arange(0, 8 * blocks)
    for is_sine in tl.static_range(2):
        normal = radius * (tl.sin(angle) if is_sine else tl.cos(angle))
        rounded = tl.floor(normal + 0.5)  # never the negative zero
        mask = place < size
        tl.store(multiples + place, rounded, mask=mask)
        mask &= is_extreme | (tl.abs(normal - rounded) > edge)
        row = tl.atomic_add(undecided + 0 * place, 1, mask=mask) + 1
        mask &= row <= room
        tl.store(undecided + 3 * row, place, mask=mask)
        tl.store(undecided + 3 * row + 1, upper_bits, mask=mask)
        tl.store(undecided + 3 * row + 2, angle_word, mask=mask)
        place += 8 * half
