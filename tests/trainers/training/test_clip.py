"""Training CLIP models: which weights train, and what the clipping engine makes of both towers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dpgcl_core.clipping.clipper import ONE_BY_ONE, GroupClipper
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.image_text import MAX_LOGIT_SCALE
from tests import oracles
from tests.trainers.clip_models import (
    ALL,
    ALL_LORA,
    SMALL_LORA,
    TINY,
    losses_of,
    moved,
    packed,
    pairs_of,
    tiny_encoder,
)
from trainers.models.clip.adapters import ClipLora, make_trainable
from trainers.models.clip.clip_encoder import (
    ImageTextEncoder,
    _tokens_of,
    build_image_text_encoder,
    pack_views,
    prove_towers_train,
    synthetic_pairs,
)
from trainers.models.clip.published_models import ClipConfig, build_clip, find_clip

# --- what trains ---


@pytest.mark.parametrize(
    ("lora", "num_layers"),
    [
        (ClipLora(), 8),
        (ClipLora(targets=("q", "k", "v", "out", "mlp")), 24),
        (ClipLora(targets=("mlp",), towers=("text",)), 4),
        (ClipLora(targets=("out",), towers=("image",)), 2),
        (ClipLora(targets=("resblocks.0.attn.q_proj",)), 2),
    ],
)
def test_adapters_stand_on_the_targets_alone(lora: ClipLora, num_layers: int) -> None:
    trainable = [name for name, p in tiny_encoder(lora).clip.named_parameters() if p.requires_grad]
    assert len(trainable) == 2 * num_layers
    assert all(".lora_" in name for name in trainable)
    if len(lora.towers) == 1:
        assert all(name.startswith("visual.") == (lora.towers == ("image",)) for name in trainable)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"targets": ("q_prj",)}, "LoRA target in the image tower 'q_prj'; did you mean 'q_proj'"),
        ({"targets": ("text_projection",)}, "LoRA target in the image tower"),
        ({"targets": ("attn",)}, "a SeparateAttention"),
        ({"targets": "q"}, "must be a non-empty list of names; got 'q'"),
        ({"targets": ()}, "must be a non-empty list of names"),
        ({"towers": ("images",)}, "unknown tower 'images'; did you mean 'image'"),
        ({"towers": ()}, "at least one tower"),
        ({"alpha": 0.0}, "LoRA alpha must be positive"),
    ],
)
def test_adapters_that_cannot_be_made_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tiny_encoder(ClipLora(**options))


def test_adapters_leave_the_embeddings_as_they_were_and_follow_the_seed() -> None:
    state = torch.get_rng_state()
    plain, first, again = tiny_encoder(ALL), tiny_encoder(), tiny_encoder()
    assert torch.equal(torch.get_rng_state(), state)
    images, tokens = synthetic_pairs(plain)
    assert torch.allclose(first.embed_images(images), plain.embed_images(images), atol=1e-6)
    assert torch.allclose(first.embed_texts(tokens), plain.embed_texts(tokens), atol=1e-6)
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lora", [SMALL_LORA, ALL])
@pytest.mark.parametrize("train_logit_scale", [False, True])
def test_temperature_trains_only_if_asked(lora: ClipLora | None, train_logit_scale: bool) -> None:
    encoder = tiny_encoder(lora, train_logit_scale=train_logit_scale)
    assert encoder.clip.logit_scale.requires_grad is encoder.learns_temperature is train_logit_scale
    assert math.exp(-float(encoder.clip.logit_scale.detach())) == pytest.approx(0.07)


def test_learned_temperature_starts_where_it_is_told() -> None:
    encoder = tiny_encoder(train_logit_scale=True, temperature=0.5)
    assert math.exp(-float(encoder.clip.logit_scale.detach())) == pytest.approx(0.5)


def test_logit_scale_stays_within_clips_bounds() -> None:
    encoder = tiny_encoder(train_logit_scale=True)
    with torch.no_grad():
        encoder.clip.logit_scale.fill_(7.0)
    encoder.limit_logit_scale_()
    assert float(encoder.clip.logit_scale.detach()) == pytest.approx(MAX_LOGIT_SCALE)


@pytest.mark.parametrize("views", [1, 3])
def test_packed_views_are_read_back_exactly(views: int) -> None:
    encoder = tiny_encoder()
    images, tokens = pairs_of(views=views)
    seen = []
    encoder.register_forward_pre_hook(lambda _, given: seen.extend(given))
    encoder.embed_views(packed(encoder, (images, tokens)))
    assert torch.equal(seen[0], images)
    assert torch.equal(seen[1], tokens)


@pytest.mark.ci
def test_packed_views_hold_every_token_of_clip() -> None:
    spec = find_clip(ClipConfig(model="ViT-B-32"))
    encoder = SimpleNamespace(spec=spec, view_size=3 * 224 * 224)
    tokens = torch.arange(77 * 642).clamp(max=49_407).view(-1, 1, 77)
    views = pack_views(torch.zeros(len(tokens), 1, 3, 2, 2), tokens, encoder)  # type: ignore[arg-type]
    assert torch.equal(_tokens_of(views[:, 1::2, :77], spec), tokens)


def test_image_and_caption_views_alternate() -> None:
    encoder, (images, tokens) = tiny_encoder(), pairs_of(views=2)
    found = encoder.embed_views(packed(encoder, (images, tokens)))
    assert torch.allclose(found[1, 0, 2], encoder.embed_images(images[1, 0, 1:])[0], atol=1e-6)
    assert torch.allclose(found[1, 0, 3], encoder.embed_texts(tokens[1, 0, 1:])[0], atol=1e-6)


@pytest.mark.parametrize("lora", [SMALL_LORA, ALL_LORA, ALL])
def test_proof_accepts_every_kind_of_training(lora: ClipLora | None) -> None:
    encoder = tiny_encoder(lora, train_logit_scale=True)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    prove_towers_train(encoder)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


@pytest.mark.parametrize("tower", ["visual.transformer", "transformer"])
def test_proof_refuses_a_dead_adapter_in_either_tower(tower: str) -> None:
    encoder = tiny_encoder()
    layer = encoder.clip.get_submodule(f"{tower}.resblocks.1.attn.v_proj")
    with torch.no_grad():
        layer.lora_A["default"].weight.zero_()
    with pytest.raises(ConfigError, match=f"clip.{tower}.resblocks.1.attn.v_proj"):
        prove_towers_train(encoder)


# --- the clipped group gradient ---


def _oracle(encoder: ImageTextEncoder, views: Tensor, l2_clip_norm: float) -> Tensor:
    """Each group's gradient by itself, in float64 after the backward pass."""
    return oracles.clipped_sum(encoder, losses_of(encoder), views, l2_clip_norm * (1 - 1e-4))


