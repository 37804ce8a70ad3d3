"""Outcomes of scores: a number for each scored record; their mean is the score, their variance its chance."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from dashboards.compose.display_names import score_title
from dpgcl_core.release.metrics import Release, find_metric, is_reference
from tests.trainers.evaluation.test_caption_scores import network_of
from tests.trainers.evaluation.test_pair_scores import tiny_encoder
from trainers.config.training import ClassifierConfig, EvaluationConfig, NetworkConfig, ViewConfig
from trainers.data.dataset import AnyRecords, TrainingData
from trainers.data.records import Records
from trainers.data.shapes import SHAPE_NAMES, make_shape_pairs
from trainers.evaluation.features import embed_features, first_records, linear_probe_scores
from trainers.evaluation.linear_probe import fit_linear_probe
from trainers.evaluation.outcomes import (
    Score,
    auc_score,
    balanced_score,
    exp_score,
    mean_score,
    ratio_score,
)
from trainers.evaluation.retrieval import share_of_texts
from trainers.evaluation.scorer import Scoring
from trainers.evaluation.untrained_scores import reference_scores
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
    config = EvaluationConfig(max_index_records=10, max_query_records=max_records)
    return task.evaluate(
        network,
        Scoring(
            index=records,
            queries=records,
            config=config,
            view_config=ViewConfig(),
            seed=seed,
            device="cpu",
            class_names=SHAPE_NAMES,
        ),
    )


@pytest.mark.parametrize(
    ("task", "network", "records", "names"),
    [
        (IMAGES, encoder, images, {"knn_accuracy", "linear_probe_accuracy"}),
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
                Scoring(
                    index=records,
                    queries=rows.take(np.array([place])),
                    config=EvaluationConfig(max_index_records=10),
                    view_config=ViewConfig(),
                    seed=0,
                    device="cpu",
                ),
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


def _accuracies(generator: np.random.Generator) -> Score:
    labels = generator.choice(3, size=300, p=[0.7, 0.2, 0.1])
    return balanced_score(generator.random(300) < np.array([0.95, 0.9, 0.8])[labels], labels)


def test_balanced_accuracy_is_that_of_scikit_learn_and_has_its_variance() -> None:
    generator = np.random.default_rng(0)
    labels, answers = generator.choice(4, size=(2, 90), p=[0.6, 0.2, 0.1, 0.1])
    score = balanced_score(answers == labels, labels)
    assert score == pytest.approx(balanced_accuracy_score(labels, answers), abs=1e-12)
    assert score.outcomes.mean() == pytest.approx(score, abs=1e-12)
    true, told = _spread(_accuracies)
    assert told == pytest.approx(true, rel=0.15)


def _margins(num_records: int = 70) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Whole numbers, so that many are equal, of some positive and more negative records."""
    generator = np.random.default_rng(1)
    is_positive = generator.random(num_records) < 0.3
    return np.round(generator.normal(size=num_records) + is_positive), is_positive


def test_auc_is_that_of_scikit_learn() -> None:
    margins, is_positive = _margins()
    score = auc_score(margins, is_positive)
    assert len(np.unique(margins)) < 10
    assert score == pytest.approx(roc_auc_score(is_positive, margins), abs=1e-12)
    assert score.outcomes.mean() == pytest.approx(score, abs=1e-12)


def test_auc_has_the_variance_of_delong() -> None:
    """DeLong et al. (1988), equations 5 to 7, over all pairs; their S has n − 1 where this has n."""
    margins, is_positive = _margins()
    ahead = margins[is_positive][:, None] - margins[~is_positive]
    pairs_of = (ahead > 0) + 0.5 * (ahead == 0)
    variance = sum(v.var() / len(v) for v in (pairs_of.mean(axis=1), pairs_of.mean(axis=0)))
    outcomes = auc_score(margins, is_positive).outcomes
    assert outcomes.var() / len(outcomes) == pytest.approx(variance, rel=1e-12)


def test_auc_of_the_linear_probe_is_of_the_larger_label() -> None:
    generator = np.random.default_rng(2)
    labels = np.arange(80) % 2 + 5
    features = np.float32(generator.normal(size=(80, 3)) + 2 * (labels[:, None] == 6))
    found = linear_probe_scores(features[:40], labels[:40], features[40:], labels[40:])
    logits = fit_linear_probe(features[:40], labels[:40]).logits(features[40:]).numpy()
    assert found["linear_probe_auc"] == pytest.approx(roc_auc_score(labels[40:], logits[:, 1] - logits[:, 0]))
    assert found["linear_probe_auc"] > 0.9


