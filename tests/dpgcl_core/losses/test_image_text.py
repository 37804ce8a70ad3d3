"""The loss of image-text groups against a slow oracle, and its sensitivity with a learned temperature."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import ONE_BY_ONE, GroupClipper
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.image_text import (
    MAX_LOGIT_SCALE,
    MIN_LOGIT_SCALE,
    clamp_logit_scale_,
    image_text_group_loss,
    image_text_sigmoid_loss,
    interleaved,
    with_learned_temperature,
)
from dpgcl_core.losses.sigmoid import group_sigmoid
from tests import oracles

C = 0.5


def _unit(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def _oracle(images: Tensor, texts: Tensor, temperature: float) -> float:
    """One group, pair by pair: `[size, 1 + copies, dim]` each."""
    total = 0.0
    for queries, keys in ((images, texts), (texts, images)):
        for i in range(len(queries)):
            row = [
                math.exp(float(queries[i, 0] @ key) / temperature)
                for j in range(len(keys))
                for key in keys[j]  # the key itself, then its copies
            ]
            total -= math.log(math.exp(float(queries[i, 0] @ keys[i, 0]) / temperature) / sum(row))
    return total


class _TwoTowers(nn.Module):
    """Linear towers on halves of the input, and CLIP's bare scalar."""

    def __init__(self, logit_scale: float = 2.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.image, self.text = nn.Linear(6, 4), nn.Linear(6, 4)
        self.logit_scale = nn.Parameter(torch.tensor(logit_scale))

    def losses(self, inputs: Tensor) -> Tensor:
        """`[groups, group_size, 1 + copies, 12]` to `[groups]`."""
        towers = ((self.image, inputs[..., :6]), (self.text, inputs[..., 6:]))
        rows = [F.normalize(tower(x.reshape(-1, 6)), dim=-1) for tower, x in towers]
        images, texts = (row.view(*inputs.shape[:3], 4) for row in rows)
        embeddings = with_learned_temperature(interleaved(images, texts), self.logit_scale)
        return image_text_group_loss(embeddings, temperature=1.0)


def _inputs(num_groups: int, group_size: int = 3, copies: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_groups, group_size, 1 + copies, 12, generator=generator)


def _clipped_sum(model: _TwoTowers, inputs: Tensor) -> Tensor:
    total = torch.zeros(num_trainable(model))
    if len(inputs):
        GroupClipper(l2_clip_norm=C).add_clipped_sum(total, model, model.losses, inputs)
    return total


@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 3),
    size=st.integers(1, 4),
    copies=st.integers(0, 3),
    temperature=st.floats(0.05, 2.0),
    seed=st.integers(0, 2**16),
)
def test_image_text_loss_equals_slow_oracle(
    groups: int, size: int, copies: int, temperature: float, seed: int
) -> None:
    images, texts = (_unit(groups, size, 1 + copies, 5, seed=seed + i) for i in range(2))
    actual = image_text_group_loss(interleaved(images, texts), temperature=temperature)
    expected = [_oracle(images[g], texts[g], temperature) for g in range(groups)]
    assert actual.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_image_text_loss_has_copies_of_the_keys_as_negatives_in_both_directions() -> None:
    images, texts = (_unit(1, 3, 2, 5, seed=i).requires_grad_() for i in range(2))
    image_text_group_loss(interleaved(images, texts), temperature=0.5).sum().backward()
    assert float(images.grad[:, :, 1].abs().min()) > 0
    assert float(texts.grad[:, :, 1].abs().min()) > 0


def test_image_text_loss_of_one_group_ignores_the_others() -> None:
    images, texts = (_unit(3, 4, 3, 6, seed=i).requires_grad_() for i in range(2))
    image_text_group_loss(interleaved(images, texts), temperature=0.2)[1].backward()
    assert float(images.grad[[0, 2]].abs().max()) == float(texts.grad[[0, 2]].abs().max()) == 0.0


def test_image_text_loss_refuses_an_odd_number_of_views() -> None:
    with pytest.raises(ConfigError, match="3 views"):
        image_text_group_loss(_unit(1, 2, 3, 4), temperature=0.5)


def test_interleaved_refuses_differently_augmented_towers() -> None:
    with pytest.raises(ConfigError, match="the same number of augmentations"):
        interleaved(_unit(1, 2, 3, 4), _unit(1, 2, 2, 4))


