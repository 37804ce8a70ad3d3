"""Whether a GPU's own kernels are there, and right: where they are not, PyTorch's calls do the same."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-4
_SHAPE, _NUM_GROUPS, _EPS = (5, 16, 7, 9), 4, 1e-5


def normalisation_kernels(x: Tensor, num_groups: int) -> Any:
    """Return `dpgcl_core.clipping.gpu_kernels` for images that it normalises; None for all others."""
    if x.device.type != "cuda" or not x.is_contiguous(memory_format=torch.channels_last):
        return None
    kernels = _kernels(x.device)
    return kernels if kernels is not None and kernels.fits(x, num_groups) else None


@cache
def _kernels(device: torch.device) -> Any:
    """Return the kernels if they can be compiled here and agree with PyTorch on made-up images."""
    try:
        from dpgcl_core.clipping import gpu_kernels

        error = largest_error(gpu_kernels, device)
    except Exception as problem:  # Triton is not there, or its compiler fails in any way
        logger.info("no kernels of our own: %s: %s", type(problem).__name__, problem)
        return None
    if not error <= _TOLERANCE:
        logger.warning("no kernels of our own: they differ from PyTorch by %g", error)
        return None
    return gpu_kernels


def largest_error(kernels: Any, device: torch.device | str) -> float:
    """Return the largest difference between what kernels and PyTorch compute of made-up images."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x, grad = (made(*_SHAPE).contiguous(memory_format=torch.channels_last) for _ in range(2))
    (weight, bias), factors = made(2, _SHAPE[1]), [made(*_SHAPE[:2]) for _ in range(3)]
    products, sums = torch.empty(2, *_SHAPE[:2], device=device)
    output, mean, scale = kernels.normalised(x, weight, bias, _NUM_GROUPS, _EPS)
    kernels.add_up(x, grad, products, sums)
    combined = kernels.combined(x, grad, *factors)
    by_group = x.reshape(_SHAPE[0], _NUM_GROUPS, -1)
    constant, times_x, times_grad = (each[:, :, None, None] for each in factors)
    pairs = [
        (output, F.group_norm(x, _NUM_GROUPS, weight, bias, _EPS)),
        (mean, by_group.mean(2)),
        (scale, (by_group.var(2, unbiased=False) + _EPS).rsqrt()),
        (products, (grad * x).sum((2, 3))),
        (sums, grad.sum((2, 3))),
        (combined, constant + times_x * x + times_grad * grad),
    ]
    return max(float((actual - expected).abs().max()) for actual, expected in pairs)
