"""The image tower with LoRA: what trains, what the clipping engine makes of it, and the way back."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.cross_record import refuse_cross_record
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.info_nce import two_view_group_loss
from tests import oracles
from trainers import torchvision_import
from trainers.config.training import NetworkConfig
from trainers.models.attention import fused_state_dict, separate_attention
from trainers.models.encoder import Encoder, build_encoder
from trainers.models.lora import merge_lora, prove_adapters_train, with_lora
from trainers.models.vit_lora import ImageTower
from trainers.torchvision_import import ensure_torchvision_import

SMALL = (3, 16, 16)
LARGE = (3, 224, 224)
TARGETS = ("q_proj", "v_proj")


def _images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


def _open_clip_tower() -> nn.Module:
    """A small image tower of open_clip, as it comes."""
    ensure_torchvision_import()
    from open_clip.transformer import VisionTransformer

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return VisionTransformer(
            image_size=16, patch_size=8, width=16, layers=2, heads=2, mlp_ratio=2.0, output_dim=8
        )


def _tower(image_shape: tuple[int, int, int] = SMALL) -> ImageTower:
    """The same tower as a backbone with adapters on query and value."""
    backbone = ImageTower(_open_clip_tower(), image_shape)
    separate_attention(backbone)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        with_lora(backbone, rank=4, alpha=4, targets=TARGETS)
    return backbone


def _moved(module: nn.Module) -> nn.Module:
    """The module as after some steps: B is no longer zero."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return module


def _encoder() -> Encoder:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Encoder(_tower(), feature_dim=8, embedding_dim=4)


# --- torchvision beside a CPU torch ---


def test_torchvision_can_be_imported_after_the_repair() -> None:
    ensure_torchvision_import()
    ensure_torchvision_import()
    importlib.import_module("torchvision.transforms")


def _importing(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[str]:
    """Lets the import end so, and returns the list of operators declared from then on."""
    declared: list[str] = []

    def import_module(name: str) -> None:
        if error is not None and not declared:
            raise error

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(torch.library, "define", lambda name, schema: declared.append(name))
    return declared


def test_repair_does_nothing_where_the_import_works(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = _importing(monkeypatch, None)
    ensure_torchvision_import()
    assert declared == []


def test_repair_declares_the_missing_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = _importing(monkeypatch, RuntimeError(torchvision_import._UNDECLARED))
    ensure_torchvision_import()
    assert declared == ["torchvision::nms", "torchvision::qnms"]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("operator torchvision::roi_align does not exist"),
        ImportError("operator torchvision::nms"),
    ],
)
def test_repair_lets_other_errors_through(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    declared = _importing(monkeypatch, error)
    with pytest.raises(type(error), match="torchvision"):
        ensure_torchvision_import()
    assert declared == []


# --- adapters ---


@pytest.mark.ci
def test_adapters_leave_the_outputs_as_they_were() -> None:
    plain, images = _open_clip_tower(), _images(3, *SMALL)
    assert torch.allclose(_tower()(images), plain(images), rtol=0, atol=1e-5)


@pytest.mark.ci
def test_adapters_alone_train() -> None:
    trainable = {name for name, p in _tower().named_parameters() if p.requires_grad}
    assert trainable == {
        f"tower.transformer.resblocks.{block}.attn.{target}.lora_{part}.default.weight"
        for block in range(2)
        for target in TARGETS
        for part in "AB"
    }


def test_target_by_full_name_adapts_one_layer() -> None:
    layers = nn.ModuleDict({"proj": nn.Linear(8, 8), "inner": nn.ModuleDict({"proj": nn.Linear(8, 8)})})
    with_lora(layers, rank=2, alpha=2, targets=["inner.proj"])
    assert {name.split(".lora_")[0] for name, p in layers.named_parameters() if p.requires_grad} == {
        "inner.proj"
    }


def test_scale_of_an_adapter_is_alpha_over_rank() -> None:
    layers = _moved(with_lora(nn.Sequential(nn.Linear(8, 8)), rank=4, alpha=2, targets=["0"]))
    x, layer = _images(5, 8), layers[0]
    lora_a, lora_b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = layer.base_layer(x) + 0.5 * x @ lora_a.T @ lora_b.T
    assert torch.allclose(layers(x), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (["q_prj"], "unknown LoRA target in the network 'q_prj'; did you mean 'q_proj'"),
        (["q_proj", "value"], "unknown LoRA target in the network 'value'"),
        (["attn"], "matches 'tower.transformer.resblocks.0.attn', a SeparateAttention"),
    ],
)
def test_targets_that_match_no_linear_layer_are_refused(targets: list[str], reason: str) -> None:
    backbone = ImageTower(_open_clip_tower(), SMALL)
    separate_attention(backbone)
    with pytest.raises(ConfigError, match=reason):
        with_lora(backbone, rank=4, alpha=4, targets=targets)
    assert all(p.requires_grad for p in backbone.parameters())


def test_targets_in_fused_attention_are_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"must be a plain nn\.Linear.*call separate_attention"):
        with_lora(_open_clip_tower(), rank=4, alpha=4, targets=["out_proj"])


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.1), nn.Dropout2d(0.2), nn.MultiheadAttention(4, 2, dropout=0.1)]
)
def test_adapters_beside_dropout_are_refused(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer)
    with pytest.raises(ConfigError, match="'1' must have no dropout; got"):
        with_lora(model, rank=2, alpha=2, targets=["0"])


def test_second_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match="already has an adapter"):
        with_lora(_tower(), rank=4, alpha=4, targets=["k_proj"])