def test_logit_scale_gradient_is_that_of_the_slow_oracle() -> None:
    images, texts = (_unit(1, 3, 2, 5, seed=i) for i in range(2))
    scale = torch.tensor(1.2, dtype=torch.float64, requires_grad=True)
    embeddings = with_learned_temperature(interleaved(images, texts), scale)
    image_text_group_loss(embeddings, temperature=1.0).sum().backward()
    there, back = (_oracle(images[0], texts[0], math.exp(-1.2 - e)) for e in (1e-5, -1e-5))
    assert scale.grad.item() == pytest.approx((there - back) / 2e-5, rel=1e-6)


def test_logit_scale_gradient_is_separated_by_group_in_one_pass() -> None:
    model, inputs = _TwoTowers(), _inputs(5)
    total = torch.zeros(num_trainable(model))
    report = GroupClipper(l2_clip_norm=C).add_clipped_sum(total, model, model.losses, inputs)
    assert ONE_BY_ONE not in report.paths.values()
    expected = oracles.clipped_sum(model, model.losses, inputs, C * (1 - 1e-4))
    assert torch.allclose(total.double(), expected, rtol=2e-5, atol=2e-5 * C)


def test_logit_scale_is_inside_the_group_norm() -> None:
    # At this temperature ∂L/∂logit_scale is long: left out of the norm, it alone would exceed C.
    model = _TwoTowers(logit_scale=MAX_LOGIT_SCALE)
    inputs = _inputs(1, seed=3)
    (gradient,) = torch.autograd.grad(model.losses(inputs).sum(), [model.logit_scale])
    assert abs(float(gradient)) > 2 * C
    assert float(_clipped_sum(model, inputs).norm()) <= C


@pytest.mark.parametrize("logit_scale", [MIN_LOGIT_SCALE, 2.0, MAX_LOGIT_SCALE])
@pytest.mark.parametrize("new_size", [0, 4])
def test_one_exchanged_group_moves_the_clipped_sum_by_at_most_2c(logit_scale: float, new_size: int) -> None:
    """The coupling's two cases: a group exchanged for another, and one group more (then C)."""
    model, inputs = _TwoTowers(logit_scale), _inputs(4, group_size=4)
    others = inputs[1:]
    exchanged = torch.cat([_inputs(1, 4, seed=9) * 30, others]) if new_size else others
    moved = float((_clipped_sum(model, inputs) - _clipped_sum(model, exchanged)).norm())
    assert moved <= (2 if new_size else 1) * C + 1e-6
    assert moved > 0.5 * C  # the bound is not met for lack of gradients


def test_exchanged_record_moves_no_other_groups_contribution() -> None:
    model, inputs = _TwoTowers(), _inputs(3)
    changed = inputs.clone()
    changed[0, 1] = -3 * inputs[0, 1]
    alone = _clipped_sum(model, inputs[:1]) - _clipped_sum(model, changed[:1])
    together = _clipped_sum(model, inputs) - _clipped_sum(model, changed)
    assert torch.allclose(alone, together, atol=1e-5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (9.0, MAX_LOGIT_SCALE),
        (-3.0, MIN_LOGIT_SCALE),
        (2.5, 2.5),
        (math.nan, MIN_LOGIT_SCALE),
        (math.inf, MAX_LOGIT_SCALE),
    ],
)
def test_clamped_logit_scale_is_within_its_public_bounds(value: float, expected: float) -> None:
    scale = nn.Parameter(torch.tensor(value))
    clamp_logit_scale_(scale)
    assert scale.item() == pytest.approx(expected)


def test_learned_temperature_divides_every_inner_product() -> None:
    images, texts = (_unit(1, 3, 2, 5, seed=i) for i in range(2))
    scale = torch.tensor(math.log(1 / 0.07), dtype=torch.float64)
    fixed = image_text_group_loss(interleaved(images, texts), temperature=0.07)
    learned = image_text_group_loss(
        with_learned_temperature(interleaved(images, texts), scale), temperature=1.0
    )
    assert learned.item() == pytest.approx(fixed.item(), rel=1e-6)


def test_sigmoid_loss_of_pairs_has_copies_on_both_sides() -> None:
    images, texts = (_unit(1, 3, 2, 5, seed=i) for i in range(2))
    expected = group_sigmoid(images[:, :, 0], texts[:, :, 0], texts[:, :, 1:], temperature=0.5, bias=-1.0)
    expected += group_sigmoid(texts[:, :, 0], images[:, :, 0], images[:, :, 1:], temperature=0.5, bias=-1.0)
    found = image_text_sigmoid_loss(interleaved(images, texts), temperature=0.5, bias=-1.0)
    assert found.item() == pytest.approx(expected.item())
