"""Runs every sweep, from options to figure: prepare, run, conclude."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dashboards.compose.answer import OWN, Answer
from dashboards.compose.questions import QUESTIONS
from dpgcl_core.release.statement import PrivacyStatement
from sweeps.service.console.display import show_progress
from sweeps.service.console.terminal import short_name, warn
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Point
from sweeps.service.running.clock import SystemClock
from sweeps.service.running.conclude import Figure
from sweeps.service.running.driver import drive
from sweeps.service.running.open_release import OpenRelease
from sweeps.service.running.outbox import patiently
from sweeps.service.running.prepare import prepare_sweep
from sweeps.service.running.sealed import SealedRelease
from sweeps.service.running.trial_policy import ALL_POINTS, TrialPolicy
from sweeps.service.storage.sweep_folder import SweepFolder
from trainers.tracking.runs import Tracker

SEALED_EXPERIMENT = "dpgcl"
"""The MLflow experiment of all sealed sweeps: a separate experiment would reveal when a sweep began."""
SYSTEM_CLOCK = SystemClock()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a sweep.

    Attributes:
      code: the exit code, see `execute`.
      plan: the sweep's plan.
      points: the settings that it compared.
      folder: the folder of its results; None after a dry run.
      results: the results of its finished trials, by name; empty for a sealed sweep.
      statement: an open sweep's privacy statement; None if none was written, as after a dry run.
      answer: an open sweep's answer (the recommended setting and why); None without scores.
    """

    code: int
    plan: SweepPlan
    points: Sequence[Point] = ()
    folder: SweepFolder | None = None
    results: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    statement: PrivacyStatement | None = None
    answer: Answer | None = None

    def score(self, trial: str, name: str) -> float:
        """Return the score `name` of a trial; nan if the trial has none."""
        return float(self.results.get(trial, {}).get("metrics", {}).get(name, math.nan))


def execute(
    question: str,
    options: SweepOptions,
    points: Sequence[Point],
    figure: Figure | None,
    *,
    policy: TrialPolicy = ALL_POINTS,
    repeat_options: SweepOptions | None = None,
    clock: SystemClock = SYSTEM_CLOCK,
) -> Outcome:
    """Run a sweep from plan to figure.

    Every error of the user is found before anything is written and before the first worker starts.

    Args:
      question: the name of the sweep's question, for example `group-size`.
      options: the user's options.
      points: the settings to compare.
      figure: draws the sweep's figure from MLflow only: (tracking uri, sweep name, folder) → files; None for
        no figure.
      policy: decides which trials an open sweep trains.
      repeat_options: the options of both sweeps, stored for repeating them, if `options` are for one of two.
      clock: the clock that times a sealed sweep's publication.

    Returns:
      The sweep's outcome, with the exit code: 0; 1 if trials failed or are unfinished, or MLflow lacks
      results (`--resume` continues), or if no training finished; 128 + signal if stopped.

    Raises:
      DpgclError: bad input; a script then exits with code 2.
    """
    context = prepare_sweep(question, options, points, policy, repeat_options=repeat_options)
    with show_progress(quiet=options.service.is_quiet), context as sweep:
        plan, folder = sweep.plan, sweep.folder
        if options.service.dry_run:
            return Outcome(code=0, plan=plan, points=points)
        with sweep.hold_folder(), ThreadPoolExecutor(1) as executor:

            def open_tracker() -> Tracker:
                return Tracker.open(sweep.tracking_uri, folder.root, *experiment_of(plan))

            tracker = executor.submit(lambda: patiently(open_tracker, warn))  # connects while Ray starts
            if not plan.release.is_open:
                code = drive(sweep, SealedRelease(sweep, tracker, clock))
                return Outcome(code=code, plan=plan, folder=folder)
            release = OpenRelease(sweep, tracker, figure)
            with release.mlflow.outbox:
                code = drive(sweep, release)
            return Outcome(
                code=code,
                plan=plan,
                points=points,
                folder=folder,
                results=release.trials.results(),
                statement=release.conclusion.statement,
                answer=release.conclusion.answer,
            )


def experiment_of(plan: SweepPlan) -> tuple[str, str]:
    """Return the name and description of the MLflow experiment that a sweep's runs belong to.

    Open sweeps have one experiment for each question and data set; all sealed sweeps share one.
    """
    if not plan.release.is_open:
        return SEALED_EXPERIMENT, ""
    dataset, question = plan.source.dataset, plan.question.removesuffix("-tuning")
    title = QUESTIONS.get(question, OWN).text
    about = (
        f"{title} Sweeps of {question} on {dataset}: one parent run for each sweep, whose description "
        "begins with its answer, and one child run for each training."
    )
    return f"{question} on {short_name(dataset)}", about
