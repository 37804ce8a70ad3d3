"""Networks made to break Logit-DP's bound in floating point, and a search for more of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.methods.baselines.logit_dp.clipper import LogitClipper

LARGEST = float(torch.finfo(torch.float32).max)


class _Angle(nn.Module):
    """Records (phase, speed) → the unit vector at the angle phase + f(w·speed), with w = 0 and f(0) = 0."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.of = of

    def forward(self, records: Tensor) -> Tensor:
        angle = records[..., 0] + self.of(self.layer(records[..., 1:]))[..., 0]
        return torch.stack([angle.cos(), angle.sin()], dim=-1)


def _overflowing(n: int) -> nn.Module:
    """Its backward pass overflows for cotangents longer than those of a balanced batch of n records."""
    scale = LARGEST / ((1 - 1e-4) * (1 + 0.5 / (n + 1)))
    return _Angle(lambda h: (h / scale) * scale)


def _rounding() -> nn.Module:
    """Its derivative is zero along the axes, and 1e16 times a rounding error along anything else."""
    first, second = torch.tensor(1.2345678), torch.tensor(9.8765432e15)
    return _Angle(lambda h: (h * second) * first - h * (first * second))


def _balanced(n: int) -> Tensor:
    """n queries that move, at angle 0; half of the keys at a right angle to one side, half to the other."""
    records = torch.zeros(1, n, 2, 2)
    records[0, :, 0, 1] = 1
    records[0, :, 1, 0] = math.pi / 2 * torch.where(torch.arange(n) % 2 == 0, 1, -1)
    return records


def _embed(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda inputs: model(inputs.flatten(0, 2)).unflatten(0, inputs.shape[:3])


def _clipped_sum(clipper: LogitClipper, towers: list[nn.Module], records: Tensor) -> Tensor:
    model = nn.ModuleList(towers)
    total = torch.zeros(num_trainable(model), dtype=torch.float64)
    if len(towers) == 1:
        clipper.add_clipped_sum(total, model, _embed(towers[0]), records)
    else:
        pair = (records[:, :, :1], records[:, :, 1:])
        clipper.add_clipped_sum(total, model, (_embed(towers[0]), _embed(towers[1])), pair)
    return total


def _movement(clipper: LogitClipper, towers: list[nn.Module], records: Tensor, removed: int) -> float:
    kept = [i for i in range(records.shape[1]) if i != removed]
    whole = _clipped_sum(clipper, towers, records)
    return float((whole - _clipped_sum(clipper, towers, records[:, kept])).norm())


@pytest.mark.parametrize("num_towers", [1, 2])
@pytest.mark.parametrize("norms", ["exact", "upper_bound"])
@pytest.mark.parametrize(("kind", "n"), [("overflow", 100), ("overflow", 400), ("rounding", 400)])
def test_network_made_to_break_the_bound_does_not(kind: str, n: int, norms: str, num_towers: int) -> None:
    clipper = LogitClipper(logit_clip_norm=1.0, temperature=1.0, norms=norms)  # type: ignore[arg-type]
    towers = [_overflowing(n) if kind == "overflow" else _rounding() for _ in range(num_towers)]
    records = _balanced(n + 2)[:, : n + 1]
    records[0, n, 1, 0] *= -1  # one more on the other side
    assert _movement(clipper, towers, records, n) <= clipper.sensitivity(n + 1)
