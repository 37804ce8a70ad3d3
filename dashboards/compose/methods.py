"""The table of methods, as the paper's Table 1: scores for each ε, and what each guarantee rests on.

Bold is the best private score of a column: of trials with a proven guarantee alone. What is as published,
or has no guarantee, never is, however good.
"""

from __future__ import annotations

import math

import pandas as pd

from dashboards.compose.content import Table
from dashboards.compose.names import has_values, score_names, score_title, value_text
from dashboards.compose.questions import Question
from dashboards.compose.repeats import mean_and_error
from dashboards.compose.selection import AS_PUBLISHED, ORDER, PROVEN
from dashboards.compose.tables import mean_text

_SETTINGS = (
    ("neighboring_relation", "Neighbours"),
    ("sampling", "Sampling"),
    ("sensitivity", "Sensitivity"),
    ("expected_batch_size", "B"),
    ("noise_multiplier", "σ"),
    ("epsilon", "ε spent"),
)
# Param of each trial: how many settings were tried for this method before this one was chosen.
_GRID_SIZE = "tuning_grid_size"


def score_table(shown: pd.DataFrame, question: Question) -> Table:
    """Return one row per method, or other category, and guarantee; each score at each ε.

    Args:
      shown: from `dashboards.compose.selection.shown_trials`.
      question: with a categorical axis.
    """
    scores = list(score_names(shown))
    epsilons = sorted(shown["target_epsilon"].unique())
    columns = [(epsilon, score) for epsilon in epsilons for score in scores]
    heading = [question.axis.label, "Guarantee"]
    heading += [f"{_epsilon_text(epsilon)}: {score_title(score)} (%)" for epsilon, score in columns]
    others = [name for name in question.curve_columns if name in shown and name != "target_epsilon"]
    others = [name for name in others if shown[name].nunique() > 1]
    rows, best = [], dict[int, tuple[float, set[int]]]()
    for number, (_, cell) in enumerate(shown.groupby([ORDER, *others, "guarantee"])):
        first = cell.iloc[0]
        guarantee = str(first["guarantee"])
        name = ", ".join(value_text(first[column]) for column in (question.axis.column, *others))
        row = [name, guarantee]
        for place, (epsilon, score) in enumerate(columns, start=2):
            mean, error, n = mean_and_error(cell[cell["target_epsilon"] == epsilon], score)
            row.append(mean_text(mean, error, n, scale=100))
            if n and guarantee == PROVEN and mean >= best.get(place, (-math.inf, set()))[0]:
                tied = best[place][1] if place in best and mean == best[place][0] else set()
                best[place] = mean, tied | {number}
        rows.append(row)
    bold = frozenset((number, place) for place, (_, numbers) in best.items() for number in numbers)
    return Table(heading=heading, rows=rows, bold=bold)


def guarantee_table(shown: pd.DataFrame, question: Question) -> Table:
    """Return one row per method and ε: what its guarantee rests on, and how much was tried."""
    present = [(name, title) for name, title in _SETTINGS if has_values(shown, name)]
    heading = [
        question.axis.label,
        "Guarantee",
        "Target ε",
        *(title for _, title in present),
        "Settings tried",
    ]
    rows = []
    for _, cell in shown.groupby([ORDER, "target_epsilon", "guarantee"]):
        first = cell.iloc[0]
        guarantee = str(first["guarantee"])
        row = [value_text(first[question.axis.column]), guarantee, value_text(first["target_epsilon"])]
        for name, _ in present:
            text = _span(cell, name)
            if name == "epsilon" and guarantee != PROVEN:
                text = f"claimed {text}" if guarantee == AS_PUBLISHED and text != "–" else "none"
            row.append(text)
        row.append(_grid_size(cell))
        rows.append(row)
    return Table(heading=heading, rows=rows)


def without_guarantee(shown: pd.DataFrame, column: str) -> list[str]:
    """Return sentences that name what is not private among the trials; none where all are."""
    found = []
    for guarantee, sentence in (
        (AS_PUBLISHED, "As published, not proven, and so not counted as private: {}."),
        ("none", "No guarantee at all: {}."),
    ):
        proven = set(shown.loc[shown["guarantee"] == PROVEN, column])
        rows = shown[(shown["guarantee"] == guarantee) & ~shown[column].isin(proven)].sort_values(ORDER)
        names = list(dict.fromkeys(value_text(value) for value in rows[column]))
        if names:
            found.append(sentence.format(", ".join(names)))
    return found


def _epsilon_text(epsilon: float) -> str:
    return "no noise" if math.isinf(epsilon) else f"ε = {value_text(epsilon)}"


def _span(cell: pd.DataFrame, name: str) -> str:
    """Return the values of a column, from the smallest to the largest."""
    values = sorted(cell[name].dropna().unique(), key=lambda value: (isinstance(value, str), value))
    shown = list(
        dict.fromkeys(f"{v:.4g}" if isinstance(v, float) and v < 1e4 else value_text(v) for v in values)
    )
    shown = [text.replace("inf", "∞") for text in shown]
    if not shown:
        return "–"
    return shown[0] if len(shown) == 1 else f"{shown[0]} to {shown[-1]}"


def _grid_size(cell: pd.DataFrame) -> str:
    return _span(cell, _GRID_SIZE) if has_values(cell, _GRID_SIZE) else "not recorded"
