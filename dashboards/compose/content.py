"""The content of any question's figure: panels of curves, a table, and the text around them.

The printed drawing, the interactive drawing and the written tables are all made from it, so they agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from dashboards.compose.axes import Ticks

REFERENCE_COLOUR = "#6B6B6B"


@dataclass(frozen=True, kw_only=True)
class Style:
    """The appearance of a curve.

    Attributes:
      label: label in the legend.
      colour: colour of line and markers.
      dash: "solid", "dashed", "dotted" or "dashdot"; "" draws no line.
      marker: shape of the markers; "" draws none.
      hollow: whether markers are empty.
      ring: whether the marker surrounds another marker.
    """

    label: str
    colour: str
    dash: str = "solid"
    marker: str = "circle"
    hollow: bool = False
    ring: bool = False


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The points of one curve; points with one repeat have a NaN standard error.

    Attributes:
      style: appearance of the curve.
      names: names of the points on the axis, for readers.
      x: positions on the axis; shifted apart if several curves have a point of the same category.
      mean, standard_error: the drawn values, with scores in per cent.
      num_repeats: number of repeats of each point.
      band: whether errors are drawn as a band along the line, for many points.
    """

    style: Style
    names: list[str]
    x: list[float]
    mean: list[float]
    standard_error: list[float]
    num_repeats: list[int]
    band: bool = False

    @classmethod
    def of_single(cls, style: Style, names: list[str], x: list[float], values: list[float]) -> Curve:
        """Return a curve whose points have one repeat each, and so no standard error."""
        no_errors = [math.nan] * len(x)
        return cls(
            style=style, names=names, x=x, mean=values, standard_error=no_errors, num_repeats=[1] * len(x)
        )


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A line across the panel at `mean`, with a band of ± `standard_error`; no band if that is NaN."""

    label: str
    mean: float
    standard_error: float
    num_repeats: int
    colour: str = REFERENCE_COLOUR
    dash: str = "dashed"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
      legend: heading of the legend that lists its curves.
      y_label: label of the axis of values, which is below the panel if the other axis is categorical.
      axis: the other axis, which the values are drawn against.
      curves: the curves in the order of the legend.
      references: lines across the panel.
      log_y: whether values have a logarithmic scale.
      least_span: smallest span of values that the axis shows, so that chance does not look like a trend.
    """

    legend: str
    y_label: str
    axis: Ticks
    curves: list[Curve]
    references: Sequence[Reference] = ()
    log_y: bool = False
    least_span: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table for readers.

    Attributes:
      heading: one text per column.
      rows: rows of texts.
      bold: (row, column) indices of the cells in bold.
    """

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: Set[tuple[int, int]] = frozenset()

    def holds_text(self, column: int) -> bool:
        """Return whether a column holds words, which are left-aligned, and not numbers."""
        cells = [row[column] for row in self.rows]
        return not any(cell[:1].isdigit() or cell[:2].strip("-").isdigit() for cell in cells)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table that its reader sorts.

    Attributes:
      text: the displayed text.
      value: the sort value: a number at full precision, or None for the text itself.
      link: address of a page about the cell; empty for none.
      name: name of the param or metric under which MLflow holds the value; empty for none.
    """

    text: str
    value: float | None = None
    link: str = ""
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class SortableTable:
    """A table that its reader sorts and filters.

    Attributes:
      heading: one text per column.
      rows: rows of cells.
    """

    heading: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def holds_numbers(self, column: int) -> bool:
        """Return whether a column holds numbers, which are right-aligned."""
        return any(row[column].value is not None for row in self.rows)

    def as_texts(self) -> Table:
        """Return the table's displayed texts, for files."""
        return Table(heading=self.heading, rows=[[cell.text for cell in row] for row in self.rows])


@dataclass(frozen=True, kw_only=True)
class Content:
    """Everything that a figure and its files show.

    Attributes:
      title: data set, question, ε, δ and the neighbouring relation.
      subtitle: the settings: noise multiplier σ, expected batch size B, steps T, network and others.
      rows: rows of panels, as on the page; if nothing was scored there are none, and no picture is drawn.
      tables: (heading, table) pairs, the first with the numbers of the figure.
      answer: the sweep's answer, in sentences; empty without an answer.
      remarks: further necessary information for the reader, one sentence each.
    """

    title: str
    subtitle: str
    rows: list[list[Panel]]
    tables: list[tuple[str, Table]] = field(default_factory=list)
    answer: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """The text under a figure: the answer, then the remarks."""
        return [*self.answer, *self.remarks]

    @property
    def panels(self) -> list[Panel]:
        """All panels, row by row."""
        return [panel for row in self.rows for panel in row]

    def legends(self) -> dict[str, list[Style | Reference]]:
        """Return the distinct entries of each legend, by its heading."""
        legends: dict[str, dict[str, Style | Reference]] = {}
        for panel in self.panels:
            entries = legends.setdefault(panel.legend, {})
            for curve in panel.curves:
                entries.setdefault(curve.style.label, curve.style)
        for panel in self.panels:
            for reference in panel.references:
                legends[panel.legend].setdefault(reference.label, reference)
        return {heading: list(entries.values()) for heading, entries in legends.items() if entries}
