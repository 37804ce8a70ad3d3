"""Which differences are resolved: paired over repeats, against twice their error.

Two trials of one repeat start from the same network and are scored on the same records, so their
difference has far less spread than either score. A difference below two standard errors is reported as
"not resolved", whatever the means look like.
"""

from __future__ import annotations

import math

import pandas as pd

from dashboards.compose.axes import Ticks, ticks_of
from dashboards.compose.names import UNTRAINED, has_values, panel_scores, score_names, value_text
from dashboards.compose.questions import Question
from dashboards.compose.selection import ORDER, cell_columns, shown_trials

RESOLVED_AT = 2.0


def differences_table(trials: pd.DataFrame, question: Question) -> pd.DataFrame:
    """Return the paired difference of every point to the untrained network, each reference and the best.

    Of the scores that have a panel: the recalls at 1, 5 and 10 of a pair of towers tell nearly the same.
    Where scores along the axis are not to be compared, to the untrained network alone.

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
            wide = cell.pivot_table(index="repeat", columns=ORDER, values=score)
            references = _references(cell, wide, score, question, ticks)
            for order in _orders(wide):
                untrained = _untrained(cell, score, question, order)
                for name, (own, reference) in (untrained | references).items():
                    if own != order:
                        point = dict(zip(by, key, strict=True)) | {column: values[order]}
                        difference = _verdict((wide[order] - reference).dropna())
                        rows.append({"score": score, **point, "minus": name} | difference)
    return pd.DataFrame(rows)


def _references(
    cell: pd.DataFrame, wide: pd.DataFrame, score: str, question: Question, ticks: Ticks
) -> dict[str, tuple[float | None, pd.Series]]:
    """Return what every point of a curve is compared with, by name, with its own place on the axis."""
    found: dict[str, tuple[float | None, pd.Series]] = {}
    if not question.compared:
        return found
    for order in _orders(wide):
        if ticks.names[order] in map(value_text, question.references):
            found[ticks.names[order]] = order, wide[order]
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


def _untrained(
    cell: pd.DataFrame, score: str, question: Question, order: float
) -> dict[str, tuple[None, pd.Series]]:
    """Return the untrained network's scores, at one place where they differ along the axis."""
    name = f"{UNTRAINED}_{score}"
    if not has_values(cell, name):
        return {}
    rows = cell[cell[ORDER] == order] if question.untrained_along else cell
    return {UNTRAINED: (None, rows.groupby("repeat")[name].mean())}


def _verdict(difference: pd.Series) -> dict[str, float | int | str]:
    """Return the mean, its standard error, n and the verdict.

    >>> _verdict(pd.Series([0.02, 0.03, 0.04]))["verdict"], _verdict(pd.Series([0.02, -0.03]))["verdict"]
    ('higher', 'not resolved')
    """
    n, mean = len(difference), float(difference.mean())
    error = float(difference.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    resolved = n > 1 and abs(mean) > RESOLVED_AT * error
    verdict = ("higher" if mean > 0 else "lower") if resolved else "not resolved"
    return {"difference": mean, "standard_error": error, "num_repeats": n, "verdict": verdict}
