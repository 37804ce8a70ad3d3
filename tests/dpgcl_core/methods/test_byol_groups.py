"""BYOL through the registry: its sum against a slow oracle, and what one record can move."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.losses.objective import EmbeddingObjective
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import LossSettings
from dpgcl_core.sampling.groups import FixedSizeGroups
from dpgcl_core.sampling.poisson import PoissonSampler
from dpgcl_core.sampling.slots import SampledGroups
from dpgcl_core.sampling.stage import SampledRecords
from tests.dpgcl_core.adversary import LinearEncoder, clip_float64, embed_of, farthest
from tests.dpgcl_core.losses.test_byol import _Online
from tests.dpgcl_core.models import TinyEncoder

CLIP = 1e-2


def _mechanism(group_size: int, clip: float = CLIP) -> Mechanism:
    return Mechanism(
        num_records_public=60,
        sampling_prob=0.5,
        group_size=group_size,
        l2_clip_norm=clip,
        noise_multiplier=1.0,
        num_steps=3,
        target_delta=1e-3,
        method="byol_groups",
    )


def _of_records(group_size: int) -> Mechanism:
    return dataclasses.replace(_mechanism(group_size), sampling="records")


def _networks() -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return _Online(), TinyEncoder()


def _sum(mechanism: Mechanism, online: nn.Module, target: nn.Module, views: Tensor) -> tuple[Tensor, str]:
    def embed(some: Tensor) -> Tensor:
        with torch.no_grad():
            targets = embed_of(target)(some)
        return torch.cat([embed_of(online)(some), targets], dim=-1)

    total = torch.zeros(num_trainable(online))
    settings = LossSettings(temperature=0.5)
    objective = EmbeddingObjective(embed=embed, loss=mechanism.loss(settings))
    report = mechanism.rule(settings).add_clipped_sum(total, online, objective, views)
    return total.double(), report.paths.get("", "one pass")


def _views(groups: int, size: int) -> Tensor:
    return torch.randn(groups, size, 2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("clip", [0.1, 100.0])
@pytest.mark.parametrize("size", [1, 3])
def test_one_pass_sum_equals_the_slow_oracle_in_float64(size: int, clip: float) -> None:
    online, target = _networks()
    views = _views(5, size)
    slow, fixed = copy.deepcopy(online).double(), copy.deepcopy(target).double()
    expected = torch.zeros(num_trainable(online), dtype=torch.float64)
    for group in views.double():
        loss = torch.zeros((), dtype=torch.float64)
        for first, second in group:
            for one, other in ((first, second), (second, first)):
                loss = loss + (slow(one[None]) - fixed(other[None]).detach()).square().sum()
        found = torch.autograd.grad(loss, trainable_parameters(slow))
        expected += clip_float64(torch.cat([g.flatten() for g in found]), clip * (1 - 1e-4))
    actual, path = _sum(_mechanism(size, clip), online, target, views)
    assert path == "one pass"
    assert float((actual - expected).norm() / expected.norm()) < 1e-4


def test_target_takes_no_gradient_and_no_hook() -> None:
    online, target = _networks()
    before = [p.clone() for p in target.parameters()]
    _sum(_mechanism(1), online, target, _views(4, 1))
    assert all(p.grad is None for p in target.parameters())
    assert all(torch.equal(p, b) for p, b in zip(target.parameters(), before, strict=True))
    assert not any(module._forward_hooks for module in target.modules())


@pytest.mark.parametrize(("size", "factor"), [(1, 1), (2, 2), (8, 2)])
def test_sensitivity_of_sampled_records_is_c_for_groups_of_one_and_2c_otherwise(
    size: int, factor: int
) -> None:
    assert _of_records(size).sensitivity == factor * CLIP
    assert _mechanism(size).sensitivity == CLIP  # groups are sampled


def _clipped(x: Tensor, target: nn.Module) -> list[Tensor]:
    """Each group's clipped gradient in float64, of `[groups, size, 2, 3]`, for a linear network."""
    gradients = []
    for group in x:
        model = LinearEncoder(3).double()
        predictions, targets = model(group), target(group)
        loss = (predictions - targets.flip(1)).square().sum()
        (found,) = torch.autograd.grad(loss, trainable_parameters(model), create_graph=True)
        gradients.append(clip_float64(found.flatten(), CLIP))
    return gradients


def _target() -> nn.Module:
    target = LinearEncoder(3).requires_grad_(False)
    with torch.no_grad():
        target.map.weight.copy_(torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]]))
    return target


def test_record_that_joins_moves_the_sum_of_single_records_by_c_at_most_and_nearly() -> None:
    target = _target()
    x = torch.randn(4, 1, 2, 3, generator=torch.Generator().manual_seed(1))
    sums = [_sum(_mechanism(1), LinearEncoder(3), target, groups)[0] for groups in (x, x[:-1])]
    shift = float((sums[0] - sums[1]).norm())
    assert 0.99 * CLIP < shift <= _mechanism(1).sensitivity


def test_record_that_takes_anothers_place_moves_the_sum_by_2c_at_most_and_nearly() -> None:
    """In groups of two, the new record takes the place of one that is then left over."""
    target = _target()

    def distance(x: Tensor) -> Tensor:
        rows = (torch.stack([x[0], x[1]]), torch.stack([x[0], x[2]]))
        one, other = (_clipped(pair[None], target.double())[0] for pair in rows)
        return (one - other).norm() / CLIP

    x = farthest(distance, (3, 2, 3), starts=3, steps=60).float()
    target = target.float()
    mechanism = _of_records(2)
    sums = [_sum(mechanism, LinearEncoder(3), target, x[None, [0, row]])[0] for row in (1, 2)]
    shift = float((sums[0] - sums[1]).norm())
    assert 1.5 * CLIP < shift <= mechanism.sensitivity


def test_groups_of_one_are_what_the_mechanism_draws() -> None:
    assert _of_records(1).group_stage() == SampledRecords(
        sampler=PoissonSampler(sampling_prob=0.5), grouper=FixedSizeGroups(group_size=1)
    )
    assert _mechanism(1).group_stage() == SampledGroups(capacity=60, group_size=1, sampling_prob=0.5)
