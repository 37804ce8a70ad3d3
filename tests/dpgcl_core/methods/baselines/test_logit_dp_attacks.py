"""Networks made to break Logit-DP's bound in floating point, and a search for more of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.methods.baselines.logit_dp.jacobians import Jacobians
from dpgcl_core.methods.baselines.logit_dp.similarity_clipper import LogitClipper
from trainers.config.training import NetworkConfig
from trainers.models.encoder import build_encoder

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


def _clipped_sum(clipper: LogitClipper, model: nn.Module, records: Tensor) -> Tensor:
    total = torch.zeros(num_trainable(model), dtype=torch.float64)
    clipper.add_clipped_sum(total, model, _embed(model), records)
    return total


def _movement(clipper: LogitClipper, model: nn.Module, records: Tensor, removed: int) -> float:
    kept = [i for i in range(records.shape[1]) if i != removed]
    whole = _clipped_sum(clipper, model, records)
    return float((whole - _clipped_sum(clipper, model, records[:, kept])).norm())


@pytest.mark.parametrize(("kind", "n"), [("overflow", 100), ("overflow", 400), ("rounding", 400)])
def test_network_made_to_break_the_bound_does_not(kind: str, n: int) -> None:
    clipper = LogitClipper(logit_clip_norm=1.0, temperature=1.0)
    model = _overflowing(n) if kind == "overflow" else _rounding()
    records = _balanced(n + 2)[:, : n + 1]
    records[0, n, 1, 0] *= -1  # one more on the other side
    assert _movement(clipper, model, records, n) <= clipper.sensitivity(n + 1)


def _kinds(generator: torch.Generator) -> list[nn.Module]:
    """Networks whose derivatives are huge, tiny, rounding errors, or infinite for some records."""
    first, second = (10 ** (32 * torch.rand(2, generator=generator) - 16)).tolist()
    return [
        _Angle(lambda h: (h * first) * second),
        _Angle(lambda h: (h * second) * first - h * (first * second)),
        _Angle(lambda h: (h / LARGEST) * (LARGEST * min(1.0, first))),
        _Angle(lambda h: (h * first).abs().sqrt()),
    ]


def test_search_finds_no_record_that_moves_the_sum_too_far() -> None:
    generator = torch.Generator().manual_seed(0)
    clipper = LogitClipper(logit_clip_norm=1.0, temperature=0.5, spread_out=1.0)
    for kind in range(4):
        model = _kinds(generator)[kind]
        records = 3 * torch.randn(1, 9, 2, 2, generator=generator)
        records[..., 1] *= 10 ** (16 * torch.rand(1, 9, 2, generator=generator) - 8)
        assert _movement(clipper, model, records, 0) <= clipper.sensitivity(9)


def _one_pass_of(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings, Gram matrices and, by row, the sum of the gradients along all axes."""
    tower = Jacobians(model, _embed(model), inputs)
    measures = tower.measure(2**20)
    sums = []
    for row in range(len(measures.z)):
        total = torch.zeros(num_trainable(model), dtype=torch.float64)
        cotangents = torch.zeros(measures.z.shape, dtype=torch.float64)
        cotangents[row] = 1
        tower.add_products(total, measures, cotangents)
        sums.append(total)
    return measures.z, measures.gram, torch.stack(sums)


def test_jacobian_of_a_record_does_not_follow_the_others() -> None:
    """Neither their number, nor their order, nor what is infinite in them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_encoder(NetworkConfig(name="tiny_cnn", embedding_dim=8), (1, 8, 8), 0)
    generator = torch.Generator().manual_seed(0)
    records = torch.randn(1, 5, 2, 1, 8, 8, generator=generator)
    records[0, 3:] *= 1e19
    alone = _one_pass_of(model, records[:, :1])
    for order in ([0, 1], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        found = _one_pass_of(model, records[:, order])
        at = 2 * order.index(0)
        for mine, other in zip(alone, found, strict=True):
            assert torch.equal(mine, other[at : at + 2])


def test_jacobian_that_is_computed_again_and_differs_adds_nothing() -> None:
    model, inputs = _rounding(), _balanced(4)
    inputs[0, :, 0, 0] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    tower = Jacobians(model, _embed(model), inputs)
    measures = tower.measure(0)
    assert not tower._parts
    gram = measures.gram.clone()
    gram[2] = gram[2].nextafter(torch.tensor(math.inf).double())
    total = torch.zeros(1, dtype=torch.float64)
    ones = torch.ones_like(measures.z, dtype=torch.float64)
    differs = tower.add_products(total, replace(measures, gram=gram), ones)
    assert differs.nonzero().flatten().tolist() == [2]
    expected = torch.zeros(1, dtype=torch.float64)
    ones[2] = 0
    assert not tower.add_products(expected, measures, ones).any()
    assert torch.equal(total, expected)


def test_every_pass_has_one_shape() -> None:
    model, shapes = _rounding(), set()
    clipper = LogitClipper(logit_clip_norm=1.0, temperature=1.0)
    handle = model.register_forward_hook(lambda module, args, output: shapes.add(args[0].shape))
    for n in (1, 5, 70):
        _clipped_sum(clipper, model, _balanced(70)[:, :n])
    handle.remove()
    assert len(shapes - {(1, 2), (2, 2)}) == 1  # besides made-up rows, before the records


def test_products_are_float64() -> None:
    """Two rows whose products cancel leave what float32 would have rounded away."""
    model, inputs = _Angle(lambda h: h), torch.zeros(1, 1, 2, 2)
    inputs[..., 1] = 1
    tower = Jacobians(model, _embed(model), inputs)
    measures, total = tower.measure(2**20), torch.zeros(1, dtype=torch.float64)
    tower.add_products(total, measures, torch.tensor([[0, 1 + 2.0**-40], [0, -1]], dtype=torch.float64))
    assert total.item() == 2.0**-40
