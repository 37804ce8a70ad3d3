"""Station 5 for pairs of images and texts: both towers of a CLIP model, each view from itself alone.

A group holds pairs; its loss compares every image with every text of the group, in both directions. So the
tensors of both sides carry the same leading axes `[groups, group_size, views]`, and one backward pass holds
every group's gradient of both towers, which `dpgcl_core.folding` separates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgcl_core.bare_parameters import NotFoldableError
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses import symmetric_group_info_nce
from trainers.encoder import NORM_FLOOR, refuse_cross_record
from trainers.models.clip import ClipConfig, ClipSpec, build_clip, find_clip
from trainers.models.clip_lora import ClipLora, make_trainable
from trainers.models.lora import prove_adapters_train
from trainers.views import PIXEL_MEAN, PIXEL_STD

MAX_LOGIT_SCALE = math.log(100.0)
"""CLIP's own bound on log 1/τ (Radford et al. 2021, section 2.5); public."""

Pairs = tuple[Tensor, Tensor]
"""Images `[groups, group_size, image_views, C, H, W]`, tokens `[groups, group_size, text_views, length]`."""

_NUM_PROBES = 4


class ImageTextEncoder(nn.Module):
    """Both towers of a CLIP model, with its temperature.

    Args:
      clip: an open_clip model that `make_trainable` has seen.
      spec: what it is.
      gradient_checkpointing: recompute a block's activations in the backward pass instead of keeping them.
        The one-pass clipping needs what the forward pass saw, so groups are then taken one at a time:
        the same gradients, slower, in the memory of one group.

    Raises:
      ConfigError: gradient checkpointing for a model that has none.

    Attributes:
      spec: what the model is.
      embedding_dim: width of the embeddings.
    """

    _slope: Tensor
    _shift: Tensor

    def __init__(self, clip: nn.Module, spec: ClipSpec, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.clip = clip
        self.spec = spec
        self.embedding_dim = int(spec.architecture["embed_dim"])
        # Views arrive as (x − PIXEL_MEAN) / PIXEL_STD; the weights want (x − mean) / std per colour.
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (spec.mean, spec.std))
        self.register_buffer("_slope", PIXEL_STD / std, persistent=False)
        self.register_buffer("_shift", (PIXEL_MEAN - mean) / std, persistent=False)
        self._recomputes = gradient_checkpointing
        if gradient_checkpointing:
            _checkpoint_activations(clip, spec.name)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of the images."""
        return (3, *self.spec.image_size)

    @property
    def temperature(self) -> Tensor:
        """τ, a tensor through which `logit_scale` takes its gradient where it trains."""
        scale: Tensor = self.clip.logit_scale  # type: ignore[assignment]
        return torch.exp(-scale)

    def embed_images(self, images: Tensor) -> Tensor:
        """Returns unit embeddings `[n, embedding_dim]` of normalised images `[n, 1 or 3, H, W]`."""
        pixels = images * self._slope + self._shift  # grey images become three channels
        return _unit(self.clip.encode_image(pixels))  # type: ignore[operator]

    def embed_texts(self, tokens: Tensor) -> Tensor:
        """Returns unit embeddings `[n, embedding_dim]` of tokens `[n, context_length]`."""
        return _unit(self.clip.encode_text(tokens))  # type: ignore[operator]

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both sides' embeddings with the leading axes of the inputs, see `Pairs`.

        Raises:
          NotFoldableError: one-pass clipping with gradient checkpointing; the clipper then takes its loop.
        """
        # While the engine records, no parameter takes a gradient of its own; a recomputed block, which it
        # does not see, would then be another graph than the recorded one.
        recomputes = self._recomputes and self.training and torch.is_grad_enabled()
        if recomputes and not any(p.requires_grad for p in self.clip.parameters()):
            raise NotFoldableError("gradient checkpointing keeps no input of a layer")
        return (
            self.embed_images(images.flatten(0, 2)).reshape(*images.shape[:3], -1),
            self.embed_texts(tokens.flatten(0, 2)).reshape(*tokens.shape[:3], -1),
        )

    @torch.no_grad()
    def limit_logit_scale_(self) -> None:
        """Puts 1/τ back between 1 and 100, after a step: a function of the noised weights alone."""
        scale: Tensor = self.clip.logit_scale  # type: ignore[assignment]
        if scale.requires_grad:
            scale.clamp_(0.0, MAX_LOGIT_SCALE)


def _unit(features: Tensor) -> Tensor:
    return F.normalize(features, dim=1, eps=NORM_FLOOR)


def _checkpoint_activations(clip: nn.Module, name: str) -> None:
    try:
        clip.set_grad_checkpointing(True)  # type: ignore[operator]
    except Exception as error:  # an open_clip tower without it asserts, raises or has no such method
        raise ConfigError(
            f"CLIP model {name} has no gradient checkpointing ({type(error).__name__}); turn it off"
        ) from error