def relabelled(labels: NDArray[np.int64]) -> Records:
    return dataclasses.replace(images(len(labels)), labels=labels.astype(np.int64))


@pytest.mark.parametrize(
    ("labels", "further"),
    [
        (np.arange(24) % 3, set()),
        (np.arange(24) % 2, {"knn_balanced_accuracy", "linear_probe_balanced_accuracy", "linear_probe_auc"}),
        (np.arange(24) % 4 % 3, {"knn_balanced_accuracy", "linear_probe_balanced_accuracy"}),
        (np.zeros(24), set()),
    ],
)
def test_scores_fit_the_labels(labels: NDArray[np.int64], further: set[str]) -> None:
    records = relabelled(labels)
    found = scores_of(IMAGES, encoder(), records, max_records=None)
    assert set(found) == {"knn_accuracy", "linear_probe_accuracy"} | further
    of_pixels = reference_scores(data_of(records), EvaluationConfig())
    assert {f"raw_pixels_{name}" for name in further} <= set(of_pixels)


def data_of(records: Records) -> TrainingData:
    return TrainingData(
        train=records, index=records, queries=records, train_is_public=True, evaluation_is_public=True
    )


def test_balanced_scores_are_of_the_same_answers_as_the_accuracies() -> None:
    records = relabelled(np.arange(24) % 7 % 2)
    found = scores_of(IMAGES, encoder(), records, max_records=None)
    assert records.labels is not None
    labels = first_records(records, None).labels
    assert labels is not None
    for by in ("knn", "linear_probe"):
        accuracy = found[f"{by}_accuracy"]
        assert isinstance(accuracy, Score)
        shares = [accuracy.outcomes[labels == label].mean() for label in (0, 1)]
        assert found[f"{by}_balanced_accuracy"] == pytest.approx(np.mean(shares), abs=1e-12)


@pytest.mark.parametrize("diverged", [False, True])
def test_classifier_of_two_classes_has_a_balanced_accuracy_and_an_auc(diverged: bool) -> None:
    kind = ClassifierConfig(num_classes=2)
    network = Classifier(encoder(), SHAPE, num_classes=2, trained_layers=kind.trained_layers)
    with torch.no_grad():
        network.classify.weight.normal_(generator=torch.Generator().manual_seed(0))
        if diverged:
            network.classify.weight.fill_(float("nan"))
    records = first_records(relabelled(np.arange(24) % 3 % 2), None)
    found = scores_of(CLASSES, network, records, max_records=None)
    assert {"classifier_accuracy", "classifier_balanced_accuracy", "classifier_auc"} <= set(found)
    asked = embed_features(network, records.images)
    with torch.no_grad():
        logits = network.logits_of(torch.from_numpy(asked)).nan_to_num().numpy()
    expected = roc_auc_score(records.labels, logits[:, 1] - logits[:, 0])
    assert found["classifier_auc"] == pytest.approx(expected, abs=1e-12)


def test_scores_that_fit_the_labels_pass_the_gate_as_accuracies_do() -> None:
    probes = ["knn_balanced_accuracy", "linear_probe_balanced_accuracy", "linear_probe_auc"]
    names = [*probes, "classifier_balanced_accuracy", "classifier_auc"]
    names += [f"{name}_during" for name in names] + [f"untrained_{name}" for name in names]
    names += [f"hog_{name}" for name in probes] + [f"transfer_{name}/digits" for name in probes]
    names += [f"public_start_transfer_{name}/digits" for name in probes]
    for name in names:
        assert (metric := find_metric(name)) is not None, name
        assert metric.release is Release.SCORE
        assert score_title(name.removesuffix("/digits").removeprefix("transfer_")) or is_reference(name)


def test_score_is_sent_and_kept_as_a_plain_number() -> None:
    score = mean_score([True, False])
    for plain in (pickle.loads(pickle.dumps(score)), copy.deepcopy(score)):
        assert type(plain) is float
        assert plain == 0.5
