"""Stage 5 for pairs of images and texts: both towers of a CLIP model embed each view from only that view.

A group holds pairs, and its loss compares every image with every text of the group, in both directions. So
the tensors of both sides have the same leading axes `[groups, group_size, views]`, and one backward pass
holds every group's gradient of both towers, which `dpgcl_core.clipping.one_pass` separates.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgcl_core.clipping.cross_record import refuse_cross_record
from dpgcl_core.clipping.direct_uses import NotSeparableError
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.image_text import clamp_logit_scale_, interleaved, with_learned_temperature
from trainers.models.clip.adapters import ClipLora, make_trainable
from trainers.models.clip.published_models import ClipConfig, ClipSpec, build_clip, find_clip
from trainers.models.clip.tokens import CLIP_VOCABULARY, ClipTokenizer
from trainers.models.encoder import NORM_FLOOR
from trainers.models.lora import prove_adapters_train
from trainers.views.image_views import PIXEL_MEAN, PIXEL_STD

Pairs = tuple[Tensor, Tensor]
"""Images `[groups, group_size, image_views, C, H, W]`, tokens `[groups, group_size, text_views, length]`."""

_NUM_PROBES = 4


class ImageTextEncoder(nn.Module):
    """Both towers of a CLIP model, with its temperature.

    Args:
      clip: an open_clip model prepared by `make_trainable`.
      spec: the specification of the model.
      gradient_checkpointing: whether a block's activations are recomputed in the backward pass instead of
        being kept. The one-pass clipping needs the tensors of the forward pass, so groups are then taken one
        at a time: the gradients are the same, slower, in the memory of one group.

    Raises:
      ConfigError: gradient checkpointing is requested for a model that has none.

    Attributes:
      spec: the specification of the model.
      embedding_dim: width of the embeddings.
      feature_dim: width of the image tower's features, which k-NN and probes read.
      learns_temperature: whether `logit_scale` trains.
    """

    num_towers = 2
    """Number of towers, each of which reads every other view; read by `dpgcl_core.clipping.clipper`."""

    _slope: Tensor
    _shift: Tensor

    def __init__(self, clip: nn.Module, spec: ClipSpec, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.clip = clip
        self.spec = spec
        self.embedding_dim = self.feature_dim = int(spec.architecture["embed_dim"])
        # Views arrive as (x − PIXEL_MEAN) / PIXEL_STD; the weights need (x − mean) / std per colour.
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (spec.mean, spec.std))
        self.register_buffer("_slope", PIXEL_STD / std, persistent=False)
        self.register_buffer("_shift", (PIXEL_MEAN - mean) / std, persistent=False)
        # Read now: while the clipping engine records a pass, no parameter has requires_grad.
        self.learns_temperature = self._logit_scale.requires_grad
        self._recomputes = gradient_checkpointing
        if gradient_checkpointing:
            _checkpoint_activations(clip, spec.name)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of the images."""
        return (3, *self.spec.image_size)

    @cached_property
    def tokenizer(self) -> ClipTokenizer:
        """The model's tokeniser."""
        return ClipTokenizer(self.spec)

    @property
    def view_size(self) -> int:
        """The number of values in one view, see `pack_views`."""
        return max(torch.Size(self.image_shape).numel(), self.spec.context_length)

    @property
    def _logit_scale(self) -> Tensor:
        scale: Tensor = self.clip.logit_scale  # type: ignore[assignment]
        return scale

    def features(self, images: Tensor) -> Tensor:
        """Return features `[n, feature_dim]` of normalised images: the image tower's unscaled output."""
        features: Tensor = self.clip.encode_image(images * self._slope + self._shift)  # type: ignore[operator]
        return features

    def embed_images(self, images: Tensor) -> Tensor:
        """Return unit embeddings `[n, embedding_dim]` of normalised images `[n, 1 or 3, H, W]`."""
        return _unit(self.features(images))  # this expands grey images to three channels

    def embed_texts(self, tokens: Tensor) -> Tensor:
        """Return unit embeddings `[n, embedding_dim]` of tokens `[n, context_length]`."""
        return _unit(self.clip.encode_text(tokens))  # type: ignore[operator]

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return both sides' embeddings with the leading axes of the inputs, see `Pairs`.

        Raises:
          NotSeparableError: one-pass clipping with gradient checkpointing; the clipper then uses its loop.
        """
        # While the engine records a pass, no parameter has requires_grad. The engine does not see a
        # recomputed block, whose graph would then differ from the recorded one.
        recomputes = self._recomputes and self.training and torch.is_grad_enabled()
        if recomputes and not any(p.requires_grad for p in self.clip.parameters()):
            raise NotSeparableError("gradient checkpointing keeps no input of a layer")
        return (
            self.embed_images(images.flatten(0, 2)).reshape(*images.shape[:3], -1),
            self.embed_texts(tokens.flatten(0, 2)).reshape(*tokens.shape[:3], -1),
        )

    def embed_views(self, views: Tensor) -> Tensor:
        """Return unit embeddings `[groups, group_size, views, embedding_dim]`, in the order of the views.

        Args:
          views: `[groups, group_size, views, view_size]`, made by `pack_views`.
        """
        height, width = self.spec.image_size
        images = views[:, :, 0::2, : 3 * height * width].unflatten(-1, (3, height, width))
        tokens = _tokens_of(views[:, :, 1::2, : self.spec.context_length], self.spec)
        return interleaved(*self(images, tokens))

    def with_temperature(self, embeddings: Tensor) -> Tensor:
        """Return embeddings times 1/√τ if the temperature τ is learned; otherwise return them unchanged."""
        return (
            with_learned_temperature(embeddings, self._logit_scale) if self.learns_temperature else embeddings
        )

    def limit_logit_scale_(self) -> None:
        """Clamp 1/τ to [1, 100] after a step: a function of only the noised weights."""
        if self.learns_temperature:
            clamp_logit_scale_(self._logit_scale)


def pack_views(images: Tensor, tokens: Tensor, encoder: ImageTextEncoder) -> Tensor:
    """Return views of both kinds as one tensor, `[n, 2·views, view_size]`: image, caption, image, …

    One row of numbers is one view, an image's pixels or a caption's tokens, so that all code for views works
    on these rows, too. A token t of a vocabulary of V becomes (2t + 1)/V − 1, between −1 and 1 like pixels,
    and can be recovered exactly in float32 for every V below 2²². The shorter kind of row is padded with
    zeros, which are not read.

    Args:
      images: normalised `[n, views, 1 or 3, H, W]`.
      tokens: int64 `[n, views, context_length]`.
      encoder: the encoder that will read the views.
    """
    n, num_views = images.shape[:2]
    packed = images.new_zeros(n, num_views, 2, encoder.view_size)
    pixels = images.expand(-1, -1, 3, -1, -1).flatten(2)
    packed[:, :, 0, : pixels.shape[-1]] = pixels
    levels = (2 * tokens.double() + 1) / _vocabulary(encoder.spec) - 1
    packed[:, :, 1, : tokens.shape[-1]] = levels.to(packed)
    return packed.flatten(1, 2)


def _unit(features: Tensor) -> Tensor:
    return F.normalize(features, dim=1, eps=NORM_FLOOR)


def _checkpoint_activations(clip: nn.Module, name: str) -> None:
    try:
        clip.set_grad_checkpointing(True)  # type: ignore[operator]
    except Exception as error:  # an open_clip tower without it asserts, raises or has no such method
        raise ConfigError(
            f"CLIP model {name} has no gradient checkpointing ({type(error).__name__}). Turn it off."
        ) from error


def build_image_text_encoder(
    config: ClipConfig,
    lora: ClipLora | None = None,
    *,
    seed: int,
    train_logit_scale: bool = False,
    temperature: float | None = None,
    gradient_checkpointing: bool = False,
) -> ImageTextEncoder:
    """Return a CLIP model, ready to be trained, on the CPU.

    Args:
      config: the model and its first weights.
      lora: the adapters; None trains all weights.
      seed: public seed of everything that is drawn.
      train_logit_scale: whether the temperature trains.
      temperature: the τ that the training starts from; None for the model's own τ.
      gradient_checkpointing: see `ImageTextEncoder`.

    Raises:
      ConfigError: a part of the model is not available or does not fit; the message names it.
      StorageError: a file cannot be read.

    >>> encoder = build_image_text_encoder(ClipConfig(), seed=0)
    >>> encoder.embed_texts(torch.ones(2, 56, dtype=torch.int64)).shape
    torch.Size([2, 64])
    """
    spec = find_clip(config)
    clip = build_clip(spec, seed)
    make_trainable(clip, lora, seed=seed, train_logit_scale=train_logit_scale)
    if temperature is not None:
        with torch.no_grad():
            scale: Tensor = clip.logit_scale  # type: ignore[assignment]
            scale.fill_(-math.log(temperature))
    return ImageTextEncoder(clip, spec, gradient_checkpointing=gradient_checkpointing)


def synthetic_pairs(encoder: ImageTextEncoder) -> Pairs:
    """Return images `[n, C, H, W]` and tokens `[n, length]` of public content, on the encoder's device."""
    generator = torch.Generator().manual_seed(0)
    device = next(encoder.parameters()).device
    images = torch.rand(_NUM_PROBES, *encoder.image_shape, generator=generator) * 2 - 1
    levels = torch.rand(_NUM_PROBES, encoder.spec.context_length, generator=generator) * 2 - 1
    return images.to(device), _with_end(_tokens_of(levels, encoder.spec), encoder.spec).to(device)


