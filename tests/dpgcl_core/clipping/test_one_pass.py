"""The one-pass engine against the slow oracle: every kind of layer, parameter and path."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpgcl_core.clipping import clipper as clipping
from dpgcl_core.clipping import layers, one_pass
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.direct_uses import NotSeparableError
from dpgcl_core.clipping.layers import Conv2dRule, EmbeddingRule, LayerRule, LinearRule
from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.losses.info_nce import two_view_group_loss
from tests import oracles
from tests.dpgcl_core.clipping import engines
from tests.dpgcl_core.models import (
    Convolutions,
    CrossAttention,
    ImageTransformer,
    SharedLayer,
    TextEncoder,
    TinyEncoder,
    TwoTowers,
    group_losses_of,
)

BY_GHOST_NORM, BY_GRADIENT = 1e12, 0.0
IMAGE_MODELS = {
    "convolutions": Convolutions,
    "cross attention": CrossAttention,
    "every layer": TinyEncoder,
    "shared layer": SharedLayer,
    "transformer": ImageTransformer,
    "transformer, length first": lambda: ImageTransformer(batch_first=False),
    "transformer, with weights": lambda: ImageTransformer(need_weights=True),
}


def _built(build) -> nn.Module:  # type: ignore[no-untyped-def]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return build()


def _images(groups: int, size: int, views: int, seed: int) -> Tensor:
    return torch.randn(groups, size, views, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def _tokens(groups: int, size: int, views: int, seed: int) -> Tensor:
    return torch.randint(11, (groups, size, views, 5), generator=torch.Generator().manual_seed(seed))


def _one_pass_sum(model, group_losses, inputs, l2_clip_norm: float) -> Tensor:  # type: ignore[no-untyped-def]
    total = torch.zeros(num_trainable(model))
    engines.one_pass(total, model, trainable_parameters(model), group_losses, inputs, l2_clip_norm)
    return total


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def test_groups_are_summed_in_short_runs() -> None:
    """One float32 sum of 16,384 groups would round by what all of them are: this is below its last digit."""
    generator, layer = torch.Generator().manual_seed(0), nn.Linear(64, 1, bias=False)
    gradients, factor = (0.5 + torch.rand(shape, generator=generator) for shape in ((16_384, 64), (16_384,)))
    exact = factor.double() @ gradients.double()
    deferred = one_pass._Deferred(LinearRule(), layer, gradients, torch.ones(16_384, 1), (0, 0))
    of_products = torch.stack([run.double() for run in deferred.weighted(factor, None)]).sum(0)
    for total in (one_pass._weighted(gradients, factor, None), of_products.flatten()):
        assert float((total / exact - 1).abs().max()) < 2e-8


@pytest.mark.parametrize("num_parts", [1, 2, 4, 8, 16])
def test_group_moves_the_sum_by_c_at_most_beside_groups_whose_terms_cancel(
    num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between 64 and −64 a float32 sum drops, or doubles, what is half of its last digit.

    A processor's product adds up every second, fourth, … row by itself: each of these parts does so.
    """
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", BY_GHOST_NORM)
    model = nn.Linear(64, 64, bias=False)
    inputs, outputs = (torch.zeros(16, 96, 64) for _ in range(2))
    inputs[..., 0] = 1
    outputs[1:, :, 0] = 0.99 * 2**-18
    outputs[1:, :num_parts, 0], outputs[1:, -num_parts:, 0] = 63.99, -63.99
    outputs[0, :num_parts, 0] = 1 / num_parts
    alone = outputs.clone()
    alone[1:] = 0

    def losses(given: tuple[Tensor, Tensor]) -> Tensor:
        x, y = given
        return (model(x.flatten(0, 2)) * y.flatten(0, 2)).unflatten(0, x.shape[:3]).flatten(1).sum(1)

    def moved(outputs: Tensor) -> float:
        views, sums = tuple(each.reshape(16, 4, 2, 12, 64) for each in (inputs, outputs)), []
        for complete in (torch.ones(16, dtype=torch.bool), torch.arange(16) > 0):
            total = torch.zeros(64 * 64, dtype=torch.float64)
            clipper = GroupClipper(l2_clip_norm=1.0, groups_at_once=16)
            report = clipper.add_clipped_sum(total, model, losses, views, complete)
            assert list(report.paths.values()) == [one_pass.GHOST_NORM]
            sums.append(total)
        return float((sums[0] - sums[1]).norm())

    assert 0.999 < moved(alone) <= 1.0
    assert moved(outputs) == pytest.approx(moved(alone), abs=1e-9)


