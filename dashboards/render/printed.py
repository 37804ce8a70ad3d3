"""A figure for print: the content of any question, drawn by matplotlib."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from dashboards.compose.content import REFERENCE_COLOUR, Content, Curve, Panel, Reference, Style
from dashboards.render.layout import Box, Layout, layout_of, legend_text, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 200
_LEAST_WIDTH = 7.0
_INK = "#222222"
_DASHES = {"solid": "-", "dashed": (0, (5, 2)), "dotted": (0, (1, 1.6)), "dashdot": "-.", "": "none"}
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "pentagon": "p", "cross": "X"}
_MARKERS |= {"": "none"}
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


def printed_figure(content: Content) -> Figure:
    """Returns the figure for print; where nothing was scored, with the facts in place of panels."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    page = _Page(content)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(page.width, page.height), dpi=DOTS_PER_INCH, facecolor="white")
        for panels, boxes in zip(content.rows, page.layout.panels, strict=True):
            for panel, box in zip(panels, boxes, strict=True):
                named = panel is panels[0] or panel.axis.ticks != panels[0].axis.ticks
                _draw_panel(page.axes(figure, box), panel, named=named)
        for heading, box in page.layout.legends.items():
            _draw_legend(page.axes(figure, box), heading, content.legends()[heading])
        if not content.rows:
            _draw_facts(page.axes(figure, page.facts), content, page.column_widths)
        page.draw_words(figure)
    return figure


class _Page:
    """Sizes in inches; header and footer are as high as their wrapped words need."""

    def __init__(self, content: Content):
        self.layout: Layout = layout_of(content)
        lines = [content.facts.heading, *content.facts.rows]
        self.column_widths = [0.3 + 0.082 * max(map(len, column)) for column in zip(*lines, strict=True)]
        table_width, table_height = sum(self.column_widths), 0.3 * len(lines)
        needed = self.layout.width if content.rows else table_width + 0.4
        self.width = max(needed, _LEAST_WIDTH)
        usable = self.width - 0.4
        self._title = textwrap.wrap(_tied(content.title), int(usable * 9.3))
        self._subtitle = textwrap.wrap(_tied(content.subtitle), int(usable * 12))
        self._notes = [
            line for note in content.notes for line in textwrap.wrap(_tied(note), int(usable * 13))
        ]
        header = 0.3 + 0.25 * len(self._title) + 0.2 * len(self._subtitle)
        self._footer = 0.22 + 0.19 * len(self._notes)
        drawing = self.layout.height if content.rows else table_height + 0.15
        self.height = header + drawing + self._footer
        self.facts = Box(left=0.2, bottom=0.1, width=table_width, height=table_height)

    def axes(self, figure: Figure, box: Box) -> Axes:
        place = (
            box.left / self.width,
            (box.bottom + self._footer) / self.height,
            box.width / self.width,
            box.height / self.height,
        )
        return figure.add_axes(place)

    def draw_words(self, figure: Figure) -> None:
        left, top = 0.2 / self.width, 1 - 0.15 / self.height
        figure.text(left, top, "\n".join(self._title), va="top", size=12.5, weight="bold")
        below = top - 0.26 * len(self._title) / self.height
        figure.text(left, below, "\n".join(self._subtitle), va="top", size=10)
        notes = "\n".join(self._notes)
        figure.text(left, 0.12 / self.height, notes, va="bottom", size=9, linespacing=1.35)


def _tied(text: str) -> str:
    """`text` with no line break inside an equation."""
    for sign in (" = ", " ∈ ", " ± "):
        text = text.replace(sign, sign.replace(" ", "\u00a0"))
    return text


