"""What a report says, of sweeps in every state."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from dashboards.compose.answer import Answer, PrivacyNumbers, answer_of
from dashboards.compose.answer_table import settings_table
from dashboards.dashboard_error import DashboardError
from dashboards.report import report_content
from dashboards.report.report_content import report_of
from tests.dashboards.report.conftest import STATEMENT


def privacy_of(report):
    return dict(report.privacy)


def test_answer_of_a_finished_sweep_is_the_recorded_one(make_record):
    record = make_record()
    numbers = PrivacyNumbers(training_epsilon=1.25, tuned_epsilon=2.5, trainings_remaining=7)
    recorded = json.loads(json.dumps(answer_of(record.trials, "group-size", numbers).as_dict()))
    recorded["choices"][0]["settings"][0]["mean"] = 0.4321
    report = report_of(make_record(answer=recorded))
    assert "ε of one training: 1.25" in report.answer.lines()[-1]
    assert settings_table(report.answer).rows[0][1] == "43.21"
    assert report.is_final


def test_answer_is_read_as_it_was_written(make_record):
    found = answer_of(make_record().trials, "group-size", PrivacyNumbers(training_epsilon=1.0))
    assert Answer.read(json.loads(json.dumps(found.as_dict()))) == found


@pytest.mark.parametrize(
    "damage", [{}, {"choices": [{}]}, {"choices": 1}, {"num_repeats": None, "choices": []}]
)
def test_damaged_answer_is_refused_and_made_anew(make_record, damage):
    whole = answer_of(make_record().trials, "group-size").as_dict()
    damaged = whole | damage if damage else {}
    with pytest.raises(DashboardError, match="damaged"):
        Answer.read(damaged)
    report = report_of(make_record(answer=damaged))
    assert report.answer.lines()[0] == whole["lines"][0]
    assert any("computed again" in note for note in report.notes)


def test_sweep_under_way_has_the_answer_of_its_trials_so_far_and_no_earlier_statement(make_record):
    stale = answer_of(make_record().trials, "group-size").as_dict() | {"question": "Stale?"}
    report = report_of(make_record(status="RUNNING", num_planned=40, answer=stale))
    assert not report.is_final
    assert not report.answer.lines()[0].startswith("Stale?")
    assert report.status == "Sweep under way: 24 of 40 trials finished."
    assert report.promise.startswith("Planned values")
    assert STATEMENT["headline"] not in report.promise


def test_sweep_without_trials_has_a_report(make_record):
    report = report_of(make_record(trials=pd.DataFrame(), status="RUNNING", statement=None, config=None))
    assert (report.answer, report.trials, list(report.figures)) == (None, None, [])
    assert "There is no answer yet: no trial has finished." in report.notes


def test_privacy_panel_has_both_epsilons_and_the_ledger_before_and_after(make_record):
    rows = privacy_of(report_of(make_record()))
    assert rows["ε of one training"] == "9.9900"
    assert rows["ε of the whole sweep, tuning included"] == "40.0000"
    assert rows["Theorem"] == "composition by PLD"
    assert rows["Guarantee"] == "none: 12 trials, proven: 12 trials"
    assert rows["Neighbouring data sets"] == "add or remove one record"
    assert rows["One record"] == "one row"
    assert rows["Ledger: ε left before the sweep"] == "50"
    assert rows["Ledger: ε left after the sweep"] == "9.8765"  # rounded down


def test_forbidden_metric_of_private_data_is_absent_with_a_note(make_record, make_trials):
    trials = make_trials(data_is="private", train_loss=0.123456)
    report = report_of(make_record(trials=trials))
    said = json.dumps([[cell.text for cell in row] for row in report.trials.rows])
    assert "0.123456" not in said
    assert all(row[-3].text != "none" for row in report.trials.rows)
    forbids = next(note for note in report.notes if "forbids" in note)
    assert "train_loss" in forbids
    assert "snr_first_step" in forbids
    assert any("12 of 24 trials" in note for note in report.notes)  # those with ε = ∞


def test_private_data_without_any_proven_trial_show_nothing(make_record, make_trials):
    trials = make_trials(data_is="private", epsilons=(float("inf"),), snr=False)
    report = report_of(make_record(trials=trials))
    assert report.trials is None
    assert (list(report.figures), report.answer) == ([], None)


@pytest.mark.parametrize(
    "missing", ["group_size", "target_epsilon", "knn_accuracy", "guarantee_label", "repeat"]
)
def test_trials_of_a_version_without_a_column_still_have_a_report(make_record, make_trials, missing):
    report = report_of(
        make_record(trials=make_trials(snr=False, scores=("knn_accuracy",)).drop(columns=missing))
    )
    assert len(report.trials.rows) == 24
    assert report.privacy


def test_mixed_versions_have_a_report_with_a_note_instead_of_a_figure(make_record, make_trials):
    trials = make_trials()
    trials.loc[trials["repeat"] == 0, "num_steps"] = 10
    report = report_of(make_record(trials=trials))
    assert list(report.figures) == []
    assert any("There is no figure" in note and "num_steps" in note for note in report.notes)
    assert len(report.trials.rows) == 24


def test_trials_have_the_axis_the_scores_and_every_setting_that_differs(make_record):
    record = make_record()
    table = report_of(record).trials
    assert list(table.heading) == [
        *("Trial", "Group size S", "k-NN accuracy (%)", "Linear probe accuracy (%)", "ε spent", "Guarantee"),
        *("Target ε", "Noise multiplier σ", "Repeat"),
    ]
    values = [row[2].value for row in table.rows]
    np.testing.assert_array_equal(values, record.trials["knn_accuracy"])
    assert table.rows[0][2].text == f"{100 * values[0]:.2f}"


def test_trials_link_to_mlflow_where_it_has_pages(make_record):
    report = report_of(make_record(links={"run3": "http://host/#/run3"}))
    assert [row[0].link for row in report.trials.rows[2:5]] == ["", "http://host/#/run3", ""]


def test_best_setting_is_bold_only_where_it_is_distinguishable(make_record, make_trials):
    trials = make_trials(sizes=(2, 8), epsilons=(10.0,), snr=False, scores=("knn_accuracy",))
    trials["knn_accuracy"] = [0.8, 0.801, 0.799, 0.5, 0.502, 0.499]
    trials["repeat"] = [0, 1, 2] * 2
    trials["group_size"] = pd.Series([2] * 3 + [8] * 3, dtype=object)
    assert settings_table(report_of(make_record(trials=trials)).answer).bold == {(0, 1)}
    one = trials[trials["repeat"] == 0].reset_index(drop=True)
    assert settings_table(report_of(make_record(trials=one)).answer).bold == frozenset()
    trials["knn_accuracy"] = [0.8, 0.7, 0.6, 0.79, 0.69, 0.62]
    assert settings_table(report_of(make_record(trials=trials)).answer).bold == frozenset()


def test_command_and_file_repeat_the_sweep(make_record):
    report = report_of(make_record(params={"question": "batch-size", "dataset": "digits"}))
    assert report.command == "python sweeps/batch_size.py --config config.yaml"
    assert report_of(make_record(params={"question": "mine", "dataset": "digits"})).command == ""


def test_table_of_very_many_trials_ends_with_a_note(make_record, make_trials, monkeypatch):
    monkeypatch.setattr(report_content, "MOST_TRIALS", 5)
    report = report_of(make_record())
    assert len(report.trials.rows) == 5
    assert "The table has the first 5 of 24 trials; MLflow has all of them." in report.notes
