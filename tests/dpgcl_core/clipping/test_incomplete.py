"""A group that is not complete contributes exactly zero, and changes no other group's contribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import ONE_BY_ONE, GroupClipper
from dpgcl_core.clipping.parts import ClippingParts
from dpgcl_core.clipping.types import GroupReport, num_trainable
from tests.dpgcl_core.models import SequenceFirst, TinyEncoder, group_losses_of

FOLDED, LOOPED = TinyEncoder, SequenceFirst


def _model(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind()


def _views(groups: int = 5) -> Tensor:
    return torch.randn(groups, 2, 3, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def _sum(
    model: nn.Module, views: Tensor, complete: Tensor | None, clip: float = 0.05
) -> tuple[Tensor, GroupReport]:
    total = torch.zeros(num_trainable(model))
    clipper = GroupClipper(l2_clip_norm=clip)
    return total, clipper.add_clipped_sum(total, model, group_losses_of(model), views, complete)


@pytest.mark.parametrize("value", [0.0, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("clip", [0.05, 100.0, math.inf])
@pytest.mark.parametrize("kind", [FOLDED, LOOPED])
def test_inputs_of_an_incomplete_group_change_no_bit_of_the_sum(
    kind: type[nn.Module], clip: float, value: float
) -> None:
    model, views = _model(kind), _views()
    complete = torch.tensor([True, False, True, True, False])
    expected, before = _sum(model, views, complete, clip)
    other = views.clone()
    other[~complete] = value
    actual, after = _sum(model, other, complete, clip)
    assert torch.equal(actual, expected)
    assert float(expected.norm()) > 0
    for name in ("norms", "losses", "non_finite"):
        found = [getattr(report, name) for report in (before, after)]
        assert torch.equal(*(each.nan_to_num() for each in found))
        assert not found[1][~complete].any()


@pytest.mark.parametrize("clip", [0.05, 100.0, math.inf])
@pytest.mark.parametrize("kind", [FOLDED, LOOPED])
def test_sum_is_that_of_the_complete_groups(kind: type[nn.Module], clip: float) -> None:
    model, views = _model(kind), _views()
    complete = torch.tensor([True, False, True, True, False])
    actual, _ = _sum(model, views, complete, clip)
    expected, _ = _sum(model, views[complete], None, clip)
    assert float((actual - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("kind", [FOLDED, LOOPED])
def test_a_mask_of_complete_groups_changes_no_bit(kind: type[nn.Module]) -> None:
    model, views = _model(kind), _views()
    masked, report = _sum(model, views, torch.ones(5, dtype=torch.bool))
    plain, _ = _sum(model, views, None)
    assert torch.equal(masked, plain)
    assert (ONE_BY_ONE in report.paths.values()) == (kind is LOOPED)


@pytest.mark.parametrize("clip", [0.05, math.inf])
def test_incomplete_groups_alone_add_exactly_nothing(clip: float) -> None:
    model = _model(TinyEncoder)
    total, report = _sum(model, torch.full_like(_views(), math.nan), torch.zeros(5, dtype=torch.bool), clip)
    assert not total.any()
    assert report.complete is not None
    assert not report.complete.any()


@pytest.mark.parametrize("value", [0.0, math.nan])
@pytest.mark.parametrize("kind", [FOLDED, LOOPED])
def test_incomplete_group_is_zero_in_every_part(kind: type[nn.Module], value: float) -> None:
    model, views = _model(kind), _views()
    first = next(name for name, _ in model.named_parameters())
    clipper = GroupClipper(l2_clip_norm=0.05, parts=ClippingParts(prefixes=(first,)))
    complete = torch.tensor([True, False, True, True, False])
    sums = []
    for inputs, mask in ((views, complete), (views[complete], None)):
        total = torch.zeros(num_trainable(model))
        inputs = inputs.clone()
        if mask is not None:
            inputs[~mask] = value
        report = clipper.add_clipped_sum(total, model, group_losses_of(model), inputs, mask)
        sums.append(total)
    assert report.part_ratios is not None
    assert float((sums[0] - sums[1]).norm() / sums[1].norm()) < 1e-6
