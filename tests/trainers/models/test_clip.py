"""CLIP models: which one, from which weights, and what they make of captions and images."""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import trainers
from dpgcl_core.errors import ConfigError, StorageError
from tests.trainers.clip_models import ALL, CAPTIONS, TINY, moved, pairs_of, tiny_encoder
from trainers.config.networks import ClipNetworkConfig
from trainers.models.attention import SeparateAttention, fused_state_dict
from trainers.models.clip import published_models
from trainers.models.clip.clip_encoder import (
    ImageTextEncoder,
    build_image_text_encoder,
    refuse_mixed_pairs,
    synthetic_pairs,
)
from trainers.models.clip.initial_clip import published_note
from trainers.models.clip.published_models import (
    CLIP_NANO,
    COMMON_WORDS,
    CONFIG_FILE,
    SHIPPED,
    WEIGHTS_FILE,
    ClipConfig,
    ClipSpec,
    build_clip,
    find_clip,
)
from trainers.models.clip.tokens import ClipTokenizer, write_merges
from trainers.torchvision_import import ensure_torchvision_import


def _checkpoint(path: Path, change: Callable[[dict[str, Tensor]], None] = lambda state: None) -> Path:
    state = {name: value.clone() for name, value in build_clip(TINY, seed=5).state_dict().items()}
    change(state)
    save_file(state, path)
    return path


@pytest.fixture(scope="module")
def open_clip() -> Any:
    """The library, imported behind the repair that it needs beside a CPU torch."""
    ensure_torchvision_import()
    return importlib.import_module("open_clip")


# --- which model ---


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B/32"])
def test_open_clip_names_are_found(open_clip: Any, name: str) -> None:
    spec = find_clip(ClipConfig(model=name))
    assert (spec.image_size, spec.context_length, spec.architecture["embed_dim"]) == ((224, 224), 77, 512)
    assert spec.mean == open_clip.OPENAI_DATASET_MEAN


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("ViT-B-23", "unknown CLIP model 'ViT-B-23'; did you mean 'ViT-B-"),
        ("clip-tny", "did you mean 'clip-tiny'"),
        ("hf-hub:someone/something", "a folder that contains open_clip_config.json"),
        ("none.json", "none.json cannot be read"),
        ("coca_ViT-B-32", "coca_ViT-B-32 cannot be built"),
    ],
)
def test_models_that_cannot_be_used_are_refused(model: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_clip(find_clip(ClipConfig(model=model)), seed=0)


def test_model_of_ones_own_is_read_from_a_file(tmp_path: Path) -> None:
    config = tmp_path / "mine.json"
    config.write_text(json.dumps({**TINY.architecture, "embed_dim": 24}))
    assert build_image_text_encoder(ClipConfig(model=str(config)), seed=0).embedding_dim == 24


@pytest.mark.parametrize(
    ("content", "reason"), [("{", "it is not JSON"), ('{"embed_dim": 8}', "lacks vision_cfg, text_cfg")]
)
def test_configuration_that_is_no_clip_model_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / CONFIG_FILE).write_text(content)
    with pytest.raises(ConfigError, match=reason):
        find_clip(ClipConfig(model=str(tmp_path)))


def test_configuration_that_open_clip_cannot_build_is_refused(tmp_path: Path) -> None:
    text = {**TINY.architecture["text_cfg"], "colour": "red"}
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"model_cfg": {**TINY.architecture, "text_cfg": text}}))
    with pytest.raises(ConfigError, match=r"cannot be built: TypeError.*colour"):
        build_clip(find_clip(ClipConfig(model=str(tmp_path))), seed=0)


def test_random_weights_follow_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (build_clip(TINY, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["text_projection"], other["text_projection"])


# --- which weights ---


def test_checkpoint_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path / WEIGHTS_FILE)
    spec = find_clip(ClipConfig(weights=str(path)))
    loaded, expected = build_clip(spec, seed=0).state_dict(), build_clip(TINY, seed=5).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_checkpoint_of_a_training_with_open_clip_is_loaded(tmp_path: Path) -> None:
    state = build_clip(TINY, seed=5).state_dict()
    wrapped = {f"module.{name}": value.half() for name, value in state.items()}
    torch.save({"epoch": 3, "state_dict": wrapped}, tmp_path / "epoch_3.pt")
    model = build_clip(find_clip(ClipConfig(weights=str(tmp_path / "epoch_3.pt"))), seed=0)
    assert torch.equal(model.state_dict()["text_projection"], state["text_projection"].half().float())


def test_checkpoint_that_does_not_fit_names_the_first_tensors(tmp_path: Path) -> None:
    def change(state: dict[str, Tensor]) -> None:
        state["positional_embedding"] = state["positional_embedding"][:16].clone()
        state["extra"] = torch.zeros(3)
        del state["ln_final.bias"]

    path = _checkpoint(tmp_path / "other.safetensors", change)
    reason = (
        r"does not fit CLIP model clip-tiny: extra: has \[3\], not needed; ln_final.bias: missing, "
        r"needs \[64\]; positional_embedding: has \[16, 64\], needs \[56, 64\]"
    )
    with pytest.raises(ConfigError, match=reason):
        build_clip(find_clip(ClipConfig(weights=str(path))), seed=0)


