"""Examples of retrieval: queries with their nearest neighbours, as tiles on a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dashboards.compose.content import Content, Table

Embeddings = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One image or caption of the grid.

    Attributes:
      row: its place in the data set.
      text: its class or caption, or what else is known of it; "" for nothing.
      image: uint8 `[channels, height, width]`; None of a caption.
      similarity: cosine to the query; None of the query.
      is_right: whether it has the query's class, or is its pair; None where that is not known.
    """

    row: int
    text: str
    image: NDArray[np.uint8] | None
    similarity: float | None = None
    is_right: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Rows of tiles: a query, then its neighbours, the nearest first.

    Attributes:
      title, subtitle, notes: words around them.
      rows: of tiles.
    """

    title: str
    subtitle: str
    rows: Sequence[Sequence[Tile]]
    notes: Sequence[str]


def nearest(
    queries: Embeddings, candidates: Embeddings, num_neighbors: int, own: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the nearest candidates of each query by cosine and their similarities, `[queries, neighbors]`.

    Args:
      queries: `[queries, dim]`.
      candidates: `[candidates, dim]`.
      num_neighbors: fewer than there are candidates.
      own: `[queries]`, the candidate that each query is itself and never finds; None where it is none.

    >>> points = np.eye(3, dtype=np.float32)[[0, 0, 1]]
    >>> nearest(points[:1], points, 1, own=np.array([0]))[0].tolist()
    [[1]]
    """
    similarities = _unit(queries) @ _unit(candidates).T
    if own is not None:
        similarities[np.arange(len(queries)), own] = -np.inf
    order = np.argsort(-similarities, axis=1, kind="stable")[:, :num_neighbors]
    return order, np.take_along_axis(similarities, order, axis=1)


def content_of_gallery(gallery: Gallery) -> tuple[Content, pd.DataFrame]:
    """Return the table of a gallery, and its numbers: one row per query and neighbour."""
    depth = max(len(row) for row in gallery.rows) - 1
    heading = ["Query", *(f"Neighbour {rank}" for rank in range(1, depth + 1))]
    table = Table(heading=heading, rows=[[_cell(tile) for tile in row] for row in gallery.rows])
    numbers = [
        {
            "query": row[0].row,
            "query_text": row[0].text,
            "rank": rank,
            "neighbor": tile.row,
            "neighbor_text": tile.text,
            "similarity": tile.similarity,
            "is_right": tile.is_right,
        }
        for row in gallery.rows
        for rank, tile in enumerate(row[1:], start=1)
    ]
    content = Content(
        title=gallery.title,
        subtitle=gallery.subtitle,
        rows=[],
        facts=table,
        tables=[("Queries and their neighbours, with their cosines", table)],
        remarks=list(gallery.notes),
    )
    return content, pd.DataFrame(numbers)


def _cell(tile: Tile) -> str:
    words = f"{tile.text or 'image'}, row {tile.row}"
    return words if tile.similarity is None else f"{words}: {tile.similarity:.3f}"


def _unit(rows: Embeddings) -> Embeddings:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    found: Embeddings = rows / np.maximum(norms, np.finfo(np.float32).tiny)
    return found
