"""Station 11: the gate that keeps private-only numbers in."""

from __future__ import annotations

import pytest

from dpgcl_core.errors import ConfigError
from dpgcl_core.metrics import METRICS, Release, visible


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
