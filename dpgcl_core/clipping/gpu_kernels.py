# mypy: ignore-errors
"""Normalisation on a GPU, in Triton: with fewer reads and writes of each number than PyTorch's calls.

Triton comes with PyTorch for CUDA and not with PyTorch for CPUs, so only `dpgcl_core.clipping.gpu` imports
this module, once there is a GPU. One program processes one row, in an order that its shape fixes. Its output
for a row depends on no other row.

Images are `[rows, channels, height, width]` with the channels last in memory; channels and channel groups are
powers of two (`fits`). Sums are float32, whatever the images are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS, _WARPS = 4096, 8
"""The most numbers that a program holds at once, and its warps."""
_MOST_CHANNELS = 2048


def fits(x: Tensor, num_groups: int) -> bool:
    """Return whether the kernels support these images with this number of channel groups."""
    channels = x.shape[1]
    if not 1 < channels <= _MOST_CHANNELS or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return all(number & (number - 1) == 0 for number in (channels, num_groups)) and x.numel() > 0


def normalised(
    x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a GroupNorm's float32 output, means and reciprocal deviations, `[rows, num_groups]` both."""
    rows, channels = x.shape[:2]
    out = torch.empty_like(x, dtype=torch.float32)
    mean, scale = torch.empty(2, rows, num_groups, dtype=torch.float32, device=x.device)
    positions = x.shape[2:].numel()
    _normalise[(rows,)](
        x,
        weight,
        bias,
        out,
        mean,
        scale,
        positions,
        eps,
        num_channels=channels,
        num_groups=num_groups,
        block=_positions_at_once(channels, positions),
        num_warps=_WARPS,
    )
    return out, mean, scale


def add_up(x: Tensor, grad: Tensor, products: Tensor, sums: Tensor) -> None:
    """Write Σ grad·x and Σ grad over a row's positions, `[rows, channels]`; `grad` is float32, like `x`."""
    rows, channels = x.shape[:2]
    positions = x.shape[2:].numel()
    _add_up[(rows,)](
        x,
        grad,
        products,
        sums,
        positions,
        num_channels=channels,
        block=_positions_at_once(channels, positions),
        num_warps=_WARPS,
    )


def combined(x: Tensor, grad: Tensor, constant: Tensor, times_x: Tensor, times_grad: Tensor) -> Tensor:
    """Return constant + times_x·x + times_grad·grad in the dtype of `x`; factors are `[rows, channels]`."""
    rows, channels = x.shape[:2]
    positions = x.shape[2:].numel()
    block = _positions_at_once(channels, positions)
    out = torch.empty_like(x)
    _combine[(rows, triton.cdiv(positions, block))](
        x,
        grad,
        constant,
        times_x,
        times_grad,
        out,
        positions,
        num_channels=channels,
        block=block,
        num_warps=_WARPS,
    )
    return out


def _positions_at_once(channels: int, positions: int) -> int:
    return max(1, min(_NUMBERS // channels, triton.next_power_of_2(positions)))


@triton.jit
def _by_channel(of_groups, num_channels: tl.constexpr, num_groups: tl.constexpr):
    wide = tl.broadcast_to(of_groups[:, None], (num_groups, num_channels // num_groups))
    return tl.reshape(wide, (num_channels,))


@triton.jit
def _of_groups(of_channels, num_channels: tl.constexpr, num_groups: tl.constexpr):
    return tl.sum(tl.reshape(of_channels, (num_groups, num_channels // num_groups)), 1)


@triton.jit
def _normalise(
    x,
    weight,
    bias,
    out,
    mean,
    scale,
    positions,
    eps,
    num_channels: tl.constexpr,
    num_groups: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel, group, position = tl.arange(0, num_channels), tl.arange(0, num_groups), tl.arange(0, block)
    offsets = row * positions * num_channels + position[:, None] * num_channels + channel[None, :]
    numbers = positions * (num_channels // num_groups)
    total = tl.zeros((num_channels,), tl.float32)
    for start in range(0, positions, block):
        mask = (start + position < positions)[:, None]
        values = tl.load(x + offsets + start * num_channels, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(values, 0)
    of_group = _of_groups(total, num_channels, num_groups) / numbers
    tl.store(mean + row * num_groups + group, of_group)
    centre = _by_channel(of_group, num_channels, num_groups)
    squares = tl.zeros((num_channels,), tl.float32)
    for start in range(0, positions, block):
        mask = (start + position < positions)[:, None]
        values = tl.load(x + offsets + start * num_channels, mask=mask, other=0.0).to(tl.float32)
        centred = tl.where(mask, values - centre[None, :], 0.0)
        squares += tl.sum(centred * centred, 0)
    of_group = 1.0 / tl.sqrt(_of_groups(squares, num_channels, num_groups) / numbers + eps)
    tl.store(scale + row * num_groups + group, of_group)
    slope = _by_channel(of_group, num_channels, num_groups) * tl.load(weight + channel)
    shift = tl.load(bias + channel)
    for start in range(0, positions, block):
        mask = (start + position < positions)[:, None]
        values = tl.load(x + offsets + start * num_channels, mask=mask, other=0.0).to(tl.float32)
        results = (values - centre[None, :]) * slope[None, :] + shift[None, :]
        tl.store(out + offsets + start * num_channels, results, mask=mask)


@triton.jit
def _add_up(x, grad, products, sums, positions, num_channels: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel, position = tl.arange(0, num_channels), tl.arange(0, block)
    offsets = row * positions * num_channels + position[:, None] * num_channels + channel[None, :]
    product = tl.zeros((num_channels,), tl.float32)
    total = tl.zeros((num_channels,), tl.float32)
    for start in range(0, positions, block):
        mask = (start + position < positions)[:, None]
        values = tl.load(x + offsets + start * num_channels, mask=mask, other=0.0).to(tl.float32)
        slopes = tl.load(grad + offsets + start * num_channels, mask=mask, other=0.0).to(tl.float32)
        product += tl.sum(values * slopes, 0)
        total += tl.sum(slopes, 0)
    tl.store(products + row * num_channels + channel, product)
    tl.store(sums + row * num_channels + channel, total)


@triton.jit
def _combine(
    x, grad, constant, times_x, times_grad, out, positions, num_channels: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, num_channels)
    position = tl.program_id(1) * block + tl.arange(0, block)
    offsets = row * positions * num_channels + position[:, None] * num_channels + channel[None, :]
    mask = (position < positions)[:, None]
    values = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    slopes = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
    of_row = row * num_channels + channel
    base, of_x, of_grad = tl.load(constant + of_row), tl.load(times_x + of_row), tl.load(times_grad + of_row)
    results = base[None, :] + values * of_x[None, :] + slopes * of_grad[None, :]
    tl.store(out + offsets, results.to(out.dtype.element_ty), mask=mask)
