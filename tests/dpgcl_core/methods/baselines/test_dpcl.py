"""DPCL against slow oracles, its statistics' sensitivities, and the violation of its published 4C."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.methods.baselines import path_clipping
from dpgcl_core.methods.baselines.dpcl import statistics
from dpgcl_core.methods.baselines.dpcl.statistics import (
    AS_PUBLISHED,
    PROVEN,
    DpBarlowTwins,
    DpSimClr,
    barlow_twins,
    nt_xent,
)
from tests.dpgcl_core.adversary import LinearEncoder, clip_float64, embed_of, farthest
from tests.dpgcl_core.dpcl_oracle import (
    GivenNormals,
    barlow_counterexample,
    simclr_counterexample,
    slow_barlow,
    slow_nt_xent,
)
from tests.dpgcl_core.models import TinyEncoder

TAU = 0.3
MARGIN = 1 - 1e-4
Rule = DpSimClr | DpBarlowTwins


def _simclr(batch_size: int, clip: float = 0.1, noise: float = 1.0, **others: object) -> DpSimClr:
    fields: dict[str, object] = {"guarantee_label": AS_PUBLISHED, "temperature": TAU} | others
    return DpSimClr(
        l2_clip_norm=clip,
        batch_size=batch_size,
        similarity_noise_multiplier=noise,
        **fields,  # type: ignore[arg-type]
    )


def _barlow(batch_size: int, clip: float = 0.1, noise: float = 1.0, **others: object) -> DpBarlowTwins:
    fields: dict[str, object] = {"guarantee_label": AS_PUBLISHED, "variance_floor": 0.01} | others
    return DpBarlowTwins(
        l2_clip_norm=clip,
        batch_size=batch_size,
        mean_noise_multiplier=noise,
        variance_noise_multiplier=noise,
        off_diagonal_weight=0.05,
        **fields,  # type: ignore[arg-type]
    )


def _model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return TinyEncoder()


def _images(batch_size: int, seed: int = 0) -> Tensor:
    return torch.randn(1, batch_size, 2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def _sum(rule: Rule, model: nn.Module, inputs: Tensor, *normals: NDArray[np.float64]) -> Tensor:
    total = torch.zeros(num_trainable(model))
    rule.add_clipped_sum(total, model, embed_of(model), inputs, generator=GivenNormals(*normals))
    return total.double()


def _flat(gradients: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients])


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def _normals(*sizes: int) -> list[NDArray[np.float64]]:
    generator = np.random.default_rng(5)
    return [generator.standard_normal(size) for size in sizes]


def _slow_sum(model: nn.Module, views: Tensor, cotangents: Tensor, clip: float) -> Tensor:
    """Σ_u Clip_C of <z_u(w), c_u>, view by view, in float64."""
    total = torch.zeros(num_trainable(model), dtype=torch.float64)
    for view, cotangent in zip(views, cotangents, strict=True):
        product = (model(view[None])[0] * cotangent).sum()
        total += clip_float64(_flat(torch.autograd.grad(product, trainable_parameters(model))), clip)
    return total


def test_nt_xent_equals_its_equation() -> None:
    similarities = torch.randn(8, 8, dtype=torch.float64)
    expected = slow_nt_xent(similarities, TAU).item()
    assert nt_xent(similarities, temperature=TAU).sum().item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("clip", [0.01, 100.0])
def test_simclr_sum_equals_oracle(clip: float) -> None:
    model, inputs, rule = _model(), _images(3), _simclr(3, clip)
    (normals,) = _normals(36)
    views = inputs.flatten(0, 2).double()
    z = model.double()(views).detach().requires_grad_()
    noise = torch.from_numpy(normals).view(6, 6) * rule.similarity_sensitivity
    loss = slow_nt_xent(z @ z.T + noise, TAU)
    expected = _slow_sum(model, views, torch.autograd.grad(loss, z)[0], clip * MARGIN)
    assert _relative_error(_sum(rule, model.float(), inputs, normals), expected) < 1e-4


@pytest.mark.parametrize("clip", [0.01, 100.0])
def test_barlow_twins_sum_equals_oracle(clip: float) -> None:
    model, inputs, rule = _model(), _images(3), _barlow(3, clip)
    mean_normals, square_normals = _normals(8, 8)
    views = inputs.flatten(0, 2).double()
    z = model.double()(views).detach().unflatten(0, (3, 2)).requires_grad_()
    loss = slow_barlow(
        z,
        2 / 3 * torch.from_numpy(mean_normals).view(2, 4),
        6 * torch.from_numpy(square_normals).view(2, 4),
        variance_floor=0.01,
        off_diagonal_weight=0.05,
    )
    cotangents = torch.autograd.grad(loss, z)[0].flatten(0, 1)
    expected = _slow_sum(model, views, cotangents, clip * MARGIN)
    actual = _sum(rule, model.float(), inputs, mean_normals, square_normals)
    assert _relative_error(actual, expected) < 1e-4


def test_barlow_loss_equals_its_equation() -> None:
    c = torch.randn(4, 4, dtype=torch.float64)
    expected = sum((1 - c[i, i]) ** 2 + sum(0.3 * c[i, j] ** 2 for j in range(4) if j != i) for i in range(4))
    assert barlow_twins(c, off_diagonal_weight=0.3).item() == pytest.approx(expected.item(), rel=1e-12)


def _refuted(batch_size: int, sign: float, clip: float) -> Tensor:
    """The real rule's sum of the counterexample, by an explicit linear encoder z = Wx at W = 1."""
    rule = _simclr(batch_size, clip)
    inputs, normals = simclr_counterexample(
        batch_size, sign, temperature=TAU, noise_std=rule.similarity_sensitivity
    )
    return _sum(rule, LinearEncoder(2, unit=False), inputs, normals)


