"""What a sweep prints, and the names that its trials have in MLflow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sweeps.service.console.terminal import run_name
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Point, Trial
from tests.sweeps.support import options, plan_of
from trainers.tracking.runs import trial_run_name

QUICK = ("--tiny", "--noise-multiplier", "1")


@pytest.fixture(scope="module")
def trials() -> tuple[Trial, ...]:
    """Two repeats of two temperatures: of one group size, ε and number of augmented keys."""
    points = [Point(label=f"tau{value:g}-private", changes={"temperature": value}) for value in (0.1, 0.5)]
    chosen = options(*QUICK, "--repeats", "2")
    return plan_of("temperature", chosen, points, calibration_folder=None).trials


def test_run_name_differs_among_the_trials_of_a_sweep(trials: tuple[Trial, ...]) -> None:
    assert len({run_name(trial) for trial in trials}) == len(trials) == 4


def test_run_name_begins_with_the_name_that_the_terminal_prints(trials: tuple[Trial, ...]) -> None:
    assert [run_name(trial).partition(":")[0] for trial in trials] == [trial.name for trial in trials]


def test_run_name_is_the_one_that_the_tracker_gives(trials: tuple[Trial, ...]) -> None:
    assert [run_name(trial) for trial in trials] == [
        trial_run_name(trial.name, trial.params) for trial in trials
    ]


def test_run_name_of_a_seeded_trial_says_that_it_has_no_guarantee(
    make_plan: Callable[..., SweepPlan],
) -> None:
    seeded = make_plan(*QUICK, "--seeded-non-private")
    assert all(run_name(trial).endswith(", seeded: no guarantee") for trial in seeded.trials)
