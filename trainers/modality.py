"""What differs between training on images and on pairs of images and texts: views, checks, placing.

Everything else of a training sees views `[groups, group_size, views, ...]` and a network that embeds them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpgcl_core.errors import ConfigError
from trainers.config import TOWERS, TrainingConfig
from trainers.data.dataset import AnyRecords
from trainers.data.pairs import ImageTextRecords
from trainers.encoder import Encoder, refuse_cross_record, to_fast_layout
from trainers.models.clip_encoder import (
    ImageTextEncoder,
    pack_views,
    prove_towers_train,
    refuse_mixed_pairs,
)
from trainers.text_views import make_text_views
from trainers.views import make_views

AnyEncoder = Encoder | ImageTextEncoder


def check_encoder(config: TrainingConfig, encoder: AnyEncoder, image_shape: tuple[int, ...]) -> None:
    """Refuses a network that mixes records, that no step would train, or that reads other images.

    Raises:
      ConfigError: says which module, weight or size.
    """
    if isinstance(encoder, Encoder):
        refuse_cross_record(encoder, image_shape)
        return
    channels, *size = image_shape
    if tuple(size) != encoder.spec.image_size or channels not in (1, 3):
        height, width = encoder.spec.image_size
        raise ConfigError(
            f"CLIP model {encoder.spec.name} reads images of {height} × {width} pixels, grey or in colour; "
            f"got {' × '.join(map(str, size))} with {channels} channels: give --image-size {height}"
        )
    refuse_mixed_pairs(encoder)
    prove_towers_train(encoder)
    if config.per_tower_clipping:
        TOWERS.owners(encoder)


def check_records(config: TrainingConfig, records: AnyRecords) -> None:
    """Refuses a network of the one kind for records of the other.

    Raises:
      ConfigError: names both.
    """
    if config.trains_pairs == isinstance(records, ImageTextRecords):
        return
    kind, other = (
        ("a CLIP model", "images without captions")
        if config.trains_pairs
        else (
            "an encoder of images",
            "pairs of images and texts",
        )
    )
    raise ConfigError(f"{config.network.name} is {kind}, and the data are {other}: give another --network")


def place(encoder: AnyEncoder, device: torch.device, image_shape: tuple[int, ...]) -> None:
    """Moves a network to the device, in the memory layout that is fast there."""
    if isinstance(encoder, Encoder):
        to_fast_layout(encoder, device, image_shape)
    else:
        encoder.to(device)


def blank_views(
    encoder: AnyEncoder, image_shape: tuple[int, ...], *, groups: int, group_size: int, num_views: int
) -> Tensor:
    """Returns views of the right shape and no content, `[groups, group_size, num_views, ...]`."""
    shape = (encoder.view_size,) if isinstance(encoder, ImageTextEncoder) else image_shape
    device = next(encoder.parameters()).device
    return torch.zeros(groups, group_size, num_views, *shape, device=device)


def views_of(
    config: TrainingConfig,
    encoder: AnyEncoder,
    records: AnyRecords,
    groups: NDArray[np.int64],
    *,
    step: int,
    num_augmentations: int,
) -> Tensor:
    """Returns the views of groups of records at a step, float32 `[groups, group_size, views, ...]`.

    Each is a function of its own record, the public seed, the step and its number.

    Args:
      config: augmentations, seed and number of draws.
      encoder: that will see them; views come on its device.
      records: of the kind that the network takes.
      groups: `[groups, group_size]`, rows of the records.
      step: of the training.
      num_augmentations: N_a.
    """
    rows, seed, draws = groups.reshape(-1), config.public_seed, config.num_view_draws
    device, ids = next(encoder.parameters()).device, records.ids[rows]
    if isinstance(records, ImageTextRecords):
        assert isinstance(encoder, ImageTextEncoder)
        assert config.text_views is not None
        num_views = draws * (1 + num_augmentations)
        pixels, captions = records.pairs_at(rows, seed=seed, step=step)
        texts = make_text_views(
            captions, ids, config=config.text_views, seed=seed, step=step, num_views=num_views
        )
        tokens = encoder.tokenizer([text for views in texts for text in views]).tokens
        tokens = tokens.unflatten(0, (len(rows), num_views)).to(device)
    else:
        num_views = draws * (2 + num_augmentations)
        pixels, tokens = records.images_at(rows, seed=seed, step=step), None
    views = make_views(
        torch.from_numpy(pixels).to(device),
        ids,
        config=config.views,
        seed=seed,
        step=step,
        num_views=num_views,
    )
    if tokens is not None:
        assert isinstance(encoder, ImageTextEncoder)
        views = pack_views(views, tokens, encoder)
    return views.unflatten(0, groups.shape)