@pytest.mark.parametrize(("batch_size", "factor"), [(4, 12.1), (8, 28), (64, 252)])
def test_published_sensitivity_is_violated_given_the_same_released_similarities(
    batch_size: int, factor: float
) -> None:
    clip = 1e-5
    one, other = (_refuted(batch_size, sign, clip) for sign in (1.0, -1.0))
    shift = float((one - other).norm())
    assert _simclr(batch_size, clip).sensitivity == pytest.approx(4 * clip)
    assert shift > factor * clip * MARGIN
    assert shift <= _simclr(batch_size, clip, guarantee_label=PROVEN).sensitivity


CLIP = 1e-4  # small, so that every view's gradient is clipped and counts in full


def _slow_simclr_sum(records: Tensor) -> Tensor:
    """SimCLR's sum at exact similarities, differentiable by the inputs `[records, 2, 3]`, float64."""
    model = LinearEncoder(3).double()
    views = records.flatten(0, 1)
    z = nn.functional.normalize(views, dim=-1)  # the encoder's output, for its map is the identity
    cotangents = torch.autograd.grad(slow_nt_xent(z @ z.T, TAU), z, create_graph=True)[0]
    total = torch.zeros(9, dtype=torch.float64)
    for product in (model(views) * cotangents).sum(1):
        gradient = _flat(torch.autograd.grad(product, trainable_parameters(model), create_graph=True))
        total = total + clip_float64(gradient, CLIP)
    return total


def test_proven_simclr_sensitivity_holds_for_the_worst_neighbours_found() -> None:
    def distance(x: Tensor) -> Tensor:  # records 0 and 1 replace each other, 2 and 3 stay
        return (_slow_simclr_sum(x[1:]) - _slow_simclr_sum(x[[0, 2, 3]])).norm() / CLIP

    x = farthest(distance, (4, 2, 3), enough=4.5).float()
    rule, model = _simclr(3, CLIP, 0.0, guarantee_label=PROVEN), LinearEncoder(3)
    one, other = (_sum(rule, model, batch[None]) for batch in (x[1:], x[[0, 2, 3]]))
    shift = float((one - other).norm())
    assert rule.sensitivity == pytest.approx(12 * CLIP)
    assert 4.5 * CLIP < shift <= rule.sensitivity  # the published 4C would not do here either


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_proven_barlow_sensitivity_holds_for_neighbours(noise: float) -> None:
    rule, model, worst = _barlow(4, CLIP, noise, guarantee_label=PROVEN), LinearEncoder(3), 0.0
    for seed in range(40):
        batch = torch.randn(1, 4, 2, 3, generator=torch.Generator().manual_seed(seed))
        batch[..., 0] += 4 * (seed % 2)
        other = batch.clone()
        other[0, 0] *= -3
        totals = []
        for inputs in (batch, other):
            totals.append(torch.zeros(num_trainable(model)))
            generator = np.random.default_rng(seed)
            rule.add_clipped_sum(totals[-1], model, embed_of(model), inputs, generator=generator)
        worst = max(worst, float((totals[0] - totals[1]).double().norm()))
    assert rule.sensitivity == pytest.approx(16 * CLIP)
    assert 4 * CLIP < worst <= rule.sensitivity


@pytest.mark.parametrize("batch_size", [4, 8, 64])
def test_published_sensitivity_is_violated_given_the_same_released_means_and_variances(
    batch_size: int,
) -> None:
    """Means 0 and variances 1 are released; record 0's second view at −e₁ instead of e₁ turns all others."""
    rule, model, sums = _barlow(batch_size, 1e-5), LinearEncoder(2, unit=False), []
    for sign in (1.0, -1.0):
        inputs, *normals = barlow_counterexample(
            batch_size, sign, mean_std=rule.mean_sensitivity, square_std=rule.squares_sensitivity
        )
        sums.append(_sum(rule, model, inputs, *normals))
    shift = float((sums[0] - sums[1]).norm())
    assert rule.sensitivity == pytest.approx(4e-5)
    assert shift == pytest.approx(4 * (batch_size - 1) * 1e-5, rel=1e-3)


