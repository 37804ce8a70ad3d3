"""Trials → the content of a question's figure; only this module handles all kinds of questions."""

from __future__ import annotations

import dataclasses

import pandas as pd

from dashboards.compose import figure_text
from dashboards.compose.answer import Answer, answer_of, prepare_trials
from dashboards.compose.answer_table import settings_table
from dashboards.compose.content import Content, Table
from dashboards.compose.display_names import SWEEP, common_scores, score_names
from dashboards.compose.fronts import search_rows
from dashboards.compose.method_table import gain_table, guarantee_table, score_table
from dashboards.compose.panels import axis_rows, series_rows
from dashboards.compose.questions import Question, find_question
from dashboards.compose.references import NETWORK, reference_rows
from dashboards.compose.search_trials import objective
from dashboards.compose.selection import data_are_private, shown_trials
from dashboards.compose.tables import readable_table, summary_table, with_references
from dashboards.compose.trial_table import trial_table

_STEPS_SHOWN = 10
SETTINGS = "Settings compared by the answer"


def content_of(
    trials: pd.DataFrame, question: Question | str, answer: Answer | None = None, *, has_answer: bool = True
) -> Content:
    """Return the full content of a question's figure.

    Args:
      trials: trials from `dashboards.figures.load_for`.
      question: the question or its name.
      answer: the answer that the sweep has recorded; computed from the trials by default.
      has_answer: whether the notes begin with the sweep's answer.

    Raises:
      DashboardError: the trials do not form one figure, see `dashboards.compose.selection.shown_trials`.
    """
    question = _complete_question(question, trials)
    frame = prepare_trials(trials, question)
    visible_trials = shown_trials(frame, question)
    draw = {"search": search_rows, "convergence": series_rows}.get(question.kind, axis_rows)
    rows = draw(visible_trials, question)
    if answer is None or answer.question != question.text:
        answer = answer_of(trials, question) if has_answer else None
    return Content(
        title=figure_text.title(visible_trials, question),
        subtitle=figure_text.subtitle(visible_trials, question),
        rows=rows,
        tables=_tables(visible_trials, question, answer),
        answer=answer.lines() if answer is not None else [],
        remarks=figure_text.notes(visible_trials, question, rows, private=data_are_private(frame)),
    )


def numbers_of(trials: pd.DataFrame, question: Question | str) -> pd.DataFrame:
    """Return the numbers of a figure at full precision: a row per point, or per trial of a search.

    Raises:
      DashboardError: as in `content_of`.
    """
    question = _complete_question(question, trials)
    trials = shown_trials(prepare_trials(trials, question), question)
    if question.kind == "search":
        return trials.drop(columns="axis_order")
    return with_references(summary_table(trials, question), trials, question)


def _score_tables(trials: pd.DataFrame, question: Question, answer: Answer | None) -> list[tuple[str, Table]]:
    """Return the tables of scores and gains: first scores of all methods, then scores of only some."""
    common = common_scores(trials)
    other_scores = [name for name in score_names(trials) if name not in common]
    tables = []
    for scores, prefix in ((common, ""), (other_scores, "Some methods only. ")):
        if scores:
            table = score_table(trials, question, scores, answer)
            tables.append((f"{prefix}Scores; bold: distinguishable from all other candidates", table))
        if (gains := gain_table(trials, question, scores)) is not None:
            tables.append((f"{prefix}Private gain", gains))
    return tables


def _complete_question(question: Question | str, trials: pd.DataFrame) -> Question:
    """Return the question, with `untrained_along` set if the trials have several networks or starts."""
    question = find_question(question)
    kinds = [NETWORK, *(["warm_start"] if SWEEP in question.splits else [])]
    differ = any(trials[name].nunique(dropna=False) > 1 for name in kinds if name in trials)
    return dataclasses.replace(question, untrained_along=question.untrained_along or differ)


def _tables(trials: pd.DataFrame, question: Question, answer: Answer | None) -> list[tuple[str, Table]]:
    """Return the (heading, table) pairs of a figure, by the kind of question."""
    if question.kind == "search":
        score = objective(trials)
        ordered = trials.sort_values(score, ascending=False) if score else trials
        return [("Trials, by score", trial_table(ordered, question, {}).as_texts())]
    tables, references = [], reference_rows(trials, question)
    if question.kind == "methods":
        tables += _score_tables(trials, question, answer)
        tables.append(("Basis of each guarantee", guarantee_table(trials, question)))
    elif question.kind == "convergence":
        numbers = summary_table(trials, question)
        series = [numbers.dropna(subset=[name]) for name in numbers if str(name).endswith("_mean")]
        steps = sorted(min(series, key=len)["step"].unique())
        steps = [steps[round(i * (len(steps) - 1) / _STEPS_SHOWN)] for i in range(_STEPS_SHOWN + 1)]
        heading = f"Numbers at some steps; {question.stem}.csv has all steps"
        tables.append((heading, readable_table(numbers[numbers["step"].isin(steps)], "step", references)))
    else:
        summary = summary_table(trials, question)
        tables.append(("Numbers", readable_table(summary, question.axis.column, references)))
    if answer is not None:
        tables.append((SETTINGS, settings_table(answer)))
    return tables
