"""What the list of sweeps shows: how far each one is, and no more than may be seen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dashboards.serve.index import SweepIndex, ledgers_page
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from tests.dashboards.serve.storage import ODD, Storage, sealed


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


def shown(index: SweepIndex) -> str:
    """The page's content, without its style sheet."""
    return index.page().partition("</head>")[2]


def steps(index: SweepIndex) -> list[str]:
    return re.findall(r"<li>(.*?)</li>", shown(index))


# Progress


def test_running_sweeps_come_first_and_the_others_say_how_they_ended(storage: Storage) -> None:
    for name, status in (("a", "FINISHED"), ("b", "KILLED"), ("c", ""), ("d", "FAILED")):
        storage.sweep(name, status=status)
    pairs = re.findall(r'<h2>(\w)</h2><p><span class="state (\w+)">', shown(storage.index()))
    assert pairs[0] == ("c", "running")
    assert set(pairs[1:]) == {("a", "finished"), ("b", "stopped"), ("d", "incomplete")}


def test_sweep_shows_its_trials_and_the_steps_of_those_that_run(storage: Storage) -> None:
    storage.sweep("one")
    storage.finish("one", "a")
    storage.tell("one", "a", 100)  # over
    storage.tell("one", "b", 41)
    storage.tell("one", "c", 100)
    index = storage.index()
    assert steps(index) == ["b: step 41 of 100", "c: scoring"]
    page = shown(index)
    assert "group-size on digits" in page
    assert "1 of 4 trials" in page
    assert 'value="0.6025"' in page, "(1 + 0.41 + 1) / 4"


def test_resumed_sweep_runs_again(storage: Storage) -> None:
    storage.sweep("one", status="KILLED")
    storage.tell("one", "b", 41)
    assert steps(storage.index()) == [], "an ended sweep runs nothing"
    storage.log("one", "begun", "0 of 4 trials done")
    assert steps(storage.index()) == ["b: step 41 of 100"]


def test_sweep_where_nothing_moves_says_how_it_goes_on(storage: Storage) -> None:
    storage.sweep("one")
    storage.tell("one", "b", 20)
    assert "No progress for" not in shown(storage.index())
    storage.now = 720.0
    note = "No progress for 12 min; if the driver has ended, continue the sweep with --resume --name one"
    assert note in shown(storage.index())


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"params": 3}'])
def test_damaged_plan_hides_its_own_sweep_alone(storage: Storage, text: str) -> None:
    (storage.sweep("damaged") / "plan.json").write_text(text)
    storage.sweep("whole")
    assert re.findall(r"<h2>(\w+)</h2>", shown(storage.index())) == ["whole"]


@pytest.mark.parametrize("text", ["", "{", '{"step": "x"}', '{"event": "ended"'])
def test_damaged_progress_and_log_leave_the_rest(storage: Storage, text: str) -> None:
    path = storage.sweep("one")
    storage.tell("one", "b", 20)
    (path / "checkpoints" / "b" / "progress.json").write_text(text)
    with (path / "log.jsonl").open("a") as file:
        file.write(text)
    assert '<span class="state running">' in shown(storage.index())
    assert steps(storage.index()) == []


def test_no_sweep_is_said(storage: Storage) -> None:
    assert "has no sweep yet" in shown(storage.index())


def test_names_are_text_wherever_they_stand(storage: Storage) -> None:
    path = storage.sweep(ODD)
    (path / "report.html").write_text("<p>")
    plan = {"params": {"num_trials": 2, "question": "<script>x</script>", "dataset": "<img src=x>"}}
    (path / "plan.json").write_text(json.dumps(plan | {"data_is": "public"}))
    storage.tell(ODD, "<i>", 20)
    page = shown(storage.index())
    assert not any(each in page for each in ("<b onload", "<script>x", "<img", "<i>"))
    assert "&lt;b onload=x&gt;&amp;amp;" in page
    assert 'href="/reports/%3Cb%20onload' in page


# Reports


def test_report_is_linked_where_it_lies(storage: Storage, tmp_path: Path) -> None:
    folder, index = storage.sweep("one"), storage.index()
    assert "/reports/" not in shown(index)
    assert index.report("one") is None
    (tmp_path / "elsewhere.html").write_text("<p>")
    (folder / "report.html").symlink_to(tmp_path / "elsewhere.html")
    assert index.report("one") is None, "a link may lead anywhere"
    (folder / "report.html").unlink()
    (folder / "report.html").write_text("<p>")
    assert '<a href="/reports/one">one</a>' in shown(index)
    assert index.report("one") == folder / "report.html"
    assert index.report("../sweeps/one") is None


