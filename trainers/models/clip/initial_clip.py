"""A CLIP model at its first weights: random, published, or from a warm start."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dpgcl_core.errors import ConfigError
from trainers.config.networks import ClipNetworkConfig, WarmStart
from trainers.config.training import TrainingConfig
from trainers.models.clip.adapters import lora_of
from trainers.models.clip.clip_encoder import ImageTextEncoder, build_image_text_encoder
from trainers.models.clip.published_models import (
    CONFIG_FILE,
    RANDOM,
    SHIPPED,
    ClipConfig,
    ClipSpec,
    find_clip,
)


def starting_clip(config: TrainingConfig, start: WarmStart | None) -> ImageTextEncoder:
    """Return a CLIP model before step 0: all weights are taken, and adapters start fresh.

    Args:
      config: the configuration with the model, its trained weights, the public seed, and the τ from which a
        learned temperature starts.
      start: the warm start; None for the weights that its network configuration names.

    Raises:
      ConfigError: there are two sets of first weights, or the weights are of another model.
      StorageError: a file cannot be read, or holds numbers that are not finite.
    """
    network = config.encoder
    assert isinstance(network, ClipNetworkConfig)
    weights = network.pretrained
    if start is None:
        _refuse_path(weights)
    else:
        check_same_model(network, start)
        weights = start.path
    return build_image_text_encoder(
        ClipConfig(model=network.name, weights=weights),
        lora_of(network),
        seed=config.public_seed,
        train_logit_scale=network.learn_temperature,
        temperature=config.temperature if network.learn_temperature else None,
        gradient_checkpointing=network.gradient_checkpointing,
    )


def published_note(network: ClipNetworkConfig) -> str:
    """Return the privacy statement's note on published weights; "" for a random draw."""
    if network.pretrained == RANDOM:
        return ""
    if sha256 := SHIPPED.get((network.name, network.pretrained)):
        return (
            f"Starts from the weights {network.pretrained} of {network.name}, which come with this package "
            f"(sha256 {sha256}). They were trained on generated pairs and on no records, so they cost no ε."
        )
    return (
        f"Starts from the published weights {network.pretrained} of {network.name}. The guarantee covers "
        "this sweep's training data, and not the data that those weights were trained on."
    )


def _refuse_path(pretrained: str) -> None:
    """Refuse a path in place of a name, because only a warm start's origin is checked."""
    if Path(pretrained).expanduser().exists() or Path(pretrained).suffix or os.sep in pretrained:
        raise ConfigError(
            f"pretrained must be {RANDOM} or open_clip's name of published weights; got {pretrained}, a "
            "path. Pass it as --warm-start."
        )


def check_same_model(network: ClipNetworkConfig, start: WarmStart) -> None:
    """Refuse a second set of first weights, and weights of another model, even if its tensors fit.

    Models that differ in number of heads, activation or pixel normalisation have tensors of the same shapes.

    Raises:
      ConfigError: there is a second set of first weights, or the weights are of another model.
    """
    if network.pretrained != RANDOM:
        raise ConfigError(
            f"a training must start from one set of weights; got the warm start {start.path} and pretrained "
            f"= {network.pretrained}. Leave the warm start out, or set --pretrained {RANDOM}."
        )
    place = Path(start.path).parent
    if not (place / CONFIG_FILE).is_file():
        return
    start_spec, requested_spec = (
        find_clip(ClipConfig(model=each)) for each in (f"{place / CONFIG_FILE}", network.name)
    )
    if _identity_text(start_spec) != _identity_text(requested_spec):
        raise ConfigError(
            f"the warm start must be of the same CLIP model, but {place / CONFIG_FILE} describes another "
            f"model than {network.name}. Set --network {place}."
        )


def _identity_text(spec: ClipSpec) -> str:
    return json.dumps([spec.architecture, spec.mean, spec.std], sort_keys=True)
