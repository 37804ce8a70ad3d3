"""Outcomes of scores: a number for each scored record; their mean is the score, their variance its chance."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.trainers.evaluation.test_captions import network_of
from tests.trainers.evaluation.test_pairs import tiny_encoder
from trainers.config.training import ClassifierConfig, EvaluationConfig, NetworkConfig, ViewConfig
from trainers.data.dataset import AnyRecords
from trainers.data.records import Records
from trainers.data.shapes import SHAPE_NAMES, make_shape_pairs
from trainers.evaluation.features import first_records
from trainers.evaluation.outcomes import Score, exp_score, mean_score, ratio_score
from trainers.evaluation.retrieval import share_of_texts
from trainers.models.classifier import Classifier
from trainers.models.encoder import build_encoder
from trainers.tasks import CAPTIONS, CLASSES, IMAGES, PAIRS
from trainers.tasks.task import AnyTask

SHAPE = (3, 32, 32)


def pairs(count: int = 24, seed: int = 0) -> AnyRecords:
    return make_shape_pairs(count, seed=seed, captions_per_image=2)


def images(count: int = 24, *, labelled: bool = True) -> Records:
    of_pairs = pairs(count)
    labels = of_pairs.labels if labelled else None
    return Records(images=np.asarray(of_pairs.images[np.arange(count)]), ids=of_pairs.ids, labels=labels)


def classifier() -> Classifier:
    encoder = build_encoder(NetworkConfig(), SHAPE, seed=0)
    kind = ClassifierConfig(num_classes=len(SHAPE_NAMES))
    return Classifier(encoder, SHAPE, num_classes=kind.num_classes, trained_layers=kind.trained_layers)


def encoder() -> Any:
    return build_encoder(NetworkConfig(), SHAPE, seed=0)


def scores_of(
    task: AnyTask, network: Any, records: AnyRecords, *, seed: int = 0, max_records: int | None = 17
) -> dict[str, float]:
    config = EvaluationConfig(few_shot=(1,), max_index_records=10, max_query_records=max_records)
    return task.evaluate(
        network,
        records,
        records,
        config,
        view_config=ViewConfig(),
        seed=seed,
        device="cpu",
        class_names=SHAPE_NAMES,
    )


@pytest.mark.parametrize(
    ("task", "network", "records", "names"),
    [
        (IMAGES, encoder, images, {"knn_accuracy", "linear_probe_accuracy", "few_shot_1_accuracy"}),
        (IMAGES, encoder, lambda: images(labelled=False), {"view_retrieval_top1", "view_retrieval_top10"}),
        (CLASSES, classifier, images, {"classifier_accuracy"}),
        (PAIRS, tiny_encoder, pairs, {"image_to_text_recall_at_1", "text_to_image_recall_at_5"}),
        (PAIRS, tiny_encoder, pairs, {"zero_shot_accuracy", "knn_accuracy"}),
        (
            CAPTIONS,
            network_of,
            pairs,
            {"caption_token_probability", "next_token_accuracy", "word_order_accuracy", "zero_shot_accuracy"},
        ),
    ],
)
def test_mean_of_the_outcomes_is_the_score(
    task: AnyTask, network: Callable[[], Any], records: Callable[[], AnyRecords], names: set[str]
) -> None:
    scores = scores_of(task, network(), records())
    assert names <= set(scores)
    for name, score in scores.items():
        assert isinstance(score, Score), name
        assert score.outcomes.shape == (17,), name
        assert score.outcomes.mean() == pytest.approx(score, abs=1e-12), name
        assert score.outcomes.dtype == np.float64


def test_outcome_of_an_accuracy_is_whether_the_record_was_answered_rightly() -> None:
    assert mean_score(np.array([3, 1]) == np.array([3, 2])).outcomes.tolist() == [1.0, 0.0]


def test_outcome_of_an_image_is_the_share_of_its_captions_where_all_have_as_many() -> None:
    hits = np.array([True, False, True, True])
    assert share_of_texts(hits, np.array([0, 0, 1, 1]), 2).outcomes.tolist() == [0.5, 1.0]


def test_outcomes_are_in_the_order_of_the_records_that_are_scored() -> None:
    records = images(24)
    scores = scores_of(IMAGES, encoder(), records, max_records=None)
    rows = first_records(records, None)
    for name in ("knn_accuracy", "linear_probe_accuracy"):
        alone = [
            IMAGES.evaluate(
                encoder(),
                records,
                rows.take(np.array([place])),
                EvaluationConfig(max_index_records=10),
                view_config=ViewConfig(),
                seed=0,
                device="cpu",
            )[name]
            for place in range(len(rows))
        ]
        assert isinstance(score := scores[name], Score)
        assert score.outcomes.tolist() == alone
        assert 0 < score < 1  # or any order would do


@pytest.mark.parametrize(
    ("task", "network"), [(IMAGES, encoder), (PAIRS, tiny_encoder), (CLASSES, classifier)]
)
def test_records_that_are_scored_are_the_same_whatever_the_seed(
    task: AnyTask, network: Callable[[], Any]
) -> None:
    records = pairs() if task is PAIRS else images()
    one, other = (scores_of(task, network(), records, seed=seed) for seed in (0, 1))
    for name, score in one.items():
        assert isinstance(score, Score)
        assert isinstance(again := other[name], Score)
        assert score.outcomes.tolist() == again.outcomes.tolist(), name


def _spread(score: Callable[[np.random.Generator], Score]) -> tuple[float, float]:
    """The variance of a score over many samples, and the mean of what its outcomes say of it."""
    generator = np.random.default_rng(3)
    found = [score(generator) for _ in range(1000)]
    told = [each.outcomes.var(ddof=1) / len(each.outcomes) for each in found]
    return float(np.var(found, ddof=1)), float(np.mean(told))


def _captions(generator: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Images of one to nine captions, most of which are found together or not at all."""
    counts = generator.integers(1, 10, 200).astype(np.float64)
    return counts * (generator.random(200) < 0.7), counts


@pytest.mark.parametrize(
    "score",
    [
        lambda generator: ratio_score(*_captions(generator)),
        lambda generator: exp_score(mean_score(generator.normal(size=200))),
    ],
)
def test_outcomes_have_the_variance_of_the_score(score: Callable[[np.random.Generator], Score]) -> None:
    true, told = _spread(score)
    assert told == pytest.approx(true, rel=0.15)  # three standard errors of a variance over 1000 samples


def test_score_is_sent_and_kept_as_a_plain_number() -> None:
    score = mean_score([True, False])
    for plain in (pickle.loads(pickle.dumps(score)), copy.deepcopy(score)):
        assert type(plain) is float
        assert plain == 0.5
