"""What trained networks are held against: raw pixels, HOG, untrained weights, the public or private start.

Their scores stand in columns of their own, `raw_pixels_knn_accuracy`, of every trial, by the same scorer as
`knn_accuracy`. Those of raw pixels and HOG are of the sweep, those of untrained weights and of the
start of each trial, and so paired with its own score.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from dashboards.compose.content import REFERENCE_COLOUR, Reference, Style
from dashboards.compose.display_names import SWEEP, UNTRAINED, has_values, score_names, value_text
from dashboards.compose.questions import Question
from dashboards.compose.repeats import mean_and_error
from dashboards.compose.selection import ORDER
from dpgcl_core.release.metrics import DURING

PUBLIC_START, PRIVATE_START = "public_start", "private_start"
_STARTS = {PUBLIC_START: "public start", PRIVATE_START: "private start", UNTRAINED: UNTRAINED}
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
    dash: str = "solid"
    of_trials: bool = True


COMPARED = (
    Compared(prefix="raw_pixels_", label="raw pixels", colour="#9A9A9A", dash="dotted", of_trials=False),
    Compared(prefix="hog_", label="HOG", colour="#9A9A9A", dash="dashdot", of_trials=False),
    Compared(prefix=f"{UNTRAINED}_", label="untrained network", colour=REFERENCE_COLOUR, dash="dashed"),
    Compared(prefix=f"{PUBLIC_START}_", label="public start alone", colour="#222222"),
    Compared(prefix=f"{PRIVATE_START}_", label="private start alone", colour="#222222"),
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


def points_along(
    shown: pd.DataFrame, metric: str, question: Question
) -> list[tuple[Style, str, pd.DataFrame]]:
    """Return style, column and trials of the references of a score that differ along the axis.

    Those of several sweeps stand apart.
    """
    if SWEEP in question.splits and shown[SWEEP].nunique() > 1:
        alone = dataclasses.replace(question, splits=())
        return [
            (dataclasses.replace(style, label=f"{style.label}, {name}", hollow=not number % 2), column, rows)
            for number, (name, cell) in enumerate(shown.groupby(SWEEP, sort=False))
            for style, column, rows in points_along(cell, metric, alone)
        ]
    found = []
    for each, marker in zip(COMPARED, ("diamond", "triangle", "circle", "square", "square"), strict=True):
        column = each.prefix + metric.removesuffix(DURING)
        if has_values(shown, column) and _along(shown, column, each, question):
            style = Style(label=each.label, colour=each.colour, dash="", marker=marker, hollow=True)
            found.append((style, column, shown))
    return found


def reference_rows(shown: pd.DataFrame, question: Question) -> list[ReferenceRow]:
    """Return the rows of references of a table, one for each place on the axis where they differ along it.

    Places with the same scores share one; where all have them, it names none.

    Args:
      shown: from `dashboards.compose.selection.shown_trials`.
      question: of the table.
    """
    series = [name for name in question.series if name.endswith(DURING) and has_values(shown, name)]
    scores = series if question.kind == "convergence" else score_names(shown)
    found = []
    for each in COMPARED:
        columns = {score: each.prefix + score.removesuffix(DURING) for score in scores}
        columns = {score: column for score, column in columns.items() if has_values(shown, column)}
        parts = [("", shown)]
        if any(_along(shown, column, each, question) for column in columns.values()):
            by, name = ORDER, question.axis.column
            if question.kind == "methods" and has_values(shown, NETWORK):
                by = name = NETWORK
            if SWEEP in question.splits:
                by = name = SWEEP
            parts = [(_place(cell, name), cell) for _, cell in shown.groupby(by, sort=by != SWEEP)]
        places: list[tuple[dict[str, tuple[float, float, int]], list[str]]] = []
        for place, cell in parts:
            known = {score: _statistics(cell, name, each) for score, name in columns.items()}
            known = {score: numbers for score, numbers in known.items() if numbers[2]}
            if shared := next((named for scores, named in places if scores == known), None):
                shared.append(place)
            elif known:
                places.append((known, [place]))
        for known, named in places:
            at = "" if len(named) == len(parts) else f", {' and '.join(named)}"
            found.append(ReferenceRow(label=each.label + at, scores=known))
    return found


def start_of(rows: pd.DataFrame, score: str) -> tuple[str, pd.Series] | None:
    """Return the name and the scores that a gain is over: those of the start, or of the untrained network."""
    columns = {name: f"{start}_{score}" for start, name in _STARTS.items()}
    known = {name: rows[column] for name, column in columns.items() if has_values(rows, column)}
    if not known:
        return None
    name, scores = next(iter(known.items()))
    if scores.notna().all():
        return name, scores
    for other in known.values():
        scores = scores.fillna(other)
    return name if len(known) == 1 else "start", scores


def start_prefix(names: Iterable[str]) -> str | None:
    """Return the prefix of the scores of the one start that `start_of` named; None for several or none.

    >>> [start_prefix(names) for names in ({"public start"}, {"untrained"}, {"public start", "untrained"})]
    ['public_start_', 'untrained_', None]
    """
    return next((f"{start}_" for start, name in _STARTS.items() if {name} == set(names)), None)


def start_text(names: Iterable[str]) -> str:
    """Return what gains are over, by the names that `start_of` found.

    >>> start_text({"untrained"}), start_text({"private start"}), start_text({"public start", "untrained"})
    ('the untrained network', 'the private start', 'the start')
    """
    first, *others = sorted(set(names)) or [UNTRAINED]
    if others:
        return "the start"
    return "the untrained network" if first == UNTRAINED else f"the {first}"


def _place(cell: pd.DataFrame, column: str) -> str:
    value = cell[column].iloc[0]
    return str(value) if column == SWEEP else value_text(value)


def _along(shown: pd.DataFrame, column: str, each: Compared, question: Question) -> bool:
    """Return whether a reference has its own score at each place of the axis."""
    if not question.untrained_along:
        return False
    return each.of_trials or bool(shown.groupby(ORDER)[column].first().nunique() > 1)


def _statistics(rows: pd.DataFrame, column: str, each: Compared) -> tuple[float, float, int]:
    """Return mean, standard error and n; what is of the sweep is one number without an error."""
    if "step" in rows and "run_id" in rows:
        rows = rows.drop_duplicates("run_id")
    mean, error, n = mean_and_error(rows, column)
    return (mean, error, n) if each.of_trials else (mean, math.nan, min(n, 1))
