"""Loads a warm start into an encoder of images: weights of a whole encoder, or of only a backbone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError
from trainers.config.networks import WarmStart
from trainers.files.weights import misfits
from trainers.models.encoder import Encoder

_BACKBONE, _HEAD, _PREDICTOR = "backbone.", "head.", "predictor."


def head_width(tensors: Mapping[str, Tensor]) -> int | None:
    """Return the width of the projection head among the tensors; None without a head."""
    last = encoder_names(tensors).get("head.2.weight")
    return None if last is None or not last.ndim else len(last)


def is_classifier(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the tensors are the weights of a classifier with its head."""
    return "classify.weight" in tensors


def encoder_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their names in an `Encoder`; names of a backbone alone get the prefix "backbone."."""
    if any(name.startswith(_BACKBONE) for name in tensors):
        return dict(tensors)
    return {_BACKBONE + name: value for name, value in tensors.items()}


def load_warm_start(encoder: Encoder, start: WarmStart, tensors: Mapping[str, Tensor]) -> None:
    """Load a warm start's tensors into the encoder, except the predictor and a head of another width.

    Raises:
      ConfigError: the tensors are of another network, or not finite.
    """
    own_state, state = encoder.state_dict(), encoder_names(tensors)
    fresh = (_PREDICTOR,) if start.embedding_dim == encoder.embedding_dim else (_PREDICTOR, _HEAD)
    state = {name: value for name, value in state.items() if not name.startswith(fresh)}
    state |= {name: value for name, value in own_state.items() if name.startswith(fresh)}
    load_whole(encoder, start, state)


def load_whole(network: nn.Module, start: WarmStart, tensors: Mapping[str, Tensor]) -> None:
    """Load all tensors of a warm start into a network.

    Raises:
      ConfigError: the tensors are of another network, or not finite.
    """
    difference = misfits(tensors, network.state_dict())
    if difference is not None:
        raise ConfigError(
            f"the warm start must be of the same network, but {start.path} is not: {difference}. Set the "
            "--network and image size that it was made with."
        )
    for name, value in tensors.items():
        if not torch.isfinite(value).all():
            raise ConfigError(f"a warm start must be finite; {name} in {start.path} is not. Use another.")
    network.load_state_dict(dict(tensors))
