"""Content → Vega-Lite: a figure's single specification, for the page and for paper.

Lengths are in points, 1/72 inch, so that vector files have print size.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dashboards.compose.axes import round_numbers
from dashboards.compose.content import Content, Curve, Panel, Reference, Style

VEGA_LITE = "6.4"

_FONT = "DejaVu Sans, Verdana, Liberation Sans, sans-serif"  # the first has ₐ, σ and ∞ in one face
_INK, _FRAME, _GRID, _GAP = "#222222", "#555555", "#E3E3E3", "#B5B5B5"
DARK_COLOURS = {
    **{_INK: "#E6E8EB", _FRAME: "#A3ABB5", _GRID: "#30363F", _GAP: "#656D78"},
    **{"white": "#14171B", "#000000": "#FFFFFF", "#6B6B6B": "#A3A3A3"},
    **{"#0072B2": "#4C9BE8", "#5B6C8F": "#8C9DC4", "#003F5C": "#2F9BC4"},
    **{"#882255": "#D0689F", "#666633": "#A8A860"},
}
"""The replacements for colours that a dark page would hide; all others stay."""
_WIDTH, _HEIGHT = 285, 238  # size of a panel
_LEFT = 60  # space next to a panel, for its numbers
_LEAST_WIDTH = 490
_TITLE_CHARACTER, _SETTING_CHARACTER, _NOTE_CHARACTER = 7.7, 6.0, 5.5
_LINE = 15.5  # from one line of a legend to the next
_LEGEND_CHARACTERS, _CATEGORY_CHARACTERS = 38, 30
_MARGIN = 0.06  # share of the values' span, at both ends
_FADED = 0.12

_DASHES = {"solid": [1, 0], "dashed": [8, 3.5], "dotted": [1.7, 2.7], "dashdot": [10, 2.7, 1.7, 2.7]}
_PENTAGON = "M0,-1L0.951,-0.309L0.588,0.809L-0.588,0.809L-0.951,-0.309Z"
_CROSS = "M-1,-0.4L-0.6,0L-1,0.4L-0.4,1L0,0.6L0.4,1L1,0.4L0.6,0L1,-0.4L0.4,-1L0,-0.6L-0.4,-1Z"
_SHAPES = {"triangle": "triangle-up", "pentagon": _PENTAGON, "cross": _CROSS}

Json = dict[str, Any]

# Rows of data contain their own look, so that no scale must list every curve.
_COLOUR = {"color": {"field": "colour", "scale": None, "legend": None}}
_DASH = {"strokeDash": {"field": "dash", "scale": None, "legend": None}}
_SYMBOL = {
    "stroke": {"field": "colour", "scale": None, "legend": None},
    "fill": {"field": "fill", "scale": None, "legend": None},
    "shape": {"field": "shape", "scale": None, "legend": None},
    "size": {"field": "size", "type": "quantitative", "scale": None, "legend": None},
}
_MARKER: Json = {"type": "point", "opacity": 1, "strokeWidth": 1.2}


def page_specification(content: Content) -> Json:
    """Return the Vega-Lite specification of a figure's panels and legends, without text around them.

    The content must have a panel. Hovering over a point shows its mean, standard error and number of repeats.
    A click on a name in a legend fades the other curves.
    """
    return {**_PAGE, **_panels_and_legends(content)}


def print_specification(content: Content) -> Json:
    """Return the figure's specification with title, settings and notes around it."""
    width = max(_width(content), _LEAST_WIDTH)
    heading = {
        "text": _wrapped(content.title, width / _TITLE_CHARACTER),
        "subtitle": _wrapped(content.subtitle, width / _SETTING_CHARACTER),
        "anchor": "start",
        "fontSize": 12.5,
        "lineHeight": 17,
        "subtitleFontSize": 10,
        "subtitleLineHeight": 14,
        "subtitlePadding": 5,
        "offset": 14,
    }
    notes = {
        "text": [line for note in content.notes for line in _wrapped(note, width / _NOTE_CHARACTER)],
        "orient": "bottom",
        "anchor": "start",
        "fontSize": 9,
        "fontWeight": "normal",
        "lineHeight": 13.5,
        "offset": 16,
    }
    return {**_PAGE, "title": heading, "vconcat": [{**_panels_and_legends(content), "title": notes}]}


_CONFIG: Json = {
    "font": _FONT,
    "view": {"stroke": None},
    "title": {"color": _INK, "subtitleColor": _INK},
    "axis": {
        "domainColor": _FRAME,
        "tickColor": _FRAME,
        "gridColor": _GRID,
        "gridWidth": 0.7,
        "labelColor": _INK,
        "labelFontSize": 10,
        "labelFlush": False,
        "labelLimit": 0,
        "labelOverlap": False,
        "titleColor": _INK,
        "titleFontSize": 10.5,
        "titleFontWeight": "normal",
        "titlePadding": 7,
    },
}
_PAGE: Json = {
    "$schema": f"https://vega.github.io/schema/vega-lite/v{VEGA_LITE}.json",
    "background": "white",
    "padding": 12,
    "config": _CONFIG,
}


