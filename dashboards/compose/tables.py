"""Trials → tables: the numbers behind a figure, raw for files and worded for readers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from dashboards.compose.content import Table
from dashboards.compose.display_names import (
    SNR,
    SNR_NOISED,
    SNR_PLAIN,
    SWEEP,
    column_title,
    has_values,
    score_names,
    value_text,
)
from dashboards.compose.gains import GAIN, with_gains
from dashboards.compose.questions import Question
from dashboards.compose.references import REFERENCE, ReferenceRow, reference_rows
from dashboards.compose.repeats import means_and_errors
from dashboards.compose.selection import AS_PUBLISHED, NO_GUARANTEE, ORDER, PROVEN, cell_columns
from dpgcl_core.release.metrics import DURING
from dpgcl_core.release.statement import rounded_up

_ENDINGS = ("_mean", "_standard_error", "_n")
NO_SCORE = (math.nan, math.nan, 0)


def summary_table(trials: pd.DataFrame, question: Question) -> pd.DataFrame:
    """Return one row per point: mean, standard error and number n of repeats, for each metric and gain.

    The gain of `knn_accuracy` over its start has the columns `knn_accuracy_private_gain_mean`,
    `_standard_error` and `_n`. Scores are fractions, not per cent.

    Args:
      trials: trials from `dashboards.compose.selection.shown_trials`.
      question: the figure's question.
    """
    trials = with_gains(trials)
    metrics = [*score_names(trials), *((SNR, SNR_PLAIN, SNR_NOISED) if question.snr else ())]
    metrics += [f"{name}{GAIN}" for name in metrics]
    recorded_metrics = [name for name in metrics if has_values(trials, name)]
    if question.kind == "convergence":
        recorded_metrics = [name for name in (*question.series, "relative_loss") if has_values(trials, name)]
    columns = cell_columns(trials, question)
    cells = trials.groupby(columns)
    table = pd.DataFrame({question.axis.column: cells[question.axis.column].first()})
    # A series over training steps has many rows per trial.
    id_column = "run_id" if "step" in trials and "run_id" in trials else None
    table["num_trials"] = cells[id_column].nunique() if id_column else cells.size()
    if has_values(trials, "epsilon"):
        table["epsilon_max"] = cells["epsilon"].max()  # the spent ε, restarts included
    for name in recorded_metrics:
        statistics = means_and_errors(trials, columns, name).reindex(table.index)
        table[f"{name}_mean"], table[f"{name}_standard_error"] = statistics["mean"], statistics["error"]
        table[f"{name}_n"] = statistics["n"].fillna(0).astype(int)
    table = table.reset_index().drop(columns=ORDER)
    names = [question.axis.column, *columns[1:]]
    return table[[*names, *(name for name in table if name not in names)]]


def with_references(summary: pd.DataFrame, trials: pd.DataFrame, question: Question) -> pd.DataFrame:
    """Return a summary with a row for each reference appended; the axis's column has its name.

    Args:
      summary: table from `summary_table`.
      trials: trials from `dashboards.compose.selection.shown_trials`.
      question: the question of both.
    """
    rows = []
    for reference in reference_rows(trials, question):
        numbers = {
            f"{score}{ending}": value
            for score, values in reference.scores.items()
            for ending, value in zip(_ENDINGS, values, strict=True)
        }
        rows.append({question.axis.column: reference.label, "guarantee": REFERENCE} | numbers)
    if not rows:
        return summary
    # As objects, because pandas would turn counts into floats next to rows without a count.
    reference_frame = pd.DataFrame(rows, columns=summary.columns, dtype=object)
    return pd.concat([summary.astype(object), reference_frame], ignore_index=True)


def readable_table(summary: pd.DataFrame, axis: str, references: Sequence[ReferenceRow] = ()) -> Table:
    """Return a summary as a table for readers, with scores as "mean ± standard error" in per cent.

    Args:
      summary: table from `summary_table`.
      axis: the summary's column that the figure is drawn against.
      references: reference rows below the summary.
    """
    metrics = [str(name).removesuffix("_mean") for name in summary if str(name).endswith("_mean")]
    scores = set(score_names(pd.DataFrame([dict.fromkeys(metrics, 0.0)]))) | {
        name for name in metrics if name.endswith(DURING)
    }
    plain_columns = [name for name in summary if not str(name).endswith(_ENDINGS)]
    plain_columns = [name for name in plain_columns if name == axis or is_informative(summary, str(name))]
    heading = [column_title(str(name)) for name in plain_columns]
    heading += [_metric_title(name, is_score=name in scores) for name in metrics]
    rows = []
    for record in summary.to_dict("records"):
        row = [cell_text(str(name), record[name], record["guarantee"]) for name in plain_columns]
        for name in metrics:
            values = [record[name + ending] for ending in _ENDINGS]
            if name.endswith(GAIN):
                row.append(gain_text(*values, guarantee=record["guarantee"]))
            else:
                row.append(mean_text(*values, scale=100 if name in scores else 1))
        rows.append(row)
    for reference in references:
        row = [reference.label if name == axis else "–" for name in plain_columns]
        row += [mean_text(*reference.scores.get(name, NO_SCORE), scale=100) for name in metrics]
        rows.append(row)
    return Table(heading=heading, rows=rows)


def mean_text(mean: float, error: float, n: int, *, scale: float = 1) -> str:
    """Return `scale` times a mean, ± its standard error unless that is NaN; a dash if there is no mean.

    >>> nan = float("nan")
    >>> mean_text(0.81234, 0.0123, 3, scale=100), mean_text(0.5, nan, 1), mean_text(nan, nan, 0)
    ('81.23 ± 1.23', '0.5', '–')
    """
    if not n or math.isnan(mean):
        return "–"
    if scale == 100:
        return f"{100 * mean:.2f}" + ("" if math.isnan(error) else f" ± {100 * error:.2f}")
    return f"{mean:.4g}" + ("" if math.isnan(error) else f" ± {error:.2g}")


def gain_text(mean: float, error: float, n: int, *, guarantee: str) -> str:
    """Return a private gain in percentage points, marked "not private" without a proven guarantee.

    >>> gain_text(0.021, 0.002, 3, guarantee="proven"), gain_text(0.06, 0.001, 3, guarantee="none")
    ('2.10 ± 0.20', '6.00 ± 0.10, not private')
    """
    text = mean_text(mean, error, n, scale=100)
    return text if guarantee == PROVEN or not n else f"{text}, not private"


def _metric_title(name: str, *, is_score: bool) -> str:
    if name.endswith(GAIN):
        return f"Private gain, {column_title(name.removesuffix(GAIN))} (points)"
    return column_title(name) + (" (%)" if is_score else "")


def is_informative(table: pd.DataFrame, name: str) -> bool:
    """Return whether a column says more than the title and the notes."""
    return name not in ("method", "num_augmentations", "guarantee") or bool(table[name].nunique() > 1)


def guarantee_title(guarantee: str) -> str:
    """Return a guarantee in words."""
    titles = {NO_GUARANTEE: "none: not private", AS_PUBLISHED: "as published, not proven"}
    return titles.get(guarantee, guarantee)


def cell_text(name: str, value: Any, guarantee: str) -> str:
    """Return a cell of a column that is not a mean; ε is rounded up.

    >>> cell_text("epsilon_max", 9.9904, "proven"), cell_text("epsilon_max", math.inf, "none")
    ('9.991', 'none')
    """
    if isinstance(value, float) and math.isnan(value):
        return "–"
    if name == SWEEP:
        return str(value)
    if name == "guarantee":
        return guarantee_title(str(value))
    if name == "epsilon_max":
        spent = rounded_up(float(value), 4).replace("inf", "∞")
        return {"proven": spent, "as-published": f"claimed {spent}"}.get(guarantee, "none")
    return value_text(value)
