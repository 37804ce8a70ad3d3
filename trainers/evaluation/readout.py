"""The part of a network that the scores read: its pooled features, or its feature map on a coarse grid.

The pooled features are the input of the projection head. The feature map before them keeps more information
about positions. Linear probes of small CNNs are often fitted on this map, averaged over a grid of 4×4 cells.
It is a function of the same weights, so it costs no ε.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError
from trainers.config.nodes import GRID4, POOLED
from trainers.models.encoder import Encoder
from trainers.models.task_networks import AnyEncoder


def read_out(encoder: AnyEncoder, images: Tensor, readout: str = POOLED) -> Tensor:
    """Return the features of normalised images that k-NN and probes read, `[n, width]`.

    Args:
      encoder: the network.
      images: normalised images `[n, C, H, W]`.
      readout: "pooled" for the features, of width `feature_dim`; "grid4" for the backbone's feature map
        averaged over 4×4 cells, of width 16 × its channels.

    Raises:
      ConfigError: the backbone has no feature map.

    >>> import torch
    >>> from trainers.config.networks import NetworkConfig
    >>> from trainers.models.encoder import build_encoder
    >>> encoder = build_encoder(NetworkConfig(name="tiny_cnn"), (1, 28, 28), seed=0)
    >>> blank = torch.zeros(2, 1, 28, 28)
    >>> read_out(encoder, blank).shape[1], read_out(encoder, blank, "grid4").shape[1]
    (128, 512)
    """
    if readout == POOLED:
        return encoder.features(images)
    check_readout(encoder, readout)
    backbone: Any = encoder.backbone
    feature_map: Tensor = backbone.feature_map(images)
    return F.adaptive_avg_pool2d(feature_map, 4).flatten(1)


def check_readout(encoder: nn.Module, readout: str) -> None:
    """Refuse the readout "grid4" for a network without a feature map.

    Raises:
      ConfigError: the network has no feature map; the message states which networks have one.
    """
    backbone = encoder.backbone if isinstance(encoder, Encoder) else None
    if readout == GRID4 and not callable(getattr(backbone, "feature_map", None)):
        raise ConfigError(
            f"readout {GRID4} needs a feature map; got a network without one. tiny_cnn, small_cnn, "
            "wide_cnn and resnet18 have one, and your own network can define feature_map(images) -> "
            f"[n, channels, height, width]. Set the readout to {POOLED}."
        )