def test_checkpoint_with_broken_numbers_is_refused(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path / "x.safetensors", lambda state: state["ln_final.bias"].fill_(float("nan")))
    with pytest.raises(StorageError, match=r"non-finite numbers in 'ln_final\.bias'"):
        build_clip(find_clip(ClipConfig(weights=str(path))), seed=0)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ("laion2b_s34b_b79", "unknown weights of CLIP model ViT-B-32.*did you mean 'laion2b_s34b_b79k'"),
        ("absent.safetensors", "unknown weights of CLIP model ViT-B-32 'absent.safetensors'"),
    ],
)
def test_weights_that_do_not_exist_are_refused(weights: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_clip(ClipConfig(model="ViT-B-32", weights=weights))


@pytest.mark.parametrize(("model", "name"), SHIPPED)
def test_weights_that_come_with_the_package_are_in_its_wheel_and_fit(model: str, name: str) -> None:
    spec = find_clip(ClipConfig(model=model, weights=name))
    assert spec.weights is not None
    root = Path(trainers.__file__).parent
    globs = tomllib.loads((root.parent / "pyproject.toml").read_text(encoding="utf-8"))
    globs = globs["tool"]["setuptools"]["package-data"]["trainers"]
    assert any(spec.weights in root.glob(each) for each in globs)
    assert spec.weights.stat().st_size < 1_500_000
    random, given = build_clip(find_clip(ClipConfig(model=model)), seed=0), build_clip(spec, seed=0)
    assert not torch.equal(random.state_dict()["text_projection"], given.state_dict()["text_projection"])


def test_weights_that_are_not_those_that_came_with_the_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other.safetensors"
    path.write_bytes(published_models.shipped_path(CLIP_NANO, COMMON_WORDS).read_bytes())
    monkeypatch.setattr(published_models, "shipped_path", lambda *_: path)
    assert find_clip(ClipConfig(model=CLIP_NANO, weights=COMMON_WORDS)).weights == path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match="must be the file that comes with this package"):
        find_clip(ClipConfig(model=CLIP_NANO, weights=COMMON_WORDS))


def test_weights_that_come_with_the_package_are_named_among_the_choices() -> None:
    with pytest.raises(ConfigError, match=f"did you mean {COMMON_WORDS!r}"):
        find_clip(ClipConfig(model=CLIP_NANO, weights="common-word"))


def test_statement_says_that_no_record_made_the_weights_of_the_package() -> None:
    network = ClipNetworkConfig(name=CLIP_NANO, pretrained=COMMON_WORDS)
    note = published_note(network)
    assert SHIPPED[CLIP_NANO, COMMON_WORDS] in note
    assert "on generated pairs and on no records" in note
    assert "not the data that those weights" in published_note(ClipNetworkConfig(pretrained="openai"))


