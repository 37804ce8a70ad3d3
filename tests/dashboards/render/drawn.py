"""What a specification draws: its panels, its words and where they stand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import vl_convert

from dashboards.compose.content import Content
from dashboards.render.specification import VEGA_LITE, page_specification, print_specification

Json = dict[str, Any]
_NARROW, _WIDE = set("ijlftr.,:;'|()\u00a0 "), set("mwMW@%→—")


@dataclass(frozen=True)
class Word:
    """Lines of text with the box they take, in points from the upper left corner of the page."""

    text: str
    role: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Word) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def panels_of(content: Content) -> list[Json]:
    """The views of a figure that hold curves."""

    def views(node: Any) -> Iterator[Json]:
        if isinstance(node, dict):
            if "layer" in node and any("value" in row for row in node["data"]["values"]):
                yield node
            for child in node.values():
                yield from views(child)
        elif isinstance(node, list):
            for child in node:
                yield from views(child)

    return list(views(page_specification(content)))


def points(panel: Json, curve: str) -> list[Json]:
    return [row for row in panel["data"]["values"] if row["curve"] == curve]


def axis(panel: Json, channel: str) -> Json:
    """The encoding of x or y that the layers of a panel share."""
    found = [layer["encoding"][channel] for layer in panel["layer"] if channel in layer["encoding"]]
    shared = [{"axis": one["axis"], "scale": one["scale"]} for one in found]
    assert all(one == shared[0] for one in shared)
    return shared[0]


def axis_titles(content: Content, channel: str = "y") -> list[str]:
    return [axis(panel, channel)["axis"]["title"] for panel in panels_of(content)]


def words_of(content: Content) -> tuple[list[Word], float, float]:
    """All text of the printed figure, and the width and height of the page."""
    scene = vl_convert.vegalite_to_scenegraph(print_specification(content), vl_version=VEGA_LITE)
    left, top = scene["origin"]
    return list(_words(scene["scenegraph"], left, top)), scene["width"], scene["height"]


def said(content: Content) -> str:
    """The same as one text, hard spaces as spaces."""
    return " ".join(" ".join(word.text for word in words_of(content)[0]).replace("\u00a0", " ").split())


def check_words_stay_apart(content: Content) -> None:
    """Fail where words leave the page or cover one another."""
    words, width, height = words_of(content)
    for word in words:
        assert word.left >= -1, word
        assert word.right <= width + 1, word
        assert word.top >= -1, word
        assert word.bottom <= height + 1, word
    assert not [(a, b) for i, a in enumerate(words) for b in words[:i] if a.overlaps(b)]


def _words(mark: Json, x: float, y: float) -> Iterator[Word]:
    for item in mark["items"]:
        if mark["marktype"] == "group":
            for inner in item["items"]:
                yield from _words(inner, x + item.get("x", 0), y + item.get("y", 0))
        elif mark["marktype"] == "text" and item.get("opacity", 1) and item.get("text"):
            yield _word(item, mark.get("role", "mark"), x + item.get("x", 0), y + item.get("y", 0))


def _word(item: Json, role: str, x: float, y: float) -> Word:
    text = item["text"]
    lines = text if isinstance(text, list) else str(text).split("\n")
    size = item["fontSize"]
    width = max(_width(line) for line in lines) * size * (1.06 if item.get("fontWeight") == "bold" else 1)
    height = size + (len(lines) - 1) * item.get("lineHeight", size + 2)
    if item.get("angle"):  # upright titles of axes, middle at (x, y)
        return Word(" ".join(lines), role, x - size, y - width / 2, x, y + width / 2)
    left = x - width * {"left": 0, "center": 0.5, "right": 1}[item.get("align", "left")]
    first = {"top": 0.0, "middle": 0.5, "bottom": 1.0}.get(item.get("baseline", "bottom"), 1.0)
    top = y - size * first
    return Word(" ".join(lines), role, left, top, left + width, top + height)


def _width(line: str) -> float:
    """In units of the font size; about that of DejaVu Sans."""
    return sum(0.36 if c in _NARROW else 0.92 if c in _WIDE else 0.7 if c.isupper() else 0.61 for c in line)
