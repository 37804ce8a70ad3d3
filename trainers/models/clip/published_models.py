"""CLIP models of open_clip, with random weights or with weights as their authors published them.

A model is named as in open_clip ("ViT-B-32", "ViT-L-14-336", ...), is described by your own file, or is one
of `SMALL_MODELS`, small enough to be trained from scratch on a CPU. Its first weights are random, are
downloaded by open_clip's own loader, or come from a file. They must be
**public**: the data they were made from are not protected by the training that starts from them
(`trainers.training.warm_start`).

open_clip is imported when a model is requested, not with this file.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpgcl_core.errors import ConfigError, StorageError, unknown_choice
from trainers.files.weights import SAFETENSORS, misfits, read_weights
from trainers.torchvision_import import open_clip

CLIP_TINY, CLIP_NANO = "clip-tiny", "clip-nano"
RANDOM, COMMON_WORDS = "random", "common-words"
CONFIG_FILE = "open_clip_config.json"
OWN_TOKENIZER = {"hf_tokenizer_name": "in this folder", "tokenizer_kwargs": {"strip_sep_token": True}}
"""Marks an exported model whose tokeniser open_clip finds in the same folder; not a part of the model."""
WEIGHTS_FILE = "open_clip_model.safetensors"
_PARTS = ("embed_dim", "vision_cfg", "text_cfg")


def _small(*, width: int, layers: int, patch_size: int, context_length: int = 56) -> Mapping[str, Any]:
    """Return the configuration of two towers of one size, with heads of 32, for images of 32 × 32 pixels.

    They know the first 2,048 tokens of CLIP: the noise of a private training grows with the number of
    weights, and CLIP's 49,408 tokens would be nine tenths of the smallest of these models. Their context
    holds every caption of `shapes`, which has at most 51 tokens; the context of `clip-nano` holds short
    captions, of at most 26 tokens.
    """
    vision = {"image_size": 32, "patch_size": patch_size, "layers": layers, "width": width, "head_width": 32}
    text = {
        "context_length": context_length,
        "vocab_size": 2048,
        "width": width,
        "heads": width // 32,
        "layers": layers,
    }
    return {"embed_dim": width, "vision_cfg": vision, "text_cfg": text}


SMALL_MODELS: Mapping[str, Mapping[str, Any]] = {
    CLIP_TINY: _small(width=64, layers=2, patch_size=8),
    "clip-tiny-patch4": _small(width=64, layers=2, patch_size=4),
    "clip-small": _small(width=128, layers=4, patch_size=8),
    CLIP_NANO: _small(width=64, layers=1, patch_size=16, context_length=26),
}
"""Models of the same 32 × 32 pixels. The second has four times the patches of the first, like ViT-B/16
compared with ViT-B/32. The third is wider and deeper. The last, for short captions, trains in seconds."""

SHIPPED: Mapping[tuple[str, str], str] = {
    (CLIP_NANO, COMMON_WORDS): "bd6f714da3bd6e912267dcfa9188073a92e379d86d4b3cc4dfa9b1d1c52b82a6",
}
"""The sha256 of weight files that come with this package, by model and name. The weights were trained on
generated pairs (`benchmarks/common_words.py`)."""

Colours = tuple[float, float, float]
_HALF: Colours = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """A CLIP model and its first weights.

    Attributes:
      model: open_clip's name of a model, one of `SMALL_MODELS`, a JSON file with open_clip's model
        configuration, or a folder that holds `open_clip_config.json`.
      weights: "random"; one of open_clip's names for the weights of this model, such as "laion2b_s34b_b79k",
        or of `SHIPPED`; or a file (`.safetensors`, or written by `torch.save`).
    """

    model: str = CLIP_TINY
    weights: str = RANDOM


@dataclass(frozen=True, kw_only=True)
class ClipSpec:
    """A CLIP model, looked up but not built.

    Attributes:
      name: the name as requested.
      architecture: the mapping that open_clip calls `model_cfg`.
      mean, std: per colour, mean and deviation of pixels in [0, 1] that the weights expect.
      weights: the file of its first weights; None for random weights.
    """

    name: str
    architecture: Mapping[str, Any]
    mean: Colours
    std: Colours
    weights: Path | None = None

    @property
    def context_length(self) -> int:
        """Tokens per caption."""
        return int(self.architecture["text_cfg"].get("context_length", 77))

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        size = self.architecture["vision_cfg"].get("image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        return int(height), int(width)


def find_clip(config: ClipConfig, *, with_weights: bool = True) -> ClipSpec:
    """Return the model of a configuration; download weights that open_clip knows and this machine lacks.

    Args:
      config: the model's configuration.
      with_weights: whether the weights are needed, too. A trained model may be exported on a machine that
        lacks its first weights; then nothing is downloaded.

    Raises:
      ConfigError: the model or the name of weights is unknown (similar names are suggested), the
        configuration is not a CLIP model, or the weights cannot be downloaded: the message says which file
        to put where.
      StorageError: a file cannot be read.

    >>> find_clip(ClipConfig()).image_size
    (32, 32)
    >>> openai = ClipConfig(model="ViT-B-32", weights="openai")
    >>> find_clip(openai, with_weights=False).architecture["quick_gelu"]
    True
    """
    architecture, preprocessing = _architecture(config.model)
    path: Path | None = Path(config.weights).expanduser()
    if config.weights == RANDOM:
        path = None
    elif (config.model, config.weights) in SHIPPED:
        path = _shipped_file(config)
    elif path is not None and not (with_weights and path.is_file()):
        preprocessing = _published(config)
        path = _downloaded(config, preprocessing) if with_weights else None
        if preprocessing.get("quick_gelu"):  # the activation these weights were trained with
            architecture["quick_gelu"] = True
    small = config.model in SMALL_MODELS
    return ClipSpec(
        name=config.model,
        architecture=architecture,
        mean=colours_of(preprocessing.get("mean"), _HALF if small else open_clip().OPENAI_DATASET_MEAN),
        std=colours_of(preprocessing.get("std"), _HALF if small else open_clip().OPENAI_DATASET_STD),
        weights=path if with_weights else None,
    )


def is_clip_name(name: str) -> bool:
    """Whether a CLIP model has this name, or is described by a file or folder at this path.

    >>> [is_clip_name(name) for name in ("clip-tiny", "ViT-B-32", "tiny_cnn")]
    [True, True, False]
    """
    try:
        _architecture(name)
    except ConfigError:
        return False
    return True


def build_clip(spec: ClipSpec, seed: int) -> nn.Module:
    """Return the open_clip model on the CPU, in float32, with its first weights.

    Random weights are a function of only the model and the public seed: the global random state is neither
    read nor changed.

    Raises:
      ConfigError: the model cannot be built, or its checkpoint does not fit: names the first tensors that do
        not fit, with both shapes. Nothing is resized to fit.
      StorageError: the checkpoint cannot be read.

    >>> sum(p.numel() for p in build_clip(find_clip(ClipConfig()), seed=0).parameters()) < 400_000
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _random_model(spec)
    if spec.weights is not None:
        _load(model, spec.weights, spec.name)
    return model


