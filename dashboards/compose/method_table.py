"""The table of methods, like the paper's Table 1: scores for each ε, and the basis of each guarantee.

The best private value of the answer's deciding score at an ε is bold if the answer distinguishes it from all
others. A method as published, or without a guarantee, is never bold, however good.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from dashboards.compose.answer import Answer
from dashboards.compose.content import Table
from dashboards.compose.display_names import has_values, join_names, score_title, value_text
from dashboards.compose.gains import GAIN, with_gains
from dashboards.compose.questions import Question
from dashboards.compose.references import REFERENCE, reference_rows
from dashboards.compose.repeats import mean_and_error
from dashboards.compose.selection import AS_PUBLISHED, ORDER, PROVEN
from dashboards.compose.tables import NO_SCORE, gain_text, mean_text

_SETTINGS = (
    ("neighboring_relation", "Neighbours"),
    ("sampling", "Sampling"),
    ("sensitivity", "Sensitivity"),
    ("expected_batch_size", "B"),
    ("noise_multiplier", "σ"),
    ("epsilon", "ε spent"),
)
# Param of each trial: the number of settings tried for this method before this setting was chosen.
_GRID_SIZE = "tuning_grid_size"


def score_table(
    trials: pd.DataFrame, question: Question, scores: Sequence[str], answer: Answer | None
) -> Table:
    """Return the table of scores: a row per category and guarantee, then baselines; a column per ε and score.

    Args:
      trials: trials from `dashboards.compose.selection.shown_trials`.
      question: a question with a categorical axis.
      scores: the scores that have columns in the table.
      answer: the sweep's answer.
    """
    columns, winners = _score_columns(trials, scores), _distinguishable_best(answer)
    heading = [question.axis.label, "Guarantee", *(f"{_column_title(*column)} (%)" for column in columns)]
    rows, bold = [], set[tuple[int, int]]()
    for number, (row, cell) in enumerate(_table_rows(trials, question)):
        for column_number, (epsilon, score) in enumerate(columns, start=2):
            part = cell[cell["target_epsilon"] == epsilon]
            mean, error, n = mean_and_error(part, score)
            row.append(mean_text(mean, error, n, scale=100))
            if row[1] == PROVEN and (score, _epsilon_text(epsilon), row[0]) in winners:
                bold.add((number, column_number))
        rows.append(row)
    for reference in reference_rows(trials, question):
        texts = [mean_text(*reference.scores.get(score, NO_SCORE), scale=100) for _, score in columns]
        if any(text != "–" for text in texts):
            rows.append([reference.label, REFERENCE, *texts])
    return Table(heading=heading, rows=rows, bold=frozenset(bold))


def _distinguishable_best(answer: Answer | None) -> set[tuple[str, str, str]]:
    """Return score, ε and name of the best settings that the answer distinguishes from all others."""
    if answer is None:
        return set()
    return {
        (answer.score, _epsilon_text(choice.best_setting.cost.epsilon), choice.best)
        for choice in answer.choices
        if len(choice.contenders) == 1 < len(choice.settings)
    }


def gain_table(trials: pd.DataFrame, question: Question, scores: Sequence[str]) -> Table | None:
    """Return the private gain of each cell of `score_table`; None without repeats or starts."""
    frame = with_gains(trials)
    columns = [column for column in _score_columns(frame, scores) if has_values(frame, f"{column[1]}{GAIN}")]
    if not columns:
        return None
    titles = (f"Private gain, {_column_title(*column)} (points)" for column in columns)
    rows = []
    for row, cell in _table_rows(frame, question):
        for epsilon, score in columns:
            part = cell[cell["target_epsilon"] == epsilon]
            row.append(gain_text(*mean_and_error(part, f"{score}{GAIN}"), guarantee=row[1]))
        rows.append(row)
    return Table(heading=[question.axis.label, "Guarantee", *titles], rows=rows)


def _score_columns(trials: pd.DataFrame, scores: Sequence[str]) -> list[tuple[float, str]]:
    """Return (ε, score) of each column of a table."""
    epsilons = sorted(trials["target_epsilon"].unique())
    return [(epsilon, score) for epsilon in epsilons for score in scores]


def _column_title(epsilon: float, score: str) -> str:
    return f"{_epsilon_text(epsilon)}: {score_title(score)}"


def _table_rows(trials: pd.DataFrame, question: Question) -> Iterator[tuple[list[str], pd.DataFrame]]:
    """Yield (name, guarantee) of each row of a table, and the row's trials."""
    columns = [name for name in question.curve_columns if name in trials and name != "target_epsilon"]
    columns = [name for name in columns if trials[name].nunique() > 1]
    for _, cell in trials.groupby([ORDER, *columns, "guarantee"]):
        first = cell.iloc[0]
        name = join_names([value_text(first[column]) for column in (question.axis.column, *columns)])
        yield [name, str(first["guarantee"])], cell


def guarantee_table(trials: pd.DataFrame, question: Question) -> Table:
    """Return one row per method and ε: what its guarantee rests on, and the number of settings tried."""
    recorded_settings = [(name, title) for name, title in _SETTINGS if has_values(trials, name)]
    heading = [
        question.axis.label,
        "Guarantee",
        "Target ε",
        *(title for _, title in recorded_settings),
        "Settings tried",
    ]
    rows = []
    for _, cell in trials.groupby([ORDER, "target_epsilon", "guarantee"]):
        first = cell.iloc[0]
        guarantee = str(first["guarantee"])
        row = [value_text(first[question.axis.column]), guarantee, value_text(first["target_epsilon"])]
        for name, _ in recorded_settings:
            text = _range_text(cell, name)
            if name == "epsilon" and guarantee != PROVEN:
                text = f"claimed {text}" if guarantee == AS_PUBLISHED and text != "–" else "none"
            row.append(text)
        row.append(_num_settings_tried(cell))
        rows.append(row)
    return Table(heading=heading, rows=rows)


def without_guarantee(trials: pd.DataFrame, column: str) -> list[str]:
    """Return sentences that name the values of `column` whose trials all lack a proven guarantee."""
    sentences = []
    for guarantee, sentence in (
        (AS_PUBLISHED, "As published, not proven, and so not counted as private: {}."),
        ("none", "No guarantee at all: {}."),
    ):
        proven = set(trials.loc[trials["guarantee"] == PROVEN, column])
        rows = trials[(trials["guarantee"] == guarantee) & ~trials[column].isin(proven)].sort_values(ORDER)
        names = list(dict.fromkeys(value_text(value) for value in rows[column]))
        if names:
            sentences.append(sentence.format(join_names(names)))
    return sentences


def _epsilon_text(epsilon: float) -> str:
    return "no noise" if math.isinf(epsilon) else f"ε = {value_text(epsilon)}"


def _range_text(cell: pd.DataFrame, name: str) -> str:
    """Return the smallest and the largest value of a column, such as "1 to 8"; one value alone."""
    values = sorted(cell[name].dropna().unique(), key=lambda value: (isinstance(value, str), value))
    texts = list(
        dict.fromkeys(f"{v:.4g}" if isinstance(v, float) and v < 1e4 else value_text(v) for v in values)
    )
    texts = [text.replace("inf", "∞") for text in texts]
    if not texts:
        return "–"
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def _num_settings_tried(cell: pd.DataFrame) -> str:
    return _range_text(cell, _GRID_SIZE) if has_values(cell, _GRID_SIZE) else "not recorded"
