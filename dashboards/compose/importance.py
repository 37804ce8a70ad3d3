"""How much each searched setting mattered: Optuna's own evaluators, over the trials that MLflow holds.

Three evaluators, for they ask different things: fANOVA (Hutter, Hoos and Leyton-Brown 2014) and the mean
decrease of impurity split the spread of the score over the whole space, PED-ANOVA (Watanabe, Bansal and
Hutter 2023) asks which settings tell the best tenth from all. What few trials tell is mostly their noise:
error bars are over resamples of the trials, and a note says when there are too few of them.

They describe what was tried. None of them is evidence that a setting is better: that is the sweep's answer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from dashboards.compose import captions
from dashboards.compose.axes import Axis, Ticks, fitting_scale, ticks_of
from dashboards.compose.content import Content, Curve, Panel, Style, Table
from dashboards.compose.names import column_title, dataset_title, score_title, value_text
from dashboards.compose.panels import beside
from dashboards.compose.questions import find_question
from dashboards.compose.search import is_private, number_trials, objective, searched_columns
from dashboards.compose.selection import data_are_private, shown_trials
from dashboards.compose.tables import mean_text
from dashboards.errors import DashboardError

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.importance import BaseImportanceEvaluator

LEAST_TRIALS = 4
"""Of fewer nothing is drawn."""
TRIALS_PER_SETTING = 10
"""Of fewer for each searched setting a note says that they are too few."""
_RESAMPLES = 20
_SETTING = "setting"
_EVALUATORS = ("fANOVA", "PED-ANOVA", "mean decrease of impurity")
_COLOURS = ("#D55E00", "#0072B2", "#009E73")
_SHAPES = ("square", "circle", "diamond")


def importance_of(trials: pd.DataFrame) -> tuple[Content, pd.DataFrame]:
    """Return the figure and its numbers: a row per setting and evaluator, shares of one.

    Args:
      trials: from `dashboards.query.trials.load_trials`, of one sweep.

    Raises:
      DashboardError: no trial has a score, there are fewer than `LEAST_TRIALS`, or no setting varies.
    """
    question = find_question("search")
    shown = shown_trials(number_trials(trials), question)
    score = objective(shown)
    if score is None:
        raise DashboardError("no trial has a score: there is nothing to attribute to settings")
    rows = _compared(shown[shown[score].notna()])
    columns = [name for name in searched_columns(rows) if rows[name].map(str).nunique() > 1]
    if len(rows) < LEAST_TRIALS or not columns:
        raise DashboardError(
            f"importance needs {LEAST_TRIALS} scored trials or more in which a setting varies; got "
            f"{len(rows)}, with {', '.join(columns) or 'none'} that vary: run more trials of the search"
        )
    numbers = _numbers(rows, columns, score)
    return _content(numbers, shown, score, len(rows), private=data_are_private(trials)), numbers


def _compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the private trials where there are any: noise and no noise are no setting of one search."""
    private = is_private(rows)
    return rows[private] if private.any() else rows


def _numbers(rows: pd.DataFrame, columns: list[str], score: str) -> pd.DataFrame:
    random = np.random.default_rng(0)
    picks = [random.integers(len(rows), size=len(rows)) for _ in range(_RESAMPLES)]
    found: list[dict[str, Any]] = []
    for name in _EVALUATORS:
        whole = _importances(rows, columns, score, name)
        again = [_importances(rows.iloc[pick], columns, score, name) for pick in picks]
        for column in columns:
            values = [each[column] for each in again if each]
            error = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
            found.append(
                {
                    _SETTING: column,
                    "evaluator": name,
                    "importance": whole.get(column, math.nan),
                    "standard_error": error,
                    "num_trials": len(rows),
                }
            )
    return pd.DataFrame(found)


def _importances(rows: pd.DataFrame, columns: list[str], score: str, evaluator: str) -> dict[str, float]:
    """Return each setting's share; none where the trials do not differ enough to tell."""
    from optuna.importance import get_param_importances

    if rows[score].nunique() < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # evaluators are experimental, and say so each time
        found = get_param_importances(_study(rows, columns, score), evaluator=_made(evaluator))
    shares = {name: float(found.get(name, 0.0)) for name in columns}
    return shares if all(map(math.isfinite, shares.values())) else {}


def _made(name: str) -> BaseImportanceEvaluator:
    from optuna.importance import (
        FanovaImportanceEvaluator,
        MeanDecreaseImpurityImportanceEvaluator,
        PedAnovaImportanceEvaluator,
    )

    made: Mapping[str, Callable[[], BaseImportanceEvaluator]] = {
        "fANOVA": lambda: FanovaImportanceEvaluator(seed=0),
        "PED-ANOVA": PedAnovaImportanceEvaluator,
        "mean decrease of impurity": lambda: MeanDecreaseImpurityImportanceEvaluator(seed=0),
    }
    return made[name]()


