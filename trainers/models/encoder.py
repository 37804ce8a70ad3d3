"""Stage 5, encoder: views become unit embeddings, each from only its own view.

The sensitivity of a group's gradient holds only if the embedding of one record does not depend on the other
records of its pass. `dpgcl_core.clipping.cross_record` checks that before a training starts; a user's own
network is accepted if it passes the check.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError, unknown_choice
from trainers.config.networks import NetworkConfig
from trainers.models.resnet import resnet18
from trainers.models.small_cnn import small_cnn, tiny_cnn, wide_cnn
from trainers.models.vit_lora import vit_b_32_lora

ImageShape = tuple[int, int, int]
"""(channels, height, width)."""


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """One built-in backbone.

    Attributes:
      name: the backbone's name on the command line.
      factory: function of the image shape that returns a module from images to features.
      has_synthetic_start: whether `--warm-start synthetic:STEPS` pre-trains it.
    """

    name: str
    factory: Callable[[ImageShape], nn.Module]
    has_synthetic_start: bool = True


_BACKBONES = (
    Backbone(name="resnet18", factory=resnet18),
    Backbone(name="small_cnn", factory=small_cnn),
    Backbone(name="tiny_cnn", factory=tiny_cnn),
    Backbone(name="vit_b_32_lora", factory=vit_b_32_lora, has_synthetic_start=False),
    Backbone(name="wide_cnn", factory=wide_cnn),
)
NETWORKS: dict[str, Backbone] = {backbone.name: backbone for backbone in _BACKBONES}

NORM_FLOOR = 1e-6
"""Embeddings with a smaller norm are divided by this number, so the zero vector stays zero and finite."""


class Encoder(nn.Module):
    """A backbone with a projection head (Chen et al. 2020): Linear, ReLU, Linear, unit length.

    Args:
      backbone: module from images `[n, C, H, W]` to features `[n, feature_dim]`.
      feature_dim: width of the features, which are evaluated.
      embedding_dim: width of the embeddings, which the loss compares.
      predictor: whether a predictor follows the head (BYOL, Grill et al. 2020). Its LayerNorm uses the
        statistics of one embedding; the original's BatchNorm would mix records.
    """

    def __init__(
        self, backbone: nn.Module, feature_dim: int, embedding_dim: int, *, predictor: bool = False
    ) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.embedding_dim = embedding_dim
        self.backbone = backbone
        self.head = nn.Sequential(
            nn.Linear(feature_dim, embedding_dim),
            nn.ReLU(inplace=False),
            nn.Linear(embedding_dim, embedding_dim),
        )
        self.predictor = _predictor(embedding_dim) if predictor else None

    def features(self, images: Tensor) -> Tensor:
        """Return features `[n, feature_dim]` of normalised images `[n, C, H, W]`."""
        features: Tensor = self.backbone(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Return embeddings `[n, embedding_dim]` of length 1 (0 for a zero vector), after any predictor."""
        projected = self.head(self.features(images))
        if self.predictor is not None:
            projected = self.predictor(projected)
        return F.normalize(projected, dim=1, eps=NORM_FLOOR)

    def embed_views(self, views: Tensor) -> Tensor:
        """Return embeddings `[groups, group_size, views, dim]` of views `[..., C, H, W]`."""
        embeddings: Tensor = self(views.flatten(0, 2))
        grouped: Tensor = embeddings.unflatten(0, views.shape[:3])
        return grouped

    def without_predictor(self, images: Tensor) -> Tensor:
        """Return embeddings `[n, embedding_dim]` without the predictor, as for a target network."""
        return F.normalize(self.head(self.features(images)), dim=1, eps=NORM_FLOOR)


def _predictor(dim: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(dim, 2 * dim), nn.LayerNorm(2 * dim), nn.ReLU(inplace=False), nn.Linear(2 * dim, dim)
    )


def build_encoder(config: NetworkConfig, image_shape: ImageShape, seed: int) -> Encoder:
    """Return a freshly initialised encoder on the CPU.

    The initial weights are a function of only the network and the public seed: the global random state
    is neither read nor changed.

    Args:
      config: the network's configuration.
      image_shape: (channels, height, width).
      seed: public seed.

    Raises:
      ConfigError: the network is unknown, its factory cannot be imported or fails, or its output is not
        `[n, feature_dim]`.

    >>> encoder = build_encoder(NetworkConfig(), (1, 28, 28), seed=0)
    >>> encoder(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 64])
    """
    factory = _factory(config.name)
    # Seeding through torch.manual_seed would also reseed CUDA, which fork_rng(devices=[]) leaves alone.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            backbone = factory(image_shape)
        except Exception as error:
            raise ConfigError(
                f"network {config.name!r} cannot be built for images of shape {image_shape} "
                f"(channels, height, width): {type(error).__name__}: {error}"
            ) from error
        feature_dim = _feature_dim(backbone, config.name, image_shape)
        return Encoder(backbone, feature_dim, config.embedding_dim, predictor=config.predictor)


def device_named(name: str) -> torch.device:
    """Return a device by name; `auto` is a GPU if one is available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def to_fast_layout(encoder: nn.Module, device: torch.device, image_shape: tuple[int, ...]) -> None:
    """Move the network to the device, in the channels-last layout if it runs in that layout.

    In this layout convolutions are faster by a quarter on CPUs, and the clipping engine reads patches in it.
    A network that calls `view` on a convolution's output or weight runs only in the ordinary layout.
    """
    network: Any = encoder  # the declared overloads of `to` lack memory_format
    network.to(device, memory_format=torch.channels_last)
    try:
        encoder(torch.zeros(2, *image_shape, device=device))
    except RuntimeError:
        network.to(memory_format=torch.contiguous_format)


def _factory(name: str) -> Callable[[ImageShape], nn.Module]:
    """Return the backbone factory of a registered name or of `package.module:factory`."""
    if name in NETWORKS:
        return NETWORKS[name].factory
    module_name, colon, factory_name = name.partition(":")
    if not colon:
        raise ConfigError(unknown_choice("network", name, [*NETWORKS, "package.module:factory"]))
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except Exception as error:  # a user's module may fail in any way while it is imported
        raise ConfigError(
            f"network {name!r} must name an importable `package.module:factory`; "
            f"{type(error).__name__}: {error}. Put the package on PYTHONPATH or install it."
        ) from error
    if not callable(factory):
        raise ConfigError(f"network {name!r} must name a callable; got {type(factory).__name__}")
    built: Callable[[ImageShape], nn.Module] = factory
    return built


def _feature_dim(backbone: nn.Module, name: str, image_shape: ImageShape) -> int:
    """Return the width of the backbone's output, from a trial pass over blank images."""
    if not isinstance(backbone, nn.Module):
        raise ConfigError(
            f"the factory of network {name!r} must return a torch.nn.Module; got {type(backbone).__name__}"
        )
    was_training = backbone.training
    backbone.eval()
    try:
        with torch.no_grad():
            features = backbone(torch.zeros(2, *image_shape))
    except Exception as error:
        raise ConfigError(
            f"network {name!r} cannot read images of shape {image_shape} (channels, height, width): "
            f"{type(error).__name__}: {error}"
        ) from error
    backbone.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        got = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(
            f"network {name!r} must return features [n, feature_dim]; got {got} for n = 2. "
            "Pool and flatten inside the network."
        )
    return features.shape[1]
