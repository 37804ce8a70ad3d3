"""Scores of frozen features: against slow oracles, and finite whatever the network does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from dpgcl_core.errors import DataError
from dpgcl_core.release.metrics import METRICS
from trainers.config.training import EvaluationConfig, NetworkConfig, ViewConfig
from trainers.data.records import Records
from trainers.evaluation.features import (
    describe_by,
    embed_features,
    evaluate,
    first_by_hash,
    knn_rule,
    label_scores,
    linear_probe_scores,
    view_retrieval,
)
from trainers.evaluation.linear_probe import PENALTY, fit_linear_probe, standardization_of
from trainers.evaluation.scorer import Scoring
from trainers.models.encoder import Encoder, build_encoder
from trainers.views.image_views import make_views, normalise

SHAPE = (1, 8, 8)
NO_AUGMENTATION = ViewConfig(
    min_crop_area=1.0, max_crop_area=1.0, flip_prob=0.0, brightness=0.0, contrast=0.0
)


class _Constant(nn.Module):
    """A backbone that maps every image to one vector."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, images: Tensor) -> Tensor:
        return torch.full((len(images), 64), self.value)


def _identity() -> Encoder:
    return Encoder(nn.Flatten(), 64, 16)


def _records(n: int, *, num_classes: int = 3, labelled: bool = True, seed: int = 0) -> Records:
    rng = np.random.default_rng(seed)
    return Records(
        images=rng.integers(0, 256, (n, *SHAPE), dtype=np.uint8),
        ids=rng.integers(0, 2**63, n).astype(np.uint64),
        labels=rng.integers(0, num_classes, n) if labelled else None,
    )


def knn_accuracy(
    index: NDArray[np.float32],
    index_labels: NDArray[np.int64],
    queries: NDArray[np.float32],
    query_labels: NDArray[np.int64],
    num_neighbors: int = 3,
) -> float:
    return float(np.mean(knn_rule(index, index_labels, num_neighbors)(queries) == query_labels))


def _scores(
    index: Records, queries: Records, encoder: Encoder | None = None, **config: int
) -> dict[str, float]:
    scoring = _scoring(ViewConfig(), index=index, queries=queries, config=EvaluationConfig(**config))
    return evaluate(encoder or _identity(), scoring)


def _scoring(view_config: ViewConfig, **changes: Any) -> Scoring:
    given: dict[str, Any] = {"index": None, "queries": _records(1), "config": EvaluationConfig(), "seed": 0}
    return Scoring(**given | changes, view_config=view_config, device="cpu")


def test_features_equal_those_of_the_encoder() -> None:
    encoder, records = build_encoder(NetworkConfig(), SHAPE, seed=0), _records(7)
    expected = encoder.features(normalise(torch.from_numpy(records.images))).detach().numpy()
    np.testing.assert_allclose(embed_features(encoder, records.images, batch_size=3), expected, atol=1e-5)


def test_features_leave_every_module_in_its_mode() -> None:
    encoder = build_encoder(NetworkConfig(), SHAPE, seed=0).train()
    encoder.head.eval()
    embed_features(encoder, _records(3).images)
    assert encoder.backbone.training
    assert not encoder.head.training


def test_features_restore_mode_after_failure() -> None:
    encoder = build_encoder(NetworkConfig(), (3, 8, 8), seed=0).train()
    with pytest.raises(RuntimeError):
        embed_features(encoder, _records(3).images)
    assert encoder.training


def test_features_are_taken_in_evaluation_mode() -> None:
    encoder = Encoder(nn.Sequential(nn.Flatten(), nn.Dropout(0.5)), 64, 16).train()
    images = _records(3).images
    np.testing.assert_array_equal(embed_features(encoder, images), embed_features(_identity(), images))


def test_features_of_no_image_are_empty() -> None:
    assert embed_features(_identity(), _records(3).images[:0]).shape == (0, 64)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_features_that_are_not_finite_become_zero(value: float) -> None:
    features = embed_features(Encoder(_Constant(value), 64, 16), _records(3).images)
    np.testing.assert_array_equal(features, np.zeros((3, 64)))


