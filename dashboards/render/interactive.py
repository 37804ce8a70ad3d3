"""A figure for a browser: the content of any question, with numbers on hovering, and its tables."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

from dashboards.compose.axes import round_numbers
from dashboards.compose.content import REFERENCE_COLOUR, Content, Curve, Panel, Reference
from dashboards.render.layout import Box, Layout, layout_of, legend_text, wrapped
from dashboards.render.tables import to_html

if TYPE_CHECKING:
    import plotly.graph_objects as go

_INK = "#222222"
_PIXELS = 100  # of one inch of the layout
_BUTTONS = 34  # pixels above the drawing for plotly's own
_MARGIN = 0.06  # of the values' span, at both ends
_DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "dashdot": "dashdot", "": "solid"}
_MARKERS = {"triangle": "triangle-up", "cross": "x"}


def interactive_figure(content: Content) -> go.Figure:
    """Returns the printed figure's panels for a browser; hovering shows mean, standard error and repeats."""
    import plotly.graph_objects as go

    layout = layout_of(content)
    headings = list(content.legends())
    figure = go.Figure()
    number = 0
    for panels, boxes in zip(content.rows, layout.panels, strict=True):
        for panel, box in zip(panels, boxes, strict=True):
            number += 1
            named = panel is panels[0] or panel.axis.ticks != panels[0].axis.ticks
            _add_panel(figure, panel, number, legend=_numbered("legend", headings.index(panel.legend) + 1))
            _place_axes(figure, panel, number, box, layout, named=named)
    _list_once(figure)
    legends = {
        _numbered("legend", place): {
            "title": {"text": f"<b>{heading}</b>"},
            "x": layout.legends[heading].left / layout.width,
            "y": (layout.legends[heading].bottom + layout.legends[heading].height) / layout.height,
            "xanchor": "left",
            "yanchor": "top",
            "tracegroupgap": 0,
        }
        for place, heading in enumerate(headings, start=1)
    }
    figure.update_layout(
        template="plotly_white",
        width=_PIXELS * layout.width,
        height=_PIXELS * layout.height + _BUTTONS,
        font={"family": "Helvetica, Arial, sans-serif", "size": 14, "color": _INK},
        margin={"t": _BUTTONS, "b": 0, "l": 0, "r": 0, "autoexpand": False},
        **legends,
    )
    return figure


def _numbered(name: str, number: int) -> str:
    """Plotly's name of the n-th axis or legend: "x", "x2", …"""
    return name if number == 1 else f"{name}{number}"


def _list_once(figure: go.Figure) -> None:
    """Shows each entry of a legend for the first curve of its name."""
    listed = set()
    for trace in figure.data:
        trace.showlegend = bool(trace.showlegend is not False and (trace.legend, trace.name) not in listed)
        if trace.showlegend:
            listed.add((trace.legend, trace.name))


def _place_axes(
    figure: go.Figure, panel: Panel, number: int, box: Box, layout: Layout, *, named: bool
) -> None:
    places = [place for place, _ in panel.axis.ticks]
    names = ["<br>".join(map(html.escape, wrapped(name))) for _, name in panel.axis.ticks]
    across: dict[str, Any] = {
        "title_text": html.escape(panel.axis.label),
        "tickvals": places,
        "ticktext": names,
        "range": [panel.axis.low, panel.axis.high],
    }
    values = _values_axis(panel)
    if panel.axis.categorical:
        across |= {"title_text": "", "range": [panel.axis.high, panel.axis.low]}
        across |= {} if named else {"showticklabels": False}
    x, y = (values, across) if panel.axis.categorical else (across, values)
    x |= {"domain": [box.left / layout.width, (box.left + box.width) / layout.width]}
    y |= {"domain": [box.bottom / layout.height, (box.bottom + box.height) / layout.height]}
    x |= {"anchor": _numbered("y", number), "title_standoff": 8, "showline": True, "linecolor": "#555"}
    y |= {"anchor": _numbered("x", number), "title_standoff": 6, "showline": True, "linecolor": "#555"}
    for axis in (x, y):
        axis |= {"zeroline": False, "gridcolor": "#E3E3E3"}
    figure.update_layout({_numbered("xaxis", number): x, _numbered("yaxis", number): y})


def _values_axis(panel: Panel) -> dict[str, Any]:
    """The axis of the values; plotly's own range would end on a line across, which the frame then hides."""
    axis: dict[str, Any] = {
        "title_text": html.escape(panel.y_label),
        "type": "log" if panel.log_y else "linear",
    }
    spread = _drawn_values(panel)
    if panel.log_y:
        spread = [math.log10(value) for value in spread if value > 0]
    if not spread:
        return axis
    low, high = min(spread), max(spread)
    margin = _MARGIN * (high - low) or 0.05 * abs(high) or 1.0
    axis["range"] = [low - margin, high + margin]
    if panel.log_y:
        marks = round_numbers(low - 0.5, high + 0.5, "log")
        axis |= {"tickvals": [10**place for place, _ in marks], "ticktext": [text for _, text in marks]}
    return axis


def _drawn_values(panel: Panel) -> list[float]:
    """Every finite value of a panel with the ends of its error."""
    points = [pair for c in panel.curves for pair in zip(c.mean, c.standard_error, strict=True)]
    if panel.reference:
        points.append((panel.reference.mean, panel.reference.standard_error))
    ends = [end for mean, error in points for end in (mean, mean - error, mean + error)]
    return [end for end in ends if math.isfinite(end)]


def _add_panel(figure: go.Figure, panel: Panel, number: int, *, legend: str) -> None:
    shared = {"xaxis": _numbered("x", number), "yaxis": _numbered("y", number), "legend": legend}
    for curve in panel.curves:
        for trace in _traces(curve, panel, shared):
            figure.add_trace(trace)
    if panel.reference:
        for trace in _reference(panel.reference, panel, shared):
            figure.add_trace(trace)