def test_without_network_the_message_says_which_file_to_fetch(
    open_clip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(published: dict[str, Any]) -> str:
        raise FileNotFoundError("no route to host")

    monkeypatch.setattr(open_clip, "download_pretrained", offline)
    reason = (
        r"cannot be downloaded \(FileNotFoundError\)\. Download .*laion/CLIP-ViT-B-32-laion2B.*its path with"
    )
    with pytest.raises(ConfigError, match=rf"{reason} --pretrained random --warm-start FILE\.$"):
        find_clip(ClipConfig(model="ViT-B-32", weights="laion2b_s34b_b79k"))
    with pytest.raises(ConfigError, match="its path with --network ViT-B-32-quickgelu --pretrained random"):
        find_clip(ClipConfig(model="ViT-B-32", weights="openai"))


def test_published_weights_bring_their_activation_and_colours(
    open_clip: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(open_clip, "download_pretrained", lambda published: str(tmp_path / "weights.bin"))
    spec = find_clip(ClipConfig(model="ViT-B-32", weights="openai"))
    assert spec.architecture["quick_gelu"] is True
    assert spec.weights == tmp_path / "weights.bin"
    assert "quick_gelu" not in find_clip(ClipConfig(model="ViT-B-32")).architecture


# --- captions ---


def test_small_vocabulary_is_the_beginning_of_clips(open_clip: Any, tmp_path: Path) -> None:
    def bytes_of(vocabulary: int) -> list[str]:
        write_merges(tmp_path / "merges.gz", vocabulary)
        decoder = open_clip.SimpleTokenizer(bpe_path=str(tmp_path / "merges.gz")).decoder
        return [decoder[token] for token in range(vocabulary - 2)]

    assert bytes_of(600) == bytes_of(49_408)[:598]


def test_whole_vocabulary_is_open_clips_own(open_clip: Any) -> None:
    spec = find_clip(ClipConfig(model="ViT-B-32"))
    assert torch.equal(ClipTokenizer(spec)(CAPTIONS).tokens, open_clip.get_tokenizer("ViT-B-32")(CAPTIONS))


@pytest.mark.parametrize("vocabulary", [513, 49_409])
def test_impossible_vocabulary_is_refused(tmp_path: Path, vocabulary: int) -> None:
    with pytest.raises(ConfigError, match="514 to 49408 tokens"):
        write_merges(tmp_path / "merges.gz", vocabulary)


def test_every_token_is_one_of_the_models() -> None:
    tokens = ClipTokenizer(TINY)([*CAPTIONS, "ζωή 東京 🎉", ""]).tokens
    assert tokens.shape == (8, 56)
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 2048
    # The pooled place is the greatest token, which must be the end of the text.
    assert bool((tokens.amax(1) == 2047).all())


def test_longer_captions_are_cut_and_counted() -> None:
    tokenizer = ClipTokenizer(TINY)
    exact, longer = "a " * 54, "a " * 55  # and two ends
    tokens = tokenizer([exact, longer, "a", longer * 9])
    assert tokens.num_truncated == 2
    assert tokens.tokens[:, -1].tolist() == [2047, 2047, 0, 2047]


def test_cut_captions_are_counted_where_padding_is_the_end_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_letters(captions: list[str], context_length: int) -> Tensor:
        rows = [[ord(letter) for letter in caption][: context_length - 1] for caption in captions]
        return torch.tensor([row + [1] * (context_length - len(row)) for row in rows])

    tokenizer = ClipTokenizer(TINY)
    monkeypatch.setattr(tokenizer, "_tokenizer", by_letters)
    assert tokenizer(["a" * 55, "a" * 56, "a" * 99]).num_truncated == 2


def test_no_captions_are_no_tokens() -> None:
    tokens = ClipTokenizer(TINY)([])
    assert tokens.tokens.shape == (0, 56)
    assert tokens.num_truncated == 0


# --- attention ---


def test_separate_attention_gives_the_same_embeddings_in_both_towers() -> None:
    plain, encoder = build_clip(TINY, seed=0), tiny_encoder(ALL)
    images, tokens = synthetic_pairs(encoder)
    assert torch.allclose(encoder.embed_images(images), plain.encode_image(images, normalize=True), atol=1e-5)
    assert torch.allclose(encoder.embed_texts(tokens), plain.encode_text(tokens, normalize=True), atol=1e-5)
    assert sum(isinstance(module, SeparateAttention) for module in encoder.modules()) == 4


def test_fusing_attention_brings_every_weight_back() -> None:
    expected, clip = build_clip(TINY, seed=0).state_dict(), tiny_encoder(ALL).clip
    weights = fused_state_dict(clip)
    assert set(weights) == set(expected)
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


# --- embeddings ---


def test_views_are_read_with_the_colours_of_the_weights() -> None:
    spec = ClipSpec(name="x", architecture=TINY.architecture, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    clip = build_clip(spec, seed=0)
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (spec.mean, spec.std))
    expected = clip.encode_image((pixels - mean) / std, normalize=True)
    assert torch.allclose(ImageTextEncoder(clip, spec).embed_images(2 * pixels - 1), expected, atol=1e-5)


def test_grey_images_are_repeated_to_three_channels() -> None:
    encoder, grey = tiny_encoder(), torch.rand(2, 1, 32, 32)
    assert torch.equal(encoder.embed_images(grey), encoder.embed_images(grey.repeat(1, 3, 1, 1)))


def test_forward_keeps_every_view_at_its_place() -> None:
    encoder, (images, tokens) = moved(tiny_encoder()), pairs_of()
    of_images, of_texts = encoder(images, tokens)
    assert of_images.shape == of_texts.shape == (3, 2, 2, 64)
    assert torch.allclose(of_images[2, 1, 0], encoder.embed_images(images[2, 1])[0], atol=1e-5)
    assert torch.allclose(of_texts[2, 1, 1], encoder.embed_texts(tokens[2, 1])[1], atol=1e-5)
    assert torch.allclose(of_images.norm(dim=-1), torch.ones(3, 2, 2))


def test_both_towers_pass_the_search_for_mixed_records() -> None:
    refuse_mixed_pairs(moved(tiny_encoder()))


@pytest.mark.parametrize("tower", ["image", "text"])
def test_towers_that_mix_records_are_refused(tower: str) -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0, keepdim=True)

    encoder = tiny_encoder()
    prefix = "visual." if tower == "image" else ""
    encoder.clip.get_submodule(f"{prefix}transformer.resblocks.1").ls_2 = Centred()
    with pytest.raises(ConfigError, match=r"ls_2' \(Centred\) mixes records"):
        refuse_mixed_pairs(encoder)