def test_knn_equals_slow_oracle() -> None:
    rng = np.random.default_rng(1)
    index, queries = (rng.normal(size=(n, 5)).astype(np.float32) for n in (60, 40))
    index_labels, query_labels = rng.integers(0, 3, 60), rng.integers(0, 3, 40)
    hits = 0
    for query, label in zip(queries, query_labels, strict=True):
        cosines = [query @ row / np.linalg.norm(query) / np.linalg.norm(row) for row in index]
        votes = Counter(index_labels[np.argsort(cosines)[::-1][:3]].tolist())
        most = max(votes.values())
        hits += min(vote for vote in votes if votes[vote] == most) == label
    assert knn_accuracy(index, index_labels, queries, query_labels) == hits / 40


def test_knn_does_not_depend_on_feature_length() -> None:
    rng = np.random.default_rng(2)
    index, queries = (rng.normal(size=(40, 5)).astype(np.float32) for _ in range(2))
    labels = rng.integers(0, 3, 40)
    lengths = 10.0 ** rng.uniform(-15, 30, (40, 1)).astype(np.float32)
    assert knn_accuracy(index * lengths, labels, queries, labels) == knn_accuracy(
        index, labels, queries, labels
    )


def test_knn_equals_scikit_learn_over_many_queries_and_zero_features() -> None:
    rng = np.random.default_rng(7)
    index, queries = (rng.normal(size=(n, 30)).astype(np.float32) for n in (90, 700))
    index[:6] = 0  # as far from every unit feature as a cosine of 1/2
    labels = np.array([3, 7, 20, 21])
    index_labels, query_labels = rng.choice(labels, 90), rng.choice([*labels, 99], 700)
    index_labels[:6] = 7  # for which of equals is nearest is anybody's choice
    lengths = np.maximum(np.linalg.norm(index, axis=1, keepdims=True), 1e-12)
    classifier = KNeighborsClassifier(5, algorithm="brute").fit(index / lengths, index_labels)
    expected = classifier.predict(queries / np.linalg.norm(queries, axis=1, keepdims=True))
    for wanted in (expected, query_labels):
        accuracy = knn_accuracy(index, index_labels, queries, wanted, num_neighbors=5)
        assert accuracy == np.mean(expected == wanted)


def test_knn_uses_all_records_when_there_are_few() -> None:
    index = np.eye(2, dtype=np.float32)
    assert knn_accuracy(index, np.array([1, 1]), index, np.array([1, 0]), num_neighbors=3) == 0.5


def test_probe_separates_separable_data() -> None:
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 4, 400)
    # One direction carries the class, at a scale that only standardisation makes visible.
    features = rng.normal(size=(400, 6)).astype(np.float32) * 1000
    features[:, 0] = labels * 1e-3 + rng.normal(size=400) * 5e-5
    accuracy = linear_probe_scores(features[:300], labels[:300], features[300:], labels[300:])[
        "linear_probe_accuracy"
    ]
    assert accuracy >= 0.95


def test_probe_is_at_chance_on_noise() -> None:
    rng = np.random.default_rng(4)
    labels, features = rng.integers(0, 2, 2000), rng.normal(size=(2000, 4)).astype(np.float32)
    accuracy = linear_probe_scores(features[:1000], labels[:1000], features[1000:], labels[1000:])[
        "linear_probe_accuracy"
    ]
    assert abs(accuracy - 0.5) < 0.06


def test_probe_standardises_by_the_index_alone() -> None:
    index = np.array([[-1.0], [1.0], [-1.1], [1.1]], dtype=np.float32)
    # Both queries lie on the same side; standardised among themselves they would lie on two.
    queries = np.array([[2.0], [4.0]], dtype=np.float32)
    scores = linear_probe_scores(index, np.array([0, 1, 0, 1]), queries, np.array([1, 1]))
    assert scores["linear_probe_accuracy"] == 1.0


def test_probe_with_one_class_predicts_it() -> None:
    features = np.eye(3, dtype=np.float32)
    scores = linear_probe_scores(features, np.array([2, 2, 2]), features, np.array([2, 2, 0]))
    assert scores["linear_probe_accuracy"] == 2 / 3


def test_view_retrieval_is_perfect_without_augmentation() -> None:
    scores = view_retrieval(_identity(), _records(50), _scoring(NO_AUGMENTATION))
    assert scores == {"view_retrieval_top1": 1.0, "view_retrieval_top10": 1.0}