@pytest.mark.parametrize("l2_clip_norm", [0.05, 3.0])
@pytest.mark.parametrize(("lora", "train_logit_scale"), [(SMALL_LORA, False), (ALL_LORA, True), (ALL, True)])
def test_clipped_sum_of_both_towers_equals_oracle_in_one_pass(
    lora: ClipLora | None, train_logit_scale: bool, l2_clip_norm: float
) -> None:
    encoder = moved(tiny_encoder(lora, train_logit_scale=train_logit_scale))
    views = packed(encoder, pairs_of())
    total = torch.zeros(num_trainable(encoder))
    report = GroupClipper(l2_clip_norm=l2_clip_norm).add_clipped_sum(
        total, encoder, losses_of(encoder), views
    )
    expected = _oracle(encoder, views, l2_clip_norm)
    assert float((total.double() - expected).norm() / expected.norm()) < 1e-5
    towers = {"visual" if "visual" in layer else "text" for layer in report.paths}
    assert towers == {"visual", "text"}
    assert ONE_BY_ONE not in report.paths.values()


def test_gradient_checkpointing_takes_the_exact_loop(caplog: pytest.LogCaptureFixture) -> None:
    plain, encoder = moved(tiny_encoder()), moved(tiny_encoder(gradient_checkpointing=True))
    total = torch.zeros(num_trainable(encoder))
    report = GroupClipper(l2_clip_norm=3.0).add_clipped_sum(
        total, encoder, losses_of(encoder), packed(encoder, pairs_of())
    )
    expected = _oracle(plain, packed(plain, pairs_of()), 3.0)
    assert float((total.double() - expected).norm() / expected.norm()) < 1e-5
    assert report.paths == {"": ONE_BY_ONE}
    assert "gradient checkpointing keeps no input of a layer" in caplog.text


def test_gradient_checkpointing_runs_every_block_again() -> None:
    encoder = moved(tiny_encoder(gradient_checkpointing=True))
    calls = []
    for tower in (encoder.clip.visual.transformer, encoder.clip.transformer):
        tower.resblocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    losses_of(encoder)(packed(encoder, pairs_of())).sum().backward()
    assert len(calls) == 4


def test_model_without_gradient_checkpointing_is_refused() -> None:
    clip = build_clip(TINY, seed=0)
    make_trainable(clip, SMALL_LORA, seed=0, train_logit_scale=False)
    clip.set_grad_checkpointing = None
    with pytest.raises(ConfigError, match="has no gradient checkpointing"):
        ImageTextEncoder(clip, TINY, gradient_checkpointing=True)


def test_loss_of_a_group_is_eq_15_with_both_sides_copies() -> None:
    encoder, pairs = moved(tiny_encoder()), pairs_of(views=3)
    images, texts = encoder(*pairs)
    losses = losses_of(encoder, temperature=0.5)(packed(encoder, pairs))
    for group in range(3):
        one, other = images[group], texts[group]
        expected = oracles.group_info_nce(one[:, 0], other[:, 0], other[:, 1:], 0.5)
        expected = expected + oracles.group_info_nce(other[:, 0], one[:, 0], one[:, 1:], 0.5)
        assert float(losses[group].detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


# --- ViT-B-32 itself ---


@pytest.mark.ci
def test_vit_b_32_trains_the_published_number_of_weights() -> None:
    encoder = build_image_text_encoder(ClipConfig(model="ViT-B-32"), ClipLora(), seed=0)
    assert num_trainable(encoder) == 983_040
    prove_towers_train(encoder)
