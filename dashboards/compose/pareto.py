"""Utility against privacy, over all trials of one or several sweeps, with what the tuning cost.

Left, every trial at the ε of its one training; right, at the ε of its whole sweep, all trainings and the
choice among them included. The first is what a training would have cost whose settings were known; the second
is what holds for the model that was chosen by looking. A front holds the trials that no other one beats in
both, among those with a proven guarantee alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from dashboards.compose import captions
from dashboards.compose.axes import Axis, Ticks, ticks_of
from dashboards.compose.comparison import together
from dashboards.compose.content import Content, Curve, Panel, Style, Table
from dashboards.compose.curves import MARKERS, PRIVATE_COLOURS, UNPROVEN_COLOURS
from dashboards.compose.names import (
    SWEEP,
    common_scores,
    dataset_title,
    panel_scores,
    score_title,
    value_text,
)
from dashboards.compose.questions import find_question
from dashboards.compose.references import lines_across
from dashboards.compose.search import (
    epsilon_spent,
    is_private,
    number_trials,
    on_the_front,
    plain_line,
    staircase,
)
from dashboards.compose.selection import data_are_private, shown_trials
from dashboards.errors import DashboardError
from dpgcl_core.errors import unknown_choice
from dpgcl_core.release.statement import delta_text, rounded_up

ONE, WHOLE = "epsilon_of_one_training", "epsilon_of_the_sweep"
_LEGEND = "Trials"
_AXES = {
    column: Axis(column=column, label=label, symbol="ε", scale="log", dense=True, detached_name="none")
    for column, label in ((ONE, "ε of one training"), (WHOLE, "ε of the whole sweep"))
}


def pareto_of(sweeps: Sequence[pd.DataFrame], score: str | None = None) -> tuple[Content, pd.DataFrame]:
    """Return the figure, and its numbers: a row per trial.

    Args:
      sweeps: from `dashboards.query.trials.load_trials`, each of one sweep, with the same scored records.
      score: drawn; the first one that all trials have unless given.

    Raises:
      DashboardError: as `dashboards.compose.comparison.together`, or there is no such score.
    """
    trials = together([number_trials(each) for each in sweeps])
    shown = shown_trials(trials, find_question("search"))
    drawn = _score(shown, score)
    shown = _with_epsilons(shown[shown[drawn].notna()].reset_index(drop=True), drawn)
    panels = [_panel(shown, drawn, column) for column in _AXES]
    tables = [("Trials on a front", _table(shown, drawn)), ("Sweeps", _sweeps_table(shown, drawn))]
    content = Content(
        title=f"{dataset_title(str(shown['dataset'].iloc[0]))}: {score_title(drawn)} against ε",
        subtitle=captions.subtitle(shown, find_question("search")),
        rows=[panels],
        facts=tables[1][1],
        tables=tables,
        remarks=_notes(shown, private=data_are_private(trials)),
    )
    columns = [SWEEP, "trial", "run_id", drawn, ONE, WHOLE, "target_delta", "guarantee"]
    columns += [f"on_front_{column}" for column in _AXES]
    return content, shown[[name for name in columns if name in shown]]


def _score(shown: pd.DataFrame, asked: str | None) -> str:
    known = panel_scores(common_scores(shown))
    if not known:
        raise DashboardError(
            "no trial has a score to draw against ε: they are of private records, or unscored"
        )
    if asked is not None and (asked not in shown or score_title(asked) is None):
        raise DashboardError(unknown_choice("score", asked, known))
    return asked or known[0]


def _with_epsilons(shown: pd.DataFrame, score: str) -> pd.DataFrame:
    """Add both ε, infinite where there is none, and whether a trial is on their fronts."""
    private = is_private(shown)
    tuned = pd.to_numeric(shown.get("tuned_epsilon", pd.Series(math.nan, index=shown.index)), errors="coerce")
    found = shown.assign(
        **{
            ONE: epsilon_spent(shown).where(private, math.inf),
            WHOLE: tuned.where(private).fillna(math.inf),
        }
    )
    for column in _AXES:
        accounted = found[found[column] < math.inf]
        front = on_the_front(list(accounted[column]), list(accounted[score]))
        marks = pd.Series(front, index=accounted.index, dtype=bool)
        found[f"on_front_{column}"] = marks.reindex(found.index, fill_value=False)
    return found


def _panel(shown: pd.DataFrame, score: str, column: str) -> Panel:
    axis = _AXES[column]
    ticks = ticks_of(axis, pd.concat([shown[each] for each in _AXES]))  # one scale tells the cost
    curves = [_dots(rows, score, axis, ticks, style) for style, rows in _groups(shown)]
    front = shown[shown[f"on_front_{column}"]].sort_values([column, score])
    if len(front):
        ring = Style(label="Pareto front", colour="#222222", dash="", hollow=True, ring=True)
        dots = _dots(front, score, axis, ticks, ring)
        curves += [plain_line("Pareto front", *staircase(dots.x, dots.mean)), dots]
    return Panel(
        legend=_LEGEND,
        y_label=f"{score_title(score)} (%)",
        axis=ticks,
        axis_symbol=axis.symbol,
        curves=curves,
        references=lines_across(shown, score, find_question("search")),
    )


def _groups(shown: pd.DataFrame) -> list[tuple[Style, pd.DataFrame]]:
    """Split the trials by sweep and by whether they are private."""
    found = []
    for number, (name, rows) in enumerate(shown.groupby(SWEEP, sort=False)):
        private = is_private(rows)
        looks = PRIVATE_COLOURS[number % len(PRIVATE_COLOURS)], MARKERS[number % len(MARKERS)]
        style = Style(label=str(name), colour=looks[0], marker=looks[1], dash="")
        if private.any():
            found.append((style, rows[private]))
        if not private.all():
            colour = UNPROVEN_COLOURS[number % len(UNPROVEN_COLOURS)]
            label = f"{name}, no proven guarantee"
            found.append((Style(label=label, colour=colour, dash="", hollow=True), rows[~private]))
    return found


def _dots(rows: pd.DataFrame, score: str, axis: Axis, ticks: Ticks, style: Style) -> Curve:
    orders = list(axis.orders(rows[axis.column]))
    return Curve(
        style=style,
        names=[f"{ticks.names[o]}, {trial}" for o, trial in zip(orders, _trial_names(rows), strict=True)],
        x=[ticks.positions[order] for order in orders],
        mean=[100 * value for value in rows[score]],
        standard_error=[math.nan] * len(rows),
        num_repeats=[1] * len(rows),
    )


def _trial_names(rows: pd.DataFrame) -> list[str]:
    return list(map(str, rows["trial" if "trial" in rows else "trial_number"]))


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
    marks = {column: shown[f"on_front_{column}"] for column in _AXES}
    rows = shown[marks[ONE] | marks[WHOLE]].sort_values([ONE, score])
    titles = {ONE: "one training", WHOLE: "whole sweep"}
    cells = []
    for name, (_, row) in zip(_trial_names(rows), rows.iterrows(), strict=True):
        on = [title for column, title in titles.items() if row[f"on_front_{column}"]]
        epsilons = [_epsilon(row[column]) for column in _AXES]
        cells.append([row[SWEEP], name, f"{100 * row[score]:.2f}", *epsilons, _delta(row), " and ".join(on)])
    return Table(heading=heading, rows=cells)


def _sweeps_table(shown: pd.DataFrame, score: str) -> Table:
    heading = [
        "Sweep",
        "Trials",
        "of them proven",
        f"Best proven, {score_title(score)} (%)",
        "ε of the sweep",
    ]
    rows = []
    for name, cell in shown.groupby(SWEEP, sort=False):
        proven = cell[is_private(cell)]
        best = f"{100 * proven[score].max():.2f}" if len(proven) else "–"
        whole = _epsilon(proven[WHOLE].max()) if len(proven) else "–"
        rows.append([str(name), str(len(cell)), str(len(proven)), best, whole])
    return Table(heading=heading, rows=rows)


def _epsilon(value: float) -> str:
    return "–" if math.isinf(value) else rounded_up(float(value), 4)


def _delta(row: pd.Series) -> str:
    return delta_text(float(row["target_delta"])) if "target_delta" in row else "not recorded"


def _notes(shown: pd.DataFrame, *, private: bool) -> list[str]:
    found = [
        "Every dot is one training; only those with a proven guarantee can be on a front.",
        "Left: ε of that training alone, as if its settings had been known. Right: ε of its whole sweep, "
        "which holds for a model chosen by looking at all of them.",
    ]
    if len(shown) > 1:
        found.append("The best of many trainings is the best partly by chance: a dot is no answer.")
    deltas = shown.loc[is_private(shown), "target_delta"].dropna().unique() if "target_delta" in shown else []
    if len(deltas) > 1:
        found.append(f"The ε are at different δ: {', '.join(map(value_text, sorted(deltas)))}.")
    if private:
        found.append("The training data are private: trials without a proven guarantee are not shown.")
    return [*found, *captions.tuning_costs(shown)]
