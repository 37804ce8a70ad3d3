"""Several sweeps of one question in one figure: which may be overlaid, and how they differ.

Scores are comparable if sweeps of one data set scored the same records in the same way; other sweeps are
refused. Trainings of two sweeps with one seed start from the same network and are scored on the same
records, so their differences are paired over the seeds that both sweeps have. Without such seeds, the squared
errors of both means are added. The differences have errors but no verdict, because the sweeps were not
planned as one comparison.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from dashboards.compose.content import Content, Table
from dashboards.compose.display_names import (
    SWEEP,
    column_title,
    has_values,
    natural_key,
    panel_scores,
    score_names,
    value_text,
)
from dashboards.compose.figure import content_of, numbers_of
from dashboards.compose.questions import Question, find_question
from dashboards.compose.repeats import mean_and_error
from dashboards.compose.search_trials import is_setting
from dashboards.compose.selection import ORDER, cell_columns, shown_trials
from dashboards.compose.tables import cell_text, is_informative, mean_text
from dashboards.dashboard_error import DashboardError

SEED = "public_seed"
_SAME_COLUMNS = ("dataset", "scored_on")
_SCORING_COLUMNS = (
    *("max_index_records", "max_query_records", "num_neighbors", "readout", "score_on_held_out"),
    "score_noise_multiplier",
)
_NOT_SETTINGS = ("num_trials", "noise_multiplier", "image_shape", "question")
_SHA256 = re.compile(r"^([0-9a-f]{8})[0-9a-f]{56}$")
_TITLES = {
    **{"score": "Score", "minus": "Minus", "difference": "Difference (points)"},
    "num_repeats": "Seeds in common",
}


def overlay_sweeps(sweeps: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the trials of several sweeps as one table, distinguished by the column `sweep`.

    Args:
      sweeps: tables from `dashboards.figures.load_for`, each of one sweep with its own `sweep_run_id`.

    Raises:
      DashboardError: there are fewer than two sweeps, one is named twice, or scores may not be compared.
    """
    if len(sweeps) < 2:
        raise DashboardError(f"a comparison needs at least two sweeps; got {_sweep_names(sweeps)}")
    return combine_sweeps(sweeps)


