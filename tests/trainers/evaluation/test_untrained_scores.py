"""Raw pixels and HOG: scored by the networks' scorer, on public records alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from skimage.feature import hog

from dpgcl_core.release.metrics import find_metric, is_reference
from trainers.config.training import EvaluationConfig
from trainers.data.dataset import Probe, TrainingData
from trainers.data.records import Records
from trainers.data.shapes import make_shape_pairs
from trainers.evaluation.features import label_scores
from trainers.evaluation.untrained_scores import hog_features, raw_pixels, reference_scores

CONFIG = EvaluationConfig()
OF_IMAGES = {
    f"{of}_{score}" for of in ("raw_pixels", "hog") for score in ("knn_accuracy", "linear_probe_accuracy")
}


def _records(n: int, seed: int, *, labelled: bool = True, shape: tuple[int, ...] = (1, 16, 16)) -> Records:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, n)
    images = rng.integers(0, 200, (n, *shape)) + 20 * labels[:, None, None, None]
    return Records(
        images=images.astype(np.uint8),
        ids=rng.integers(0, 2**63, n).astype(np.uint64),
        labels=labels if labelled else None,
    )


def _data(
    *, train_is_public: bool, evaluation_is_public: bool, probes: tuple[Probe, ...] = ()
) -> TrainingData:
    index = _records(60, 1)
    return TrainingData(
        train=index,
        index=index,
        queries=_records(30, 2),
        train_is_public=train_is_public,
        evaluation_is_public=evaluation_is_public,
        probes=probes,
    )


def _images(n: int = 4, shape: tuple[int, ...] = (1, 28, 28)) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (n, *shape), dtype=np.uint8)


def test_reference_scores_are_those_of_the_networks_scorer() -> None:
    data = _data(train_is_public=True, evaluation_is_public=True)
    assert isinstance(data.index, Records)
    assert isinstance(data.queries, Records)
    queries = data.queries

    def describe(images: Any) -> NDArray[np.float32]:
        found: NDArray[np.float32] = images.reshape(len(images), -1) / np.float32(255)
        return found

    expected = label_scores(describe, describe(queries.images), queries, data.index, CONFIG)
    found = reference_scores(data, CONFIG)
    assert set(found) == OF_IMAGES
    assert {name: found[f"raw_pixels_{name}"] for name in expected} == expected


def test_reference_scores_of_private_records_are_not_even_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With private index and queries no image of them may reach a descriptor."""

    def refused(*_: object) -> None:
        raise AssertionError("private images were described")

    monkeypatch.setattr("trainers.evaluation.untrained_scores._describe_in_batches", refused)
    assert reference_scores(_data(train_is_public=False, evaluation_is_public=False), CONFIG) == {}


def test_reference_scores_of_public_records_beside_private_training_ones_see_these_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = _data(train_is_public=False, evaluation_is_public=True)
    private = _records(50, 3)
    object.__setattr__(data, "train", private)
    object.__setattr__(private, "images", None)  # any look at them fails
    assert set(reference_scores(data, CONFIG)) == OF_IMAGES


def test_reference_scores_are_declared_references() -> None:
    probe = Probe(name="other", index=_records(20, 4), queries=_records(10, 5))
    data = _data(train_is_public=True, evaluation_is_public=True, probes=(probe,))
    found = reference_scores(data, CONFIG)
    assert len(found) == 8
    assert "hog_transfer_knn_accuracy/other" in found
    assert all(find_metric(name) is not None and is_reference(name) for name in found)


def test_reference_scores_need_labels() -> None:
    data = _data(train_is_public=True, evaluation_is_public=True)
    object.__setattr__(data, "queries", _records(30, 2, labelled=False))
    assert reference_scores(data, CONFIG) == {}


@pytest.mark.ci
def test_reference_scores_of_pairs_are_of_labelled_images_alone() -> None:
    pairs = make_shape_pairs(30, seed=0, image_size=32)
    data = TrainingData(
        train=pairs, index=pairs, queries=pairs, train_is_public=True, evaluation_is_public=True
    )
    assert set(reference_scores(data, CONFIG)) == OF_IMAGES


def test_hog_is_scikit_images_descriptor_of_four_pixel_cells() -> None:
    images = _images()
    expected = [
        hog(image[0].astype(np.float32), pixels_per_cell=(4, 4), cells_per_block=(2, 2)) for image in images
    ]
    np.testing.assert_allclose(hog_features(torch.from_numpy(images)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 8, 8), (3, 64, 64), (3, 20, 90)])
def test_descriptors_take_images_of_any_size(shape: tuple[int, ...]) -> None:
    images = torch.from_numpy(_images(2, shape))
    for features in (hog_features(images), raw_pixels(images)):
        assert features.dtype == np.float32
        assert len(features) == 2
        assert features.shape[1] > 0
        assert np.isfinite(features).all()


def test_raw_pixels_of_large_images_are_means_of_their_neighbourhoods() -> None:
    image = torch.zeros(1, 1, 64, 64, dtype=torch.uint8)
    image[..., :2, :2] = torch.tensor([[0, 255], [255, 255]])
    found = raw_pixels(image)
    assert found.shape == (1, 32 * 32)
    assert found[0, 0] == pytest.approx(0.75)
    assert not found[0, 1:].any()
