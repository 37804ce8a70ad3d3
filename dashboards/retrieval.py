"""Examples of what an exported model finds alike: queries of a public data set with their nearest neighbours.

Images of private data are never shown, whatever the model: a data set is one of those that are built in, or
generated. Neither is what a model tells that was trained on private data without a proven guarantee: its
neighbours depend on those data. Of a model with a guarantee they are post-processing, and cost nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dashboards.compose.gallery import Embeddings, Gallery, Tile, content_of_gallery, nearest
from dashboards.compose.names import dataset_title, value_text
from dashboards.errors import DashboardError
from dashboards.figures import write_tables
from dashboards.render.gallery import gallery_page, gallery_pictures
from dpgcl_core.release.statement import PROVEN
from trainers.data.channels import with_channels
from trainers.data.dataset import Dataset, captions_of
from trainers.data.loading import BUILTIN_DATASETS, is_builtin_name, load_dataset
from trainers.embed.images import embed_images
from trainers.embed.pairs import embed_source, images_of
from trainers.export.description import CLIP, ModelDescription, read_description
from trainers.export.folder import load_clip, load_encoder

Images = NDArray[np.uint8]
MOST_ROWS = 5000
"""Neighbours are looked for among so many records: of the test split where there is one, the first ones."""


def draw_retrieval(
    model: Path,
    dataset: str,
    folder: Path,
    *,
    num_queries: int = 6,
    num_neighbors: int = 6,
    own_network: str | None = None,
) -> list[Path]:
    """Write queries with their nearest neighbours (`retrieval.png`, …) and return the paths of the files.

    Args:
      model: folder of an exported model; of a CLIP model the queries are captions, where the data have some.
      dataset: name of a built-in public data set.
      folder: created if missing.
      num_queries: spread over the classes, the same at every call.
      num_neighbors: of each.
      own_network: the `package.module:factory` that the model may name.

    Raises:
      DashboardError: the data are not public, or the model is of private data without a proven guarantee.
      ConfigError, StorageError, DataError: the model or the data are unusable.
      OSError: the folder cannot be written.
    """
    check_public(dataset, read_description(model))
    gallery = gallery_of(model, dataset, num_queries, num_neighbors, own_network)
    content, numbers = content_of_gallery(gallery)
    files = gallery_pictures(gallery) | {".html": gallery_page(gallery, "retrieval").encode()}
    folder.mkdir(parents=True, exist_ok=True)
    for ending, written in files.items():
        (folder / f"retrieval{ending}").write_bytes(written)
    return [folder / f"retrieval{each}" for each in files] + write_tables(
        content, numbers, folder, "retrieval"
    )


def check_public(dataset: str, model: ModelDescription) -> None:
    """Refuse images that are not known to be public, and models whose neighbours would tell of private data.

    Raises:
      DashboardError: as said.
    """
    if not is_builtin_name(dataset):
        raise DashboardError(
            "retrieval examples show images, so they are of public data alone: give --dataset one of "
            f"{', '.join(sorted(BUILTIN_DATASETS))} or shapes:NUM, and not files of your own"
        )
    if model.data_are_private and model.guarantee_label != PROVEN:
        raise DashboardError(
            f"the model was trained on private data and its guarantee is {model.guarantee_label!r}: its "
            "neighbours would tell of them; give a model with a proven guarantee"
        )


def gallery_of(
    model: Path, dataset: str, num_queries: int, num_neighbors: int, own_network: str | None = None
) -> Gallery:
    """Return the queries and their neighbours, as `draw_retrieval`, of data that were checked."""
    description = read_description(model)
    data = load_dataset(dataset, image_size=description.image_shape[1])
    split = "training" if data.test is None else "test"
    records = data.train if data.test is None else data.test
    records = records.take(np.arange(min(len(records), MOST_ROWS)))
    if len(records) <= max(num_queries, num_neighbors) or min(num_queries, num_neighbors) < 1:
        raise DashboardError(
            f"queries and neighbours must be at least 1 and fewer than the {len(records)} records; got "
            f"{num_queries} and {num_neighbors}"
        )
    alone = dataclasses.replace(data, train=records, test=None)
    if description.kind == CLIP:
        rows, queries = _by_towers(model, alone, num_queries, num_neighbors)
    else:
        rows, queries = _by_images(model, alone, num_queries, num_neighbors, own_network), "images"
    return Gallery(
        title=f"{dataset_title(dataset)}: nearest neighbours by {description.network}, "
        f"{value_text(description.method)}",
        subtitle=f"Queries are {queries}; neighbours by cosine, among {len(records)} {split} images",
        rows=rows,
        notes=_notes(description, data, split),
    )


def _by_images(
    model: Path, data: Dataset, num_queries: int, num_neighbors: int, own_network: str | None
) -> list[list[Tile]]:
    encoder, description = load_encoder(model, own_network=own_network)
    images = images_of(data.train)
    found = embed_images(encoder, with_channels(images, description.image_shape[0]))
    return _of_images(data, images, found, num_queries, num_neighbors)


def _of_images(
    data: Dataset, images: Images, embeddings: Embeddings, num_queries: int, num_neighbors: int
) -> list[list[Tile]]:
    """Return rows of tiles in which an image asks for others."""
    labels, names = data.train.labels, _names(data)
    queries = chosen(labels, len(images), num_queries)
    found, similarities = nearest(embeddings[queries], embeddings, num_neighbors, own=queries)
    rows = []
    for query, neighbors, cosines in zip(queries.tolist(), found.tolist(), similarities, strict=True):
        tiles = [Tile(row=query, text=names[query], image=images[query])]
        for row, cosine in zip(neighbors, cosines, strict=True):
            right = None if labels is None else bool(labels[row] == labels[query])
            tiles.append(
                Tile(row=row, text=names[row], image=images[row], similarity=float(cosine), is_right=right)
            )
        rows.append(tiles)
    return rows


def _by_towers(
    model: Path, data: Dataset, num_queries: int, num_neighbors: int
) -> tuple[list[list[Tile]], str]:
    """Return rows in which captions ask for images; images for images where the data have no captions."""
    encoder, _ = load_clip(model)
    images = images_of(data.train)
    found = embed_source(encoder, data, np.arange(len(images)))
    if found.images is None:
        raise DashboardError("the data hold no images")
    captions = captions_of(data.train)
    if captions is None or found.texts is None:
        return _of_images(data, images, found.images, num_queries, num_neighbors), "images"
    texts, owners = captions
    queries = chosen(None, len(texts), num_queries)
    order, similarities = nearest(found.texts[queries], found.images, num_neighbors)
    rows = []
    for query, neighbors, cosines in zip(queries.tolist(), order.tolist(), similarities, strict=True):
        tiles = [Tile(row=query, text=texts[query], image=None)]
        for row, cosine in zip(neighbors, cosines, strict=True):
            right = bool(row == owners[query])
            tiles.append(
                Tile(
                    row=row,
                    text="its image" if right else "",
                    image=images[row],
                    similarity=float(cosine),
                    is_right=right,
                )
            )
        rows.append(tiles)
    return rows, "captions"


def chosen(labels: NDArray[np.int64] | None, num_rows: int, num_queries: int) -> NDArray[np.int64]:
    """Return rows to ask with, the same at every call: in turn one of each class, where there are classes.

    >>> chosen(np.array([0, 0, 0, 1, 2]), 5, 3).tolist()
    [2, 3, 4]
    """
    order = np.random.default_rng(0).permutation(num_rows)
    if labels is None:
        return np.sort(order[:num_queries])
    seen: dict[int, int] = {}
    turn = []
    for row in order.tolist():
        label = int(labels[row])
        turn.append((seen.get(label, 0), label, row))
        seen[label] = seen.get(label, 0) + 1
    return np.array([row for _, _, row in sorted(turn)[:num_queries]])


def _names(data: Dataset) -> list[str]:
    """Return what is said below each image: its class, by name where it has one."""
    labels = data.train.labels
    if labels is None:
        return [""] * len(data.train)
    names = _without_shared_words(data.class_names)
    return [names[label] if label < len(names) else f"class {label}" for label in labels.tolist()]


def _without_shared_words(names: Sequence[str]) -> list[str]:
    """Return names without the words that all of them begin with.

    >>> _without_shared_words(["handwritten digit one", "handwritten digit two"])
    ['one', 'two']
    """
    words = [name.split() for name in names]
    same = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*words, strict=False))
    shared = len(list(same)) if len(names) > 1 else 0
    return [" ".join(each[shared:]) or name for each, name in zip(words, names, strict=True)]


def _notes(description: ModelDescription, data: Dataset, split: str) -> list[str]:
    found = [
        description.promise,
        "Queries are spread over the classes and were not chosen by their neighbours. Green: of the query's "
        "class, or its own image; pink: of another one.",
    ]
    if split == "training" and description.dataset == data.name:
        found.append("The model was trained on these images: the data set has no test images.")
    return found
