"""The end of an open sweep: its privacy statement, then its answer, its figure, and links to its results."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dashboards.compose.answer import Answer
from dpgcl_core.errors import DpgclError, LedgerError, StorageError
from dpgcl_core.release.metrics import is_reference
from dpgcl_core.release.statement import PrivacyStatement
from sweeps.service.cluster.stopping import stopped_at
from sweeps.service.console.display import doing
from sweeps.service.console.terminal import print_line, print_link, warn
from sweeps.service.privacy.sweep_statement import count_draws, statement_text, write_statement
from sweeps.service.running.answer_file import answer_text, sweep_answer, write_answer
from sweeps.service.running.mlflow_listener import MlflowListener
from sweeps.service.running.prepare import PreparedSweep
from sweeps.service.running.sweep_trials import SweepTrials
from trainers.evaluation.untrained_scores import reference_scores
from trainers.tracking.mlflow_server import is_database, runs_link
from trainers.tracking.runs import ROLE_TAG, SWEEP_TAG, TRIAL_ROLE

Figure = Callable[[str, str, Path], Sequence[Path]]
"""Draws a sweep's figure from MLflow only: (tracking uri, sweep name, folder) → files."""


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """The conclusion of an open sweep.

    Attributes:
      statement: the privacy statement; None if MLflow lacks results, or the statement failed.
      is_stated: False if the statement could not be written to the sweep's folder.
      answer: the sweep's answer (the recommended setting and why); None without scores.
    """

    statement: PrivacyStatement | None = None
    is_stated: bool = True
    answer: Answer | None = None


def conclude(
    sweep: PreparedSweep, trials: SweepTrials, mlflow: MlflowListener, figure: Figure | None
) -> Conclusion:
    """Write statement and answer, and draw the figure; failures only print warnings, and `--resume` retries.

    Args:
      sweep: the sweep, whose trainings have ended.
      trials: the sweep's trials, with their results.
      mlflow: the sweep's listener; if MLflow lacks results, no statement is written and nothing is drawn.
      figure: draws the figure; None for no figure.
    """
    statement, is_stated, answer = None, True, None
    if not mlflow.untracked:
        statement, is_stated = _publish_statement(sweep, trials, mlflow)
    if trials.results():
        if sweep.policy.has_answer:
            answer = _publish_answer(sweep, trials, mlflow, statement)
        if figure is not None and not mlflow.untracked:
            _draw(figure, sweep, mlflow)
    _print_link(sweep, mlflow, answer)
    return Conclusion(statement=statement, is_stated=is_stated, answer=answer)


def _publish_statement(
    sweep: PreparedSweep, trials: SweepTrials, mlflow: MlflowListener
) -> tuple[PrivacyStatement | None, bool]:
    """Write, log and print the privacy statement; return it, and whether it could be written.

    If restarts repeated steps, the cost in the run's tags is updated, because the figure quotes it.
    """
    statement, plan, folder = None, sweep.plan, sweep.folder
    try:
        draws = count_draws(plan, folder, trials.results())
        ledger = sweep.budget.statement() if sweep.budget is not None else None
        statement = trials.statement(draws, ledger)
        if statement.cost != plan.cost:
            mlflow.tracker.set_tags(mlflow.parent, plan.tags(statement.cost))
        paths = write_statement(statement, folder.path)
        print_line(statement_text(statement))
        for path in paths:
            mlflow.log_artifact(path)
    except StorageError as error:
        warn(f"no privacy statement was written: {error}")
        return None, False
    except DpgclError as error:
        warn(f"warning: the privacy statement is not complete: {error}")
    return statement, True


def _reference_scores(sweep: PreparedSweep, mlflow: MlflowListener) -> dict[str, float]:
    """Return scores of raw pixels and HOG on public records, computed once per sweep; they cost no ε."""
    data, evaluation = sweep.plan.data, sweep.plan.trials[0].config.evaluation
    if not sweep.service.references or mlflow.untracked or (data.queries is None and not data.probes):
        return {}
    try:
        logged = mlflow.tracker.metrics_of(mlflow.parent)
        if logged_scores := {name: value for name, value in logged.items() if is_reference(name)}:
            return logged_scores
        doing("scoring raw pixels and HOG")
        scores = reference_scores(data, evaluation)
        mlflow.log_metrics(scores)
    except (DpgclError, MemoryError) as error:
        warn(f"warning: no scores of raw pixels and HOG: {error}")
        return {}
    return scores


def _publish_answer(
    sweep: PreparedSweep, trials: SweepTrials, mlflow: MlflowListener, statement: PrivacyStatement | None
) -> Answer | None:
    """Print and write the answer of the trainings that made all their steps; None if there is none.

    It is logged, if MLflow has all results, before the figure, which quotes it.
    """
    answer, references = None, _reference_scores(sweep, mlflow)
    try:
        results = trials.results()
        rows = [
            {"trial": name, "guarantee_label": trial.config.guarantee_label, **results[name]}
            for name, trial in trials.by_name.items()
            if name in results and stopped_at(trial, results[name]["metrics"]) is None
        ]
        if not rows:
            return None
        cost = statement.cost if statement is not None else sweep.plan.cost
        remaining_budget = None
        if sweep.budget is not None:
            with suppress(LedgerError):  # without a reachable ledger, the answer omits the remaining budget
                remaining_budget = sweep.budget.remaining_budget()
        tags, outcomes = {**sweep.plan.tags(), **references}, sweep.folder.outcomes()
        answer = sweep_answer(sweep.plan.question, rows, tags, cost, remaining_budget, outcomes)
        if answer is None:
            return None
        warn(answer_text(answer))
        path = write_answer(answer, sweep.folder.path)
        if not mlflow.untracked:
            mlflow.log_artifact(path)
            mlflow.log_metrics(answer.metrics())
            mlflow.tracker.set_note(mlflow.parent, answer.first_lines())
    except DpgclError as error:
        warn(f"warning: the answer failed: {error}")
    return answer


def _draw(figure: Figure, sweep: PreparedSweep, mlflow: MlflowListener) -> None:
    try:
        for path in figure(sweep.tracking_uri, sweep.folder.name, sweep.folder.path):
            mlflow.log_artifact(path)
    except DpgclError as error:
        warn(f"warning: no figure: {error}")


def _print_link(sweep: PreparedSweep, mlflow: MlflowListener, answer: Answer | None) -> None:
    """Print the link to the sweep's trainings in MLflow, sorted with the best training first."""
    uri, tags = sweep.tracking_uri, {SWEEP_TAG: sweep.folder.name, ROLE_TAG: TRIAL_ROLE}
    link = runs_link(uri, mlflow.tracker.experiment_id, tags, None if answer is None else answer.score)
    ui = f"mlflow ui --backend-store-uri {shlex.quote(uri)}  # then " * is_database(uri)
    print_link(f"runs: {ui}", link)
