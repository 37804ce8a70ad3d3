"""A search for neighbouring batches whose clipped sums lie far apart, and a small encoder to search with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class LinearEncoder(nn.Module):
    """x → Wx, of unit length where asked; W starts at the identity."""

    def __init__(self, dim: int, *, unit: bool = True) -> None:
        super().__init__()
        self.map = nn.Linear(dim, dim, bias=False)
        self.unit = unit
        nn.init.eye_(self.map.weight)

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = self.map(x)
        return nn.functional.normalize(mapped, dim=-1) if self.unit else mapped


def embed_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Stage 5 for inputs `[groups, size, views, ...]`."""
    return lambda inputs: model(inputs.flatten(0, 2)).unflatten(0, inputs.shape[:3])


def clip_float64(gradient: Tensor, l2_clip_norm: float) -> Tensor:
    """Differentiable clipping to exactly C."""
    return gradient * (l2_clip_norm / gradient.norm().clamp_min(l2_clip_norm))


def farthest(
    distance: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    *,
    enough: float = math.inf,
    starts: int = 2,
    steps: int = 30,
) -> Tensor:
    """Returns inputs float64 of `shape` that make `distance` large, by gradient ascent from random starts.

    The search ends a little above `enough`, where the test that asks for it has what it needs.
    """
    generator = torch.Generator().manual_seed(0)
    best, found = -1.0, torch.zeros(shape, dtype=torch.float64)
    for _ in range(starts):
        x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        optimizer = torch.optim.Adam([x], lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            value = distance(x)
            if value.item() > best:
                best, found = value.item(), x.detach().clone()
            if best > 1.02 * enough:
                return found
            (-value).backward()
            optimizer.step()
    return found
