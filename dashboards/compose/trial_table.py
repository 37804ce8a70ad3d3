"""Trials → the table of a report or a search, with a row per trial: differing settings, scores, and ε."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dashboards.compose.content import Cell, SortableTable
from dashboards.compose.display_names import column_title, has_values, score_names, score_title, value_text
from dashboards.compose.questions import Question
from dashboards.compose.search_trials import is_setting
from dashboards.compose.selection import AS_PUBLISHED, PROVEN, is_withheld
from dashboards.compose.tables import guarantee_title
from dpgcl_core.release.metrics import DURING, is_reference
from dpgcl_core.release.statement import rounded_up

_SECONDS = "train_seconds"
# Columns that depend on other settings, or only describe how a training was run.
_NOT_SETTINGS = {"sampling_prob", "sensitivity", "data_is", "restarts", "notes", "tags"}


def trial_table(trials: pd.DataFrame, question: Question, links: Mapping[str, str]) -> SortableTable:
    """Return one row per trial that may be seen.

    Args:
      trials: trials from `dashboards.compose.selection.released_trials`.
      question: the sweep's question, whose axis comes first.
      links: MLflow's page of each run, by run id.
    """
    axis_columns, columns = setting_columns(trials, question)
    scores, is_timed = score_names(trials), has_values(trials, _SECONDS)
    heading = ["Trial", *map(column_title, axis_columns), *(f"{score_title(name)} (%)" for name in scores)]
    heading += ["ε spent", "Guarantee", *map(column_title, columns), *(["Training (s)"] if is_timed else [])]
    rows = []
    for record in trials.to_dict("records"):
        row: dict[str, Any] = {str(name): value for name, value in record.items()}
        name = str(row.get("trial") or row.get("run_name") or row.get("run_id", ""))
        cells = [
            Cell(text=name, link=links.get(str(row.get("run_id")), "")),
            *(_setting_cell(row[column], column) for column in axis_columns),
            *(_decimal_cell(row[score], score, scale=100, digits=2) for score in scores),
            _epsilon_cell(row),
            Cell(text=guarantee_title(str(row["guarantee"]))),
            *(_setting_cell(row[column], column) for column in columns),
        ]
        rows.append([*cells, _decimal_cell(row[_SECONDS], _SECONDS)] if is_timed else cells)
    return SortableTable(heading=heading, rows=rows)


def setting_columns(trials: pd.DataFrame, question: Question) -> tuple[list[str], list[str]]:
    """Return the axis's column if the trials differ in it, and the others in which they do, repeat last."""
    axis = question.axis.column
    columns = [str(name) for name in trials if _is_setting(str(name)) and trials[name].map(str).nunique() > 1]
    first = [axis] if axis in columns else []
    last = ["repeat"] if has_values(trials, "repeat") else []
    return first, [*(name for name in columns if name not in (*first, *last)), *last]


def withheld_names(trials: pd.DataFrame, visible_trials: pd.DataFrame) -> list[str]:
    """Return the metrics of trials that the release policy keeps out of `visible_trials`."""
    return sorted(str(name) for name in trials if name not in visible_trials and is_withheld(str(name)))


def _is_setting(name: str) -> bool:
    if name in _NOT_SETTINGS or name.startswith(("tuned_", "tuning_")) or name.endswith(DURING):
        return False
    return is_setting(name) and not is_reference(name)


def _setting_cell(value: Any, name: str) -> Cell:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and not pd.isna(value)
    return Cell(text=value_text(value), value=float(value) if is_number else None, name=name)


def _decimal_cell(value: float, name: str, *, scale: float = 1, digits: int = 1) -> Cell:
    text = "–" if pd.isna(value) else f"{scale * value:.{digits}f}"
    return Cell(text=text) if pd.isna(value) else Cell(text=text, value=float(value), name=name)


def _epsilon_cell(row: Mapping[str, Any]) -> Cell:
    """Return a trial's ε, rounded up; "none" unless its guarantee is proven or claimed."""
    epsilon = row.get("epsilon", math.nan)
    if row["guarantee"] not in (PROVEN, AS_PUBLISHED) or pd.isna(epsilon):
        return Cell(text="none")
    claimed = "claimed " if row["guarantee"] == AS_PUBLISHED else ""
    return Cell(text=f"{claimed}{rounded_up(float(epsilon), 4)}", value=float(epsilon), name="epsilon")
