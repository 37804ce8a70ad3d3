"""The curves of a plan as a figure, after DP-Cap's Figures 5 and 6: ε against N, and epochs against B."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from dashboards.compose.axes import Axis, ticks_of
from dashboards.compose.content import Content, Curve, Panel, Style
from dpgcl_core.planning.tradeoff_curves import Point

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
_MARKERS = ("circle", "square", "diamond", "triangle", "cross")
_N_AXIS = Axis(column="num_records", label="Records N", symbol="N", scale="log2")
_B_AXIS = Axis(column="expected_batch_size", label="Expected batch size B", symbol="B", scale="log2")


def curves_content(points: Sequence[Point], *, title: str, subtitle: str) -> Content:
    """Return the figure of a plan's curves.

    Args:
      points: the points of both panels.
      title, subtitle: title and subtitle of the figure.
    """
    table = numbers_of_curves(points)
    panels = [
        _panel(table[table["figure"] == "epsilon"], _N_AXIS, "epsilon", "ε by PLD", "B, σ and T of the plan"),
        _panel(table[table["figure"] == "epochs"], _B_AXIS, "num_epochs", "Epochs within ε", "fixed σ"),
    ]
    notes = [
        "Left: more records at the same B, σ and T, hence the same number of steps (DP-Cap, Figure 5).",
        "Right: the epochs that ε allows fall with B at a given σ (DP-Cap, Figure 6).",
        "By PLD on a coarse grid, conservatively: the true ε is at most, the true epochs at least, as drawn.",
    ]
    visible_panels = [panel for panel in panels if panel.curves]
    return Content(title=title, subtitle=subtitle, rows=[visible_panels], remarks=notes)


def numbers_of_curves(points: Sequence[Point]) -> pd.DataFrame:
    """Return the points of the curves, one row each."""
    rows = pd.DataFrame(map(vars, points))
    rows.insert(list(rows).index("epsilon"), "num_epochs", [point.num_epochs for point in points])
    return rows


def _panel(rows: pd.DataFrame, axis: Axis, column: str, label: str, legend: str) -> Panel:
    """Return the panel of one column against an axis, with a curve for each noise multiplier."""
    ticks = ticks_of(axis, rows[axis.column])
    curves = []
    for index, (noise, group) in enumerate(rows.groupby("noise_multiplier")):
        orders = axis.orders(group[axis.column])
        style = Style(
            label=f"σ = {noise:.3g}",
            colour=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
        )
        names = [ticks.names[order] for order in orders]
        x = [ticks.positions[order] for order in orders]
        curves.append(Curve.of_single(style, names, x, group[column].astype(float).tolist()))
    return Panel(legend=legend, y_label=label, axis=ticks, curves=curves, log_y=True)
