"""Trials → the content of a question's figure: the one place where questions of different kinds meet."""

from __future__ import annotations

import dataclasses

import pandas as pd

from dashboards.compose import figure_text
from dashboards.compose.answer import Answer, answer_of, prepared
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
from dashboards.compose.tables import for_readers, summary_table, with_references
from dashboards.compose.trial_table import trial_table

_STEPS_SHOWN = 10
SETTINGS = "Settings, as the answer compares them"


def content_of(
    trials: pd.DataFrame, question: Question | str, answer: Answer | None = None, *, answered: bool = True
) -> Content:
    """Return everything that the figure of a question shows.

    Args:
      trials: from `load_for`.
      question: or its name.
      answer: that the sweep has recorded; made of the trials unless given.
      answered: begin the notes with the sweep's answer.

    Raises:
      DashboardError: the trials do not make one figure, see `dashboards.compose.selection.shown_trials`.
    """
    asked, given = _asked(question, trials), trials
    trials = prepared(trials, asked)
    shown = shown_trials(trials, asked)
    draw = {"search": search_rows, "convergence": series_rows}.get(asked.kind, axis_rows)
    rows = draw(shown, asked)
    panels = [panel for row in rows for panel in row]
    if answer is None or answer.question != asked.asked:
        answer = answer_of(given, asked) if answered else None
    return Content(
        title=figure_text.title(shown, asked),
        subtitle=figure_text.subtitle(shown, asked),
        rows=rows,
        tables=_tables(shown, asked, answer),
        answer=answer.lines() if answer is not None else [],
        remarks=figure_text.notes(
            shown,
            asked,
            num_repeats=sorted({n for panel in panels for curve in panel.curves for n in curve.num_repeats}),
            references=[each for panel in panels for each in panel.references],
            private=data_are_private(trials),
            has_scores=any(panel.y_label.endswith("(%)") for panel in panels),
        ),
    )


def numbers_of(trials: pd.DataFrame, question: Question | str) -> pd.DataFrame:
    """Return the numbers of a figure at full precision: a row per point, or per trial of a search.

    Raises:
      DashboardError: as `content_of`.
    """
    asked = _asked(question, trials)
    shown = shown_trials(prepared(trials, asked), asked)
    if asked.kind == "search":
        return shown.drop(columns="axis_order")
    return with_references(summary_table(shown, asked), shown, asked)


def _method_tables(shown: pd.DataFrame, question: Question, answer: Answer | None) -> list[tuple[str, Table]]:
    """The tables of scores and gains: of what all methods have first, then of what some have."""
    common = common_scores(shown)
    others = [name for name in score_names(shown) if name not in common]
    found = []
    for scores, whose in ((common, ""), (others, "Of some methods alone. ")):
        if scores:
            table = score_table(shown, question, scores, answer)
            found.append((f"{whose}Scores; bold: distinguishable from all other candidates", table))
        if (gains := gain_table(shown, question, scores)) is not None:
            found.append((f"{whose}Private gain", gains))
    return found


def _asked(question: Question | str, trials: pd.DataFrame) -> Question:
    """The question; starts differ along its axis where networks do."""
    asked = find_question(question)
    kinds = [NETWORK, *(["warm_start"] if SWEEP in asked.splits else [])]
    differ = any(trials[name].nunique(dropna=False) > 1 for name in kinds if name in trials)
    return dataclasses.replace(asked, untrained_along=asked.untrained_along or differ)


def _tables(shown: pd.DataFrame, question: Question, answer: Answer | None) -> list[tuple[str, Table]]:
    if question.kind == "search":
        score = objective(shown)
        ordered = shown.sort_values(score, ascending=False) if score else shown
        return [("Trials, by score", trial_table(ordered, question, {}).as_texts())]
    found, references = [], reference_rows(shown, question)
    if question.kind == "methods":
        found += _method_tables(shown, question, answer)
        found.append(("What each guarantee rests on", guarantee_table(shown, question)))
    elif question.kind == "convergence":
        numbers = summary_table(shown, question)
        recorded = [numbers.dropna(subset=[name]) for name in numbers if str(name).endswith("_mean")]
        steps = sorted(min(recorded, key=len)["step"].unique())
        some = [steps[round(i * (len(steps) - 1) / _STEPS_SHOWN)] for i in range(_STEPS_SHOWN + 1)]
        heading = f"Numbers at some steps, all of them in {question.stem}.csv"
        found.append((heading, for_readers(numbers[numbers["step"].isin(some)], "step", references)))
    else:
        summary = summary_table(shown, question)
        found.append(("Numbers", for_readers(summary, question.axis.column, references)))
    if answer is not None:
        found.append((SETTINGS, settings_table(answer)))
    return found