def _draw_panel(ax: Axes, panel: Panel, *, named: bool) -> None:
    for curve in panel.curves:
        _draw_curve(ax, curve, panel)
    if panel.reference:
        _draw_reference(ax, panel.reference, panel)
    if panel.log_y:
        _use_log_scale(ax)
    places = [place for place, _ in panel.axis.ticks]
    if panel.axis.categorical:
        names = ["\n".join(wrapped(name)) for _, name in panel.axis.ticks]
        ax.set_yticks(places, names if named else [""] * len(names))
        ax.set_ylim(panel.axis.high, panel.axis.low)
        ax.set_xlabel(panel.y_label)
        ax.locator_params(axis="x", nbins=7)
        return
    ax.set_ylabel(panel.y_label)
    ax.set_xlabel(panel.axis.label)
    ax.set_xticks(places, [name for _, name in panel.axis.ticks])
    ax.set_xlim(panel.axis.low, panel.axis.high)
    for gap in panel.axis.gaps:
        ax.axvline(gap, color="#B5B5B5", linewidth=0.9, linestyle=":")


def _draw_curve(ax: Axes, curve: Curve, panel: Panel) -> None:
    errors = [0.0 if math.isnan(error) else error for error in curve.standard_error]
    looks = line_style(curve.style)
    bars: dict[str, float] = (
        {"capsize": 3, "elinewidth": 1.2} if any(errors) else {"capsize": 0, "elinewidth": 0}
    )
    if panel.axis.categorical:
        looks["linestyle"] = "none"
        ax.errorbar(curve.mean, curve.x, xerr=errors, **bars, **looks)
    elif not curve.style.marker and not curve.band:
        ax.plot(curve.x, curve.mean, **looks)
    elif curve.band:
        ax.plot(curve.x, curve.mean, **looks)
        low = [mean - error for mean, error in zip(curve.mean, errors, strict=True)]
        high = [mean + error for mean, error in zip(curve.mean, errors, strict=True)]
        ax.fill_between(curve.x, low, high, color=curve.style.colour, alpha=0.18, linewidth=0)
    else:
        ax.errorbar(curve.x, curve.mean, yerr=errors, **bars, **looks)


def _draw_reference(ax: Axes, reference: Reference, panel: Panel) -> None:
    mean, error = reference.mean, reference.standard_error
    line, band = (ax.axvline, ax.axvspan) if panel.axis.categorical else (ax.axhline, ax.axhspan)
    line(mean, zorder=1.5, **_REFERENCE_LINE)
    if error > 0:
        band(mean - error, mean + error, color=REFERENCE_COLOUR, alpha=0.18, linewidth=0, zorder=1)


def _use_log_scale(ax: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    subs = (1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,)
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def line_style(style: Style) -> dict[str, Any]:
    """Returns matplotlib's names for a style."""
    return {
        "color": style.colour,
        "linestyle": _DASHES[style.dash],
        "linewidth": 1.7,
        "marker": _MARKERS[style.marker],
        "markersize": 8 if style.ring else 5.5,
        "markerfacecolor": ("none" if style.ring else "white") if style.hollow else style.colour,
        "label": style.label,
    }


def _draw_legend(ax: Axes, heading: str, entries: list[Style | Reference]) -> None:
    """A legend apart from the data, so that it never covers them."""
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D

    ax.set_axis_off()
    lines = [
        Line2D([], [], **line_style(entry))
        if isinstance(entry, Style)
        else Line2D([], [], label=entry.label, **_REFERENCE_LINE)
        for entry in entries
    ]
    names = [legend_text(entry.label) for entry in entries]
    place = {"loc": "upper left", "bbox_to_anchor": (0.0, 1.0), "bbox_transform": ax.transAxes}
    legend = Legend(ax, lines, names, title=heading, borderaxespad=0, alignment="left", **place)
    legend.get_title().set_weight("bold")
    ax.add_artist(legend)


def _draw_facts(ax: Axes, content: Content, widths: list[float]) -> None:
    """The table that stands in for panels where nothing was scored."""
    ax.set_axis_off()
    shares = [width / sum(widths) for width in widths]
    table = ax.table(
        [list(row) for row in content.facts.rows],
        colLabels=list(content.facts.heading),
        colWidths=shares,
        cellLoc="center",
        bbox=(0, 0, 1, 1),
        edges="horizontal",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9.5)
    for (row, _), cell in table.get_celld().items():
        cell.set_edgecolor("#BBBBBB")
        if row == 0:
            cell.set_text_props(weight="bold")