def _panels_and_legends(content: Content) -> Json:
    """Lay out panels in rows, and legends in the free cell of the last row or else next to the panels."""
    columns = max(map(len, content.rows))
    selection = {heading: f"picked_{number}" for number, heading in enumerate(content.legends(), start=1)}
    panels = []
    for number, panel in enumerate(content.panels):
        first = content.panels[number - number % columns]
        has_labels = panel is first or panel.axis.ticks != first.axis.ticks
        panels.append(_panel(panel, selection[panel.legend], has_labels=has_labels))
    views = [_legend(heading, entries, selection[heading]) for heading, entries in content.legends().items()]
    legends = {"vconcat": views, "spacing": 18}
    grid = {"columns": columns, "align": "each", "spacing": 25}
    if _legends_fit(content):
        return {"concat": [*panels, legends], **grid}
    return {"hconcat": [{"concat": panels, **grid}, legends], "spacing": 22}


def _legends_fit(content: Content) -> bool:
    """Return whether the last row of panels has a free cell for the legends."""
    return len(content.panels) % max(map(len, content.rows)) > 0


def _width(content: Content) -> float:
    """Estimate the width of the drawing, to wrap the text around it."""
    columns = max(map(len, content.rows))
    beside = 0.0 if _legends_fit(content) else _NOTE_CHARACTER * _LEGEND_CHARACTERS
    return columns * (_WIDTH + _LEFT) + beside


def _wrapped(text: str, characters: float) -> list[str]:
    """Wrap text at a number of characters, never inside an equation."""
    for sign in (" = ", " ± "):
        text = text.replace(sign, sign.replace(" ", "\u00a0"))
    return textwrap.wrap(text, int(characters))


def _panel(panel: Panel, selection: str, *, has_labels: bool) -> Json:
    """Return one pair of axes: gaps, references, bands, lines, error bars, markers, from back to front."""
    axes = _Axes(panel, has_labels=has_labels)
    faded = {"opacity": {"condition": {"param": selection, "value": 1}, "value": _FADED}}
    by_curve: Json = {"detail": [{"field": "curve"}, {"field": "part"}]}
    layers: list[Json] = []
    if panel.axis.gaps:
        mark = {"type": "rule", "color": _GAP, "strokeWidth": 0.9, "strokeDash": [1, 2]}
        gaps = {"values": [{"place": place} for place in panel.axis.gaps]}
        layers.append({"data": gaps, "mark": mark, "encoding": axes.across("place")})
    for reference in panel.references:
        layers += _reference_layers(reference, axes)
    if any(drawn.band for drawn in panel.curves):
        encoding = axes.across("place") | axes.values("low", "high") | _COLOUR | by_curve | faded
        layers.append(_layer("datum.band", {"type": "area", "fillOpacity": 0.18}, encoding))
    if any(drawn.style.dash for drawn in panel.curves) and not panel.axis.categorical:
        order = {"order": {"field": "order", "type": "quantitative"}}
        encoding = axes.across("place") | axes.values("value") | _COLOUR | _DASH | by_curve | order | faded
        layers.append(_layer("isValid(datum.dash)", {"type": "line", "strokeWidth": 1.7}, encoding))
    if any(math.isfinite(error) for drawn in panel.curves for error in drawn.standard_error):
        layers += _error_bars(panel, axes, _COLOUR | faded)
    layers += _markers(panel, axes, faded)
    points = [row for drawn in panel.curves for row in _points(drawn, axes.domain[0], panel.axis.gaps)]
    return {"data": {"values": points}, "layer": layers, "width": _WIDTH, "height": _height(panel)}


def _layer(condition: str, mark: Json, encoding: Json) -> Json:
    """Return a layer of the points of a panel that meet a condition."""
    return {"transform": [{"filter": condition}], "mark": mark, "encoding": encoding}


def _height(panel: Panel) -> float:
    if not panel.axis.categorical:
        return _HEIGHT
    num_lines = [max(len(_wrap_category(name)), 1) for _, name in panel.axis.ticks]
    per_name = max(24.5, 9.4 * len(panel.curves) + 11.5)
    return max(108.0, per_name * len(num_lines) + 9 * (sum(num_lines) - len(num_lines)))


def _wrap_category(name: str) -> list[str]:
    return textwrap.wrap(name, _CATEGORY_CHARACTERS, break_on_hyphens=False)