def build_image_text_encoder(
    config: ClipConfig,
    lora: ClipLora | None = None,
    *,
    seed: int,
    train_logit_scale: bool = False,
    gradient_checkpointing: bool = False,
) -> ImageTextEncoder:
    """Returns a CLIP model, ready to be trained, on the CPU.

    Args:
      config: which model and which first weights.
      lora: adapters; None trains everything.
      seed: public seed of everything that is drawn.
      train_logit_scale: whether the temperature trains.
      gradient_checkpointing: see `ImageTextEncoder`.

    Raises:
      ConfigError: anything of it cannot be had; the message says what.
      StorageError: a file cannot be read.

    >>> encoder = build_image_text_encoder(ClipConfig(), seed=0)
    >>> encoder.embed_texts(torch.ones(2, 32, dtype=torch.int64)).shape
    torch.Size([2, 64])
    """
    spec = find_clip(config)
    clip = build_clip(spec, seed)
    make_trainable(clip, lora, seed=seed, train_logit_scale=train_logit_scale)
    return ImageTextEncoder(clip, spec, gradient_checkpointing=gradient_checkpointing)


def dual_group_losses(
    encoder: ImageTextEncoder, temperature: float | None = None
) -> Callable[[Pairs], Tensor]:
    """Returns the losses `[groups]` of Eq. 15 of DP-GCL, as `GroupClipper` wants them.

    The first view of each side is the pair; further views are its augmented copies, which stand among the
    negatives of the other side.

    Args:
      encoder: the network.
      temperature: τ; None takes the model's own, which trains if it was asked to.

    Raises:
      ConfigError: a fixed τ beside one that trains.
    """
    if temperature is not None and encoder.temperature.requires_grad:
        raise ConfigError(
            f"the temperature must be fixed or trained, not both; got {temperature} and train_logit_scale. "
            "Leave out one of them"
        )

    def losses(pairs: Pairs) -> Tensor:
        images, texts = encoder(*pairs)
        return symmetric_group_info_nce(
            images[:, :, 0].float(),
            texts[:, :, 0].float(),
            images[:, :, 1:].float(),
            texts[:, :, 1:].float(),
            temperature=encoder.temperature if temperature is None else temperature,
        )

    return losses


def synthetic_pairs(encoder: ImageTextEncoder, num_pairs: int = _NUM_PROBES) -> Pairs:
    """Returns images `[n, C, H, W]` and tokens `[n, length]` of public content, on the encoder's device."""
    generator = torch.Generator().manual_seed(0)
    device = next(encoder.parameters()).device
    images = torch.rand(num_pairs, *encoder.image_shape, generator=generator) * 2 - 1
    levels = torch.rand(num_pairs, encoder.spec.context_length, generator=generator)
    return images.to(device), _tokens_of(levels, encoder.spec).to(device)


def _tokens_of(levels: Tensor, spec: ClipSpec) -> Tensor:
    """Numbers in [0, 1] `[n, length]` as tokens, the last one the end of the text."""
    vocabulary = int(spec.architecture["text_cfg"].get("vocab_size", 2))
    tokens = (levels * vocabulary).long().clamp(0, max(vocabulary - 2, 0))
    tokens[:, -1] = vocabulary - 1
    return tokens


def prove_towers_train(encoder: ImageTextEncoder) -> None:
    """Refuses an encoder with trainable weights that no training would move: `prove_adapters_train`.

    Both towers, and the temperature where it trains, must receive a finite gradient that is not zero, on
    synthetic pairs and without noise, which would hide a dead adapter. The encoder is left untouched.

    Raises:
      ConfigError: names the weights.
    """
    images, tokens = synthetic_pairs(encoder)

    def run(network: nn.Module) -> Tensor:
        assert isinstance(network, ImageTextEncoder)
        parts = [network.embed_images(images), network.embed_texts(tokens), network.temperature]
        return torch.cat([part.flatten() for part in parts])

    prove_adapters_train(encoder, run)


class _TextsAsLevels(nn.Module):
    """The text tower as a network of numbers in [−1, 1], which is what the search for mixed records draws."""

    def __init__(self, encoder: ImageTextEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, levels: Tensor) -> Tensor:
        return self.encoder.embed_texts(_tokens_of((levels.flatten(1) + 1) / 2, self.encoder.spec))


class _Images(nn.Module):
    def __init__(self, encoder: ImageTextEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder.embed_images(images)


def refuse_mixed_pairs(encoder: ImageTextEncoder) -> None:
    """Refuses a tower in which records see each other, or which is random within a step.

    `refuse_cross_record` for both towers: without it the sensitivity of a group's gradient is false.

    Raises:
      ConfigError: names the module and the reason.
    """
    refuse_cross_record(_Images(encoder), encoder.image_shape)
    refuse_cross_record(_TextsAsLevels(encoder), (1, 1, encoder.spec.context_length))
