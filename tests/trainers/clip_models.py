"""Small CLIP models, and groups of pairs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpgcl_core.clipping.types import Objective
from dpgcl_core.losses.image_text import image_text_group_loss
from trainers.models.clip.adapters import ClipLora
from trainers.models.clip.clip_encoder import ImageTextEncoder, Pairs, build_image_text_encoder, pack_views
from trainers.models.clip.published_models import ClipConfig, find_clip
from trainers.models.clip.tokens import ClipTokenizer

TINY = find_clip(ClipConfig())
SMALL_LORA = ClipLora(rank=2, alpha=4)
ALL_LORA = ClipLora(rank=2, alpha=4, targets=("q", "k", "v", "out", "mlp"))
ALL = None
CAPTIONS = ["a red square", "blue circle on green", "x", "the dog", "a b c d e", "hello, world!"]


def tiny_encoder(lora: ClipLora | None = SMALL_LORA, **options: Any) -> ImageTextEncoder:
    return build_image_text_encoder(ClipConfig(), lora, seed=0, **options)


def moved(encoder: ImageTextEncoder) -> ImageTextEncoder:
    """The encoder as after some steps: B is no longer zero."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in encoder.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return encoder


def pairs_of(num_groups: int = 3, views: int = 2) -> Pairs:
    """Groups of two pairs; the captions of a record's views differ."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(num_groups, 2, views, 3, 32, 32, generator=generator) * 2 - 1
    captions = [CAPTIONS[(3 * i + i // 5) % len(CAPTIONS)] for i in range(num_groups * 2 * views)]
    return images, ClipTokenizer(TINY)(captions).tokens.view(num_groups, 2, views, -1)


def packed(encoder: ImageTextEncoder, pairs: Pairs) -> Tensor:
    """The pairs as views, `[groups, 2, 2·views, view_size]`."""
    images, tokens = pairs
    return pack_views(images.flatten(0, 1), tokens.flatten(0, 1), encoder).unflatten(0, images.shape[:2])


def losses_of(encoder: ImageTextEncoder, temperature: float = 0.07) -> Objective:
    """Stages 5 and 6 of pairs as a training has them."""

    def losses(views: Tensor) -> Tensor:
        embeddings = encoder.with_temperature(encoder.embed_views(views))
        return image_text_group_loss(
            embeddings, temperature=1.0 if encoder.learns_temperature else temperature
        )

    return losses