def test_merging_keeps_the_outputs() -> None:
    tower, images = _moved(_tower()), _images(3, *SMALL)
    expected = tower(images)
    assert not torch.allclose(expected, _tower()(images), atol=1e-3)  # the adapters do something
    assert merge_lora(tower) == 4
    assert torch.allclose(tower(images), expected, rtol=0, atol=1e-5)


def test_merged_and_fused_tower_is_one_of_open_clip() -> None:
    tower, images = _moved(_tower()), _images(3, *SMALL)
    expected = tower(images)
    merge_lora(tower)
    fresh = _open_clip_tower()
    fresh.load_state_dict(fused_state_dict(tower.tower))
    assert torch.allclose(fresh(images), expected, rtol=0, atol=1e-5)


# --- the proof that adapters train ---


def _prove(module: nn.Module) -> None:
    images = _images(2, *SMALL)
    prove_adapters_train(module, lambda network: network(images))


def test_proof_accepts_fresh_adapters_and_leaves_them_alone() -> None:
    tower = _tower()
    before = {name: value.clone() for name, value in tower.state_dict().items()}
    state = torch.get_rng_state()
    _prove(tower)
    assert all(torch.equal(value, before[name]) for name, value in tower.state_dict().items())
    assert all(p.grad is None for p in tower.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_proof_refuses_adapters_that_are_zero_on_both_sides() -> None:
    tower = _tower()
    layer = tower.tower.transformer.resblocks[1].attn.q_proj
    with torch.no_grad():
        layer.lora_A["default"].weight.zero_()
    with pytest.raises(ConfigError, match=r"at the start these do not: .*resblocks.1.attn.q_proj"):
        _prove(tower)


def test_proof_refuses_an_adapter_that_the_pass_goes_around() -> None:
    """The adapter that peft puts on the output layer of fused attention, if asked by name."""
    tower = _open_clip_tower()
    from peft import LoraConfig, inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["out_proj", "c_fc"]), tower)
    with pytest.raises(ConfigError, match=r"resblocks.0.attn.out_proj"):
        _prove(tower)


def test_proof_refuses_a_weight_without_gradient_after_the_start() -> None:
    class HalfUsed(nn.Module):
        """Trains through one half of its weights only; the layer as a whole moves."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = with_lora(nn.Sequential(nn.Linear(4, 4)), rank=2, alpha=2, targets=["0"])

        def forward(self, images: Tensor) -> Tensor:
            adapter = self.layer[0]
            hidden = adapter.lora_A["default"](images.flatten(1)[:, :4]).detach()
            output: Tensor = adapter.lora_B["default"](hidden)
            return output

    with pytest.raises(ConfigError, match=r"after one step these do not: .*lora_A"):
        _prove(HalfUsed())


@pytest.mark.parametrize("factor", [float("nan"), 0.0])
def test_proof_refuses_outputs_that_carry_no_gradient(factor: float) -> None:
    tower, images = _tower(), _images(2, *SMALL)
    with pytest.raises(ConfigError, match="must receive a finite, nonzero gradient"):
        prove_adapters_train(tower, lambda network: network(images) * factor)


def test_proof_refuses_a_network_without_trainable_weights() -> None:
    with pytest.raises(ConfigError, match="no trainable weight"):
        _prove(_tower().requires_grad_(False))


# --- the clipped group gradient ---


@pytest.mark.parametrize("l2_clip_norm", [0.05, 100.0])
@pytest.mark.parametrize("moved", [False, True])
def test_clipped_sum_equals_oracle(l2_clip_norm: float, moved: bool) -> None:
    encoder = _encoder()
    if moved:
        _moved(encoder)
    views = _images(4, 2, 3, *SMALL)

    def group_losses(views: Tensor) -> Tensor:
        embeddings = encoder(views.flatten(0, 2)).unflatten(0, views.shape[:3])
        return two_view_group_loss(embeddings, temperature=0.5)

    expected = oracles.clipped_sum(encoder, group_losses, views, l2_clip_norm * (1 - 1e-4))
    total = torch.zeros(num_trainable(encoder))
    GroupClipper(l2_clip_norm=l2_clip_norm).add_clipped_sum(total, encoder, group_losses, views)
    assert float((total.double() - expected).norm() / expected.norm()) < 1e-5


def test_tower_passes_the_search_for_mixed_records() -> None:
    refuse_cross_record(_moved(_encoder()), SMALL)


# --- image shapes ---


def test_grey_images_are_repeated_to_three_channels() -> None:
    grey = _images(2, 1, 16, 16)
    assert torch.equal(_tower((1, 16, 16))(grey), _tower()(grey.repeat(1, 3, 1, 1)))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((3, 28, 28), "16×16 pixels; got 28×28.*--image-size 16"),
        ((3, 16, 8), "got 16×8"),
        ((2, 16, 16), "1 or 3 channels; got 2"),
    ],
)
def test_other_image_shapes_are_refused(shape: tuple[int, int, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ImageTower(_open_clip_tower(), shape)


# --- ViT-B-32 itself ---


@pytest.mark.ci
def test_vit_b_32_trains_the_published_number_of_weights() -> None:
    encoder = build_encoder(NetworkConfig(name="vit_b_32_lora"), LARGE, seed=0)
    assert num_trainable(encoder.backbone) == 589_824
    assert encoder.features(_images(1, *LARGE)).shape == (1, 512)
    assert all(p.requires_grad for p in encoder.head.parameters())
