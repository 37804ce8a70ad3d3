"""Trials of a search → its history, the score against each searched setting, and utility against ε."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from dashboards.compose.axes import Axis, fitting_scale, ticks_of
from dashboards.compose.content import Content, Curve, Panel, Style, Table
from dashboards.compose.curves import guarantee_text
from dashboards.compose.names import (
    column_title,
    has_values,
    natural_key,
    panel_scores,
    score_names,
    score_title,
    symbol,
    value_text,
)
from dashboards.compose.panels import beside
from dashboards.compose.questions import Question, find_question
from dashboards.compose.references import REFERENCE, lines_across, reference_rows
from dashboards.compose.selection import PROVEN, shown_trials
from dashboards.compose.tables import NO_SCORE, mean_text
from dpgcl_core.release.metrics import find_metric
from dpgcl_core.release.statement import rounded_up

TRIALS, FRONT = "Trials", "Pareto front"
_FRONT_COLOUR = "#222222"
_MOST_TICKS = 8  # values that are all labelled
# Params and tags that are no setting, or follow from one.
NOT_SEARCHED = (
    *("repeat", "public_seed", "sensitivity", "sampling_prob", "randomness", "neighboring_relation"),
    *("num_records_public_source", "guarantee_label", "guarantee", "data_is", "notes", "research", "sweep"),
    *("trial", "role", "release_mode", "tuning_cost", "tuned_epsilon", "tuned_delta", "tuning_theorem"),
    *("run_id", "run_name", "axis_order", "trial_number", "group_size_order", "searched", "objective"),
    "sweep_run_id",
)


def number_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the trials in the order they were proposed, by number in `trial_number`.

    Where a sweep records no number it is the place among their names, from 1.
    """
    if "trial_number" in trials and trials["trial_number"].notna().all():
        return trials.sort_values("trial_number", ignore_index=True)
    if "trial" in trials:
        names = sorted(range(len(trials)), key=lambda i: natural_key(str(trials["trial"].iloc[i])))
        trials = trials.iloc[names].reset_index(drop=True)
    return trials.assign(trial_number=range(1, len(trials) + 1))


def searched_columns(shown: pd.DataFrame) -> list[str]:
    """Return the settings that were searched: those the sweep names in `searched`, else those that vary."""
    if has_values(shown, "searched"):
        named = [name.strip() for name in str(shown["searched"].iloc[0]).split(",")]
        return [name for name in named if has_values(shown, name)]
    shown = shown[is_private(shown)] if is_private(shown).any() else shown
    found = [
        str(name)
        for name in shown
        if name not in NOT_SEARCHED and find_metric(str(name)) is None and not score_title(str(name))
        if not str(name).startswith("epsilon_") and shown[name].map(str).nunique() > 1
    ]
    # σ is calibrated to the target, and so no setting of its own.
    return [name for name in found if name != "noise_multiplier" or "target_epsilon" not in found]


def objective(shown: pd.DataFrame) -> str | None:
    """Return the score that was maximised, by the param `objective`, else the first one drawn."""
    if has_values(shown, "objective") and has_values(shown, str(shown["objective"].iloc[0])):
        return str(shown["objective"].iloc[0])
    return next(iter(panel_scores(score_names(shown))), None)


def search_rows(shown: pd.DataFrame, question: Question) -> list[list[Panel]]:
    """Return panels of the history, of utility against ε where it varies, and of each searched setting."""
    score = objective(shown)
    if score is None:
        return []
    first = [_history(shown, question, score)]
    searched = searched_columns(shown)
    if shown.loc[is_private(shown), "target_epsilon"].nunique() > 1:
        first.append(front_panel(shown, score))
        searched = [name for name in searched if name != "target_epsilon"]
    scatters = [_scatter(shown, name, score) for name in searched]
    if len(first) == 1:
        first += scatters[:1]
        scatters = scatters[1:]
    return [first, *(scatters[start : start + 2] for start in range(0, len(scatters), 2))]


