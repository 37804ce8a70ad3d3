"""The ledger's figure: what each budget had left after each row, from the public part of the rows."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from dashboards.__main__ import main
from dashboards.compose.burn_down import burn_down_of
from dashboards.dashboard_error import DashboardError
from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.ledger.account import PlannedTraining
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.mechanism.numbers import ADD_OR_REMOVE_ONE

STEPS = StepClass(0.01, 1.0)
RECORDED = Path(__file__).parents[1] / "recorded" / "ledger" / "ledger.sqlite3"


@pytest.fixture
def ledger(tmp_path):
    """A ledger with an RDP filter and a share for sealed sweeps, one with quotas, and charges to both."""
    opened = Ledger.create(str(tmp_path / "ledger.db"))
    shared = {"unit": "record", "neighboring_relation": ADD_OR_REMOVE_ONE, "num_records_public": 1000}
    opened.register("scans", Cap(epsilon=8.0, delta=1e-5, sealed_epsilon=1.0, sealed_delta=1e-6), **shared)
    opened.register("quo/ta|s <b>", Cap(epsilon=8.0, delta=1e-5, quotas=((STEPS, 200),)), **shared)
    for dataset_id in ("scans", "quo/ta|s <b>"):
        planned = PlannedTraining(label="a", step_class=STEPS, num_steps=100)
        (reserved,) = opened.reserve(
            dataset_id, [planned], unit="record", neighboring_relation=ADD_OR_REMOVE_ONE
        )
        opened.settle(reserved, 40)
    return opened


def test_what_is_left_is_what_the_ledger_says_is_left(ledger):
    _, numbers = burn_down_of(ledger.entries(), "scans")
    rdp = numbers[numbers["budget"] == "trainings"]
    spent = ledger.read_charges("scans", with_pld=False)
    assert rdp["left"].iloc[-1] == spent.rdp_budget - spent.rdp
    assert rdp["event"].tolist() == ["registered", "reserved", "settled"]
    assert rdp["left"].iloc[0] > rdp["left"].iloc[2] > rdp["left"].iloc[1]


def test_quotas_burn_down_in_steps(ledger):
    _, numbers = burn_down_of(ledger.entries(), "quo/ta|s <b>")
    assert numbers["left"].tolist() == [200, 100, 160]
    assert set(numbers["unit"]) == {"Steps left"}


def test_rows_of_other_data_sets_do_not_show(ledger):
    for dataset_id in ledger.dataset_ids():
        _, numbers = burn_down_of(ledger.entries(), dataset_id)
        assert numbers["row"].nunique() == 3


def test_unknown_data_set_is_refused_with_those_there_are(ledger):
    with pytest.raises(DashboardError, match="scans"):
        burn_down_of(ledger.entries(), "scan")


@pytest.mark.ci
def test_command_writes_files_of_every_data_set_whatever_their_names(ledger, tmp_path, capsys):
    folder = tmp_path / "figures"
    assert main(["burn-down", "--ledger", str(tmp_path / "ledger.db"), "--output", str(folder)]) == 0
    assert {path.name for path in folder.glob("*.png")} == {
        "burn_down_scans.png",
        "burn_down_quo_ta_s_b_.png",
    }
    assert "<b>" not in (folder / "burn_down_quo_ta_s_b_.svg").read_text("utf-8")


def test_sealed_sweep_shows_its_charge_and_nothing_of_its_trusted_part(tmp_path):
    shutil.copy(RECORDED, tmp_path / "ledger.db")
    secret = '{"fingerprint":"planted"}'
    entries = [
        dataclasses.replace(entry, trusted_text=secret)
        for entry in Ledger.open(str(tmp_path / "ledger.db")).entries()
    ]
    content, numbers = burn_down_of(entries, "scans")
    sealed = numbers[numbers["budget"] == "sealed sweeps"]
    assert sealed["left"].tolist().count(1.0) == (sealed["row"] < 12).sum()
    assert "planted" not in numbers.to_csv() + repr(content)
