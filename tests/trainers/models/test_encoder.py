"""Stage 5: unit embeddings, public initialisation, and no statistics across records."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.cross_record import refuse_cross_record
from dpgcl_core.clipping.layers import rule_of
from dpgcl_core.clipping.verification import unsupported_layer
from dpgcl_core.errors import ConfigError
from tests.dpgcl_core.clipping import engines
from tests.dpgcl_core.models import group_losses_of
from trainers.config.training import NetworkConfig
from trainers.models.encoder import NETWORKS, Encoder, build_encoder, to_fast_layout

SHAPE = (3, 8, 8)
ANY_SIZE = sorted(set(NETWORKS) - {"vit_b_32_lora"})
"""Networks that read images of any size; the tower of a fixed size has tests of its own."""


class _Flat(nn.Module):
    """A backbone with one layer under test between the images and a linear layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.flatten = nn.Flatten()

    def forward(self, images: Tensor) -> Tensor:
        flat: Tensor = self.flatten(self.layer(images))
        return flat


class _Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class _LooksBack(nn.Module):
    """Each record sees the one after it, so only a change of a later record shows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cat([x[1:], torch.zeros_like(x[:1])])


class _DividedByCount(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / len(x)


class _CentresBetweenLayers(nn.Module):
    """The mixing is in the container's own forward, between two innocent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x) - x.mean(0))
        return out


def _encoder(layer: nn.Module) -> Encoder:
    return Encoder(_Flat(layer), 3 * 8 * 8, 16)


@pytest.mark.parametrize("name", ANY_SIZE)
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 9, 13)])
def test_encoder_returns_unit_embeddings(name: str, shape: tuple[int, int, int]) -> None:
    encoder = build_encoder(NetworkConfig(name=name, embedding_dim=20), shape, seed=0)
    embeddings = encoder(torch.randn(3, *shape))
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(3), atol=1e-5)
    assert embeddings.shape == (3, 20)


@pytest.mark.parametrize("name", ANY_SIZE)
def test_encoder_features_have_announced_width(name: str) -> None:
    encoder = build_encoder(NetworkConfig(name=name), SHAPE, seed=0)
    assert encoder.features(torch.randn(2, *SHAPE)).shape == (2, encoder.feature_dim)


@pytest.mark.parametrize("name", ANY_SIZE)
def test_networks_pass_the_cross_record_check(name: str) -> None:
    refuse_cross_record(build_encoder(NetworkConfig(name=name), SHAPE, seed=0), SHAPE)


@pytest.mark.parametrize("name", ANY_SIZE)
def test_networks_use_plain_layers_out_of_place(name: str) -> None:
    allowed = (nn.Conv2d, nn.Linear, nn.GroupNorm, nn.ReLU, nn.AdaptiveAvgPool2d, nn.MaxPool2d, nn.Identity)
    encoder = build_encoder(NetworkConfig(name=name), (3, 64, 64), seed=0)
    leaves = [module for module in encoder.modules() if not list(module.children())]
    assert all(isinstance(leaf, allowed) and not getattr(leaf, "inplace", False) for leaf in leaves)


@pytest.mark.parametrize("name", ANY_SIZE)
def test_networks_reach_every_parameter_with_gradient(name: str) -> None:
    encoder = build_encoder(NetworkConfig(name=name), (1, 28, 28), seed=0)
    encoder(torch.randn(2, 1, 28, 28))[:, 0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in encoder.parameters())


def test_initialisation_is_a_function_of_the_seed() -> None:
    torch.manual_seed(1)
    first = build_encoder(NetworkConfig(), SHAPE, seed=5).state_dict()
    torch.manual_seed(2)
    second = build_encoder(NetworkConfig(), SHAPE, seed=5).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_initialisation_differs_between_seeds() -> None:
    first, second = (build_encoder(NetworkConfig(), SHAPE, seed=seed) for seed in (5, 6))
    assert not torch.equal(first.head[0].weight, second.head[0].weight)


