"""What the live page knows of sweeps: from their folders and MLflow, and no more than may be seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.live.pace import Pace
from dashboards.live.pages import Pages, View, page_of
from dashboards.live.state import released
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.release.metrics import tracked_name
from tests.dashboards.live.storage import BOTH_QUOTES, METRICS, ODD, Storage, sealed
from trainers.files.progress import Progress

pytestmark = pytest.mark.ci


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


def html_of(view: View | None) -> str:
    assert view is not None
    return view.as_json()


def all_pages(storage: Storage, *names: str) -> str:
    pages = Pages(storage.reader())
    return html_of(pages.index()) + "".join(html_of(pages.sweep(name)) for name in names)


# Paces


def test_pace_of_a_training_that_went_back_begins_anew() -> None:
    pace = Pace()
    for now, step in ((0.0, 50), (10.0, 90), (20.0, 40), (30.0, 50)):
        pace.see(now, Progress(step=step, num_steps=100))
    assert (pace.rate, pace.seconds_left(30.0)) == (1.0, 50.0)


def test_pace_is_that_of_the_last_minute() -> None:
    pace = Pace()
    for now, step in ((0.0, 0), (10.0, 100), (100.0, 110), (110.0, 120)):
        pace.see(now, Progress(step=step, num_steps=200))
    assert pace.rate == 20 / 100


def test_pace_is_unknown_until_a_step_was_seen() -> None:
    pace = Pace()
    for now in (0.0, 5.0):
        pace.see(now, Progress(step=0, num_steps=10))
    assert (pace.rate, pace.seconds_left(5.0)) == (None, None)


# Progress


def test_sweep_shows_steps_rates_and_time_left(storage: Storage) -> None:
    parent = storage.sweep("one")
    storage.folder("one")
    storage.trial(parent, "a")
    storage.finish("one", "a")
    reader = storage.reader()
    for storage.now, step in ((0.0, 20), (10.0, 40)):
        storage.tell("one", "a", 100)  # over
        storage.tell("one", "b", step)
        state = reader.sweep("one")
    assert state is not None
    (trial,) = state.running
    assert (trial.name, trial.progress.step, trial.rate, trial.seconds_left) == ("b", 40, 2.0, 30.0)
    assert (state.num_done, state.num_trials, state.share) == (1, 4, 0.35)
    # 0.2 of a training took 10 s, and 2.6 are left.
    assert state.seconds_left == pytest.approx(130.0)
    assert state.status == "running"


def test_sweep_of_private_data_shows_steps_and_no_rate(storage: Storage) -> None:
    storage.sweep("one", "private")
    storage.folder("one")
    reader = storage.reader()
    for storage.now, step in ((0.0, 20), (10.0, 49)):
        storage.tell("one", "b", step)
        state = reader.sweep("one")
    assert state is not None
    (trial,) = state.running
    assert (trial.progress.step, trial.rate, trial.seconds_left, state.seconds_left) == (40, None, None, None)
    page = html_of(Pages(reader).sweep("one"))
    assert "40 of 100" in page
    assert "Steps/s" not in page
    assert "The data are private" in page


def test_restart_of_a_training_on_private_data_is_not_seen(storage: Storage) -> None:
    """Its file is gone until the next attempt has begun, which begins at an earlier step."""
    storage.sweep("one", "private")
    folder = storage.folder("one")
    reader, seen = storage.reader(), []
    for storage.now, step in ((0.0, 57), (10.0, None), (20.0, 30), (30.0, 61)):
        if step is None:
            next(folder.rglob("progress.json")).unlink()
        else:
            storage.tell("one", "b", step)
        state = reader.sweep("one")
        assert state is not None
        seen.append([(trial.name, trial.progress.step) for trial in state.running])
    assert seen == [[("b", 50)], [("b", 50)], [("b", 50)], [("b", 60)]]
    storage.tell("one", "b", 100)
    storage.finish("one", "b")
    storage.now = 40.0
    state = reader.sweep("one")
    assert state is not None
    assert state.running == ()


def test_sweep_without_data_known_to_be_public_counts_as_private(storage: Storage) -> None:
    storage.folder("one")
    storage.tell("one", "b", 20)
    state = storage.reader(uri="sqlite:////nowhere/mlflow.db").sweep("one")
    assert state is not None
    assert not state.is_public
    assert "no MLflow database" in state.notes[0]
    assert [trial.name for trial in state.running] == ["b"]


def test_sweep_where_nothing_moves_says_how_it_goes_on(storage: Storage) -> None:
    storage.sweep("one")
    storage.folder("one")
    storage.tell("one", "b", 20)
    storage.now = 720.0
    state = storage.reader().sweep("one")
    assert state is not None
    assert state.notes == (
        "Nothing has moved for 12 min; if its driver has ended, this continues it: --resume --name one",
    )


def test_ended_sweep_runs_nothing(storage: Storage) -> None:
    parent = storage.sweep("one")
    storage.folder("one")
    storage.tell("one", "b", 20)
    storage.tracker.finish_sweep(parent, "KILLED")
    state = storage.reader().sweep("one")
    assert state is not None
    assert (state.status, state.running) == ("stopped", ())


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"params": 3}'])
def test_damaged_plan_and_progress_hide_no_results(storage: Storage, text: str) -> None:
    storage.trial(storage.sweep("one"), "a")
    storage.folder("one")
    (storage.root / "sweeps/one/plan.json").write_text(text)
    state = storage.reader().sweep("one")
    assert state is not None
    assert [trial.name for trial in state.trials] == ["a"]


# Results


def test_numbers_shown_are_those_of_mlflow(storage: Storage) -> None:
    parent = storage.sweep("one")
    run_id = storage.trial(parent, "a", METRICS | {"knn_accuracy": 1 / 3})
    view = Pages(storage.reader()).sweep("one")
    assert view is not None
    page = view.parts["trials"]
    recorded = storage.tracker.client.get_run(run_id).data.metrics
    for name, text in (("knn_accuracy", "33.33"), ("epsilon", "9.5")):
        assert f'data-metric="{name}" data-value="{recorded[tracked_name(name)]!r}">{text}<' in page


def test_trial_appears_when_it_has_finished(storage: Storage) -> None:
    parent, reader = storage.sweep("one"), storage.reader()
    pages = Pages(reader)
    before = pages.sweep("one")
    storage.trial(parent, "a")
    assert pages.sweep("one") == before, "asked once a second at most"
    storage.now += 3600
    after = pages.sweep("one")
    assert before is not None
    assert after is not None
    assert after.tag != before.tag
    assert [name for name, _, _ in after.figures] == ["Scores", "ε against score"]
    assert before.figures == []


def test_forbidden_metrics_of_private_data_are_absent_with_a_note(storage: Storage) -> None:
    parent = storage.sweep("one", "private")
    storage.trial(parent, "a", METRICS | {"snr_first_step": 0.123456789, "homemade": 7.7}, data_is="private")
    storage.trial(parent, "b", METRICS, guarantee="none", data_is="private")
    state = storage.reader().sweep("one")
    assert state is not None
    assert [dict(trial.metrics) for trial in state.trials] == [METRICS]
    assert "Withheld by the release policy: homemade, snr_first_step." in state.notes
    assert "Withheld: 1 training of private data without a proven guarantee." in state.notes
    page = all_pages(storage, "one")
    assert "0.123456789" not in page
    assert "0.1235" not in page


def test_page_calls_no_number_withheld_that_it_shows() -> None:
    """The ledger's and the answer's, which the sweep's own run has."""
    own = ("tuned_epsilon", "epsilon_remaining", "epsilon_remaining_before", "best_knn_accuracy")
    assert released(dict.fromkeys((*own, "snr_first_step"), 1.0), is_public=False)[1] == {"snr_first_step"}