def _architecture(name: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return a copy of open_clip's model configuration, and the preprocessing that its file states."""
    if name in SMALL_MODELS:
        return copy.deepcopy(dict(SMALL_MODELS[name])), {}
    builtin = name.replace("/", "-")
    if builtin in open_clip().list_models():
        return copy.deepcopy(open_clip().get_model_config(builtin)), {}
    path = Path(name.removeprefix("local-dir:")).expanduser()
    if path.suffix == ".json" or os.sep in name or path.is_dir():
        return _read_architecture(path / CONFIG_FILE if path.is_dir() else path)
    near = difflib.get_close_matches(name, [*SMALL_MODELS, *open_clip().list_models()], n=3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    raise ConfigError(
        f"unknown CLIP model {name!r}{hint} Valid: {', '.join(SMALL_MODELS)}, a name of "
        "open_clip.list_models(), a JSON file or a folder"
    )


def _read_architecture(path: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ConfigError(
            f"the model configuration {path} cannot be read ({reason}). Pass a JSON file with "
            f"{', '.join(_PARTS)}, or a folder that contains {CONFIG_FILE}."
        ) from error
    architecture = content.get("model_cfg", content) if isinstance(content, dict) else {}
    missing = [part for part in _PARTS if part not in architecture]
    if missing:
        raise ConfigError(
            f"the model configuration {path} must have {', '.join(_PARTS)}; it lacks {', '.join(missing)}"
        )
    text = architecture["text_cfg"]
    if all(text.get(name) == value for name, value in OWN_TOKENIZER.items()):
        plain = {name: value for name, value in text.items() if name not in OWN_TOKENIZER}
        architecture = {**architecture, "text_cfg": plain}
    return architecture, content.get("preprocess_cfg", {})


def shipped_path(model: str, name: str) -> Path:
    """Return the path of weights of `SHIPPED`, whether the file exists or not."""
    return Path(__file__).with_name("weights") / f"{model}-{name}{SAFETENSORS}"


def _shipped_file(config: ClipConfig) -> Path:
    """Return the checked file of weights that come with this package."""
    sha256, path = SHIPPED[config.model, config.weights], shipped_path(config.model, config.weights)
    if (found := read_weights(path).sha256) != sha256:
        raise StorageError(
            f"{path} must be the file that comes with this package, sha256 {sha256}; got {found}. Install "
            "the package again."
        )
    return path


def _published(config: ClipConfig) -> Mapping[str, Any]:
    """Return open_clip's configuration of named weights: their source and preprocessing."""
    model = config.model.replace("/", "-")
    published: Mapping[str, Any] = open_clip().get_pretrained_cfg(model, config.weights)
    if not published:
        shipped = [name for each, name in SHIPPED if each == config.model]
        names = [RANDOM, *shipped, *open_clip().list_pretrained_tags_by_model(model)]
        raise ConfigError(unknown_choice(f"weights of CLIP model {config.model}", config.weights, names))
    return published


def _downloaded(config: ClipConfig, published: Mapping[str, Any]) -> Path:
    try:
        return Path(open_clip().download_pretrained(dict(published)))
    except Exception as error:  # offline, a proxy's answer, a full disk: each library has its own errors
        hub, url = published.get("hf_hub", ""), published.get("url", "")
        repository, _, file = hub.rpartition("/")
        source = f"{file or WEIGHTS_FILE} of huggingface.co/{repository}" if hub else url
        raise ConfigError(
            f"the weights {config.weights!r} of {config.model} cannot be downloaded "
            f"({type(error).__name__}). Download {source} on a machine with network access, copy it, and "
            f"pass its path with {_network_for(config, published)}--pretrained {RANDOM} --warm-start FILE."
        ) from error


def _network_for(config: ClipConfig, published: Mapping[str, Any]) -> str:
    """Return the --network that weights trained with quick_gelu need; "" for other weights."""
    if not published.get("quick_gelu") or config.model.endswith("quickgelu"):
        return ""
    return f"--network {config.model}-quickgelu "


def _random_model(spec: ClipSpec) -> nn.Module:
    """Return the model, initialised from torch's global generator."""
    architecture = copy.deepcopy(dict(spec.architecture))
    if architecture["vision_cfg"].get("timm_model_name"):
        architecture["vision_cfg"]["timm_model_pretrained"] = False
    from_transformers = bool(architecture["text_cfg"].get("hf_model_name"))
    if from_transformers:
        architecture["text_cfg"]["hf_model_pretrained"] = False
    own_text = architecture.pop("custom_text", False) or from_transformers
    # Uses the classes rather than open_clip.create_model, which warns through the root logger.
    kind = open_clip().CustomTextCLIP if own_text else open_clip().CLIP
    try:
        model: nn.Module = kind(**architecture)
    except Exception as error:  # open_clip checks little; timm and transformers have their own errors
        raise ConfigError(
            f"CLIP model {spec.name} cannot be built: {type(error).__name__}: {error}. Check its settings."
        ) from error
    return model


def _load(model: nn.Module, path: Path, name: str) -> None:
    tensors = {key.removeprefix("module."): value for key, value in read_weights(path).tensors.items()}
    template = model.state_dict()
    if "text.positional_embedding" in template:  # some files have no separate text tower
        tensors = open_clip().model.convert_to_custom_text_state_dict(tensors)
    for key in ("logit_scale", "logit_bias"):  # a number in some files, a list of one in others
        if key in tensors and key in template and tensors[key].numel() == template[key].numel() == 1:
            tensors[key] = tensors[key].reshape(template[key].shape)
    difference = misfits(tensors, template)
    if difference:
        raise ConfigError(
            f"the checkpoint {path} does not fit CLIP model {name}: {difference}. Choose "
            "the model that it was made for."
        )
    broken = next((key for key, value in tensors.items() if not bool(torch.isfinite(value).all())), None)
    if broken:
        raise StorageError(f"the checkpoint {path} contains non-finite numbers in {broken!r}")
    model.load_state_dict(tensors)


def colours_of(values: Any, default: Any = ()) -> Colours:
    """Return a number for each colour.

    Raises:
      TypeError, ValueError: they are not three numbers.
    """
    red, green, blue = values or default
    return float(red), float(green), float(blue)
