"""Scores on several data sets: one row and one place on the axis for each."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dashboards.compose.figure import content_of, numbers_of
from dashboards.compose.repeats import num_trials
from dashboards.compose.transfer_rows import by_probe
from dashboards.dashboard_error import DashboardError
from dashboards.figures import write_all

pytestmark = pytest.mark.ci  # trainings and sweeps of seconds each

SCORES = ("knn_accuracy", "linear_probe_accuracy")


@pytest.fixture
def probed(make_trials):
    """Trials on Fashion-MNIST, each scored on digits and on faces as well."""
    trials = make_trials(sizes=(8,), snr=False, scored_on="fashion_mnist")
    random = np.random.default_rng(2)
    for dataset in ("digits", "npz-faces"):
        for score in SCORES:
            trials[f"transfer_{score}/{dataset}"] = random.uniform(0.5, 0.9, len(trials))
            trials[f"untrained_transfer_{score}/{dataset}"] = random.uniform(0.1, 0.4, len(trials))
    return trials.assign(run_id=[f"run{i}" for i in range(len(trials))])


def test_every_trial_has_a_row_for_each_data_set(probed):
    rows = by_probe(probed)
    assert sorted(rows["probe_dataset"].value_counts().items()) == [
        ("digits", 6),
        ("fashion_mnist", 6),
        ("npz-faces", 6),
    ]
    assert not any(str(name).startswith(("transfer_", "untrained_transfer_")) for name in rows)


def test_row_of_a_data_set_has_the_scores_on_it(probed):
    rows = by_probe(probed).set_index(["probe_dataset", "run_id"])
    for dataset, column in (
        ("digits", "transfer_knn_accuracy/digits"),
        ("npz-faces", "transfer_knn_accuracy/npz-faces"),
        ("fashion_mnist", "knn_accuracy"),
    ):
        expected = probed.set_index("run_id")
        assert rows.loc[(dataset, "run3"), "knn_accuracy"] == expected.loc["run3", column]
        untrained = expected.loc["run3", f"untrained_{column}"]
        assert rows.loc[(dataset, "run3"), "untrained_knn_accuracy"] == untrained


def test_trial_without_scores_on_a_data_set_has_no_row_of_it(probed):
    for score in SCORES:
        probed.loc[0, [f"transfer_{score}/digits", f"untrained_transfer_{score}/digits"]] = math.nan
    rows = by_probe(probed)
    assert len(rows[rows["probe_dataset"] == "digits"]) == 5


def test_private_trials_scored_nowhere_else_have_rows_of_probes_alone(probed):
    own = [*SCORES, *(f"untrained_{score}" for score in SCORES)]
    rows = by_probe(probed.drop(columns=own).assign(scored_on=None))
    assert set(rows["probe_dataset"]) == {"digits", "npz-faces"}


def test_trials_without_probes_are_refused_with_the_option_to_give(make_trials):
    with pytest.raises(DashboardError, match="--probe-datasets"):
        content_of(make_trials(), "transfer")


def test_figure_has_a_place_for_every_data_set(probed):
    content = content_of(probed, "transfer")
    names = content.panels[0].axis.names
    assert set(names.values()) == {"Digits", "Fashion-MNIST", "npz-faces"}
    assert [panel.y_label for panel in content.panels] == ["k-NN accuracy (%)", "Linear probe accuracy (%)"]


def test_untrained_network_has_its_own_score_on_every_data_set(probed):
    panel = content_of(probed, "transfer").panels[0]
    (untrained,) = [curve for curve in panel.curves if curve.style.label == "untrained network"]
    rows = by_probe(probed)
    means = rows.groupby(["probe_dataset", "repeat"])["untrained_knn_accuracy"].mean().groupby(level=0).mean()
    expected = [100 * means[name] for name in ("digits", "fashion_mnist", "npz-faces")]
    np.testing.assert_allclose(untrained.mean, expected)
    assert not panel.references


def test_numbers_have_a_row_for_each_data_set_and_epsilon(probed):
    numbers = numbers_of(probed, "transfer")
    references = numbers["guarantee"] == "reference"
    assert set(numbers.loc[references, "probe_dataset"]) == {
        f"untrained network, {name}" for name in ("Digits", "Fashion-MNIST", "npz-faces")
    }
    numbers = numbers[~references]
    assert len(numbers) == 6
    assert set(numbers["num_trials"]) == {3}


def test_trials_are_counted_once(probed):
    rows = by_probe(probed)
    assert len(rows) == 18
    assert num_trials(rows) == 6


def test_figure_and_tables_are_written(probed, tmp_path):
    paths = write_all(probed, tmp_path, "transfer")
    endings = ("png", "svg", "pdf", "csv", "md", "tex")
    assert {path.name for path in paths} == {f"transfer.{ending}" for ending in endings}
    assert "npz-faces" in (tmp_path / "transfer.md").read_text()


def test_options_of_an_ablation_have_names(make_sweep):
    trials = make_sweep("option", ("plain", "ema", "all"), epsilons=(10.0,))
    content = content_of(trials, "ablation")
    assert list(content.panels[0].axis.names.values()) == ["plain", "averaged weights", "all"]
