"""The budget ledger in a sweep: charged before, extended on a resume, settled after. No Ray is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dpgcl_core.errors import BudgetExceeded, ConfigError, DpgclError, LedgerError
from dpgcl_core.filters import StepClass
from dpgcl_core.ledger import Ledger
from dpgcl_core.ledger_cap import Cap
from sweeps.service.budget import SweepBudget, check_ledger_options, data_path, sweep_budget
from sweeps.service.plan import SweepPlan
from sweeps.service.report import steps_charged
from sweeps.service.storage import SweepFolder
from tests.sweeps.support import options, write_npz
from trainers.checkpoint import Checkpoint, CheckpointFolder, Grant, read_grant, write_grant

QUICK = ("--tiny", "--noise-multiplier", "1", "--no-non-private", "--repeats", "2")
NUM_STEPS = 10


@pytest.fixture(scope="module")
def planned(make_plan: Callable[..., SweepPlan]) -> SweepPlan:
    """Two trials of ten steps each."""
    return make_plan(*QUICK, "--ledger", "unused", "--dataset-id", "scans")


@pytest.fixture
def make_budget(planned: SweepPlan, tmp_path: Path) -> Callable[..., SweepBudget]:
    """A budget whose cap holds `quota` steps; called again, that of a resumed sweep."""
    url = str(tmp_path / "ledger.db")

    def make(*, quota: int = 100) -> SweepBudget:
        mechanism = planned.trials[0].config.mechanism
        if not Path(url).exists():
            quotas = ((StepClass(mechanism.sampling_prob, 1.0), quota),)
            cap = Cap(epsilon=500.0, delta=mechanism.target_delta, quotas=quotas)
            Ledger.create(url).register("scans", cap, num_records_public=mechanism.num_records_public)
        budget = sweep_budget(planned, Ledger.open(url), SweepFolder(tmp_path / "one"))
        assert budget is not None
        return budget

    return make


def charged(budget: SweepBudget) -> int:
    spent = budget.ledger.spent("scans", with_pld=False)
    return sum(spent.num_steps.values())


def folder(budget: SweepBudget, number: int = 0, *, paid: bool = True) -> CheckpointFolder:
    """The checkpoints of a trial as its worker opens them."""
    path = budget.checkpoint_folder(budget.trials[number].name)
    return CheckpointFolder(path, every_steps=4, charged=paid)


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step=step, model={}, optimizer={}, series={}, final={})


def test_sweep_reserves_all_its_trials_at_once(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget()
    budget.begin(budget.trials, None)
    assert charged(budget) == 2 * NUM_STEPS
    labels = [f"one/{trial.name}" for trial in budget.trials]
    assert all(budget.ledger.reservation("scans", label) for label in labels)


def test_check_charges_nothing(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget()
    budget.check()
    assert charged(budget) == 0


def test_sweep_above_the_cap_is_refused_whole_with_the_fix(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget(quota=2 * NUM_STEPS - 1)
    with pytest.raises(BudgetExceeded, match="nothing was started: take fewer points or repeats"):
        budget.check()
    with pytest.raises(BudgetExceeded):
        budget.begin(budget.trials, None)
    assert charged(budget) == 0


def test_worker_draws_no_step_before_the_reservation(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget(quota=1)
    with pytest.raises(BudgetExceeded):
        budget.begin(budget.trials, None)
    with pytest.raises(LedgerError, match="grants 0 steps"):
        folder(budget).begin_attempt(0, NUM_STEPS)


def test_worker_begins_with_the_grant(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget()
    budget.begin(budget.trials, None)
    assert folder(budget).begin_attempt(0, NUM_STEPS).num_restarts == 0


def test_crash_between_reserving_and_training_leaves_the_full_charge(
    make_budget: Callable[..., SweepBudget],
) -> None:
    make_budget().begin(make_budget().trials, None)
    resumed = make_budget()
    assert charged(resumed) == 2 * NUM_STEPS
    resumed.begin(resumed.trials, None)
    assert charged(resumed) == 2 * NUM_STEPS


def test_resume_extends_by_the_steps_that_may_repeat(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget()
    budget.begin(budget.trials, None)
    crashed = folder(budget)
    crashed.begin_attempt(0, NUM_STEPS)
    crashed.save(checkpoint(4))
    resumed = make_budget()
    resumed.begin(resumed.trials, None)
    assert charged(resumed) == 2 * NUM_STEPS + 4
    attempt = folder(resumed).begin_attempt(4, NUM_STEPS)
    assert attempt.num_steps_repeated == 4


def test_resume_that_the_cap_refuses_draws_no_step(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget(quota=2 * NUM_STEPS + 3)
    budget.begin(budget.trials, None)
    crashed = folder(budget)
    crashed.begin_attempt(0, NUM_STEPS)
    crashed.save(checkpoint(4))
    with pytest.raises(BudgetExceeded):
        make_budget().begin(budget.trials, None)
    with pytest.raises(LedgerError, match="grants 10 steps"):
        folder(budget).begin_attempt(4, NUM_STEPS)


def test_restart_of_a_dead_process_is_charged_before_it_begins(
    make_budget: Callable[..., SweepBudget],
) -> None:
    budget = make_budget()
    budget.begin(budget.trials, None)
    folder(budget).begin_attempt(0, NUM_STEPS)
    with pytest.raises(LedgerError):
        folder(budget).begin_attempt(0, NUM_STEPS)
    budget.restarted(budget.trials[0].name)
    assert charged(budget) == 2 * NUM_STEPS + 4
    assert folder(budget).begin_attempt(0, NUM_STEPS).num_steps_repeated == 4


def test_restart_that_the_cap_refuses_loses_its_grant(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget(quota=2 * NUM_STEPS)
    budget.begin(budget.trials, None)
    folder(budget).begin_attempt(0, NUM_STEPS)
    name = budget.trials[0].name
    budget.restarted(name)
    assert read_grant(budget.checkpoint_folder(name)) == Grant(num_steps=0)
    assert "does not hold" in budget.refused[name]


def test_training_whose_ledger_is_gone_stops_at_the_next_checkpoint(
    make_budget: Callable[..., SweepBudget], tmp_path: Path
) -> None:
    budget = make_budget()
    budget.begin(budget.trials, None)
    training = folder(budget)
    training.begin_attempt(0, NUM_STEPS)
    training.save(checkpoint(4))
    (tmp_path / "ledger.db").rename(tmp_path / "gone.db")
    budget.confirm(every_seconds=0)
    assert budget.lost is not None
    with pytest.raises(LedgerError, match="grants 0 steps"):
        training.save(checkpoint(8))
    assert training.load() == checkpoint(8)


def test_lost_folder_is_charged_in_full_again(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget()
    budget.begin(budget.trials, None)
    (budget.checkpoint_folder(budget.trials[0].name) / "grant.json").unlink()
    resumed = make_budget()
    resumed.begin(resumed.trials, None)
    assert charged(resumed) == 3 * NUM_STEPS
    resumed.settle(resumed.trials[0].name, {"num_steps_charged": NUM_STEPS})
    assert charged(resumed) == 3 * NUM_STEPS


def test_settling_returns_what_was_not_drawn(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget()
    budget.begin(budget.trials, None)
    folder(budget).begin_attempt(0, NUM_STEPS)
    budget.restarted(budget.trials[0].name)
    budget.settle(budget.trials[0].name, {"num_steps_charged": NUM_STEPS + 1})
    assert charged(budget) == 2 * NUM_STEPS + 1


def test_settling_twice_changes_nothing(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget()
    budget.begin(budget.trials, None)
    for again in (budget, make_budget()):
        again.settle(again.trials[0].name, {"num_steps_charged": NUM_STEPS})
    assert charged(budget) == 2 * NUM_STEPS


def test_ledger_takes_no_training_without_guarantee(
    make_plan: Callable[..., SweepPlan], make_budget: Callable[..., SweepBudget]
) -> None:
    loose = replace(make_budget(), trials=make_plan("--tiny", "--noise-multiplier", "1").trials)
    with pytest.raises(ConfigError, match="--no-non-private"):
        loose.check()


def test_statement_charges_what_a_failed_training_may_have_drawn(planned: SweepPlan, tmp_path: Path) -> None:
    kept = SweepFolder(tmp_path / "one")
    for _ in range(2):
        CheckpointFolder(kept.checkpoint_folder(planned.trials[0].name), every_steps=4).begin_attempt(
            0, NUM_STEPS
        )
    assert steps_charged(planned, kept, {}) == {planned.trials[0].name: NUM_STEPS + 4}


def refused(*arguments: str) -> str:
    with pytest.raises(DpgclError) as caught:
        check_ledger_options(options(*arguments))
    return str(caught.value)


def test_private_data_need_a_ledger_or_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPGCL_LEDGER", raising=False)
    message = refused("--tiny", "--data-is", "private")
    assert all(part in message for part in ("--ledger URL", "--dataset-id NAME", "--no-ledger"))
    check_ledger_options(options("--tiny", "--data-is", "private", "--no-ledger"))
    check_ledger_options(options("--tiny"))


def test_environment_names_the_ledger_of_private_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPGCL_LEDGER", "/tmp/ledger.db")
    assert "--dataset-id NAME" in refused("--tiny", "--data-is", "private")
    check_ledger_options(options("--tiny", "--data-is", "private", "--dataset-id", "scans"))
    check_ledger_options(options("--tiny"))


def test_ledger_needs_an_id() -> None:
    assert "--dataset-id NAME" in refused("--tiny", "--ledger", "/tmp/ledger.db")


def test_data_with_the_mark_of_a_ledger_are_not_trained_on_without_it(
    make_budget: Callable[..., SweepBudget], tmp_path: Path
) -> None:
    dataset = write_npz(tmp_path / "own.npz", 60)
    budget = make_budget()
    budget.begin(budget.trials, data_path(dataset))
    message = refused("--tiny", "--dataset", dataset, "--no-ledger")
    assert "are charged as data set 'scans'" in message


def test_grant_that_was_taken_back_keeps_the_lost_steps(tmp_path: Path) -> None:
    write_grant(tmp_path, Grant(num_steps=25, num_steps_lost=15))
    paid = CheckpointFolder(tmp_path, every_steps=4, charged=True)
    assert paid.begin_attempt(0, NUM_STEPS).num_restarts == 0
    with pytest.raises(LedgerError):
        paid.begin_attempt(0, NUM_STEPS)
