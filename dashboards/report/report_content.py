"""A sweep → the content of its report: answer, figure, trials, privacy, and how to repeat it.

Nothing is judged here: the answer is the recorded answer or, for a running sweep, the result of
`dashboards.compose.answer.answer_of` for the trials so far. Nothing is released here either: trials pass
`dashboards.compose.selection.released_trials` before any of their data is shown. A part that is missing, of
another version or damaged is replaced by a note, and does not affect the rest of the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dashboards.compose.answer import OWN, Answer, PrivacyNumbers, answer_of
from dashboards.compose.content import Content, SortableTable
from dashboards.compose.display_names import dataset_title, list_names
from dashboards.compose.figure import content_of
from dashboards.compose.questions import QUESTIONS, Question
from dashboards.compose.selection import data_are_private, released_trials
from dashboards.compose.trial_table import trial_table, withheld_names
from dashboards.dashboard_error import DashboardError
from dashboards.report.record import SweepRecord
from dpgcl_core.addresses import masked_text
from dpgcl_core.release.statement import delta_text, epsilon_text

RUNNING, FINISHED, FAILED = "RUNNING", "FINISHED", "FAILED"
LEFT_BEFORE, LEFT_AFTER = "epsilon_remaining_before", "epsilon_remaining"
"""Metrics of the parent run: what the ledger had left before the sweep was charged, and has after it."""
MOST_TRIALS = 1000
"""The most rows of the table, so that the file stays below 2 MB."""
_STATUS = {
    RUNNING: "under way",
    FINISHED: "finished",
    FAILED: "incomplete (some trials failed, or MLflow did not accept their results)",
    "KILLED": "stopped early",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The full content of a report.

    Attributes:
      name: the sweep's name.
      title: its question and data set.
      status: its progress, in a sentence.
      answer: the answer; None if there is none yet.
      is_final: whether the answer is based on all trials.
      is_running: whether more trials are to come and the page will change.
      figures: content of the figures.
      trials: a table with one row per trial; None if no trial may be shown.
      promise: the sweep's guarantee, in a sentence.
      privacy: rows of the privacy panel, (name, value).
      command: the command that repeats the sweep; empty for a sweep of the user's own points.
      config: the file that the command needs; None if it was not logged.
      link: MLflow's page of the sweep's runs; empty without a server.
      notes: the parts that could not be shown, with the reasons.
    """

    name: str
    title: str
    status: str
    answer: Answer | None = None
    is_final: bool = False
    is_running: bool = False
    figures: Sequence[Content] = ()
    trials: SortableTable | None = None
    promise: str = ""
    privacy: Sequence[tuple[str, str]] = ()
    command: str = ""
    config: str | None = None
    link: str = ""
    notes: Sequence[str] = ()


def question_of(record: SweepRecord) -> Question:
    """Return the question that a sweep recorded; `OWN` (the user's own points) if it is not a known one."""
    return QUESTIONS.get(str(record.params.get("question", "")).removesuffix("-tuning"), OWN)


def _current_statement(record: SweepRecord) -> Mapping[str, Any]:
    """Return the privacy statement; empty before the sweep ends, as an earlier one counts fewer steps."""
    return (record.statement or {}) if record.status in (FINISHED, FAILED) else {}


