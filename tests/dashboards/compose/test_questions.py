"""Every question by the same rules: numbers, curves, labels of what is private, refusals, files."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dashboards.compose.curves import PRIVATE_COLOURS
from dashboards.compose.figure import content_of
from dashboards.compose.questions import QUESTIONS, find_question
from dashboards.dashboard_error import DashboardError
from dashboards.figures import as_markdown

BATCHES = (16.0, 64.0, 1024.0)


def sampling(value):
    return {"sampling_prob": value / 60000}


def no_noise_at_zero(value):
    label = {"guarantee_label": "proven" if value else "none"}
    return label | {"target_epsilon": round(10 / value, 4) if value else math.inf}


def labels(content, panel=0):
    return [curve.style.label for curve in content.panels[panel].curves]


@pytest.fixture
def batches(make_sweep):
    return make_sweep("expected_batch_size", BATCHES, sampling)


def test_question_points_are_the_means_and_errors_computed_by_hand(batches):
    content = content_of(batches, "batch-size")
    curve = next(c for c in content.panels[0].curves if c.style.label == "ε = 10")
    rows = [
        batches[(batches["expected_batch_size"] == b) & (batches["target_epsilon"] == 10)] for b in BATCHES
    ]
    scores = [row["knn_accuracy"] for row in rows]
    assert curve.x == [4.0, 6.0, 10.0]
    np.testing.assert_allclose(curve.mean, [100 * score.mean() for score in scores])
    np.testing.assert_allclose(curve.standard_error, [100 * s.std() / math.sqrt(3) for s in scores])


def test_question_does_not_refuse_what_follows_from_its_axis(batches):
    assert content_of(batches, "batch-size").panels


def test_question_refuses_another_difference_by_name(batches):
    mixed = batches.assign(learning_rate=[1e-3, 1e-2] * (len(batches) // 2))
    with pytest.raises(DashboardError, match=r"differ in learning_rate \(0\.001, 0\.01\)"):
        content_of(mixed, "batch-size")


def test_question_names_the_column_that_the_trials_lack(make_trials):
    with pytest.raises(DashboardError, match="temperature"):
        content_of(make_trials(), "temperature")


def test_question_of_an_unknown_name_names_the_nearest():
    with pytest.raises(DashboardError, match="did you mean 'batch-size'"):
        find_question("bach-size")


def test_question_names_only_the_splits_that_vary(batches):
    assert labels(content_of(batches, "batch-size")) == ["ε = ∞ (non-private)", "ε = 10"]


def test_question_splits_by_method(make_sweep):
    trials = make_sweep("method", ("dp_clip", "dp_gcl"), epsilons=(10.0,)).assign(temperature=0.2)
    assert labels(content_of(trials, "temperature")) == ["DP-GCL", "DP-CLIP"]


def test_question_does_not_name_what_a_method_brings_along(make_sweep):
    def own_copies(method):
        return {"num_augmentations": int(method == "dp_gcl")}

    trials = make_sweep("method", ("dp_gcl", "dp_clip"), own_copies, epsilons=(10.0,)).assign(temperature=0.2)
    assert labels(content_of(trials, "temperature")) == ["DP-GCL", "DP-CLIP"]


def test_question_of_the_noise_has_one_private_curve(make_sweep):
    trials = make_sweep("noise_multiplier", (0.0, 0.5, 1.0, 2.0), no_noise_at_zero, epsilons=(10.0,))
    private, other = sorted(content_of(trials, "noise-multiplier").panels[0].curves, key=lambda c: -len(c.x))
    assert (private.style.label, private.names) == ("private", ["0.5", "1", "2"])
    assert (other.style.label, other.names) == ("non-private: no guarantee", ["0"])


def test_question_of_the_budget_has_infinity_last_and_not_private(make_trials):
    content = content_of(make_trials(sizes=(8,), epsilons=(math.inf, 0.2, 1.0, 20.0)), "privacy-budget")
    assert [name for _, name in content.panels[0].axis.ticks] == ["0.2", "1", "20", "∞"]
    assert {c.style.label: c.names for c in content.panels[0].curves} == {
        "non-private: no guarantee": ["∞"],
        "private": ["0.2", "1", "20"],
    }


def test_question_of_categories_puts_points_of_one_place_beside_each_other(make_sweep):
    curves = content_of(make_sweep("lora_layers", ("Q", "V")), "lora-layers").panels[0].curves
    assert curves[0].names == curves[1].names == ["Q", "V"]
    assert not set(curves[0].x) & set(curves[1].x)


@pytest.mark.parametrize("label", ["as-published", "none"])
def test_question_never_draws_an_unproven_trial_as_private(make_sweep, label):
    trials = make_sweep("temperature", (0.1, 0.2), epsilons=(10.0,), guarantee_label=label)
    styles = [curve.style for curve in content_of(trials, "temperature").panels[0].curves]
    assert not {style.colour for style in styles} & set(PRIVATE_COLOURS)
    assert all("not proven" in style.label or "no guarantee" in style.label for style in styles)


def test_question_title_states_epsilon_of_proven_trials_alone(make_sweep):
    def published(value):
        return {"guarantee_label": "as-published", "target_epsilon": 3.0} if value == 0.1 else {}

    trials = make_sweep("temperature", (0.1, 0.2), published, epsilons=(10.0,))
    assert "ε = 10, δ = 1.5e-06" in content_of(trials, "temperature").title


def test_question_without_a_guarantee_label_claims_none(make_sweep):
    trials = make_sweep("temperature", (0.1,), epsilons=(10.0,)).drop(columns="guarantee_label")
    assert "NO GUARANTEE" in content_of(trials, "temperature").title


def test_question_of_private_data_shows_proven_trials_alone(make_sweep):
    def seeded(value):
        return {"guarantee_label": "none"} if value == 0.1 else {}

    trials = make_sweep("temperature", (0.1, 0.2), seeded, data_is="private")
    assert [c.names for c in content_of(trials, "temperature").panels[0].curves] == [["0.2"]]


def test_question_shows_recall_of_both_directions(make_sweep):
    names = ("image_to_text_recall_at_10", "text_to_image_recall_at_10")
    trials = make_sweep("lora_layers", ("Q", "V"), scores=names).drop(columns="knn_accuracy")
    assert [p.y_label for p in content_of(trials, "lora-layers").panels] == [
        "Image → text recall at 10 (%)",
        "Text → image recall at 10 (%)",
    ]


def test_question_shows_noised_scores(make_sweep):
    trials = make_sweep("temperature", (0.1, 0.2), data_is="private", scores=("noised_knn_accuracy",))
    trials = trials.drop(columns="knn_accuracy")
    assert [p.y_label for p in content_of(trials, "temperature").panels] == ["Noised k-NN accuracy (%)"]


def test_question_along_another_column_draws_against_it(make_sweep):
    asked = QUESTIONS["ablation"].along("embedding_dim")
    content = content_of(make_sweep("embedding_dim", (128, 64)), asked)
    assert [name for _, name in content.panels[0].axis.ticks] == ["64", "128"]


def test_tables_have_readable_names_and_no_column_names(batches):
    page = as_markdown(content_of(batches, "batch-size"))
    assert "Expected batch size B" in page
    assert "expected_batch_size" not in page
    assert "knn_accuracy" not in page


def test_page_shows_no_epsilon_spent_by_a_trial_without_guarantee(make_sweep):
    trials = make_sweep("temperature", (0.1,), epsilons=(10.0,), guarantee_label="none", epsilon=7.77)
    content = content_of(trials, "temperature")
    tables = [table for _, table in content.tables]
    assert "7.77" not in " ".join([content.title, *content.notes, *map(str, tables)])


def test_tables_keep_the_axis_whatever_its_values(make_sweep):
    tables = content_of(make_sweep("num_augmentations", (1,)), "num-augmentations").tables
    assert "Augmented copies Nₐ" in tables[0][1].heading


def test_question_keeps_trials_that_lack_a_split(make_sweep):
    trials = make_sweep("temperature", (0.1, 0.2), epsilons=(10.0,)).assign(num_augmentations=math.nan)
    assert content_of(trials, "temperature").panels[0].curves[0].names == ["0.1", "0.2"]


def test_question_of_many_curves_draws_no_two_alike(make_sweep):
    trials = make_sweep("num_augmentations", (0, 1, 2, 3, 4, 5, 6)).assign(temperature=0.2)
    styles = [c.style for c in content_of(trials, "temperature").panels[0].curves]
    assert len({(style.colour, style.dash) for style in styles}) == len(styles) == 14


def test_options_are_named_in_words(make_sweep):
    trials = make_sweep("option", ("plain", "schedule", "automatic-clipping"))
    content = content_of(trials, "ablation")
    names = {row[0] for row in content.tables[0][1].rows}
    assert {"plain", "learning-rate schedule", "automatic clipping"} <= names
