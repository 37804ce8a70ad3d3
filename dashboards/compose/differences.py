"""Which differences are resolved: paired over repeats, against twice their error.

Two trials of one repeat start from the same network and are scored on the same records, so their
difference has far less spread than either score. A difference below two standard errors is reported as
"not resolved", whatever the means look like.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from dashboards.compose.axes import Ticks, ticks_of
from dashboards.compose.names import panel_scores, score_names, value_text
from dashboards.compose.questions import Question
from dashboards.compose.references import start_of
from dashboards.compose.selection import ORDER, SAMPLED, cell_columns, shown_trials
from dpgcl_core.mechanism.numbers import GROUPS, RECORDS

RESOLVED_AT = 2.0


def differences_table(trials: pd.DataFrame, question: Question) -> pd.DataFrame:
    """Return the paired difference of every point to its start, each reference and the best.

    The start is the network before training: its public start, or the untrained network where it has none.

    Where both ways of sampling are there, sampled groups are also compared with the published sampled
    records, at the same point, and with the references that exist under these alone: the whole batch.

    Of the scores that have a panel: the recalls at 1, 5 and 10 of a pair of towers tell nearly the same.
    Where scores along the axis are not to be compared, to the start and to sampled records alone.

    Columns: the score, what tells the curve apart, the point on the axis, what is subtracted (`minus`), the
    mean difference, its standard error, the number of repeats, and `verdict`: "higher", "lower" or "not
    resolved". The best is the point with the highest mean that is neither a reference nor apart from the
    numbers.

    Raises:
      DashboardError: as `dashboards.compose.selection.shown_trials`.
    """
    shown = shown_trials(trials, question)
    if "repeat" not in shown:
        return pd.DataFrame()
    ticks = ticks_of(question.axis, shown[question.axis.column])
    column = question.axis.column
    by = cell_columns(shown, question)[1:]
    values = shown.drop_duplicates(ORDER).set_index(ORDER)[column].to_dict()
    rows = []
    for score in panel_scores(score_names(shown)):
        for key, cell in shown.groupby(by):
            wide = _wide(cell, score)
            published = _of_sampled_records(cell, shown, by, score)
            references = _references(wide, published, question, ticks)
            for order in _orders(wide):
                others = _start(cell, score, question, order) | references
                if order in published:
                    others["records sampled"] = None, published[order]
                for name, (own, reference) in others.items():
                    if own != order:
                        point = dict(zip(by, key, strict=True)) | {column: values[order]}
                        difference = paired(wide[order] - reference)
                        rows.append({"score": score, **point, "minus": name} | difference)
    return pd.DataFrame(rows)


def _wide(cell: pd.DataFrame, score: str) -> pd.DataFrame:
    """Return a score with a row per repeat and a column per place on the axis."""
    return cell.pivot_table(index="repeat", columns=ORDER, values=score)


def _of_sampled_records(cell: pd.DataFrame, shown: pd.DataFrame, by: list[str], score: str) -> pd.DataFrame:
    """Return the scores of the same curve with records sampled; none unless its own groups were."""
    first = cell.iloc[0]
    if SAMPLED not in by or first[SAMPLED] != GROUPS:
        return pd.DataFrame()
    same = shown[shown[SAMPLED] == RECORDS]
    for name in by:
        same = same if name == SAMPLED else same[same[name] == first[name]]
    return _wide(same, score) if len(same) else pd.DataFrame()


def _references(
    wide: pd.DataFrame, published: pd.DataFrame, question: Question, ticks: Ticks
) -> dict[str, tuple[float | None, pd.Series]]:
    """Return what every point of a curve is compared with, by name, with its own place on the axis."""
    found: dict[str, tuple[float | None, pd.Series]] = {}
    if not question.compared:
        return found
    for scores in (published, wide):
        for order in _orders(scores):
            if ticks.names[order] in map(value_text, question.references):
                found[ticks.names[order]] = order, scores[order]
    attached = [order for order in _orders(wide) if not question.axis.is_detached(order)]
    if len(attached) > 1:
        best = max(attached, key=lambda order: wide[order].mean())
        if all(own != best for own, _ in found.values()):
            sign = "" if question.axis.scale == "categorical" else f"{question.axis.symbol} = "
            found[f"best, {sign}{ticks.names[best]}"] = best, wide[best]
    return found


def _orders(wide: pd.DataFrame) -> list[float]:
    """Return places on the axis, as columns of scores."""
    return [float(order) for order in wide.columns.to_list()]


def _start(
    cell: pd.DataFrame, score: str, question: Question, order: float
) -> dict[str, tuple[None, pd.Series]]:
    """Return the scores before training, at one place where they differ along the axis."""
    rows = cell[cell[ORDER] == order] if question.untrained_along else cell
    if (start := start_of(rows, score)) is None:
        return {}
    name, values = start
    return {name: (None, values.groupby(rows["repeat"]).mean())}


def is_resolved(mean: float, standard_error: float) -> bool:
    """Return whether the interval of ± 2 standard errors does not include zero; NaN, of one repeat, does.

    >>> is_resolved(0.03, 0.01), is_resolved(-0.03, 0.02), is_resolved(0.03, math.nan)
    (True, False, False)
    """
    return abs(mean) > RESOLVED_AT * standard_error


def paired(difference: pd.Series) -> dict[str, Any]:
    """Return the mean of a difference over repeats, its standard error, n and the verdict.

    >>> paired(pd.Series([0.02, 0.03, 0.04]))["verdict"], paired(pd.Series([0.02, -0.03]))["verdict"]
    ('higher', 'not resolved')
    """
    difference = difference.dropna()
    n, mean = len(difference), float(difference.mean())
    error = float(difference.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    resolved = is_resolved(mean, error)
    verdict = ("higher" if mean > 0 else "lower") if resolved else "not resolved"
    return {"difference": mean, "standard_error": error, "num_repeats": n, "verdict": verdict}
