"""Baselines of trained networks: raw pixels, HOG, untrained weights, the public or private start.

Their scores are in separate columns of every trial, such as `raw_pixels_knn_accuracy`, and come from the same
scorer as `knn_accuracy`. Raw pixels and HOG are scored once for a sweep. Untrained weights and starts are
scored for each trial, and so are paired with its own score.
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
"""The guarantee of a reference in tables: it was not trained on the data."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A baseline of trained networks.

    Attributes:
      prefix: prefix of its scores' columns.
      label: label for readers.
      colour, dash: colour and dash of its line.
      of_trials: whether every trial has its own baseline.
    """

    prefix: str
    label: str
    colour: str
    dash: str = "solid"
    of_trials: bool = True


BASELINES = (
    Baseline(prefix="raw_pixels_", label="raw pixels", colour="#9A9A9A", dash="dotted", of_trials=False),
    Baseline(prefix="hog_", label="HOG", colour="#9A9A9A", dash="dashdot", of_trials=False),
    Baseline(prefix=f"{UNTRAINED}_", label="untrained network", colour=REFERENCE_COLOUR, dash="dashed"),
    Baseline(prefix=f"{PUBLIC_START}_", label="public start alone", colour="#222222"),
    Baseline(prefix=f"{PRIVATE_START}_", label="private start alone", colour="#222222"),
)


@dataclass(frozen=True, kw_only=True)
class ReferenceRow:
    """A row of a table.

    Attributes:
      label: label for readers.
      scores: (mean, standard error, number of repeats) by the score's name.
    """

    label: str
    scores: dict[str, tuple[float, float, int]]


def lines_across(trials: pd.DataFrame, metric: str, question: Question) -> list[Reference]:
    """Return a score's references that are constant along the axis, in per cent."""
    references = []
    for baseline in BASELINES:
        column = baseline.prefix + metric.removesuffix(DURING)
        if has_values(trials, column) and not _along(trials, column, baseline, question):
            mean, error, n = _statistics(trials, column, baseline)
            references.append(
                Reference(
                    label=baseline.label,
                    mean=100 * mean,
                    standard_error=100 * error,
                    num_repeats=n,
                    colour=baseline.colour,
                    dash=baseline.dash,
                )
            )
    return references


def points_along(
    trials: pd.DataFrame, metric: str, question: Question
) -> list[tuple[Style, str, pd.DataFrame]]:
    """Return style, column and trials of a score's references that differ along the axis.

    References of several sweeps are separate.
    """
    if SWEEP in question.splits and trials[SWEEP].nunique() > 1:
        alone = dataclasses.replace(question, splits=())
        return [
            (dataclasses.replace(style, label=f"{style.label}, {name}", hollow=not number % 2), column, rows)
            for number, (name, cell) in enumerate(trials.groupby(SWEEP, sort=False))
            for style, column, rows in points_along(cell, metric, alone)
        ]
    points = []
    markers = ("diamond", "triangle", "circle", "square", "square")
    for baseline, marker in zip(BASELINES, markers, strict=True):
        column = baseline.prefix + metric.removesuffix(DURING)
        if has_values(trials, column) and _along(trials, column, baseline, question):
            style = Style(label=baseline.label, colour=baseline.colour, dash="", marker=marker, hollow=True)
            points.append((style, column, trials))
    return points


def reference_rows(trials: pd.DataFrame, question: Question) -> list[ReferenceRow]:
    """Return a table's rows of references, one for each place on the axis if they differ along it.

    Places with the same scores share a row. If all places share it, the row names no place.

    Args:
      trials: trials from `dashboards.compose.selection.shown_trials`.
      question: the table's question.
    """
    series = [name for name in question.series if name.endswith(DURING) and has_values(trials, name)]
    scores = series if question.kind == "convergence" else score_names(trials)
    rows = []
    for baseline in BASELINES:
        columns = {score: baseline.prefix + score.removesuffix(DURING) for score in scores}
        columns = {score: column for score, column in columns.items() if has_values(trials, column)}
        parts = [("", trials)]
        if any(_along(trials, column, baseline, question) for column in columns.values()):
            by, name = ORDER, question.axis.column
            if question.kind == "methods" and has_values(trials, NETWORK):
                by = name = NETWORK
            if SWEEP in question.splits:
                by = name = SWEEP
            parts = [(_place(cell, name), cell) for _, cell in trials.groupby(by, sort=by != SWEEP)]
        places: list[tuple[dict[str, tuple[float, float, int]], list[str]]] = []
        for place, cell in parts:
            statistics = {score: _statistics(cell, name, baseline) for score, name in columns.items()}
            statistics = {score: numbers for score, numbers in statistics.items() if numbers[2]}
            if shared := next((names for scores, names in places if scores == statistics), None):
                shared.append(place)
            elif statistics:
                places.append((statistics, [place]))
        for statistics, names in places:
            at = "" if len(names) == len(parts) else f", {' and '.join(names)}"
            rows.append(ReferenceRow(label=baseline.label + at, scores=statistics))
    return rows


def start_of(rows: pd.DataFrame, score: str) -> tuple[str, pd.Series] | None:
    """Return name and scores of a gain's reference network: the start, or the untrained network."""
    columns = {name: f"{start}_{score}" for start, name in _STARTS.items()}
    scores_by_start = {name: rows[column] for name, column in columns.items() if has_values(rows, column)}
    if not scores_by_start:
        return None
    name, scores = next(iter(scores_by_start.items()))
    if scores.notna().all():
        return name, scores
    for fallback in scores_by_start.values():
        scores = scores.fillna(fallback)
    return name if len(scores_by_start) == 1 else "start", scores


def start_prefix(names: Iterable[str]) -> str | None:
    """Return the score prefix of the single start that `start_of` named; None for several or none.

    >>> [start_prefix(names) for names in ({"public start"}, {"untrained"}, {"public start", "untrained"})]
    ['public_start_', 'untrained_', None]
    """
    return next((f"{start}_" for start, name in _STARTS.items() if {name} == set(names)), None)


def start_text(names: Iterable[str]) -> str:
    """Return the name of the gains' reference, from the names that `start_of` found.

    >>> start_text({"untrained"}), start_text({"private start"}), start_text({"public start", "untrained"})
    ('the untrained network', 'the private start', 'the start')
    """
    first, *more_names = sorted(set(names)) or [UNTRAINED]
    if more_names:
        return "the start"
    return "the untrained network" if first == UNTRAINED else f"the {first}"


def _place(cell: pd.DataFrame, column: str) -> str:
    value = cell[column].iloc[0]
    return str(value) if column == SWEEP else value_text(value)


def _along(trials: pd.DataFrame, column: str, baseline: Baseline, question: Question) -> bool:
    """Return whether a reference has its own score at each place of the axis."""
    if not question.untrained_along:
        return False
    return baseline.of_trials or bool(trials.groupby(ORDER)[column].first().nunique() > 1)


def _statistics(rows: pd.DataFrame, column: str, baseline: Baseline) -> tuple[float, float, int]:
    """Return mean, standard error and n; a score of the whole sweep has no error."""
    if "step" in rows and "run_id" in rows:
        rows = rows.drop_duplicates("run_id")
    mean, error, n = mean_and_error(rows, column)
    return (mean, error, n) if baseline.of_trials else (mean, math.nan, min(n, 1))
