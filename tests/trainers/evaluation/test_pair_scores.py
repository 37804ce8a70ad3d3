"""Scores of both towers on records: what is scored, how it is read, and for whose eyes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError, DataError
from dpgcl_core.release.metrics import METRICS
from dpgcl_core.sampling.record_ids import ids_from_names
from tests.trainers.clip_models import moved, tiny_encoder
from tests.trainers.conftest import make_config
from tests.trainers.export.test_export import _sweep, _trial
from trainers.config.training import EvaluationConfig, NetworkConfig, ViewConfig
from trainers.data.dataset import Probe, TrainingData
from trainers.data.pairs import ImageTextRecords
from trainers.data.records import Records
from trainers.data.shapes import SHAPE_NAMES, make_shape_pairs
from trainers.evaluation import pair_scores as pair_scoring
from trainers.evaluation.features import (
    embed_features,
    first_by_hash,
    knn_rule,
    linear_probe_scores,
)
from trainers.evaluation.pair_scores import class_texts, tower_scores
from trainers.evaluation.retrieval import Matches, content_ids, recalls
from trainers.evaluation.scorer import Scoring
from trainers.export.trial import choose_trial
from trainers.models.clip.clip_encoder import ImageTextEncoder
from trainers.models.clip.tokens import Tokens
from trainers.models.encoder import build_encoder
from trainers.tasks import IMAGES, PAIRS
from trainers.tasks.task_scores import all_scores
from trainers.training.observation import Observer
from trainers.training.release import noised_scores
from trainers.views.image_views import normalise

pytestmark = pytest.mark.ci

RECALLS = {f"{way}_recall_at_{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
LABEL_SCORES = {
    f"{by}_{kind}" for by in ("knn", "linear_probe") for kind in ("accuracy", "balanced_accuracy")
}
"""Of a few pairs, whose classes are unbalanced."""


@dataclass(frozen=True)
class _Stored:
    """Images that note how many of them are asked for at once."""

    images: NDArray[np.uint8]
    asked: list[int] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.images.shape

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        self.asked.append(len(rows))
        return self.images[rows]

    def select(self, rows: NDArray[np.int64]) -> _Stored:
        return _Stored(self.images[rows], self.asked)


@pytest.fixture(scope="module")
def encoder() -> ImageTextEncoder:
    return moved(tiny_encoder())


def _pairs(n: int, *, captions: int = 1, first: int = 0, labelled: bool = True) -> ImageTextRecords:
    records = make_shape_pairs(n, seed=0, captions_per_image=captions, first=first)
    return records if labelled else dataclasses.replace(records, labels=None)


def _of_units(images: Sequence[Sequence[int]]) -> ImageTextRecords:
    """Records with several images each, given by number."""
    source = _pairs(1 + max(max(unit) for unit in images))
    rows = [row for unit in images for row in unit]
    return ImageTextRecords(
        images=np.asarray(source.images[np.array(rows)]),
        captions=tuple(source.captions[row] for row in rows),
        ids=ids_from_names(f"unit {unit}" for unit in range(len(images))),
        row_starts=np.cumsum([0, *map(len, images)]).astype(np.int64),
    )


def _scores(
    encoder: nn.Module,
    queries: Records | ImageTextRecords,
    index: Records | ImageTextRecords | None = None,
    limits: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    task = PAIRS if isinstance(encoder, ImageTextEncoder) else IMAGES
    prefix = options.pop("prefix", "")
    found = task.evaluate(
        encoder,
        Scoring(
            index=index,
            queries=queries,
            config=EvaluationConfig(**(limits or {})),
            view_config=ViewConfig(),
            seed=0,
            device="cpu",
            **options,
        ),
    )
    return {prefix + name: score for name, score in found.items()}


def _tower_scores(
    encoder: ImageTextEncoder, records: Records | ImageTextRecords, **options: Any
) -> dict[str, float]:
    return tower_scores(encoder, _scoring(records, **options))[0]


def _scoring(queries: Records | ImageTextRecords, **options: Any) -> Scoring:
    given: dict[str, Any] = {"index": None, "config": EvaluationConfig(), "view_config": ViewConfig()}
    return Scoring(**given | {"seed": 0, "device": "cpu"} | options, queries=queries)


def _images(n: int, *, first: int = 0) -> Records:
    """The pictures of `_pairs` without their captions."""
    records = _pairs(n, first=first)
    return Records(images=np.asarray(records.images), ids=records.ids, labels=records.labels)


def _embeddings(encoder: ImageTextEncoder, records: ImageTextRecords) -> tuple[Tensor, Tensor, Matches]:
    """Both towers on everything at once, contents by the bytes themselves."""
    captions, image_of_text = records.flat_captions()
    images = torch.from_numpy(np.asarray(records.images[np.arange(len(records.captions))]))
    matches = Matches(
        image_of_text=image_of_text,
        image_contents=content_ids(image.numpy().tobytes() for image in images),
        text_contents=content_ids(caption.encode() for caption in captions),
    )
    with torch.no_grad():
        encoder.eval()
        texts = encoder.embed_texts(encoder.tokenizer(captions).tokens)
        return encoder.embed_images(normalise(images)), texts, matches


@pytest.mark.ci
def test_tower_scores_of_pairs_are_the_recalls_of_both_towers(encoder: ImageTextEncoder) -> None:
    records = _pairs(50, captions=3)
    images, texts, matches = _embeddings(encoder, records)
    assert _tower_scores(encoder, records, batch_size=7) == recalls(images, texts, matches)


@pytest.mark.ci
@pytest.mark.parametrize("same", ["images", "captions"])
def test_what_is_identical_counts_for_each_other(encoder: ImageTextEncoder, same: str) -> None:
    """One picture with thirty captions in thirty records, and the other way round: nothing is wrong."""
    records = _pairs(30)
    assert _tower_scores(encoder, records)["image_to_text_recall_at_1"] < 0.5
    if same == "images":
        repeated = dataclasses.replace(records, images=records.images[np.zeros(30, dtype=np.int64)])
    else:
        repeated = dataclasses.replace(records, captions=records.captions[:1] * 30)
    assert _tower_scores(encoder, repeated) == dict.fromkeys(RECALLS, 1.0)


def test_stored_images_are_read_once_and_a_batch_at_a_time(encoder: ImageTextEncoder) -> None:
    stored = _Stored(np.asarray(_pairs(50).images))
    records = dataclasses.replace(_pairs(50), images=stored)
    found = _tower_scores(encoder, records, batch_size=16)
    assert stored.asked == [16, 16, 16, 2]
    assert found == _tower_scores(encoder, _pairs(50), batch_size=16)


def test_stored_images_beyond_the_limits_are_not_read(encoder: ImageTextEncoder) -> None:
    index, queries = _Stored(np.asarray(_pairs(150).images)), _Stored(np.asarray(_pairs(150).images))
    limits = {"max_index_records": 20, "max_query_records": 80}
    _scores(
        encoder,
        dataclasses.replace(_pairs(150), images=queries),
        dataclasses.replace(_pairs(150), images=index),
        limits,
    )
    assert index.asked == [20]
    assert queries.asked == [64, 16]  # once for all scores


def test_scored_pairs_are_the_first_by_hash_with_all_their_captions(encoder: ImageTextEncoder) -> None:
    records = _pairs(60, captions=2)
    chosen = records.take(first_by_hash(records.ids, 25, seed=0))
    images, texts, matches = _embeddings(encoder, chosen)
    assert len(texts) == 50
    found = _scores(encoder, records, limits={"max_query_records": 25})
    assert found == recalls(images, texts, matches)


def test_scores_of_pairs_do_not_depend_on_the_order_of_records(encoder: ImageTextEncoder) -> None:
    records = _pairs(60)
    shuffled = records.take(np.random.default_rng(0).permutation(60))
    limits = {"max_index_records": 30, "max_query_records": 40}
    found = _scores(encoder, records, records, limits)
    assert found == pytest.approx(_scores(encoder, shuffled, shuffled, limits))


def test_record_with_many_images_counts_once(encoder: ImageTextEncoder) -> None:
    units = _of_units([[0, 1, 2], [3], *([n] for n in range(4, 14))])
    alone = units.one_row_each()
    assert len(alone.captions) == 12
    assert _scores(encoder, units) == _scores(encoder, alone)


def test_label_scores_are_those_of_the_image_tower(encoder: ImageTextEncoder) -> None:
    index, queries = _pairs(60), _pairs(40, first=100)
    found = _scores(encoder, queries, index)
    order = [first_by_hash(part.ids, 1000, seed=0) for part in (index, queries)]
    (known, known_labels), (asked, asked_labels) = (
        (embed_features(encoder, part.images[rows]), part.labels[rows])
        for part, rows in zip((index, queries), order, strict=True)
        if part.labels is not None
    )
    assert found["knn_accuracy"] == np.mean(knn_rule(known, known_labels)(asked) == asked_labels)
    wanted = linear_probe_scores(known, known_labels, asked, asked_labels)["linear_probe_accuracy"]
    assert found["linear_probe_accuracy"] == pytest.approx(wanted, abs=0.05)


@pytest.mark.parametrize(
    ("labelled", "with_index", "names", "expected"),
    [
        (True, True, (), RECALLS | LABEL_SCORES),
        (True, True, SHAPE_NAMES, RECALLS | LABEL_SCORES | {"zero_shot_accuracy"}),
        (True, False, SHAPE_NAMES, RECALLS | {"zero_shot_accuracy"}),
        (False, True, SHAPE_NAMES, RECALLS),
    ],
)
@pytest.mark.parametrize("prefix", ["", "untrained_"])
def test_scores_of_pairs_follow_from_what_there_is(
    encoder: ImageTextEncoder,
    labelled: bool,
    with_index: bool,
    names: Sequence[str],
    expected: set[str],
    prefix: str,
) -> None:
    records = _pairs(20, labelled=labelled)
    found = _scores(encoder, records, records if with_index else None, class_names=names, prefix=prefix)
    assert set(found) == {prefix + name for name in expected} <= set(METRICS)
    assert all(0 <= score <= 1 for score in found.values())


def test_zero_shot_is_of_the_class_names_in_every_template(
    encoder: ImageTextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = _pairs(40)
    monkeypatch.setattr(pair_scoring, "ZERO_SHOT_TEMPLATES", ("a {}", "two {}s"))
    with torch.no_grad():
        texts = [f"a {name}" for name in SHAPE_NAMES] + [f"two {name}s" for name in SHAPE_NAMES]
        embedded = encoder.embed_texts(encoder.tokenizer(texts).tokens).view(2, len(SHAPE_NAMES), -1)
        images = encoder.embed_images(normalise(torch.from_numpy(np.asarray(records.images))))
    nearest = (images @ embedded.mean(dim=0).T / embedded.mean(dim=0).norm(dim=1)).argmax(dim=1)
    found = _tower_scores(encoder, records, class_names=SHAPE_NAMES)
    assert found["zero_shot_accuracy"] == np.mean(nearest.numpy() == records.labels)


def test_zero_shot_refuses_a_label_without_a_name(encoder: ImageTextEncoder) -> None:
    with pytest.raises(DataError, match="Name every class"):
        _tower_scores(encoder, _pairs(40), class_names=SHAPE_NAMES[:2])


def test_class_name_may_hold_braces() -> None:
    assert class_texts(["{0}"]) == ["a photo of a {0}.", "a picture of a {0}."]


def test_zero_shot_says_the_words_of_a_folder_name(
    encoder: ImageTextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    tokenise = encoder.tokenizer

    def noted(texts: Sequence[str]) -> Tokens:
        said.extend(texts)
        return tokenise(texts)

    monkeypatch.setitem(encoder.__dict__, "tokenizer", noted)
    _tower_scores(encoder, _images(6), class_names=["golden_retriever"] * len(SHAPE_NAMES))
    assert set(said) == {"a photo of a golden retriever.", "a picture of a golden retriever."}


def test_zero_shot_of_stored_images_is_that_of_images_in_memory(encoder: ImageTextEncoder) -> None:
    stored = dataclasses.replace(_pairs(50), images=_Stored(np.asarray(_pairs(50).images)))
    found = [
        _tower_scores(encoder, records, class_names=SHAPE_NAMES, batch_size=16)["zero_shot_accuracy"]
        for records in (stored, _pairs(50), _images(50))
    ]
    assert found[0] == found[1] == found[2]


def test_every_image_passes_its_tower_once(encoder: ImageTextEncoder) -> None:
    passed = []
    handle = encoder.clip.visual.register_forward_hook(  # type: ignore[union-attr]
        lambda module, inputs, _: passed.append(len(inputs[0]))
    )
    _scores(encoder, _pairs(30, first=100), _pairs(50), class_names=SHAPE_NAMES)
    handle.remove()
    assert sum(passed) == 80


@pytest.mark.parametrize("kind", ["pairs", "images"])
def test_features_of_the_towers_are_those_of_the_images(encoder: ImageTextEncoder, kind: str) -> None:
    records = _pairs(20) if kind == "pairs" else _images(20)
    _, features = tower_scores(encoder, _scoring(records, batch_size=7))
    np.testing.assert_allclose(features.numpy(), embed_features(encoder, records.images), atol=1e-5)


def test_grey_images_are_scored_as_colour_of_three_equal_channels(encoder: ImageTextEncoder) -> None:
    records = _pairs(20)
    grey = np.asarray(records.images)[:, :1]
    found = [
        _scores(encoder, dataclasses.replace(records, images=images), None)
        for images in (grey, np.repeat(grey, 3, axis=1))
    ]
    assert found[0] == found[1]


def test_labelled_images_are_probed_by_the_image_tower(encoder: ImageTextEncoder) -> None:
    index, queries = (_images(n, first=first) for n, first in ((60, 0), (30, 100)))
    assert set(_scores(encoder, queries, index)) == LABEL_SCORES


def test_diverged_towers_score_nothing_and_no_error() -> None:
    broken = tiny_encoder()
    with torch.no_grad():
        for parameter in broken.parameters():
            parameter.fill_(float("nan"))
    found = _scores(broken, _pairs(30, labelled=False))
    assert found == dict.fromkeys(RECALLS, 0.0)


def test_towers_are_scored_in_evaluation_mode_and_left_as_they_were(encoder: ImageTextEncoder) -> None:
    seen = []
    handle = encoder.clip.visual.register_forward_hook(  # type: ignore[union-attr]
        lambda module, *_: seen.append((module.training, torch.is_grad_enabled()))
    )
    encoder.train()
    _scores(encoder, _pairs(5))
    handle.remove()
    assert set(seen) == {(False, False)}
    assert encoder.training
    encoder.eval()


def test_pairs_are_refused_for_a_network_without_a_text_tower() -> None:
    images = build_encoder(NetworkConfig(), (3, 32, 32), seed=0)
    with pytest.raises(ConfigError, match="Use a CLIP network"):
        _scores(images, _pairs(5))


def test_no_pairs_are_refused(encoder: ImageTextEncoder) -> None:
    with pytest.raises(DataError, match="got 0 and 0"):
        _scores(encoder, _pairs(5).take(np.zeros(0, dtype=np.int64)))


def _data(**changes: Any) -> TrainingData:
    usual: dict[str, Any] = {"index": _pairs(40), "queries": _pairs(20, first=100)}
    public = {"train_is_public": True, "evaluation_is_public": True}
    return TrainingData(**({"train": _pairs(40)} | usual | public | changes))


def _observer(data: TrainingData) -> Observer:
    return Observer(
        make_config(), train_is_public=data.train_is_public, evaluation_is_public=data.evaluation_is_public
    )


def test_scores_of_private_pairs_are_computed_on_public_ones_alone(encoder: ImageTextEncoder) -> None:
    data = _data(train_is_public=False)
    found = all_scores(PAIRS, encoder, data, make_config(), device="cpu")
    assert set(_observer(data).visible(found)) == RECALLS | LABEL_SCORES
    hidden = dataclasses.replace(data, evaluation_is_public=False)
    assert _observer(hidden).visible(found) == {}


def test_private_pairs_scored_on_private_ones_are_not_even_embedded(
    encoder: ImageTextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _data(train_is_public=False, evaluation_is_public=False)
    monkeypatch.setattr(ImageTextEncoder, "features", lambda *_: pytest.fail("embedded"))
    monkeypatch.setattr(ImageTextEncoder, "embed_texts", lambda *_: pytest.fail("embedded"))
    assert all_scores(PAIRS, encoder, data, make_config(), device="cpu") == {}


def test_pairs_without_an_index_have_recalls(encoder: ImageTextEncoder) -> None:
    data = _data(index=None)
    assert set(all_scores(PAIRS, encoder, data, make_config(), device="cpu")) == RECALLS


def test_data_without_queries_have_no_scores(encoder: ImageTextEncoder) -> None:
    assert all_scores(PAIRS, encoder, _data(queries=None), make_config(), device="cpu") == {}


def test_probes_of_pairs_are_scored_by_labels_under_their_names(encoder: ImageTextEncoder) -> None:
    index, queries = _images(30, first=200), _images(20, first=300)
    data = _data(probes=(Probe(name="other", index=index, queries=queries),), index=None)
    found = all_scores(PAIRS, encoder, data, make_config(), device="cpu", prefix="untrained_")
    assert {name for name in found if "transfer" in name} == {
        f"untrained_transfer_{name}/other" for name in LABEL_SCORES
    }
    assert set(_observer(data).visible(found)) == set(found)
    assert set(all_scores(PAIRS, encoder, data, make_config(), device="cpu", with_probes=False)) == RECALLS


def _probe(class_names: Sequence[str] = SHAPE_NAMES) -> Probe:
    queries = _images(20, first=300)
    return Probe(name="other", index=_images(30, first=200), queries=queries, class_names=tuple(class_names))


def test_zero_shot_of_a_probe_is_by_the_names_of_its_own_classes(encoder: ImageTextEncoder) -> None:
    names = SHAPE_NAMES[::-1]
    data = _data(probes=(_probe(names),), class_names=SHAPE_NAMES)
    found = all_scores(PAIRS, encoder, data, make_config(), device="cpu")
    both = [_tower_scores(encoder, data.probes[0].queries, class_names=each) for each in (names, SHAPE_NAMES)]
    assert both[0] != both[1]
    assert found["transfer_zero_shot_accuracy/other"] == both[0]["zero_shot_accuracy"]


def test_zero_shot_of_a_probe_passes_the_gate_as_its_other_scores_do(encoder: ImageTextEncoder) -> None:
    data = _data(train_is_public=False, index=None, queries=None, probes=(_probe(),))
    found = all_scores(PAIRS, encoder, data, make_config(), device="cpu", prefix="untrained_")
    names = {f"untrained_transfer_{name}/other" for name in (*LABEL_SCORES, "zero_shot_accuracy")}
    assert set(_observer(data).visible(found)) == names
    hidden = dataclasses.replace(data, evaluation_is_public=False)
    assert _observer(hidden).visible(found) == {}


def test_zero_shot_needs_a_text_tower() -> None:
    images = build_encoder(NetworkConfig(), (3, 32, 32), seed=0)
    data = _data(index=_images(40), queries=_images(20), probes=(_probe(),), class_names=SHAPE_NAMES)
    found = all_scores(IMAGES, images, data, make_config(), device="cpu")
    assert set(found) == LABEL_SCORES | {f"transfer_{name}/other" for name in LABEL_SCORES}


def test_diverged_towers_have_a_zero_shot_accuracy_of_zero() -> None:
    broken = tiny_encoder()
    with torch.no_grad():
        for parameter in broken.parameters():
            parameter.fill_(float("nan"))
    assert _scores(broken, _images(20), _images(20), class_names=SHAPE_NAMES)["zero_shot_accuracy"] == 0


def test_scores_of_pairs_on_the_way_are_kept_by_their_names(encoder: ImageTextEncoder) -> None:
    data = _data(class_names=SHAPE_NAMES)
    scores = all_scores(PAIRS, encoder, data, make_config(), device="cpu")
    observer = _observer(data)
    observer.note_during(4, scores)
    assert observer.series == {f"{name}_during": [(4, score)] for name, score in scores.items()}
    assert set(scores) == RECALLS | LABEL_SCORES | {"zero_shot_accuracy"}


def test_noised_scores_of_pairs_are_counts_of_labels_and_no_recall(encoder: ImageTextEncoder) -> None:
    """A recall has no small sensitivity: one record more is a candidate of every query."""
    index, scored = (_images(n, first=first) for n, first in ((30, 0), (10, 100)))
    evaluation = EvaluationConfig(score_on_held_out=0.2, score_noise_multiplier=1.0)
    config = make_config(evaluation=evaluation)
    draws = config.randomness(data_are_private=False).generator(0, "score noise")
    found = noised_scores(encoder, index, scored, config, draws, "cpu")  # type: ignore[arg-type]
    assert set(found) == {"noised_knn_accuracy", "noised_linear_probe_accuracy"}
    assert evaluation.num_noised_scores == len(found)


def test_noised_recall_passes_no_gate() -> None:
    with pytest.raises(ConfigError, match="unknown metric"):
        _observer(_data()).visible({"noised_image_to_text_recall_at_1": 0.5})


def test_best_trial_of_pairs_is_by_recall_unless_asked_otherwise() -> None:
    recall = "image_to_text_recall_at_10"
    scores: list[dict[str, Any]] = [{"knn_accuracy": 0.9, recall: 0.1}, {"knn_accuracy": 0.5, recall: 0.2}]
    trials = [_trial(name, **metrics) for name, metrics in zip("ab", scores, strict=True)]
    chosen, how = choose_trial(_sweep(*trials))
    assert chosen.name == "b"
    assert recall in how
    assert choose_trial(_sweep(*trials), best="knn_accuracy")[0].name == "a"


@pytest.mark.parametrize("name", ["untrained_image_to_text_recall_at_10", "zero_shot_accuracy_during"])
def test_best_trial_of_pairs_is_never_by_another_network(name: str) -> None:
    scores: dict[str, Any] = {"knn_accuracy": 0.9, name: 0.5}
    with pytest.raises(ConfigError, match="unknown score"):
        choose_trial(_sweep(_trial("a", **scores)), best=name)
