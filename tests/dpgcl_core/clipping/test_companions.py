"""A group's contribution depends on no other group of its pass, and not on how many there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping import clipper as clipping
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.types import GroupReport, num_trainable
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.passes import groups_of_a_pass
from tests.dpgcl_core.models import (
    Routed,
    SequenceFirst,
    SharedLayer,
    TinyEncoder,
    built,
    group_losses_of,
    random_views,
)

CLIP = 0.1


def _sum(
    model: nn.Module, views: Tensor, precision: str, complete: Tensor | None = None, at_once: int = 4
) -> tuple[Tensor, GroupReport]:
    losses, total = group_losses_of(model), torch.zeros(num_trainable(model))

    def objective(inputs: Tensor) -> Tensor:
        if precision == "float32":
            return losses(inputs)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return losses(inputs).float()

    clipper = GroupClipper(l2_clip_norm=CLIP, groups_at_once=at_once)
    if precision != "float32":  # low precision does not reach the self-check's tolerance
        clipper.add_clipped_sum(torch.zeros_like(total), model, losses, views[:1])
    return total, clipper.add_clipped_sum(total, model, objective, views, complete)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [TinyEncoder, SharedLayer, SequenceFirst])
def test_companions_and_their_number_change_no_bit_of_a_contribution(
    kind: type[nn.Module], precision: str
) -> None:
    """The first group's contribution, with whatever other groups: alone it took another path once."""
    model, views = built(kind), random_views(9)
    alone, report = _sum(model, views[:1], precision)
    for count in (2, 3, 4, 5, 9):
        for others in (views[1:count], 50 * random_views(count - 1, seed=7)):
            groups = torch.cat([views[:1], others])
            only = torch.arange(count) == 0
            total, found = _sum(model, groups, precision, only)
            assert torch.equal(total, alone)
            _, all_of_them = _sum(model, groups, precision)
            for each in (found, all_of_them):
                assert torch.equal(each.norms[:1], report.norms)
                assert torch.equal(each.losses[:1], report.losses)


@pytest.mark.parametrize(("precision", "margin"), [("float32", 4e-6), ("bfloat16", 2e-2)])
def test_place_in_a_pass_moves_a_contribution_by_no_more_than_the_margin(
    precision: str, margin: float
) -> None:
    model, views = built(TinyEncoder), random_views(4)
    first, _ = _sum(model, views, precision, torch.arange(4) == 0)
    for place in (1, 2, 3):
        moved, _ = _sum(model, views.roll(place, 0), precision, torch.arange(4) == place)
        assert float((moved - first).norm()) <= margin * CLIP


def test_arrival_moves_the_sum_by_its_own_contribution_alone() -> None:
    """One group more crossed from the loop to one pass, and its companion moved by 1.7e-3 C in bfloat16."""
    model, views = built(TinyEncoder), random_views(2)
    before, _ = _sum(model, views[:1], "bfloat16")
    after, _ = _sum(model, views, "bfloat16")
    arrived, _ = _sum(model, views, "bfloat16", torch.tensor([False, True]))
    assert float((after - before - arrived).norm()) <= 1e-6 * CLIP


def test_group_that_takes_another_way_leaves_its_companions_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that cannot be separated is not looped over: each group's way is decided by itself."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(192, 4)

        def forward(self, images: Tensor) -> Tensor:
            out = self.head(images.flatten(1))
            unusual = out.abs().amax(1) > 1e3
            if unusual.any():
                out = out.clone()
                out[unusual] = out[unusual] / 1e3
            return nn.functional.normalize(out, dim=-1)

    model, views = built(Sometimes), random_views(3)
    unusual = torch.cat([views[:2], 1e6 * views[2:]])
    usual, _ = _sum(model, views, "float32", torch.tensor([True, True, False]))
    looped = []
    right = clipping._loop

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        looped.append(len(kwargs["groups"]))
        return right(*args, **kwargs)

    monkeypatch.setattr(clipping, "_goes_in_one_pass", lambda *_: True)
    monkeypatch.setattr(clipping, "_loop", counted)
    beside, report = _sum(model, unusual, "float32", torch.tensor([True, True, False]))
    assert looped == [1]
    assert not report.non_finite.any()
    assert float((beside - usual).norm()) <= 1e-6 * CLIP


def test_path_is_the_shapes_choice_and_not_the_counts() -> None:
    for kind in (TinyEncoder, Routed):
        paths = [_sum(built(kind), random_views(count), "float32")[1].paths for count in (1, 2, 5)]
        assert paths[0] == paths[1] == paths[2]


def _mechanism(**changes: float) -> Mechanism:
    numbers = {"num_records_public": 10_000, "sampling_prob": 0.0256, "group_size": 8} | changes
    return Mechanism(  # type: ignore[arg-type]
        **numbers, l2_clip_norm=1.0, noise_multiplier=1.0, num_steps=1, target_delta=1e-5
    )


def test_groups_of_a_pass_waste_little_and_fit() -> None:
    for most in (2, 5, 20, 48, 1000):
        size = groups_of_a_pass(_mechanism(), limit=most)
        drawn = [28, 30, 31, 32, 33, 34, 36]
        computed = sum(-(-count // size) * size for count in drawn)
        assert 1 <= size <= most
        assert computed <= 1.25 * sum(drawn)