def _study(rows: pd.DataFrame, columns: list[str], score: str) -> Study:
    """Return the trials as a study that Optuna's evaluators read."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(direction="maximize")
        spaces = {name: _distribution(rows[name]) for name in columns}
        study.add_trials(
            [
                optuna.trial.create_trial(
                    params={name: _value(row[name], spaces[name]) for name in columns},
                    distributions=spaces,
                    value=float(row[score]),
                )
                for _, row in rows.iterrows()
            ]
        )
    finally:
        optuna.logging.set_verbosity(before)
    return study


def _distribution(values: pd.Series) -> BaseDistribution:
    """Return the range that was tried, on the scale that its values suggest; names are choices."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    texts = any(isinstance(value, (str, bool)) or pd.isna(value) for value in values)
    if texts or values.nunique() < 2:
        return CategoricalDistribution(sorted({value_text(value) for value in values}))
    numbers = values.astype(float)
    if not np.isfinite(numbers).all():
        return CategoricalDistribution(sorted({value_text(value) for value in values}))
    log = fitting_scale(values) in ("log", "log2") and bool((numbers > 0).all())
    return FloatDistribution(float(numbers.min()), float(numbers.max()), log=log)


def _value(value: Any, space: BaseDistribution) -> Any:
    from optuna.distributions import CategoricalDistribution

    return value_text(value) if isinstance(space, CategoricalDistribution) else float(value)


def _content(
    numbers: pd.DataFrame, shown: pd.DataFrame, score: str, num_trials: int, *, private: bool
) -> Content:
    ordered = numbers.groupby(_SETTING)["importance"].mean().sort_values(ascending=False)
    axis = Axis(
        column=_SETTING,
        label="Setting",
        symbol="setting",
        scale="categorical",
        order=[column_title(str(name)) for name in ordered.index],
    )
    settings = numbers[_SETTING].map(column_title)
    ticks = ticks_of(axis, settings)
    curves = [
        _curve(numbers[numbers["evaluator"] == name], settings, axis, ticks, place)
        for place, name in enumerate(_EVALUATORS)
    ]
    panel = Panel(
        legend="Evaluators",
        y_label=f"Share of the spread of {score_title(score) or score} (%)",
        axis=ticks,
        axis_symbol="setting",
        curves=curves,
    )
    table = _table(numbers, list(map(str, ordered.index)))
    heading = f"{dataset_title(str(shown['dataset'].iloc[0]))}: which settings mattered in the search"
    return Content(
        title=heading,
        subtitle=f"{num_trials} trials, {captions.subtitle(shown, find_question('search'))}",
        rows=[[beside(panel)]],
        facts=table,
        tables=[("Importance of each setting (%)", table)],
        remarks=_notes(num_trials, len(ordered), private=private) + captions.tuning_costs(shown),
    )


def _curve(rows: pd.DataFrame, settings: pd.Series, axis: Axis, ticks: Ticks, place: int) -> Curve:
    orders = axis.orders(settings).loc[rows.index]
    known = rows["importance"].notna()
    return Curve(
        style=Style(label=_EVALUATORS[place], colour=_COLOURS[place], marker=_SHAPES[place], dash=""),
        names=[ticks.names[order] for order in orders[known]],
        x=[ticks.positions[order] for order in orders[known]],
        mean=list(100 * rows.loc[known, "importance"]),
        standard_error=list(100 * rows.loc[known, "standard_error"]),
        num_repeats=list(rows.loc[known, "num_trials"]),
    )


def _table(numbers: pd.DataFrame, columns: list[str]) -> Table:
    cells = {
        (row[_SETTING], row["evaluator"]): mean_text(row["importance"], row["standard_error"], 1, scale=100)
        for row in numbers.to_dict("records")
    }
    rows = [[column_title(each), *(cells[each, name] for name in _EVALUATORS)] for each in columns]
    return Table(heading=["Setting", *_EVALUATORS], rows=rows)


def _notes(num_trials: int, num_settings: int, *, private: bool) -> list[str]:
    enough = TRIALS_PER_SETTING * num_settings
    found = []
    if num_trials < enough:
        found.append(
            f"TOO FEW TRIALS: {num_trials} for {num_settings} settings; below about {enough} these shares "
            "are mostly chance."
        )
    found += [
        "Shares of one evaluator sum to 100 %; error bars: standard error over resamples of the trials.",
        "fANOVA and the decrease of impurity: of the spread over all that was tried; PED-ANOVA: of what "
        "tells the best tenth from the rest.",
        "A share tells that a setting mattered, and not which value is better.",
    ]
    return found + (["Of private data: trials with a proven guarantee alone."] if private else [])
