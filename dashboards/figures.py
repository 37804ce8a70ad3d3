"""Station 13, plots: the group-size figure (the paper's Figure 4) as PNG and as interactive HTML.

    python -m dashboards group-size --sweep NAME --output FOLDER

draws it again from MLflow alone.
"""

from __future__ import annotations

import html
import math
import textwrap
from pathlib import Path
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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "group_size_figure",
    "interactive_group_size_figure",
    "summary_table",
    "to_markdown",
    "write_group_size_figure",
    "write_summary_table",
]

_DOTS_PER_INCH = 200
_INK = "#222222"
_GRID = "#E3E3E3"
_MATPLOTLIB_DASHES = {"solid": "-", "dashed": (0, (5, 2)), "dotted": (0, (1, 1.6)), "dashdot": "-."}
_PLOTLY_DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "dashdot": "dashdot"}
_MATPLOTLIB_MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle": "^",
    "pentagon": "p",
    "cross": "X",
}
_PLOTLY_MARKERS = {"triangle": "triangle-up", "cross": "x"}
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": "#555555",
    "axes.labelcolor": _INK,
    "axes.labelsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.title_fontsize": 9.5,
    "legend.handlelength": 3.0,
}


def group_size_figure(trials: pd.DataFrame) -> Figure:
    """Returns the figure for print: accuracy and gradient SNR against group size.

    Args:
      trials: from `dashboards.runs.load_trials`.

    Raises:
      DashboardError: the trials do not make one figure, see `dashboards.panels.shown_trials`.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    content = group_size_content(trials)
    with mpl.rc_context(_STYLE):
        columns = max(1, len(content.scores))
        rows = 2 if content.snr else 1
        beside = columns * rows != 4
        width = 4.6 * columns + (3.6 if beside else 0) + 0.3
        if not content.scores:
            width += 0.8
        height = 3.4 * rows + 1.25
        if rows == 1 and beside:
            height = max(height, 1.6 + 0.3 * len(content.facts))
        figure = Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, facecolor="white")
        grid = figure.add_gridspec(
            rows,
            columns + int(beside),
            width_ratios=[1.0] * columns + [0.72] * int(beside),
            left=0.72 / width,
            right=1 - 0.15 / width,
            top=1 - 0.85 / height,
            bottom=0.62 / height,
            wspace=0.2 if columns > 1 else 0.12,
            hspace=0.28,
        )
        figure.text(0.15 / width, 1 - 0.2 / height, content.title, va="top", size=12.5, weight="bold")
        figure.text(0.15 / width, 1 - 0.47 / height, content.subtitle, va="top", size=10)
        axes = [figure.add_subplot(grid[0, column]) for column in range(columns)]
        for panel, ax in zip(content.scores, axes, strict=False):
            _draw_panel(ax, panel, content)
        if not content.scores:
            _draw_facts(axes[0], content)
        if content.snr:
            _draw_panel(figure.add_subplot(grid[1, 0]), content.snr, content)
        side = figure.add_subplot(grid[:, columns] if beside else grid[1, 1])
        _draw_side(side, content)
    return figure


def _draw_panel(ax: Axes, panel: Panel, content: GroupSizeContent) -> None:
    for curve in panel.curves:
        _draw_curve(ax, curve)
    if panel.reference:
        mean, error = panel.reference.mean, panel.reference.standard_error
        ax.axhline(mean, color=REFERENCE_COLOUR, linestyle=(0, (6, 3)), linewidth=1.3, zorder=1.5)
        if error > 0:
            ax.axhspan(mean - error, mean + error, color=REFERENCE_COLOUR, alpha=0.18, linewidth=0, zorder=1)
    if panel.log_y:
        from matplotlib.ticker import LogLocator, NullFormatter

        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel(panel.y_label)
    ax.set_xlabel("Group size S")
    ax.set_xticks(content.tick_positions, content.tick_labels)
    low, high = min(content.tick_positions), max(content.tick_positions)
    ax.set_xlim(low - 0.4, high + 0.4)
    if content.tick_labels[-1] == "batch" and len(content.tick_labels) > 1:
        ax.axvline(high - 0.75, color="#B5B5B5", linewidth=0.9, linestyle=":")


def _draw_curve(ax: Axes, curve: Curve) -> None:
    ax.errorbar(
        curve.x,
        curve.mean,
        yerr=[0.0 if math.isnan(error) else error for error in curve.standard_error],
        color=curve.colour,
        linestyle=_MATPLOTLIB_DASHES[curve.dash],
        linewidth=1.7,
        marker=_MATPLOTLIB_MARKERS[curve.marker],
        markersize=5.5,
        markerfacecolor="white" if curve.hollow else curve.colour,
        capsize=2.5,
        elinewidth=1.1,
        label=curve.label,
    )


def _draw_side(ax: Axes, content: GroupSizeContent) -> None:
    """Legends and notes, apart from the data so that they never cover it."""
    from matplotlib.lines import Line2D

    ax.set_axis_off()
    top = 1.0
    height_inches = ax.get_position().height * ax.figure.get_figheight()
    for heading, panels in (("Scores", content.scores[:1]), ("Gradient SNR", [content.snr])):
        lines = [_legend_line(curve) for panel in panels if panel for curve in panel.curves]
        if heading == "Scores" and any(panel.reference for panel in content.scores):
            style = {"color": REFERENCE_COLOUR, "linestyle": (0, (6, 3)), "linewidth": 1.3}
            lines.append(Line2D([], [], label="untrained network", **style))
        if lines:
            legend = ax.legend(
                handles=lines, title=heading, loc="upper left", bbox_to_anchor=(0.02, top), borderaxespad=0
            )
            legend.set_alignment("left")
            legend.get_title().set_weight("bold")
            ax.add_artist(legend)
            top -= (0.215 * (len(lines) + 1) + 0.14) / height_inches
    width_inches = ax.get_position().width * ax.figure.get_figwidth()
    text = "\n".join(textwrap.fill(note, int(width_inches * 13.5)) for note in content.notes)
    ax.text(0.03, top - 0.03, text, va="top", size=9, linespacing=1.35, transform=ax.transAxes)


def _legend_line(curve: Curve) -> Any:
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        color=curve.colour,
        linestyle=_MATPLOTLIB_DASHES[curve.dash],
        linewidth=1.7,
        marker=_MATPLOTLIB_MARKERS[curve.marker],
        markersize=5.5,
        markerfacecolor="white" if curve.hollow else curve.colour,
        label=curve.label,
    )


def _draw_facts(ax: Axes, content: GroupSizeContent) -> None:
    """The table that stands in for an accuracy panel without accuracies."""
    ax.set_axis_off()
    heading, *rows = content.facts
    table = ax.table(rows, colLabels=heading, cellLoc="right", loc="upper left", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(9.5)
    height = ax.get_position().height * ax.figure.get_figheight()
    for (row, _), cell in table.get_celld().items():
        cell.set_height(min(0.28 / height, 1 / len(content.facts)))
        cell.set_edgecolor("#BBBBBB")
        if row == 0:
            cell.set_text_props(weight="bold")


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
    place = {"x": 0.56, "y": 0.4} if columns == 2 and content.snr else {"x": 1.02, "y": 0.4}
    figure.update_layout(
        template="plotly_white",
        title={"text": title, "x": 0.01, "xanchor": "left"},
        width=520 * columns + (60 if columns == 2 and content.snr else 320),
        height=390 * rows + 110,
        font={"family": "Helvetica, Arial, sans-serif", "size": 14, "color": _INK},
        legend={"title": {"text": "<b>Scores</b>"}, "yanchor": "top", **place},
        legend2={"title": {"text": "<b>Gradient SNR</b>"}, "yanchor": "top", **place, "y": 0.15},
        margin={"t": 90, "b": 60},
    )
    if rows == 1:
        figure.update_layout(legend={"x": 1.02, "y": 1.0})
    return figure


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
    marker = _PLOTLY_MARKERS.get(curve.marker, curve.marker) + ("-open" if curve.hollow else "")
    return go.Scatter(
        x=curve.x,
        y=curve.mean,
        error_y={"type": "data", "array": errors, "thickness": 1.3, "width": 4},
        name=curve.label,
        legendgroup=curve.label,
        text=hover,
        hovertemplate="%{text}<extra>" + curve.label + "</extra>",
        mode="lines+markers",
        line={"color": curve.colour, "dash": _PLOTLY_DASHES[curve.dash], "width": 2.2},
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


def write_group_size_figure(trials: pd.DataFrame, folder: Path) -> tuple[Path, Path]:
    """Writes `group_size.png` and a self-contained `group_size.html`; returns their paths.

    Raises:
      DashboardError: as `group_size_figure`.
      OSError: the folder cannot be written.
    """
    content = group_size_content(trials)
    folder.mkdir(parents=True, exist_ok=True)
    png, page = folder / "group_size.png", folder / "group_size.html"
    group_size_figure(trials).savefig(png, dpi=_DOTS_PER_INCH)
    plot = interactive_group_size_figure(trials).to_html(
        full_html=False, include_plotlyjs=True, div_id="group-size"
    )
    table = summary_table(trials).to_html(index=False, na_rep="–", float_format="{:.4g}".format, border=0)
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in content.notes)
    title = html.escape(content.title)
    page.write_text(_PAGE.format(title=title, plot=plot, notes=notes, table=table), encoding="utf-8")
    return png, page


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 Helvetica, Arial, sans-serif; color: #222; margin: 1.5rem; }}
p {{ margin: .2rem 0; max-width: 60rem; }}
table {{ border-collapse: collapse; margin-top: 1.2rem; font-size: 13px; }}
th, td {{ padding: .25rem .6rem; text-align: right !important; border-bottom: 1px solid #ddd; }}
</style></head>
<body>{plot}{notes}<div style="overflow-x: auto">{table}</div></body></html>
"""


