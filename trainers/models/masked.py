"""Masked auto-encoders (He et al. 2022): one transformer of some patches, and another that rebuilds the rest.

The sizes are from ViP (Yu et al. 2023, table 4): an encoder of 12 or 24 blocks, a decoder of 4 blocks of
width 512. The features that are scored and exported are the mean of the encoder's tokens of all patches; the
decoder serves only the loss. There is no class token, and the token of hidden patches is an embedding layer
of one row, so no parameter is used outside a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError
from trainers.config.networks import MaskedNetworkConfig
from trainers.models.transformer import (
    Blocks,
    EncoderSize,
    ImageShape,
    PatchEncoder,
    grid_positions,
    initialise_,
    size_named,
)

_VARIANCE_FLOOR = 1e-6
"""Added to a patch's variance before the patch is divided by the variance's root, as published."""


@dataclass(frozen=True, kw_only=True)
class Size(EncoderSize):
    """The size of both transformers."""

    decoder_depth: int = 4
    decoder_width: int = 512


SIZES = {
    "mae-toy": Size(depth=4, width=64, decoder_depth=1, decoder_width=32, patch_size=4),
    "mae-nano": Size(depth=12, width=192),
    "mae-tiny": Size(depth=12, width=384),
    "mae-small": Size(depth=12, width=576),
    "mae-base": Size(depth=12, width=768),
    "mae-large": Size(depth=24, width=1024),
}
"""Sizes by name; the toy is for a CPU and small images, the others are from ViP. At 224 × 224 pixels they
have as many weights as in its table 4, except the last: depth 24 and width 1,024 make 316.6 million, not
233.3."""


class MaskedAutoEncoder(PatchEncoder):
    """An encoder of the visible patches and a decoder of all patches.

    Args:
      config: the configuration, as for `PatchEncoder`, with the share of patches that is hidden.
      size: the size of encoder and decoder.
      image_shape: (channels, height, width) of the images.

    Attributes:
      num_hidden: number of hidden patches.

    Raises:
      ConfigError: the patch size does not divide the image, or no patch is hidden, or no patch is visible.
    """

    decoder_positions: Tensor

    def __init__(self, config: MaskedNetworkConfig, size: Size, image_shape: ImageShape) -> None:
        super().__init__(config, size, image_shape)
        self.num_hidden = round(config.mask_ratio * self.num_patches)
        if not 0 < self.num_hidden < self.num_patches:
            raise ConfigError(
                f"mask_ratio must hide at least one patch but not all; got {config.mask_ratio}, which hides "
                f"{self.num_hidden} of {self.num_patches}. Change --mask-ratio, or reduce --patch-size."
            )
        self.to_decoder = nn.Linear(size.width, size.decoder_width)
        self.hidden = nn.Embedding(1, size.decoder_width)
        self.decoder = Blocks(
            size.decoder_depth, size.decoder_width, recomputes=config.gradient_checkpointing
        )
        self.decoder_norm = nn.LayerNorm(size.decoder_width)
        self.rebuild = nn.Linear(size.decoder_width, self.embed.in_features)
        positions = grid_positions(size.decoder_width, *self.grid)
        self.register_buffer("decoder_positions", positions, persistent=False)
        initialise_(self)
        nn.init.normal_(self.hidden.weight, std=0.02)

    def forward(self, images: Tensor, order: Tensor) -> Tensor:
        """Return the rebuilt hidden patches, `[n, num_hidden, channels·side²]`.

        Args:
          images: normalised `[n, C, H, W]`.
          order: int64 `[n, patches]`, a permutation of each image's patches: the last `num_hidden` patches
            are hidden, and rebuilt in that order.
        """
        visible, hidden = order.split([self.num_patches - self.num_hidden, self.num_hidden], dim=1)
        tokens = self.embed(_gather(self.patches(images), visible)) + self.positions[visible]
        visible_tokens = self.to_decoder(self.encode_tokens(tokens)) + self.decoder_positions[visible]
        hidden_tokens = self.hidden(torch.zeros_like(hidden)) + self.decoder_positions[hidden]
        decoded = self.decoder_norm(self.decoder(torch.cat([visible_tokens, hidden_tokens], dim=1)))
        rebuilt: Tensor = self.rebuild(decoded[:, visible.shape[1] :])
        return rebuilt

    def targets(self, images: Tensor, order: Tensor) -> Tensor:
        """Return the true hidden patches, each with mean 0 and variance 1, in the order of `forward`."""
        patches = _gather(self.patches(images), order[:, -self.num_hidden :])
        centred = patches - patches.mean(-1, keepdim=True)
        variance = patches.var(-1, keepdim=True)  # not defined for one pixel in one channel
        return centred / (variance.nan_to_num() + _VARIANCE_FLOOR).sqrt()


def _gather(patches: Tensor, places: Tensor) -> Tensor:
    return patches.gather(1, places[..., None].expand(-1, -1, patches.shape[-1]))


def build_masked(config: MaskedNetworkConfig, image_shape: ImageShape, seed: int) -> MaskedAutoEncoder:
    """Return a freshly initialised auto-encoder on the CPU, a function of its configuration and the seed.

    Args:
      config: the network's configuration.
      image_shape: (channels, height, width).
      seed: public seed.

    Raises:
      ConfigError: the size is unknown, or does not fit the images.

    >>> network = build_masked(MaskedNetworkConfig(name="mae-toy"), (1, 28, 28), seed=0)
    >>> network.num_patches, network.num_hidden, network.features(torch.zeros(2, 1, 28, 28)).shape
    (49, 37, torch.Size([2, 64]))
    """
    size = size_named(config.name, SIZES, "dp_mae")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return MaskedAutoEncoder(config, size, image_shape)
