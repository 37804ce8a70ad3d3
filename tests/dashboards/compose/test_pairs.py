"""Trainings on pairs: recall at 10 is drawn, everything else is in the tables, from MLflow to the files."""

from __future__ import annotations

import numpy as np
import pytest

from dashboards.compose.figure import content_of, numbers_of
from dashboards.compose.search_trials import objective
from dashboards.dashboard_error import DashboardError
from dashboards.figures import draw, load_for
from dpgcl_core.release.metrics import METRICS, Family, Release, scores_of
from tests.dashboards.conftest import ALL_SCORES, log_trials
from tests.trainers.databases import open_tracker

RECALLS = scores_of(Family.PAIRS)
PAIR_SCORES = scores_of(Family.PAIRS, Family.CLASS_NAMES, Family.CAPTIONS)
DRAWN_RECALLS = [name for name in RECALLS if METRICS[name].has_panel]
SCORES = (*PAIR_SCORES, *ALL_SCORES)
DRAWN = ["Image → text recall at 10 (%)", "Text → image recall at 10 (%)"]
STEPS = {0: 0.1, 300: 0.3, 600: 0.4}


def labels(content):
    return [panel.y_label for panel in content.panels if panel.legend == "Scores"]


def on_the_way(row):
    values = [(step, value + 0.01 * row["repeat"]) for step, value in STEPS.items()]
    return {f"{name}_during": values for name in SCORES}


@pytest.fixture(scope="module")
def trials(make_trials):
    return make_trials(scores=SCORES)


@pytest.fixture(scope="module")
def store(tmp_path_factory, trials):
    """URI of a database with a sweep of pairs that was scored on the way."""
    folder = tmp_path_factory.mktemp("pairs")
    tracker = open_tracker(folder)
    parent = tracker.start_sweep("pairs", {"dataset": "shapes"}, {"data_is": "public"})
    log_trials(tracker, parent, trials[trials["group_size"] == 8], on_the_way)
    return f"sqlite:///{folder / 'mlflow.db'}"


def test_pairs_have_panels_of_recall_at_ten_alone(trials):
    assert labels(content_of(trials, "group-size")) == DRAWN


def test_pairs_have_every_score_in_the_table(trials):
    heading = content_of(trials, "group-size").tables[0][1].heading
    assert [title for title in heading if "(%)" in title] == [
        *(f"Image → text recall at {k} (%)" for k in (1, 5, 10)),
        *(f"Text → image recall at {k} (%)" for k in (1, 5, 10)),
        *("Zero-shot accuracy (%)", *(f"{METRICS[name].title} (%)" for name in scores_of(Family.CAPTIONS))),
        *("k-NN accuracy (%)", "Linear probe accuracy (%)"),
    ]


def test_pairs_numbers_are_the_means_of_the_trials(trials):
    numbers = numbers_of(trials, "group-size").set_index(["group_size", "target_epsilon"])
    for name in RECALLS:
        wanted = trials[(trials["group_size"] == 8) & (trials["target_epsilon"] == 10)][name].mean()
        assert numbers.loc[(8, 10.0), f"{name}_mean"] == pytest.approx(wanted)


def test_pairs_note_says_what_a_recall_is(trials):
    notes = " ".join(content_of(trials, "group-size").notes)
    assert "Recall at k: share of images (captions)" in notes
    assert "Other scores: see the table." in notes


def test_note_of_the_table_is_left_out_where_everything_is_drawn(make_trials):
    notes = " ".join(content_of(make_trials(scores=DRAWN_RECALLS), "group-size").notes)
    assert "Recall at k" in notes
    assert "Other scores" not in notes


def test_images_have_no_note_of_recalls(make_trials):
    assert not any("Recall" in note for note in content_of(make_trials(), "group-size").notes)


def test_pairs_without_recall_at_ten_show_what_there_is(make_trials):
    content = content_of(make_trials(scores=("zero_shot_accuracy", "knn_accuracy")), "group-size")
    assert labels(content) == ["Zero-shot accuracy (%)", "k-NN accuracy (%)"]


