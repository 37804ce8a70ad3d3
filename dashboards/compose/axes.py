"""The axis of a question: its column, order and scale, and the positions of its values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from dashboards.compose.display_names import natural_key, value_text

Scale = Literal["log2", "log", "linear", "categorical"]

_CHARACTERS_PER_PANEL = 44  # total length of tick labels, side by side along one panel


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The axis that a figure is drawn against.

    On a numeric scale, text, infinity and missing values are drawn separately after the last number ("batch",
    ε = ∞), and values without a logarithm are drawn separately before the first number (σ = 0).

    Attributes:
      column: the trials' column.
      label: label with the symbol, for example "Group size S".
      symbol: only the symbol, for example "S".
      scale: "log2", "log" or "linear" for numbers, or "categorical".
      order: categories that come first, in this order; the others come next, sorted by name.
      dense: whether there are many values that form no grid, for example steps: lines without markers, few
        ticks.
      detached_name: the name of infinity and missing values, if it is not the value itself.
    """

    column: str
    label: str
    symbol: str
    scale: Scale
    order: Sequence[str] = ()
    dense: bool = False
    detached_name: str = ""

    def orders(self, values: pd.Series) -> pd.Series:
        """Return each value's order: a number by which the values sort, the same for equal values."""
        if self.scale != "categorical":
            return values.map(_rounded_number).astype(float)
        fixed_ranks = {name: ranks for ranks, name in enumerate(self.order)}
        names = sorted(
            {str(value) for value in values}, key=lambda v: (fixed_ranks.get(v, math.inf), natural_key(v))
        )
        ranks = {name: float(i) for i, name in enumerate(names)}
        return values.map(lambda value: ranks[str(value)]).astype(float)

    def is_detached(self, order: float) -> bool:
        """Return whether the value of this order is drawn separately from the numeric scale."""
        if self.scale == "categorical":
            return False
        return math.isinf(order) or (self.scale in ("log", "log2") and order <= 0)

    def place(self, order: float) -> float:
        """Return the position of the value of this order, which is not detached."""
        if self.scale == "log2":
            return math.log2(order)
        return math.log10(order) if self.scale == "log" else order


@dataclass(frozen=True, kw_only=True)
class Ticks:
    """A drawn axis.

    Attributes:
      label: the axis label.
      symbol: the axis symbol, shown on hovering.
      positions: position of each value, by its order (`Axis.orders`).
      names: name of each value, by its order.
      ticks: (position, label) of the labelled values.
      low, high: the ends of the axis.
      gaps: positions of the lines that separate detached values.
      categorical: whether values are names, written down the side.
    """

    label: str
    symbol: str
    positions: Mapping[float, float]
    names: Mapping[float, str]
    ticks: list[tuple[float, str]]
    low: float
    high: float
    gaps: list[float]
    categorical: bool = False


def ticks_of(axis: Axis, values: pd.Series) -> Ticks:
    """Return the drawn axis of the `values` of a column."""
    orders = axis.orders(values)
    names = {order: value_text(_displayed_value(value)) for order, value in zip(orders, values, strict=True)}
    names = dict(sorted(names.items()))
    if axis.detached_name and math.inf in names:
        names[math.inf] = axis.detached_name
    positions = {order: axis.place(order) for order in names if not axis.is_detached(order)}
    inside = sorted(positions.values()) or [0.0]
    steps = [after - before for before, after in itertools.pairwise(inside)]
    span = inside[-1] - inside[0]
    unit = min(min(steps), span / 3) if steps and not axis.dense else span / 20 or 1.0
    unit = max(unit, span / 12)
    gaps, low, high = [], inside[0], inside[-1]
    for order in names:
        if axis.is_detached(order):
            positions[order] = low - 1.5 * unit if order <= 0 else high + 1.5 * unit
            gaps += [positions[order] + (0.75 if order <= 0 else -0.75) * unit] if len(names) > 1 else []
    positions = {order: positions[order] for order in names}
    margin = 0.5 if axis.scale == "categorical" else 0.4 * unit * (1 + axis.dense)
    ends = min(positions.values()), max(positions.values())
    ticks = round_numbers(inside[0], inside[-1], axis.scale) if axis.dense else []
    is_single = not ticks and len(inside) == 1  # no round number is in the range
    ticks += [(positions[o], names[o]) for o in names if axis.is_detached(o) or not axis.dense or is_single]
    categorical = axis.scale == "categorical"
    return Ticks(
        label=axis.label,
        symbol=axis.symbol,
        positions=positions,
        names=names,
        ticks=ticks if categorical else _thin_out(ticks, ends[1] - ends[0]),
        low=ends[0] - margin,
        high=ends[1] + margin,
        gaps=gaps,
        categorical=categorical,
    )


def _rounded_number(value: Any) -> float:
    """Round a value to six digits, so that 512 and 511.9999999 are equal; text becomes infinity."""
    if value is None or isinstance(value, str) or math.isnan(value):
        return math.inf
    return float(f"{float(value):.6g}")


def _displayed_value(value: Any) -> Any:
    return value if isinstance(value, (str, bool)) or value is None else _rounded_number(value)


def round_numbers(low: float, high: float, scale: Scale) -> list[tuple[float, str]]:
    """Return (position, label) of the round numbers between two positions."""
    if scale in ("log", "log2"):
        base = 10.0 if scale == "log" else 2.0
        powers = range(math.floor(low), math.ceil(high) + 1)
        factors = (1, 2, 5) if scale == "log" and high - low < 2 else (1,)
        numbers = [(math.log(f * base**p, base), f * base**p) for p in powers for f in factors]
    else:
        rough_step = (high - low) / 6 or 1.0
        step = 10 ** math.floor(math.log10(rough_step))
        step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= rough_step * 0.999)
        numbers = [(i * step, i * step) for i in range(math.floor(low / step), math.ceil(high / step) + 1)]
    slack = 1e-9 + 0.001 * (high - low)
    return [(place, f"{value:.6g}") for place, value in numbers if low - slack <= place <= high + slack]


def _thin_out(ticks: list[tuple[float, str]], span: float) -> list[tuple[float, str]]:
    """Return the ticks whose labels do not touch: the last, then the first, then those that fit between."""
    if not ticks or not span:
        return ticks

    def labels_fit(first: tuple[float, str], second: tuple[float, str]) -> bool:
        characters = abs(first[0] - second[0]) / span * _CHARACTERS_PER_PANEL
        return characters >= (len(first[1]) + len(second[1])) / 2 + 1

    spaced_ticks = [ticks[-1], *(ticks[:1] if labels_fit(ticks[0], ticks[-1]) else [])]
    for tick in reversed(ticks[1:-1]):
        if all(labels_fit(tick, neighbour) for neighbour in spaced_ticks):
            spaced_ticks.append(tick)
    return sorted(spaced_ticks)