def report_of(record: SweepRecord, series: pd.DataFrame | None = None) -> Report:
    """Return the report of a sweep in any state.

    Args:
      record: the sweep, from `dashboards.report.record.load_record`.
      series: the series from `dashboards.figures.load_for`, for a question whose figure is drawn over steps.
    """
    question, notes = question_of(record), list[str]()
    frame = record.trials if record.trials.empty else released_trials(record.trials)
    answer = _current_answer(record, question, notes)
    figures = _figures(record, question, series, answer, notes)
    notes += _withheld_notes(record, frame)
    if record.early_stops:
        notes.append(
            f"Not compared, because their scores ended them early: {list_names(record.early_stops)}. "
            "ε counts all their planned steps."
        )
    if len(frame) > MOST_TRIALS:
        notes.append(f"The table has the first {MOST_TRIALS} of {len(frame)} trials; MLflow has all of them.")
    if record.status == FAILED and record.statement is not None:
        notes.append("The privacy numbers are from the last privacy statement; --resume writes a new one.")
    return Report(
        name=record.name,
        title=f"{question.text} {dataset_title(str(record.params.get('dataset', '')))}".strip(),
        status=_status_text(record),
        answer=answer,
        is_final=record.status == FINISHED,
        is_running=record.status == RUNNING,
        figures=figures,
        trials=None if frame.empty else trial_table(frame[:MOST_TRIALS], question, record.links),
        promise=_guarantee_text(record),
        privacy=_privacy_rows(record, frame, answer),
        command=_command(record),
        config=record.config,
        link=record.sweep_link,
        notes=notes,
    )


def _status_text(record: SweepRecord) -> str:
    num_finished, counts = len(record.trials), dict(record.unfinished)
    planned = f" of {record.num_planned}" if record.num_planned is not None else ""
    failed = [f"{count} {status.lower()}" for status, count in sorted(counts.items()) if status != RUNNING]
    words = _STATUS.get(record.status, record.status.lower())
    early_stops = [f"{len(record.early_stops)} ended early by their scores"] if record.early_stops else []
    summary = "; ".join([f"{num_finished}{planned} trials finished", *early_stops, *failed])
    return f"Sweep {words}: {summary}."


def _current_answer(record: SweepRecord, question: Question, notes: list[str]) -> Answer | None:
    """Return the sweep's answer: recorded when it finished, else computed from the trials so far."""
    if record.trials.empty:
        notes.append("There is no answer yet: no trial has finished.")
        return None
    if record.status == FINISHED and record.answer is not None:
        try:
            return Answer.read(record.answer)
        except DashboardError as error:
            notes.append(f"The answer is computed again from the trials: {error}.")
    try:
        answer = answer_of(record.trials, question, _privacy_numbers(record))
    except DashboardError as error:
        notes.append(f"There is no answer: {error}.")
        return None
    if answer is None:
        notes.append("There is no answer: no trial has a score that may be shown.")
    return answer


def _privacy_numbers(record: SweepRecord) -> PrivacyNumbers | None:
    """Return the privacy cost in the statement, with the ledger's remaining ε; None without a statement."""
    cost = _cost(record)
    if not cost:
        return None
    names = ("training_epsilon", "tuned_epsilon", "delta")
    return PrivacyNumbers(
        **{name: cost.get(name) for name in names}, epsilon_remaining=record.metrics.get(LEFT_AFTER)
    )


def _cost(record: SweepRecord) -> Mapping[str, Any]:
    """Return the cost in the privacy statement; empty without a statement."""
    cost = _current_statement(record).get("cost")
    return cost if isinstance(cost, Mapping) else {}


def _figures(
    record: SweepRecord,
    question: Question,
    series: pd.DataFrame | None,
    answer: Answer | None,
    notes: list[str],
) -> list[Content]:
    """Return the sweep's figure, or add a note on why there is none."""
    if record.trials.empty:
        return []
    if question.kind == "convergence" and series is None:
        notes.append("There is no figure: no series was recorded during training.")
        return []
    try:
        return [content_of(record.trials if series is None else series, question, answer)]
    except DashboardError as error:
        notes.append(f"There is no figure: {error}.")
        return []


def _withheld_notes(record: SweepRecord, trials: pd.DataFrame) -> list[str]:
    """Return notes on trials and metrics that the release policy withholds."""
    if record.trials.empty or not data_are_private(record.trials):
        return []
    notes = []
    if missing := len(record.trials) - len(trials):
        notes.append(
            f"Not shown: {missing} of {len(record.trials)} trials, because the data are private and these "
            "trials have no proven guarantee."
        )
    if names := withheld_names(record.trials, trials):
        notes.append(
            f"Not shown, because the release policy for private data forbids it: {list_names(names)}."
        )
    return notes


