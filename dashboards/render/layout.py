"""Where panels and legends stand on the page, in inches: the same for print and for the browser."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from dashboards.compose.content import Content, Panel

_WIDTH, _HEIGHT = 3.95, 3.3
_GAP_X, _GAP_Y = 0.95, 0.85
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.85, 0.2, 0.12, 0.65
_WIDE, _USUAL, _NARROW = 0.115, 0.088, 0.052  # of one character
_LEGEND_LINE = 0.215
_LEGEND_CHARACTERS = 38


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle, in inches from the lower left corner of the drawing."""

    left: float
    bottom: float
    width: float
    height: float


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A drawing: one box for each panel of each row, one for each legend."""

    width: float
    height: float
    panels: list[list[Box]]
    legends: dict[str, Box]


def layout_of(content: Content) -> Layout:
    """Returns the places of a figure's panels and legends.

    Legends stand in the free place of the last row where there is one that holds them, else beside.
    """
    if not content.rows:
        return Layout(width=0.0, height=0.0, panels=[], legends={})
    labels = [name for panel in content.panels if panel.axis.categorical for _, name in panel.axis.ticks]
    left = max([_LEFT, *(0.3 + text_width(line) for name in labels for line in wrapped(name))])
    gap_x = _GAP_X
    if all(panel.axis.categorical for panel in content.panels):
        gap_x = 0.35
    if _names_inside(content):
        gap_x = max(left, _GAP_X)
    heights = [max(map(_panel_height, row)) for row in content.rows]
    columns = max(map(len, content.rows))
    right_of_panels = left + columns * _WIDTH + (columns - 1) * gap_x
    above = sum(heights[:-1]) + len(heights[:-1]) * _GAP_Y
    legends = {heading: _legend_size(heading, entries) for heading, entries in content.legends().items()}
    wanted_width = max((width for width, _ in legends.values()), default=0.0)
    wanted_height = sum(height for _, height in legends.values())
    free = columns - len(content.rows[-1])
    free_left = left + (columns - free) * (_WIDTH + gap_x)
    if free and right_of_panels - free_left >= wanted_width:
        legend_left, top_of_legends = free_left, above
        width = right_of_panels + _RIGHT
        heights[-1] = max(heights[-1], wanted_height)
    else:
        legend_left, top_of_legends = right_of_panels + 0.3, 0.0
        width = legend_left + wanted_width + 0.1
        heights[-1:] = [max(heights[-1], wanted_height - above)]
    height = _TOP + sum(heights) + (len(heights) - 1) * _GAP_Y + _BOTTOM
    return Layout(
        width=width,
        height=height,
        panels=_panel_boxes(content, heights, left, gap_x, height - _TOP),
        legends=_legend_boxes(legends, legend_left, height - _TOP - top_of_legends),
    )


def text_width(text: str) -> float:
    """A safe width of one line at the size of tick labels and legends."""
    return sum(
        _WIDE if c.isupper() or c in "mw@%→" else _NARROW if c in "ijl.,:;'|() " else _USUAL for c in text
    )


def wrapped(name: str) -> list[str]:
    """A category's name in lines that leave room for the panel."""
    return textwrap.wrap(name, 30, break_on_hyphens=False) or [""]


def legend_text(label: str) -> str:
    """A legend's entry, broken into lines."""
    return "\n".join(textwrap.wrap(label, _LEGEND_CHARACTERS, break_on_hyphens=False))


def _names_inside(content: Content) -> bool:
    """Whether a panel that is not the first of its row has names of its own on its side."""
    rows = [[panel.axis for panel in row] for row in content.rows]
    return any(axis.categorical and axis.ticks != row[0].ticks for row in rows for axis in row[1:]) or any(
        any(axis.categorical for axis in row) and not all(axis.categorical for axis in row) for row in rows
    )


def _panel_height(panel: Panel) -> float:
    if not panel.axis.categorical:
        return _HEIGHT
    lines = sum(max(len(wrapped(name)), 1) for _, name in panel.axis.ticks)
    per_name = max(0.34, 0.13 * len(panel.curves) + 0.16)
    return max(1.5, per_name * len(panel.axis.ticks) + 0.12 * (lines - len(panel.axis.ticks)))


def _panel_boxes(
    content: Content, heights: list[float], left: float, gap_x: float, top: float
) -> list[list[Box]]:
    found = []
    for row, height in zip(content.rows, heights, strict=True):
        top -= height
        # A row keeps its own height where only the legends made it higher.
        own = max(map(_panel_height, row))
        found.append(
            [
                Box(left=left + i * (_WIDTH + gap_x), bottom=top + height - own, width=_WIDTH, height=own)
                for i in range(len(row))
            ]
        )
        top -= _GAP_Y
    return found


def _legend_size(heading: str, entries: list) -> tuple[float, float]:
    lines = [line for entry in entries for line in legend_text(entry.label).split("\n")]
    width = max(text_width(line) for line in (heading, *lines)) + 0.65
    return width, _LEGEND_LINE * (len(lines) + 1) + 0.2


def _legend_boxes(sizes: dict[str, tuple[float, float]], left: float, top: float) -> dict[str, Box]:
    found = {}
    for heading, (width, height) in sizes.items():
        found[heading] = Box(left=left, bottom=top - height, width=width, height=height)
        top -= height
    return found
