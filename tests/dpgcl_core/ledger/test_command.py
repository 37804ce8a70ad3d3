"""`python -m dpgcl_core.ledger`, as a user or a privacy officer calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import BudgetExceeded, exit_on_bad_input
from dpgcl_core.ledger import __main__ as ledger_command
from dpgcl_core.ledger.account import PlannedTraining
from dpgcl_core.ledger.ledger import Ledger
from tests.dpgcl_core.ledger.written_before import TAG, add_fingerprint
from tests.programs import run_program

NEW = ["--delta", "1e-5", "--num-records-public", "10000"]


def main(arguments: list[str]) -> object:
    """The exit code of `python -m dpgcl_core.ledger`."""
    with pytest.raises(SystemExit) as ended:
        exit_on_bad_input(lambda: ledger_command.main(arguments))
    return ended.value.code


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    url = str(tmp_path / "ledger.db")
    monkeypatch.setenv("DPGCL_LEDGER", url)
    assert main(["cap", "--dataset", "scans", "--epsilon", "4", *NEW, "--create"]) == 0
    capsys.readouterr()
    return url


def reserve(url: str, label: str = "trial") -> None:
    plan = [PlannedTraining(label=label, step_class=StepClass(0.01, 1.0), num_steps=100)]
    Ledger.open(url).reserve("scans", plan)


@pytest.mark.ci
def test_module_runs_as_a_program(tmp_path: Path) -> None:
    words = ["-m", "dpgcl_core.ledger", "show", "--ledger", str(tmp_path / "none.db")]
    done = run_program(words, cwd=tmp_path, environment=os.environ)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the ledger sqlite:")
    assert done.stderr.count("\n") == 1


def test_ledger_must_be_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("DPGCL_LEDGER", raising=False)
    assert main(["show"]) == 2
    assert "Pass --ledger or set $DPGCL_LEDGER" in capsys.readouterr().err


def test_show_tells_cap_charge_and_head(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    reserve(url)
    assert main(["show"]) == 0
    out = capsys.readouterr().out
    assert "scans: cap ε = 4 at δ = 1e-05, RDP filter at order" in out
    assert "q = 0.01, σ = 1: 100 steps" in out
    assert "1 open, 0 settled" in out
    assert Ledger.open(url).head().head_hash in out


def test_show_calls_the_pld_total_information(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    reserve(url)
    assert main(["show"]) == 0
    spent = Ledger.open(url).read_charges("scans")
    totals = f"ε = {spent.epsilon_filter:.6g} by the filter, {spent.epsilon_pld:.6g} by PLD"
    shown = capsys.readouterr().out
    assert f"charged so far, for information: {totals}, at δ = 1e-05; the guarantee is the cap" in shown


def test_show_tells_how_a_sealed_sweep_was_charged(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger.open(url)
    ledger.reserve_sealed("scans", label="s", epsilon=1.0, delta=1e-6, rdp_curve=lambda order: 0.1)
    assert main(["show"]) == 0
    shown = capsys.readouterr().out
    assert "sealed sweeps: 1, charged by RDP curves (part of the RDP above)" in shown
    assert "basic composition" not in shown


@pytest.mark.parametrize("bad", [["--delta", "0.5"], ["--delta", "1e-5", "--order", "1"]])
def test_refused_cap_leaves_no_new_ledger(
    bad: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DPGCL_LEDGER", str(tmp_path / "new.db"))
    new = ["cap", "--dataset", "d", "--epsilon", "4", "--num-records-public", "1000", "--create"]
    assert main([*new, *bad]) == 2
    assert not (tmp_path / "new.db").exists()


def test_statement_verifies_the_ledger(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--dataset", "scans", "--statement"]) == 0
    statement = tmp_path / "statement.json"
    statement.write_text(capsys.readouterr().out)
    reserve(url)
    assert main(["verify", "--against", str(statement)]) == 0
    assert "the chain is intact and agrees with the statement" in capsys.readouterr().out


def test_statement_inside_a_larger_one_is_found(url: str, tmp_path: Path) -> None:
    statement = tmp_path / "statement.json"
    nested = json.loads(Ledger.open(url).statement("scans").to_json())
    statement.write_text(json.dumps({"epsilon": 4.0, "ledger": nested}))
    assert main(["verify", "--against", str(statement)]) == 0


def test_verify_finds_another_ledger_than_the_statements(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Ledger.create(str(tmp_path / "other.db"))
    statement = tmp_path / "statement.json"
    statement.write_text(json.dumps(vars(other.head())))
    assert main(["verify", "--against", str(statement)]) == 2
    assert f"the statement names ledger {other.head().ledger_id}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[]", '{"epsilon": 1}', '{"ledger_id": "x", "num_entries": 0, "head_hash": ""}']
)
def test_file_that_is_no_statement_is_refused(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    statement = tmp_path / "statement.json"
    statement.write_text(text)
    assert main(["verify", "--against", str(statement)]) == 2
    assert "is not a statement" in capsys.readouterr().err


def test_export_can_be_verified_without_the_ledger(url: str, tmp_path: Path) -> None:
    add_fingerprint(Ledger.open(url), "scans")
    export = tmp_path / "ledger.jsonl"
    assert main(["export", "--output", str(export)]) == 0
    assert main(["verify", "--export", str(export)]) == 0


def test_edited_export_is_found(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reserve(url)
    export = tmp_path / "ledger.jsonl"
    assert main(["export", "--output", str(export)]) == 0
    export.write_text(export.read_text().replace('\\"num_steps\\":100', '\\"num_steps\\":1'))
    assert main(["verify", "--export", str(export)]) == 2
    assert "row 3 or an earlier row was changed" in capsys.readouterr().err


@pytest.mark.parametrize("with_trusted", [False, True])
def test_export_holds_fingerprints_only_when_asked(url: str, tmp_path: Path, with_trusted: bool) -> None:
    add_fingerprint(Ledger.open(url), "scans")
    export = tmp_path / "ledger.jsonl"
    assert main(["export", "--output", str(export), *(["--with-trusted"] if with_trusted else [])]) == 0
    assert (TAG in export.read_text()) == with_trusted


def test_export_never_overwrites(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = tmp_path / "ledger.jsonl"
    export.write_text("mine")
    assert main(["export", "--output", str(export)]) == 2
    assert export.read_text() == "mine"


def test_cap_with_quotas_is_registered(url: str) -> None:
    quotas = ["--quota", "0.01", "1.0", "100", "0.02", "2.0", "50"]
    assert main(["cap", "--dataset", "quotas", "--epsilon", "4", *NEW, *quotas]) == 0
    cap = Ledger.open(url).read_charges("quotas", with_pld=False).cap
    assert cap.quotas == ((StepClass(0.01, 1.0), 100), (StepClass(0.02, 2.0), 50))


def test_cap_takes_the_order_that_suits_the_planned_steps(url: str) -> None:
    planned = ["--planned", "0.2", "8.0"]
    assert main(["cap", "--dataset", "planned", "--epsilon", "4", *NEW, *planned]) == 0
    spent = {
        name: Ledger.open(url).read_charges(name, with_pld=False).cap.order for name in ("planned", "scans")
    }
    assert spent["planned"] != spent["scans"]


def test_cap_of_a_new_data_set_needs_delta(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cap", "--dataset", "new", "--epsilon", "4"]) == 2
    assert "pass --delta and --num-records-public" in capsys.readouterr().err


def test_registered_cap_keeps_its_delta(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cap", "--dataset", "scans", "--epsilon", "4", "--delta", "1e-6"]) == 2
    assert "only epsilon can change" in capsys.readouterr().err


def test_cap_is_raised_only_with_the_option(url: str) -> None:
    assert main(["cap", "--dataset", "scans", "--epsilon", "5"]) == 2
    assert main(["cap", "--dataset", "scans", "--epsilon", "5", "--allow-raise"]) == 0
    assert Ledger.open(url).statement("scans").epsilon == 5


def test_create_never_empties_a_ledger(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Ledger.open(url).head()
    assert main(["cap", "--dataset", "new", "--epsilon", "4", *NEW, "--create"]) == 2
    assert "a ledger already exists" in capsys.readouterr().err
    assert Ledger.open(url).head() == before


@pytest.fixture
def put_back(url: str, tmp_path: Path) -> Path:
    """Data whose newest charge the ledger has lost: an older copy of it was put back."""
    data = tmp_path / "scans.npz"
    data.write_bytes(b"records")
    backup = Path(url).read_bytes()
    ledger = Ledger.open(url)
    ledger.bind("scans", data)
    ledger.reserve("scans", [PlannedTraining(label="a", step_class=StepClass(0.01, 1.0), num_steps=100)])
    (tmp_path / "plan.json").write_text(json.dumps({"head": vars(ledger.head_of("scans"))}))
    Path(url).write_bytes(backup)
    return data


@pytest.mark.parametrize("given", [["--data", "scans.npz"], ["--against", "plan.json"]])
def test_verify_names_what_an_old_copy_lacks(
    given: list[str], put_back: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", given[0], str(put_back.with_name(given[1]))]) == 2
    assert "lacks row 3" in capsys.readouterr().err


def test_verify_agrees_with_the_marks_of_a_whole_ledger(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "scans.npz"
    data.write_bytes(b"records")
    assert main(["verify", "--data", str(data)]) == 2
    assert "has no mark" in capsys.readouterr().err
    Ledger.open(url).bind("scans", data)
    assert main(["verify", "--data", str(data)]) == 0
    assert "agrees with the marks" in capsys.readouterr().out


@pytest.mark.parametrize("close", [False, True])
def test_loss_is_stated_once_and_the_mark_follows(
    close: bool, url: str, put_back: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated = ["restored", "--dataset", "scans", "--data", str(put_back), *(["--close"] if close else [])]
    assert main(stated) == 0
    expected = "rows were lost: " + (
        "the data set is closed for good" if close else "the whole cap is charged for them"
    )
    assert expected in capsys.readouterr().out
    assert main(["verify", "--data", str(put_back)]) == 0
    assert main(stated) == 2
    assert "there is no loss to state" in capsys.readouterr().err


def test_refusal_after_a_loss_tells_to_raise_the_cap(url: str, put_back: Path) -> None:
    assert main(["restored", "--dataset", "scans", "--data", str(put_back)]) == 0
    training = PlannedTraining(label="t", step_class=StepClass(0.01, 1.0), num_steps=10)
    with pytest.raises(BudgetExceeded, match=r"Rows were lost, .* raise the cap with .*--allow-raise"):
        Ledger.open(url).would_admit("scans", [training])


@pytest.mark.ci
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.ci)])
def test_output_that_nobody_reads_is_no_traceback(url: str, unbuffered: str) -> None:
    shown = [sys.executable, "-m", "dpgcl_core.ledger", "show", "--ledger", url, "--no-pld"]
    read, write = os.pipe()
    os.close(read)
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(shown, stdout=write, stderr=subprocess.PIPE, env=env, check=False, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_missing_ledger_tells_how_to_make_one(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "--ledger", str(tmp_path / "none.db")]) == 2
    line = (
        f"python -m dpgcl_core.ledger cap --create --ledger sqlite:///{tmp_path / 'none.db'} --dataset NAME"
    )
    assert f"create one: {line} --epsilon E --delta D --num-records-public N" in capsys.readouterr().err


def test_loss_needs_what_names_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restored", "--dataset", "scans"]) == 2
    assert "Pass --data PATH, or --against" in capsys.readouterr().err


def test_remaining_counts_in_the_unit_of_the_rule(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    reserve(url)
    assert main(["remaining"]) == 0
    spent = Ledger.open(url).read_charges("scans", with_pld=False)
    assert spent.rdp is not None
    assert spent.rdp_budget is not None
    left = f"left: RDP {spent.rdp_budget - spent.rdp:.6g} of {spent.rdp_budget:.6g}"
    assert left in capsys.readouterr().out


def test_remaining_tells_the_trainings_of_an_epsilon_that_the_rule_admits(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    of_one = ["--epsilon", "1", "--expected-batch-size", "100", "--num-steps", "10", "--json"]
    assert main(["remaining", "--dataset", "scans", *of_one]) == 0
    told = json.loads(capsys.readouterr().out)
    number, step_class = told["num_trainings"], StepClass(**told["training"]["step_class"])
    ledger = Ledger.open(url)

    def planned(number: int) -> list[PlannedTraining]:
        return [PlannedTraining(label=str(k), step_class=step_class, num_steps=10) for k in range(number)]

    assert number > 1
    ledger.would_admit("scans", planned(number))
    with pytest.raises(BudgetExceeded):
        ledger.would_admit("scans", planned(number + 1))


def test_remaining_refuses_a_batch_that_the_data_set_cannot_give(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["remaining", "--epsilon", "1", "--expected-batch-size", "20000"]) == 2
    assert "--expected-batch-size must be in (0, 10000]" in capsys.readouterr().err
