"""A gallery as pictures and as a page: tiles on a grid, images inside the files, nothing fetched."""

from __future__ import annotations

import base64
import html
import io
import textwrap

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dashboards.compose.gallery import Gallery, Tile, content_of_gallery
from dashboards.render.document import DRAWINGS, document_of, drawing_of_specification, header_of
from dashboards.render.pictures import pictures_of_specification
from dashboards.render.specification import Json, around, page_around
from dashboards.render.tables import boxed

_SIDE, _GAP, _BELOW, _AFTER_QUERY = 72, 10, 30, 16
_FRAMES = {True: "#009E73", False: "#CC79A7", None: "#BBBBBB"}
_LETTERS, _CAPTION_LINES = 14, 5


def gallery_pictures(gallery: Gallery) -> dict[str, bytes]:
    """Return the pictures by the ending of their files: ".png", ".svg" and ".pdf"."""
    width = _left(len(gallery.rows[0]))
    notes = list(gallery.notes)
    return pictures_of_specification(
        around(_grid(gallery), title=gallery.title, subtitle=gallery.subtitle, notes=notes, width=width)
    )


def gallery_page(gallery: Gallery, name: str) -> str:
    """Return a self-contained page of a gallery.

    Args:
      gallery: what is shown.
      name: of the pictures that a reader saves.
    """
    content, _ = content_of_gallery(gallery)
    (heading, table), *_ = content.tables
    said = f"{gallery.title}. What is on each tile stands in the table below."
    drawing = drawing_of_specification(page_around(_grid(gallery)), name, said)
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in gallery.notes)
    head = header_of(gallery.title, f'<p class="soft">{html.escape(gallery.subtitle)}</p>')
    shown = f"<h2>{html.escape(heading)}</h2>{boxed(table, heading)}"
    return document_of(
        gallery.title, f'{head}<main id="main">{drawing}{notes}{shown}</main>', scripts=(DRAWINGS,)
    )


def _grid(gallery: Gallery) -> Json:
    """Return the tiles as a view of Vega-Lite."""
    tiles = [
        _tile(tile, column, number)
        for number, row in enumerate(gallery.rows)
        for column, tile in enumerate(row)
    ]
    place: Json = {
        "x": {"field": "x", "type": "quantitative", "scale": None, "axis": None},
        "y": {"field": "y", "type": "quantitative", "scale": None, "axis": None},
    }
    ends: Json = {"x2": {"field": "right"}, "y2": {"field": "bottom"}}
    middle = place | {"x": place["x"] | {"field": "middle"}}
    frame = {"color": {"field": "frame", "scale": None, "legend": None}}
    words = {"type": "text", "fontSize": 8.5, "color": "#222222", "lineBreak": "\n", "lineHeight": 10.5}
    return {
        "data": {"values": tiles},
        "layer": [
            {
                "transform": [{"filter": "isValid(datum.url)"}],
                "mark": {
                    "type": "image",
                    "width": _SIDE,
                    "height": _SIDE,
                    "align": "left",
                    "baseline": "top",
                },
                "encoding": place | {"url": {"field": "url"}},
            },
            {
                "mark": {"type": "rect", "filled": False, "strokeWidth": 2, "fillOpacity": 0},
                "encoding": place | ends | frame,
            },
            {
                "mark": words | {"baseline": "top", "align": "center"},
                "encoding": middle | {"y": place["y"] | {"field": "below"}, "text": {"field": "text"}},
            },
            {
                "transform": [{"filter": "isValid(datum.caption)"}],
                "mark": words | {"baseline": "top", "align": "center"},
                "encoding": middle | {"y": place["y"] | {"field": "inside"}, "text": {"field": "caption"}},
            },
        ],
        "width": _left(len(gallery.rows[0])),
        "height": len(gallery.rows) * (_SIDE + _BELOW),
    }


def _tile(tile: Tile, column: int, number: int) -> Json:
    x, y = _left(column), number * (_SIDE + _BELOW)
    alone = tile.similarity is None
    text = "query" if alone and tile.image is None else "\n".join(_lines(tile))
    return {
        "x": x,
        "y": y,
        "right": x + _SIDE,
        "bottom": y + _SIDE,
        "middle": x + _SIDE / 2,
        "below": y + _SIDE + 4,
        "inside": y + 6,
        "frame": "#222222" if alone else _FRAMES[tile.is_right],
        "text": text,
        "url": None if tile.image is None else data_uri(tile.image),
        "caption": _wrapped(tile.text) if tile.image is None else None,
    }


def _lines(tile: Tile) -> list[str]:
    first = textwrap.shorten(tile.text, _LETTERS + 2, placeholder="…") or tile.text[: _LETTERS + 1]
    return [first, "query" if tile.similarity is None else f"{tile.similarity:.2f}"]


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _LETTERS, max_lines=_CAPTION_LINES, placeholder="…"))


def _left(column: int) -> float:
    return column * (_SIDE + _GAP) + (_AFTER_QUERY if column else 0)


def data_uri(image: NDArray[np.uint8]) -> str:
    """Return an image as a PNG inside an address, every pixel of a small one repeated to keep it sharp.

    Args:
      image: uint8 `[channels, height, width]` of one or three channels.
    """
    factor = max(1, -(-2 * _SIDE // max(image.shape[1:])))
    pixels = image.repeat(factor, axis=1).repeat(factor, axis=2)
    drawn = Image.fromarray(pixels[0] if len(pixels) == 1 else np.moveaxis(pixels[:3], 0, -1))
    file = io.BytesIO()
    drawn.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
