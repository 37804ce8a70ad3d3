"""Reports from MLflow: documents that are there, missing and damaged; runs of every state."""

from __future__ import annotations

import shutil

import pytest

from dashboards.__main__ import main
from dashboards.dashboard_error import DashboardError
from dashboards.report.page import report_page
from dashboards.report.record import load_record
from dashboards.report.report_content import report_of
from dashboards.report.write import write_report
from tests.dashboards.report.conftest import CONFIG, STATEMENT
from trainers.tracking.runs import STOPPED_TAG

pytestmark = pytest.mark.ci


def test_record_has_the_documents_and_the_trials(store):
    uri = store(
        documents={"privacy_statement.json": STATEMENT, "config.yaml": CONFIG, "answer.json": {"a": 1}}
    )
    record = load_record(uri)
    assert (record.name, record.status, len(record.trials), record.num_planned) == ("one", "FINISHED", 24, 24)
    assert record.statement == STATEMENT
    assert record.config == CONFIG
    assert record.answer == {"a": 1}
    assert record.links == {}  # a database has no pages


@pytest.mark.parametrize("content", ["{", "[1]", "null", "\x00"])
def test_damaged_documents_are_left_out(store, content):
    uri = store(documents={"privacy_statement.json": content, "answer.json": content})
    record = load_record(uri)
    assert (record.answer, record.statement) == (None, None)


def test_deleted_artifacts_leave_a_report_without_them(store, tmp_path):
    uri = store(documents={"privacy_statement.json": STATEMENT, "config.yaml": CONFIG})
    shutil.rmtree(tmp_path / "mlartifacts")
    path = write_report(uri, "one", tmp_path / "reports")
    page = path.read_text(encoding="utf-8")
    assert "No privacy statement was recorded." in page
    assert "was not logged" in page


def test_failed_and_unfinished_trials_are_counted_and_not_shown(store, tmp_path, make_trials):
    uri = store(trials=make_trials(sizes=(8,), num_repeats=1), status="RUNNING")
    client = store.tracker.client
    parent = store.tracker.find_sweep("one")
    for status in ("FAILED", "FAILED", "RUNNING"):
        tags = {"mlflow.parentRunId": parent}
        run = client.create_run(store.tracker.experiment_id, tags=tags, run_name="half")
        client.log_metric(run.info.run_id, "knn_accuracy", 0.98765)
        if status != "RUNNING":
            client.set_terminated(run.info.run_id, status)
    page = write_report(uri, "one", tmp_path).read_text(encoding="utf-8")
    assert "Sweep under way: 2 of 24 trials finished; 2 failed." in page
    assert "98.77" not in page
    assert "98.76" not in page


def test_trainings_that_their_scores_ended_are_told_and_not_compared(store, make_trials):
    uri = store(trials=make_trials(sizes=(8,), num_repeats=1), status="KILLED")
    parent, client = store.tracker.find_sweep("one"), store.tracker.client
    params, metrics = {"group_size": 2, "target_epsilon": 10.0}, {"knn_accuracy": 0.98765}
    store.tracker.log_trial(parent, "early", params, metrics, {}, {STOPPED_TAG: "40"})
    record = load_record(uri)
    assert (len(record.trials), record.early_stops, dict(record.unfinished)) == (2, ["early"], {})
    report = report_of(record)
    assert report.status == ("Sweep stopped early: 2 of 24 trials finished; 1 ended early by their scores.")
    assert any(note.startswith("Not compared") and ": early. " in note for note in report.notes)
    assert "98.77" not in report_page(report)
    assert client.get_run(parent).info.status == "KILLED"


def test_sweep_without_finished_trials_has_a_report_from_the_command(store, tmp_path, make_trials, capsys):
    uri = store(trials=make_trials()[:0], status="RUNNING")
    assert main(["report", "--tracking-uri", uri, "--sweep", "one", "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "report.html")
    assert "no trial has finished" in (tmp_path / "out" / "report.html").read_text()


def test_sealed_sweep_has_no_report(store, tmp_path):
    uri = store()
    store.tracker.log_sealed("hidden", {"question": "group-size"}, {}, {}, sweep_id="x")
    with pytest.raises(DashboardError, match="is sealed"):
        write_report(uri, "hidden", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_sweep_and_unwritable_folder_end_in_one_line(store, tmp_path):
    uri = store()
    with pytest.raises(DashboardError, match=r"^unknown sweep.*$"):
        main(["report", "--tracking-uri", uri, "--sweep", "other"])
    (tmp_path / "file").write_text("")
    with pytest.raises(DashboardError, match=r"^.*cannot be written.*--output$"):
        main(["report", "--tracking-uri", uri, "--output", str(tmp_path / "file" / "x")])
