"""Station 13, plots: the group-size figure (the paper's Figure 4) for print, and everything written.

    python -m dashboards group-size --sweep NAME --output FOLDER

draws it again from MLflow alone.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from dashboards.differences import RESOLVED_AT, differences_table
from dashboards.interactive import group_size_page, interactive_group_size_figure
from dashboards.panels import (
    REFERENCE_COLOUR,
    Curve,
    GroupSizeContent,
    Panel,
    group_size_content,
    summary_table,
)

if TYPE_CHECKING:
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
_DASHES = {"solid": "-", "dashed": (0, (5, 2)), "dotted": (0, (1, 1.6)), "dashdot": "-."}
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "pentagon": "p", "cross": "X"}
_REFERENCE_LINE = {"color": REFERENCE_COLOUR, "linestyle": (0, (6, 3)), "linewidth": 1.3}
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
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.7,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.title_fontsize": 9.5,
    "legend.handlelength": 3.0,
}


def group_size_figure(trials: pd.DataFrame) -> Figure:
    """Returns the figure for print: scores and gradient SNR against group size.

    Args:
      trials: from `dashboards.runs.load_trials`.

    Raises:
      DashboardError: the trials do not make one figure, see `dashboards.panels.shown_trials`.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    content = group_size_content(trials)
    page = _Layout(content)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(page.width, page.height), dpi=_DOTS_PER_INCH, facecolor="white")
        grid = figure.add_gridspec(
            len(page.row_heights),
            page.columns + int(page.legends_beside),
            width_ratios=[1.0] * page.columns + [0.62] * int(page.legends_beside),
            height_ratios=page.row_heights,
            left=0.8 / page.width,
            right=1 - 0.2 / page.width,
            top=1 - page.header_height / page.height,
            bottom=page.footer_height / page.height,
            wspace=0.22,
            hspace=0.27,
        )
        first_row = [figure.add_subplot(grid[0, column]) for column in range(page.columns)]
        for panel, ax in zip(content.scores, first_row, strict=False):
            _draw_panel(ax, panel, content)
        if not content.scores:
            _draw_facts(first_row[0], content)
        if content.snr:
            _draw_panel(figure.add_subplot(grid[1, 0]), content.snr, content)
        _draw_legends(
            figure.add_subplot(grid[:, page.columns] if page.legends_beside else grid[1, 1]), content
        )
        figure.align_ylabels()
        page.draw_words(figure)
    return figure


class _Layout:
    """Sizes in inches; header and footer are as high as their wrapped words need."""

    def __init__(self, content: GroupSizeContent):
        self.columns = max(1, len(content.scores))
        first_row = 3.3 if content.scores else 0.3 * len(content.facts) + 0.1
        self.row_heights = [first_row, 3.3] if content.snr else [first_row]
        gap = 0.27 * 3.3 if content.snr else 0
        # Two score panels and the SNR leave the fourth place of the grid to the legends.
        self.legends_beside = not (self.columns == 2 and content.snr)
        above = 0 if self.legends_beside else first_row + gap
        missing = _legends_height(content) + above - sum(self.row_heights) - gap
        self.row_heights[-1] += max(0.0, missing)
        self.width = 4.9 * self.columns + (2.9 if self.legends_beside else 0) + 0.2
        if not content.scores:
            self.width += 1.2
        usable = self.width - 0.4
        self._title = textwrap.wrap(_tied(content.title), int(usable * 9.6))
        self._subtitle = textwrap.wrap(_tied(content.subtitle), int(usable * 12))
        self._notes = [
            line for note in content.notes for line in textwrap.wrap(_tied(note), int(usable * 13))
        ]
        self.header_height = 0.35 + 0.25 * len(self._title) + 0.2 * len(self._subtitle)
        self.footer_height = 0.7 + 0.19 * len(self._notes)
        self.height = self.header_height + sum(self.row_heights) + gap + self.footer_height

    def draw_words(self, figure: Figure) -> None:
        left, top = 0.2 / self.width, 1 - 0.15 / self.height
        figure.text(left, top, "\n".join(self._title), va="top", size=12.5, weight="bold")
        below = top - 0.26 * len(self._title) / self.height
        figure.text(left, below, "\n".join(self._subtitle), va="top", size=10)
        notes = "\n".join(self._notes)
        figure.text(left, 0.12 / self.height, notes, va="bottom", size=9, linespacing=1.35)


def _legend_height(num_lines: int) -> float:
    return 0.215 * (num_lines + 1) + 0.16 if num_lines else 0.0


def _legends_height(content: GroupSizeContent) -> float:
    scores = len(content.scores[0].curves) + 1 if content.scores else 0
    return _legend_height(scores) + _legend_height(len(content.snr.curves) if content.snr else 0)


def _tied(text: str) -> str:
    """`text` with no line break inside an equation."""
    for sign in (" = ", " ∈ ", " ± "):
        text = text.replace(sign, sign.replace(" ", "\u00a0"))
    return text