def test_initialisation_leaves_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    build_encoder(NetworkConfig(), SHAPE, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_initialisation_leaves_cuda_random_state_alone() -> None:
    before = torch.cuda.get_rng_state()
    build_encoder(NetworkConfig(), SHAPE, seed=5)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("name", ANY_SIZE)
def test_groups_of_every_network_go_in_one_pass_at_its_usual_size(name: str) -> None:
    """A deep network has inputs of ReLUs so close to 0 that rounding decides: no reason to be slow."""
    encoder = build_encoder(NetworkConfig(name=name), (3, 32, 32), seed=0)
    to_fast_layout(encoder, torch.device("cpu"), (3, 32, 32))
    assert engines.goes_in_one_pass(encoder, group_losses_of(encoder), torch.zeros(2, 2, 3, 3, 32, 32))


@pytest.mark.parametrize(
    ("shape", "count"), [((3, 32, 32), 11_168_832), ((3, 64, 64), 11_168_832 + 64 * 3 * (49 - 9))]
)
def test_resnet18_backbone_has_published_parameter_count(shape: tuple[int, int, int], count: int) -> None:
    # torchvision's ResNet-18 has 11,689,512, of which 513,000 are the classifier and 9,408 the 7×7 stem.
    backbone = NETWORKS["resnet18"].factory(shape)
    assert sum(p.numel() for p in backbone.parameters()) == count
    assert 11_168_832 + 64 * 3 * (49 - 9) == 11_689_512 - 513_000


def test_small_cnn_has_few_parameters() -> None:
    encoder = build_encoder(NetworkConfig(), (1, 28, 28), seed=0)
    assert sum(p.numel() for p in encoder.parameters()) <= 45_000


def test_wide_cnn_has_about_130_000_weights_that_one_pass_clips() -> None:
    encoder = build_encoder(NetworkConfig(name="wide_cnn"), (1, 28, 28), seed=0)
    assert sum(p.numel() for p in encoder.parameters()) == 129_888
    weighted = [each for each in encoder.modules() if [*each.parameters(recurse=False)]]
    assert all(rule_of(each) is not None for each in weighted)
    assert unsupported_layer(encoder) == ""


def test_zero_embedding_is_finite_with_finite_gradient() -> None:
    encoder = build_encoder(NetworkConfig(), SHAPE, seed=0)
    with torch.no_grad():
        for parameter in encoder.head.parameters():
            parameter.zero_()
    embeddings = encoder(torch.zeros(2, *SHAPE))
    embeddings.sum().backward()
    assert torch.equal(embeddings, torch.zeros(2, 64))
    assert all(torch.isfinite(p.grad).all() for p in encoder.parameters() if p.grad is not None)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_constant_image_gives_finite_embedding(value: float) -> None:
    encoder = build_encoder(NetworkConfig(), SHAPE, seed=0)
    assert torch.isfinite(encoder(torch.full((2, *SHAPE), value))).all()


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm2d(3), nn.SyncBatchNorm(3), nn.InstanceNorm2d(3, track_running_stats=True)],
    ids=lambda layer: type(layer).__name__,
)
def test_cross_record_check_refuses_norm_by_name(layer: nn.Module) -> None:
    with pytest.raises(ConfigError, match=rf"'backbone\.layer' is a {type(layer).__name__}.*sensitivity"):
        refuse_cross_record(_encoder(layer), SHAPE)


@pytest.mark.parametrize(
    "layer",
    [nn.InstanceNorm2d(3), nn.GroupNorm(1, 3), nn.LayerNorm([3, 8, 8])],
    ids=lambda m: type(m).__name__,
)
def test_cross_record_check_accepts_norm_within_record(layer: nn.Module) -> None:
    refuse_cross_record(_encoder(layer), SHAPE)