def combine_sweeps(sweeps: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the trials of one or several sweeps as one table, with the checks of `overlay_sweeps`."""
    ids = [str(trials["sweep_run_id"].iloc[0]) for trials in sweeps]
    if len(set(ids)) < len(ids):
        raise DashboardError(f"each sweep must be named only once; got {_sweep_names(sweeps)}")
    for column in _SAME_COLUMNS:
        _check_same(sweeps, column, "sweeps of different data sets cannot share a figure")
    for column in _SCORING_COLUMNS:
        _check_same(sweeps, column, "sweeps that were scored differently cannot be compared")
    names = [str(trials[SWEEP].iloc[0]) for trials in sweeps]
    labels = [
        f"{name} ({run_id[:8]})" if names.count(name) > 1 else name
        for name, run_id in zip(names, ids, strict=True)
    ]
    return pd.concat(
        [trials.assign(**{SWEEP: name}) for trials, name in zip(sweeps, labels, strict=True)],
        ignore_index=True,
    )


def question_of(sweeps: Sequence[pd.DataFrame], name: str | None) -> Question:
    """Return the question `name`, else the one that all sweeps recorded, with a curve for each sweep.

    Raises:
      DashboardError: there is no name and the sweeps have different questions, or it is a search.
    """
    names = {
        str(trials["question"].iloc[0]) if has_values(trials, "question") else "none recorded"
        for trials in sweeps
    }
    if name is None and len(names) > 1:
        raise DashboardError(
            f"compared sweeps must have one question; got {', '.join(sorted(names))}. Set --question to the "
            "question to draw"
        )
    question = find_question(name or names.pop())
    if question.kind == "search":
        raise DashboardError(
            "searches propose different settings, so one figure cannot show them. Compare them with "
            "`python -m dashboards pareto`"
        )
    return dataclasses.replace(question, splits=(SWEEP, *question.splits))


def comparison_of(trials: pd.DataFrame, question: Question) -> tuple[Content, pd.DataFrame]:
    """Return the figure of overlaid sweeps, and its numbers.

    Args:
      trials: trials from `overlay_sweeps`.
      question: the question from `question_of`.

    Raises:
      DashboardError: as in `dashboards.compose.figure.content_of`, or a sweep has nothing to show.
    """
    for name, rows in trials.groupby(SWEEP, sort=False):
        _check_has_scores(str(name), rows.dropna(axis="columns", how="all"), question)
    content = content_of(trials, question, has_answer=False)
    names = list(dict.fromkeys(trials[SWEEP]))
    tables, notes = list(content.tables), [f"{len(names)} sweeps compared: {'; '.join(names)}."]
    if question.kind != "convergence" and question.axis.column in trials:
        differences = differences_between(trials, question)
        if len(differences):
            tables.append((f"Differences to {names[0]}", _differences_table(differences)))
            notes.append(
                "Differences between sweeps: paired over the seeds that both have, ± standard error. "
                "There is no verdict: the sweeps were not planned as one comparison."
            )
    if (settings := settings_that_differ(trials)).rows:
        tables.append(("Settings that differ between the sweeps", settings))
    complete_content = dataclasses.replace(content, tables=tables, remarks=notes + content.remarks)
    return complete_content, numbers_of(trials, question)


def _check_has_scores(name: str, trials: pd.DataFrame, question: Question) -> None:
    """Raise DashboardError if a sweep would silently have no curve next to the others."""
    try:
        trials = shown_trials(trials, question)
    except DashboardError as error:
        raise DashboardError(f"{name!r} cannot be compared: {error}") from error
    if not score_names(trials):
        raise DashboardError(f"{name!r} cannot be compared: none of its trials has a score")


def differences_between(trials: pd.DataFrame, question: Question) -> pd.DataFrame:
    """Return the difference of every point's mean score to that of the same point of the first sweep.

    The columns are the score, the sweep, the values that distinguish the curve, the point on the axis,
    `minus` (the first sweep), the mean difference, its standard error, and `num_repeats`, the number of
    common seeds. `num_repeats` is 0 if there are none; the difference is then not paired.

    Raises:
      DashboardError: as in `dashboards.compose.selection.shown_trials`.
    """
    frame, first = shown_trials(trials, question), str(trials[SWEEP].iloc[0])
    by = [name for name in cell_columns(frame, question) if name != SWEEP]
    rows: list[dict[str, Any]] = []
    for score in panel_scores(score_names(frame)):
        for key, cell in frame.groupby(by):
            point = {question.axis.column: cell[question.axis.column].iloc[0]}
            point |= {n: v for n, v in zip(by, key, strict=True) if n != ORDER and n not in point}
            scored = cell[cell[score].notna()]
            reference = scored[scored[SWEEP] == first]
            for name, compared in scored[scored[SWEEP] != first].groupby(SWEEP, sort=False):
                if len(reference):
                    difference = _difference(compared, reference, score)
                    rows.append({"score": score, SWEEP: str(name), **point, "minus": first} | difference)
    return pd.DataFrame(rows)


def _difference(trials: pd.DataFrame, reference: pd.DataFrame, score: str) -> dict[str, Any]:
    if SEED in trials and SEED in reference:
        differences = trials.groupby(SEED)[score].mean() - reference.groupby(SEED)[score].mean()
        if differences.notna().any():
            mean, error, n = mean_and_error(pd.DataFrame({"score": differences}), "score")
            return {"difference": mean, "standard_error": error, "num_repeats": n}
    (mean, error, _), (base, base_error, _) = (mean_and_error(rows, score) for rows in (trials, reference))
    return {"difference": mean - base, "standard_error": math.hypot(error, base_error), "num_repeats": 0}


def _differences_table(differences: pd.DataFrame) -> Table:
    """Return the differences as a table for readers, in percentage points."""
    columns = [str(name) for name in differences if name not in ("difference", "standard_error", "minus")]
    end = columns.index("num_repeats")
    axis, order = columns[end - 1], [*columns[:end], "minus", "difference", "num_repeats"]
    order = [name for name in order if name == axis or is_informative(differences, name)]
    rows = []
    for record in differences.to_dict("records"):
        cells = dict(record)
        cells["score"] = column_title(record["score"])
        cells["difference"] = mean_text(record["difference"], record["standard_error"], 1, scale=100)
        cells["num_repeats"] = str(record["num_repeats"] or "no seed in common: not paired")
        rows.append([cell_text(name, cells[name], record["guarantee"]) for name in order])
    return Table(heading=[_TITLES.get(name) or column_title(name) for name in order], rows=rows)


def settings_that_differ(trials: pd.DataFrame) -> Table:
    """Return one row per setting whose values differ between sweeps, and a column per sweep."""
    sweeps = dict(iter(trials.groupby(SWEEP, sort=False)))
    rows = []
    for column in map(str, trials):
        if column in _NOT_SETTINGS or column.startswith("sweep") or not is_setting(column):
            continue
        texts = [_values_text(rows[column]) for rows in sweeps.values()]
        if len(set(texts)) > 1:
            rows.append([column_title(column), *texts])
    return Table(heading=["Setting", *map(str, sweeps)], rows=rows)


def _values_text(column: pd.Series) -> str:
    values = sorted({_SHA256.sub(r"\1…", value_text(value)) for value in column}, key=natural_key)
    return ", ".join(values) if len(values) <= 5 else f"{len(values)} values"


def _check_same(sweeps: Sequence[pd.DataFrame], column: str, reason: str) -> None:
    texts = [_values_text(trials[column]) if column in trials else "none" for trials in sweeps]
    if len(set(texts)) > 1:
        listing = "; ".join(
            f"{trials[SWEEP].iloc[0]!r} has {value}" for trials, value in zip(sweeps, texts, strict=True)
        )
        raise DashboardError(f"{reason}: {column} must be the same; {listing}")


def _sweep_names(sweeps: Sequence[pd.DataFrame]) -> str:
    return ", ".join(repr(str(trials[SWEEP].iloc[0])) for trials in sweeps) or "none"
