"""Utility against privacy, over all trials of one or several sweeps, with what the tuning cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from dashboards.compose import figure_text
from dashboards.compose.comparison import together
from dashboards.compose.content import Content, Table
from dashboards.compose.display_names import (
    SWEEP,
    common_scores,
    dataset_title,
    panel_scores,
    score_title,
    value_text,
)
from dashboards.compose.fronts import AXES, ONE, WHOLE, front_rows, trial_names, with_epsilons
from dashboards.compose.questions import find_question
from dashboards.compose.search_trials import is_private, number_trials
from dashboards.compose.selection import data_are_private, shown_trials
from dashboards.dashboard_error import DashboardError
from dpgcl_core.release.statement import delta_text, rounded_up


def pareto_of(sweeps: Sequence[pd.DataFrame]) -> tuple[Content, pd.DataFrame]:
    """Return the figure of the first score that all trials have, and its numbers: a row per trial.

    Args:
      sweeps: from `dashboards.query.trial_frames.load_trials`, each of one sweep, with the same scored
        records.

    Raises:
      DashboardError: as `dashboards.compose.comparison.together`, or there is no score.
    """
    trials = together([number_trials(each) for each in sweeps])
    shown = shown_trials(trials, find_question("search"))
    drawn = _score(shown)
    shown = with_epsilons(shown[shown[drawn].notna()].reset_index(drop=True), drawn)
    content = Content(
        title=f"{dataset_title(str(shown['dataset'].iloc[0]))}: {score_title(drawn)} against ε",
        subtitle=figure_text.subtitle(shown, find_question("search")),
        rows=front_rows(shown, drawn),
        tables=[("Trials on a front", _table(shown, drawn))],
        remarks=_notes(shown, private=data_are_private(trials)),
    )
    columns = [SWEEP, "trial", "run_id", drawn, ONE, WHOLE, "target_delta", "guarantee"]
    columns += [f"on_front_{column}" for column in AXES]
    return content, shown[[name for name in columns if name in shown]]


def _score(shown: pd.DataFrame) -> str:
    known = panel_scores(common_scores(shown))
    if not known:
        raise DashboardError(
            "no trial has a score to draw against ε: they are of private records, or unscored"
        )
    return known[0]


def _table(shown: pd.DataFrame, score: str) -> Table:
    heading = [
        "Sweep",
        "Trial",
        f"{score_title(score)} (%)",
        "ε of its training",
        "ε of its sweep",
        "δ",
        "Front",
    ]
    marks = {column: shown[f"on_front_{column}"] for column in AXES}
    rows = shown[marks[ONE] | marks[WHOLE]].sort_values([ONE, score])
    titles = {ONE: "one training", WHOLE: "whole sweep"}
    cells = []
    for name, (_, row) in zip(trial_names(rows), rows.iterrows(), strict=True):
        on = [title for column, title in titles.items() if row[f"on_front_{column}"]]
        epsilons = [_epsilon(row[column]) for column in AXES]
        cells.append([row[SWEEP], name, f"{100 * row[score]:.2f}", *epsilons, _delta(row), " and ".join(on)])
    return Table(heading=heading, rows=cells)


def _epsilon(value: float) -> str:
    return "–" if math.isinf(value) else rounded_up(float(value), 4)


def _delta(row: pd.Series) -> str:
    return delta_text(float(row["target_delta"])) if "target_delta" in row else "not recorded"


def _notes(shown: pd.DataFrame, *, private: bool) -> list[str]:
    found = list(figure_text.FRONT_NOTES)
    if len(shown) > 1:
        found.append("The best of many trainings is the best partly by chance: a dot is no answer.")
    deltas = shown.loc[is_private(shown), "target_delta"].dropna().unique() if "target_delta" in shown else []
    if len(deltas) > 1:
        found.append(f"The ε are at different δ: {', '.join(map(value_text, sorted(deltas)))}.")
    if private:
        found.append("The training data are private: trials without a proven guarantee are not shown.")
    return [*found, *figure_text.tuning_costs(shown)]
