"""An exported captioner: features, captions and weights are those of the training."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from dpgcl_core.errors import ConfigError, StorageError
from tests.trainers.exporting import run_small_sweep, same_weights
from trainers.caption import main as caption
from trainers.data.shapes import make_shape_pairs
from trainers.embed.command import main as embed
from trainers.embed.embed_images import embed_images
from trainers.export.export_folder import load_captioner, load_clip, load_encoder
from trainers.export.trial import main as export
from trainers.models.captioner import Captioner
from trainers.training.warm_start import read_warm_start
from trainers.views.image_views import normalise

pytestmark = pytest.mark.ci  # trainings and sweeps of seconds each

CAPTIONS = ("--dataset", "shapes:200", "--method", "dp_cap", "--network", "cap-toy", "--patch-size", "16")
CAPTIONS += ("--tie-embeddings", "--group-sizes", "4", "--learning-rate", "0.01", "--no-non-private")
IMAGES = np.asarray(make_shape_pairs(6, seed=1).images)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Captioner]:
    """The folder of a private training's model, and the network that was trained."""
    root = tmp_path_factory.mktemp("storage")
    trained = run_small_sweep(root, "captions", *CAPTIONS)
    (name,) = trained
    chosen = ["--storage", str(root), "--sweep", "captions", "--trial", name]
    assert export([*chosen, "--to", str(root / "m")]) == 0
    network = trained[name]
    assert isinstance(network, Captioner)
    np.savez(root / "images.npz", images=IMAGES)
    return root / "m", network.eval()


def test_exported_network_is_the_trained_one(exported: tuple[Path, Captioner]) -> None:
    folder, trained = exported
    network, description = load_captioner(str(folder))
    assert same_weights(network.state_dict(), trained)
    assert network.predict.weight is network.embed_tokens.weight
    assert (description.kind, description.method, description.network) == ("captioner", "dp_cap", "cap-toy")
    assert description.captioner is not None
    assert (description.captioner.patch_size, description.captioner.tie_embeddings) == (16, True)
    assert "caption_token_probability" in description.scores
    assert (folder / "privacy_statement.md").is_file()
    with pytest.raises(ConfigError, match="must be a CLIP model"):
        load_clip(folder)


def test_embeddings_are_the_encoders_features(exported: tuple[Path, Captioner], tmp_path: Path) -> None:
    folder, trained = exported
    given, to = f"npz:{folder.parent / 'images.npz'}", tmp_path / "out.npz"
    assert embed(["--model", str(folder), "--images", given, "--to", str(to)]) == 0
    expected = trained.features(normalise(torch.from_numpy(IMAGES))).detach().numpy()
    assert np.allclose(np.load(to)["embeddings"], expected, atol=1e-5)
    assert np.allclose(embed_images(load_encoder(folder)[0], IMAGES), expected, atol=1e-5)
    with pytest.raises(ConfigError, match=r"--features projection needs.*Leave --features out"):
        embed_images(trained, IMAGES, features="projection")


def test_captions_are_those_of_the_trained_network(exported: tuple[Path, Captioner], tmp_path: Path) -> None:
    folder, trained = exported
    given = ["--model", str(folder), "--images", f"npz:{folder.parent / 'images.npz'}", "--batch-size", "4"]
    to = tmp_path / "new" / "captions.csv"
    assert caption([*given, "--to", str(to)]) == 0
    with to.open(newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file))
    assert header == ["id", "caption"]
    assert [row[0] for row in rows] == [str(number) for number in range(6)]
    assert [row[1] for row in rows] == trained.generate(normalise(torch.from_numpy(IMAGES)))
    with pytest.raises(StorageError, match="exists and is not overwritten"):
        caption([*given, "--to", str(to)])
    with pytest.raises(ConfigError, match=r"--to must be a \.csv file"):
        caption([*given, "--to", str(tmp_path / "captions.txt")])


def test_another_training_starts_from_it_whole(exported: tuple[Path, Captioner]) -> None:
    folder, _ = exported
    start = read_warm_start(folder)
    assert start.from_records
    assert "the exported model of sweep captions" in start.origin