def on_the_front(epsilons: list[float], scores: list[float]) -> list[bool]:
    """Return whether no other point has at most this ε and at least this score, one of them better.

    >>> on_the_front([1.0, 2.0, 2.0, 4.0], [0.5, 0.7, 0.6, 0.7])
    [True, True, False, False]
    """
    points = list(zip(epsilons, scores, strict=True))
    return [
        not any(e <= epsilon and s >= score and (e, s) != (epsilon, score) for e, s in points)
        for epsilon, score in points
    ]


def trials_table(shown: pd.DataFrame) -> Table:
    """Return one row per trial, by score: settings, scores, ε, guarantee, place on the front.

    None is bold: one training of each setting resolves no best one.
    """
    score, searched = objective(shown), searched_columns(shown)
    scores = score_names(shown)
    on_front = set(shown.index[_marks(shown, score)]) if score else set()
    ordered = shown.sort_values(score, ascending=False) if score else shown
    heading = ["Trial", *map(column_title, searched), *(f"{score_title(name)} (%)" for name in scores)]
    heading += ["ε spent", "Guarantee", "Pareto front"]
    rows = []
    for index, row in ordered.iterrows():
        cells = [str(row["trial_number"]), *(value_text(row[name]) for name in searched)]
        cells += ["–" if pd.isna(row[name]) else f"{100 * row[name]:.2f}" for name in scores]
        spent = (
            rounded_up(row["epsilon"], 4)
            if row["guarantee"] == PROVEN and has_values(shown, "epsilon")
            else "none"
        )
        rows.append([*cells, spent, str(row["guarantee"]), "yes" if index in on_front else ""])
    for reference in reference_rows(shown, find_question("search")):
        known = [mean_text(*reference.scores.get(name, NO_SCORE), scale=100) for name in scores]
        rows.append([reference.label, *("–" for _ in searched), *known, "–", REFERENCE, ""])
    return Table(heading=heading, rows=rows)


def is_private(shown: pd.DataFrame) -> pd.Series:
    """Return which trials have a proven guarantee."""
    return shown["guarantee"] == PROVEN


def epsilon_spent(shown: pd.DataFrame) -> pd.Series:
    """Return ε of every trial: what was spent, else the target."""
    return shown["epsilon"].fillna(shown["target_epsilon"]) if "epsilon" in shown else shown["target_epsilon"]


def _marks(shown: pd.DataFrame, score: str) -> pd.Series:
    """Return which trials are on the front of those that are private."""
    rows = shown[is_private(shown) & shown[score].notna()]
    front = on_the_front(list(epsilon_spent(rows)), list(rows[score]))
    return pd.Series(front, index=rows.index, dtype=bool).reindex(shown.index, fill_value=False)


def _groups(shown: pd.DataFrame) -> list[tuple[Style, pd.DataFrame]]:
    """Split the trials by guarantee, each group drawn as dots."""
    looks = {
        PROVEN: ("#D55E00", "square"),
        "as-published": ("#56B4E9", "circle"),
        "none": ("#0072B2", "circle"),
    }
    found = []
    for guarantee in (PROVEN, "as-published", "none"):
        rows = shown[shown["guarantee"] == guarantee]
        if len(rows):
            colour, marker = looks[guarantee]
            label = guarantee_text(guarantee, None)
            style = Style(
                label=label, colour=colour, marker=marker, dash="", hollow=guarantee == "as-published"
            )
            found.append((style, rows))
    return found


def _dots(rows: pd.DataFrame, column: pd.Series, score: str, axis: Axis, ticks: Any, style: Style) -> Curve:
    rows = rows[rows[score].notna()]
    orders = axis.orders(column).loc[rows.index]
    return Curve(
        style=style,
        names=[f"{ticks.names[o]}, trial {n}" for o, n in zip(orders, rows["trial_number"], strict=True)],
        x=[ticks.positions[order] for order in orders],
        mean=[100 * value for value in rows[score]],
        standard_error=[math.nan] * len(rows),
        num_repeats=[1] * len(rows),
    )


