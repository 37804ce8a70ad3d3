"""Exported CLIP models: other libraries read them by themselves and give the same embeddings."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError, StorageError
from trainers.files.weights import read_note
from trainers.models.attention import separate_attention
from trainers.models.clip import published_models as clip_module
from trainers.models.clip.adapters import ClipLora
from trainers.models.clip.clip_encoder import ImageTextEncoder, build_image_text_encoder, synthetic_pairs
from trainers.models.clip.clip_files import (
    ADAPTER_FILE,
    MERGES_FILE,
    export_adapter,
    export_merged,
    merged_state_dict,
    trained_encoder,
)
from trainers.models.clip.published_models import CONFIG_FILE, WEIGHTS_FILE, ClipConfig, build_clip, find_clip
from trainers.models.clip.tokens import ClipTokenizer
from trainers.torchvision_import import ensure_torchvision_import

LORAS = [
    ClipLora(rank=2, alpha=4),
    ClipLora(rank=3, targets=("k", "out", "mlp")),
    ClipLora(rank=2, towers=("text",)),
    ClipLora(rank=2, towers=("image",)),
]


def _trained(lora: ClipLora | None) -> ImageTextEncoder:
    """As after a training: adapters do something, and the temperature has moved."""
    encoder = build_image_text_encoder(ClipConfig(), lora, seed=0, train_logit_scale=True)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in encoder.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return encoder


@torch.no_grad()
def _embeddings(model: nn.Module) -> Tensor:
    """Of both towers, `[2n, dim]`, by the model's own methods."""
    images, tokens = synthetic_pairs(build_image_text_encoder(ClipConfig(), seed=0))
    if isinstance(model, ImageTextEncoder):
        return torch.cat([model.embed_images(images), model.embed_texts(tokens)])
    return torch.cat([model.encode_image(images, normalize=True), model.encode_text(tokens, normalize=True)])


@pytest.fixture(scope="module")
def open_clip() -> Any:
    """The library, imported behind the repair that it needs beside a CPU torch."""
    ensure_torchvision_import()
    return importlib.import_module("open_clip")


@pytest.mark.parametrize("lora", [*LORAS, None])
def test_open_clip_loads_the_merged_model_by_itself(
    open_clip: Any, tmp_path: Path, lora: ClipLora | None
) -> None:
    encoder = _trained(lora)
    export_merged(encoder, tmp_path, note="public")
    model = open_clip.create_model(f"local-dir:{tmp_path}").eval()
    assert torch.allclose(_embeddings(model), _embeddings(encoder), rtol=0, atol=1e-5)
    assert torch.equal(model.logit_scale, encoder.clip.logit_scale)
    # The comparison says something: what was trained is not what the training started from.
    assert not torch.allclose(_embeddings(model), _embeddings(build_clip(encoder.spec, seed=0)), atol=1e-2)


def test_merged_model_is_a_model_and_weights_to_start_from(tmp_path: Path) -> None:
    encoder = _trained(LORAS[0])
    export_merged(encoder, tmp_path, note="public")
    again = build_image_text_encoder(
        ClipConfig(model=str(tmp_path), weights=str(tmp_path / WEIGHTS_FILE)), seed=9
    )
    assert torch.allclose(_embeddings(again), _embeddings(encoder), rtol=0, atol=1e-5)


