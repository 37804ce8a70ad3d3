"""Baselines of trained networks: raw pixels, HOG, untrained weights, the public or private start.

Their scores are in separate columns of every trial, such as `raw_pixels_knn_accuracy`, and come from the same
scorer as `knn_accuracy`. Raw pixels and HOG are scored once for a sweep. Untrained weights and starts are
scored for each trial, and so are paired with its own score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

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
"""The text in the guarantee column of a reference's row: it is no training of the sweep."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Features that a trained network is compared with: raw pixels, HOG, or those before training.

    Attributes:
      prefix: prefix of its scores' columns.
      label: label for readers.
      colour, dash: colour and dash of its line.
      is_per_trial: whether the baseline was scored anew for each trial.
    """

    prefix: str
    label: str
    colour: str
    dash: str = "solid"
    is_per_trial: bool = True


BASELINES = (
    Baseline(prefix="raw_pixels_", label="raw pixels", colour="#9A9A9A", dash="dotted", is_per_trial=False),
    Baseline(prefix="hog_", label="HOG", colour="#9A9A9A", dash="dashdot", is_per_trial=False),
    Baseline(prefix=f"{UNTRAINED}_", label="untrained network", colour=REFERENCE_COLOUR, dash="dashed"),
    Baseline(prefix=f"{PUBLIC_START}_", label="public start alone", colour="#222222"),
    Baseline(prefix=f"{PRIVATE_START}_", label="private start alone", colour="#222222"),
)


@dataclass(frozen=True, kw_only=True)
class ReferenceRow:
    """A baseline's row in a table of scores.

    Attributes:
      label: label for readers.
      scores: (mean, standard error, number of repeats) by the score's name.
    """

    label: str
    scores: dict[str, tuple[float, float, int]]


def lines_across(trials: pd.DataFrame, metric: str, question: Question) -> list[Reference]:
    """Return the baselines of a score that are constant along the axis, as lines in per cent."""
    references = []
    for baseline in BASELINES:
        column = baseline.prefix + metric.removesuffix(DURING)
        if has_values(trials, column) and not _varies_along_axis(trials, column, baseline, question):
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
    """Return style, column and trials of each baseline of a score that differs along the axis.

    Each of several compared sweeps has its own.
    """
    if SWEEP in question.splits and trials[SWEEP].nunique() > 1:
        unsplit_question = replace(question, splits=())
        return [
            (replace(style, label=f"{style.label}, {name}", hollow=not number % 2), column, rows)
            for number, (name, cell) in enumerate(trials.groupby(SWEEP, sort=False))
            for style, column, rows in points_along(cell, metric, unsplit_question)
        ]
    points = []
    markers = ("diamond", "triangle", "circle", "square", "square")
    for baseline, marker in zip(BASELINES, markers, strict=True):
        column = baseline.prefix + metric.removesuffix(DURING)
        if has_values(trials, column) and _varies_along_axis(trials, column, baseline, question):
            style = Style(label=baseline.label, colour=baseline.colour, dash="", marker=marker, hollow=True)
            points.append((style, column, trials))
    return points


def reference_rows(trials: pd.DataFrame, question: Question) -> list[ReferenceRow]:
    """Return a table's rows of baselines, one for each value on the axis if their scores differ along it.

    Values with the same scores share a row. If all values share it, the row names none.

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
        if any(_varies_along_axis(trials, column, baseline, question) for column in columns.values()):
            by, name = ORDER, question.axis.column
            if question.kind == "methods" and has_values(trials, NETWORK):
                by = name = NETWORK
            if SWEEP in question.splits:
                by = name = SWEEP
            parts = [(_value_name(cell, name), cell) for _, cell in trials.groupby(by, sort=by != SWEEP)]
        rows_by_scores: list[tuple[dict[str, tuple[float, float, int]], list[str]]] = []
        for place, cell in parts:
            statistics = {score: _statistics(cell, name, baseline) for score, name in columns.items()}
            statistics = {score: numbers for score, numbers in statistics.items() if numbers[2]}
            if shared := next((names for scores, names in rows_by_scores if scores == statistics), None):
                shared.append(place)
            elif statistics:
                rows_by_scores.append((statistics, [place]))
        for statistics, names in rows_by_scores:
            at = "" if len(names) == len(parts) else f", {' and '.join(names)}"
            rows.append(ReferenceRow(label=baseline.label + at, scores=statistics))
    return rows


def start_of(rows: pd.DataFrame, score: str) -> tuple[str, pd.Series] | None:
    """Return name and scores, by trial, of the start (else the untrained network); None if not scored."""
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
    """Return what the gains are measured from, in words, from the names that `start_of` returned.

    >>> start_text({"untrained"}), start_text({"private start"}), start_text({"public start", "untrained"})
    ('the untrained network', 'the private start', 'the start')
    """
    first, *more_names = sorted(set(names)) or [UNTRAINED]
    if more_names:
        return "the start"
    return "the untrained network" if first == UNTRAINED else f"the {first}"


def _value_name(cell: pd.DataFrame, column: str) -> str:
    value = cell[column].iloc[0]
    return str(value) if column == SWEEP else value_text(value)


def _varies_along_axis(trials: pd.DataFrame, column: str, baseline: Baseline, question: Question) -> bool:
    """Return whether a baseline is drawn as points along the axis, not as one line."""
    if not question.untrained_along:
        return False
    return baseline.is_per_trial or bool(trials.groupby(ORDER)[column].first().nunique() > 1)


def _statistics(rows: pd.DataFrame, column: str, baseline: Baseline) -> tuple[float, float, int]:
    """Return mean, standard error and number of repeats; no error if it was scored once for the sweep."""
    if "step" in rows and "run_id" in rows:
        rows = rows.drop_duplicates("run_id")
    mean, error, n = mean_and_error(rows, column)
    return (mean, error, n) if baseline.is_per_trial else (mean, math.nan, min(n, 1))
