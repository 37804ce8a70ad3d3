"""Embeddings by both towers of an exported CLIP model: images, captions, or pairs of both.

Rows are unit embeddings in the space that both towers share, so that the inner product of an image's and a
caption's embedding is their cosine. The row of each caption's image is written with the embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError, DataError, show_on_a_terminal
from trainers.data.channels import with_channels
from trainers.data.dataset import AnyRecords, Dataset
from trainers.data.decoding import MAX_IMAGE_PIXELS
from trainers.data.loading import load_dataset
from trainers.data.pair_options import PairOptions
from trainers.data.pairs import ImageTextRecords, caption_fault
from trainers.data.stored_images import Images, digests_of, select
from trainers.embed.embedding_parts import ROWS_PER_PART, Embedded, PartFolder
from trainers.evaluation.features import finite_features, read_images
from trainers.evaluation.linear_probe import Features
from trainers.evaluation.pair_scores import PAIRS_AT_ONCE
from trainers.evaluation.retrieval import embed_in_batches
from trainers.models.clip.clip_encoder import ImageTextEncoder
from trainers.views.image_views import normalise

IMAGES, TEXTS = "image_embedding", "text_embedding"
"""Columns of the embeddings of a CLIP model."""
Names = Sequence[str | int]
"""One name per image."""
EmbedTexts = Callable[[Sequence[str]], Embedded]
"""Function that computes the embeddings of captions."""


def embed_dataset(
    parts: PartFolder, dataset: Dataset, embed: Callable[[Images], Features], column: str = IMAGES
) -> None:
    """Embed all images of a data set in parts: one row per image, with its name and class.

    Args:
      parts: the folder of the parts.
      dataset: a data set with images of the model's size; test images come after the training images.
      embed: function from images `[n, channels, height, width]` to their embeddings.
      column: the column of the embeddings.
    """

    def embed_uncut(images: Images) -> Embedded:
        return embed(images), 0

    names, labels, num_before = names_of(dataset), labels_of(dataset), 0
    for images in (split.images for split in parts_of(dataset)):
        digests = digests_of(images)
        for start in range(0, len(digests), ROWS_PER_PART):
            rows = np.arange(start, min(start + ROWS_PER_PART, len(digests)))
            columns = {"id": [names[row] for row in (num_before + rows).tolist()]}
            if labels is not None:
                columns["label"] = labels[num_before + rows].tolist()
            part = select(images, rows)
            parts.store(column, columns, digests[rows].tolist(), partial(embed_uncut, part))
        num_before += len(digests)


def embed_captions(
    parts: PartFolder, captions: Iterable[tuple[int, str]], names: Names | None, embed: EmbedTexts
) -> None:
    """Embed captions in parts: one row per caption, with its image's name and row if it belongs to an image.

    Args:
      parts: the folder of the parts.
      captions: captions, each after the row of its image.
      names: the images' names; None if the captions belong to no images.
      embed: function from captions to their embeddings.
    """
    captions = iter(captions)
    while part := list(islice(captions, ROWS_PER_PART)):
        owners, texts = zip(*part, strict=True)
        columns = {} if names is None else {"id": [names[row] for row in owners], "text_owner": owners}
        parts.store(TEXTS, columns, texts, partial(embed, texts))


def owned_captions(dataset: Dataset) -> Iterator[tuple[int, str]]:
    """Yield all captions of a data set, each after the row of its image."""
    splits = [split for split in parts_of(dataset) if isinstance(split, ImageTextRecords)]
    for row, captions in enumerate(chain.from_iterable(split.captions for split in splits)):
        yield from ((row, caption) for caption in captions)


def embed_with_image_tower(
    encoder: ImageTextEncoder, images: Images, batch_size: int = PAIRS_AT_ONCE
) -> Features:
    """Return the unit embeddings of images, float32 `[num_images, dim]`.

    Args:
      encoder: an exported encoder, on any device.
      images: uint8 `[num_images, 3, height, width]` of the model's size, not normalised.
      batch_size: images passed at once.
    """
    device = next(encoder.parameters()).device

    def embed(rows: slice) -> torch.Tensor:
        return encoder.embed_images(normalise(read_images(images, rows).to(device)))

    return finite_features(embed_in_batches(embed, images.shape[0], batch_size))


def embed_texts(encoder: ImageTextEncoder, captions: Sequence[str], batch_size: int) -> Embedded:
    """Return the unit embeddings of captions, float32 `[num_texts, dim]`, and the number of cut captions."""
    device, num_truncated = next(encoder.parameters()).device, 0

    def embed(rows: slice) -> torch.Tensor:
        nonlocal num_truncated
        tokenized = encoder.tokenizer(captions[rows])
        num_truncated += tokenized.num_truncated
        return encoder.embed_texts(tokenized.tokens.to(device))

    return finite_features(embed_in_batches(embed, len(captions), batch_size)), num_truncated


def parts_of(dataset: Dataset) -> list[AnyRecords]:
    """Return the training records, and the test records if there are any."""
    return [dataset.train] if dataset.test is None else [dataset.train, dataset.test]


def labels_of(dataset: Dataset) -> NDArray[Any] | None:
    """Return every image's class, by name if your own classes have names; None if an image has no label."""
    parts = [part.labels for part in parts_of(dataset)]
    labels = [part for part in parts if part is not None]
    num_images = sum(part.images.shape[0] for part in parts_of(dataset))
    if len(labels) < len(parts) or sum(map(len, labels)) != num_images:
        return None
    numbers = np.concatenate(labels)
    if not dataset.class_names or dataset.is_builtin:
        return numbers
    return np.array([dataset.class_names[number] for number in numbers.tolist()], dtype=object)


