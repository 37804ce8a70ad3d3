"""An exported auto-encoder: its features are those of the training, and others can start from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dpgcl_core.errors import ConfigError, StorageError
from tests.sweeps.support import write_npz
from tests.trainers.exporting import run_small_sweep, same_weights
from trainers.embed.command import main as embed
from trainers.embed.embed_images import embed_images
from trainers.export.export_folder import load_encoder, read_description
from trainers.export.trial import main as export
from trainers.models.masked import MaskedAutoEncoder
from trainers.training.warm_start import read_warm_start

MASKED = ("--method", "dp_mae", "--network", "mae-toy", "--patch-size", "2", "--group-sizes", "4")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MaskedAutoEncoder]:
    """The folder of a private training's model, and the network that was trained."""
    root = tmp_path_factory.mktemp("storage")
    trained = run_small_sweep(root, "masked", *MASKED, "--no-non-private")
    (name,) = trained
    assert (
        export(["--storage", str(root), "--sweep", "masked", "--trial", name, "--to", str(root / "m")]) == 0
    )
    network = trained[name]
    assert isinstance(network, MaskedAutoEncoder)
    return root / "m", network


@pytest.mark.ci
def test_exported_network_is_the_trained_one(exported: tuple[Path, MaskedAutoEncoder]) -> None:
    folder, trained = exported
    network, description = load_encoder(folder)
    assert isinstance(network, MaskedAutoEncoder)
    assert same_weights(network.state_dict(), trained)
    assert (description.kind, description.method, description.network) == (
        "masked_auto_encoder",
        "dp_mae",
        "mae-toy",
    )
    assert description.masked is not None
    assert (description.masked.patch_size, description.masked.mask_ratio) == (2, 0.75)
    images = torch.randn(3, *description.image_shape)
    with torch.no_grad():
        assert torch.allclose(network.features(images), trained.eval().features(images), atol=1e-6)


def test_embeddings_are_the_encoders_features(
    exported: tuple[Path, MaskedAutoEncoder], tmp_path: Path
) -> None:
    folder, trained = exported
    given, to = write_npz(tmp_path / "images.npz", 30), tmp_path / "out.npz"
    assert embed(["--model", str(folder), "--images", given, "--to", str(to)]) == 0
    images = np.load(tmp_path / "images.npz")["images"].reshape(30, *read_description(folder).image_shape)
    assert np.allclose(np.load(to)["embeddings"], embed_images(trained, images), atol=1e-5)
    with pytest.raises(ConfigError, match=r"--features projection needs.*Leave --features out"):
        embed_images(trained, images, features="projection")


def test_another_training_starts_from_it_whole(exported: tuple[Path, MaskedAutoEncoder]) -> None:
    folder, _ = exported
    start = read_warm_start(folder)
    assert start.from_records
    assert "the exported model of sweep masked" in start.origin


@pytest.mark.parametrize(("name", "value"), [("patch_size", "2"), ("patch_size", 2.0), ("mask_ratio", "x")])
def test_description_of_another_kind_of_number_is_damaged(
    name: str, value: object, exported: tuple[Path, MaskedAutoEncoder], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported[0], tmp_path / "m"))
    values = json.loads((folder / "model.json").read_text())
    values["masked"][name] = value
    (folder / "model.json").write_text(json.dumps(values))
    with pytest.raises(StorageError, match=r"is damaged. Export the model again"):
        load_encoder(folder)
