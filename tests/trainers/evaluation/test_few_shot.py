"""Few-shot probes: so many records of each class, no record twice, the mean of the draws."""

from __future__ import annotations

import numpy as np
import pytest

from dpgcl_core.errors import ConfigError
from trainers.config.training import EvaluationConfig
from trainers.evaluation.features import (
    feature_scores,
    few_shot_accuracy,
    few_shot_rows,
    linear_probe_accuracy,
)

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 3, 200)
FEATURES = (np.eye(3)[LABELS] + RNG.normal(0, 0.6, (200, 3))).astype(np.float32)
ASKED = (np.eye(3)[LABELS] + RNG.normal(0, 0.6, (200, 3))).astype(np.float32)


@pytest.mark.parametrize("per_class", [1, 2, 10])
def test_draws_have_so_many_of_each_class_and_no_record_in_common(per_class: int) -> None:
    draws = few_shot_rows(LABELS, per_class)
    assert len(draws) == 5
    for rows in draws:
        assert np.bincount(LABELS[rows]).tolist() == [per_class] * 3
    assert len(np.unique(np.concatenate(draws))) == 5 * 3 * per_class


def test_small_class_gives_what_it_has_in_one_draw() -> None:
    (rows,) = few_shot_rows(np.array([0, 0, 0, 1]), per_class=2)
    assert rows.tolist() == [0, 1, 3]


def test_score_is_the_mean_of_the_draws_probes() -> None:
    each = [
        linear_probe_accuracy(FEATURES[rows], LABELS[rows], ASKED, LABELS)
        for rows in few_shot_rows(LABELS, 2)
    ]
    found = few_shot_accuracy(FEATURES, LABELS, ASKED, LABELS, per_class=2)
    assert found == pytest.approx(np.mean(each))
    assert len(set(each)) > 1


def test_more_records_per_class_score_higher() -> None:
    one, ten = (few_shot_accuracy(FEATURES, LABELS, ASKED, LABELS, per_class=k) for k in (1, 10))
    assert ten > one + 0.05


def test_scores_are_named_after_the_number_and_only_those_asked_for() -> None:
    config = EvaluationConfig(few_shot=(1, 5))
    scores = feature_scores(FEATURES, LABELS, ASKED, LABELS, config)
    assert {"few_shot_1_accuracy", "few_shot_5_accuracy"} == {n for n in scores if n.startswith("few_shot")}


def test_number_that_has_no_declared_score_is_refused() -> None:
    with pytest.raises(ConfigError, match="few_shot takes 1, 2, 5, 10 per class; got 3"):
        EvaluationConfig(few_shot=(1, 3))