def _draw_panel(ax: Axes, panel: Panel, content: GroupSizeContent) -> None:
    for curve in panel.curves:
        errors = [0.0 if math.isnan(error) else error for error in curve.standard_error]
        ax.errorbar(curve.x, curve.mean, yerr=errors, capsize=3, elinewidth=1.2, **_line_style(curve))
    if panel.reference:
        mean, error = panel.reference.mean, panel.reference.standard_error
        ax.axhline(mean, zorder=1.5, **_REFERENCE_LINE)
        if error > 0:
            ax.axhspan(mean - error, mean + error, color=REFERENCE_COLOUR, alpha=0.18, linewidth=0, zorder=1)
    if panel.log_y:
        _use_log_scale(ax)
    ax.set_ylabel(panel.y_label)
    ax.set_xlabel("Group size S")
    ax.set_xticks(content.tick_positions, content.tick_labels)
    low, high = min(content.tick_positions), max(content.tick_positions)
    ax.set_xlim(low - 0.4, high + 0.4)
    if content.tick_labels[-1] == "batch" and len(content.tick_labels) > 1:
        ax.axvline(high - 0.75, color="#B5B5B5", linewidth=0.9, linestyle=":")


def _use_log_scale(ax: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    subs = (1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,)
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def _line_style(curve: Curve) -> dict[str, Any]:
    return {
        "color": curve.colour,
        "linestyle": _DASHES[curve.dash],
        "linewidth": 1.7,
        "marker": _MARKERS[curve.marker],
        "markersize": 5.5,
        "markerfacecolor": "white" if curve.hollow else curve.colour,
        "label": curve.label,
    }


def _draw_legends(ax: Axes, content: GroupSizeContent) -> None:
    """Legends apart from the data, so that they never cover it."""
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D

    ax.set_axis_off()
    scores = [Line2D([], [], **_line_style(curve)) for panel in content.scores[:1] for curve in panel.curves]
    if any(panel.reference for panel in content.scores):
        scores.append(Line2D([], [], label="untrained network", **_REFERENCE_LINE))
    snr = [Line2D([], [], **_line_style(curve)) for curve in (content.snr.curves if content.snr else [])]
    height = ax.get_position().height * ax.figure.get_figheight()
    top = 1.0
    for heading, lines in (("Scores", scores), ("Gradient SNR", snr)):
        if lines:
            names = [line.get_label() for line in lines]
            place = {"loc": "upper left", "bbox_to_anchor": (0.0, top), "bbox_transform": ax.transAxes}
            legend = Legend(ax, lines, names, title=heading, borderaxespad=0, alignment="left", **place)
            legend.get_title().set_weight("bold")
            ax.add_artist(legend)
            top -= _legend_height(len(lines)) / height


def _draw_facts(ax: Axes, content: GroupSizeContent) -> None:
    """The table that stands in for a score panel without scores."""
    ax.set_axis_off()
    heading, *rows = content.facts
    table = ax.table(rows, colLabels=heading, cellLoc="center", bbox=(0, 0, 1, 1), edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(9.5)
    table.auto_set_column_width(list(range(len(heading))))
    for (row, _), cell in table.get_celld().items():
        cell.set_edgecolor("#BBBBBB")
        if row == 0:
            cell.set_text_props(weight="bold")


def write_group_size_figure(trials: pd.DataFrame, folder: Path) -> tuple[Path, Path]:
    """Writes `group_size.png` and a self-contained `group_size.html`; returns their paths.

    Raises:
      DashboardError: as `group_size_figure`.
      OSError: the folder cannot be written.
    """
    figure, page = group_size_figure(trials), group_size_page(trials)
    folder.mkdir(parents=True, exist_ok=True)
    png_path, html_path = folder / "group_size.png", folder / "group_size.html"
    figure.savefig(png_path, dpi=_DOTS_PER_INCH)
    html_path.write_text(page, encoding="utf-8")
    return png_path, html_path


_PAIRED = (
    f"A difference counts as resolved above {RESOLVED_AT:g} standard errors; trials of one repeat share the "
    "network's initial values and the scored records."
)


def write_summary_table(trials: pd.DataFrame, folder: Path) -> tuple[Path, Path]:
    """Writes `group_size.csv` (full precision) and `group_size.md`; returns their paths.

    Raises:
      DashboardError: as `group_size_figure`.
      OSError: the folder cannot be written.
    """
    content, table = group_size_content(trials), summary_table(trials)
    folder.mkdir(parents=True, exist_ok=True)
    csv_path, text_path = folder / "group_size.csv", folder / "group_size.md"
    table.to_csv(csv_path, index=False)
    notes = "\n".join(f"- {note}" for note in content.notes)
    text = f"# {content.title}\n\n{content.subtitle}\n\n{to_markdown(table)}\n\n{notes}\n"
    differences = differences_table(trials)
    if len(differences):
        text += f"\n## Differences, paired over repeats\n\n{to_markdown(differences)}\n\n{_PAIRED}\n"
    text_path.write_text(text, encoding="utf-8")
    return csv_path, text_path


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
