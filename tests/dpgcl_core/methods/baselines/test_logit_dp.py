"""Logit-DP's clipped sum against a pair-by-pair oracle, and against what could break the bound B."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.direct_uses import NotSeparableError
from dpgcl_core.clipping.types import GroupReport, num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.methods.baselines.logit_dp import jacobians as logit_jacobians
from dpgcl_core.methods.baselines.logit_dp import layer_factors as logit_layers
from dpgcl_core.methods.baselines.logit_dp import similarity_clipper as logit_dp
from dpgcl_core.methods.baselines.logit_dp.jacobians import BY_LAYER, ROW_BY_ROW
from dpgcl_core.methods.baselines.logit_dp.similarity_clipper import LogitClipper
from tests.dpgcl_core.logit_oracle import Pairs, clipped_sum, pairs_of
from tests.dpgcl_core.models import (
    AroundForward,
    Convolutions,
    DirectUse,
    InPlace,
    Routed,
    SequenceFirst,
    SharedLayer,
    TextEncoder,
    TinyEncoder,
)


class _Encoder(TinyEncoder):
    """Of layers that go together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = nn.Conv2d(6, 8, 3, padding=2, dilation=2, bias=False)
        self.layers[9] = nn.Identity()


class _Ungrouped(Convolutions):
    """Every kind of padding, stride and dilation, in one block of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Conv2d(6, 6, 3, padding=(2, 1), padding_mode="reflect")
        self.layers[4] = nn.Conv2d(6, 4, (2, 3), stride=(2, 1), dilation=(1, 2), padding="valid", bias=False)


EVERY_MODEL = [
    (_Encoder, BY_LAYER),
    (_Ungrouped, BY_LAYER),
    (TinyEncoder, ROW_BY_ROW),
    (Convolutions, ROW_BY_ROW),
    (AroundForward, ROW_BY_ROW),
    (DirectUse, ROW_BY_ROW),
    (InPlace, ROW_BY_ROW),
    (Routed, ROW_BY_ROW),
    (SequenceFirst, ROW_BY_ROW),
    (SharedLayer, ROW_BY_ROW),
]


def _model(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind()


def _images(n: int, views: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, n, views, 3, 8, 8, generator=generator)


def _embed(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def embed(inputs: Tensor) -> Tensor:
        return model(inputs.flatten(0, 2)).unflatten(0, inputs.shape[:3])

    return embed


def _clipper(**changes: object) -> LogitClipper:
    return LogitClipper(**{"logit_clip_norm": 0.3, "temperature": 0.2, **changes})  # type: ignore[arg-type]


def _run(clipper: LogitClipper, model: nn.Module, inputs: Tensor) -> tuple[Tensor, GroupReport]:
    total = torch.zeros(num_trainable(model))
    return total, clipper.add_clipped_sum(total, model, _embed(model), inputs)


def _pairs(model: nn.Module, inputs: Tensor) -> Pairs:
    z = _embed(model)(inputs)[0]
    return pairs_of(trainable_parameters(model), z[:, 0], z[:, 1])


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("kind", "path"), EVERY_MODEL)
@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_sum_equals_oracle(kind: type[nn.Module], path: str, clip: float) -> None:
    model, inputs, clipper = _model(kind), _images(5), _clipper(logit_clip_norm=clip)
    total, report = _run(clipper, model, inputs)
    assert set(report.paths.values()) == {path}
    assert _error(total, clipped_sum(_pairs(model, inputs), clipper)) < 1e-4


@pytest.mark.parametrize("kind", [kind for kind, _ in EVERY_MODEL])
def test_norms_equal_oracle(kind: type[nn.Module]) -> None:
    model, inputs = _model(kind), _images(5)
    _, report = _run(_clipper(), model, inputs)
    assert torch.allclose(report.norms.double(), _pairs(model, inputs).bounds.flatten(), rtol=1e-5)


@pytest.mark.parametrize("options", [{"spread_out": 2.0}, {"temperature": 0.05}])
def test_every_loss_equals_oracle(options: dict[str, object]) -> None:
    model, inputs, clipper = _model(_Encoder), _images(4), _clipper(**options)
    assert _error(_run(clipper, model, inputs)[0], clipped_sum(_pairs(model, inputs), clipper)) < 1e-5


@pytest.mark.parametrize("form", [True, False])
def test_both_forms_of_a_layer_give_the_same_sum(form: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_layers.Factor, "is_formed", lambda self, *_: form or self.is_scale)
    model, inputs = _model(_Encoder), _images(5)
    total, report = _run(_clipper(), model, inputs)
    assert set(report.paths.values()) == {BY_LAYER}
    assert _error(total, clipped_sum(_pairs(model, inputs), _clipper())) < 1e-5


class _Bottleneck(nn.Module):
    """Its embedding has more axes than the layer before it has units."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(144, 3), nn.Tanh(), nn.Linear(3, 12))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.normalize(self.head(self.front(images)), dim=-1)


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_text_encoder_sum_equals_oracle(padding_idx: int | None) -> None:
    model = _model(lambda: TextEncoder(padding_idx=padding_idx))
    model.positions.requires_grad_(False)
    inputs = torch.randint(11, (1, 5, 2, 7), generator=torch.Generator().manual_seed(0))
    total, report = _run(_clipper(), model, inputs)
    assert set(report.paths.values()) == {ROW_BY_ROW}
    assert _error(total, clipped_sum(_pairs(model, inputs), _clipper())) < 1e-5


