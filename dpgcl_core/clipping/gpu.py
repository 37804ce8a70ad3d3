"""Checks that this package's GPU kernels are available and correct; otherwise PyTorch's are used."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

_CASES = [((5, 16, 7, 9), 4, torch.float32, 1e-4), ((3, 64, 16, 16), 8, torch.bfloat16, 2e-2)]
"""Shape of the images, channel groups, precision and the allowed error: a case with one block of positions
and a case with several (`gpu_kernels._NUMBERS`)."""
_EPS = 1e-5


def normalisation_kernels(x: Tensor, num_groups: int) -> Any:
    """Return the module `gpu_kernels` if it can normalise these images here; None for PyTorch's kernels."""
    if x.device.type != "cuda" or not x.is_contiguous(memory_format=torch.channels_last):
        return None
    kernels = _kernels(x.device)
    return kernels if kernels is not None and kernels.fits(x, num_groups) else None


@cache
def _kernels(device: torch.device) -> Any:
    """Return the kernels if they can be compiled here and agree with PyTorch on synthetic images."""
    try:
        from dpgcl_core.clipping import gpu_kernels

        wrong = first_difference(gpu_kernels, device)
    except Exception as problem:  # Triton is not installed, or its compiler fails
        logger.info("using PyTorch's kernels, not Triton's: %s: %s", type(problem).__name__, problem)
        return None
    if wrong:
        logger.warning("using PyTorch's kernels, not Triton's: %s", wrong)
        return None
    return gpu_kernels


def first_difference(kernels: Any, device: torch.device | str) -> str:
    """Return the first difference between the kernels and PyTorch on synthetic images; "" for none."""
    for shape, num_groups, dtype, tolerance in _CASES:
        errors = _errors(kernels, device, shape, num_groups, dtype)
        for name, error in errors.items():
            allowed = tolerance if name == "combinations" else 1e-4
            if not error <= allowed:
                return f"{name} for shape {list(shape)} in {dtype} differ from PyTorch's by {error:g}"
    return ""


def _errors(
    kernels: Any,
    device: torch.device | str,
    shape: tuple[int, int, int, int],
    num_groups: int,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Return the largest error of each result, relative to the expected value if that is above 1."""
    generator = torch.Generator().manual_seed(0)

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x, grad = (random_tensor(*shape).contiguous(memory_format=torch.channels_last) for _ in range(2))
    x = x.to(dtype)
    (weight, bias), factors = random_tensor(2, shape[1]), [random_tensor(*shape[:2]) for _ in range(3)]
    products, sums = torch.empty(2, *shape[:2], device=device)
    output, mean, scale = kernels.normalised(x, weight, bias, num_groups, _EPS)
    kernels.add_up(x, grad, products, sums)
    combined = kernels.combined(x, grad, *factors)
    x = x.float()
    by_group = x.reshape(shape[0], num_groups, -1)
    constant, times_x, times_grad = (factor[:, :, None, None] for factor in factors)
    pairs = {
        "outputs": (output, F.group_norm(x, num_groups, weight, bias, _EPS)),
        "means": (mean, by_group.mean(2)),
        "deviations": (scale, (by_group.var(2, unbiased=False) + _EPS).rsqrt()),
        "products": (products, (grad * x).sum((2, 3))),
        "sums": (sums, grad.sum((2, 3))),
        "combinations": (combined.float(), constant + times_x * x + times_grad * grad),
    }
    return {
        name: float(((actual - expected).abs() / expected.abs().clamp_min(1)).max())
        for name, (actual, expected) in pairs.items()
    }
