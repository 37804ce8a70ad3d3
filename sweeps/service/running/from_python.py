"""Sweeps from Python: the user's own points, or own space and score, and a table of trials in return.

Both use `execute`, as every sweep does, with the same plan, cost, ledger, tracking and resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dashboards.compose.answer import Answer
from dpgcl_core.errors import ConfigError
from dpgcl_core.release.metrics import find_metric
from dpgcl_core.release.statement import PrivacyStatement
from sweeps.service.options.score_options import default_score
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.space import EPSILON, Between, SearchOptions, space_of
from sweeps.service.planning.trials import Point
from sweeps.service.running.conclude import Figure
from sweeps.service.running.search_policy import OwnScore, SearchPolicy, read_suggestions
from sweeps.service.running.strategies import run_with_strategy
from sweeps.service.running.sweep import Outcome

if TYPE_CHECKING:
    import pandas as pd

Score = Callable[[Mapping[str, float]], float]
"""Maps the visible metrics of a finished trial to a number, the larger the better."""


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The results of a sweep, and its cost.

    Attributes:
      trials: one row per finished trial: its name (`trial`), every param and metric, and `score`.
      best: option values of the setting with the highest mean score over its repeats; None if no trial has
        a score.
      best_score: the mean score of `best`; nan if no trial has a score.
      epsilon: the largest ε of one training, at `delta`; None without a guarantee.
      tuned_epsilon: ε of the whole sweep, including every trial and every choice; None without a guarantee.
      delta: the δ of `epsilon` and `tuned_epsilon`; None without a guarantee.
      answer: the recommended setting, and the settings within noise of the best one; None without scores.
      statement: the privacy statement, which is also in `folder`; None if none was written.
      folder: the folder of results, statement and `config.yaml`; None after a dry run.
      code: 0; 1 if trials failed or MLflow lacks results; 128 + signal if stopped. `resume` continues.
    """

    trials: pd.DataFrame
    best: Mapping[str, Any] | None
    best_score: float
    epsilon: float | None
    tuned_epsilon: float | None
    delta: float | None
    answer: Answer | None
    statement: PrivacyStatement | None
    folder: Path | None
    code: int


def run(
    options: SweepOptions,
    points: Sequence[Point],
    *,
    score: str | Score | None = None,
    question: str = "own",
    figure: Figure | None = None,
) -> SweepResult:
    """Train every point `options.service.repeats` times, and return all trials.

    Guarantee: all trials together are (`tuned_epsilon`, δ)-differentially private for adding or removing one
    record, by composition, with the label of their method.

    Args:
      options: the sweep's options; a point replaces some of them.
      points: the settings to compare.
      score: the score to rank by: a metric's name, or a function of a trial's visible metrics; by default
        the modality's usual score (k-NN accuracy, or recall at 10 for pairs).
      question: name of the sweep in folders and MLflow.
      figure: draws a figure from MLflow, for example `partial(dashboards.draw, "group-size")`.

    Raises:
      ConfigError: bad input, before anything is trained; or the sweep is sealed, and shows no trials.
      DpgclError: data, storage, tracking server or ledger fail.
    """
    _check_open(options)
    outcome = run_with_strategy(question, options, points, figure)
    settings = {
        f"{point.label}-r{repeat}": (point.label, dict(point.changes))
        for point in outcome.points
        for repeat in range(options.service.repeats)
    }
    best_by = score or default_score(options.data.modality, options.mechanism.method)
    return _result(outcome, best_by if isinstance(best_by, str) else OwnScore("score", best_by), settings)


def search(
    options: SweepOptions,
    space: Mapping[str, Sequence[Any] | Between],
    score: str | Score,
    num_trials: int,
    *,
    sampler: str = "tpe",
    earlier: Sequence[str] = (),
    question: str = "search",
    figure: Figure | None = None,
) -> SweepResult:
    """Search a space of settings for the one with the highest score, and return all trials.

    Guarantee: as in `run`, whatever settings the search chooses; the cost is that of `num_trials` trainings
    at the least noise of the space (proof and, with `earlier`, its condition:
    `sweeps.service.planning.search_plan`). `tuned_epsilon` then includes the cost of the earlier sweeps.

    Args:
      options: the sweep's options; the space replaces some of them. Each setting is trained once.
      space: by option, a list of values or `Between(low, high)`.
      score: a metric's name, or a function of a trial's visible metrics. The function's name is the score's
        name in the table and in MLflow; a trial whose score is not finite counts as failed.
      num_trials: number of trainings, fixed in advance.
      sampler: the sampler that proposes settings: tpe learns from earlier trials, random does not.
      earlier: names of open sweeps on the same data; tpe learns from their results, and their ε is added.
      question, figure: as in `run`.

    Raises:
      ConfigError: as in `run`; or an option must not vary in a search.
      DpgclError: as in `run`.
    """
    _check_open(options)
    name = score if isinstance(score, str) else _name_of(score)
    nodes = {node.name: getattr(options, node.name) for node in fields(SweepOptions)}
    nodes["service"] = replace(options.service, repeats=1)
    searched = SearchOptions(
        **nodes, num_trials=num_trials, objectives=(name,), sampler=sampler, earlier=tuple(earlier)
    )
    own_score = None if isinstance(score, str) else OwnScore(name, score)
    policy = SearchPolicy(space=space_of(space), own_score=own_score)
    outcome = run_with_strategy(question, searched, (), figure, policy)
    values = read_suggestions(outcome.folder) if outcome.folder is not None else []
    settings = {f"trial-{number}": (f"trial-{number}", value) for number, value in enumerate(values, start=1)}
    return _result(outcome, name, settings)


def _check_open(options: SweepOptions) -> None:
    if not options.release.is_open:
        raise ConfigError(
            f"a table of trials needs release = open; got {options.release.mode}, which publishes only one "
            "model. Run a sweep's script instead"
        )


def _name_of(score: Score) -> str:
    """Return the name of the user's score function; raise ConfigError if another metric has this name."""
    name = getattr(score, "__name__", type(score).__name__)
    if not name.isidentifier() or find_metric(name) is not None or name in (EPSILON, "score"):
        raise ConfigError(
            f"your own score must be a named function, with a name that no other metric has; got {name!r}"
        )
    return str(name)


def _result(
    outcome: Outcome, score: str | OwnScore, settings: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> SweepResult:
    """Return the result for the caller; `settings` maps a trial to its setting's name and option values."""
    import pandas as pd

    rows, scores = [], dict[str, list[float]]()
    for trial, result in outcome.results.items():
        metrics = result["metrics"]
        value = metrics.get(score, math.nan) if isinstance(score, str) else score.of(trial, metrics)
        rows.append({"trial": trial, **result["params"], **metrics, "score": value})
        scores.setdefault(settings[trial][0], []).append(value)
    means = {name: sum(values) / len(values) for name, values in scores.items()}
    finite = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    best = max(finite, key=finite.__getitem__, default=None)
    cost = outcome.statement.cost if outcome.statement is not None else None
    return SweepResult(
        trials=pd.DataFrame(rows),
        best=dict(settings.values())[best] if best is not None else None,
        best_score=finite[best] if best is not None else math.nan,
        epsilon=cost.training_epsilon if cost is not None else None,
        tuned_epsilon=cost.tuned_epsilon if cost is not None else None,
        delta=cost.delta if cost is not None else None,
        answer=outcome.answer,
        statement=outcome.statement,
        folder=outcome.folder.path if outcome.folder is not None else None,
        code=outcome.code,
    )