def test_failed_and_half_written_runs_are_counted_and_not_shown(storage: Storage) -> None:
    parent = storage.sweep("one")
    client = storage.tracker.client
    for status in ("FAILED", "RUNNING"):
        tags = {"mlflow.parentRunId": parent, "dpgcl.sweep": "one"}
        run = client.create_run(storage.tracker.experiment_id, tags=tags, run_name=f"half {status}")
        client.log_metric(run.info.run_id, "knn_accuracy", 0.987654)
        if status == "FAILED":
            client.set_terminated(run.info.run_id, status)
    page = all_pages(storage, "one")
    assert "Not shown: 2 runs in MLflow, failed or half-written." in page
    assert "0.987654" not in page


def test_runs_of_mixed_versions_leave_the_table(storage: Storage) -> None:
    parent = storage.sweep("one")
    storage.trial(parent, "a")
    client = storage.tracker.client
    run = client.create_run(storage.tracker.experiment_id, tags={"mlflow.parentRunId": parent})
    client.log_metric(run.info.run_id, "of_another_version", 3.0)
    client.set_terminated(run.info.run_id, "FINISHED")
    storage.trial(parent, "c", {})
    view = Pages(storage.reader()).sweep("one")
    assert view is not None
    assert view.parts["trials"].count("<tr") == 4