def _panel(shown: pd.DataFrame, axis: Axis, column: pd.Series, score: str, lines: list[Curve]) -> Panel:
    ticks = ticks_of(axis, column)
    title = column_title(score) + (f" by {axis.label.lower()}" if ticks.categorical else "")
    curves = [_dots(rows, column, score, axis, ticks, style) for style, rows in _groups(shown)]
    panel = Panel(
        legend=TRIALS,
        y_label=f"{title} (%)",
        axis=ticks,
        axis_symbol=axis.symbol,
        curves=[*curves, *lines],
        references=lines_across(shown, score, find_question("search")),
    )
    return beside(panel)


def plain_line(label: str, x: list[float], y: list[float], names: list[str], dash: str = "solid") -> Curve:
    style = Style(label=label, colour=_FRONT_COLOUR, marker="", dash=dash)
    nothing = [math.nan] * len(x)
    return Curve(style=style, names=names, x=x, mean=y, standard_error=nothing, num_repeats=[1] * len(x))


def _history(shown: pd.DataFrame, question: Question, score: str) -> Panel:
    """Return the panel of scores in the order of the trials, with the best private one so far."""
    rows = shown[is_private(shown) & shown[score].notna()].sort_values("trial_number")
    best = list(100 * rows[score].cummax())
    numbers = list(map(float, rows["trial_number"]))
    x, y, names = staircase(numbers, best)
    lines = [plain_line("best private trial so far", x, y, names, "dashed")] if x else []
    return _panel(shown, question.axis, shown["trial_number"], score, lines)


def front_content(trials: pd.DataFrame) -> Content:
    """Return the content of one panel, trials by ε spent and score; empty where none has both.

    Args:
      trials: from `dashboards.query.trials.load_trials`, of any question.

    Raises:
      DashboardError: as `dashboards.compose.selection.shown_trials`.
    """
    asked = find_question("search")
    shown = number_trials(shown_trials(number_trials(trials), asked))
    score = objective(shown)
    rows = [] if score is None or not is_private(shown).any() else [[front_panel(shown, score)]]
    return Content(title="ε against score", subtitle="", rows=rows, facts=Table(heading=[], rows=[]))


def front_panel(shown: pd.DataFrame, score: str) -> Panel:
    """Return the panel of the score against ε spent, with the Pareto front of the private trials."""
    axis = Axis(
        column="epsilon",
        label="ε spent by one trial",
        symbol="ε",
        scale="log",
        dense=True,
        detached_name="none proven",
    )
    spent = epsilon_spent(shown).where(is_private(shown), math.inf)
    front = shown[_marks(shown, score)].assign(spent=spent).sort_values(["spent", score])
    ticks = ticks_of(axis, spent)
    places = [ticks.positions[order] for order in axis.orders(front["spent"])]
    style = Style(
        label="Pareto front", colour=_FRONT_COLOUR, marker="circle", dash="", hollow=True, ring=True
    )
    dots = _dots(front, spent, score, axis, ticks, style)
    x, y, names = staircase(places, dots.mean)
    return _panel(shown, axis, spent, score, [plain_line("Pareto front", x, y, names), dots] if x else [])


def staircase(x: list[float], y: list[float]) -> tuple[list[float], list[float], list[str]]:
    """Return the corners of a staircase through the points."""
    corners_x, corners_y = x[:1], y[:1]
    for place, before, after in zip(x[1:], y, y[1:], strict=False):
        corners_x += [place, place]
        corners_y += [before, after]
    return corners_x, corners_y, [""] * len(corners_x)


def _scatter(shown: pd.DataFrame, column: str, score: str) -> Panel:
    """Return the panel of the score against one setting, with the private trials' rank correlation."""
    scale, label = fitting_scale(shown[column]), column_title(column)
    dense = scale != "categorical" and shown[column].nunique() > _MOST_TICKS
    rows = shown[is_private(shown)]
    if scale != "categorical" and len(rows) > 2 and rows[column].nunique() > 1:
        places = Axis(column=column, label=label, symbol="", scale=scale).orders(rows[column])
        correlation = places.rank().corr(rows[score].rank())
        if math.isfinite(correlation):
            label += f" (rank correlation {correlation:+.2f})"
    axis = Axis(column=column, label=label, symbol=symbol(column), scale=scale, dense=dense)
    return _panel(shown, axis, shown[column], score, [])
