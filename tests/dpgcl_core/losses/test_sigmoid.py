"""The pairwise sigmoid loss against the slow oracle, and through the group clipper."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.losses.sigmoid import group_sigmoid, two_view_sigmoid_loss
from tests import oracles
from tests.dpgcl_core.adversary import embed_of
from tests.dpgcl_core.models import TinyEncoder


def _unit(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(
        torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1
    )


def _slow(queries: Tensor, keys: Tensor, copies: Tensor, temperature: float, bias: float) -> float:
    """One group, pair by pair, by −log of the logistic function."""
    loss = 0.0
    for i, query in enumerate(queries):
        for j in range(len(keys)):
            for key in (keys[j], *copies[j]):
                label = 1 if i == j else -1
                logit = label * (float(query @ key) / temperature + bias)
                loss -= math.log(1 / (1 + math.exp(-logit)))
    return loss


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 5),
    copies=st.integers(0, 3),
    temperature=st.floats(0.1, 2.0),
    bias=st.floats(-10, 3),
    seed=st.integers(0, 2**16),
)
def test_sigmoid_loss_equals_oracle(
    size: int, copies: int, temperature: float, bias: float, seed: int
) -> None:
    z = _unit(2, size, 2 + copies, 6, seed=seed)
    actual = two_view_sigmoid_loss(z, temperature=temperature, bias=bias)
    for g in range(2):
        expected = _slow(z[g, :, 0], z[g, :, 1], z[g, :, 2:], temperature, bias)
        assert actual[g].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_sigmoid_loss_without_copies_is_symmetric_in_queries_and_keys() -> None:
    a, b = _unit(2, 4, 6), _unit(2, 4, 6, seed=1)
    there, back = (group_sigmoid(x, y, temperature=0.1, bias=-2.0) for x, y in ((a, b), (b, a)))
    assert torch.allclose(there, back)


def test_sigmoid_loss_of_one_group_ignores_the_others() -> None:
    z = _unit(3, 4, 3, 6).requires_grad_()
    two_view_sigmoid_loss(z, temperature=0.2, bias=-2.0)[1].backward()
    assert z.grad is not None
    assert float(z.grad[[0, 2]].abs().max()) == 0.0
    assert float(z.grad[1].abs().max()) > 0.0


def test_positives_and_negatives_weigh_the_same_at_the_stated_bias() -> None:
    size, temperature = 5, 0.2
    z = torch.zeros(1, size, 2, 3, dtype=torch.float64)
    z[..., 0] = 1.0  # all similarities are 1
    bias = torch.tensor(-1 / temperature - math.log(size - 1), dtype=torch.float64, requires_grad=True)
    two_view_sigmoid_loss(z, temperature=temperature, bias=bias).sum().backward()
    assert bias.grad is not None
    assert abs(float(bias.grad)) < 1e-12


def test_temperature_and_bias_may_be_learned() -> None:
    scale = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    two_view_sigmoid_loss(_unit(1, 3, 3, 6), temperature=scale[0], bias=scale[1]).sum().backward()
    assert scale.grad is not None
    assert bool((scale.grad != 0).all())


def test_sigmoid_loss_is_finite_for_extreme_logits() -> None:
    z = _unit(2, 3, 2, 6).requires_grad_()
    loss = two_view_sigmoid_loss(z, temperature=1e-4, bias=-10.0).sum()
    loss.backward()
    assert z.grad is not None
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(z.grad).all())


def test_sigmoid_groups_clip_to_the_oracle_sum_and_move_by_at_most_2c() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = TinyEncoder()
    embed = embed_of(model)
    views = torch.randn(4, 3, 3, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def losses(inputs: Tensor) -> Tensor:
        return two_view_sigmoid_loss(embed(inputs), temperature=0.2, bias=-2.0)

    replaced = views.clone()
    replaced[1, 2] = 9 * torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    totals = []
    for inputs in (views, replaced):
        totals.append(torch.zeros(num_trainable(model)))
        GroupClipper(l2_clip_norm=0.1).add_clipped_sum(totals[-1], model, losses, inputs)
        expected = oracles.clipped_sum(model, losses, inputs, 0.1 * (1 - 1e-4))
        assert torch.allclose(totals[-1].double(), expected, rtol=1e-4, atol=1e-7)
    assert 0 < float((totals[0] - totals[1]).norm()) <= 0.2