def _unit(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return nn.functional.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def _replaced(seed: int) -> tuple[Tensor, Tensor]:
    """Unit embeddings `[4, 2, 2]` of two batches that differ in one record, some of them aligned."""
    batch = _unit(4, 2, 2, seed=seed)
    if seed % 2:
        batch[1:] = batch[1, 0]
        batch[0] = -batch[1, 0]
    other = batch.clone()
    other[0] = batch[1, 0] if seed % 2 else _unit(2, 2, seed=seed + 1000)
    return batch, other


def test_similarity_sensitivity_holds_and_is_not_far_off() -> None:
    rule, worst = _simclr(4), 0.0
    for seed in range(100):
        views = [batch.flatten(0, 1) for batch in _replaced(seed)]
        worst = max(worst, float((views[0] @ views[0].T - views[1] @ views[1].T).norm()))
    assert 0.9 * rule.similarity_sensitivity < worst <= rule.similarity_sensitivity


def test_mean_sensitivity_holds_and_is_attained() -> None:
    worst = max(float((a[:, 0].mean(0) - b[:, 0].mean(0)).norm()) for a, b in map(_replaced, range(100)))
    assert worst == pytest.approx(_barlow(4).mean_sensitivity, rel=1e-12)


def test_squares_sensitivity_holds_for_the_paper_and_the_tighter_bound() -> None:
    worst = 0.0
    for seed in range(200):
        a, b = (batch[:, 0] for batch in _replaced(seed))
        change = (a - a.mean(0)).square().sum(0) - (b - b.mean(0)).square().sum(0)
        worst = max(worst, float(change.norm()))
    assert 2 < worst <= 4 * math.sqrt(2) * (1 - 1 / 4) < _barlow(4).squares_sensitivity


def test_embeddings_outside_the_unit_ball_are_projected_onto_it() -> None:
    model, rule = LinearEncoder(3, unit=False), _simclr(3)
    inputs = 7 * torch.randn(1, 3, 2, 3, generator=torch.Generator().manual_seed(0))
    embeddings, _ = rule._embeddings(embed_of(model), inputs)
    assert torch.allclose(embeddings.norm(dim=-1), torch.ones(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("build", [_simclr, _barlow])
def test_non_finite_record_contributes_zero_and_leaves_the_others_finite(build: type[Rule]) -> None:
    model, inputs = _model(), _images(3)
    inputs[0, 1, 0] = math.nan
    total = torch.zeros(num_trainable(model))
    report = build(3).add_clipped_sum(
        total, model, embed_of(model), inputs, generator=np.random.default_rng(0)
    )
    assert report.non_finite.tolist() == [False, False, True, True, False, False]
    assert torch.isfinite(total).all()
    assert total.any()


@pytest.mark.parametrize("build", [_simclr, _barlow])
def test_microbatch_changes_nothing(build: type[Rule], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, totals = _model(), _images(5), []
    for at_once in (256, 1, 2):
        for module in (path_clipping, statistics):
            monkeypatch.setattr(module, "RECORDS_AT_ONCE", at_once)
        total = torch.zeros(num_trainable(model))
        build(5).add_clipped_sum(total, model, embed_of(model), inputs, generator=np.random.default_rng(0))
        totals.append(total.double())
    assert max(_relative_error(total, totals[0]) for total in totals[1:]) < 1e-4


def test_noised_variances_are_floored() -> None:
    rule = _barlow(3, variance_floor=0.25)
    _, variances = rule._noised_moments(_unit(3, 2, 4, seed=0), GivenNormals(np.zeros(8), np.full(8, -9.0)))
    assert torch.equal(variances, torch.full((2, 4), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("build", [_simclr, _barlow])
def test_as_published_without_noise_on_the_statistics_is_refused(build: type[Rule]) -> None:
    with pytest.raises(ConfigError, match="must be positive for 'as-published'"):
        build(4, noise=0.0)


@pytest.mark.parametrize("build", [_simclr, _barlow])
def test_batches_of_another_size_are_refused(build: type[Rule]) -> None:
    with pytest.raises(ConfigError, match="batch_size = 4"):
        _sum(build(4), _model(), _images(3))


@pytest.mark.parametrize(
    ("build", "field", "value"),
    [
        (_simclr, "guarantee_label", "none"),
        (_simclr, "temperature", 0.0),
        (_barlow, "variance_floor", 0.0),
    ],
)
def test_dpcl_refuses_fields_out_of_range(build: type[Rule], field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field.replace("_", ".")):
        build(4, **{field: value})
