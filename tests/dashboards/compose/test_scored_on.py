"""What was scored on stands on figure, page and table wherever it is not the data set in the title."""

from __future__ import annotations

import pytest

from dashboards.compose.figure import content_of
from dashboards.figures import draw
from tests.dashboards.conftest import log_trials
from tests.dashboards.render import drawn
from tests.trainers.databases import open_tracker

pytestmark = pytest.mark.ci  # trainings and sweeps of seconds each

OWN = "csv:/secret/place/mine.csv"


def said(trials, question="group-size"):
    return [note for note in content_of(trials, question).notes if "cored on" in note]


def test_note_names_what_was_scored_on(make_trials):
    assert said(make_trials(dataset=OWN, scored_on="shapes:400")) == ["Scored on Shapes (400)."]


def test_note_names_a_file_without_its_folder(make_trials):
    trials = make_trials(dataset=OWN, scored_on="csv:/another/place/public.csv")
    assert said(trials) == ["Scored on public.csv."]


def test_note_is_left_out_where_the_data_set_itself_was_scored_on(make_trials):
    assert said(make_trials(scored_on="fashion_mnist")) == []


@pytest.mark.parametrize("scored_on", [{}, {"scored_on": None}])
def test_trials_that_record_no_scored_data_are_drawn_without_the_note(make_trials, scored_on):
    content = content_of(make_trials(**scored_on), "group-size")
    assert content.panels
    assert not any("cored on" in note for note in content.notes)


def test_note_is_left_out_where_nothing_was_scored(make_trials):
    assert said(make_trials(scores=(), scored_on="shapes:400")) == []


def test_note_is_left_out_where_the_axis_names_the_data(make_trials):
    probed = make_trials(sizes=(8,), snr=False, dataset=OWN, scored_on="shapes:400")
    probed["transfer_knn_accuracy/digits"] = 0.5
    assert said(probed.assign(run_id=[f"run{i}" for i in range(len(probed))]), "transfer") == []


def test_note_tells_noised_scores_of_held_out_records_apart(make_trials):
    trials = make_trials(data_is="private", dataset=OWN, scored_on="digits", noised_knn_accuracy=0.5)
    assert said(trials) == ["Scored on Digits. Noised scores: on held-out private records."]


def test_note_names_every_data_set_scored_on_once(make_trials):
    trials = make_trials(dataset=OWN, scored_on="shapes:400")
    trials.loc[trials["repeat"] == 0, "scored_on"] = "digits"
    assert said(trials) == ["Scored on Digits, Shapes (400)."]


@pytest.mark.parametrize("question", ["search", "methods", "augmentations"])
def test_note_stands_on_figures_of_every_kind(make_sweep, question):
    trials = make_sweep("augmentation", ("crop", "blur"), method="dp_gcl", dataset=OWN, scored_on="digits")
    trials = trials[trials["augmentation"] == "crop"] if question == "methods" else trials
    trials = trials.assign(sweep="a search") if question == "search" else trials
    assert said(trials, question) == ["Scored on Digits."]


def test_page_from_mlflow_says_what_was_scored_on(make_trials, tmp_path):
    tracker = open_tracker(tmp_path)
    parent = tracker.start_sweep("one", {"dataset": OWN}, {"data_is": "public"})
    trials = make_trials(sizes=(8,), num_repeats=1, scored_on="shapes:400")
    log_trials(tracker, parent, trials)
    paths = draw("group-size", f"sqlite:///{tmp_path}/mlflow.db", "one", tmp_path / "drawn")
    text = next(path for path in paths if path.suffix == ".md").read_text("utf-8")
    assert "Scored on Shapes (400)." in text
    assert "secret" not in text


def test_printed_figure_says_what_was_scored_on(make_trials):
    content = content_of(make_trials(dataset=OWN, scored_on="shapes:400"), "group-size")
    assert "Scored on Shapes (400)." in drawn.said(content)


def test_training_and_scored_sets_of_one_folder_name_are_told_apart(make_trials):
    trials = make_trials(dataset="images:/own/train/scans", scored_on="images:/own/public/scans")
    assert said(trials) == ["Scored on public/scans."]
    assert content_of(trials, "group-size").title.startswith("train/scans: ")