@pytest.mark.parametrize("flops_per_number", [BY_GRADIENT, BY_GHOST_NORM])
def test_group_among_thousands_moves_the_sum_by_c_at_most(
    flops_per_number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", flops_per_number)
    monkeypatch.setattr(one_pass, "SMALL", 0)
    model = nn.Linear(4, 1, bias=False)
    noise = torch.rand(8192, 1, 1, 4, generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor([1.0, 1e-3, 0, 0]) + 1e-2 * noise
    clipper, sums = GroupClipper(l2_clip_norm=1.0, groups_at_once=8192), []
    for group in (inputs[:1], torch.zeros_like(inputs[:1])):
        total = torch.zeros(4, dtype=torch.float64)
        complete = torch.arange(8192) >= (0 if group.any() else 1)
        report = clipper.add_clipped_sum(
            total,
            model,
            lambda views: 100 * model(views).flatten(1).sum(1),
            torch.cat([group, inputs[1:]]),
            complete,
        )
        assert list(report.paths.values())[-1] == (
            one_pass.GHOST_NORM if flops_per_number else one_pass.PER_GROUP
        )
        sums.append(total)
    assert 0.999 < float((sums[1] - sums[0]).norm()) <= 1.0


@pytest.mark.parametrize("flops_per_number", [BY_GRADIENT, BY_GHOST_NORM])
@pytest.mark.parametrize("name", IMAGE_MODELS)
@settings(max_examples=4, deadline=None)
@given(groups=st.integers(1, 5), size=st.integers(2, 4), copies=st.integers(0, 2), seed=st.integers(0, 2**16))
def test_one_pass_equals_oracle_for_every_layer_on_both_paths(
    name: str, flops_per_number: float, groups: int, size: int, copies: int, seed: int
) -> None:
    model, views = _built(IMAGE_MODELS[name]), 3 * _images(groups, size, 2 + copies, seed)
    expected = oracles.clipped_sum(model, group_losses_of(model), views, 0.3 * (1 - 1e-4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_pass, "_FLOPS_PER_NUMBER", flops_per_number)
        actual = _one_pass_sum(model, group_losses_of(model), views, 0.3)
    assert _relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("flops_per_number", [BY_GRADIENT, BY_GHOST_NORM])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"tied": True}])