def test_training_that_its_scores_ended_says_so_and_is_not_compared(storage: Storage) -> None:
    parent = storage.sweep("one")
    storage.trial(parent, "a")
    storage.trial(parent, "early", METRICS | {"knn_accuracy": 0.98765}, stopped_at="40")
    storage.tracker.finish_sweep(parent, "KILLED")
    pages = Pages(storage.reader())
    state, view = pages.reader.sweep("one"), pages.sweep("one")
    assert state is not None
    assert view is not None
    assert (state.status, state.num_done) == ("stopped", 2)
    assert "ended early, at step 40" in view.parts["trials"]
    assert "98.77" not in view.parts["answer"]
    assert "Not compared: 1 training that early stopping ended; ε counts all planned steps." in state.notes


@pytest.mark.parametrize("make", [lambda storage: None, lambda storage: storage.sweep("one")])
def test_nothing_to_show_is_said(storage: Storage, make: Callable[[Storage], object]) -> None:
    make(storage)
    pages = Pages(storage.reader())
    known = pages.sweep("one")
    if known is None:
        assert "No sweep yet" in html_of(pages.index())
    else:
        assert "None has finished." in html_of(known)


def test_names_are_text_wherever_they_stand(storage: Storage) -> None:
    parent = storage.sweep(ODD, dataset=ODD, question="</script><script>x</script>")
    storage.trial(parent, ODD)
    both = storage.tracker.client.create_run(  # no sweep takes such a name; somebody else may
        storage.tracker.experiment_id, tags={"dpgcl.role": "sweep", "dpgcl.sweep": BOTH_QUOTES}
    )
    pages = Pages(storage.reader())
    index, view, other = pages.index(), pages.sweep(ODD), pages.sweep(BOTH_QUOTES)
    assert view is not None
    assert other is not None
    assert both.info.run_id
    parts = "".join(part for each in (index, view, other) for part in each.parts.values())
    assert "<b onload" not in parts
    assert "<script>x" not in parts
    assert "&lt;b onload=&#34;x&#34;&gt;&amp;amp;" in parts
    assert "/sweep?name=%3Cb%20onload" in parts
    head = page_of(View(title=ODD, parts=index.parts), "/state", home=True)
    assert "<b onload" not in head


def test_report_is_linked_where_it_lies(storage: Storage) -> None:
    storage.sweep("one")
    folder = storage.folder("one")
    assert "Report" not in all_pages(storage, "one")
    (folder / "report.html").write_text("<p>")
    assert all_pages(storage, "one").count("/sweep/report?name=one") >= 2
    assert storage.reader().report("one") == folder / "report.html"
    assert storage.reader().report("../sweeps/one") is None


def test_ledger_is_shown(storage: Storage, tmp_path: Path) -> None:
    ledger = Ledger.create(str(tmp_path / "ledger.db"))
    ledger.register("scans", Cap(epsilon=8.0, delta=1e-5), num_records_public=1000)
    lines = storage.reader(ledger=str(tmp_path / "ledger.db")).ledger_lines()
    assert lines[0].startswith("scans: cap ε = 8")
    assert "cannot be read" in storage.reader(ledger=str(tmp_path / "gone.db")).ledger_lines()[0]


# Sealed sweeps


def test_nothing_of_a_sealed_sweep_is_seen_before_its_release(storage: Storage) -> None:
    sealed(storage, "secret-one")
    reader = storage.reader()
    assert reader.sweeps() == ([], ())
    assert reader.sweep("secret-one") is None
    assert reader.report("secret-one") is None
    before = html_of(Pages(reader).index())
    assert not any(word in before for word in ("secret-one", "secret-data", "draw-", "3 of 9"))
    (storage.root / "sweeps/secret-one/trusted/trials/draw-1.json").write_text("{}")
    storage.now = 3600
    assert html_of(Pages(reader).index()) == before, "and nothing that moves with its trials"


@pytest.mark.parametrize("plan", [{}, {"params": {"num_trials": 3}, "publication": {"interval_seconds": 1}}])
def test_folder_that_may_be_sealed_is_left_alone(storage: Storage, plan: dict[str, object]) -> None:
    folder = sealed(storage, "secret-one")
    (folder / "plan.json").write_text(json.dumps(plan))
    assert storage.reader().sweeps() == ([], ())


def test_sealed_sweep_shows_its_one_run_once_it_is_published(storage: Storage) -> None:
    folder = sealed(storage, "secret-one")
    (folder / "report.html").write_text("<p>")
    tags = {"data_is": "private", "tuning_cost": "Sealed release: ε = 3"}
    found = {"knn_accuracy": 0.75, "snr_first_step": 0.4321}
    storage.tracker.log_sealed("secret-one", {"group_size": 8}, found, tags, sweep_id="1")
    state = storage.reader().sweep("secret-one")
    assert state is not None
    assert (state.status, state.started, state.num_trials, state.running) == ("published", None, None, ())
    page = all_pages(storage, "secret-one")
    assert "75.00" in page
    assert not any(word in page for word in ("draw-", "3 of 9", "0.4321", "1970"))
