"""An exported classifier: its answers and features are those of the training, whatever its encoder is."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpgcl_core.errors import ConfigError, StorageError
from tests.sweeps.support import write_npz
from tests.trainers.exporting import run_small_sweep, same_weights, write_small_model
from trainers.classify import main as classify
from trainers.classify import probabilities
from trainers.config.training import NetworkConfig
from trainers.embed.command import main as embed
from trainers.embed.embed_images import embed_images
from trainers.export.description import ClassifierDescription, ModelDescription
from trainers.export.export_folder import Statement, load_classifier, load_clip, load_encoder, write_model
from trainers.export.trial import main as export
from trainers.models.classifier import Classifier
from trainers.models.encoder import build_encoder
from trainers.training.warm_start import read_warm_start
from trainers.views.image_views import normalise

ENCODERS = {
    "tiny_cnn": (),
    "mae-toy": ("--patch-size", "2"),
    "cap-toy": ("--patch-size", "4"),
    "clip-tiny": ("--image-size", "32"),
}
KINDS = {"tiny_cnn": "image_encoder", "mae-toy": "masked_auto_encoder", "cap-toy": "captioner"}
IMAGES = np.random.default_rng(2).integers(0, 256, (5, 1, 8, 8), dtype=np.uint8)


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Classifier]:
    """The folder of a classifier that no sweep made."""
    encoder = build_encoder(NetworkConfig(name="tiny_cnn", embedding_dim=8), (1, 8, 8), seed=3)
    network = Classifier(encoder, (1, 8, 8), num_classes=4, trained_layers="all")
    about = ClassifierDescription(encoder="image_encoder", num_classes=4, trained_layers="all")
    given: dict[str, Any] = {
        **dict.fromkeys(("promise", "sweep", "trial", "choice", "dataset", "neighboring_relation"), "x"),
        **dict.fromkeys(("epsilon", "delta", "sweep_epsilon", "sweep_delta"), 1.0),
    }
    description = ModelDescription(
        kind="classifier",
        classifier=about,
        network="tiny_cnn",
        embedding_dim=8,
        image_shape=(1, 8, 8),
        method="dp_classifier",
        data="private",
        guarantee_label="proven",
        num_steps=2,
        **given,
    )
    folder = tmp_path / "small"
    write_model(folder, description, network.state_dict(), Statement(values={"data": "private"}, page=""))
    return folder, network.eval()


def test_classes_of_images_are_the_networks(small: tuple[Path, Classifier], tmp_path: Path) -> None:
    folder, network = small
    np.savez(tmp_path / "images.npz", images=IMAGES, ids=[f"i{k}" for k in range(5)])
    to = tmp_path / "classes.csv"
    assert classify(["--model", str(folder), "--images", f"npz:{tmp_path}/images.npz", "--to", str(to)]) == 0
    with torch.no_grad():
        expected = network(normalise(torch.from_numpy(IMAGES))).softmax(1)
    rows = list(csv.DictReader(to.open()))
    assert [row["id"] for row in rows] == [f"i{k}" for k in range(5)]
    assert [int(row["label"]) for row in rows] == expected.argmax(1).tolist()
    assert [float(row["probability"]) for row in rows] == pytest.approx(
        expected.max(1).values.tolist(), abs=1e-5
    )
    assert np.allclose(probabilities(network, IMAGES, batch_size=2), expected.numpy(), atol=1e-6)
    with pytest.raises(StorageError, match="exists and is not overwritten"):
        classify(["--model", str(folder), "--images", f"npz:{tmp_path}/images.npz", "--to", str(to)])


def test_only_a_classifier_tells_classes(small: tuple[Path, Classifier], tmp_path: Path) -> None:
    folder, network = small
    found, description = load_encoder(str(folder))  # a string will do
    assert isinstance(found, Classifier)
    assert same_weights(found.state_dict(), network)
    assert description.weights_file == "model.safetensors"
    write_small_model(tmp_path / "other")
    with pytest.raises(ConfigError, match="must be a classifier, trained by dp_classifier; got kind"):
        load_classifier(tmp_path / "other")
    with pytest.raises(ConfigError, match="must be a CLIP model"):
        load_clip(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("encoder", "classifier"),
        ("encoder", "x"),
        ("num_classes", "4"),
        ("num_classes", 1),
        ("trained_layers", ""),
    ],
)
def test_description_that_makes_no_sense_is_damaged(
    name: str, value: object, small: tuple[Path, Classifier]
) -> None:
    values = json.loads((small[0] / "model.json").read_text())
    values["classifier"][name] = value
    (small[0] / "model.json").write_text(json.dumps(values))
    with pytest.raises(StorageError, match=r"is damaged. Export the model again"):
        load_classifier(small[0])


@pytest.mark.ci
@pytest.mark.parametrize("layers", ["head", "all"])
@pytest.mark.parametrize("name", ENCODERS)
def test_exported_classifier_is_the_trained_one(name: str, layers: str, tmp_path: Path) -> None:
    given = ("--method", "dp_classifier", "--network", name, *ENCODERS[name], "--trained-layers", layers)
    trained = run_small_sweep(tmp_path, "classes", *given, "--group-sizes", "4", "--no-non-private")
    ((trial, network),) = trained.items()
    chosen = ["--storage", str(tmp_path), "--sweep", "classes", "--trial", trial]
    assert export([*chosen, "--to", str(tmp_path / "m")]) == 0
    found, description = load_classifier(f"{tmp_path}/m")
    about = description.classifier
    assert same_weights(found.state_dict(), network)
    assert about is not None
    assert (about.encoder, about.trained_layers) == (KINDS.get(name, "clip"), layers)
    assert (description.kind, about.num_classes) == ("classifier", 10)
    assert "classifier_accuracy" in description.scores
    to, images = tmp_path / "out.npz", write_npz(tmp_path / "images.npz", 12)
    assert embed(["--model", str(tmp_path / "m"), "--images", images, "--to", str(to)]) == 0
    side = description.image_shape[1]
    if side == 8:
        pixels = np.load(tmp_path / "images.npz")["images"].reshape(12, 1, 8, 8)
        assert np.allclose(np.load(to)["embeddings"], embed_images(network, pixels), atol=1e-5)  # type: ignore[arg-type]
    start = read_warm_start(Path(shutil.copytree(tmp_path / "m", tmp_path / "again")))
    assert start.classifies
