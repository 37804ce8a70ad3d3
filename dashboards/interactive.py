"""The group-size figure for a browser: the content of `figures.py`, with numbers on hovering."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from dashboards.panels import (
    REFERENCE_COLOUR,
    Curve,
    GroupSizeContent,
    Panel,
    group_size_content,
    summary_table,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

_INK = "#222222"
_DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "dashdot": "dashdot"}
_MARKERS = {"triangle": "triangle-up", "cross": "x"}


def interactive_group_size_figure(trials: pd.DataFrame) -> go.Figure:
    """Returns the same figure for a browser; hovering shows mean, standard error and repeats.

    Raises:
      DashboardError: as `group_size_figure`.
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    content = group_size_content(trials)
    columns = max(1, len(content.scores))
    rows = 2 if content.snr else 1
    specs: list[list[dict[str, Any] | None]] = [[{} for _ in range(columns)] for _ in range(rows)]
    if not content.scores:
        specs[0][0] = {"type": "table"}
    if content.snr and columns == 2:
        specs[1][1] = None
    figure = make_subplots(rows, columns, specs=specs, vertical_spacing=0.14, horizontal_spacing=0.1)
    for column, panel in enumerate(content.scores, start=1):
        _add_panel(figure, panel, content, row=1, column=column, legend="legend")
    if not content.scores:
        heading, *body = content.facts
        cells = [list(cells) for cells in zip(*body, strict=True)]
        figure.add_trace(go.Table(header={"values": heading}, cells={"values": cells}), row=1, col=1)
    if content.snr:
        _add_panel(figure, content.snr, content, row=2, column=1, legend="legend2")
    title = f"<b>{html.escape(content.title)}</b><br><sub>{html.escape(content.subtitle)}</sub>"
    in_grid = columns == 2 and content.snr is not None
    x, y, y_snr = _legend_places(content, in_grid=in_grid, plot_height=390 * rows - 40)
    figure.update_layout(
        template="plotly_white",
        title={"text": title, "x": 0.01, "xanchor": "left"},
        width=520 * columns + 60 if in_grid else 440 * columns + 320,
        height=390 * rows + 110,
        font={"family": "Helvetica, Arial, sans-serif", "size": 14, "color": _INK},
        legend={"title": {"text": "<b>Scores</b>"}, "yanchor": "top", "x": x, "y": y},
        legend2={"title": {"text": "<b>Gradient SNR</b>"}, "yanchor": "top", "x": x, "y": y_snr},
        margin={"t": 90, "b": 60},
    )
    return figure


def _legend_places(
    content: GroupSizeContent, *, in_grid: bool, plot_height: int
) -> tuple[float, float, float]:
    """x of both legends and the y of each, the second below the first however long that is."""
    x, y = (0.56, 0.43) if in_grid else (1.02, 1.0)
    entries = len(content.scores[0].curves) + 2 if content.scores else 0
    return x, y, y - (22 * entries + 24 * bool(entries)) / plot_height


def _add_panel(
    figure: go.Figure, panel: Panel, content: GroupSizeContent, *, row: int, column: int, legend: str
) -> None:
    place = {"row": row, "col": column}
    shared = {"legend": legend, "showlegend": column == 1}
    for curve in panel.curves:
        figure.add_trace(_plotly_curve(curve, **shared), **place)
    if panel.reference:
        for trace in _plotly_reference(panel, content, **shared):
            figure.add_trace(trace, **place)
    low, high = min(content.tick_positions), max(content.tick_positions)
    figure.update_xaxes(
        title_text="Group size S",
        tickvals=content.tick_positions,
        ticktext=content.tick_labels,
        range=[low - 0.4, high + 0.4],
        **place,
    )
    figure.update_yaxes(title_text=panel.y_label, type="log" if panel.log_y else "linear", **place)


def _plotly_curve(curve: Curve, **shared: Any) -> go.Scatter:
    import plotly.graph_objects as go

    # Lists, not arrays: plotly would write arrays as base64, which nobody can read or search.
    errors = [None if math.isnan(error) else error for error in curve.standard_error]
    hover = [
        f"S = {size}<br>mean {mean:.4g}"
        + (f"<br>standard error {error:.2g}" if error is not None else "")
        + f"<br>n = {n}"
        for size, mean, error, n in zip(curve.group_sizes, curve.mean, errors, curve.num_repeats, strict=True)
    ]
    marker = _MARKERS.get(curve.marker, curve.marker) + ("-open" if curve.hollow else "")
    return go.Scatter(
        x=curve.x,
        y=curve.mean,
        error_y={"type": "data", "array": errors, "thickness": 1.3, "width": 4},
        name=curve.label,
        legendgroup=curve.label,
        text=hover,
        hovertemplate="%{text}<extra>" + curve.label + "</extra>",
        mode="lines+markers",
        line={"color": curve.colour, "dash": _DASHES[curve.dash], "width": 2.2},
        marker={"symbol": marker, "size": 8},
        **shared,
    )


def _plotly_reference(panel: Panel, content: GroupSizeContent, **shared: Any) -> list[go.Scatter]:
    import plotly.graph_objects as go

    reference = panel.reference
    if reference is None:
        return []
    ends = [min(content.tick_positions) - 0.4, max(content.tick_positions) + 0.4]
    error = 0.0 if math.isnan(reference.standard_error) else reference.standard_error
    above, below = reference.mean + error, reference.mean - error
    hover = f"mean {reference.mean:.4g}<br>standard error {error:.2g}<br>n = {reference.num_repeats}"
    band = go.Scatter(
        x=[*ends, *reversed(ends)],
        y=[above, above, below, below],
        mode="lines",
        fill="toself",
        fillcolor="rgba(107,107,107,0.18)",
        line={"width": 0},
        hoverinfo="skip",
        legendgroup=reference.label,
        legend=shared["legend"],
        showlegend=False,
    )
    line = go.Scatter(
        x=ends,
        y=[reference.mean] * 2,
        mode="lines",
        name=reference.label,
        legendgroup=reference.label,
        line={"color": REFERENCE_COLOUR, "dash": "dash", "width": 1.6},
        hovertemplate=hover + "<extra>" + reference.label + "</extra>",
        **shared,
    )
    return [band, line]


def group_size_page(trials: pd.DataFrame) -> str:
    """Returns a self-contained HTML page: the interactive figure, the notes and the table of its numbers.

    Raises:
      DashboardError: as `dashboards.figures.group_size_figure`.
    """
    content = group_size_content(trials)
    plot = interactive_group_size_figure(trials).to_html(
        full_html=False, include_plotlyjs=True, div_id="group-size"
    )
    table = summary_table(trials).to_html(index=False, na_rep="–", float_format="{:.4g}".format, border=0)
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in content.notes)
    return _PAGE.format(title=html.escape(content.title), plot=plot, notes=notes, table=table)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 Helvetica, Arial, sans-serif; color: #222; margin: 1.5rem; }}
p {{ margin: .2rem 0; max-width: 60rem; }}
table {{ border-collapse: collapse; margin-top: 1.2rem; font-size: 13px; }}
#numbers th, #numbers td {{ padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }}
</style></head>
<body>{plot}{notes}<div id="numbers" style="overflow-x: auto">{table}</div></body></html>
"""
