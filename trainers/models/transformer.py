"""Transformer blocks for which the clipping engine separates the gradient of every parameter by record.

They have only plain layers: linear layers, layer norms and attention with separate projections. So one pass
gives each record's gradient (`dpgcl_core.clipping.layers`), and no layer needs a loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpgcl_core.clipping.direct_uses import NotSeparableError
from dpgcl_core.errors import ConfigError, require_choice
from trainers.config.networks import PatchNetwork
from trainers.models.attention import SeparateAttention

HEAD_WIDTH = 64
"""Head width of the published sizes; narrower networks have at least two heads."""

_MLP_RATIO = 4


ImageShape = tuple[int, int, int]


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a layer norm and with a skip connection.

    Args:
      width: width of the tokens.
      num_heads: number of attention heads.
      context_width: width of the tokens that a second attention reads; None without a second attention.

    >>> Block(16, num_heads=2)(torch.zeros(3, 5, 16)).shape
    torch.Size([3, 5, 16])
    """

    def __init__(self, width: int, num_heads: int, *, context_width: int | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = SeparateAttention(width, num_heads)
        self.cross_norm, self.cross_attention = None, None
        if context_width is not None:
            self.cross_norm = nn.LayerNorm(width)
            self.cross_attention = SeparateAttention(width, num_heads, kdim=context_width, vdim=context_width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, _MLP_RATIO * width), nn.GELU(), nn.Linear(_MLP_RATIO * width, width)
        )

    def forward(self, tokens: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return tokens `[n, length, width]`.

        Args:
          tokens: `[n, length, width]`.
          context: `[n, places, context_width]`, for a block with a second attention.
          mask: bool `[length, length]`, True where a token may not look.
        """
        x = self.norm(tokens)
        tokens = tokens + self.attention(x, x, x, attn_mask=mask)[0]
        if self.cross_attention is not None and self.cross_norm is not None:
            x = self.cross_norm(tokens)
            tokens = tokens + self.cross_attention(x, context, context)[0]
        found: Tensor = tokens + self.mlp(self.mlp_norm(tokens))
        return found


class Blocks(nn.ModuleList):
    """A sequence of blocks, which keep their activations or recompute them.

    The one-pass clipping needs the tensors of the forward pass. It does not see a recomputed block, whose
    graph would differ from the recorded one, so with `recomputes` the clipper uses its loop over groups.

    Args:
      depth: number of blocks.
      width: width of the tokens.
      context_width: see `Block`.
      recomputes: whether activations are recomputed in the backward pass.
    """

    def __init__(
        self, depth: int, width: int, *, context_width: int | None = None, recomputes: bool = False
    ) -> None:
        num_heads = num_heads_of(width)
        super().__init__(Block(width, num_heads, context_width=context_width) for _ in range(depth))
        self._recomputes = recomputes

    def forward(self, tokens: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return tokens `[n, length, width]`; arguments as in `Block`.

        Raises:
          NotSeparableError: one-pass clipping is used while activations are recomputed.
        """
        recomputes = self._recomputes and self.training and torch.is_grad_enabled()
        if recomputes and not any(p.requires_grad for p in self.parameters()):
            raise NotSeparableError("gradient checkpointing keeps no input of a layer")
        for block in self:
            if recomputes:
                tokens = checkpoint(block, tokens, context, mask, use_reentrant=False)
            else:
                tokens = block(tokens, context, mask)
        return tokens


@dataclass(frozen=True, kw_only=True)
class EncoderSize:
    """Depth and width of a transformer of patches, and the default side of a patch."""

    depth: int
    width: int
    patch_size: int = 16


class PatchEncoder(nn.Module):
    """A transformer of an image's patches; subclasses add a decoder.

    The features that are scored and exported are the mean of its tokens of all patches.

    Args:
      config: the configuration; it decides the side of a patch (by default the side in `size`), and whether
        activations are recomputed.
      size: the size of the transformer.
      image_shape: (channels, height, width) of the images.

    Attributes:
      image_shape: the shape of the images.
      feature_dim: width of the features.
      patch_size: side of a patch in pixels.
      grid: rows and columns of patches.
      num_patches: number of patches of an image.

    Raises:
      ConfigError: the patch size does not divide the image.
    """

    positions: Tensor

    def __init__(self, config: PatchNetwork, size: EncoderSize, image_shape: ImageShape) -> None:
        super().__init__()
        width, patch_size = size.width, config.patch_size or size.patch_size
        self.grid = patch_grid(image_shape, patch_size)
        self.image_shape, self.feature_dim = image_shape, width
        self.patch_size, self.num_patches = patch_size, self.grid[0] * self.grid[1]
        self.embed = nn.Linear(image_shape[0] * patch_size**2, width)
        self.encoder = Blocks(size.depth, width, recomputes=config.gradient_checkpointing)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("positions", grid_positions(width, *self.grid), persistent=False)

    def patches(self, images: Tensor) -> Tensor:
        """Return the patches `[n, patches, channels·side²]` of images `[n, C, H, W]`, row by row."""
        side = self.patch_size
        # [n, C, rows, side, columns, side]
        cells: Tensor = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))
        return cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def encode(self, images: Tensor) -> Tensor:
        """Return the tokens `[n, patches, feature_dim]` of normalised images `[n, C, H, W]`."""
        return self.encode_tokens(self.embed(self.patches(images)) + self.positions)

    def encode_tokens(self, tokens: Tensor) -> Tensor:
        """Return the encoder's output for embedded patches; both are `[n, length, feature_dim]`."""
        encoded: Tensor = self.norm(self.encoder(tokens))
        return encoded

    def features(self, images: Tensor) -> Tensor:
        """Return features `[n, feature_dim]` of normalised images `[n, C, H, W]`."""
        return self.encode(images).mean(1)