def write_summary_table(trials: pd.DataFrame, folder: Path) -> tuple[Path, Path]:
    """Writes `group_size.csv` (full precision) and `group_size.md`; returns their paths.

    Raises:
      DashboardError: as `group_size_figure`.
      OSError: the folder cannot be written.
    """
    content, table = group_size_content(trials), summary_table(trials)
    folder.mkdir(parents=True, exist_ok=True)
    csv, text = folder / "group_size.csv", folder / "group_size.md"
    table.to_csv(csv, index=False)
    notes = "\n".join(f"- {note}" for note in content.notes)
    text.write_text(
        f"# {content.title}\n\n{content.subtitle}\n\n{to_markdown(table)}\n\n{notes}\n", encoding="utf-8"
    )
    return csv, text


def to_markdown(table: pd.DataFrame) -> str:
    """Returns `table` as Markdown, numbers to four digits, what is missing as a dash.

    >>> print(to_markdown(pd.DataFrame({"S": [8, "batch"], "mean": [0.123456, float("nan")]})))
    | S | mean |
    | ---: | ---: |
    | 8 | 0.1235 |
    | batch | – |
    """
    rows = [[_cell(value) for value in row] for row in table.itertuples(index=False, name=None)]
    lines = [list(map(str, table.columns)), ["---:"] * len(table.columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        if math.isnan(value):
            return "–"
        return "∞" if math.isinf(value) else f"{value:.4g}"
    return str(value)
