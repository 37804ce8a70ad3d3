"""Scores on the way: when, of which network, and for whose eyes."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest

from dashboards.compose.questions import QUESTIONS
from dpgcl_core.release.metrics import METRICS
from tests.trainers.conftest import make_config, make_data, make_records
from tests.trainers.files.test_checkpoint import _crashed, _folder
from trainers.config.training import EvaluationConfig, TrainingConfig
from trainers.data.dataset import TrainingData
from trainers.training.loop import TrainingResult, train

pytestmark = pytest.mark.ci  # trainings and sweeps of seconds each

DURING = ("knn_accuracy_during", "linear_probe_accuracy_during")


def _config(every: int = 2, **changes: object) -> TrainingConfig:
    evaluation = EvaluationConfig(also_untrained=True, record_every_steps=1, score_every_steps=every)
    return make_config(evaluation=evaluation, **changes)


def _without_labels() -> TrainingData:
    records = make_records(60, labels=False)
    return dataclasses.replace(make_data(), train=records, index=records, queries=records)


@functools.cache
def _trained(every: int) -> TrainingResult:
    """A seeded training with scores after every so many steps."""
    return train(_config(every, seeded_non_private=True), make_data())


def test_scores_are_taken_before_training_and_every_so_many_steps() -> None:
    series = _trained(2).series
    for name in DURING:
        assert [step for step, _ in series[name]] == [0, 2, 4, 6]


def test_no_scores_are_taken_on_the_way_unless_asked_for() -> None:
    series = _trained(0).series
    assert "train_loss" in series
    assert not any(name.endswith("_during") for name in series)


def test_first_and_last_scores_on_the_way_are_the_untrained_and_the_final_ones() -> None:
    result = _trained(2)
    for name in DURING:
        scores, final = dict(result.series[name]), name.removesuffix("_during")
        assert scores[0] == result.metrics[f"untrained_{final}"]
        assert scores[6] == result.metrics[final]


def test_records_without_labels_are_scored_by_view_retrieval() -> None:
    series = train(_config(), _without_labels()).series
    assert [step for step, _ in series["view_retrieval_top1_during"]] == [0, 2, 4, 6]
    assert "view_retrieval_top10_during" not in series


@pytest.mark.parametrize("evaluation_is_public", [True, False])
def test_scores_on_the_way_of_private_records_need_public_evaluation(evaluation_is_public: bool) -> None:
    data = make_data(private=True, evaluation_is_public=evaluation_is_public)
    series = train(_config(), data).series
    assert set(series) == (set(DURING) if evaluation_is_public else set())


def test_scores_on_the_way_change_no_weight() -> None:
    losses = [_trained(every).series["train_loss"] for every in (0, 1)]
    assert losses[0] == losses[1]


def test_seeded_resume_has_the_scores_of_the_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, whole = _config(1, seeded_non_private=True), _trained(1)
    _crashed(monkeypatch, tmp_path, 3, seeded_non_private=True, evaluation=config.evaluation)
    resumed = train(config, make_data(), checkpoints=_folder(tmp_path))
    for name in DURING:
        assert resumed.series[name] == whole.series[name]


def test_convergence_is_drawn_from_series_that_trainings_keep() -> None:
    kept = {name for name in METRICS if name.endswith("_during")}
    assert kept <= set(QUESTIONS["convergence"].series)
    assert kept >= {*DURING, "view_retrieval_top1_during"}