@settings(max_examples=4, deadline=None)
@given(groups=st.integers(1, 5), size=st.integers(2, 4), seed=st.integers(0, 2**16))
def test_one_pass_equals_oracle_for_texts(
    options: dict[str, int], flops_per_number: float, groups: int, size: int, seed: int
) -> None:
    model, tokens = _built(lambda: TextEncoder(**options)), _tokens(groups, size, 3, seed)
    expected = oracles.clipped_sum(model, group_losses_of(model), tokens, 0.3 * (1 - 1e-4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_pass, "_FLOPS_PER_NUMBER", flops_per_number)
        actual = _one_pass_sum(model, group_losses_of(model), tokens, 0.3)
    assert _relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("pieces_of", [1, 3 * 3 * 8 * 64, 2**30])
@pytest.mark.parametrize(("build", "inputs_of"), [(ImageTransformer, _images), (TextEncoder, _tokens)])
def test_pieces_in_which_norms_are_taken_change_nothing(  # type: ignore[no-untyped-def]
    build, inputs_of, pieces_of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = _built(build), inputs_of(5, 3, 3, 0)
    expected = oracles.clipped_sum(model, group_losses_of(model), inputs, 0.3 * (1 - 1e-4))
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", BY_GHOST_NORM)
    monkeypatch.setattr(layers, "CACHED_NUMBERS", pieces_of)
    assert _relative_error(_one_pass_sum(model, group_losses_of(model), inputs, 0.3), expected) < 1e-5


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_one_pass_equals_oracle_for_two_towers_with_a_learned_temperature(groups: int) -> None:
    model = _built(TwoTowers)
    inputs = (_images(groups, 3, 1, 0), _tokens(groups, 3, 1, 0))
    pairs = list(zip(*inputs, strict=True))
    expected = torch.zeros(num_trainable(model), dtype=torch.float64)
    for pair in pairs:
        one = tuple(each[None] for each in pair)
        loss = model.group_losses(one).sum()
        gradients = torch.autograd.grad(loss, trainable_parameters(model), allow_unused=True)
        flat = torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).flatten()
                for g, p in zip(gradients, trainable_parameters(model), strict=True)
            ]
        ).double()
        expected += flat * min(1.0, 0.3 * (1 - 1e-4) / float(flat.norm()))
    total = torch.zeros(num_trainable(model))
    GroupClipper(l2_clip_norm=0.3).add_clipped_sum(total, model, model.group_losses, inputs)
    assert _relative_error(total, expected) < 1e-5
    assert groups == 1 or engines.goes_in_one_pass(model, model.group_losses, inputs)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_known_layers_go_in_one_pass(name: str) -> None:
    model = _built(IMAGE_MODELS[name])
    assert engines.goes_in_one_pass(model, group_losses_of(model), _images(3, 2, 3, 0))


@pytest.mark.parametrize("flops_per_number", [BY_GRADIENT, BY_GHOST_NORM])
def test_groups_of_one_record_are_per_record_dp_sgd(
    flops_per_number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", flops_per_number)
    model, images = _built(TinyEncoder), _images(6, 1, 1, 0)
    targets = torch.randn(6, 4, generator=torch.Generator().manual_seed(9))

    def regression(inputs: tuple[Tensor, Tensor]) -> Tensor:
        return (model(inputs[0].flatten(0, 2)) - inputs[1].flatten(0, 2)).square().sum(1)

    expected = torch.zeros(num_trainable(model), dtype=torch.float64)
    for image, target in zip(images[:, 0], targets, strict=True):
        loss = (model(image) - target).square().sum()
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trainable_parameters(model))])
        expected += flat.double() * min(1.0, 0.2 * (1 - 1e-4) / float(flat.double().norm()))
    assert (
        _relative_error(_one_pass_sum(model, regression, (images, targets[:, None, None]), 0.2), expected)
        < 1e-5
    )


RULES: list[tuple[LayerRule, nn.Module, Tensor, tuple[int, ...]]] = [
    (LinearRule(), nn.Linear(5, 4), torch.randn(6, 3, 5), (6, 3, 4)),
    (Conv2dRule(), nn.Conv2d(4, 6, 3, 2, 1, groups=2), torch.randn(6, 4, 7, 8), (6, 6, 4, 4)),
    (Conv2dRule(), nn.Conv2d(4, 6, (2, 3), 1, (1, 2), (1, 2)), torch.randn(6, 4, 5, 8), (6, 6, 6, 8)),
    (EmbeddingRule(), nn.Embedding(7, 3), torch.randint(7, (6, 5)), (6, 5, 3)),
]


@pytest.mark.parametrize(("rule", "layer", "x", "shape"), RULES)
def test_ghost_norm_and_weighted_total_agree_with_the_gradients_kept(
    rule: LayerRule, layer: nn.Module, x: Tensor, shape: tuple[int, ...]
) -> None:
    grad = torch.randn(shape)
    kept = rule.per_group(layer, x, grad, 3)
    squares, magnitude_bound = rule.ghost_norms(layer, x, grad, 3)
    assert torch.allclose(squares, kept.double().flatten(1).square().sum(1), rtol=1e-5)
    assert (magnitude_bound * (1 + 1e-6) >= squares.sqrt()).all()
    assert torch.allclose(rule.total(layer, x, grad).float(), kept.sum(0), rtol=1e-4, atol=1e-5)


