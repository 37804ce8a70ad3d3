"""Kills, time that is over and early stopping together, at random places: the ledger has every draw.

No Ray: the training's own loop draws, the driver's own code charges and settles. The draws are counted where
they are made, by what knows nothing of either. The places follow fixed seeds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.budget import SweepBudget, sweep_budget
from sweeps.service.privacy.ledger_choice import account_of
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.trainers.conftest import drawn_groups
from trainers.files.oversight import Oversight, TrainingStopped
from trainers.training.callbacks import Supervision
from trainers.training.loop import train
from trainers.training.step import Training

NUM_STEPS, EVERY, NUM_TRIALS, NUM_RUNS = 6, 2, 3, 7
PLANNED = (
    *("--tiny", "--noise-multiplier", "1", "--no-non-private", "--no-references"),
    *("--num-records-public", "1445", "--ledger", "unused", "--dataset-id", "scans"),
    *("--num-steps", str(NUM_STEPS), "--repeats", str(NUM_TRIALS), "--checkpoint-every-steps", str(EVERY)),
)


class Killed(BaseException):
    """The process is gone."""


class World:
    """One sweep, its ledger, and a count of draws that nothing else sees."""

    def __init__(self, plan: SweepPlan, top: Path, seed: int) -> None:
        self.plan, self.url, self.folder = plan, str(top / "ledger.db"), SweepFolder(top / "one")
        self.draw, self.drawn = random.Random(seed), Counter[str]()
        delta = plan.trials[0].config.mechanism.target_delta
        ledger = Ledger.create(self.url)
        ledger.register("scans", Cap(epsilon=500.0, delta=delta), num_records_public=1445)

    def budget(self) -> SweepBudget:
        """That of one more driver, which has charged what it is about to start."""
        found = sweep_budget(self.plan, Ledger.open(self.url), "scans", self.folder)
        assert found is not None
        if self.folder.read_plan() is None:
            self.folder.create(
                {"sweep_id": found.reservations.sweep_id, "account": account_of(found.ledger, "scans")}
            )
        found.check()
        found.begin(self.left(), None)
        return found

    def left(self) -> list[Trial]:
        return [trial for trial in self.plan.trials if self.folder.result(trial.name) is None]

    def charged(self) -> int:
        return sum(Ledger.open(self.url).read_charges("scans", with_pld=False).num_steps.values())

    def bound(self) -> int:
        """What may be charged at most: each attempt that began a step repeats less than one checkpoint."""
        attempts = [self.folder.read_counts(trial.name) for trial in self.plan.trials]
        return sum(NUM_STEPS + EVERY * each.num_attempts for each in attempts if each is not None)

    def run(self, *, undisturbed: bool = False) -> None:
        """One driver: trial after trial, until one of them is killed or the time is over."""
        budget = self.budget()
        for trial in self.left():
            self.folder.mark_start(trial.name)
            fate = None if undisturbed else self.draw.choice([None, "killed", "over", "over", "scores"])
            try:
                metrics = self.train(trial, fate)
            except Killed:
                return
            except TrainingStopped:
                return
            finally:
                assert sum(self.drawn.values()) <= self.charged()
            self.folder.keep(trial.name, {"metrics": metrics})
            if undisturbed or self.draw.random() < 0.8:  # else the driver dies before it settles
                budget.settle(trial.name, metrics)

    def train(self, trial: Trial, fate: str | None) -> dict[str, float]:
        """One attempt in the real loop, whose steps draw and do nothing else."""
        at = self.draw.randint(0, NUM_STEPS)
        checkpoints = self.folder.checkpoints(trial.name, every_steps=EVERY, is_paid=True)
        oversight = Oversight(count_file=checkpoints.count_file)
        oversight.begin()

        def step(run: Any) -> None:
            drawn_groups(run)
            self.drawn[trial.name] += 1
            assert sum(self.drawn.values()) <= self.charged()
            run.num_steps_done += 1
            disturb(run.num_steps_done)

        def disturb(moment: int) -> None:
            if fate == "killed" and moment >= at:
                raise Killed
            if fate == "over" and moment >= at:
                oversight.stop()

        def should_continue(supervision: Supervision, scores: object) -> bool:
            return scores is None or fate != "scores" or supervision.training.num_steps_done < at

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Training, "take_step", step)
            patch.setattr(Supervision, "should_continue", should_continue)
            disturb(0)
            return train(trial.config, self.plan.data, checkpoints=checkpoints, oversight=oversight).metrics


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(8))
def test_ledger_has_every_draw_of_a_sweep_that_is_killed_stopped_and_halved(
    seed: int, make_plan: Callable[..., SweepPlan], tmp_path: Path
) -> None:
    world = World(make_plan(*PLANNED), tmp_path, seed)
    for _ in range(NUM_RUNS):
        world.run()
    world.run(undisturbed=True)
    assert not world.left()
    for trial in world.plan.trials:
        result = world.folder.result(trial.name)
        assert result is not None
        assert result["metrics"]["num_steps_charged"] >= world.drawn[trial.name] > 0
    assert sum(world.drawn.values()) <= world.charged() <= world.bound()