@pytest.mark.parametrize("kind", [_Encoder, Convolutions, DirectUse])
@pytest.mark.parametrize("seed", range(3))
def test_upper_bound_is_never_below_the_exact_norm(kind: type[nn.Module], seed: int) -> None:
    model, inputs = _model(kind), _images(6, seed=seed)
    _, report = _run(_clipper(), model, inputs)
    exact = _pairs(model, inputs).gradients.norm(dim=2).flatten()
    assert bool((report.norms.double() >= exact * (1 - 1e-6)).all())
    assert not torch.allclose(report.norms.double(), exact, rtol=1e-2)  # it is the bound, not the norm


@pytest.mark.parametrize("max_kept", [2**27, 5000])  # some are kept, others computed again
def test_passes_of_fewer_records_change_nothing(max_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = _model(_Encoder), _images(7)
    whole = _run(_clipper(), model, inputs)[0]
    monkeypatch.setattr(logit_jacobians, "_MAX_ROWS", 4)
    monkeypatch.setattr(logit_dp, "_MAX_KEPT_NUMBERS", max_kept)
    assert _error(_run(_clipper(), model, inputs)[0], whole.double()) < 1e-5


def test_rows_that_take_another_way_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network passes the check, and then some inputs go where no rule leads."""
    model, inputs, calls = _model(_Encoder), _images(5), 0
    embed, by_layer = _embed(model), logit_jacobians.by_layer
    assert logit_jacobians.Jacobians(model, embed, inputs).path == BY_LAYER

    def sometimes(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise NotSeparableError("another way")
        return by_layer(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(logit_jacobians, "by_layer", sometimes)
    total = torch.zeros(num_trainable(model))
    _clipper().add_clipped_sum(total, model, embed, inputs)
    assert calls > 2
    assert _error(total, clipped_sum(_pairs(model, inputs), _clipper())) < 1e-5


def test_infinite_clip_norm_gives_the_plain_gradient() -> None:
    model, inputs, clipper = _model(_Encoder), _images(5), _clipper(logit_clip_norm=math.inf)
    z = _embed(model)(inputs)[0]
    logits = z[:, 0] @ z[:, 1].T / clipper.temperature
    loss = nn.functional.cross_entropy(logits, torch.arange(5), reduction="sum")
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trainable_parameters(model))])
    assert _error(_run(clipper, model, inputs)[0], expected.double()) < 1e-5


@pytest.mark.parametrize("n", [0, 1])
def test_batch_without_negatives_adds_zero(n: int) -> None:
    model = _model(_Encoder)
    assert not _run(_clipper(spread_out=1.0), model, _images(n))[0].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", [_Encoder, DirectUse, _Bottleneck])
def test_non_finite_record_has_no_similarity_and_no_gradient(kind: type[nn.Module], bad: float) -> None:
    model, inputs, clipper = _model(kind), _images(5), _clipper()
    pairs = _pairs(model, inputs)
    pairs.z[2], pairs.z[:, 2], pairs.gradients[2], pairs.gradients[:, 2] = 0, 0, 0, 0
    poisoned = inputs.clone()
    poisoned[0, 2, 1, 0] = bad
    total, report = _run(clipper, model, poisoned)
    assert report.non_finite.tolist() == [False, False, True, False, False]
    assert _error(total, clipped_sum(pairs, clipper)) < 1e-5


class _Scaled(nn.Module):
    """A linear map to the sphere that does not see the last number of a record, until it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3, bias=False)
        nn.init.zeros_(self.layer.weight[:, 5])

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.layer(x), dim=-1)


