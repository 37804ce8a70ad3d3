"""Clipping in a public subspace: against dense projections, whatever the way and however bad the basis."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping import clipper as clipping
from dpgcl_core.clipping.clipper import ONE_BY_ONE, GroupClipper
from dpgcl_core.clipping.one_pass import GHOST_NORM
from dpgcl_core.clipping.parts import ClippingParts
from dpgcl_core.clipping.subspace import leading_directions, lifted
from dpgcl_core.clipping.types import GroupReport, num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.sources import SecretRandomness
from tests.dpgcl_core.models import SharedLayer, TinyEncoder, built, group_losses_of, random_views

CLIP, DIM = 0.05, 5
KINDS = [TinyEncoder, SharedLayer]


def _gradients(model: nn.Module, views: Tensor) -> Tensor:
    """One backward pass per group, `[groups, num_trainable]`."""
    losses, parameters = group_losses_of(model), trainable_parameters(model)
    rows = [torch.autograd.grad(losses(each[None]).sum(), parameters) for each in views]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def _basis(model: nn.Module, dim: int = DIM, seed: int = 11) -> Tensor:
    return leading_directions(_gradients(model, random_views(2 * dim, seed)), dim)


def _sum(
    model: nn.Module, views: Tensor, basis: Tensor, complete: Tensor | None = None, **changes: object
) -> tuple[Tensor, GroupReport]:
    settings = {"l2_clip_norm": CLIP, "groups_at_once": 4, "basis": basis} | changes
    clipper, total = GroupClipper(**settings), torch.zeros(len(basis), dtype=torch.float64)  # type: ignore[arg-type]
    return total, clipper.add_clipped_sum(total, model, group_losses_of(model), views, complete)


def _expected(model: nn.Module, views: Tensor, basis: Tensor, gamma: float | None = None) -> Tensor:
    """Σ Clip_C(Q g_G), densely in float64."""
    coordinates = _gradients(model, views).double() @ basis.double().T
    norms = coordinates.norm(dim=1)
    factors = (CLIP / norms).clamp_max(1) if gamma is None else CLIP / (norms + gamma)
    return (coordinates * factors[:, None]).sum(0)


# --- directions ---


def test_directions_are_orthonormal_to_the_last_digit_of_float32() -> None:
    basis = _basis(built(TinyEncoder), 12).double()
    assert float((basis @ basis.T - torch.eye(12)).abs().max()) < 1e-6


def test_directions_are_the_leading_right_singular_vectors() -> None:
    gradients = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)).double()
    gradients *= torch.linspace(1, 4, 9).double()[:, None] ** 2
    projection = leading_directions(gradients, 3).double()
    _, _, singular = torch.linalg.svd(gradients, full_matrices=False)
    expected = singular[:3].T @ singular[:3]
    torch.testing.assert_close(projection.T @ projection, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_directions_without_enough_gradients_are_still_orthonormal(rank: int) -> None:
    """Groups that were masked, and groups that are alike, span less."""
    gradients = torch.zeros(6, 20)
    gradients[:, :rank] = torch.randn(6, rank, generator=torch.Generator().manual_seed(0))
    basis = leading_directions(gradients, 4).double()
    assert float((basis @ basis.T - torch.eye(4)).abs().max()) < 1e-6
    inside = basis.T @ basis @ gradients.double().T
    torch.testing.assert_close(inside, gradients.double().T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dim", [0, 4, 7])
def test_more_directions_than_can_be_are_refused(dim: int) -> None:
    with pytest.raises(ConfigError, match=rf"as gradients \(3\) and weights \(6\); got {dim}"):
        leading_directions(torch.ones(3, 6), dim)


# --- clipped sums ---


@pytest.mark.parametrize("gamma", [None, 0.01])
@pytest.mark.parametrize("way", ["one pass", "loop", "isolated"])
@pytest.mark.parametrize("kind", KINDS)
def test_sum_is_that_of_the_dense_computation(kind: type[nn.Module], way: str, gamma: float | None) -> None:
    model, views = built(kind), random_views(6)
    basis, how = (
        _basis(model),
        {"one pass": {}, "loop": {"groups_at_once": 1}, "isolated": {"isolated": True}},
    )
    actual, report = _sum(model, views, basis, gamma=gamma, **how[way])
    expected = _expected(model, views, basis, gamma)
    assert float((actual - expected).norm() / expected.norm()) < 1e-3
    assert (ONE_BY_ONE in report.paths.values()) == (way != "one pass")
    assert GHOST_NORM not in report.paths.values()


def test_no_subspace_of_all_dimensions_loses_anything() -> None:
    """Q square: the sum in coordinates is the plain clipped sum, turned."""
    model, views = nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), random_views(3)
    number = num_trainable(model)
    basis = torch.linalg.qr(torch.randn(number, number, dtype=torch.float64)).Q.float()
    turned, _ = _sum(model, views, basis)
    plain = torch.zeros(number, dtype=torch.float64)
    GroupClipper(l2_clip_norm=CLIP).add_clipped_sum(plain, model, group_losses_of(model), views)
    assert float((lifted(turned.float(), basis) - plain).norm() / plain.norm()) < 1e-3


@pytest.mark.parametrize("stretch", [1.0, 1.001, 1e3, 1e-6])
@pytest.mark.parametrize("way", ["one pass", "loop"])
@pytest.mark.parametrize("kind", KINDS)
def test_contribution_is_never_longer_than_c_whatever_the_basis(
    kind: type[nn.Module], way: str, stretch: float
) -> None:
    """A skewed basis costs utility, and no privacy: coordinates are clipped, not gradients."""
    model, views = built(kind), 1e3 * random_views(5)
    skewed = _basis(model)
    skewed[1] += 0.3 * skewed[0]
    basis, one = stretch * skewed, {"groups_at_once": 1} if way == "loop" else {}
    for index in range(len(views)):
        only = torch.arange(len(views)) == index
        assert float(_sum(model, views, basis, only, **one)[0].norm()) <= CLIP


def test_companions_change_no_bit_of_a_contribution_in_a_subspace() -> None:
    model, views = built(TinyEncoder), random_views(6)
    basis, only = _basis(model), torch.arange(4) == 0
    one, _ = _sum(model, views[:4], basis, only)
    other, _ = _sum(model, torch.cat([views[:1], 50 * random_views(3, seed=7)]), basis, only)
    alone, _ = _sum(model, views[:1], basis)
    assert float(one.norm()) > 0
    assert torch.equal(one, other)
    assert torch.equal(one, alone)


@pytest.mark.parametrize("way", ["one pass", "loop"])
def test_group_that_is_not_finite_contributes_nothing_to_a_subspace(way: str) -> None:
    model, views = built(TinyEncoder), random_views(4)
    basis, one = _basis(model), {"groups_at_once": 1} if way == "loop" else {}
    poisoned = views.clone()
    poisoned[2] = math.inf
    actual, report = _sum(model, poisoned, basis, **one)
    expected, _ = _sum(model, views, basis, torch.arange(4) != 2, **one)
    assert report.non_finite.tolist() == [False, False, True, False]
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


def test_sum_without_a_bound_is_the_plain_gradient_in_the_subspace() -> None:
    model, views = built(TinyEncoder), random_views(3)
    basis = _basis(model)
    actual, _ = _sum(model, views, basis, l2_clip_norm=math.inf)
    expected = _gradients(model, views).double().sum(0) @ basis.double().T
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


def test_passes_of_whole_gradients_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, views, sizes = built(TinyEncoder), random_views(6), []
    basis, right = _basis(model), clipping._one_pass
    whole, _ = _sum(model, views, basis, groups_at_once=6)

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        sizes.append(len(args[4]))
        return right(*args, **kwargs)

    monkeypatch.setattr(clipping, "_goes_in_one_pass", lambda *_: True)
    monkeypatch.setattr(clipping, "_MAX_GRADIENT_NUMBERS", 2 * num_trainable(model) + 1)
    monkeypatch.setattr(clipping, "_MAX_GRADIENT_NUMBERS_PER_WEIGHT", 0)
    monkeypatch.setattr(clipping, "_one_pass", counted)
    parts, _ = _sum(model, views, basis, groups_at_once=6)
    assert sizes == [2, 2, 2]
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-9)


def test_parts_and_subspace_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="give clipping parts or a basis, not both"):
        GroupClipper(l2_clip_norm=1.0, parts=ClippingParts(prefixes=("0.",)), basis=torch.eye(2))


# --- public gradients ---


@pytest.mark.parametrize("way", ["one pass", "loop", "isolated"])
@pytest.mark.parametrize("kind", KINDS)
def test_bounded_gradients_are_those_of_each_group(kind: type[nn.Module], way: str) -> None:
    model, views = built(kind), random_views(5)
    how = {"one pass": {"groups_at_once": 2}, "loop": {"groups_at_once": 1}, "isolated": {"isolated": True}}
    clipper = GroupClipper(l2_clip_norm=CLIP, **how[way])  # type: ignore[arg-type]
    found = clipper.bounded_gradients(model, group_losses_of(model), views)
    expected = _gradients(model, views)
    expected = expected * (CLIP / expected.norm(dim=1)).clamp_max(1)[:, None]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-5)


def test_public_group_that_is_not_finite_has_a_gradient_of_zeros() -> None:
    model, views = built(TinyEncoder), random_views(3)
    views[1] = math.nan
    for bound in (CLIP, math.inf):
        clipper = GroupClipper(l2_clip_norm=bound, groups_at_once=3)
        found = clipper.bounded_gradients(model, group_losses_of(model), views)
        assert found.isfinite().all()
        assert [bool(row.any()) for row in found] == [True, False, True]


# --- noise ---


def test_noise_has_the_covariance_of_the_projection() -> None:
    """Of σ²Δ²·P: of its strength in the subspace, and nothing outside of it."""
    dim, number, std = 3, 12, 2.5
    basis = leading_directions(torch.randn(8, number, generator=torch.Generator().manual_seed(1)), dim)
    law, generator = GaussianNoise(std=std), SecretRandomness().generator(0, "noise")
    draws = torch.stack([lifted(law.draw(dim, generator).float(), basis) for _ in range(20_000)]).double()
    covariance = draws.T @ draws / len(draws)
    projection = basis.double().T @ basis.double()
    # An entry's standard error is at most σ²·√2/√n = 0.0625; 144 entries.
    assert float((covariance - std**2 * projection).abs().max()) < 6 * 0.0625
    outside = draws - draws @ projection
    assert float(outside.abs().max()) < 1e-4
    assert float(covariance.trace()) == pytest.approx(std**2 * dim, rel=0.06)