def _tokens_of(levels: Tensor, spec: ClipSpec) -> Tensor:
    """Return the tokens that `pack_views` has written; any other number is also mapped to a token."""
    vocabulary = _vocabulary(spec)
    return ((levels.double() + 1) / 2 * vocabulary).nan_to_num().floor().long().clamp(0, vocabulary - 1)


def _with_end(tokens: Tensor, spec: ClipSpec) -> Tensor:
    """Return tokens of which only the last one is the end of the text."""
    last = _vocabulary(spec) - 1
    tokens = tokens.clamp(max=max(last - 1, 0))
    tokens[:, -1] = last
    return tokens


def _vocabulary(spec: ClipSpec) -> int:
    return int(spec.architecture["text_cfg"].get("vocab_size", CLIP_VOCABULARY))


def prove_towers_train(encoder: ImageTextEncoder) -> None:
    """Check that training would move every trainable weight of both towers, see `prove_adapters_train`.

    Both towers, and the temperature if it trains, must receive a finite gradient that is not zero, on
    synthetic pairs and without noise, which would hide a dead adapter. The encoder is left unchanged.

    Raises:
      ConfigError: some weights would not train; names them.
    """
    images, tokens = synthetic_pairs(encoder)

    def run(network: nn.Module) -> Tensor:
        assert isinstance(network, ImageTextEncoder)
        parts = [network.embed_images(images), network.embed_texts(tokens), network._logit_scale]
        return torch.cat([part.flatten() for part in parts])

    prove_adapters_train(encoder, run)


