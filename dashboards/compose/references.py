"""What trained networks are held against: raw pixels, HOG, untrained weights, the public start.

Their scores stand in columns of their own, `raw_pixels_knn_accuracy`, of every trial, by the same scorer as
`knn_accuracy`. Those of raw pixels and HOG are of the sweep, those of untrained weights and of the public
start of each trial, and so paired with its own score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from dashboards.compose.content import REFERENCE_COLOUR, Reference, Style
from dashboards.compose.names import DURING, UNTRAINED, has_values, score_names, value_text
from dashboards.compose.questions import Question
from dashboards.compose.repeats import mean_and_error
from dashboards.compose.selection import ORDER

PUBLIC_START = "public_start"
NETWORK = "network_name"
REFERENCE = "reference"
"""What tables say of its guarantee: nothing of it was trained on the data."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One thing that trained networks are held against.

    Attributes:
      prefix: of its scores' columns.
      label: for readers.
      colour, dash: of its line.
      of_trials: every trial has its own.
    """

    prefix: str
    label: str
    colour: str
    dash: str
    of_trials: bool


COMPARED = (
    Compared(prefix="raw_pixels_", label="raw pixels", colour="#9A9A9A", dash="dotted", of_trials=False),
    Compared(prefix="hog_", label="HOG", colour="#9A9A9A", dash="dashdot", of_trials=False),
    Compared(
        prefix=f"{UNTRAINED}_",
        label="untrained network",
        colour=REFERENCE_COLOUR,
        dash="dashed",
        of_trials=True,
    ),
    Compared(
        prefix=f"{PUBLIC_START}_",
        label="public start alone",
        colour="#222222",
        dash="solid",
        of_trials=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class ReferenceRow:
    """A row of a table.

    Attributes:
      label: for readers.
      scores: (mean, standard error, number of repeats) by the score's name.
    """

    label: str
    scores: dict[str, tuple[float, float, int]]


def lines_across(shown: pd.DataFrame, metric: str, question: Question) -> list[Reference]:
    """Return a score's references that are one number along the axis, in per cent."""
    found = []
    for each in COMPARED:
        column = each.prefix + metric.removesuffix(DURING)
        if has_values(shown, column) and not _along(shown, column, each, question):
            mean, error, n = _statistics(shown, column, each)
            found.append(
                Reference(
                    label=each.label,
                    mean=100 * mean,
                    standard_error=100 * error,
                    num_repeats=n,
                    colour=each.colour,
                    dash=each.dash,
                )
            )
    return found


def points_along(shown: pd.DataFrame, metric: str, question: Question) -> list[tuple[Style, str]]:
    """Return style and column of the references of a score that differ along the axis."""
    found = []
    for each, marker in zip(COMPARED, ("diamond", "triangle", "circle", "square"), strict=True):
        column = each.prefix + metric.removesuffix(DURING)
        if has_values(shown, column) and _along(shown, column, each, question):
            style = Style(label=each.label, colour=each.colour, dash="", marker=marker, hollow=True)
            found.append((style, column))
    return found


def reference_rows(shown: pd.DataFrame, question: Question) -> list[ReferenceRow]:
    """Return the rows of references of a table, one for each place on the axis where they differ along it.

    Args:
      shown: from `dashboards.compose.selection.shown_trials`.
      question: of the table.
    """
    series = [name for name in question.series if name.endswith(DURING) and has_values(shown, name)]
    scores = series if question.kind == "convergence" else list(score_names(shown))
    found = []
    for each in COMPARED:
        columns = {score: each.prefix + score.removesuffix(DURING) for score in scores}
        columns = {score: column for score, column in columns.items() if has_values(shown, column)}
        parts = [("", shown)]
        if any(_along(shown, column, each, question) for column in columns.values()):
            by, name = ORDER, question.axis.column
            if question.kind == "methods" and has_values(shown, NETWORK):
                by = name = NETWORK
            parts = [(f", {value_text(cell[name].iloc[0])}", cell) for _, cell in shown.groupby(by)]
        for place, cell in parts:
            known = {score: _statistics(cell, name, each) for score, name in columns.items()}
            known = {score: numbers for score, numbers in known.items() if numbers[2]}
            if known:
                found.append(ReferenceRow(label=each.label + place, scores=known))
    return found


def start_of(rows: pd.DataFrame, score: str) -> tuple[str, pd.Series] | None:
    """Return the name and the scores that a gain is over: the public start, or else the untrained network."""
    start, untrained = f"{PUBLIC_START}_{score}", f"{UNTRAINED}_{score}"
    if not has_values(rows, start):
        return (UNTRAINED, rows[untrained]) if has_values(rows, untrained) else None
    if not has_values(rows, untrained):
        return "public start", rows[start]
    name = "public start" if rows[start].notna().all() else "start"
    return name, rows[start].fillna(rows[untrained])


def _along(shown: pd.DataFrame, column: str, each: Compared, question: Question) -> bool:
    """Return whether a reference has its own score at each place of the axis."""
    if not question.untrained_along:
        return False
    return each.of_trials or bool(shown.groupby(ORDER)[column].mean().nunique() > 1)


def _statistics(rows: pd.DataFrame, column: str, each: Compared) -> tuple[float, float, int]:
    """Return mean, standard error and n; what is of the sweep is one number without an error."""
    if "step" in rows and "run_id" in rows:
        rows = rows.drop_duplicates("run_id")
    mean, error, n = mean_and_error(rows, column)
    return (mean, error, n) if each.of_trials else (mean, math.nan, min(n, 1))