def test_view_retrieval_of_collapsed_network_is_chance() -> None:
    scores = view_retrieval(Encoder(_Constant(1.0), 64, 16), _records(50), _scoring(ViewConfig()))
    assert scores == pytest.approx({"view_retrieval_top1": 1 / 50, "view_retrieval_top10": 10 / 50})


def test_view_retrieval_equals_slow_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainers.evaluation.features._RETRIEVAL_ROWS", 7)
    encoder, records = build_encoder(NetworkConfig(), SHAPE, seed=0), _records(40)
    config = ViewConfig(min_crop_area=0.3, max_crop_area=0.5, brightness=0.5, contrast=0.5)
    views = make_views(
        torch.from_numpy(records.images), records.ids, config=config, seed=2, step=-1, num_views=2
    )
    with torch.no_grad():
        firsts, seconds = (encoder.features(views[:, view]) for view in range(2))
    ranks = []
    for i in range(40):
        cosines = torch.cosine_similarity(firsts[i : i + 1], seconds)
        ranks.append(cosines.argsort(descending=True).tolist().index(i))
    scores = view_retrieval(encoder, records, _scoring(config, seed=2, batch_size=9))
    assert scores["view_retrieval_top1"] == pytest.approx(np.mean(np.array(ranks) < 1))
    assert scores["view_retrieval_top10"] == pytest.approx(np.mean(np.array(ranks) < 10))
    assert 0 < scores["view_retrieval_top1"] < scores["view_retrieval_top10"] < 1


def test_subset_does_not_depend_on_record_order() -> None:
    records = _records(200)
    shuffled = records.take(np.random.default_rng(5).permutation(200))
    first, second = (part.ids[first_by_hash(part.ids, 50, seed=0)] for part in (records, shuffled))
    np.testing.assert_array_equal(first, second)


def test_subset_changes_by_one_record_when_one_is_removed() -> None:
    ids = _records(200).ids
    chosen = ids[first_by_hash(ids, 50, seed=0)]
    remaining = ids[ids != chosen[20]]
    assert len(set(chosen) & set(remaining[first_by_hash(remaining, 50, seed=0)])) == 49


def test_scores_do_not_depend_on_record_order() -> None:
    index, queries = _records(90), _records(60, seed=1)
    shuffled = index.take(np.random.default_rng(6).permutation(90))
    limits = {"max_index_records": 40, "max_query_records": 30}
    assert _scores(index, queries, **limits) == _scores(shuffled, queries.take(np.arange(60)[::-1]), **limits)


def test_scores_use_only_the_allowed_number_of_records() -> None:
    queries = _records(60, seed=1)
    accuracy = _scores(_records(90), queries, max_index_records=1, max_query_records=7)["knn_accuracy"]
    assert accuracy * 7 == pytest.approx(round(accuracy * 7))


@pytest.mark.parametrize("labelled", [True, False])
def test_scores_are_declared_metrics(labelled: bool) -> None:
    scores = _scores(_records(20, labelled=labelled), _records(20, labelled=labelled, seed=1))
    expected = (
        {"knn_accuracy", "linear_probe_accuracy"}
        if labelled
        else {"view_retrieval_top1", "view_retrieval_top10"}
    )
    assert set(scores) == expected
    assert set(scores) <= set(METRICS)


@pytest.mark.parametrize("value", [0.0, 1e38, float("nan"), float("inf")])
@pytest.mark.parametrize("labelled", [True, False])
def test_scores_of_diverged_network_are_finite(value: float, labelled: bool) -> None:
    encoder = Encoder(_Constant(value), 64, 16)
    scores = _scores(_records(20, labelled=labelled), _records(20, labelled=labelled, seed=1), encoder)
    assert all(0 <= score <= 1 for score in scores.values())


@pytest.mark.parametrize("num_classes", [1, 2])
@pytest.mark.parametrize("num_index", [1, 2])
def test_scores_of_tiny_index_are_finite(num_index: int, num_classes: int) -> None:
    scores = _scores(_records(num_index, num_classes=num_classes), _records(5, num_classes=2, seed=1))
    assert all(0 <= score <= 1 for score in scores.values())


def test_scores_refuse_empty_queries() -> None:
    with pytest.raises(DataError, match="got 5 and 0"):
        _scores(_records(5), _records(5).take(np.zeros(0, dtype=np.int64)))


