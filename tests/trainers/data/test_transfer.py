"""Probing other data sets: their images in the training data's shape, and what of their scores is seen."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from dashboards.compose.display_names import score_names
from dashboards.compose.transfer_rows import by_probe
from dpgcl_core.errors import ConfigError, DataError
from dpgcl_core.release.metrics import METRICS_PER_DATASET, Release, find_metric, visible
from tests.trainers.conftest import make_config, make_data, make_records
from trainers.config.training import EvaluationConfig
from trainers.data.channels import with_channels
from trainers.data.dataset import Probe, TrainingData
from trainers.data.dataset_registry import DATA_SOURCES
from trainers.data.loading import load_dataset
from trainers.data.probes import load_probe, load_probes
from trainers.data.shapes import SHAPE_NAMES
from trainers.evaluation import features as evaluation
from trainers.evaluation.scorer import Scoring
from trainers.models.encoder import Encoder
from trainers.training.loop import train

pytestmark = pytest.mark.ci  # trainings and sweeps of seconds each

SCORES = ("transfer_knn_accuracy/other", "transfer_linear_probe_accuracy/other")


def _probe() -> Probe:
    return Probe(
        name="other", index=make_records(40, prefix="index"), queries=make_records(20, prefix="query")
    )


def _data(*, private: bool = False) -> TrainingData:
    data = make_data(private=private, evaluation_is_public=True)
    if private:
        data = dataclasses.replace(data, index=None, queries=None)
    return dataclasses.replace(data, probes=(_probe(),))


def _write(path: Path, images: np.ndarray, *, labels: bool = True) -> str:
    arrays = {"labels": np.arange(len(images)) % 3} if labels else {}
    np.savez(path, images=images, **arrays)
    return f"npz:{path}"


def _colour_images(num_images: int, *size: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (num_images, *size, 3), dtype=np.uint8)


# Images


def test_colour_becomes_grey_as_pillow_makes_it() -> None:
    images = _colour_images(20, 9, 9)
    grey = with_channels(images.transpose(0, 3, 1, 2), 1)
    expected = [np.asarray(Image.fromarray(image).convert("L")) for image in images]
    np.testing.assert_array_equal(grey[:, 0], expected)


def test_grey_becomes_colour_and_grey_again() -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(4, 1, 8, 8)
    colour = with_channels(grey, 3)
    assert colour.shape == (4, 3, 8, 8)
    np.testing.assert_array_equal(with_channels(colour, 1), grey)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 6, 6)])
def test_probe_has_the_training_images_shape(shape: tuple[int, int, int], tmp_path: Path) -> None:
    name = _write(tmp_path / "some faces.npz", _colour_images(40, 12, 12))
    probe = load_probe(name, image_shape=shape, test_fraction=0.3)
    assert probe.name == "npz-some-faces"
    assert probe.index.images.shape[1:] == probe.queries.images.shape[1:] == shape


def test_probe_scores_records_that_are_not_in_its_index(tmp_path: Path) -> None:
    name = _write(tmp_path / "faces.npz", _colour_images(40, 8, 8))
    probe = load_probe(name, image_shape=(1, 8, 8), test_fraction=0.3)
    assert not set(probe.index.ids) & set(probe.queries.ids)
    assert len(probe.index) + len(probe.queries) == 40


def test_probe_without_labels_is_refused(tmp_path: Path) -> None:
    name = _write(tmp_path / "faces.npz", _colour_images(40, 8, 8), labels=False)
    with pytest.raises(ConfigError, match="probe_datasets need labels"):
        load_probe(name, image_shape=(1, 8, 8), test_fraction=0.3)


def test_probe_of_a_network_for_oblongs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 8 × 6 pixels\. Pass --image-size"):
        load_probe("digits", image_shape=(1, 8, 6), test_fraction=0.3)


@pytest.mark.parametrize(
    ("name", "class_names"),
    [
        ("digits", DATA_SOURCES["digits"].class_names),
        ("shapes:200", SHAPE_NAMES),
        ("npz", ("cat", "dog", "eel")),
    ],
)
def test_probe_has_the_class_names_of_its_data_set(
    name: str, class_names: tuple[str, ...], tmp_path: Path
) -> None:
    if name == "npz":
        labels = np.array(["dog", "eel", "cat"])[np.arange(60) % 3]
        np.savez(tmp_path / "pets.npz", images=_colour_images(60, 8, 8), labels=labels)
        name = f"npz:{tmp_path / 'pets.npz'}"
    size = 32 if name == "shapes:200" else 8
    probe = load_probe(name, image_shape=(3, size, size), test_fraction=0.3)
    assert probe.class_names == class_names
    assert probe.queries.classes_from_data == name.startswith("npz")


def test_probe_of_pairs_has_their_images_in_the_channels_of_the_training_data() -> None:
    probe = load_probe("shapes:50", image_shape=(1, 32, 32), test_fraction=0.3)
    pairs = load_dataset("shapes:50").train
    np.testing.assert_array_equal(probe.index.images, with_channels(np.asarray(pairs.images), 1))
    np.testing.assert_array_equal(probe.index.labels, pairs.labels)


@pytest.mark.parametrize("label", [-1, 3])
def test_probe_with_a_label_without_a_name_is_refused(label: int) -> None:
    queries = make_records(20, prefix="query")
    labels = np.where(np.arange(20) == 7, label, np.arange(20) % 3)
    queries = dataclasses.replace(queries, labels=labels.astype(np.int64))
    with pytest.raises(DataError, match=r"1 of 20 labels are not\. Name every class"):
        Probe(name="other", index=make_records(40), queries=queries, class_names=("a", "b", "c"))


def test_probes_of_one_name_are_refused(tmp_path: Path) -> None:
    names = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        names.append(_write(tmp_path / folder / "faces.npz", _colour_images(40, 8, 8)))
    with pytest.raises(ConfigError, match="must have different names"):
        load_probes(names, load_dataset("digits"), test_fraction=0.2)


# Scores


def test_probe_is_scored_as_the_training_data_are() -> None:
    config, probe = make_config(num_steps=2), _probe()
    result = train(config, _data())
    expected = evaluation.evaluate(
        result.encoder,
        Scoring(
            index=probe.index,
            queries=probe.queries,
            config=config.evaluation,
            view_config=config.views,
            seed=config.public_seed,
            device="cpu",
        ),
    )
    assert {name: result.metrics[name] for name in SCORES} == {
        f"transfer_{name}/other": score for name, score in expected.items()
    }


def test_untrained_network_is_probed_where_it_is_scored() -> None:
    both = EvaluationConfig(also_untrained=True)
    metrics = train(make_config(num_steps=1, evaluation=both), _data()).metrics
    assert {f"untrained_{name}" for name in SCORES} <= set(metrics)
    assert not any("untrained_t" in name for name in train(make_config(num_steps=1), _data()).metrics)


def test_probes_obey_the_cap_on_queries() -> None:
    few = EvaluationConfig(also_untrained=False, max_query_records=1)
    metrics = train(make_config(num_steps=1, evaluation=few), _data()).metrics
    assert {metrics[name] for name in SCORES} <= {0.0, 1.0}


def test_probes_change_nothing_of_the_training() -> None:
    config = make_config(num_steps=2, seeded_non_private=True)
    with_probes, without = train(config, _data()), train(config, make_data())
    for one, other in zip(with_probes.encoder.parameters(), without.encoder.parameters(), strict=True):
        assert torch.equal(one, other)


def test_probes_are_not_scored_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    data, scored = _data(), []

    def noted(encoder: Encoder, scoring: Scoring) -> dict[str, float]:
        scored.append(scoring.queries)
        return compute(encoder, scoring)

    compute = evaluation.evaluate
    monkeypatch.setattr(evaluation, "evaluate", noted)
    often = EvaluationConfig(also_untrained=False, score_every_steps=1)
    result = train(make_config(num_steps=2, evaluation=often), data)
    assert "knn_accuracy_during" in result.series
    assert sum(queries is data.queries for queries in scored) == 4
    assert sum(queries is data.probes[0].queries for queries in scored) == 1


# Zero-shot, by both towers


@pytest.mark.parametrize("with_names", [True, False])
def test_zero_shot_of_probes_has_a_row_beside_that_of_the_trial_itself(with_names: bool) -> None:
    of_probe = {"transfer_knn_accuracy/digits": [0.5]}
    if with_names:
        of_probe |= {"transfer_zero_shot_accuracy/digits": [0.2]}
    own = {"zero_shot_accuracy": [0.3], "image_to_text_recall_at_1": [0.1], "knn_accuracy": [0.4]}
    rows = by_probe(pd.DataFrame({"scored_on": ["shapes"], **own, **of_probe})).set_index("probe_dataset")
    assert rows["knn_accuracy"].to_dict() == {"shapes": 0.4, "digits": 0.5}
    assert "image_to_text_recall_at_1" not in rows
    if with_names:
        assert rows["zero_shot_accuracy"].to_dict() == {"shapes": 0.3, "digits": 0.2}
    assert ("zero_shot_accuracy" in rows) == with_names
    assert list(score_names(rows))[:with_names] == ["zero_shot_accuracy"][:with_names]


# Release


@pytest.mark.parametrize("name", METRICS_PER_DATASET)
def test_transfer_score_is_seen_where_all_it_is_computed_from_is_public(name: str) -> None:
    values = {f"{name}/digits": 0.5}
    for public in (True, False):
        shown = visible(values, training_data_is_public=False, evaluation_data_is_public=public)
        assert bool(shown) == public


@pytest.mark.parametrize("name", ["transfer_knn_accuracy", "transfer_knn_accuracy/", "train_loss/digits"])
def test_metric_of_a_data_set_has_a_name_of_its_own(name: str) -> None:
    assert find_metric(name) is None
    with pytest.raises(ConfigError, match="unknown metric"):
        visible({name: 1.0}, training_data_is_public=True, evaluation_data_is_public=True)


def test_private_training_shows_the_scores_of_public_probes_and_nothing_else_of_records() -> None:
    metrics = train(make_config(num_steps=2), _data(private=True)).metrics
    assert set(SCORES) <= set(metrics)
    released = {name: find_metric(name) for name in metrics}
    assert all(metric and metric.release is not Release.PRIVATE_ONLY for metric in released.values())


def test_private_training_refuses_probes_that_are_not_public() -> None:
    data = dataclasses.replace(_data(private=True), evaluation_is_public=False)
    with pytest.raises(ConfigError, match="the probes of a score must be public"):
        train(make_config(num_steps=2), data)
