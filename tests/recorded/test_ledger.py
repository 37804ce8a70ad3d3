"""A ledger that version 0.1.0 wrote verifies, tells the same charges, and goes on.

`ledger/ledger.sqlite3` has data set "scans": a finished sweep with noised scores, a sealed sweep, a sweep
of which one training is still open, and a lowered cap. It is never written anew: later versions must read it.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import BudgetExceeded, LedgerError
from dpgcl_core.ledger.account import PlannedTraining
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.marks import mark_path
from dpgcl_core.ledger.report import read_head
from tests.programs import ROOT, run_program

WRITTEN = Path(__file__).with_name("ledger")
OPEN_TRAINING = "temperature-scans-77b2e4/S8-Na1-private-r0"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A copy that may be written."""
    return Path(shutil.copyfile(WRITTEN / "ledger.sqlite3", tmp_path / "ledger.db"))


def planned(num_steps: int, label: str = "later-5ce011/S4-Na1-private-r0") -> list[PlannedTraining]:
    return [PlannedTraining(label=label, step_class=StepClass(0.02, 1.5), num_steps=num_steps)]


def test_written_ledger_verifies_against_its_statement(path: Path) -> None:
    head = read_head(WRITTEN / "statement.json")
    assert Ledger.open(str(path)).verify(against=head).head == head


def test_written_ledger_states_what_it_stated(path: Path) -> None:
    stated = json.loads(Ledger.open(str(path)).statement("scans").to_json())
    assert stated["head"].pop("num_budgets") == 1  # which that version did not write
    assert stated == json.loads((WRITTEN / "statement.json").read_text())


def test_written_ledger_tells_the_same_charges(path: Path) -> None:
    spent = Ledger.open(str(path)).read_charges("scans")
    assert spent.num_steps == {StepClass(0.01, 1.0): 350, StepClass(1.0, 20.0): 2, StepClass(0.02, 1.5): 210}
    assert (spent.num_open, spent.num_settled, spent.num_sealed) == (1, 5, 1)
    assert (spent.cap.epsilon, spent.sealed_epsilon, spent.sealed_delta) == (7.0, 0.5, 1e-6)
    assert spent.rdp == pytest.approx(0.23361369062676024, rel=1e-9)
    assert spent.epsilon_pld == pytest.approx(1.9526207865025373, rel=1e-6)


def test_command_shows_and_verifies_the_written_ledger(path: Path) -> None:
    for command in (["show"], ["verify", "--against", str(WRITTEN / "statement.json")]):
        words = ["-m", "dpgcl_core.ledger", *command, "--ledger", str(path)]
        done = run_program(words, cwd=ROOT, environment=os.environ)
        assert (done.returncode, done.stderr) == (0, "")


def test_charge_goes_on_after_the_written_rows(path: Path) -> None:
    ledger = Ledger.open(str(path))
    before, rows = ledger.head(), len(ledger.entries())
    (reserved,) = ledger.reserve("scans", planned(50), unit="patient")
    assert reserved.number == rows + 1
    assert ledger.verify(against=before).head.num_entries == rows + 1
    assert ledger.read_charges("scans").num_steps[StepClass(0.02, 1.5)] == 260


def test_open_training_of_the_written_ledger_resumes_and_ends(path: Path) -> None:
    ledger = Ledger.open(str(path))
    known = ledger.reservation("scans", OPEN_TRAINING)
    assert known is not None
    assert known.num_steps == 110
    assert ledger.extend(known, 5).num_steps == 115
    ledger.settle(known, 90)
    assert ledger.read_charges("scans").num_steps[StepClass(0.02, 1.5)] == 190


def test_cap_of_the_written_ledger_refuses_more_than_it_holds(path: Path) -> None:
    ledger = Ledger.open(str(path))
    with pytest.raises(BudgetExceeded):
        ledger.reserve("scans", planned(100_000), unit="patient")
    with pytest.raises(LedgerError, match="unit"):
        ledger.reserve("scans", planned(1), unit="record")


def test_mark_of_an_earlier_build_goes_on_with_the_written_ledger(path: Path) -> None:
    """It was left before the newest sweep was charged; old copies are refused from here on."""
    data, old = path.with_name("scans.npz"), Ledger.open(str(path)).entries()[11]
    data.write_bytes(b"records")
    mark = {"dataset_id": "scans", "ledger_id": "540bc4bac6c4e426", "num_entries": 12}
    mark_path(data).write_text(json.dumps(mark | {"head_hash": old.entry_hash}))
    written = path.read_bytes()
    ledger = Ledger.open(str(path))
    (note,) = ledger.bind("scans", data)
    assert "lacks the newest 5 rows" in note
    ledger.reserve("scans", planned(50), unit="patient")
    path.write_bytes(written)
    with pytest.raises(LedgerError, match="lacks row 18"):
        Ledger.open(str(path)).bind("scans", data)
