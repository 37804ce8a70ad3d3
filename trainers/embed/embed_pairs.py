"""Embeddings by both towers of an exported CLIP model: images, captions, or pairs of both.

Rows are unit embeddings in the space that both towers share, so that the inner product of an image's and a
caption's embedding is their cosine. The row of each caption's image is written with the embeddings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError, DataError, show_on_a_terminal
from trainers.data.channels import with_channels
from trainers.data.dataset import AnyRecords, Dataset, captions_of
from trainers.data.decoding import MAX_IMAGE_PIXELS
from trainers.data.loading import load_dataset
from trainers.data.pair_options import PairOptions
from trainers.data.pairs import caption_fault
from trainers.data.stored_images import Images
from trainers.evaluation.features import read_images
from trainers.evaluation.linear_probe import Features
from trainers.evaluation.pair_scores import PAIRS_AT_ONCE
from trainers.evaluation.retrieval import embed_in_batches
from trainers.models.clip.clip_encoder import ImageTextEncoder
from trainers.views.image_views import normalise

Names = NDArray[Any]
"""One name per image, `[num_images]`: strings or integers."""


@dataclass(frozen=True, kw_only=True)
class Embeddings:
    """A model's embeddings of images, or a CLIP model's embeddings of images and captions.

    Attributes:
      ids: `[num_images]`, the images' names; None if no images were embedded.
      labels: `[num_images]`, the images' classes from `labels_of`; None if they have none.
      images: float32 `[num_images, dim]`, or None.
      image_column: name of the image embeddings' column in a parquet file; an npz adds an s.
      texts: float32 `[num_texts, dim]`, or None.
      text_owners: int64 `[num_texts]`, the row of each caption's image; None if the captions belong to no
        images.
      num_truncated: number of captions cut to the context length. **Private-only**: it depends on captions.
    """

    ids: Names | None = None
    labels: NDArray[Any] | None = None
    images: Features | None = None
    image_column: str = "image_embedding"
    texts: Features | None = None
    text_owners: NDArray[np.int64] | None = None
    num_truncated: int = dataclasses.field(default=0, repr=False)

    def arrays(self) -> dict[str, NDArray[Any] | None]:
        """Return the arrays of an npz file by name; None for missing ones."""
        return {
            "ids": self.ids,
            "labels": self.labels,
            f"{self.image_column}s": self.images,
            "text_embeddings": self.texts,
            "text_owners": self.text_owners,
        }

    def rows(self) -> list[dict[str, NDArray[Any]]]:
        """Return two groups of columns of a parquet file: one row per image, then one row per caption.

        A caption's row has the id of its image and no image embedding.
        """
        row_groups: list[dict[str, NDArray[Any]]] = []
        if self.images is not None and self.ids is not None:
            class_columns = {} if self.labels is None else {"label": self.labels}
            row_groups.append({"id": self.ids, **class_columns, self.image_column: self.images})
        if self.texts is not None:
            owner_columns: dict[str, NDArray[Any]] = {}
            if self.text_owners is not None and self.ids is not None:
                owner_columns = {"id": self.ids[self.text_owners], "text_owner": self.text_owners}
            row_groups.append(owner_columns | {"text_embedding": self.texts})
        return row_groups


def embed_source(encoder: ImageTextEncoder, dataset: Dataset, batch_size: int = PAIRS_AT_ONCE) -> Embeddings:
    """Return the embeddings of all images of a data set, and of all their captions if it has captions.

    Args:
      encoder: an exported encoder, on any device.
      dataset: a data set with images of the model's size; test images come after the training images.
      batch_size: images or captions passed at once; affects results only by rounding.
    """
    images, captions, owners = [], list[str](), list[NDArray[np.int64]]()
    num_before = 0
    for part in parts_of(dataset):
        images.append(embed_with_image_tower(encoder, part.images, batch_size))
        owned = captions_of(part)
        if owned is not None:
            texts, rows = owned
            captions += texts
            owners.append(rows + num_before)
        num_before += part.images.shape[0]
    embeddings = Embeddings(ids=names_of(dataset), labels=labels_of(dataset), images=np.concatenate(images))
    if not captions:
        return embeddings
    embeddings = dataclasses.replace(embeddings, text_owners=np.concatenate(owners))
    return embed_texts(encoder, captions, embeddings, batch_size)


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

    return _to_finite_array(embed_in_batches(embed, images.shape[0], batch_size))


def embed_texts(
    encoder: ImageTextEncoder, captions: Sequence[str], embeddings: Embeddings, batch_size: int
) -> Embeddings:
    """Return `embeddings` together with those of the captions, in order, and the number of cut captions."""
    device, num_truncated = next(encoder.parameters()).device, 0

    def embed(rows: slice) -> torch.Tensor:
        nonlocal num_truncated
        tokenized = encoder.tokenizer(captions[rows])
        num_truncated += tokenized.num_truncated
        return encoder.embed_texts(tokenized.tokens.to(device))

    texts = _to_finite_array(embed_in_batches(embed, len(captions), batch_size))
    return dataclasses.replace(embeddings, texts=texts, num_truncated=num_truncated)


def _to_finite_array(embedded: torch.Tensor) -> Features:
    finite: Features = np.nan_to_num(embedded.cpu().numpy(), posinf=0.0, neginf=0.0)
    return finite


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
    if dataset.names is None:
        return np.arange(sum(part.images.shape[0] for part in parts_of(dataset)))
    return np.array(dataset.names, dtype=object if isinstance(dataset.names[0], str) else None)


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
    name: str, size: tuple[int, int], options: PairOptions, max_image_pixels: int = MAX_IMAGE_PIXELS
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
    )
    show_on_a_terminal(dataset.reading_counts)
    if dataset.image_shape[1:] != (height, width):
        raise ConfigError(
            f"the model reads images of {height}×{width} pixels, but images are resized only to squares; got "
            f"{dataset.image_shape[1]}×{dataset.image_shape[2]}. Resize them beforehand."
        )
    return dataset