def test_many_patches_of_few_weights_take_the_convolution_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, grad = nn.Conv2d(2, 2, 3, padding=1), torch.randn(6, 2, 9, 9), torch.randn(6, 2, 9, 9)
    expected = Conv2dRule().per_group(layer, x, grad, 3)
    monkeypatch.setattr("dpgcl_core.clipping.layers.MANY_NUMBERS", 0)
    monkeypatch.setattr("dpgcl_core.clipping.layers._patches", None)
    actual = Conv2dRule().per_group(layer, x, grad, 3)
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 12, 3, padding=1),
        nn.Conv2d(16, 12, 3, stride=2, padding=1, groups=2),
        nn.Conv2d(16, 12, 1, stride=2, bias=False),
        nn.Conv2d(16, 12, 3, padding=1, padding_mode="reflect"),
    ],
)
@pytest.mark.parametrize("positions_at_once", [1, 200, 2**13])
def test_products_over_runs_of_rows_are_the_gradients(
    layer: nn.Conv2d, positions_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU takes them: a group's rows in one run or in several, runs in one piece or in several."""
    monkeypatch.setattr(layers, "POSITIONS_AT_ONCE", positions_at_once)
    monkeypatch.setattr(layers, "CACHED_NUMBERS", 40_000)
    x = torch.randn(18, 16, 9, 9).to(memory_format=torch.channels_last)
    grad = torch.randn_like(layer(x))
    actual = Conv2dRule()._in_runs(layer, x, grad, 3)
    expected = torch.stack(
        [
            torch.autograd.grad(layer(rows), layer.weight, of_rows)[0]
            for rows, of_rows in zip(x.chunk(3), grad.chunk(3), strict=True)
        ]
    )
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)
    assert actual.permute(0, 1, 3, 4, 2).is_contiguous()  # densely strided, as sums and norms ask for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_are_copied_in_wide_numbers_where_they_fit(dtype: torch.dtype) -> None:
    layer, x = nn.Conv2d(8, 4, 3, padding=1), torch.randn(6, 8, 5, 5).to(dtype)
    patches = layers._patches(layer, x)[2:5]
    assert layers._fits_wide_numbers(patches)
    assert torch.equal(layers._in_wide_numbers(patches).contiguous().view(dtype), patches)
    for channels in (3, 6):
        narrow = layers._patches(nn.Conv2d(channels, 4, 3), torch.randn(6, channels, 5, 5).to(dtype))
        assert not layers._fits_wide_numbers(narrow)