class _Axes:
    """The positions of one panel, with categories at the side and numbers below."""

    def __init__(self, panel: Panel, *, has_labels: bool):
        self._across, self._values = ("y", "x") if panel.axis.categorical else ("x", "y")
        self.domain = _domain(panel)
        self._across_axis = _axis_across(panel, has_labels=has_labels)
        self._values_axis = _axis_of_values(panel, self.domain)

    def across(self, field: str) -> Json:
        """Encode a field as the position on the axis that the figure is drawn against."""
        return {self._across: {"field": field, "type": "quantitative", **self._across_axis}}

    def values(self, field: str, until: str = "") -> Json:
        """Encode a field as the value, and a second field as the other end of a bar or band."""
        encoding = {self._values: {"field": field, "type": "quantitative", **self._values_axis}}
        return encoding | ({f"{self._values}2": {"field": until}} if until else {})


def _axis_across(panel: Panel, *, has_labels: bool) -> Json:
    axis, side = panel.axis, panel.axis.categorical
    names = [(place, _wrap_category(name) if side else name) for place, name in axis.ticks]
    ticks = _named_ticks(names) | {"title": None if side else axis.label, "labels": has_labels or not side}
    scale = {"domain": [axis.low, axis.high], "nice": False, "zero": False, "reverse": side}
    return {"axis": ticks, "scale": scale}


def _axis_of_values(panel: Panel, domain: list[float]) -> Json:
    scale: Json = {"domain": domain, "nice": False}
    if not panel.log_y:
        return {"axis": {"title": panel.y_label, "tickCount": 7}, "scale": scale | {"zero": False}}
    low, high = map(math.log10, domain)
    marks = [(10**place, text) for place, text in round_numbers(low, high, "log")]
    if len(marks) < 3:  # too narrow for 1, 2, 5
        marks = round_numbers(domain[0], domain[1], "linear")
    marks = [(place, text) for place, text in marks if domain[0] <= place <= domain[1]]
    return {"axis": {"title": panel.y_label, **_named_ticks(marks)}, "scale": scale | {"type": "log"}}


def _named_ticks(names: Sequence[tuple[float, str | list[str]]]) -> Json:
    """Label ticks at these positions with these names."""
    places = [place for place, _ in names]
    texts = json.dumps([name for _, name in names], ensure_ascii=False)
    return {"values": places, "labelExpr": f"{texts}[indexof({json.dumps(places)}, datum.value)]"}


def _domain(panel: Panel) -> list[float]:
    """Return the range of the values: all means, error bars and references, with a margin."""
    points = [pair for drawn in panel.curves for pair in zip(drawn.mean, drawn.standard_error, strict=True)]
    points += [(reference.mean, reference.standard_error) for reference in panel.references]
    ends = [end for mean, error in points for end in (mean, mean - error, mean + error)]
    ends = [end for end in ends if math.isfinite(end) and (end > 0 or not panel.log_y)]
    if not ends:
        return [0.1, 1.0]
    low, high = min(ends), max(ends)
    if panel.log_y:
        factor = 10 ** (_MARGIN * math.log10(high / low) or 0.1)
        return [low / factor, high * factor]
    if (missing := panel.least_span - (high - low)) > 0:
        low, high = _widen(low, high, missing)
    margin = _MARGIN * (high - low) or 0.05 * abs(high) or 1.0
    return [low - margin, high + margin]


def _widen(low: float, high: float, missing: float) -> tuple[float, float]:
    """Widen a range of per cents at both ends, or at only one end if the other would leave 0 to 100."""
    down = min(missing / 2, max(low, 0.0))
    up = min(missing - down, max(100.0 - high, 0.0))
    return low - min(max(down, missing - up), max(low, 0.0)), high + up


def _points(curve: Curve, least: float, gaps: Sequence[float]) -> list[Json]:
    """Return a row for each point of a curve, with its style; `low` and `high` only if it has an error.

    Args:
      curve: a panel's curve.
      least: the lower end of the axis, where error bars end if their lower end has no logarithm.
      gaps: gaps of the axis, across which no line is drawn because "batch" or ε = ∞ is not the next number.
    """
    look = _look(curve.style) | {"band": curve.band}
    look["marked"] = look["marked"] and not curve.band
    rows = []
    cells = zip(curve.x, curve.names, curve.mean, curve.standard_error, curve.num_repeats, strict=True)
    for order, (place, name, mean, error, n) in enumerate(cells):
        row = {"curve": curve.style.label, "name": name, "place": place, "value": mean, "order": order}
        row["part"] = sum(gap < place for gap in gaps)
        row |= _hover_numbers(mean, error, n) | look
        if math.isfinite(error):
            row |= {"low": max(mean - error, least), "high": mean + error}
        elif curve.band:
            row |= {"low": mean, "high": mean}
        rows.append(row)
    return rows