def test_merging_leaves_the_trained_model_alone() -> None:
    encoder = _trained(LORAS[0])
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    merged_state_dict(encoder)
    assert list(encoder.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_model_without_adapters_comes_back_bit_for_bit() -> None:
    encoder = build_image_text_encoder(ClipConfig(), seed=3)
    expected = build_clip(find_clip(ClipConfig()), seed=3).state_dict()
    merged = merged_state_dict(encoder)
    assert set(merged) == set(expected)
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


def test_merged_folder_says_how_pixels_are_read_and_what_the_weights_are(
    open_clip: Any, tmp_path: Path
) -> None:
    encoder = _trained(LORAS[0])
    export_merged(encoder, tmp_path, note="of whom")
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert config["preprocess_cfg"] == {"mean": [0.5] * 3, "std": [0.5] * 3}
    assert read_note(tmp_path / WEIGHTS_FILE) == "of whom"
    assert open_clip.create_model(f"local-dir:{tmp_path}").visual.preprocess_cfg["mean"] == [0.5] * 3


def test_small_vocabulary_travels_with_the_merged_model(open_clip: Any, tmp_path: Path) -> None:
    encoder = _trained(LORAS[0])
    export_merged(encoder, tmp_path, note="public")
    captions = ["a red square", "many, many more words"]
    merges, length = str(tmp_path / MERGES_FILE), encoder.spec.context_length
    tokenizer = open_clip.SimpleTokenizer(bpe_path=merges, context_length=length)
    assert torch.equal(tokenizer(captions), ClipTokenizer(encoder.spec)(captions).tokens)


@pytest.mark.parametrize("lora", LORAS)
def test_peft_puts_the_adapters_on_open_clips_own_model(tmp_path: Path, lora: ClipLora) -> None:
    from peft import PeftModel

    encoder = _trained(lora)
    export_adapter(encoder, tmp_path, note="of whom")
    clip = build_clip(encoder.spec, seed=0)
    if "out" in lora.targets:
        separate_attention(clip)
    loaded = PeftModel.from_pretrained(clip, str(tmp_path))
    assert torch.allclose(_embeddings(loaded), _embeddings(encoder), rtol=0, atol=1e-5)
    assert read_note(tmp_path / ADAPTER_FILE) == "of whom"


def test_same_adapters_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        export_adapter(_trained(LORAS[0]), tmp_path / name, note="x")
    assert [p.read_bytes() for p in sorted((tmp_path / "one").iterdir())] == [
        p.read_bytes() for p in sorted((tmp_path / "other").iterdir())
    ]


def test_model_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no adapters to export. Export the merged model"):
        export_adapter(_trained(None), tmp_path, note="x")


@pytest.mark.parametrize(
    ("model", "pretrained"),
    [
        ("clip-tiny", "random"),
        ("ViT-B-32", "random"),
        ("ViT-B-32", "openai"),
        ("ViT-B/16", "laion2b_s34b_b88k"),
        ("ViT-B-16-SigLIP", "webli"),
    ],
)
def test_trained_model_is_told_as_it_was_before_the_training(
    monkeypatch: pytest.MonkeyPatch, model: str, pretrained: str
) -> None:
    monkeypatch.setattr(clip_module, "_downloaded", lambda *_: Path("downloaded.safetensors"))
    before = find_clip(ClipConfig(model=model, weights=pretrained))
    monkeypatch.setattr(clip_module, "_downloaded", None)  # nothing is fetched afterwards
    after = find_clip(ClipConfig(model=model, weights=pretrained), with_weights=False)
    assert after.weights is None
    assert (after.architecture, after.mean, after.std) == (before.architecture, before.mean, before.std)


def test_name_of_weights_that_open_clip_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown weights of CLIP model ViT-B-32 'laion'"):
        find_clip(ClipConfig(model="ViT-B-32", weights="laion"), with_weights=False)


@pytest.mark.parametrize("lora", [*LORAS, None])
def test_state_of_a_training_becomes_its_model(lora: ClipLora | None) -> None:
    encoder = _trained(lora)
    again = trained_encoder(encoder.spec, lora, encoder.state_dict())
    assert torch.equal(_embeddings(again), _embeddings(encoder))


def test_state_of_another_model_is_refused() -> None:
    encoder = _trained(LORAS[0])
    with pytest.raises(StorageError, match="do not fit CLIP model clip-tiny"):
        trained_encoder(encoder.spec, None, encoder.state_dict())