def _traces(curve: Curve, panel: Panel, shared: dict[str, Any]) -> list[go.Scatter]:
    """The curve, and before it the band of its errors where it has one."""
    import plotly.graph_objects as go

    # Lists, not arrays: plotly would write arrays as base64, which nobody can read or search.
    errors = [None if math.isnan(error) else error for error in curve.standard_error]
    style, bars = curve.style, {"type": "data", "array": errors, "thickness": 1.3, "width": 4}
    x, y = curve.x, curve.mean
    along: dict[str, Any] = {"x": y, "y": x} if panel.axis.categorical else {"x": x, "y": y}
    if any(error is not None for error in errors) and not curve.band:
        along["error_x" if panel.axis.categorical else "error_y"] = bars
    found = []
    if curve.band:
        known = [(a, m, e or 0.0) for a, m, e in zip(x, y, errors, strict=True)]
        upper, lower = [m + e for _, m, e in known], [m - e for _, m, e in reversed(known)]
        found.append(_filled([*x, *reversed(x)], [*upper, *lower], style.colour, style.label, shared))
    dots = not curve.band and bool(style.marker)
    lines = bool(style.dash) and not panel.axis.categorical
    marker = _MARKERS.get(style.marker, style.marker) + ("-open" if style.hollow else "")
    found.append(
        go.Scatter(
            **along,
            name=legend_text(html.escape(style.label)).replace("\n", "<br>"),
            legendgroup=style.label,
            text=_hover(curve, panel),
            hovertemplate="%{text}<extra>" + html.escape(style.label) + "</extra>",
            mode="+".join([*["lines"] * lines, *["markers"] * dots]) or "none",
            line={"color": style.colour, "dash": _DASHES[style.dash], "width": 2.2},
            marker={
                "symbol": marker if dots else "circle",
                "size": 12 if style.ring else 8,
                "color": style.colour,
            },
            **shared,
        )
    )
    return found


def _hover(curve: Curve, panel: Panel) -> list[str]:
    return [
        html.escape(name if panel.axis.categorical else f"{panel.axis_symbol} = {name}")
        + f"<br>mean {mean:.4g}"
        + ("" if math.isnan(error) else f"<br>standard error {error:.2g}")
        + f"<br>n = {n}"
        for name, mean, error, n in zip(
            curve.names, curve.mean, curve.standard_error, curve.num_repeats, strict=True
        )
    ]


def _filled(x: list[float], y: list[float], colour: str, group: str, shared: dict[str, Any]) -> go.Scatter:
    import plotly.graph_objects as go

    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return go.Scatter(
        x=x,
        y=y,
        mode="lines",
        fill="toself",
        fillcolor=f"rgba({red},{green},{blue},0.18)",
        line={"width": 0},
        hoverinfo="skip",
        legendgroup=group,
        showlegend=False,
        **shared,
    )


def _reference(reference: Reference, panel: Panel, shared: dict[str, Any]) -> list[go.Scatter]:
    import plotly.graph_objects as go

    ends = [panel.axis.low, panel.axis.high]
    error = 0.0 if math.isnan(reference.standard_error) else reference.standard_error
    above, below = reference.mean + error, reference.mean - error
    around, level = [*ends, *reversed(ends)], [above, above, below, below]
    values = [reference.mean] * 2
    side = panel.axis.categorical
    x, y, x_band, y_band = (
        (values, ends, level, around) if side else (ends, values, around, level)
    )  # fmt: skip
    hover = f"mean {reference.mean:.4g}<br>standard error {error:.2g}<br>n = {reference.num_repeats}"
    line = go.Scatter(
        x=x,
        y=y,
        mode="lines",
        name=reference.label,
        legendgroup=reference.label,
        line={"color": REFERENCE_COLOUR, "dash": "dash", "width": 1.6},
        hovertemplate=hover + f"<extra>{reference.label}</extra>",
        **shared,
    )
    return [_filled(x_band, y_band, REFERENCE_COLOUR, reference.label, shared), line]


def page_of(content: Content, name: str) -> str:
    """Returns a self-contained HTML page: the interactive figure, the notes and the tables.

    Args:
      content: of the figure.
      name: id of the drawing in the page.
    """
    plot = ""
    if content.rows:
        figure = interactive_figure(content)
        plot = figure.to_html(
            full_html=False, include_plotlyjs=True, div_id=name, config={"displaylogo": False}
        )
    tables = content.tables if content.rows else [("What was trained", content.facts), *content.tables]
    shown = "".join(
        f'<h2>{html.escape(heading)}</h2><div class="table">{to_html(table)}</div>'
        for heading, table in tables
    )
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in content.notes)
    title, subtitle = html.escape(content.title), html.escape(content.subtitle)
    return _PAGE.format(title=title, subtitle=subtitle, plot=plot, notes=notes, tables=shown)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 Helvetica, Arial, sans-serif; color: #222; margin: 1.5rem; }}
h1 {{ font-size: 1.25rem; margin: 0; }}
h2 {{ font-size: 1.05rem; margin: 1.6rem 0 .4rem; }}
p {{ margin: .2rem 0; max-width: 60rem; }}
.drawing, .table {{ overflow-x: auto; }}
.drawing {{ margin: 1rem 0; }}
table {{ border-collapse: collapse; font-size: 13px; }}
th, td {{ padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }}
th {{ white-space: normal; vertical-align: bottom; max-width: 11rem; }}
.name {{ text-align: left; }}
</style></head>
<body><h1>{title}</h1><p>{subtitle}</p><div class="drawing">{plot}</div>{notes}{tables}</body></html>
"""
