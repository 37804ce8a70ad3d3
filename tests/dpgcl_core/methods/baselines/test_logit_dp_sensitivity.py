"""Logit-DP's sensitivity: worst cases through the real clipper, and the bounds that they break."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError
from dpgcl_core.methods.baselines.logit_dp.similarity_clipper import LogitClipper
from tests.dpgcl_core.models import TinyEncoder

TAU, N = 0.2, 200


class Rotation(nn.Module):
    """Records (speed, phase) → the unit vector at angle θ·speed + phase, with one parameter θ."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, records: Tensor) -> Tensor:
        angle = self.layer(records[..., :1])[..., 0] + records[..., 1]
        return torch.stack([angle.cos(), angle.sin()], dim=-1)


MODEL = Rotation()


def _clipped_sum(clipper: LogitClipper, records: Tensor) -> Tensor:
    model = MODEL
    total = torch.zeros(num_trainable(model))

    def embed(inputs: Tensor) -> Tensor:
        return model(inputs.flatten(0, 2)).unflatten(0, inputs.shape[:3])

    clipper.add_clipped_sum(total, model, embed, records)
    return total.double()


def _worst_case(n: int) -> Tensor:
    """n records (query, key), of which the last moves every softmax as far as it can.

    Queries of the others stand at its key and opposite their own keys, its query at their keys. Phases are
    off by a little, so that no gradient vanishes; queries are fast, so that every gradient is clipped, and
    the signs of the coefficients and of the gradients agree.
    """
    little = 0.02
    query, key = torch.zeros(n, 2), torch.zeros(n, 2)
    query[:, 0] = -1000.0
    key[:, 1] = -math.pi - little
    key[-1, 1] = -little
    query[-1, 1] = -math.pi
    return torch.stack([query, key], dim=1)[None]


def _shift(clipper: LogitClipper, records: Tensor, removed: int = -1) -> float:
    kept = [i for i in range(records.shape[1]) if i != removed % records.shape[1]]
    return float((_clipped_sum(clipper, records) - _clipped_sum(clipper, records[:, kept])).norm())


def test_worst_case_attains_the_sensitivity() -> None:
    clipper = LogitClipper(logit_clip_norm=1.0, temperature=TAU)
    shift = _shift(clipper, _worst_case(N))
    assert 0.9998 * clipper.sensitivity(N) <= shift <= clipper.sensitivity(N)


def test_worst_case_breaks_the_bounds_that_fall_short() -> None:
    clipper = LogitClipper(logit_clip_norm=1.0, temperature=TAU)
    shift, a = _shift(clipper, _worst_case(N)), math.exp(2 / TAU)
    without_temperature = clipper.sensitivity(N) * TAU
    merged_rows = 2 / TAU * (1 + (N - 2) * a / (a + N - 1))
    assert round(merged_rows, 1) == 1972.3
    assert shift > 4.9 * without_temperature
    assert shift > merged_rows


@pytest.mark.parametrize("n", [2, 3, 10, 50])
def test_spread_out_worst_case_stays_within_six(n: int) -> None:
    clipper = LogitClipper(logit_clip_norm=1.0, temperature=1e3, spread_out=1.0)
    shift = _shift(clipper, _spread_out_case(n))
    assert (0.98 * 6 if n > 2 else 3.9) < shift <= clipper.sensitivity(n)


def _spread_out_case(n: int) -> Tensor:
    """Similarities near 1, with the gradients of the last record's pairs against those of all others.

    So what its pairs add and what the others lose, for their share was 1/(n − 2), point the same way.
    """
    little = 0.02
    query, key = torch.zeros(n, 2), torch.zeros(n, 2)
    query[:, 0] = -1000.0
    key[:, 1] = little
    key[-1, 1] = -little
    query[-1, 1] = 2 * little
    return torch.stack([query, key], dim=1)[None]


@pytest.mark.ci
@pytest.mark.parametrize("options", [{}, {"spread_out": 1.0}])
def test_random_neighbours_stay_within_the_sensitivity(options: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(0)
    clipper = LogitClipper(logit_clip_norm=1.0, temperature=0.3, **options)  # type: ignore[arg-type]
    for n in (2, 3, 5, 9):
        for _ in range(10):
            speeds = 10 ** (4 * torch.rand(1, n, 2, generator=generator) - 2)
            speeds *= torch.where(torch.rand(1, n, 2, generator=generator) < 0.5, -1, 1)
            phases = 7 * torch.rand(1, n, 2, generator=generator)
            records = torch.stack([speeds, phases], dim=3)
            for removed in range(n):
                assert _shift(clipper, records, removed) <= clipper.sensitivity(n)


def test_adversarial_record_against_a_network_stays_within_the_sensitivity() -> None:
    """Pixels follow the gradient towards the proof's worst case; B is tiny, so that every pair is clipped."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = TinyEncoder()
    clipper = LogitClipper(logit_clip_norm=1e-3, temperature=0.1)
    others = torch.randn(1, 5, 2, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def embed(inputs: Tensor) -> Tensor:
        return model(inputs.flatten(0, 2)).unflatten(0, inputs.shape[:3])

    def total_of(records: Tensor) -> Tensor:
        total = torch.zeros(num_trainable(model))
        clipper.add_clipped_sum(total, model, embed, records)
        return total.double()

    without = total_of(others)
    mean_query = embed(others)[0, :, 0].mean(0).detach()
    record = torch.randn(1, 1, 2, 3, 8, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
    shifts = []
    for _ in range(15):
        shifts.append(float((total_of(torch.cat([others, record.detach()], 1)) - without).norm()))
        z = embed(record)[0, 0]
        # Its key near the others' queries, its query away from its key: what the proof calls the worst.
        (gradient,) = torch.autograd.grad(z[1] @ mean_query - z[0] @ z[1], record)
        record = (record + gradient.sign() * 0.3).detach().requires_grad_()
    assert max(shifts) > 1.2 * shifts[0]
    assert max(shifts) <= clipper.sensitivity(6)


def test_sensitivity_grows_with_the_cap_to_its_limit() -> None:
    clipper = LogitClipper(logit_clip_norm=2.0, temperature=0.5)
    values = [clipper.sensitivity(n) for n in (1, 2, 5, 100, 10**6)]
    assert values == sorted(values)
    assert values[0] == 2 * 2.0 / 0.5
    assert clipper.sensitivity() == pytest.approx(2 * 2.0 / 0.5 * (1 + math.exp(4)))
    assert clipper.sensitivity(10**9) == pytest.approx(clipper.sensitivity(), rel=1e-6)


def test_sensitivity_without_a_finite_limit_asks_for_a_cap() -> None:
    clipper = LogitClipper(logit_clip_norm=1.0, temperature=1e-3)
    assert clipper.sensitivity(10) == pytest.approx(2000 * 10)
    with pytest.raises(ConfigError, match="batch_cap"):
        clipper.sensitivity()


def test_sensitivity_refuses_an_empty_cap() -> None:
    with pytest.raises(ConfigError, match="batch_cap must be at least 1"):
        LogitClipper(logit_clip_norm=1.0, temperature=0.5).sensitivity(0)