def test_with_avx512_many_positions_take_the_convolution_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Conv2d(8, 8, 3, padding=1), torch.randn(4, 8, 12, 12)
    grad, found = torch.randn(4, 8, 12, 12), []
    monkeypatch.setattr(layers, "MANY_POSITIONS_OF_AVX512", 200)
    monkeypatch.setattr(layers, "POSITIONS_OF_A_CALL", 0)
    for has in (True, False):
        monkeypatch.setattr(layers, "has_avx512", lambda has=has: has)
        found.append(Conv2dRule().per_group(layer, x, grad, 2))
    assert torch.allclose(*found, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(layers, "_patches", None)
    with pytest.raises(TypeError):
        Conv2dRule().per_group(layer, x, grad, 2)
    monkeypatch.setattr(layers, "has_avx512", lambda: True)
    assert torch.equal(Conv2dRule().per_group(layer, x, grad, 2), found[0])
    with pytest.raises(TypeError):  # too few positions
        Conv2dRule().per_group(layer, x[:2], grad[:2], 2)


def test_patches_in_several_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, grad = nn.Conv2d(2, 2, 3, padding=1), torch.randn(10, 2, 9, 9), torch.randn(10, 2, 9, 9)
    whole = Conv2dRule().per_group(layer, x, grad, 5)
    monkeypatch.setattr("dpgcl_core.clipping.layers.CACHED_NUMBERS", 2 * 2 * 9 * 81 * 2)
    assert torch.equal(Conv2dRule().per_group(layer, x, grad, 5), whole)


def test_ghost_norm_of_cancelling_gradients_is_not_too_small() -> None:
    """In float32 the norm of a gradient that all but cancels falls short by far more than the margin."""
    generator = torch.Generator().manual_seed(0)
    x = 1 + 1e-3 * torch.randn(1, 256, 32, generator=generator)
    grad = torch.randn(1, 128, 16, generator=generator)
    grad = torch.cat([grad, -grad], 1)
    exact = (grad.double().transpose(1, 2) @ x.double()).square().sum()
    actual = LinearRule().ghost_norms(nn.Linear(32, 16), x, grad, 1)[0]
    assert float(actual[0]) >= float(exact) * (1 - 1e-7)


@pytest.mark.parametrize("per_weight", [0, 2])
def test_gradients_too_many_to_hold_are_taken_in_parts(
    per_weight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, views = _built(TinyEncoder), _images(7, 2, 3, 0)
    expected = oracles.clipped_sum(model, group_losses_of(model), views, 0.3 * (1 - 1e-4))
    clipper, sizes = GroupClipper(l2_clip_norm=0.3), []
    right = clipping._one_pass

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        sizes.append(len(args[2]))
        return right(*args, **kwargs)

    monkeypatch.setattr(clipping, "_goes_in_one_pass", lambda *_: True)
    most = 0 if per_weight else 2 * num_trainable(model) + 1
    monkeypatch.setattr(clipping, "_MAX_GRADIENT_NUMBERS", most)
    monkeypatch.setattr(clipping, "_MAX_GRADIENT_NUMBERS_PER_WEIGHT", per_weight)
    monkeypatch.setattr(clipping, "_one_pass", counted)
    total = torch.zeros(num_trainable(model))
    report = clipper.add_clipped_sum(total, model, group_losses_of(model), views)
    assert _relative_error(total, expected) < 1e-5
    assert len(report.norms) == 7
    assert sizes[0] == 2  # groups of zeros, to learn how much memory one takes
    assert len(set(sizes[1:])) == 1
    assert sizes[1] * clipping._gradient_numbers[model][views.shape[1:],] <= 2 * num_trainable(model) + 1


@pytest.mark.parametrize("flops_per_number", [BY_GRADIENT, BY_GHOST_NORM])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_non_finite_group_is_masked_before_any_product(
    bad: float, flops_per_number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", flops_per_number)
    model, views = _built(TinyEncoder), _images(4, 2, 3, 0)
    poisoned = views.clone()
    poisoned[1, 0, 0] = bad
    parameters = trainable_parameters(model)
    total, silent = torch.zeros(num_trainable(model)), torch.zeros(num_trainable(model))
    report = engines.one_pass(total, model, parameters, group_losses_of(model), poisoned, 0.1)
    clean = engines.one_pass(silent, model, parameters, group_losses_of(model), views, 0.1)
    assert report.non_finite.tolist() == [False, True, False, False]
    assert torch.equal(report.norms[[0, 2, 3]], clean.norms[[0, 2, 3]])
    others = torch.zeros(num_trainable(model))
    engines.one_pass(others, model, parameters, group_losses_of(model), views[[0, 2, 3]], 0.1)
    assert torch.isfinite(total).all()
    assert torch.allclose(total, others, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("flops_per_number", [BY_GRADIENT, BY_GHOST_NORM])
def test_callers_autocast_and_matmul_precision_reach_no_norm_and_no_sum(
    flops_per_number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", flops_per_number)
    model, views = _built(TinyEncoder), 3 * _images(3, 3, 3, 0)
    seen = []

    def clipped_sum() -> Tensor:
        total = torch.zeros(num_trainable(model))
        GroupClipper(l2_clip_norm=0.1).add_clipped_sum(total, model, group_losses_of(model), views)
        return total

    expected = clipped_sum()

    def noting(function):  # type: ignore[no-untyped-def]
        return lambda *args: (seen.append(torch.get_float32_matmul_precision()), function(*args))[1]

    for name in ("_weighted", "squares_of"):
        monkeypatch.setattr(one_pass, name, noting(getattr(one_pass, name)))
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            actual = clipped_sum()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(actual, expected)
    assert set(seen) == {"highest"}


@pytest.mark.parametrize("name", ["every layer", "transformer"])
def test_nothing_of_a_step_outlives_it(name: str) -> None:
    """A cycle would keep every microbatch's gradients until the garbage collector comes by."""
    model, views = _built(IMAGE_MODELS[name]), _images(3, 2, 3, 0)
    _one_pass_sum(model, group_losses_of(model), views, 0.3)
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(each, Tensor) for each in gc.get_objects())
        for _ in range(3):
            _one_pass_sum(model, group_losses_of(model), views, 0.3)
        assert sum(isinstance(each, Tensor) for each in gc.get_objects()) == before
    finally:
        gc.enable()


def test_input_changed_in_place_after_its_use_is_not_taken_for_what_it_was() -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(192, 8), nn.Linear(8, 4)

        def forward(self, images: Tensor) -> Tensor:
            hidden = self.first(images.flatten(1)).tanh()
            out = self.second(hidden)
            with torch.no_grad():
                hidden.mul_(0.5)
            return nn.functional.normalize(out, dim=-1)

    model = _built(Changed)
    with pytest.raises(NotSeparableError, match="'second' was changed in place"):
        _one_pass_sum(model, group_losses_of(model), _images(3, 2, 3, 0), 0.3)


def _sorted_by_length(flat: Tensor) -> Tensor:
    return (flat.abs() > 0).sum(1).argsort(descending=True, stable=True)


class _Picking(nn.Module):
    """Does to some records, or in another order, what no synthetic record shows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.lin, self.token = nn.Linear(192, 4), nn.Parameter(torch.randn(4))

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        if self.kind == "sorted":
            order = _sorted_by_length(flat)
            out = torch.zeros(len(flat), 4).index_put((order,), self.lin(flat[order])) + self.token
        else:
            out, blank = self.lin(flat).clone(), flat.abs().sum(1) < 190 * 1e-3
            if self.kind == "rows of a token" and blank.any():
                out[blank] = torch.ones(int(blank.sum()), 1) * self.token
            elif blank.any():
                out[blank] = self.token
        return nn.functional.normalize(out, dim=-1)


@pytest.mark.parametrize("kind", ["sorted", "rows of a token", "token"])
def test_records_picked_by_their_content_are_never_attributed_to_other_groups(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, views = _built(lambda: _Picking(kind)), _images(4, 2, 3, 0)
    model(views.flatten(0, 2))
    for group in range(4):
        views[group, 0, 0, 0, :, : group % 3] = 0
        views[group, 1, 1] *= 1e-6
    expected = oracles.clipped_sum(model, group_losses_of(model), views, 0.3 * (1 - 1e-4))
    total = torch.zeros(num_trainable(model))
    monkeypatch.setattr(clipping, "_goes_in_one_pass", lambda *_: True)  # as if the self-check saw nothing
    clipping._gradient_numbers[model] = {(views.shape[1:],): 1}
    GroupClipper(l2_clip_norm=0.3).add_clipped_sum(total, model, group_losses_of(model), views)
    assert _relative_error(total, expected) < 1e-5
    with pytest.raises(NotSeparableError):
        _one_pass_sum(model, group_losses_of(model), views, 0.3)


def test_own_position_of_every_row_may_be_picked() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, images: Tensor) -> Tensor:
            hidden = torch.tanh(self.lin(images.flatten(1, 2)))
            end = images.flatten(1, 2).sum(2).argmax(1)
            return nn.functional.normalize(self.head(hidden[torch.arange(len(hidden)), end]), dim=-1)

    model, views = _built(Pooled), _images(4, 2, 3, 0)
    expected = oracles.clipped_sum(model, group_losses_of(model), views, 0.3 * (1 - 1e-4))
    assert _relative_error(_one_pass_sum(model, group_losses_of(model), views, 0.3), expected) < 1e-5


def test_terms_that_cancel_do_not_bring_their_rounding_into_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ghost norm is exact and tiny; the float32 sum of such terms is not."""
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", BY_GHOST_NORM)
    layer = nn.Linear(64, 64, bias=False)
    generator = torch.Generator().manual_seed(0)
    weights = 1e7 * torch.randn(16, 64, generator=generator)
    weights = torch.cat([weights[:8], -weights[:8]])

    def losses(inputs: Tensor) -> Tensor:
        return (layer(inputs.flatten(0, 2)) * weights).sum()[None]

    inputs = torch.randn(1, 1, 64, generator=generator).expand(1, 16, 64).contiguous()
    total = torch.zeros(64 * 64)
    engines.one_pass(total, layer, [layer.weight], losses, inputs[:, :, None], 1.0)
    assert float(total.double().norm()) <= 1.0


def test_gradient_changed_in_place_after_its_norm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", BY_GHOST_NORM)

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(192, 8), nn.Linear(8, 4)

        def forward(self, images: Tensor) -> Tensor:
            hidden = self.first(images.flatten(1))
            hidden.register_hook(lambda grad: grad.mul_(5))
            return nn.functional.normalize(self.head(torch.tanh(hidden)), dim=-1)

    model, views = _built(Hooked), _images(3, 2, 3, 0)
    expected = oracles.clipped_sum(model, group_losses_of(model), views, 0.3 * (1 - 1e-4))
    total = torch.zeros(num_trainable(model))
    monkeypatch.setattr(clipping, "_goes_in_one_pass", lambda *_: True)
    GroupClipper(l2_clip_norm=0.3).add_clipped_sum(total, model, group_losses_of(model), views)
    assert _relative_error(total, expected) < 1e-5


@pytest.mark.parametrize("l2_clip_norm", [1.1e-7, 1e-6, 1e-4])
def test_factor_that_lost_its_digits_counts_for_nothing(l2_clip_norm: float) -> None:
    norm = torch.tensor([1.5e38, 1.0])
    factor, counts = clipping.clip_factor(norm, l2_clip_norm)
    assert float(factor[0]) * 1.5e38 <= l2_clip_norm
    assert bool(counts[1])


@pytest.mark.parametrize("fails", [False, True])
def test_self_check_restores_a_model_whose_state_dict_is_not_its_weights(fails: bool) -> None:
    class Adapter(TinyEncoder):
        def state_dict(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            return {}

        def load_state_dict(self, state, *args, **kwargs):  # type: ignore[no-untyped-def]
            raise AssertionError("not for this")

        def forward(self, images: Tensor) -> Tensor:
            if fails and len(images) == 3 * 2 * 3:
                raise TypeError("on synthetic inputs only")
            return super().forward(images)

    model = _built(Adapter)
    before = [p.detach().clone() for p in model.parameters()]
    assert engines.goes_in_one_pass(model, group_losses_of(model), _images(4, 2, 3, 0)) is not fails
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_self_check_is_not_misled_by_kernels_that_round_by_shape() -> None:
    """Behind a ReLU's input of zero but for rounding two correct gradients differ; a ResNet has millions."""

    class RoundsByShape(TinyEncoder):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * (1 + 2e-3 * (len(images) % 4 == 2))

    model, inputs = _built(RoundsByShape), _images(4, 2, 3, 0)
    alone, together = (model(_images(n, 2, 3, 0).flatten(0, 2)) for n in (1, 2))
    assert not torch.allclose(alone, together[:6], rtol=1e-3)
    assert engines.goes_in_one_pass(model, group_losses_of(model), inputs)


def test_self_check_has_no_rows_of_zeros() -> None:
    """A network that divides by a row's length has no gradient there."""

    class Divides(TinyEncoder):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images / images.flatten(1).norm(dim=1)[:, None, None, None])

    model = _built(Divides)
    assert engines.goes_in_one_pass(model, group_losses_of(model), _images(4, 2, 3, 0))


def test_self_check_finds_what_follows_the_number_of_rows() -> None:
    """A pass of one group and one of many must be the same function, but for rounding."""

    class Counts(TinyEncoder):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) + images.mean((1, 2, 3), keepdim=True)[..., 0, 0] * len(images)

    model = _built(Counts)
    assert not engines.goes_in_one_pass(model, group_losses_of(model), _images(4, 2, 3, 0))


def test_inputs_given_by_name_fall_back_to_the_loop() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.lin, self.head = (
                nn.GroupNorm(1, 3),
                nn.Linear(192, 8),
                nn.Parameter(torch.ones(8, 4)),
            )

        def forward(self, images: Tensor) -> Tensor:
            hidden = torch.tanh(self.lin(input=self.norm(input=images).flatten(1)))
            return nn.functional.normalize(torch.matmul(hidden, other=self.head), dim=-1)

    model, views = _built(Named), _images(3, 2, 3, 0)
    expected = oracles.clipped_sum(model, group_losses_of(model), views, 0.3 * (1 - 1e-4))
    total = torch.zeros(num_trainable(model))
    GroupClipper(l2_clip_norm=0.3).add_clipped_sum(total, model, group_losses_of(model), views)
    assert _relative_error(total, expected) < 1e-5


def test_parameter_without_a_rule_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.curve = nn.Parameter(torch.rand(192))
            self.head = nn.Linear(192, 4)

        def forward(self, images: Tensor) -> Tensor:
            flat = images.flatten(1)
            return nn.functional.normalize(self.head(torch.nn.functional.prelu(flat, self.curve)), dim=-1)

    model, views = _built(Odd), _images(3, 2, 3, 0)
    expected = oracles.clipped_sum(model, group_losses_of(model), views, 0.3 * (1 - 1e-4))
    total = torch.zeros(num_trainable(model))
    GroupClipper(l2_clip_norm=0.3).add_clipped_sum(total, model, group_losses_of(model), views)
    assert _relative_error(total, expected) < 1e-5
    assert "'curve'" in caplog.text
    assert "prelu" in caplog.text
    with pytest.raises(NotSeparableError, match="parameter 'curve' is not supported"):
        _one_pass_sum(model, group_losses_of(model), views, 0.3)


def test_use_around_a_layer_that_only_some_records_take_is_not_missed() -> None:
    """The self-check may not see it; every forward pass must."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(192, 4)

        def forward(self, images: Tensor) -> Tensor:
            flat = images.flatten(1)
            out = self.head(flat)
            unusual = flat.abs().amax(1, keepdim=True) > 50
            if unusual.any():
                out = out + unusual * nn.functional.linear(flat.roll(1, 1), self.head.weight)
            return nn.functional.normalize(out, dim=-1)

    model, views = _built(Sometimes), _images(3, 2, 3, 0)
    views[0, 0, 0, 0, 0, 0] = 60.0
    expected = oracles.clipped_sum(model, group_losses_of(model), views, 0.3 * (1 - 1e-4))
    assert _relative_error(_one_pass_sum(model, group_losses_of(model), views, 0.3), expected) < 1e-5


def test_forward_methods_and_gradient_flags_are_restored() -> None:
    model = _built(ImageTransformer)
    model.up.weight.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    _one_pass_sum(model, group_losses_of(model), _images(3, 2, 3, 0), 1.0)
    assert [p.requires_grad for p in model.parameters()] == before
    assert not any("forward" in vars(m) or m._forward_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("flops_per_number", [BY_GRADIENT, BY_GHOST_NORM])
@pytest.mark.parametrize("name", ["convolutions", "every layer", "transformer"])
def test_low_precision_contributions_stay_within_the_clip_norm(
    name: str, flops_per_number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norm and sum use the same stored tensors, so rounding in the network cannot push one past C."""
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", flops_per_number)
    model = _built(IMAGE_MODELS[name])

    def losses(views: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            embeddings = model(views.flatten(0, 2))
        return two_view_group_loss(embeddings.float().unflatten(0, views.shape[:3]), temperature=0.01)

    for seed in range(2):
        total = _one_pass_sum(model, losses, 3 * _images(1, 3, 3, seed), 0.1)
        assert 0.0999 * 0.99 < float(total.double().norm()) <= 0.1
