"""Products of float32 matrices over their rows, by the library that is faster on this processor.

PyTorch computes float32 products on an x86 CPU with MKL, which does not use AVX-512 on AMD's processors.
oneDNN, which PyTorch uses for convolutions, uses AVX-512 on all processors and is then about twice as fast
(measured on an AMD EPYC; on Intel's processors both are about equally fast). The choice depends on the
processor and the shapes, on no record. Both compute in float32, so the error bounds of
docs/theory/clipping.md hold for either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_LARGE = 2_500_000
"""On one thread, a product of fewer multiplications ends before oneDNN has arranged its operands. With two
threads, MKL gives each thread another group's product and oneDNN half a product, so the bound is four times
as large."""

_Product = Callable[[Tensor, Tensor], Tensor]


def products_over_rows(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return aᵀ b of each group.

    Args:
      a: float32 `[groups, rows, m]`; on a GPU also bfloat16 or float16, with products summed in float32.
      b: a tensor `[groups, rows, n]` of the same kind, on the same device.
      out: memory for the result, for float32; None for new memory.

    Returns:
      Float32 `[groups, m, n]`.
    """
    if a.dtype != torch.float32:
        low: Tensor = torch.bmm(a.transpose(1, 2), b, out_dtype=torch.float32)
        return low
    product = _faster(a[0], b[0])
    if product is None:
        return torch.bmm(a.transpose(1, 2), b, out=out)
    result = a.new_empty(len(a), a.shape[2], b.shape[2]) if out is None else out
    for group_product, group_a, group_b in zip(result, a, b, strict=True):
        group_product.copy_(product(group_a, group_b))
    return result


@cache
def has_avx512() -> bool:
    """Return whether PyTorch computes with AVX-512 in this process."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _faster(a: Tensor, b: Tensor) -> _Product | None:
    """Return oneDNN's product if it is the faster one for these shapes."""
    if a.device.type != "cpu" or a.numel() * b.shape[1] < _LARGE * torch.get_num_threads() ** 2:
        return None
    if not has_avx512() or not torch.backends.mkldnn.enabled or _overlaps(a) or _overlaps(b):
        return None
    return _by_onednn()


def _overlaps(matrix: Tensor) -> bool:
    """Return whether rows or columns share memory, as after `unfold`: oneDNN accepts no such operand."""
    short, long = sorted(zip(matrix.stride(), matrix.shape, strict=True))
    return long[0] < short[0] * short[1] or short[0] == 0


@cache
def _by_onednn() -> _Product | None:
    """Return oneDNN's product, which PyTorch has for its compiler; None if it is missing or inexact."""
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if linear is None or not torch.backends.mkldnn.is_available():
        return None

    def product(a: Tensor, b: Tensor) -> Tensor:
        rows, m, n = *a.shape, b.shape[1]
        if rows * (m - n) > m * n:  # oneDNN copies the transposed left operand: make that the narrower one
            return product(b, a).T
        result: Tensor = linear(a.T, b.T, None, "none", [], "")
        return result

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(300, width, generator=generator) for width in (40, 50))
    try:
        error = (product(a, b) - a.double().T @ b.double()).abs()
    except (RuntimeError, TypeError):
        return None
    # Allow float32's rounding and a margin. An environment can set oneDNN to bfloat16, which is far off.
    is_exact = bool((error <= 5e-7 * (a.abs().double().T @ b.abs().double())).all())
    return product if is_exact else None