def test_pairs_of_a_search_are_ranked_by_recall_at_ten(make_trials):
    assert objective(make_trials(scores=SCORES)) == "image_to_text_recall_at_10"
    assert objective(make_trials()) == "knn_accuracy"


def test_search_counts_no_recall_as_a_setting(make_sweep):
    rows = make_sweep("learning_rate", (0.1, 0.2), epsilons=(10.0,), scores=SCORES).assign(sweep="one")
    table = content_of(rows, "search").tables[0][1]
    assert [
        list(table.heading).count(name) for name in ("Learning rate", "Image → text recall at 1 (%)")
    ] == [1, 1]
    assert not any("ntrained" in title for title in table.heading)


@pytest.mark.ci
def test_pairs_on_the_way_have_panels_of_recall_at_ten_alone(store):
    content = content_of(load_for("convergence", store), "convergence")
    assert [panel.y_label for panel in content.panels] == DRAWN
    curve = next(c for c in content.panels[0].curves if c.style.label == "ε = 10")
    np.testing.assert_allclose(curve.mean, [100 * (value + 0.01) for value in STEPS.values()])


@pytest.mark.ci
def test_files_of_pairs_are_drawn_from_mlflow_alone(store, tmp_path):
    paths = draw("group-size", store, "pairs", tmp_path)
    assert all(path.stat().st_size > 0 for path in paths)
    page = next(path for path in paths if path.suffix == ".md").read_text()
    assert all(METRICS[name].title in page for name in RECALLS)
    assert "recall_at" not in page


def test_transfer_of_pairs_shows_what_all_data_sets_have(trials):
    probed = trials.assign(scored_on="shapes", **{"transfer_knn_accuracy/digits": 0.5})
    probed["run_id"] = [f"run{i}" for i in range(len(probed))]
    probed = probed[probed["group_size"] == 8]
    assert labels(content_of(probed, "transfer"))[0] == "k-NN accuracy (%)"


def test_transfer_of_pairs_without_labels_has_no_place_without_scores(make_trials):
    probed = make_trials(sizes=(8,), scores=tuple(RECALLS)).assign(scored_on="shapes")
    probed = probed.assign(run_id=[f"run{i}" for i in range(len(probed))])
    probed["transfer_knn_accuracy/digits"] = 0.5
    panel = content_of(probed, "transfer").panels[0]
    assert [name for _, name in panel.axis.ticks] == ["Digits"]


def test_scores_of_pairs_have_titles_wherever_they_are_declared():
    declared = {name for name, metric in METRICS.items() if metric.release is Release.SCORE}
    words = ("_recall_at_", "zero_shot", "caption_", "next_token", "word_order")
    of_pairs = {name for name in declared if any(word in name for word in words)}
    every = (("", ""), ("untrained_", ""), ("public_start_", ""), ("private_start_", ""), ("", "_during"))
    assert of_pairs == {f"{before}{name}{behind}" for name in PAIR_SCORES for before, behind in every}


def test_axis_of_adapted_layers_stands_as_the_paper_lists_them(make_sweep):
    content = content_of(make_sweep("lora_layers", ("K+V", "V", "Q", "Q+V")), "lora-layers")
    assert [name for _, name in content.panels[0].axis.ticks] == ["Q", "V", "Q+V", "K+V"]


def test_title_names_the_question_where_the_axis_is_of_names(make_sweep):
    rows = make_sweep("augmentation", ("crop", "blur"), method="dp_gcl", lora_rank=4)
    content = content_of(rows.assign(dataset="shapes:400"), "augmentations")
    assert content.title.startswith("Shapes (400): augmentations, DP-GCL, ε = 10")
    assert content.subtitle.endswith("LoRA rank = 4")


def test_trials_of_different_augmentations_are_no_repeats(make_sweep):
    rows = make_sweep("augmentation", ("crop", "blur"), epsilons=(10.0,)).assign(temperature=0.2)
    with pytest.raises(DashboardError, match="differ in augmentation"):
        content_of(rows, "temperature")
