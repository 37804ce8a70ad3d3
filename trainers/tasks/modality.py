"""What differs between training on images and on pairs of images and texts: views, checks, placing.

Everything else of a training sees views `[groups, group_size, views, ...]` and a network that embeds them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpgcl_core.errors import ConfigError
from dpgcl_core.sampling.records import Ids
from trainers.config.training import TOWERS, TrainingConfig
from trainers.data.dataset import AnyRecords
from trainers.data.pairs import ImageTextRecords
from trainers.models.clip.encoder import (
    ImageTextEncoder,
    pack_views,
    prove_towers_train,
    refuse_mixed_pairs,
)
from trainers.models.encoder import Encoder, refuse_cross_record, to_fast_layout
from trainers.views.captions import make_text_views
from trainers.views.images import make_views

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
    kind, other = "an encoder of images", "pairs of images and texts"
    if config.trains_pairs:
        kind, other = "a CLIP model", "images without captions"
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
    rows, draws = groups.reshape(-1), config.num_view_draws
    if isinstance(records, ImageTextRecords):
        assert isinstance(encoder, ImageTextEncoder)
        views = pack_views(
            *pair_views(config, encoder, records, rows, step=step, num_views=draws * (1 + num_augmentations)),
            encoder,
        )
    else:
        seed, num_views = config.public_seed, draws * (2 + num_augmentations)
        pixels = records.images_at(rows, seed=seed, step=step)
        views = _image_views(config, encoder, pixels, records.ids[rows], step=step, num_views=num_views)
    return views.unflatten(0, groups.shape)


def pair_views(
    config: TrainingConfig,
    encoder: ImageTextEncoder,
    records: ImageTextRecords,
    rows: NDArray[np.int64],
    *,
    step: int,
    num_views: int,
) -> tuple[Tensor, Tensor]:
    """Returns the views of both sides of pairs at a step, on the encoder's device.

    Args:
      config: augmentations and seed.
      encoder: that will see them; its tokenizer is used.
      records: pairs.
      rows: `[n]`, places of the records.
      step: of the training.
      num_views: of each side.

    Returns:
      images, float32 `[n, num_views, channels, height, width]`, and tokens, `[n, num_views, context]`.
    """
    assert config.text_views is not None
    seed, ids = config.public_seed, records.ids[rows]
    pixels, captions = records.pairs_at(rows, seed=seed, step=step)
    texts = make_text_views(
        captions, ids, config=config.text_views, seed=seed, step=step, num_views=num_views
    )
    images = _image_views(config, encoder, pixels, ids, step=step, num_views=num_views)
    tokens = encoder.tokenizer([text for views in texts for text in views]).tokens
    return images, tokens.unflatten(0, (len(rows), num_views)).to(images.device)


def _image_views(
    config: TrainingConfig,
    encoder: AnyEncoder,
    pixels: NDArray[np.uint8],
    ids: Ids,
    *,
    step: int,
    num_views: int,
) -> Tensor:
    images = torch.from_numpy(pixels).to(next(encoder.parameters()).device)
    return make_views(
        images, ids, config=config.views, seed=config.public_seed, step=step, num_views=num_views
    )