SizeT = TypeVar("SizeT", bound=EncoderSize)


def size_named(name: str, sizes: Mapping[str, SizeT], method: str) -> SizeT:
    """Return the size that a network's name stands for.

    Raises:
      ConfigError: the method has no network of this name; lists the method's networks.
    """
    require_choice(f"network of {method}", name, sizes)
    return sizes[name]


def num_heads_of(width: int) -> int:
    """Return the number of attention heads: one for 64 numbers of the width, and at least two.

    >>> num_heads_of(768), num_heads_of(96)
    (12, 2)
    """
    return max(2, width // HEAD_WIDTH)


def initialise_(network: nn.Module) -> None:
    """Initialise linear layers by Glorot and Bengio (2010), with zero biases; change no other layer."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def patch_grid(image_shape: ImageShape, patch_size: int) -> tuple[int, int]:
    """Return the rows and columns of an image's patches.

    Raises:
      ConfigError: the patch size does not divide the image.
    """
    _, height, width = image_shape
    if height % patch_size or width % patch_size:
        raise ConfigError(
            f"patch_size must divide the image, {height} × {width} pixels; got {patch_size}. Change "
            "--patch-size or --image-size."
        )
    return height // patch_size, width // patch_size


def grid_positions(width: int, rows: int, columns: int) -> Tensor:
    """Return fixed sine and cosine positions of a grid's cells, `[rows·columns, width]`, row by row.

    Half of the numbers encode the row and half the column (He et al. 2022, after Vaswani et al. 2017).

    >>> grid_positions(8, 2, 3).shape
    torch.Size([6, 8])
    """
    of_rows = sequence_positions(width // 2, rows)
    of_columns = sequence_positions(width - width // 2, columns)
    both = [of_rows[:, None].expand(-1, columns, -1), of_columns[None].expand(rows, -1, -1)]
    return torch.cat(both, dim=-1).reshape(rows * columns, width)


def sequence_positions(width: int, length: int) -> Tensor:
    """Return fixed sine and cosine positions of a sequence, `[length, width]` (Vaswani et al. 2017)."""
    frequencies = torch.exp(-math.log(10_000.0) * torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width].float()
