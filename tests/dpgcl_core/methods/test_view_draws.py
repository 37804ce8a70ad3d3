"""Several draws of the views: averaged before clipping inside groups, after it in whole batches."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.losses.objective import EmbeddingObjective
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import LossSettings
from dpgcl_core.mechanism.registry import METHODS
from dpgcl_core.methods.view_draws import draws_of, objective_over_view_draws, over_view_draws
from dpgcl_core.sampling.groups import BATCH
from tests.dpgcl_core.adversary import LinearEncoder, clip_float64, embed_of, farthest
from tests.dpgcl_core.models import TinyEncoder

WHOLE_BATCH = ("dp_sgd", "group_clip", "logit_dp", "logit_dp_spread_out")
GROUPS = ("dp_gcl", "dp_clip", "siglip_groups")


def _mechanism(method: str, **changes: object) -> Mechanism:
    rules = METHODS[method]
    mechanism = Mechanism(
        num_records_public=60,
        sampling_prob=0.1,
        group_size=2 if rules.takes_group_size else BATCH,
        l2_clip_norm=1e-2,
        noise_multiplier=1.0,
        num_steps=3,
        target_delta=1e-3,
        method=method,
        batch_cap=40 if rules.needs_cap else None,
        temperature=0.5,
    )
    return dataclasses.replace(mechanism, **changes)  # type: ignore[arg-type]


def _sum(method: str, inputs: Tensor, num_draws: int, model: torch.nn.Module, **changes: object) -> Tensor:
    mechanism = _mechanism(method, **changes)
    settings = LossSettings(temperature=0.5)
    rule = over_view_draws(mechanism.rule(settings), num_draws)
    objective = EmbeddingObjective(embed=embed_of(model), loss=mechanism.loss(settings))
    objective_of_draws = objective_over_view_draws(objective, num_draws)
    total = torch.zeros(num_trainable(model))
    rule.add_clipped_sum(total, model, objective_of_draws, inputs, np.random.default_rng(0))
    return total


def _model() -> TinyEncoder:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return TinyEncoder()


def _views(*leading: int, seed: int = 0) -> Tensor:
    return torch.randn(*leading, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_copies", [0, 1, 2])
def test_every_view_is_in_one_draw(num_copies: int) -> None:
    views = torch.arange(3 * (2 + num_copies)).view(1, 1, -1)
    draws = list(draws_of(views, 3))
    assert {draw.shape[2] for draw in draws} == {2 + num_copies}
    assert sorted(torch.cat(draws, dim=2).flatten().tolist()) == list(range(3 * (2 + num_copies)))


def test_pairs_are_the_same_views_whatever_the_number_of_copies() -> None:
    pairs = [
        [draw[0, 0, :2].tolist() for draw in draws_of(torch.arange(2 * (2 + copies)).view(1, 1, -1), 2)]
        for copies in (0, 3)
    ]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize("clip", [1e-2, 100.0])
def test_gradients_of_a_group_are_averaged_before_clipping(clip: float) -> None:
    model, views, k = _model(), _views(4, 2, 6), 2
    slow = copy.deepcopy(model).double()
    expected = torch.zeros(num_trainable(model), dtype=torch.float64)
    for group in views:
        gradient = torch.zeros_like(expected)
        for draw in range(k):
            chosen = group[:, [2 * draw, 2 * draw + 1, 2 * k + draw]].double()
            embeddings = slow(chosen.flatten(0, 1)).unflatten(0, (1, 2, 3))
            loss = two_view_group_loss(embeddings, temperature=0.5)
            found = torch.autograd.grad(loss.sum(), trainable_parameters(slow))
            gradient += torch.cat([g.flatten() for g in found]) / k
        expected += clip_float64(gradient, clip * (1 - 1e-4))
    actual = _sum("dp_gcl", views, k, model, l2_clip_norm=clip).double()
    assert float((actual - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("clip", [1e-2, 100.0])
def test_any_objective_is_averaged_over_the_draws_before_clipping(clip: float) -> None:
    model, (first, second) = _model(), (_views(4, 2, 2, seed=seed) for seed in (0, 1))

    def objective(inputs: tuple[Tensor, Tensor]) -> Tensor:
        views, weights = inputs
        found: Tensor = model(views.flatten(0, 2)).unflatten(0, views.shape[:3])
        return (found.square() * weights[..., None]).flatten(1).sum(1)

    def weigh(views: Tensor) -> tuple[Tensor, Tensor]:
        return views, views.flatten(3).mean(-1)

    def mean_of_both(inputs: tuple[Tensor, Tensor]) -> Tensor:
        return sum((objective(tuple(part.contiguous() for part in each)) for each in inputs), start=0) / 2  # type: ignore[return-value]

    clipper = GroupClipper(l2_clip_norm=clip)
    expected, actual = (torch.zeros(num_trainable(model)) for _ in range(2))
    for group in range(4):  # one group at a time, its draws in two passes
        one = (weigh(first[group : group + 1]), weigh(second[group : group + 1]))
        clipper.add_clipped_sum(expected, model, lambda _, one=one: mean_of_both(one), first[:1])
    together = weigh(torch.cat([first, second], dim=2))
    clipper.add_clipped_sum(actual, model, objective_over_view_draws(objective, 2), together)
    assert float((actual - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("method", WHOLE_BATCH)
def test_sum_of_a_whole_batch_is_the_mean_of_its_draws_sums(method: str) -> None:
    size = (3, 2) if METHODS[method].takes_group_size else (1, 6)
    num_copies = 1 if METHODS[method].takes_augmented_keys else 0
    model, k = _model(), 3
    views = _views(*size, k * (2 + num_copies))
    alone = [_sum(method, draw, 1, model) for draw in draws_of(views, k)]
    actual, expected = _sum(method, views, k, model), torch.stack(alone).mean(0)
    assert float((actual - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("method", [*GROUPS, *WHOLE_BATCH])
def test_one_draw_is_the_rule_itself(method: str) -> None:
    rule = _mechanism(method).rule(LossSettings(temperature=0.5))
    assert over_view_draws(rule, 1) is rule


@pytest.mark.parametrize("method", [name for name in METHODS if name.startswith("dpcl")])
def test_methods_that_release_statistics_refuse_several_draws(method: str) -> None:
    rule = _mechanism(method, l2_clip_norm=1.0).rule(LossSettings(temperature=0.5))
    with pytest.raises(ConfigError, match="give num_view_draws = 1; got 4"):
        over_view_draws(rule, 4)


def _shift(method: str, x: Tensor, k: int, clip: float) -> float:
    """How far one record more moves the sum, in float32 through the registry; it completes a group."""
    model = LinearEncoder(3)
    if METHODS[method].takes_group_size:
        batches = (x.unflatten(0, (-1, 2)), x[:-2].unflatten(0, (-1, 2)))
    else:
        batches = (x[None], x[None, :-1])
    after, before = (_sum(method, batch.float(), k, model, l2_clip_norm=clip) for batch in batches)
    return float((after - before).norm())


@pytest.mark.parametrize("method", [*GROUPS, *WHOLE_BATCH])
def test_one_record_moves_the_sum_over_draws_by_no_more_than_the_sensitivity(method: str) -> None:
    clip, k = 1e-2, 3
    sensitivity = _mechanism(method, l2_clip_norm=clip).sensitivity
    for seed in range(5):
        x = torch.randn(6, 2 * k, 3, generator=torch.Generator().manual_seed(seed))
        assert 0 < _shift(method, x, k, clip) <= sensitivity


def test_exchange_of_a_record_moves_a_group_by_nearly_the_sensitivity() -> None:
    """Two records whose groups' gradients point apart; clipping each draw apart would also stay below, but
    a sum over draws instead of their mean would go to K times as far."""
    clip, k = 1e-2, 3
    model = LinearEncoder(3)

    def apart(x: Tensor) -> Tensor:
        slow, gradients = LinearEncoder(3).double(), []
        for group in x:
            loss = torch.stack(
                [two_view_group_loss(slow(draw), temperature=0.5).sum() for draw in draws_of(group[None], k)]
            ).mean()
            found = torch.autograd.grad(loss, trainable_parameters(slow), create_graph=True)[0]
            gradients.append(clip_float64(found.flatten(), clip))
        return (gradients[0] - gradients[1]).norm() / clip

    x = farthest(apart, (2, 2, 2 * k, 3), starts=2, steps=40).float()
    one, other = (_sum("dp_gcl", x[row : row + 1], k, model, l2_clip_norm=clip) for row in (0, 1))
    shift = float((one - other).norm())
    of_records = _mechanism("dp_gcl", l2_clip_norm=clip, sampling="records")
    assert 1.8 * clip < shift <= of_records.sensitivity
    of_groups = _mechanism("dp_gcl", l2_clip_norm=clip, sampling="groups")
    assert 0.99 * clip < max(float(one.norm()), float(other.norm())) <= of_groups.sensitivity