def names_of(dataset: Dataset) -> Names:
    """Return the owner's name of each image, else its position; test images come after training images."""
    return dataset.names or range(sum(part.images.shape[0] for part in parts_of(dataset)))


def images_of(dataset: Dataset, channels: int) -> NDArray[np.uint8]:
    """Return all images in memory, with 1 or 3 channels, test images after the training images."""
    parts = [read_images(part.images, slice(None)).numpy() for part in parts_of(dataset)]
    return np.concatenate([with_channels(part, channels) for part in parts])


def read_captions(path: Path) -> list[str]:
    """Return the captions of a file in their order, none of them empty.

    Args:
      path: one caption per line, UTF-8.

    Raises:
      ConfigError: the file's suffix is that of a table.
      DataError: the file cannot be read, or captions are empty (the message states how many).
    """
    if path.suffix in (".csv", ".tsv", ".parquet"):
        raise ConfigError(f"--texts must be a file with one caption per line, not a table; got {path}")
    try:
        content = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise DataError(f"the file of captions must be readable; got {path} ({error.strerror})") from error
    captions = [line.removesuffix("\r") for line in content.removesuffix("\n").split("\n")]
    num_faults = sum(bool(caption_fault([text])) for text in captions)
    if num_faults:
        raise DataError(
            f"captions must not be empty; {num_faults} of the {len(captions)} in {path} are not valid. "
            "Repair or remove them, so that each row of the output is a line of the file."
        )
    return captions


def load_at_size(
    name: str,
    size: tuple[int, int],
    options: PairOptions,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    index_folder: Path | None = None,
) -> Dataset:
    """Load a data set with its images in the model's size, (height, width).

    Raises:
      ConfigError: the images would have to be stretched to a shape that is not square.
      DataError: as in `load_dataset`.
    """
    height, width = size
    dataset = load_dataset(
        name,
        image_size=height if height == width else None,
        pairs=options.fitting(name),
        max_image_pixels=max_image_pixels,
        index_folder=index_folder,
    )
    show_on_a_terminal(dataset.reading_counts)
    if dataset.image_shape[1:] != (height, width):
        raise ConfigError(
            f"the model reads images of {height}×{width} pixels, but images are resized only to squares; got "
            f"{dataset.image_shape[1]}×{dataset.image_shape[2]}. Resize them beforehand."
        )
    return dataset