def refuse_other_size(spec: ClipSpec, image_shape: tuple[int, ...]) -> None:
    """Refuse images whose size or number of channels a CLIP model does not take.

    Raises:
      ConfigError: the sizes or channels differ; names both sizes.
    """
    channels, *size = image_shape
    if tuple(size) != spec.image_size or channels not in (1, 3):
        height, width = spec.image_size
        raise ConfigError(
            f"CLIP model {spec.name} reads images of {height} × {width} pixels with 1 or 3 channels; got "
            f"{' × '.join(map(str, size))} with {channels} channels. Set --image-size {height}."
        )


class _Tower(nn.Module):
    def __init__(self, encoder: ImageTextEncoder) -> None:
        super().__init__()
        self.encoder = encoder


class _TextsAsLevels(_Tower):
    """The text tower as a function of numbers in [−1, 1], which `refuse_cross_record` draws as inputs."""

    def forward(self, levels: Tensor) -> Tensor:
        spec = self.encoder.spec
        return self.encoder.embed_texts(_with_end(_tokens_of(levels.flatten(1), spec), spec))


class _Images(_Tower):
    def forward(self, images: Tensor) -> Tensor:
        return self.encoder.embed_images(images)


def refuse_mixed_pairs(encoder: ImageTextEncoder) -> None:
    """Refuse a tower in which records affect each other, or which is random within a step.

    It applies `refuse_cross_record` to both towers: with a tower that mixes records, the sensitivity of a
    group's gradient would not hold.

    Raises:
      ConfigError: a tower is refused; names the module and the reason.
    """
    refuse_cross_record(_Images(encoder), encoder.image_shape)
    refuse_cross_record(_TextsAsLevels(encoder), (1, 1, encoder.spec.context_length))