def _look(style: Style) -> Json:
    """Return a style as fields of a data row."""
    empty = "transparent" if style.ring else "white"
    return {
        "colour": style.colour,
        "fill": empty if style.hollow else style.colour,
        "shape": _SHAPES.get(style.marker, style.marker or "circle"),
        "size": 70 if style.ring else 32,
        "dash": _DASHES.get(style.dash),
        "marked": bool(style.marker),
    }


def _line_look(reference: Reference) -> Json:
    return {"colour": reference.colour, "dash": _DASHES[reference.dash], "marked": False}


def _hover_numbers(mean: float, error: float, n: int) -> Json:
    """Format the numbers that are shown on hovering."""
    return {"mean": f"{mean:.4g}", "error": f"{error:.2g}" if math.isfinite(error) else "–", "n": n}


def _tooltip(words: Mapping[str, str]) -> Json:
    """Show the curve's name as heading, then these fields under their titles."""
    words = {"curve": "title", **words, "mean": "mean", "error": "standard error", "n": "n"}
    return {"tooltip": [{"field": field, "title": word} for field, word in words.items()]}


def _error_bars(panel: Panel, axes: _Axes, look: Json) -> list[Json]:
    barred, place = "!datum.band && isValid(datum.low)", axes.across("place")
    cap: Json = {"type": "tick", "orient": "vertical" if panel.axis.categorical else "horizontal"}
    cap |= {"size": 6, "thickness": 1.2}
    bar = {"type": "rule", "strokeWidth": 1.2}
    return [
        _layer(barred, bar, place | axes.values("low", "high") | look),
        *(_layer(barred, cap, place | axes.values(end) | look) for end in ("low", "high")),
    ]


def _markers(panel: Panel, axes: _Axes, faded: Json) -> list[Json]:
    """Return the markers, and invisible markers for hovering if a curve has none."""
    name = panel.axis.label if panel.axis.categorical else panel.axis.symbol
    encoding = axes.across("place") | axes.values("value") | _tooltip({"name": name})
    layers = [_layer("datum.marked", _MARKER, encoding | _SYMBOL | faded)]
    if any(drawn.band or not drawn.style.marker for drawn in panel.curves):
        target = {"type": "point", "opacity": 0, "filled": True, "size": 60}
        layers.append(_layer("!datum.marked", target, encoding))
    return layers


def _reference_layers(reference: Reference, axes: _Axes) -> list[Json]:
    """Return a reference's line, and the band of its standard error behind it."""
    mean, error = reference.mean, reference.standard_error
    row = {"curve": reference.label, "value": mean, **_hover_numbers(mean, error, reference.num_repeats)}
    colour, dash = reference.colour, _DASHES[reference.dash]
    mark = {"type": "rule", "color": colour, "strokeDash": dash, "strokeWidth": 1.3}
    line = {"data": {"values": [row]}, "mark": mark, "encoding": axes.values("value") | _tooltip({})}
    if not error > 0:
        return [line]
    ends = {"low": mean - error, "high": mean + error}
    shade = {"type": "rect", "color": colour, "opacity": 0.18}
    return [{"data": {"values": [ends]}, "mark": shade, "encoding": axes.values("low", "high")}, line]


def _legend(heading: str, entries: Sequence[Style | Reference], selection: str) -> Json:
    """Return a legend as a separate view, so that it never covers data."""
    rows, y = [], 0.5 * _LINE
    for entry in entries:
        lines = textwrap.wrap(entry.label, _LEGEND_CHARACTERS, break_on_hyphens=False)
        look = _look(entry) if isinstance(entry, Style) else _line_look(entry)
        rows.append({"curve": entry.label, "text": "\n".join(lines), "place": y, **look})
        y += _LINE * len(lines)
    down = {"y": {"field": "place", "type": "quantitative", "scale": None, "axis": None}}
    line = down | {"x": {"value": 0}, "x2": {"value": 29}} | _COLOUR | _DASH
    text = {"type": "text", "align": "left", "baseline": "middle", "fontSize": 9.5, "color": _INK}
    text |= {"lineBreak": "\n", "lineHeight": _LINE, "cursor": "pointer"}
    encoding = down | {"x": {"value": 37}, "text": {"field": "text"}}
    longest = max(len(line) for row in rows for line in row["text"].split("\n"))
    return {
        "data": {"values": rows},
        "title": {"text": heading, "anchor": "start", "frame": "group", "fontSize": 9.5},
        "layer": [
            _layer("isValid(datum.dash)", {"type": "rule", "strokeWidth": 1.7}, line),
            _layer("datum.marked", _MARKER, down | {"x": {"value": 14.5}} | _SYMBOL),
            {
                "params": [{"name": selection, "select": {"type": "point", "fields": ["curve"]}}],
                "mark": text,
                "encoding": encoding,
            },
        ],
        "width": 37 + 5.6 * longest,
        "height": y,
    }
