"""Stage 11: the gate that keeps private-only numbers in."""

from __future__ import annotations

import pytest

from dpgcl_core.errors import ConfigError
from dpgcl_core.release.metrics import METRICS, Release, find_metric, visible


@pytest.mark.parametrize("name", [n for n, m in METRICS.items() if m.release is Release.PRIVATE_ONLY])
@pytest.mark.parametrize("evaluation_data_is_public", [True, False])
def test_private_only_metric_is_withheld_for_private_data(name: str, evaluation_data_is_public: bool) -> None:
    assert not visible(
        {name: 1.0}, training_data_is_public=False, evaluation_data_is_public=evaluation_data_is_public
    )


@pytest.mark.parametrize("name", [n for n, m in METRICS.items() if m.release is Release.SCORE])
def test_score_needs_public_evaluation_data(name: str) -> None:
    for public in (True, False):
        shown = visible({name: 1.0}, training_data_is_public=False, evaluation_data_is_public=public)
        assert (name in shown) == public


def test_everything_is_shown_for_public_data() -> None:
    values = {name: 1.0 for name in METRICS}
    assert visible(values, training_data_is_public=True, evaluation_data_is_public=True) == values


def test_by_products_of_the_method_sheet_are_private_only() -> None:
    for name in (
        "realised_batch_size",
        "num_groups",
        "num_non_finite_groups",
        "clip_fraction",
        "step_seconds",
        "train_loss",
        "snr",
    ):
        assert METRICS[name].release is Release.PRIVATE_ONLY


def test_undeclared_metric_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown metric 'loss'"):
        visible({"loss": 1.0}, training_data_is_public=True, evaluation_data_is_public=True)


@pytest.mark.parametrize("way", ["image_to_text", "text_to_image"])
@pytest.mark.parametrize("k", [1, 5, 10])
@pytest.mark.parametrize(("before", "behind"), [("", ""), ("untrained_", ""), ("", "_during")])
def test_recall_is_a_score(way: str, k: int, before: str, behind: str) -> None:
    assert METRICS[f"{before}{way}_recall_at_{k}{behind}"].release is Release.SCORE


@pytest.mark.parametrize("name", ["zero_shot_accuracy", "untrained_zero_shot_accuracy"])
def test_zero_shot_accuracy_is_a_score(name: str) -> None:
    assert METRICS[name].release is Release.SCORE


@pytest.mark.parametrize("before", ["", "untrained_"])
def test_zero_shot_accuracy_of_a_probe_is_a_score(before: str) -> None:
    metric = find_metric(f"{before}transfer_zero_shot_accuracy/eurosat")
    assert metric is not None
    assert metric.release is Release.SCORE


@pytest.mark.parametrize("name", [n for n in METRICS if "recall" in n])
def test_recall_is_never_noised(name: str) -> None:
    """A noised recall would need noise for all queries, so no gate lets a number of this name through."""
    assert METRICS[name].release is not Release.NOISED
    with pytest.raises(ConfigError, match="unknown metric"):
        visible({f"noised_{name}": 0.5}, training_data_is_public=True, evaluation_data_is_public=True)


def test_noised_scores_are_counts_of_single_answers() -> None:
    noised = {name for name, metric in METRICS.items() if metric.release is Release.NOISED}
    assert noised == {"noised_knn_accuracy", "noised_linear_probe_accuracy", "noised_snr_first_step"}