def _guarantee_text(record: SweepRecord) -> str:
    if isinstance(headline := _current_statement(record).get("headline"), str):
        return headline
    if record.tags.get("tuning_cost"):
        return f"Planned values; the privacy statement follows at the end. {record.tags['tuning_cost']}"
    return "No privacy statement was recorded."


def _privacy_rows(record: SweepRecord, frame: pd.DataFrame, answer: Answer | None) -> list[tuple[str, str]]:
    """Return (name, value) rows of the privacy panel; the planned values if there is no statement."""
    statement, cost = _current_statement(record), _cost(record)
    relation = cost.get("neighboring_relation") or record.params.get("neighboring_relation")
    rows = [
        ("ε of one training", _epsilon_text(cost.get("training_epsilon"))),
        ("ε of the whole sweep, tuning included", _tuned_epsilon_text(record, cost)),
        ("δ", _delta_text(cost.get("delta", record.tags.get("tuned_delta")))),
        ("Theorem", cost.get("theorem") or record.tags.get("tuning_theorem")),
        ("Guarantee", _guarantee_counts(frame)),
        ("Neighbouring data sets", relation),
        ("One record", statement.get("unit")),
        ("Release mode", statement.get("released") or record.tags.get("release_mode")),
        ("Data", statement.get("data") or record.tags.get("data_is")),
        *_ledger_rows(record, statement, answer),
    ]
    return [(name, masked_text(str(value))) for name, value in rows if value not in (None, "")]


def _ledger_rows(
    record: SweepRecord, statement: Mapping[str, Any], answer: Answer | None
) -> list[tuple[str, str | None]]:
    """Return (name, value) rows on the ledger: its cap, and ε left before and after the sweep."""
    ledger = statement.get("ledger")
    if not isinstance(ledger, Mapping):
        return [("Ledger", statement.get("ledger_note"))]
    cap = f"ε = {ledger.get('epsilon')} at δ = {_delta_text(ledger.get('delta'))}, by {ledger.get('rule')}"
    privacy = answer.privacy if answer is not None else None
    num_remaining = privacy.trainings_remaining if privacy is not None else None
    suffix = "" if num_remaining is None else f"; enough for {num_remaining} more like the costliest training"
    return [
        ("Ledger: data set and cap", f"{ledger.get('dataset_id')}: {cap}"),
        ("Ledger: ε left before the sweep", _remainder_text(record.metrics.get(LEFT_BEFORE))),
        ("Ledger: ε left after the sweep", f"{_remainder_text(record.metrics.get(LEFT_AFTER))}{suffix}"),
    ]


def _remainder_text(value: float | None) -> str:
    """Return the remaining ε, rounded down: a text must not promise too much."""
    return "not recorded" if value is None else f"{int(value * 10_000) / 10_000:g}"


def _epsilon_text(value: Any) -> str | None:
    return epsilon_text(value) if isinstance(value, (int, float)) else None


def _tuned_epsilon_text(record: SweepRecord, cost: Mapping[str, Any]) -> str | None:
    if cost:
        return _epsilon_text(cost.get("tuned_epsilon")) or "not accounted"
    planned = record.tags.get("tuned_epsilon")
    return f"{planned} (planned)" if planned not in (None, "none") else planned


def _delta_text(value: Any) -> str | None:
    try:
        return delta_text(float(value))
    except (TypeError, ValueError):
        return None


def _guarantee_counts(trials: pd.DataFrame) -> str:
    """Return how many of the shown trials have each guarantee."""
    counts = Counter(trials["guarantee"]) if len(trials) else Counter[str]()
    return ", ".join(f"{name}: {count} trial{'s' * (count != 1)}" for name, count in sorted(counts.items()))


def _command(record: SweepRecord) -> str:
    question = question_of(record)
    return "" if question is OWN else f"python sweeps/{question.stem}.py --config config.yaml"