# Private data


def test_sweep_of_private_data_shows_tenths_of_its_steps(storage: Storage) -> None:
    storage.sweep("one", "private")
    index, seen = storage.index(), []
    for step in (20, 47, 49, 50):
        storage.tell("one", "b", step)
        seen += steps(index)
    assert seen == [f"b: step {step} of 100" for step in (20, 40, 40, 50)]
    assert 'value="0.1250"' in shown(index), "nor does the bar tell more"


def test_sweep_whose_plan_does_not_say_that_its_data_are_public_counts_as_private(storage: Storage) -> None:
    storage.sweep("one", None)
    storage.tell("one", "b", 47)
    assert steps(storage.index()) == ["b: step 40 of 100"]


def test_restart_of_a_training_on_private_data_is_not_seen(storage: Storage) -> None:
    """Its file is gone until the next attempt has begun, which begins at an earlier step."""
    folder = storage.sweep("one", "private")
    index, seen = storage.index(), []
    for step in (57, None, 30, 61):
        if step is None:
            next(folder.rglob("progress.json")).unlink()
        else:
            storage.tell("one", "b", step)
        seen += steps(index)
    assert seen == [f"b: step {step} of 100" for step in (50, 50, 50, 60)]
    storage.tell("one", "b", 100)
    storage.finish("one", "b")
    assert steps(index) == []


def test_private_sweep_tells_no_time_since_anything_moved(storage: Storage) -> None:
    """Within an hour a step may end, and the note would time it."""
    storage.sweep("one", "private")
    storage.tell("one", "b", 20)
    notes = []
    for storage.now in (720.0, 3590.0, 3610.0, 7200.0):
        notes += re.findall(r"No progress for [^;]+", shown(storage.index()))
    assert notes == ["No progress for an hour or more"] * 2


def test_sweep_begun_anew_under_a_name_starts_at_its_own_steps(storage: Storage) -> None:
    path, index = storage.sweep("one", "private", sweep_id="first"), storage.index()
    storage.tell("one", "b", 80)
    assert steps(index) == ["b: step 80 of 100"]
    plan = json.loads((path / "plan.json").read_text())
    (path / "plan.json").write_text(json.dumps(plan | {"sweep_id": "second"}))
    storage.tell("one", "b", 20)
    assert steps(index) == ["b: step 20 of 100"]


# Sealed sweeps


def test_nothing_of_a_sealed_sweep_is_seen(storage: Storage) -> None:
    path, index = sealed(storage, "secret-one"), storage.index()
    before = index.page()
    assert "has no sweep yet" in before
    assert not any(word in before for word in ("secret-one", "secret-data", "draw-", "3 of 9"))
    assert index.report("secret-one") is None
    (path / "trusted/trials/draw-1.json").write_text("{}")
    (path / "release").mkdir()
    (path / "release" / "result.json").write_text("{}")
    assert index.page() == before, "and nothing that moves with its trials or its publication"


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"params": {"num_trials": 3}},  # as of an open one, but for `trusted/`
        {"params": {"num_trials": 3}, "publication": {"interval_seconds": 1}},
    ],
)
def test_folder_that_may_be_sealed_is_left_alone(storage: Storage, plan: dict[str, object]) -> None:
    (sealed(storage, "secret-one") / "plan.json").write_text(json.dumps(plan))
    assert "has no sweep yet" in shown(storage.index())
    assert storage.index().report("secret-one") is None


# Ledgers


def test_ledgers_are_shown_and_one_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    ledger = Ledger.create(str(tmp_path / "ledger.db"))
    ledger.register("<i>scans", Cap(epsilon=8.0, delta=1e-5), num_records_public=1000)
    page = ledgers_page([str(tmp_path / "ledger.db"), str(tmp_path / "gone.db")])
    assert "<li>&lt;i&gt;scans: cap ε = 8" in page
    assert "<li>The ledger cannot be read: " in page
    assert "--ledger" in ledgers_page([])


def test_ledgers_address_is_shown_without_its_password() -> None:
    page = ledgers_page(["postgresql://me:secret@127.0.0.1:1/x"])
    assert "secret" not in page
    assert "127.0.0.1" in page
