"""BYOL without batch statistics: the loss, how targets enter the clipper, and the sensitivity C."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.byol import byol_group_loss, update_target
from tests.dpgcl_core.adversary import LinearEncoder, clip_float64, embed_of, farthest
from tests.dpgcl_core.models import TinyEncoder


class _Online(nn.Module):
    """An encoder with a predictor on top."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = TinyEncoder()
        self.predictor = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.normalize(self.predictor(self.encoder(images)), dim=-1)


def _online() -> tuple[_Online, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return _Online(), TinyEncoder()


def _images(groups: int, size: int = 1, views: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(groups, size, views, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def _unit(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return nn.functional.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def _targets(target: nn.Module, views: Tensor) -> Tensor:
    with torch.no_grad():
        return embed_of(target)(views)


def _sum(model: nn.Module, views: Tensor, targets: Tensor, clip: float) -> Tensor:
    def group_losses(inputs: tuple[Tensor, Tensor]) -> Tensor:
        return byol_group_loss(embed_of(model)(inputs[0]), inputs[1])

    total = torch.zeros(num_trainable(model))
    GroupClipper(l2_clip_norm=clip).add_clipped_sum(total, model, group_losses, (views, targets))
    return total.double()


@pytest.mark.parametrize("views", [2, 3])
def test_byol_loss_equals_squared_distances_of_different_views(views: int) -> None:
    p, t = _unit(2, 3, views, 5), _unit(2, 3, views, 5, seed=1)
    actual = byol_group_loss(p, t)
    for g in range(2):
        expected = sum(
            (p[g, i, v] - t[g, i, w]).square().sum()
            for i in range(3)
            for v in range(views)
            for w in range(views)
            if v != w
        )
        assert actual[g].item() == pytest.approx(float(expected), rel=1e-12)


def test_targets_take_no_gradient() -> None:
    p, t = _unit(2, 1, 2, 5).requires_grad_(), _unit(2, 1, 2, 5, seed=1).requires_grad_()
    byol_group_loss(p, t).sum().backward()
    assert p.grad is not None
    assert t.grad is None


@pytest.mark.parametrize("clip", [0.1, 100.0])
def test_byol_sum_of_single_records_equals_oracle(clip: float) -> None:
    model, target = _online()
    views = _images(5)
    targets = _targets(target, views)
    expected = torch.zeros(num_trainable(model), dtype=torch.float64)
    slow = copy.deepcopy(model).double()
    for i in range(5):
        predictions = [slow(views[i, 0, v][None].double())[0] for v in range(2)]
        loss = (predictions[0] - targets[i, 0, 1]).square().sum()
        loss = loss + (predictions[1] - targets[i, 0, 0]).square().sum()
        flat = [g.flatten() for g in torch.autograd.grad(loss, trainable_parameters(slow))]
        expected += clip_float64(torch.cat(flat), clip * (1 - 1e-4))
    actual = _sum(model, views, targets, clip)
    assert float((actual - expected).norm() / expected.norm()) < 1e-4


def test_byol_microbatch_changes_nothing() -> None:
    model, target = _online()
    views = _images(5)
    targets = _targets(target, views)
    whole = _sum(model, views, targets, 0.1)
    for at_once in (1, 2):
        parts = zip(torch.split(views, at_once), torch.split(targets, at_once), strict=True)
        pieces = sum((_sum(model, v, t, 0.1) for v, t in parts), torch.zeros_like(whole))
        assert float((pieces - whole).norm() / whole.norm()) < 1e-5


@pytest.mark.parametrize("where", ["view", "target"])
def test_non_finite_record_contributes_zero(where: str) -> None:
    model, target = _online()
    views = _images(4)
    targets = _targets(target, views)
    kept = [0, 2, 3]
    expected = _sum(model, views[kept], targets[kept], 0.1)
    if where == "view":
        views[1, 0, 0] = math.nan
    targets = _targets(target, views)
    targets[1, 0, 1] = math.inf if where == "target" else targets[1, 0, 1]
    assert float((_sum(model, views, targets, 0.1) - expected).norm() / expected.norm()) < 1e-5


def _difference(x: Tensor, targets: Tensor) -> Tensor:
    """‖f(D ∪ {r}) − f(D)‖ / C for three records and a linear encoder, in float64."""
    model, sums = LinearEncoder(3).double(), []
    for rows in (slice(None), slice(0, -1)):
        total = torch.zeros(9, dtype=torch.float64)
        for record, target in zip(x[rows], targets[rows], strict=True):
            loss = byol_group_loss(model(record)[None, None], target[None, None]).sum()
            gradient = torch.autograd.grad(loss, trainable_parameters(model), create_graph=True)[0]
            total = total + clip_float64(gradient.flatten(), 1e-2)
        sums.append(total)
    return (sums[0] - sums[1]).norm() / 1e-2


def test_single_record_sensitivity_is_c_for_the_worst_neighbours_found() -> None:
    targets = _unit(3, 2, 3)
    x = farthest(lambda x: _difference(x, targets), (3, 2, 3), starts=2, steps=10).float()
    model, clip = LinearEncoder(3), 1e-2
    sums = [
        _sum(model, x[rows, None], targets[rows, None].float(), clip) for rows in (slice(None), slice(0, -1))
    ]
    shift = float((sums[0] - sums[1]).norm())
    assert 0.99 * clip < shift <= clip


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_target_weights_are_the_moving_average(decay: float) -> None:
    online, target = LinearEncoder(3), LinearEncoder(3)
    with torch.no_grad():
        online.map.weight.fill_(2.0)
    update_target(target, online, decay=decay)
    expected = decay * torch.eye(3) + (1 - decay) * 2
    assert torch.allclose(target.map.weight, expected)
    assert torch.equal(online.map.weight, torch.full((3, 3), 2.0))


def test_target_mirrors_the_part_without_the_predictor() -> None:
    online, target = _online()
    update_target(target, online.encoder, decay=0.0)
    for name, value in target.named_parameters():
        assert torch.equal(value, dict(online.encoder.named_parameters())[name])


def test_target_with_a_parameter_of_its_own_is_refused() -> None:
    online, _ = _online()
    with pytest.raises(ConfigError, match="must have all parameters of the target; it lacks"):
        update_target(online, online.encoder, decay=0.9)


@pytest.mark.parametrize("decay", [-0.1, 1.1, math.nan])
def test_decay_must_be_a_share(decay: float) -> None:
    with pytest.raises(ConfigError, match="decay must be in"):
        update_target(LinearEncoder(2), LinearEncoder(2), decay=decay)
