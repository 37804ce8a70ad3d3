"""The group-size figure: its numbers, its order, and what it must say or withhold."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from dashboards.compose.curves import NON_PRIVATE_COLOUR
from dashboards.compose.figure import content_of, numbers_of
from dashboards.compose.panels import GRADIENT_SNR, SCORES
from dashboards.compose.questions import QUESTIONS
from dashboards.compose.selection import shown_trials
from dashboards.compose.tables import summary_table
from dashboards.dashboard_error import DashboardError
from dashboards.figures import as_markdown
from dashboards.render.pictures import pictures_of
from tests.dashboards.conftest import TUNING_COST, by_hand
from tests.dashboards.render.drawn import said


def group_size_content(trials):
    return content_of(trials, "group-size")


def summary(trials):
    question = QUESTIONS["group-size"]
    return summary_table(shown_trials(trials, question), question)


def score_panels(content):
    return [panel for panel in content.panels if panel.legend == SCORES]


def snr_panel(content):
    return next((panel for panel in content.panels if panel.legend == GRADIENT_SNR), None)


def curve_of(content, epsilon, panel=0):
    label = "ε = ∞ (non-private)" if math.isinf(epsilon) else f"ε = {epsilon:g}"
    return next(curve for curve in score_panels(content)[panel].curves if curve.style.label == label)


def test_figure_snr_panel_has_the_means_computed_by_hand(make_trials):
    trials = make_trials()
    curve = next(
        c for c in snr_panel(group_size_content(trials)).curves if c.style.label.startswith("with aug")
    )
    wanted = [by_hand(trials, "snr_first_step", size, 10.0)[0] for size in (2, 8, 64, "batch")]
    np.testing.assert_allclose(curve.mean, wanted)


def test_figure_snr_of_unaugmented_trials_counts_as_without_augmentation(make_trials):
    trials = make_trials(augmentations=(0,)).drop(columns="snr_first_step_no_augmentation")
    assert [curve.style.label for curve in snr_panel(group_size_content(trials)).curves] == [
        "without augmentation"
    ]


def test_figure_axis_is_logarithmic_in_the_group_size(make_trials):
    axis = group_size_content(make_trials(sizes=(2, 8, 64))).panels[0].axis
    assert list(axis.positions.values()) == [1.0, 3.0, 6.0]


def test_figure_states_epsilon_delta_and_the_relation(make_trials):
    text = said(group_size_content(make_trials()))
    assert "Fashion-MNIST: DP-GCL, ε = 10, δ = 1.5e-06 (add or remove one record)" in text


def test_figure_states_noise_batch_and_steps(make_trials):
    text = said(group_size_content(make_trials()))
    assert all(part in text for part in ("σ = 1.25", "B = 1200 expected", "T = 600"))


def test_figure_says_what_tuning_costs(make_trials):
    assert TUNING_COST in said(group_size_content(make_trials()))


def test_figure_states_what_the_error_bars_are(make_trials):
    assert "mean ± standard error over 3 repeats" in said(group_size_content(make_trials()))


def test_figure_draws_the_untrained_network_with_its_band(make_trials):
    (reference,) = score_panels(group_size_content(make_trials()))[0].references
    assert reference.mean == pytest.approx(51.0)
    assert reference.standard_error == pytest.approx(1 / math.sqrt(3))


def test_figure_tells_numbers_of_augmentations_apart_by_dashes(make_trials):
    curves = score_panels(group_size_content(make_trials(augmentations=(1, 4))))[0].curves
    assert len({(curve.style.colour, curve.style.dash) for curve in curves}) == len(curves) == 4


def test_figure_of_private_data_has_no_curve_without_noise(make_trials):
    content = group_size_content(make_trials(data_is="private"))
    assert all(
        curve.style.colour != NON_PRIVATE_COLOUR for panel in score_panels(content) for curve in panel.curves
    )


@pytest.mark.parametrize("augmentations", [(0,), (1,)])
def test_figure_tells_the_snr_of_both_samplings_apart(make_trials, augmentations):
    trials = make_trials(augmentations=augmentations)
    both = pd.concat([trials.assign(sampled=name) for name in ("groups", "records")], ignore_index=True)
    curves = snr_panel(group_size_content(both)).curves
    looks = {(c.style.colour, c.style.marker, c.style.dash, c.style.hollow) for c in curves}
    assert len(looks) == len(curves) >= 2


def test_figure_of_many_snrs_leaves_those_without_augmentation_to_the_table(make_trials):
    trials = make_trials(augmentations=(1,))
    many = pd.concat(
        [
            trials.assign(sampled=name, target_epsilon=trials["target_epsilon"].where(finite, epsilon))
            for name in ("groups", "records")
            for epsilon in (1.0, 3.0)
            for finite in [trials["target_epsilon"] == float("inf")]
        ],
        ignore_index=True,
    )
    labels = [curve.style.label for curve in snr_panel(group_size_content(many)).curves]
    assert len(labels) == len(set(labels)) == 4
    assert not any("augmentation" in label for label in labels)
    few = snr_panel(group_size_content(trials)).curves
    assert any("without augmentation" in curve.style.label for curve in few)


def test_figure_of_private_data_has_no_snr(make_trials):
    assert snr_panel(group_size_content(make_trials(data_is="private"))) is None


def test_figure_of_private_data_says_what_is_withheld(make_trials):
    text = said(group_size_content(make_trials(data_is="private")))
    assert "training data are private: trials with ε = ∞" in text


def test_figure_counts_untagged_data_as_private(make_trials):
    content = group_size_content(make_trials().drop(columns="data_is"))
    assert snr_panel(content) is None


def test_figure_without_scores_has_no_picture_but_its_numbers_and_says_why(make_trials):
    content = group_size_content(make_trials(scores=(), data_is="private"))
    assert pictures_of(content) == {}
    text = as_markdown(content)
    assert "ε spent" in text
    assert "9.99" in text
    assert "No scores: they would be computed from private records" in text


def test_figure_of_private_data_without_noise_is_refused(make_trials):
    with pytest.raises(DashboardError, match="private"):
        group_size_content(make_trials(data_is="private", epsilons=(math.inf,)))


def test_figure_of_seeded_trials_claims_no_guarantee(make_trials):
    assert "NO GUARANTEE" in said(group_size_content(make_trials(guarantee_label="none")))


def test_figure_says_when_trials_are_missing(make_trials):
    assert "over 2 to 3 repeats (some trials are missing)" in said(group_size_content(make_trials()[1:]))


def test_figure_leaves_out_a_point_without_trials(make_trials):
    trials = make_trials()
    gone = (trials["group_size"] == 8) & (trials["target_epsilon"] == 10.0)
    content = group_size_content(trials[~gone])
    assert curve_of(content, 10.0).names == ["2", "64", "batch"]
    assert curve_of(content, math.inf).names == ["2", "8", "64", "batch"]


def test_figure_says_when_restarts_spent_more_than_the_target(make_trials):
    text = said(group_size_content(make_trials(epsilon=11.5)))
    assert "12 of 12 private trials spent more than their target ε, up to 11.5" in text


def test_figure_refuses_to_average_trials_that_are_no_repeats(make_trials):
    mixed = pd.concat([make_trials(temperature=0.1), make_trials(temperature=0.5)])
    with pytest.raises(DashboardError, match=r"temperature \(0\.1, 0\.5\)"):
        group_size_content(mixed)


def test_figure_names_the_params_it_lacks(make_trials):
    with pytest.raises(DashboardError, match="group_size"):
        group_size_content(make_trials().drop(columns="group_size"))


def test_summary_table_has_mean_error_and_n_of_each_cell(make_trials):
    trials = make_trials()
    table = summary(trials)
    row = table[(table["group_size"] == 64) & (table["target_epsilon"] == math.inf)].iloc[0]
    mean, error = by_hand(trials, "linear_probe_accuracy", 64, math.inf)
    assert row["linear_probe_accuracy_mean"] == pytest.approx(mean)
    assert row["linear_probe_accuracy_standard_error"] == pytest.approx(error)
    assert row["linear_probe_accuracy_n"] == 3


def test_summary_table_of_private_data_withholds_snr_and_unnoised_trials(make_trials):
    table = summary(make_trials(data_is="private"))
    assert not [name for name in table if name.startswith("snr")]
    assert set(table["target_epsilon"]) == {10.0}


def test_summary_csv_keeps_every_digit(make_trials, tmp_path):
    trials = make_trials()
    numbers_of(trials, "group-size").to_csv(tmp_path / "numbers.csv")
    found = pd.read_csv(tmp_path / "numbers.csv")
    np.testing.assert_array_equal(
        found.loc[found["guarantee"] != "reference", "knn_accuracy_mean"],
        summary(trials)["knn_accuracy_mean"],
    )


def test_summary_text_states_epsilon_delta_and_the_notes(make_trials):
    words_of_file = as_markdown(content_of(make_trials(), "group-size"))
    assert "ε = 10, δ = 1.5e-06" in words_of_file
    assert TUNING_COST in words_of_file
