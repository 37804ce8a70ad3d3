"""Closing the reservations of a sweep that nobody resumes: no charge is lost, nothing draws afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.attempts import DrawCounts
from dpgcl_core.errors import ConfigError, LedgerError, StorageError
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.privacy.budget import SweepBudget, sweep_budget
from sweeps.service.privacy.ledger_choice import account_of
from sweeps.service.privacy.settling import close_reservations
from sweeps.service.storage.sweep_folder import LAYOUT, SweepFolder, find_folder
from sweeps.service.storage.sweep_lock import hold_sweep
from sweeps.settle import __main__ as command
from trainers.files.checkpoint import attempts_of, read_grant

QUICK = ("--tiny", "--noise-multiplier", "1", "--no-non-private", "--repeats", "3")
NUM_STEPS = 10


@pytest.fixture(scope="module")
def planned(make_plan: Callable[..., SweepPlan]) -> SweepPlan:
    """Three trials of ten steps each."""
    return make_plan(*QUICK, "--num-records-public", "1445", "--ledger", "unused", "--dataset-id", "scans")


@pytest.fixture
def budget(planned: SweepPlan, tmp_path: Path) -> SweepBudget:
    """Of a sweep that has begun, and whose first trial has drawn three steps."""
    mechanism = planned.trials[0].config.mechanism
    cap = Cap(
        epsilon=500.0,
        delta=mechanism.target_delta,
        quotas=((StepClass(mechanism.sampling_prob, 1.0), 100),),
    )
    ledger = Ledger.create(str(tmp_path / "ledger.db"))
    ledger.register("scans", cap, num_records_public=mechanism.num_records_public)
    folder = SweepFolder(tmp_path / "sweeps" / "one")
    made = sweep_budget(planned, ledger, "scans", folder)
    assert made is not None
    folder.create({"sweep_id": made.reservations.sweep_id, "account": account_of(ledger, "scans")})
    made.begin(made.trials, None)
    first = made.trials[0].name
    folder.mark_start(first)
    attempts = attempts_of(folder.count_file(first))
    attempts.count(attempts.claim(), DrawCounts(num_attempts=1, num_steps=3))
    return made


def charges(budget: SweepBudget) -> dict[str, tuple[int, int | None]]:
    """What is reserved and settled for each trial."""
    return {
        reservation.label.rpartition("/")[2]: (reservation.num_steps, reservation.num_steps_executed)
        for reservation in budget.ledger.reservations("scans")
    }


def age(folder: SweepFolder) -> None:
    """Make the folder one of an older layout."""
    plan = json.loads((folder.path / "plan.json").read_text())
    (folder.path / "plan.json").write_text(json.dumps({**plan, "layout": LAYOUT - 1}))


def test_training_that_began_stays_charged_and_one_that_did_not_is_given_back(budget: SweepBudget) -> None:
    first, second, third = (trial.name for trial in budget.trials)
    age(budget.folder)
    close_reservations(budget.folder, budget.ledger, give_back_unstarted=True)
    assert charges(budget) == {first: (10, 10), second: (10, 0), third: (10, 0)}


def test_nothing_is_given_back_unless_it_is_asked_for(budget: SweepBudget) -> None:
    """A copy of the folder from before a training began looks as if none had."""
    close_reservations(budget.folder, budget.ledger)
    assert set(charges(budget).values()) == {(10, 10)}


def test_training_that_finished_is_charged_what_it_took(budget: SweepBudget) -> None:
    first = budget.trials[0].name
    budget.folder.keep(first, {"metrics": {"num_steps_charged": 4.0}})
    close_reservations(budget.folder, budget.ledger)
    assert charges(budget)[first] == (10, 4)


def out_of_reach(*_: object) -> None:
    raise LedgerError("away")


def test_training_whose_grant_is_gone_stays_charged(
    budget: SweepBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was lost may have held any number of steps, and still shows that in a second try."""
    second = budget.trials[1].name
    (grant,) = budget.folder.checkpoint_folder(second).iterdir()
    grant.unlink()
    with monkeypatch.context() as away:
        away.setattr(Ledger, "settle", out_of_reach)
        with pytest.raises(LedgerError):
            close_reservations(budget.folder, budget.ledger, give_back_unstarted=True)
    close_reservations(budget.folder, budget.ledger, give_back_unstarted=True)
    assert charges(budget)[second] == (10, 10)


@pytest.mark.parametrize("name", ["checkpoint.pt", "progress.json"])
def test_training_with_a_file_beside_its_grant_stays_charged(name: str, budget: SweepBudget) -> None:
    second = budget.trials[1].name
    (budget.folder.checkpoint_folder(second) / name).write_text("{}")
    close_reservations(budget.folder, budget.ledger, give_back_unstarted=True)
    assert charges(budget)[second] == (10, 10)


