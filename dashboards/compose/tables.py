"""Trials → tables: the numbers behind a figure, raw for files and worded for readers."""

from __future__ import annotations

import math
import re
from typing import Any

import pandas as pd

from dashboards.compose.content import Table
from dashboards.compose.names import (
    SNR,
    SNR_NOISED,
    SNR_PLAIN,
    column_title,
    has_values,
    score_names,
    value_text,
)
from dashboards.compose.questions import Question
from dashboards.compose.repeats import means_and_errors
from dashboards.compose.selection import ORDER, cell_columns, shown_trials
from dpgcl_core.release.statement import rounded_up

_ENDINGS = ("_mean", "_standard_error", "_n")


def summary_table(trials: pd.DataFrame, question: Question) -> pd.DataFrame:
    """Return one row per point of the figure: the mean, standard error and n of each number.

    Scores are fractions, not per cent. Raises as `dashboards.compose.selection.shown_trials`.
    """
    shown = shown_trials(trials, question)
    metrics = [*score_names(shown), *((SNR, SNR_PLAIN, SNR_NOISED) if question.snr else ())]
    present = [name for name in metrics if has_values(shown, name)]
    if question.kind == "convergence":
        present = [name for name in (*question.series, "relative_loss") if has_values(shown, name)]
    columns = cell_columns(shown, question)
    cells = shown.groupby(columns)
    table = pd.DataFrame({question.axis.column: cells[question.axis.column].first()})
    counted = "run_id" if "step" in shown and "run_id" in shown else None  # a series has many rows of a trial
    table["num_trials"] = cells[counted].nunique() if counted else cells.size()
    if has_values(shown, "epsilon"):
        table["epsilon_max"] = cells["epsilon"].max()  # what was spent, restarts included
    for name in present:
        found = means_and_errors(shown, columns, name).reindex(table.index)
        table[f"{name}_mean"], table[f"{name}_standard_error"] = found["mean"], found["error"]
        table[f"{name}_n"] = found["n"].fillna(0).astype(int)
    table = table.reset_index().drop(columns=ORDER)
    names = [question.axis.column, *columns[1:]]
    return table[[*names, *(name for name in table if name not in names)]]


def for_readers(summary: pd.DataFrame, axis: str) -> Table:
    """Return a summary with readable names, scores in per cent as "mean ± standard error".

    Args:
      summary: from `summary_table`.
      axis: its column that the figure is drawn against.
    """
    metrics = [str(name).removesuffix("_mean") for name in summary if str(name).endswith("_mean")]
    scores = set(score_names(pd.DataFrame([dict.fromkeys(metrics, 0.0)]))) | {
        name for name in metrics if name.endswith("_during")
    }
    plain = [name for name in summary if not re.fullmatch(r".*(_mean|_standard_error|_n)", str(name))]
    plain = [name for name in plain if name == axis or _is_news(summary, str(name))]
    heading = [column_title(str(name)) for name in plain]
    heading += [column_title(name) + (" (%)" if name in scores else "") for name in metrics]
    rows = []
    for record in summary.to_dict("records"):
        row = [_plain(str(name), record[name], record["guarantee"]) for name in plain]
        for name in metrics:
            values = [record[name + ending] for ending in _ENDINGS]
            row.append(mean_text(*values, scale=100 if name in scores else 1))
        rows.append(row)
    return Table(heading=heading, rows=rows)


def mean_text(mean: float, error: float, n: int, *, scale: float = 1) -> str:
    """Return a mean with its error; a dash for none.

    >>> nan = float("nan")
    >>> mean_text(0.81234, 0.0123, 3, scale=100), mean_text(0.5, nan, 1), mean_text(nan, nan, 0)
    ('81.23 ± 1.23', '0.5', '–')
    """
    if not n or math.isnan(mean):
        return "–"
    if scale == 100:
        return f"{100 * mean:.2f}" + ("" if math.isnan(error) else f" ± {100 * error:.2f}")
    return f"{mean:.4g}" + ("" if math.isnan(error) else f" ± {error:.2g}")


def differences_for_readers(differences: pd.DataFrame) -> Table:
    """Return the paired differences with readable names, of scores in percentage points."""
    plain = [str(name) for name in differences if name not in ("difference", "standard_error", "minus")]
    place = plain.index("num_repeats")
    order = [*plain[:place], "minus", "difference", *plain[place:]]
    axis = order[order.index("minus") - 1]
    order = [name for name in order if name == axis or _is_news(differences, name)]
    titles = {"score": "Score", "minus": "Minus", "difference": "Difference (points)", "verdict": "Verdict"}
    rows = []
    for record in differences.to_dict("records"):
        shown = dict(record)
        shown["score"] = column_title(record["score"])
        shown["difference"] = mean_text(record["difference"], record["standard_error"], 1, scale=100)
        rows.append([_plain(name, shown[name], record["guarantee"]) for name in order])
    heading = [titles.get(name, "Repeats" if name == "num_repeats" else column_title(name)) for name in order]
    return Table(heading=heading, rows=rows)


def _is_news(table: pd.DataFrame, name: str) -> bool:
    """Return whether a column adds to the title and the notes."""
    return name not in ("method", "num_augmentations", "guarantee") or bool(table[name].nunique() > 1)


def _plain(name: str, value: Any, guarantee: str) -> str:
    """Return a cell of a column that is no mean; ε is rounded up.

    >>> _plain("epsilon_max", 9.9904, "proven"), _plain("epsilon_max", math.inf, "none")
    ('9.991', 'none')
    """
    if isinstance(value, float) and math.isnan(value):
        return "–"
    if name == "guarantee":
        return {"none": "none: not private", "as-published": "as published, not proven"}.get(
            value, str(value)
        )
    if name == "epsilon_max":
        spent = rounded_up(float(value), 4).replace("inf", "∞")
        return {"proven": spent, "as-published": f"claimed {spent}"}.get(guarantee, "none")
    return value_text(value)