@pytest.mark.parametrize("layer", [_Centred(), _LooksBack()], ids=lambda layer: type(layer).__name__)
def test_cross_record_check_refuses_mixing_module(layer: nn.Module) -> None:
    name = type(layer).__name__
    with pytest.raises(ConfigError, match=rf"'backbone\.layer' \({name}\) mixes records"):
        refuse_cross_record(_encoder(layer), SHAPE)


def test_cross_record_check_names_container_that_mixes_between_layers() -> None:
    with pytest.raises(ConfigError, match=r"'backbone\.layer' \(_CentresBetweenLayers\) mixes records"):
        refuse_cross_record(_encoder(_CentresBetweenLayers()), SHAPE)


def test_cross_record_check_refuses_use_of_batch_size() -> None:
    with pytest.raises(ConfigError, match=r"'backbone\.layer' \(_DividedByCount\) depends on the number"):
        refuse_cross_record(_encoder(_DividedByCount()), SHAPE)


def test_cross_record_check_refuses_dropout() -> None:
    with pytest.raises(ConfigError, match=r"'backbone\.layer' \(Dropout\) returns two different outputs"):
        refuse_cross_record(_encoder(nn.Dropout(0.5)).eval(), SHAPE)


def test_cross_record_check_leaves_encoder_and_random_state_alone() -> None:
    encoder = build_encoder(NetworkConfig(), SHAPE, seed=0).eval()
    before = torch.get_rng_state()
    refuse_cross_record(encoder, SHAPE)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in encoder.modules())
    assert not any(module._forward_hooks for module in encoder.modules())


def test_unknown_network_is_refused_with_suggestion() -> None:
    with pytest.raises(ConfigError, match="unknown network 'resnet81'; did you mean 'resnet18'"):
        build_encoder(NetworkConfig(name="resnet81"), SHAPE, seed=0)


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An importable module in which a test puts its factory."""
    module = types.ModuleType("own_networks")
    monkeypatch.setitem(sys.modules, "own_networks", module)
    return module


def test_own_network_is_used(own_module: types.ModuleType) -> None:
    own_module.flat = lambda shape: nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 7))  # type: ignore[attr-defined]
    encoder = build_encoder(NetworkConfig(name="own_networks:flat"), SHAPE, seed=0)
    assert encoder.features(torch.zeros(4, *SHAPE)).shape == (4, 7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.networks:build", "importable.*ModuleNotFoundError"),
        ("own_networks:missing", "importable.*AttributeError"),
        ("own_networks:number", "must name a callable; got int"),
        ("own_networks:fails", "cannot be built.*no such width"),
        ("own_networks:no_module", r"must return a torch\.nn\.Module; got NoneType"),
        ("own_networks:unpooled", r"must return features \[n, feature_dim\]; got \[2, 3, 8, 8\]"),
        ("own_networks:other_size", "cannot read images"),
    ],
)
def test_unusable_own_network_is_refused(own_module: types.ModuleType, name: str, message: str) -> None:
    def fails(shape: tuple[int, int, int]) -> nn.Module:
        raise ValueError("no such width")

    own_module.__dict__.update(
        number=3,
        fails=fails,
        no_module=lambda shape: None,
        unpooled=lambda shape: nn.Identity(),
        other_size=lambda shape: nn.Linear(5, 5),
    )
    with pytest.raises(ConfigError, match=message):
        build_encoder(NetworkConfig(name=name), SHAPE, seed=0)


class _ZeroGate(nn.Module):
    """Attention over the batch behind an output projection that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(64, 8), nn.Linear(8, 8)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(images.flatten(1)))
        return hidden + self.out(torch.softmax(hidden @ hidden.T, 1) @ hidden)


def test_mixing_behind_a_zero_initialisation_is_refused() -> None:
    with pytest.raises(ConfigError, match="mixes records"):
        refuse_cross_record(Encoder(_ZeroGate(), 8, 8), (1, 8, 8))
