"""Trials → curves: which trials belong to one curve, and the curve's name and appearance.

Colours show which curves are private: warm colours and green are only for proven guarantees, blue and
grey-blue for everything without a proven guarantee, whatever its target ε.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pandas as pd

from dashboards.compose.content import Curve, Style
from dashboards.compose.display_names import SWEEP, method_position, natural_key, symbol, value_text
from dashboards.compose.questions import Question
from dashboards.compose.repeats import means_and_errors
from dashboards.compose.selection import AS_PUBLISHED, ORDER, PROVEN

# Okabe and Ito (2008) and two dark colours, distinguishable for colour-blind readers; blue is non-private.
NON_PRIVATE_COLOUR = "#0072B2"
UNPROVEN_COLOURS = ("#56B4E9", "#5B6C8F", "#0072B2", "#8FA3BF", "#003F5C")
PRIVATE_COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000", "#882255", "#666633")
MARKERS = ("square", "diamond", "triangle", "pentagon", "cross")
DASHES = ("solid", "dashed", "dotted", "dashdot")


def split(trials: pd.DataFrame, question: Question) -> list[tuple[Style, pd.DataFrame]]:
    """Return the trials of each curve and its style; the curve without noise comes first.

    Colours distinguish sweeps if there are several, else methods if they differ, else ε. Dashes distinguish
    the other splits; the largest number of augmented copies is solid.

    Args:
      trials: trials from `dashboards.compose.selection.shown_trials`.
      question: the question, whose splits are used; splits that do not vary are not named.
    """
    columns = [name for name in question.curve_columns if name in trials]
    varying = [name for name in columns if _varies(trials, name, within_methods="method" in columns)]
    colour_by = next((name for name in (SWEEP, "method") if name in varying), "target_epsilon")
    keys = list(
        dict.fromkeys([*(name for name in columns if name in (colour_by, "target_epsilon")), *varying])
    )
    groups = [
        (dict(zip([*keys, "guarantee"], key, strict=True)), rows)
        for key, rows in trials.groupby([*keys, "guarantee"])
    ]
    groups.sort(key=lambda group: _sort_key(group[0], colour_by))
    dash_columns = [name for name in keys if name != colour_by]
    dashes = _dashes([tuple(key[name] for name in dash_columns) for key, _ in groups])
    # Repeated dashes distinguish nothing; then every curve has its own colour.
    too_many = len({tuple(key[name] for name in dash_columns) for key, _ in groups}) > len(DASHES)
    by_name = colour_by != "target_epsilon"
    looks: dict[tuple[Any, str], tuple[str, str, bool]] = {}
    curves = []
    for index, (key, rows) in enumerate(groups):
        family = tuple(key.values()) if too_many else key.get(colour_by), str(key["guarantee"])
        colour, marker, hollow = looks.setdefault(family, _next_look(key, looks, unique=too_many or by_name))
        if question.axis.scale == "categorical" and dash_columns and len(set(dashes)) > 1:
            marker = MARKERS[index % len(MARKERS)]
        style = Style(
            label=_label(key, varying), colour=colour, marker=marker, dash=dashes[index], hollow=hollow
        )
        curves.append((style, rows))
    return curves


def curve(rows: pd.DataFrame, metric: str, axis: Any, style: Style, *, scale: float, dense: bool) -> Curve:
    """Return one curve of a metric, without points that have no value.

    If each point has one repeat and `dense` is off, the points are not joined: a line would show chance as a
    trend.

    Args:
      rows: the trials of the curve.
      metric: column of the values.
      axis: the drawn axis, a `dashboards.compose.axes.Ticks`.
      style: the curve's appearance.
      scale: factor on the values, 100 for per cent.
      dense: as in `dashboards.compose.axes.Axis`; the error is then a band.
    """
    cells = list(means_and_errors(rows, [ORDER], metric).itertuples(name=None))
    if dense and len(cells) > 1:
        style = dataclasses.replace(style, marker="")
    if not dense and style.marker and all(n < 2 for *_, n in cells):
        style = dataclasses.replace(style, dash="")
    return Curve(
        style=style,
        names=[axis.names[order] for order, *_ in cells],
        x=[axis.positions[order] for order, *_ in cells],
        mean=[scale * mean for _, mean, _, _ in cells],
        standard_error=[scale * error for _, _, error, _ in cells],
        num_repeats=[n for *_, n in cells],
        band=dense,
    )


def guarantee_text(guarantee: str, epsilon: float | None) -> str:
    """Return the legend's words on ε and the guarantee; ε is None if it varies along the curve.

    >>> guarantee_text("proven", 10.0), guarantee_text("none", math.inf)
    ('ε = 10', 'ε = ∞ (non-private)')
    >>> guarantee_text("as-published", 10.0)
    'as published, not proven (ε = 10 claimed)'
    """
    if epsilon is not None and math.isinf(epsilon):
        return "ε = ∞ (non-private)"
    label = "" if epsilon is None else f"ε = {value_text(epsilon)}"
    if guarantee == PROVEN:
        return label or "private"
    if guarantee == AS_PUBLISHED:
        return "as published, not proven" + (f" ({label} claimed)" if label else "")
    return f"no guarantee (target {label})" if label else "non-private: no guarantee"


def _sort_key(key: dict[str, Any], colour_by: str) -> tuple[Any, ...]:
    """Return a sort key: ε from ∞ down, methods as in the tables, and other numbers from large to small."""
    epsilon = key.get("target_epsilon", 0.0)
    method = str(key.get("method", ""))
    by_method = (method_position(method), method)
    ranks = [natural_key(v) if isinstance(v, str) else -float(v) for k, v in key.items() if k not in _RANKED]
    guarantee = (key["guarantee"] == PROVEN, key["guarantee"])
    if colour_by == "method":
        return (*by_method, -epsilon, guarantee, *ranks)
    return (-epsilon, guarantee, *by_method, *ranks)


def _varies(trials: pd.DataFrame, name: str, *, within_methods: bool) -> bool:
    """Return whether a column varies; with `within_methods`, whether it varies among trials of one method."""
    if name in (SWEEP, "method") or not within_methods:
        return bool(trials[name].nunique() > 1)
    return bool(trials.groupby("method")[name].nunique().max() > 1)


_RANKED = ("target_epsilon", "method", "guarantee")


def _dashes(keys: list[tuple[Any, ...]]) -> list[str]:
    """Assign a dash to each key, the same to equal keys."""
    dashes: dict[tuple[Any, ...], str] = {}
    for key in sorted(dict.fromkeys(keys), key=_largest_first):
        dashes[key] = DASHES[len(dashes) % len(DASHES)]
    return [dashes[key] for key in keys]


def _largest_first(key: tuple[Any, ...]) -> list[tuple[int, float]]:
    """Return a sort key: numbers from large to small, ε = ∞ last."""
    numbers = [value if isinstance(value, (int, float)) else 0.0 for value in key]
    return [(1, 0.0) if math.isinf(number) else (0, -float(number)) for number in numbers]


def _next_look(
    key: dict[str, Any], looks: dict[tuple[Any, str], tuple[str, str, bool]], *, unique: bool
) -> tuple[str, str, bool]:
    """Return the next free colour and marker, and whether it is hollow; ε = ∞ is blue unless `unique`."""
    if key["guarantee"] == PROVEN:
        rank = sum(guarantee == PROVEN for _, guarantee in looks)
        return PRIVATE_COLOURS[rank % len(PRIVATE_COLOURS)], MARKERS[rank % len(MARKERS)], False
    finite = key.get("target_epsilon", math.inf) < math.inf
    if not finite and not unique:
        return NON_PRIVATE_COLOUR, "circle", False
    rank = sum(guarantee != PROVEN and value != math.inf for value, guarantee in looks)
    return UNPROVEN_COLOURS[rank % len(UNPROVEN_COLOURS)], "circle", finite


def _label(key: dict[str, Any], varying: list[str]) -> str:
    """Return a curve's legend label: sweep, method, ε with the guarantee, then the other splits that vary."""
    parts = [str(key[SWEEP])] if SWEEP in varying else []
    if "method" in varying:
        parts.append(value_text(key["method"]))
    has_epsilon = "target_epsilon" in varying or not parts or key["guarantee"] != PROVEN
    if has_epsilon:
        parts.append(guarantee_text(str(key["guarantee"]), key.get("target_epsilon")))
    for name in varying:
        if name not in (*_RANKED, SWEEP):
            parts.append(f"{symbol(name)} = {value_text(key[name])}")
    return ", ".join(parts)


def staircase(x: list[float], y: list[float]) -> tuple[list[str], list[float], list[float]]:
    """Return names (empty), x and y of the corners of a staircase through the points."""
    corners_x, corners_y = x[:1], y[:1]
    for place, before, after in zip(x[1:], y, y[1:], strict=False):
        corners_x += [place, place]
        corners_y += [before, after]
    return [""] * len(corners_x), corners_x, corners_y