def test_training_with_a_count_of_an_attempt_stays_charged(budget: SweepBudget) -> None:
    """Its starts, and the file of its count, are lost."""
    second = budget.trials[1].name
    attempts = attempts_of(budget.folder.count_file(second))
    attempts.count(attempts.claim(), DrawCounts(num_attempts=1, num_steps=3))
    close_reservations(budget.folder, budget.ledger, give_back_unstarted=True)
    assert charges(budget)[second] == (10, 10)


def test_training_that_finished_and_lost_its_grant_is_charged_in_full(budget: SweepBudget) -> None:
    first = budget.trials[0].name
    budget.folder.keep(first, {"metrics": {"num_steps_charged": 4.0}})
    (budget.folder.checkpoint_folder(first) / "grant.json").unlink()
    close_reservations(budget.folder, budget.ledger)
    assert charges(budget)[first] == (10, 10)


def test_worker_of_a_trial_that_was_given_back_draws_nothing(budget: SweepBudget) -> None:
    second = budget.trials[1].name
    close_reservations(budget.folder, budget.ledger, give_back_unstarted=True)
    checkpoints = budget.folder.checkpoints(second, every_steps=5, is_paid=True)
    with pytest.raises(ValueError, match="grants 0 steps"):
        checkpoints.begin_attempt(0, NUM_STEPS)


@pytest.mark.parametrize("drew", [False, True])
def test_resume_of_a_sweep_that_was_settled_is_refused(
    drew: bool, budget: SweepBudget, planned: SweepPlan
) -> None:
    close_reservations(budget.folder, budget.ledger, give_back_unstarted=True)
    resumed = sweep_budget(planned, budget.ledger, "scans", budget.folder)
    assert resumed is not None
    remaining = resumed.trials[0] if drew else resumed.trials[1]
    with pytest.raises(LedgerError, match="is settled"):
        resumed.begin([remaining], None)


def test_training_that_overdrew_is_refused_by_the_ledger(budget: SweepBudget) -> None:
    first = budget.trials[0].name
    budget.folder.keep(first, {"metrics": {"num_steps_charged": 14.0}})
    with pytest.raises(LedgerError, match="14"):
        close_reservations(budget.folder, budget.ledger)


def test_sealed_sweep_is_refused(budget: SweepBudget) -> None:
    plan = json.loads((budget.folder.path / "plan.json").read_text())
    (budget.folder.path / "plan.json").write_text(json.dumps({**plan, "publication": {}}))
    with pytest.raises(LedgerError, match="nothing to settle"):
        close_reservations(budget.folder, budget.ledger)


def test_attempt_that_goes_on_draws_nothing_after_the_settlement(budget: SweepBudget) -> None:
    first = budget.trials[0].name
    close_reservations(budget.folder, budget.ledger)
    with pytest.raises(StorageError, match="outdated"):
        attempts_of(budget.folder.count_file(first)).count(1, DrawCounts(num_attempts=1, num_steps=4))
    for trial in budget.trials:
        grant = read_grant(budget.folder.checkpoint_folder(trial.name))
        assert grant is not None
        assert grant.num_steps == 0


def test_second_settlement_changes_nothing(budget: SweepBudget) -> None:
    close_reservations(budget.folder, budget.ledger)
    before = charges(budget)
    assert close_reservations(budget.folder, budget.ledger) == []
    assert charges(budget) == before


def test_running_sweep_is_not_settled(budget: SweepBudget) -> None:
    before = charges(budget)
    with hold_sweep(budget.folder), pytest.raises(StorageError, match="running"):
        close_reservations(budget.folder, budget.ledger)
    assert charges(budget) == before


def test_other_ledger_is_refused(budget: SweepBudget, tmp_path: Path) -> None:
    other = Ledger.create(str(tmp_path / "other.db"))
    with pytest.raises(LedgerError, match="--ledger"):
        close_reservations(budget.folder, other)


def test_sweep_without_reservations_is_refused(budget: SweepBudget, tmp_path: Path) -> None:
    free = SweepFolder(tmp_path / "sweeps" / "free")
    free.create({"fingerprint": "x"})
    with pytest.raises(LedgerError, match="nothing to settle"):
        close_reservations(free, budget.ledger)


def test_older_layout_is_refused_with_the_command_that_settles_it(
    budget: SweepBudget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    age(budget.folder)
    with pytest.raises(StorageError, match=r"sweeps\.settle --name one --storage /"):
        find_folder(tmp_path, name="one", fingerprint="x", resume=True, prefix="one")
    url = str(tmp_path / "ledger.db")
    command.settle_command("one", storage=tmp_path, ledger=url, give_back_unstarted=True)
    assert "0 of 10 steps stay charged\n" in capsys.readouterr().out
    assert sum(budget.ledger.read_charges("scans", with_pld=False).num_steps.values()) == NUM_STEPS


def test_ledger_must_be_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DPGCL_LEDGER", raising=False)
    with pytest.raises(ConfigError, match="--ledger"):
        command.settle_command("one", storage=tmp_path)
