"""The budget ledger in a sweep: charged before, extended on a resume, settled after. No Ray is started."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from dpgcl_core.accounting.composition import epsilon_pld
from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import BudgetExceeded, ConfigError, DpgclError, LedgerError, StorageError
from dpgcl_core.ledger.account import PlannedTraining
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.options.data import data_path
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import ChargedSteps
from sweeps.service.privacy.budget import SweepBudget, remaining_budget, sweep_budget
from sweeps.service.privacy.ledger_choice import (
    account_of,
    check_account,
    ledger_missing,
    marks_note,
    open_ledger,
    unit_of,
)
from sweeps.service.privacy.sweep_statement import count_draws
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps.support import check_ledger, options, write_npz
from trainers.files.checkpoint import Checkpoint, CheckpointFolder, Grant, read_grant, write_grant

QUICK = ("--tiny", "--noise-multiplier", "1", "--no-non-private", "--repeats", "2")
NUM_STEPS = 10


def open_budget(plan: SweepPlan, ledger: Ledger, kept: SweepFolder) -> SweepBudget:
    """The budget of a sweep whose folder is created where it is new."""
    budget = sweep_budget(plan, ledger, "scans", kept)
    assert budget is not None
    if kept.read_plan() is None:
        kept.create({"sweep_id": budget.reservations.sweep_id, "account": account_of(ledger, "scans")})
    return budget


@pytest.fixture(scope="module")
def planned(make_plan: Callable[..., SweepPlan]) -> SweepPlan:
    """Two trials of ten steps each."""
    return make_plan(*QUICK, "--num-records-public", "1445", "--ledger", "unused", "--dataset-id", "scans")


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
        return open_budget(planned, Ledger.open(url), SweepFolder(tmp_path / "one"))

    return make


def charged(budget: SweepBudget) -> int:
    spent = budget.ledger.read_charges("scans", with_pld=False)
    return sum(spent.num_steps.values())


def folder(budget: SweepBudget, number: int = 0, *, paid: bool = True) -> CheckpointFolder:
    """The checkpoints of a trial as its worker opens them."""
    return budget.folder.checkpoints(budget.trials[number].name, every_steps=4, is_paid=paid)


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step=step, model={}, optimizer={}, series={}, final={})


def test_sweep_reserves_all_its_trials_at_once(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget()
    budget.begin(budget.trials, None)
    assert charged(budget) == 2 * NUM_STEPS
    labels = [f"one-{budget.reservations.sweep_id}/{trial.name}" for trial in budget.trials]
    assert all(budget.ledger.reservation("scans", label) for label in labels)


def test_what_is_left_counts_trainings_by_quota(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget()
    assert budget.remaining_budget() == (None, 10)
    assert charged(budget) == 0  # asking charges nothing
    budget.begin(budget.trials, None)
    assert budget.remaining_budget() == (None, 8)


def test_what_is_left_is_what_the_filter_still_admits(planned: SweepPlan, tmp_path: Path) -> None:
    ledger = Ledger.create(str(tmp_path / "rdp.db"))
    ledger.register("scans", Cap(epsilon=8.0, delta=5e-5), num_records_public=1445)
    epsilon, number = remaining_budget(ledger, "scans", planned.trials)
    assert (epsilon, number > 1) == (8.0, True)
    mechanism = planned.trials[0].config.mechanism
    step_class = StepClass(mechanism.sampling_prob, mechanism.noise_multiplier)
    one_more = [
        PlannedTraining(label=f"t{i}", step_class=step_class, num_steps=NUM_STEPS) for i in range(number + 1)
    ]
    with pytest.raises(BudgetExceeded):
        ledger.would_admit("scans", one_more)
    ledger.reserve("scans", one_more[1:])
    left, none = remaining_budget(ledger, "scans", planned.trials)
    assert none == 0
    assert left is not None
    assert 0 <= left < 8.0


def test_check_charges_nothing(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget()
    budget.check()
    assert charged(budget) == 0


def test_sweep_above_the_cap_is_refused_whole_with_the_fix(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget(quota=2 * NUM_STEPS - 1)
    with pytest.raises(BudgetExceeded, match=r"nothing was started\. Use fewer points, repeats or steps"):
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


def test_restart_stops_an_attempt_that_still_runs(make_budget: Callable[..., SweepBudget]) -> None:
    """On a node that was cut off: what it counts after the restart was charged would be on top."""
    budget = make_budget()
    budget.begin(budget.trials, None)
    cut_off = folder(budget)
    cut_off.begin_attempt(0, NUM_STEPS)
    budget.restarted(budget.trials[0].name)
    with pytest.raises(StorageError, match="outdated by attempt 2"):
        cut_off.save(checkpoint(4))
    assert folder(budget).begin_attempt(0, NUM_STEPS).num_steps_repeated == 4


def test_restart_that_the_cap_refuses_loses_its_grant(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget(quota=2 * NUM_STEPS)
    budget.begin(budget.trials, None)
    folder(budget).begin_attempt(0, NUM_STEPS)
    name = budget.trials[0].name
    budget.restarted(name)
    assert read_grant(budget.folder.checkpoint_folder(name)) == Grant(num_steps=0)


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
    assert budget.outage is not None
    with pytest.raises(LedgerError, match="grants 0 steps"):
        training.save(checkpoint(8))
    assert training.load() == checkpoint(8)


def test_lost_folder_is_charged_in_full_again(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget()
    budget.begin(budget.trials, None)
    (budget.folder.checkpoint_folder(budget.trials[0].name) / "grant.json").unlink()
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
        kept.checkpoints(planned.trials[0].name, every_steps=4).begin_attempt(0, NUM_STEPS)
    assert count_draws(planned, kept, {}) == {
        planned.trials[0].name: ChargedSteps(num_steps=2 * 4, num_first_steps=2)
    }


NOISED = (*QUICK, "--expected-batch-size", "32", "--data-is", "private", "--evaluate-on", "digits")
NOISED += ("--score-on-held-out", "0.3", "--score-noise-multiplier", "5", "--snr-noise-multiplier", "2")
JOINT = 1 / math.sqrt(1 + 1 / 4)


@pytest.fixture(scope="module")
def noised_plan(make_plan: Callable[..., SweepPlan], tmp_path_factory: pytest.TempPathFactory) -> SweepPlan:
    """Two private trials of ten steps each, with noised scores and a noised SNR."""
    dataset = write_npz(tmp_path_factory.mktemp("data") / "own.npz", 200)
    declared = ("--dataset", dataset, "--num-records-public", "200")
    return make_plan(*NOISED, *declared, "--ledger", "unused", "--dataset-id", "scans")


@pytest.fixture
def make_noised(noised_plan: SweepPlan, tmp_path: Path) -> Callable[[], SweepBudget]:
    """Its budget; called again, that of a resumed sweep."""
    url = str(tmp_path / "ledger.db")

    def make() -> SweepBudget:
        if not Path(url).exists():
            delta = noised_plan.trials[0].config.mechanism.target_delta
            Ledger.create(url).register(
                "scans", Cap(epsilon=200.0, delta=delta, order=4.0), num_records_public=200
            )
        return open_budget(noised_plan, Ledger.open(url), SweepFolder(tmp_path / "one"))

    return make


def by_kind(budget: SweepBudget) -> dict[str, int]:
    """The charged steps: plain ones, ones that release their norm, and noised counts."""
    found = {"plain": 0, "joint": 0, "counts": 0}
    for step_class, num in budget.ledger.read_charges("scans", with_pld=False).num_steps.items():
        kind = {1.0: "plain", 5.0: "counts"}.get(step_class.noise_multiplier, "joint")
        assert kind != "joint" or step_class.noise_multiplier == pytest.approx(JOINT)
        assert (step_class.sampling_prob == 1.0) == (kind == "counts")
        found[kind] += num
    return found


@pytest.mark.ci
def test_noised_releases_are_reserved_with_the_steps(make_noised: Callable[[], SweepBudget]) -> None:
    budget = make_noised()
    budget.check()
    budget.begin(budget.trials, None)
    assert by_kind(budget) == {"plain": 2 * 9, "joint": 2, "counts": 2 * 2}
    assert folder(budget).begin_attempt(0, NUM_STEPS).num_restarts == 0


@pytest.mark.ci
def test_charge_is_at_least_what_the_sweep_costs(make_noised: Callable[[], SweepBudget]) -> None:
    budget = make_noised()
    budget.begin(budget.trials, None)
    mechanism = budget.trials[0].config.mechanism
    spent = budget.ledger.read_charges("scans", with_pld=True)
    joint = dp_event.PoissonSampledDpEvent(mechanism.sampling_prob, dp_event.GaussianDpEvent(JOINT))
    training = dp_event.ComposedDpEvent([mechanism.dp_event(18), dp_event.SelfComposedDpEvent(joint, 2)])
    order, delta = spent.cap.order, spent.cap.delta
    assert order is not None
    for event in (training, dp_event.GaussianDpEvent(5 / 2)):
        assert spent.rdp is not None
        accountant = RdpAccountant([order])
        accountant.compose(event)
        assert spent.rdp > accountant.rdp[0]
        assert spent.epsilon_pld is not None
        assert spent.epsilon_pld > epsilon_pld(event, delta)


@pytest.mark.parametrize("saved", [0, 4, 8])
def test_restart_reserves_one_more_first_step_and_the_rest_as_plain(
    saved: int, make_noised: Callable[[], SweepBudget]
) -> None:
    budget = make_noised()
    budget.begin(budget.trials, None)
    training = folder(budget)
    training.begin_attempt(0, NUM_STEPS)
    for step in range(4, saved + 1, 4):
        training.save(checkpoint(step))
    with pytest.raises(LedgerError):
        folder(budget).begin_attempt(saved, NUM_STEPS)
    budget.restarted(budget.trials[0].name)
    repeated = min(4, NUM_STEPS - saved)
    assert by_kind(budget) == {"plain": 18 + repeated - 1, "joint": 3, "counts": 4}
    assert folder(budget).begin_attempt(saved, NUM_STEPS).num_steps_repeated == repeated


def test_settling_leaves_what_was_drawn_in_every_class(make_noised: Callable[[], SweepBudget]) -> None:
    """The one restart drew two first steps, and one step less than it might have."""
    budget = make_noised()
    budget.begin(budget.trials, None)
    folder(budget).begin_attempt(0, NUM_STEPS)
    name = budget.trials[0].name
    budget.restarted(name)
    folder(budget).begin_attempt(0, NUM_STEPS)
    for again in (budget, make_noised()):
        again.settle(name, {"num_steps_charged": NUM_STEPS + 3})
        assert by_kind(again) == {"plain": 9 + 11, "joint": 1 + 2, "counts": 4}


def test_resumes_that_draw_nothing_reserve_one_first_step(make_noised: Callable[[], SweepBudget]) -> None:
    """A sweep that is resumed twice before its training begins again."""
    budget = make_noised()
    budget.begin(budget.trials, None)
    folder(budget).begin_attempt(0, NUM_STEPS)
    for _ in range(2):
        budget = make_noised()
        budget.begin(budget.trials, None)
    assert by_kind(budget)["joint"] == 2 + 1
    assert folder(budget).begin_attempt(0, NUM_STEPS).num_restarts == 1
    budget.settle(budget.trials[0].name, {"num_steps_charged": NUM_STEPS + 4})
    settled = by_kind(budget)
    assert settled["joint"] + settled["plain"] == (NUM_STEPS + 4) + NUM_STEPS
    assert settled["joint"] >= 2 + 1


def test_lost_folder_is_charged_for_its_noised_releases_again(
    make_noised: Callable[[], SweepBudget],
) -> None:
    budget = make_noised()
    budget.begin(budget.trials, None)
    (budget.folder.checkpoint_folder(budget.trials[0].name) / "grant.json").unlink()
    resumed = make_noised()
    resumed.begin(resumed.trials, None)
    expected = {"plain": 3 * 9, "joint": 3, "counts": 3 * 2}
    assert by_kind(resumed) == expected
    resumed.settle(resumed.trials[0].name, {"num_steps_charged": NUM_STEPS, "num_restarts": 0})
    assert by_kind(resumed) == expected


def test_settling_keeps_the_first_steps_of_lost_attempts(make_noised: Callable[[], SweepBudget]) -> None:
    """One first step before the folder was lost, and one of each of the two attempts after."""
    budget = make_noised()
    budget.begin(budget.trials, None)
    name = budget.trials[0].name
    (budget.folder.checkpoint_folder(name) / "grant.json").unlink()
    budget = make_noised()
    budget.begin(budget.trials, None)
    folder(budget).begin_attempt(0, NUM_STEPS)
    budget.restarted(name)
    budget.settle(name, {"num_steps_charged": NUM_STEPS + 1, "num_restarts": 1})
    assert by_kind(budget) == {"plain": 9 + 18, "joint": 1 + 3, "counts": 2 + 4}


def test_lost_attempts_may_all_have_been_first_steps(noised_plan: SweepPlan, tmp_path: Path) -> None:
    kept, name = SweepFolder(tmp_path / "one"), noised_plan.trials[0].name
    write_grant(kept.checkpoint_folder(name), Grant(num_steps=20, num_steps_lost=10))
    assert count_draws(noised_plan, kept, {}) == {
        name: ChargedSteps(num_steps=20, num_first_steps=11, num_scorings=2)
    }


def test_unit_must_be_the_registered_one(
    make_noised: Callable[[], SweepBudget], noised_plan: SweepPlan
) -> None:
    other = replace(make_noised(), unit="person")
    with pytest.raises(LedgerError, match="--unit-column must name the registered unit"):
        other.check()
    with pytest.raises(LedgerError, match="with unit 'record'"):
        other.begin(other.trials, None)
    assert by_kind(other) == {"plain": 0, "joint": 0, "counts": 0}
    person = replace(noised_plan.source, unit_column="person")
    assert (unit_of(person), unit_of(noised_plan.source)) == ("person", "record")
    with pytest.raises(ConfigError, match="means single rows"):
        unit_of(replace(noised_plan.source, unit_column="record"))


def refused(*arguments: str) -> str:
    with pytest.raises(DpgclError) as caught:
        check_ledger(options(*arguments))
    return str(caught.value)


def test_private_data_need_a_ledger_or_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPGCL_LEDGER", raising=False)
    message = refused("--tiny", "--data-is", "private")
    assert all(part in message for part in ("--ledger URL", "--dataset-id NAME", "--no-ledger"))
    check_ledger(options("--tiny", "--data-is", "private", "--no-ledger"))
    check_ledger(options("--tiny"))


def test_environment_names_the_ledger_of_private_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPGCL_LEDGER", "/tmp/ledger.db")
    assert "--dataset-id NAME" in refused("--tiny", "--data-is", "private")
    check_ledger(options("--tiny", "--data-is", "private", "--dataset-id", "scans"))
    check_ledger(options("--tiny"))


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
    chosen = options("--tiny", "--dataset", dataset, "--no-ledger", "--dry-run")
    check_ledger(chosen)  # a dry run goes on, and says what would refuse the sweep
    assert "are charged as data set 'scans'" in str(ledger_missing(chosen.data, chosen.ledger))


def test_grant_that_was_taken_back_keeps_the_lost_steps(tmp_path: Path) -> None:
    write_grant(tmp_path, Grant(num_steps=25, num_steps_lost=15))
    paid = CheckpointFolder(tmp_path, every_steps=4, is_paid=True)
    assert paid.begin_attempt(0, NUM_STEPS).num_restarts == 0
    with pytest.raises(LedgerError):
        paid.begin_attempt(0, NUM_STEPS)


def open_elsewhere(planned: SweepPlan, tmp_path: Path) -> SweepBudget:
    """The budget of a sweep of the same name in another storage folder, on the same ledger."""
    return open_budget(planned, Ledger.open(str(tmp_path / "ledger.db")), SweepFolder(tmp_path / "b" / "one"))


def test_sweep_of_the_same_name_elsewhere_keeps_its_own_charge(
    make_budget: Callable[..., SweepBudget], planned: SweepPlan, tmp_path: Path
) -> None:
    """Both draw all their steps; either settles its own."""
    ours = make_budget()
    ours.begin(ours.trials, None)
    theirs = open_elsewhere(planned, tmp_path)
    theirs.begin(theirs.trials, None)
    assert charged(ours) == 4 * NUM_STEPS
    for budget in (ours, theirs):
        budget.settle(budget.trials[0].name, {"num_steps_charged": NUM_STEPS - 1})
    assert charged(ours) == 4 * NUM_STEPS - 2


def test_sweep_begun_anew_under_the_same_name_leaves_the_old_charge(
    make_budget: Callable[..., SweepBudget],
) -> None:
    old = make_budget()
    old.begin(old.trials, None)
    shutil.rmtree(old.folder.path)
    new = make_budget()
    new.begin(new.trials, None)
    new.settle(new.trials[0].name, {"num_steps_charged": 1})
    assert charged(new) == 2 * NUM_STEPS + NUM_STEPS + 1


def test_nothing_is_charged_under_an_id_that_is_not_on_disk(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget()
    budget.reservations.sweep_id = "another"
    with pytest.raises(LedgerError, match="does not hold this sweep's id"):
        budget.begin(budget.trials, None)
    assert charged(budget) == 0


def test_sweep_does_not_go_on_with_another_account(
    make_budget: Callable[..., SweepBudget], planned: SweepPlan, tmp_path: Path
) -> None:
    budget = make_budget()
    other = Ledger.create(str(tmp_path / "other.db"))
    with pytest.raises(LedgerError, match=r"is charged to a ledger\. Resume it with"):
        sweep_budget(planned, other, "scans", budget.folder)
    with pytest.raises(LedgerError, match="with --dataset-id scans"):
        sweep_budget(planned, budget.ledger, "others", budget.folder)
    (tmp_path / "free").mkdir()
    free = SweepFolder(tmp_path / "free")
    free.create({"account": None})
    with pytest.raises(LedgerError, match="was begun without a ledger"):
        check_account(free, budget.ledger, "scans")


def put_back_after(change: str, make_budget: Callable[..., SweepBudget], tmp_path: Path) -> SweepBudget:
    """A sweep whose ledger is put back from before a charge, with data that are not marked."""
    budget, url = make_budget(), tmp_path / "ledger.db"
    backup = url.read_bytes()
    budget.begin(budget.trials, None)
    name = budget.trials[0].name
    if change != "reserve":
        backup = url.read_bytes()
        folder(budget).begin_attempt(0, NUM_STEPS)
        if change == "extend":
            budget.restarted(name)
        else:
            budget.settle(name, {"num_steps_charged": NUM_STEPS - 1})
    url.write_bytes(backup)
    return budget


@pytest.mark.parametrize("change", ["reserve", "extend", "settle"])
def test_sweep_does_not_go_on_with_an_old_copy_of_its_ledger(
    change: str, make_budget: Callable[..., SweepBudget], tmp_path: Path
) -> None:
    put_back_after(change, make_budget, tmp_path)
    with pytest.raises(LedgerError, match=r"lacks rows? .*: the plan of the sweep 'one' names row"):
        make_budget()


def test_plan_without_a_head_goes_on_and_gets_one(make_budget: Callable[..., SweepBudget]) -> None:
    """Version 0.1.0 kept none."""
    budget = make_budget()
    budget.begin(budget.trials, None)
    plan = budget.folder.read_plan()
    assert plan is not None
    head = plan.pop("head")
    budget.folder.create(plan)
    resumed = make_budget()
    resumed.begin(resumed.trials, None)
    assert (resumed.folder.read_plan() or {})["head"] == head


def test_old_copy_is_refused_before_the_data_are_read(
    make_budget: Callable[..., SweepBudget], planned: SweepPlan, tmp_path: Path
) -> None:
    path = data_path(write_npz(tmp_path / "own.npz", 60))
    budget = make_budget()
    backup = (tmp_path / "ledger.db").read_bytes()
    budget.begin(budget.trials, path)
    given = options(
        "--ledger", str(tmp_path / "ledger.db"), "--dataset-id", "scans", "--dataset", f"npz:{path}"
    )
    assert open_ledger(given.data, given.ledger) is not None
    (tmp_path / "ledger.db").write_bytes(backup)
    with pytest.raises(LedgerError, match=r"lacks rows 3 to 4"):
        open_ledger(given.data, given.ledger)


def test_plan_says_where_no_mark_can_lie(
    make_budget: Callable[..., SweepBudget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, ledger = options("--dataset", write_npz(tmp_path / "own.npz", 60)), make_budget().ledger
    assert marks_note(given.data, ledger) == []
    monkeypatch.setattr(os, "access", lambda *_: False)
    (note,) = marks_note(given.data, ledger)
    assert "charged to another ledger, or to none, would not be recognised" in note
    assert marks_note(given.data, None) == []


def test_new_reservation_keeps_the_lost_steps(make_budget: Callable[..., SweepBudget]) -> None:
    budget = make_budget()
    write_grant(
        budget.folder.checkpoint_folder(budget.trials[0].name), Grant(num_steps=20, num_steps_lost=10)
    )
    budget.begin(budget.trials, None)
    assert charged(budget) == 3 * NUM_STEPS


def test_started_training_without_a_trace_is_charged_in_full_again(
    make_budget: Callable[..., SweepBudget],
) -> None:
    budget = make_budget()
    budget.begin(budget.trials, None)
    budget.folder.mark_start(budget.trials[0].name)
    shutil.rmtree(budget.folder.path / "drawn")
    for _ in range(2):  # resumed twice, it was started once
        budget = make_budget()
        budget.begin(budget.trials, None)
        assert charged(budget) == 3 * NUM_STEPS
    assert folder(budget).begin_attempt(0, NUM_STEPS).num_restarts == 0


def test_lost_counts_are_stated_without_a_ledger(planned: SweepPlan, tmp_path: Path) -> None:
    kept, name = SweepFolder(tmp_path / "one"), planned.trials[0].name
    result = {name: {"metrics": {"num_steps_charged": NUM_STEPS}}}
    kept.mark_start(name)
    kept.checkpoints(name, every_steps=4).begin_attempt(0, NUM_STEPS)
    assert count_draws(planned, kept, {})[name].num_steps == 4
    shutil.rmtree(tmp_path / "one" / "drawn")
    assert count_draws(planned, kept, {})[name].num_steps == NUM_STEPS
    kept.mark_start(name)
    kept.checkpoints(name, every_steps=4).begin_attempt(0, NUM_STEPS)
    assert count_draws(planned, kept, {})[name].num_steps == NUM_STEPS + 4
    kept.keep(name, result[name])
    shutil.rmtree(tmp_path / "one" / "drawn")
    assert count_draws(planned, kept, result)[name].num_steps == 2 * NUM_STEPS


def test_scores_that_a_restart_may_draw_again_are_reserved(
    make_noised: Callable[[], SweepBudget], noised_plan: SweepPlan
) -> None:
    budget = make_noised()
    budget.begin(budget.trials, None)
    training, name = folder(budget), budget.trials[0].name
    training.begin_attempt(0, NUM_STEPS)
    training.save(checkpoint(8))
    training.begin_scoring()
    with pytest.raises(LedgerError):
        training.begin_scoring()
    budget.restarted(name)
    assert by_kind(budget)["counts"] == 2 * 2 + 2
    training.begin_attempt(8, NUM_STEPS)
    assert training.begin_scoring() == 2
    drawn = count_draws(noised_plan, budget.folder, {})
    assert drawn[name].num_scorings == 2


def test_scores_that_are_saved_are_not_reserved_again(make_noised: Callable[[], SweepBudget]) -> None:
    budget = make_noised()
    budget.begin(budget.trials, None)
    training = folder(budget)
    training.begin_attempt(0, NUM_STEPS)
    training.begin_scoring()
    training.save(replace(checkpoint(NUM_STEPS), final={"noised_knn_accuracy": 0.5}))
    budget.restarted(budget.trials[0].name)
    assert by_kind(budget)["counts"] == 2 * 2


def test_lost_scorings_stay_charged_beside_the_next_ones(make_noised: Callable[[], SweepBudget]) -> None:
    """One start was lost; of the attempt after it the scores are drawn twice."""
    budget = make_noised()
    budget.begin(budget.trials, None)
    name = budget.trials[0].name
    budget.folder.mark_start(name)
    shutil.rmtree(budget.folder.path / "drawn")
    budget = make_noised()
    budget.begin(budget.trials, None)
    budget.folder.mark_start(name)
    training = folder(budget)
    training.begin_attempt(0, NUM_STEPS)
    training.begin_scoring()
    budget.restarted(name)
    training.begin_attempt(0, NUM_STEPS)
    assert training.begin_scoring() == 2
    assert by_kind(budget)["counts"] == 2 + 3 * 2
