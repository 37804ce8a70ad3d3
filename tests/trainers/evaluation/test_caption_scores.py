"""Scores of captioners: likelihoods against a slow oracle, orders of words, ties, diverged networks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from dpgcl_core.errors import DataError
from dpgcl_core.release.metrics import Release, find_metric, visible
from trainers.config.networks import CaptionerConfig
from trainers.config.training import EvaluationConfig, ViewConfig
from trainers.data.pairs import ImageTextRecords
from trainers.data.records import Records
from trainers.data.shapes import SHAPE_NAMES, make_shape_pairs
from trainers.evaluation import caption_scores as scores_module
from trainers.evaluation.caption_scores import (
    TIE_TOLERANCE,
    caption_scores,
    evaluate,
    order_wins,
    other_orders,
)
from trainers.evaluation.pair_scores import ZERO_SHOT_TEMPLATES
from trainers.evaluation.retrieval import largest_is_own
from trainers.evaluation.scorer import Scoring
from trainers.models.captioner import Captioner, build_captioner
from trainers.views.caption_views import NON_ESSENTIAL_WORDS, words_of
from trainers.views.image_views import normalise

NAMES = {"caption_token_probability", "next_token_accuracy", "word_order_accuracy", "zero_shot_accuracy"}
TEXT = "A small red ring at the top left, and two large blue squares in the bottom row."


def network_of() -> Captioner:
    """At weights that tell images and texts apart."""
    network = build_captioner(CaptionerConfig(patch_size=16), (3, 32, 32), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return network.eval()


def pairs(count: int = 7) -> ImageTextRecords:
    return make_shape_pairs(count, seed=0, captions_per_image=2)


@torch.no_grad()
def log_likelihood(network: Captioner, image: np.ndarray, text: str) -> tuple[list[float], list[bool]]:
    """Of every token of a text, one by one: its log-likelihood, and whether it is the likeliest."""
    tokens = network.tokenizer([text]).tokens[0].tolist()
    tokens = tokens[: tokens.index(network.end_token) + 1]
    encoded = network.encode(normalise(torch.from_numpy(image)[None]))
    found, right = [], []
    for place in range(1, len(tokens)):
        logits = network.decode(encoded, torch.tensor([tokens[:place]]))[0, -1].double()
        found.append(float(logits.log_softmax(0)[tokens[place]]))
        right.append(int(logits.argmax()) == tokens[place])
    return found, right


def _scoring(queries: ImageTextRecords | Records, **changes: Any) -> Scoring:
    given: dict[str, Any] = {"index": None, "config": EvaluationConfig(), "view_config": ViewConfig()}
    return Scoring(**given | {"seed": 0, "device": "cpu"} | changes, queries=queries)


def _caption_scores(
    network: Captioner, queries: ImageTextRecords | Records, **changes: Any
) -> tuple[dict[str, float], torch.Tensor]:
    return caption_scores(network, _scoring(queries, **changes))


@pytest.mark.ci
def test_scores_equal_a_slow_oracle() -> None:
    network, records = network_of(), make_shape_pairs(4, seed=0)
    images = np.asarray(records.images)
    assert records.labels is not None
    found, features = _caption_scores(network, records, seed=5, class_names=SHAPE_NAMES)
    per_token, right, better = [], [], []
    for image, texts in zip(images, records.captions, strict=True):
        for text in texts:
            own, is_right = log_likelihood(network, image, text)
            per_token += own
            right += is_right
            for order in other_orders(text, seed=5):
                if words_of(order.lower()) != words_of(text.lower()):
                    other = sum(log_likelihood(network, image, order)[0])
                    better.append(float(sum(own) > other))
    hits = 0
    for image, label in zip(images, records.labels.tolist(), strict=True):
        of_classes = [
            sum(
                sum(log_likelihood(network, image, template.replace("{}", name))[0])
                for template in ZERO_SHOT_TEMPLATES
            )
            for name in SHAPE_NAMES
        ]
        hits += int(np.argmax(of_classes)) == label
    assert found["caption_token_probability"] == pytest.approx(math.exp(np.mean(per_token)), rel=1e-4)
    assert found["next_token_accuracy"] == pytest.approx(np.mean(right))
    assert found["word_order_accuracy"] == pytest.approx(np.mean(better))
    assert found["zero_shot_accuracy"] == pytest.approx(hits / len(records))
    assert 0 < found["word_order_accuracy"] < 1
    expected = network.features(normalise(torch.from_numpy(images))).detach()
    assert torch.allclose(features, expected, atol=1e-5)


def test_scores_do_not_depend_on_how_many_are_passed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    network, records = network_of(), pairs()
    whole, _ = _caption_scores(network, records, seed=0, class_names=SHAPE_NAMES)
    monkeypatch.setattr(scores_module, "_MAX_LOGITS", 5 * network.max_tokens * network.vocabulary)
    few, _ = _caption_scores(network, records, seed=0, class_names=SHAPE_NAMES, batch_size=3)
    assert few == pytest.approx(whole, rel=1e-5)


def test_orders_keep_words_places_and_punctuation() -> None:
    words = words_of(TEXT)
    content, other, within, triples = other_orders(TEXT, seed=0)
    for order in (content, other, within, triples):
        assert sorted(words_of(order)) == sorted(words)
        assert words_of(order) != words
        assert order.endswith(".")
        assert order.count(",") == 1
    essential = [word.lower() not in NON_ESSENTIAL_WORDS for word in words]
    for order, moves in ((content, True), (other, False)):
        stays = [a == b for a, b, e in zip(words_of(order), words, essential, strict=True) if e != moves]
        assert all(stays)
    for start in range(0, len(words) // 3 * 3, 3):
        assert sorted(words_of(within)[start : start + 3]) == sorted(words[start : start + 3])
    found = words_of(triples)
    own = {tuple(words[start : start + 3]) for start in range(0, len(words) // 3 * 3, 3)}
    assert {tuple(found[start : start + 3]) for start in range(0, len(words) // 3 * 3, 3)} == own


def test_orders_are_functions_of_the_text_and_the_seed() -> None:
    assert other_orders(TEXT, seed=0) == other_orders(TEXT, seed=0)
    assert other_orders(TEXT, seed=0) != other_orders(TEXT, seed=1)
    assert other_orders("ring", seed=0) == ["ring"] * 4
    assert other_orders("…", seed=0) == ["…"] * 4


def test_network_that_sees_no_order_scores_one_half(monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of()
    probabilities = torch.randn(network.vocabulary)

    def bag_of_words(encoded: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return probabilities.expand(*tokens.shape, -1)

    monkeypatch.setattr(network, "decode", bag_of_words)
    found, _ = _caption_scores(network, pairs(), seed=0)
    assert found["word_order_accuracy"] == 0.5
    assert found.keys() == NAMES - {"zero_shot_accuracy"}


def test_ties_are_half_of_an_order_and_no_class() -> None:
    assert order_wins(torch.tensor([-1.0, -torch.inf]), torch.tensor([-1.0002, -torch.inf])).eq(0.5).all()
    assert order_wins(torch.tensor([-1.0]), torch.tensor([-1.1])) == 1
    assert largest_is_own(torch.zeros(3, 2), np.array([0, 1, 0]), tolerance=TIE_TOLERANCE) == 0
    assert largest_is_own(torch.tensor([[-1.0, -3.0, -2.0]]), np.array([0]), tolerance=TIE_TOLERANCE) == 1
    assert largest_is_own(torch.full((1, 2), -torch.inf), np.array([0]), tolerance=TIE_TOLERANCE) == 0


def test_network_that_diverged_scores_nothing_and_raises_nothing() -> None:
    network = network_of()
    with torch.no_grad():
        network.predict.weight.fill_(torch.nan)
    found, _ = _caption_scores(network, pairs(), seed=0, class_names=SHAPE_NAMES)
    assert found == {
        "caption_token_probability": 0.0,
        "next_token_accuracy": 0.0,
        "word_order_accuracy": 0.5,
        "zero_shot_accuracy": 0.0,
    }


def _evaluated(queries: ImageTextRecords | Records, index: ImageTextRecords | None) -> dict[str, float]:
    return evaluate(network_of(), _scoring(queries, index=index, class_names=SHAPE_NAMES))


def test_evaluation_has_the_scores_of_what_the_records_have() -> None:
    records = pairs(12)
    probe = {f"{by}_{kind}" for by in ("knn", "linear_probe") for kind in ("accuracy", "balanced_accuracy")}
    assert _evaluated(records, records).keys() == NAMES | probe
    unlabelled = dataclasses.replace(records, labels=None)
    assert _evaluated(unlabelled, unlabelled).keys() == NAMES - {"zero_shot_accuracy"}
    images = Records(images=np.asarray(records.images), ids=records.ids, labels=records.labels)
    assert _evaluated(images, records).keys() == {"zero_shot_accuracy"} | probe
    bare = dataclasses.replace(images, labels=None)
    assert _evaluated(bare, unlabelled).keys() == {"view_retrieval_top1", "view_retrieval_top10"}


def test_label_without_a_name_is_refused() -> None:
    with pytest.raises(DataError, match="Name every class"):
        _caption_scores(network_of(), pairs(20), seed=0, class_names=SHAPE_NAMES[:2])


def test_scores_leave_a_private_training_on_public_records_alone() -> None:
    for name in NAMES:
        metric = find_metric(name)
        assert metric is not None
        assert metric.release is Release.SCORE
        for public in (False, True):
            shown = visible({name: 0.5}, training_data_is_public=False, evaluation_data_is_public=public)
            assert (name in shown) == public
