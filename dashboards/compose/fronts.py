"""Scores against ε: panels of the trials at the ε of one training, and at the ε of the whole sweep.

The left panel shows every trial at the ε of its one training. The right panel shows it at the ε of its whole
sweep, including all trainings and the choice among them. The first ε is the cost of a training whose settings
were known in advance. The second ε holds for the model that was chosen by its score. A front contains the
trials that no other trial beats in both score and ε, among only trials with a proven guarantee.
"""

from __future__ import annotations

import math

import pandas as pd

from dashboards.compose.axes import Axis, Ticks, ticks_of
from dashboards.compose.content import Curve, Panel, Style
from dashboards.compose.curves import MARKERS, PRIVATE_COLOURS, UNPROVEN_COLOURS, staircase
from dashboards.compose.display_names import SWEEP, score_title
from dashboards.compose.questions import Question, find_question
from dashboards.compose.references import lines_across
from dashboards.compose.search_trials import epsilon_spent, is_private, objective, on_the_front

EPSILON_ONE, EPSILON_WHOLE = "epsilon_of_one_training", "epsilon_of_the_sweep"
"""The columns of the ε of a trial's one training, and of the ε of its whole sweep."""
_LEGEND, _FRONT = "Trials", "Pareto front"
_FRONT_COLOUR = "#222222"
AXES = {
    column: Axis(column=column, label=label, symbol="ε", scale="log", dense=True, detached_name="none")
    for column, label in ((EPSILON_ONE, "ε of one training"), (EPSILON_WHOLE, "ε of the whole sweep"))
}


def search_rows(trials: pd.DataFrame, question: Question) -> list[list[Panel]]:
    """Return the panels of one search, for the score that it maximised; none without such a score."""
    score = objective(trials)
    if score is None:
        return []
    trials = trials[trials[score].notna()].reset_index(drop=True)
    return front_rows(with_epsilons(trials, score), score)


def front_rows(trials: pd.DataFrame, score: str) -> list[list[Panel]]:
    """Return the two panels of scores against ε, for trials from `with_epsilons` that all have the score."""
    return [[_panel(trials, score, column) for column in AXES]]


def with_epsilons(trials: pd.DataFrame, score: str) -> pd.DataFrame:
    """Add columns for both ε (∞ if there is none), and for whether a trial is on their fronts."""
    private = is_private(trials)
    tuned = pd.to_numeric(trials.get("tuned_epsilon", pd.Series(math.nan, trials.index)), errors="coerce")
    frame = trials.assign(
        **{
            EPSILON_ONE: epsilon_spent(trials).where(private, math.inf),
            EPSILON_WHOLE: tuned.where(private).fillna(math.inf),
        }
    )
    for column in AXES:
        accounted = frame[frame[column] < math.inf]
        front = on_the_front(list(accounted[column]), list(accounted[score]))
        is_on_front = pd.Series(front, index=accounted.index, dtype=bool)
        frame[f"on_front_{column}"] = is_on_front.reindex(frame.index, fill_value=False)
    return frame


def _panel(trials: pd.DataFrame, score: str, column: str) -> Panel:
    """Return the panel of the score against one of the two ε, with the front."""
    axis = AXES[column]
    ticks = ticks_of(axis, pd.concat([trials[name] for name in AXES]))  # both panels have one scale
    curves = [_dot_curve(rows, score, axis, ticks, style) for style, rows in _split_by_style(trials)]
    front = trials[trials[f"on_front_{column}"]].sort_values([column, score])
    if len(front):
        ring = Style(label=_FRONT, colour=_FRONT_COLOUR, dash="", hollow=True, ring=True)
        dots = _dot_curve(front, score, axis, ticks, ring)
        curves += [_front_line(dots), dots]
    return Panel(
        legend=_LEGEND,
        y_label=f"{score_title(score)} (%)",
        axis=ticks,
        curves=curves,
        references=lines_across(trials, score, find_question("search")),
    )


def _front_line(dots: Curve) -> Curve:
    """Return the staircase through the dots of a front."""
    style = Style(label=_FRONT, colour=_FRONT_COLOUR, marker="", dash="solid")
    return Curve.of_single(style, *staircase(dots.x, dots.mean))


def _split_by_style(trials: pd.DataFrame) -> list[tuple[Style, pd.DataFrame]]:
    """Split the trials by sweep and by whether their guarantee is proven; each part has its own style."""
    groups = []
    for number, (name, rows) in enumerate(trials.groupby(SWEEP, sort=False)):
        private = is_private(rows)
        colour_and_marker = PRIVATE_COLOURS[number % len(PRIVATE_COLOURS)], MARKERS[number % len(MARKERS)]
        style = Style(label=str(name), colour=colour_and_marker[0], marker=colour_and_marker[1], dash="")
        if private.any():
            groups.append((style, rows[private]))
        if not private.all():
            colour = UNPROVEN_COLOURS[number % len(UNPROVEN_COLOURS)]
            label = f"{name}, no proven guarantee"
            groups.append((Style(label=label, colour=colour, dash="", hollow=True), rows[~private]))
    return groups


def _dot_curve(rows: pd.DataFrame, score: str, axis: Axis, ticks: Ticks, style: Style) -> Curve:
    orders = list(axis.orders(rows[axis.column]))
    names = [f"{ticks.names[o]}, {trial}" for o, trial in zip(orders, trial_names(rows), strict=True)]
    x = [ticks.positions[order] for order in orders]
    return Curve.of_single(style, names, x, [100 * value for value in rows[score]])


def trial_names(rows: pd.DataFrame) -> list[str]:
    """Return the trials' names, or their numbers if they have no names."""
    return list(map(str, rows["trial" if "trial" in rows else "trial_number"]))