def test_zero_embedding_has_no_similarity_and_no_gradient() -> None:
    model, clipper = _model(_Scaled), _clipper()
    inputs = torch.randn(1, 4, 2, 6, generator=torch.Generator().manual_seed(0))
    pairs = _pairs(model, inputs)
    pairs.z[1], pairs.gradients[1] = 0, 0
    inputs[0, 1, 0] = torch.tensor([0.0, 0, 0, 0, 0, 1])
    total, report = _run(clipper, model, inputs)
    assert not report.non_finite.any()
    assert _error(total, clipped_sum(pairs, clipper)) < 1e-5


def test_similarities_are_clamped_before_the_softmax() -> None:
    model, clipper = _model(lambda: nn.Linear(6, 3)), _clipper(logit_clip_norm=1e6)
    inputs = 5 * torch.randn(1, 4, 2, 6, generator=torch.Generator().manual_seed(0))  # embeddings too long
    pairs = _pairs(model, inputs)
    assert bool((pairs.z.abs() == 1).any())
    assert _error(_run(clipper, model, inputs)[0], clipped_sum(pairs, clipper)) < 1e-5


def test_nearly_parallel_pair_contributes_no_more_than_the_clip_norm() -> None:
    """J_iᵀ z'_j cancels to nothing of its terms there, and only float32 rounding is left of it."""
    model = _model(_Encoder)
    for seed in range(5):
        inputs = _images(2, seed=seed)
        inputs[:, :, 1] = inputs[:, :, 0] + 1e-7 * _images(2, 1, seed + 9)[:, :, 0]
        jacobians = logit_jacobians.Jacobians(model, _embed(model), inputs)
        measures, batch = logit_dp._with_norms(jacobians)
        total = torch.zeros(num_trainable(model), dtype=torch.float64)
        weights = torch.diag(torch.tensor([1e-3 * (1 - 1e-4), 0.0]).double()) / batch.norms
        jacobians.add_products(total, measures, logit_dp._cotangents(weights, batch).flatten(0, 1))
        assert float(total.norm()) <= 1e-3


def test_parameters_keep_their_state() -> None:
    model, inputs = _model(_Encoder), _images(3)
    model.layers[0].weight.requires_grad_(False)
    before = [(p.requires_grad, p.detach().clone()) for p in model.parameters()]
    total, _ = _run(_clipper(), model, inputs)
    assert _error(total, clipped_sum(_pairs(model, inputs), _clipper())) < 1e-5
    for parameter, (wanted, value) in zip(model.parameters(), before, strict=True):
        assert parameter.requires_grad == wanted
        assert torch.equal(parameter, value)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_clip_norm": 0.0}, "logit_clip_norm must be positive"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": nn.Parameter(torch.tensor(0.5))}, "learned"),
        ({"spread_out": -1.0}, "spread_out must be"),
    ],
)
def test_clipper_refuses_a_bad_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _clipper(**changes)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 4, 3, 3, 8, 8), "num_augmentations"), ((2, 4, 2, 3, 8, 8), "one group")],
)
def test_clipper_refuses_inputs_of_another_shape(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _run(_clipper(), _model(_Encoder), torch.randn(shape))


def test_low_precision_is_refused() -> None:
    model = _model(_Encoder)

    def embed(inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _embed(model)(inputs).float()

    with pytest.raises(ConfigError, match="float32"):
        _clipper().add_clipped_sum(torch.zeros(num_trainable(model)), model, embed, _images(3))


def test_network_that_draws_random_numbers_is_refused() -> None:
    model = _model(_Bottleneck)
    model.front.append(nn.Dropout(0.5))
    with pytest.raises(ConfigError, match="dropout"):
        _run(_clipper(), model, _images(3))
