"""Files of a fine-tuned CLIP model for other programs: open_clip reads the whole model, peft the adapters.

A training leaves a state dictionary with adapters and separate attention, from which `trained_encoder` makes
the model again. Both files are functions of only the trained weights, which are already released, so they are
post-processing. The caller writes the folder's privacy statement, and passes each file's description of
itself as `note`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpgcl_core.errors import ConfigError, StorageError
from trainers.files.weights import misfits, write_weights
from trainers.models.attention import SeparateAttention, fused_state_dict
from trainers.models.clip.adapters import ClipLora, make_trainable
from trainers.models.clip.clip_encoder import ImageTextEncoder
from trainers.models.clip.published_models import (
    CONFIG_FILE,
    OWN_TOKENIZER,
    WEIGHTS_FILE,
    ClipSpec,
    build_clip,
)
from trainers.models.clip.tokens import CLIP_VOCABULARY, write_fast_tokenizer, write_merges
from trainers.models.lora import merge_lora
from trainers.torchvision_import import ensure_torchvision_import

ADAPTER_FILE = "adapter_model.safetensors"
MERGES_FILE = "merges.txt.gz"
_PEFT_PREFIX = "base_model.model."
_ADAPTER = "default"


def trained_encoder(spec: ClipSpec, lora: ClipLora | None, state: Mapping[str, Tensor]) -> ImageTextEncoder:
    """Return the model of a training from the state dictionary that it left.

    Args:
      spec: the specification of the model, without the weights that it started from.
      lora: the adapters that it trained; None if all weights were trained.
      state: the state dictionary of its `ImageTextEncoder`, including adapters.

    Raises:
      ConfigError: the model cannot be built.
      StorageError: the state belongs to another model.
    """
    clip = build_clip(dataclasses.replace(spec, weights=None), seed=0)
    make_trainable(clip, lora, seed=0, train_logit_scale=False)
    encoder = ImageTextEncoder(clip, spec)
    difference = misfits(state, encoder.state_dict())
    if difference is not None:
        raise StorageError(
            f"the trained weights do not fit CLIP model {spec.name}: {difference}. Restore the "
            "configuration that it was trained with."
        )
    encoder.load_state_dict(dict(state))
    return encoder


def merged_state_dict(encoder: ImageTextEncoder) -> dict[str, Tensor]:
    """Return open_clip's own state dictionary of the trained model: adapters merged, attention fused.

    The encoder is left unchanged. A model without adapters is returned bit for bit; merging rounds.

    >>> from trainers.models.clip.published_models import ClipConfig
    >>> from trainers.models.clip.clip_encoder import build_image_text_encoder
    >>> from trainers.models.clip.adapters import ClipLora
    >>> encoder = build_image_text_encoder(ClipConfig(), ClipLora(rank=2), seed=0)
    >>> sum("lora" in name or "q_proj" in name for name in merged_state_dict(encoder))
    0
    """
    clip = copy.deepcopy(encoder.clip)
    merge_lora(clip)
    return fused_state_dict(clip)


def export_merged(encoder: ImageTextEncoder, folder: Path, *, note: str) -> str:
    """Write the trained model as a folder that open_clip reads without this package.

    `open_clip.create_model("local-dir:FOLDER")` gives the same embeddings, of pixels with the mean and
    deviation in its configuration, and `open_clip.get_tokenizer("local-dir:FOLDER")` gives its tokens. For a
    vocabulary smaller than CLIP's, the folder also has its merges and a `tokenizer.json`.

    Args:
      encoder: the trained model, left unchanged.
      folder: an existing folder.
      note: the weight file's description of itself, see `trainers.files.weights.write_weights`.

    Returns:
      The sha256 of the weights' file.
    """
    spec = encoder.spec
    vocabulary = int(spec.architecture["text_cfg"].get("vocab_size", CLIP_VOCABULARY))
    is_small = vocabulary < CLIP_VOCABULARY and not spec.architecture["text_cfg"].get("hf_tokenizer_name")
    write_config(spec, folder, own_tokenizer=is_small)
    if is_small:
        write_merges(folder / MERGES_FILE, vocabulary)
        write_fast_tokenizer(folder, folder / MERGES_FILE)
    return write_weights(folder / WEIGHTS_FILE, merged_state_dict(encoder), note=note)


def write_config(spec: ClipSpec, folder: Path, *, own_tokenizer: bool = False) -> None:
    """Write the model's configuration for open_clip, and whether its tokeniser is in the same folder."""
    preprocessing = {"mean": list(spec.mean), "std": list(spec.std)}
    model = dict(spec.architecture)
    if own_tokenizer:
        model["text_cfg"] = {**model["text_cfg"], **OWN_TOKENIZER}
    config = {"model_cfg": model, "preprocess_cfg": preprocessing}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def export_adapter(encoder: ImageTextEncoder, folder: Path, *, note: str) -> str:
    """Write only the adapters, in peft's format.

    `PeftModel.from_pretrained(clip, FOLDER)` puts them on open_clip's own model, with the weights that the
    training started from. Its attention has one layer for queries, keys and values, so their adapters become
    one adapter with block-diagonal B. If output layers of attention also have adapters, peft reads them on a
    model converted by `trainers.models.attention.separate_attention`. The temperature, on which no embedding
    depends, is only in the merged model.

    Args:
      encoder: the trained model, left unchanged.
      folder: an existing folder other than the merged model's, since both are whole folders.
      note: the adapter file's description of itself.

    Returns:
      The sha256 of the adapters' file.

    Raises:
      ConfigError: the model has no adapters.
    """
    ensure_torchvision_import()
    from peft import LoraConfig

    layers: dict[str, Any] = dict(encoder.clip.named_modules())
    factors = {name: _factors(layer) for name, layer in layers.items() if hasattr(layer, "lora_A")}
    if not factors:
        raise ConfigError("the model has no adapters to export. Export the merged model instead.")
    scale = layers[next(iter(factors))].scaling[_ADAPTER]  # the same for all adapters
    # peft 0.21 adds the adapter of a fused attention's output layer twice (huggingface/peft#3774).
    is_fused = not any(name.endswith("out_proj") for name in factors)
    for name, layer in layers.items():
        inputs = [f"{name}.{part}" for part in ("q_proj", "k_proj", "v_proj")]
        if is_fused and isinstance(layer, SeparateAttention) and factors.keys() & inputs:
            downs, ups = zip(*(_factors(layers[each]) for each in inputs), strict=True)
            factors = {each: pair for each, pair in factors.items() if each not in inputs}
            factors[name] = torch.cat(downs), torch.block_diag(*ups)
            factors[f"{name}.base_layer.out_proj"] = _factors(layer.out_proj)
    rank = max(len(down) for down, _ in factors.values())  # one rank for all: smaller ones are zero-padded
    tensors = {}
    for name, (down, up) in factors.items():
        missing = rank - len(down)
        tensors[f"{_PEFT_PREFIX}{name}.lora_A.weight"] = F.pad(down, (0, 0, 0, missing))
        tensors[f"{_PEFT_PREFIX}{name}.lora_B.weight"] = F.pad(up, (0, missing))
    config = LoraConfig(
        r=rank,
        lora_alpha=scale * rank,
        lora_dropout=0.0,
        bias="none",
        # One pattern, which must match a whole name: in a list the text tower's names would match the end
        # of the image tower's.
        target_modules="|".join(re.escape(name) for name in factors if ".base_layer." not in name),
        base_model_name_or_path=encoder.spec.name,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    return write_weights(folder / ADAPTER_FILE, tensors, note=note)


def _factors(layer: Any) -> tuple[Tensor, Tensor]:
    """Return A `[rank, in]` and B `[out, rank]` of a layer's adapter; rank 0 without an adapter."""
    if hasattr(layer, "lora_A"):
        return layer.lora_A[_ADAPTER].weight.detach(), layer.lora_B[_ADAPTER].weight.detach()
    return layer.weight.new_zeros(0, layer.in_features), layer.weight.new_zeros(layer.out_features, 0)
