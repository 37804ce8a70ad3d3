"""Utility against privacy, over all trials of one or several sweeps, with the cost of tuning."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from dashboards.compose import figure_text
from dashboards.compose.comparison import combine_sweeps
from dashboards.compose.content import Content, Table
from dashboards.compose.display_names import (
    SWEEP,
    common_scores,
    dataset_title,
    panel_scores,
    score_title,
    value_text,
)
from dashboards.compose.fronts import AXES, EPSILON_ONE, EPSILON_WHOLE, front_rows, trial_names, with_epsilons
from dashboards.compose.questions import find_question
from dashboards.compose.search_trials import is_private, number_trials
from dashboards.compose.selection import data_are_private, shown_trials
from dashboards.dashboard_error import DashboardError
from dpgcl_core.release.statement import delta_text, rounded_up


def pareto_of(sweeps: Sequence[pd.DataFrame]) -> tuple[Content, pd.DataFrame]:
    """Return the figure of scores against ε, and its numbers: a row per trial.

    The score is the first that all trials have.

    Args:
      sweeps: tables from `dashboards.query.trial_frames.load_trials`, each of one sweep, with the same scored
        records.

    Raises:
      DashboardError: as in `dashboards.compose.comparison.combine_sweeps`, or there is no score.
    """
    trials = combine_sweeps([number_trials(sweep) for sweep in sweeps])
    frame = shown_trials(trials, find_question("search"))
    score = _first_score(frame)
    frame = with_epsilons(frame[frame[score].notna()].reset_index(drop=True), score)
    content = Content(
        title=f"{dataset_title(str(frame['dataset'].iloc[0]))}: {score_title(score)} against ε",
        subtitle=figure_text.subtitle(frame, find_question("search")),
        rows=front_rows(frame, score),
        tables=[("Trials on a front", _front_table(frame, score))],
        remarks=_notes(frame, private=data_are_private(trials)),
    )
    columns = [SWEEP, "trial", "run_id", score, EPSILON_ONE, EPSILON_WHOLE, "target_delta", "guarantee"]
    columns += [f"on_front_{column}" for column in AXES]
    return content, frame[[name for name in columns if name in frame]]


def _first_score(trials: pd.DataFrame) -> str:
    scores = panel_scores(common_scores(trials))
    if not scores:
        raise DashboardError(
            "no trial has a score to draw against ε: its scores are of private records, or missing"
        )
    return scores[0]


def _front_table(trials: pd.DataFrame, score: str) -> Table:
    """Return one row per trial that is on a front."""
    heading = ["Sweep", "Trial", f"{score_title(score)} (%)", "ε of its training", "ε of its sweep"]
    heading += ["δ", "Front"]
    marks = {column: trials[f"on_front_{column}"] for column in AXES}
    rows = trials[marks[EPSILON_ONE] | marks[EPSILON_WHOLE]].sort_values([EPSILON_ONE, score])
    titles = {EPSILON_ONE: "one training", EPSILON_WHOLE: "whole sweep"}
    cells = []
    for name, (_, row) in zip(trial_names(rows), rows.iterrows(), strict=True):
        fronts = " and ".join(title for column, title in titles.items() if row[f"on_front_{column}"])
        epsilons = [_epsilon_text(row[column]) for column in AXES]
        cells.append([row[SWEEP], name, f"{100 * row[score]:.2f}", *epsilons, _delta_text(row), fronts])
    return Table(heading=heading, rows=cells)


def _epsilon_text(value: float) -> str:
    return "–" if math.isinf(value) else rounded_up(float(value), 4)


def _delta_text(row: pd.Series) -> str:
    return delta_text(float(row["target_delta"])) if "target_delta" in row else "not recorded"


def _notes(trials: pd.DataFrame, *, private: bool) -> list[str]:
    """Return the sentences under the figure."""
    notes = list(figure_text.FRONT_NOTES)
    if len(trials) > 1:
        notes.append("The best of many trainings is the best partly by chance: a dot is not an answer.")
    rows = trials[is_private(trials)]
    deltas = list(rows["target_delta"].dropna().unique()) if "target_delta" in rows else []
    if len(deltas) > 1:
        notes.append(f"The ε are at different δ: {', '.join(map(value_text, sorted(deltas)))}.")
    if private:
        notes.append("The training data are private: trials without a proven guarantee are not shown.")
    return [*notes, *figure_text.tuning_costs(trials)]
