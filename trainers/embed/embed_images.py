"""Embeddings of images and, with a CLIP model, of texts and pairs; options: `trainers.embed.options`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError
from trainers.data.decoding import MAX_IMAGE_PIXELS
from trainers.data.pair_options import PairOptions
from trainers.data.stored_images import Images, in_channels
from trainers.embed.embed_pairs import (
    embed_captions,
    embed_dataset,
    embed_texts,
    embed_with_image_tower,
    images_of,
    load_at_size,
    names_of,
    owned_captions,
    read_captions,
)
from trainers.embed.embedding_files import write_embeddings
from trainers.embed.embedding_parts import hold_parts
from trainers.embed.options import EmbedOptions
from trainers.evaluation.features import embed_features
from trainers.evaluation.linear_probe import Features
from trainers.evaluation.pair_scores import PAIRS_AT_ONCE
from trainers.export.export_folder import ImageNetwork, load_clip, load_encoder
from trainers.models.encoder import NORM_FLOOR, Encoder, ImageShape, device_named, to_fast_layout

BACKBONE = "backbone"
_IMAGES_AT_ONCE = 512


def embed_with_image_encoder(options: EmbedOptions) -> None:
    """Embed images with an image encoder, and write the embeddings to a file."""
    if options.texts is not None or options.images is None:
        raise ConfigError(
            "--texts needs a CLIP model; got an image encoder. Pass --images and leave --texts out."
        )
    encoder, description = load_encoder(options.model, own_network=options.network)
    channels, height, width = description.image_shape
    dataset = load_at_size(
        options.images, (height, width), options.pairs, options.max_image_pixels, options.index_folder
    )
    features, device = options.features or BACKBONE, chosen_device(options.device)
    batch_size = options.batch_size or _IMAGES_AT_ONCE

    def embed(images: Images) -> Features:
        images = in_channels(images, channels)
        return embed_images(encoder, images, features=features, batch_size=batch_size, device=device)

    with hold_parts(options.to, f"{description} {features}") as parts:
        embed_dataset(parts, dataset, embed, "embedding")
        write_embeddings(parts, model=description, features=features)
        num_images, width = parts.shape_of("embedding")
        print(f"written: {options.to}, {num_images} embeddings of width {width} ({features})")


def embed_with_towers(options: EmbedOptions) -> None:
    """Embed images, texts or both with a CLIP model, and write the embeddings to a file."""
    if options.features is not None:
        raise ConfigError(
            "--features applies only to image encoders; got --features "
            f"{options.features} with a CLIP model. Leave it out."
        )
    encoder, description = load_clip(options.model)
    encoder.to(chosen_device(options.device))
    batch_size, size = options.batch_size or PAIRS_AT_ONCE, encoder.spec.image_size
    dataset = names = None
    captions: Iterable[tuple[int, str]] = ()
    if options.images is not None:
        dataset = load_at_size(
            options.images, size, options.pairs, options.max_image_pixels, options.index_folder
        )
        captions, names = owned_captions(dataset), names_of(dataset)
    if options.texts is not None:
        if dataset is not None and dataset.modality == "image-text":
            raise ConfigError(
                f"--texts cannot be combined with images that have captions; got --images {options.images}. "
                "Embed the texts in a separate run, without --images."
            )
        captions, names = enumerate(read_captions(options.texts)), None
    with hold_parts(options.to, str(description)) as parts:
        if dataset is not None:
            embed_dataset(parts, dataset, partial(embed_with_image_tower, encoder, batch_size=batch_size))
        embed_captions(parts, captions, names, partial(embed_texts, encoder, batch_size=batch_size))
        write_embeddings(parts, model=description, features="unit embeddings")
        sides = {column.removesuffix("_embedding"): parts.shape_of(column)[0] for column in parts.files}
        counts = " and ".join(f"{num_rows} {side}s" for side, num_rows in sides.items())
        print(f"written: {options.to}, embeddings of {counts}, width {encoder.embedding_dim}")
        if parts.num_truncated:  # private-only, so not in the file
            print(
                f"note: {parts.num_truncated} of {sides['text']} captions were cut to the "
                f"{encoder.spec.context_length} tokens that the model reads",
                file=sys.stderr,
            )


def read_images(
    name: str,
    image_shape: ImageShape,
    pairs: PairOptions | None = None,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Return the names of all images and the images, uint8 `[num_images, *image_shape]`, in their order.

    A name is the path in the folder, the value in the column `id`, or else the image's position, counted from
    0. Test images come after the training images.

    Args:
      name: a name that `trainers.data.load_dataset` accepts.
      image_shape: (channels, height, width) of the model's input.
      pairs: how images with captions are read; the captions are ignored.
      max_image_pixels: as for `load_dataset`.

    Raises:
      ConfigError: the images would have to be stretched to a shape that is not square.
      DataError: some images are missing or unreadable (the message states how many, never which), or as in
        `load_dataset`.
    """
    channels, height, width = image_shape
    dataset = load_at_size(name, (height, width), pairs or PairOptions(), max_image_pixels)
    names = names_of(dataset)
    kind = object if isinstance(names[0], str) else None
    return np.array(names, dtype=kind), images_of(dataset, channels)


def embed_images(
    encoder: ImageNetwork,
    images: Images,
    *,
    features: str = BACKBONE,
    batch_size: int = 512,
    device: torch.device | str = "cpu",
) -> Features:
    """Return one embedding per image, float32 `[num_images, dim]`, finite.

    Args:
      encoder: an exported encoder; it is moved to `device`.
      images: uint8 `[num_images, channels, height, width]`, not normalised.
      features: `backbone`, the features; or `projection`, the unit embeddings of the projection head.
      batch_size: images passed at once; affects results only by rounding.
      device: the device for the computation.

    Raises:
      ConfigError: the projection is requested from a network without a projection head.
    """
    device = torch.device(device)
    if isinstance(encoder, Encoder):
        to_fast_layout(encoder, device, images.shape[1:])
    encoder.to(device)
    outputs = embed_features(encoder, images, batch_size=batch_size, device=device)
    if features == BACKBONE:
        return outputs
    if not isinstance(encoder, Encoder):
        raise ConfigError(
            f"--features {features} needs a network of a contrastive method. Leave --features out."
        )
    rows = [np.zeros((0, encoder.embedding_dim), dtype=np.float32)]
    with torch.no_grad():
        for start in range(0, len(outputs), batch_size):
            projected = encoder.head(torch.from_numpy(outputs[start : start + batch_size]).to(device))
            rows.append(F.normalize(projected, dim=1, eps=NORM_FLOOR).cpu().numpy())
    return np.nan_to_num(np.concatenate(rows), posinf=0.0, neginf=0.0)


def chosen_device(name: str) -> torch.device:
    """Return the device of this name.

    Raises:
      ConfigError: a GPU is requested, and this machine has none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU that torch can use; got none. Set --device cpu.")
    return device_named(name)