@pytest.mark.parametrize("num_index", [3, 700, 2049])
def test_knn_finds_the_nearest_in_any_number_of_blocks(
    num_index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainers.evaluation.features._SIMILARITY_BYTES", 4 * 5 * num_index
    )  # 5 queries at once
    rng = np.random.default_rng(11)
    index, queries = (rng.normal(size=(n, 4)).astype(np.float32) for n in (num_index, 33))
    index[-1], index[1] = 2 * queries[0], 3 * queries[0]
    labels, wanted = rng.integers(0, 5, num_index), rng.integers(0, 5, 33)
    classifier = KNeighborsClassifier(3, metric="cosine", algorithm="brute").fit(index, labels)
    expected = classifier.predict(queries)
    np.testing.assert_array_equal(knn_rule(index, labels)(queries), expected)
    assert knn_accuracy(index, labels, queries, wanted) == np.mean(expected == wanted)
    # Each row a class of its own, so that no vote hides which one was found.
    assert knn_rule(index, np.arange(num_index), num_neighbors=1)(queries[:1]) in (1, num_index - 1)
    index[1] = -index[1]
    assert knn_rule(index, np.arange(num_index), num_neighbors=1)(queries[:1]) == num_index - 1


def _collinear(n: int, num_classes: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Features like a network's: of few directions, many of them nearly the same, at different scales."""
    rng = np.random.default_rng(12)
    labels = rng.integers(0, num_classes, n)
    places = rng.normal(size=(num_classes, 4))[labels] + rng.normal(size=(n, 4))
    features = np.maximum(places @ rng.normal(size=(4, 12)) + 1e-2 * rng.normal(size=(n, 12)), 0)
    return (features * 10.0 ** rng.integers(-3, 4, 12)).astype(np.float32), labels.astype(np.int64)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_probe_is_the_optimum_that_scikit_learn_finds(num_classes: int) -> None:
    features, labels = _collinear(600, num_classes)
    scaled = StandardScaler().fit_transform(features).astype(np.float64)
    # Of two classes scikit-learn has one row of weights, whose penalty is of the difference of ours.
    c = (2 if num_classes == 2 else 1) / (PENALTY * len(features))
    oracle = LogisticRegression(C=c, tol=1e-10, solver="newton-cg", max_iter=1000).fit(scaled, labels)
    probe = fit_linear_probe(features, labels)
    weight = probe.weight.numpy()
    found = weight[1:] - weight[:1] if num_classes == 2 else weight
    np.testing.assert_allclose(found, oracle.coef_, atol=0.03 * np.abs(oracle.coef_).max())
    np.testing.assert_array_equal(probe.predict(features), oracle.predict(scaled))


def test_features_are_standardised_as_scikit_learn_does() -> None:
    features, _ = _collinear(600, 4)
    features[:, 2], features[:, 5] = 7.3, 0.0  # a constant one is no reason to divide by its rounding
    expected = StandardScaler().fit_transform(features)
    np.testing.assert_allclose(standardization_of(features)(features).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_probe_reaches_its_optimum_in_few_steps_though_features_are_collinear() -> None:
    features, labels = _collinear(600, 4)
    assert fit_linear_probe(features, labels).num_iterations < 45  # 31; 56 without the curvature


def test_probe_is_the_same_again_bit_by_bit() -> None:
    features, labels = _collinear(300, 3)
    first, second = (fit_linear_probe(features, labels) for _ in range(2))
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)


def test_scores_are_fitted_on_all_records_and_asked_of_all_unless_limited() -> None:
    """The label of a query is that of its twin, which is the last index record by hash."""
    index = _records(300)
    order = first_by_hash(index.ids, None, seed=0)
    assert len(order) == 300
    last = index.take(order[-1:])
    asked = embed_features(_identity(), last.images)
    scoring = Scoring(
        index=index,
        queries=last,
        config=EvaluationConfig(num_neighbors=1),
        view_config=ViewConfig(),
        seed=0,
        device="cpu",
    )
    scores = label_scores(describe_by(_identity(), scoring), asked, last, index, scoring.config)
    assert scores["knn_accuracy"] == 1.0
    assert _scores(index, index, num_neighbors=1)["knn_accuracy"] == 1.0
