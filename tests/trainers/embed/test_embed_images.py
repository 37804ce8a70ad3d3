"""Embedding images with an exported model: every image once, by its name, as the trained network would."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from dpgcl_core.errors import ConfigError, DataError, StorageError
from tests.trainers.exporting import write_small_model
from trainers.data.channels import with_channels
from trainers.embed.command import main
from trainers.embed.embed_images import embed_images, read_images
from trainers.evaluation.features import embed_features
from trainers.export.export_folder import load_encoder
from trainers.models.encoder import to_fast_layout
from trainers.views.image_views import normalise

CPU = torch.device("cpu")


def _pixels(number: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with seven grey 8 × 8 images in two classes."""
    for number in range(7):
        place = tmp_path / "images" / ("cats" if number % 2 else "dogs")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_pixels(number, 8, 8)).save(place / f"{number}.png")
    return tmp_path / "images"


def _embed(folder: Path, source: object, to: Path, *more: str) -> dict[object, NDArray[np.float32]]:
    main(["--model", str(folder), "--images", str(source), "--to", str(to), "--device", "cpu", *more])
    rows = pq.read_table(to).to_pylist()
    return {row["id"]: np.array(row["embedding"], dtype=np.float32) for row in rows}


def test_backbone_embeddings_are_the_features_that_are_scored(tmp_path: Path) -> None:
    trained = write_small_model(tmp_path / "m")
    to_fast_layout(trained, CPU, (1, 8, 8))  # as it was while it trained
    pixels = _pixels(0, 20, 1, 8, 8)
    found = embed_images(load_encoder(tmp_path / "m")[0], pixels)
    assert np.array_equal(found, embed_features(trained, pixels))


def test_projection_is_what_the_loss_saw(tmp_path: Path) -> None:
    trained = write_small_model(tmp_path / "m")
    to_fast_layout(trained, CPU, (1, 8, 8))
    pixels = _pixels(0, 20, 1, 8, 8)
    found = embed_images(load_encoder(tmp_path / "m")[0], pixels, features="projection")
    with torch.no_grad():
        expected = trained(normalise(torch.from_numpy(pixels))).numpy()
    assert np.array_equal(found, expected)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1)


def test_batch_size_changes_nothing_but_rounding(tmp_path: Path) -> None:
    write_small_model(tmp_path / "m")
    encoder, pixels = load_encoder(tmp_path / "m")[0], _pixels(0, 20, 1, 8, 8)
    whole, parts = (embed_images(encoder, pixels, batch_size=size) for size in (512, 3))
    assert parts == pytest.approx(whole, abs=1e-4)


def test_every_image_of_a_folder_stands_by_its_own_path(tmp_path: Path, images: Path) -> None:
    write_small_model(tmp_path / "m")
    found = _embed(tmp_path / "m", f"folder:{images}", tmp_path / "e.parquet")
    encoder = load_encoder(tmp_path / "m")[0]
    assert len(found) == 7
    for number in range(7):
        name = f"{'cats' if number % 2 else 'dogs'}/{number}.png"
        alone = embed_images(encoder, _pixels(number, 8, 8)[None, None])[0]
        assert found[name] == pytest.approx(alone, abs=1e-4)


def test_parquet_rows_stand_by_their_ids(tmp_path: Path) -> None:
    write_small_model(tmp_path / "m")
    encoded = []
    for number in range(4):
        buffer = io.BytesIO()
        Image.fromarray(_pixels(number, 8, 8)).save(buffer, format="PNG")
        encoded.append(buffer.getvalue())
    pq.write_table(pa.table({"image": encoded, "id": [40, 30, 20, 10]}), tmp_path / "scans.parquet")
    found = _embed(tmp_path / "m", f"parquet:{tmp_path / 'scans.parquet'}", tmp_path / "e.parquet")
    assert list(found) == [40, 30, 20, 10]
    alone = embed_images(load_encoder(tmp_path / "m")[0], _pixels(3, 1, 1, 8, 8).reshape(1, 1, 8, 8))[0]
    assert found[10] == pytest.approx(alone, abs=1e-4)


def test_npz_rows_of_both_splits_are_embedded_in_order(tmp_path: Path) -> None:
    pixels = _pixels(0, 9, 8, 8)
    np.savez(
        tmp_path / "a.npz",
        train_images=pixels[:5],
        test_images=pixels[5:],
        train_ids=np.array(list("abcde")),
        test_ids=np.array(list("vwxy")),
    )
    names, found = read_images(f"npz:{tmp_path / 'a.npz'}", (1, 8, 8))
    assert list(names) == list("abcdevwxy")
    assert np.array_equal(found[:, 0], pixels)


def test_images_without_names_are_numbered(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=_pixels(0, 3, 8, 8))
    assert read_images(f"npz:{tmp_path / 'a.npz'}", (1, 8, 8))[0].tolist() == [0, 1, 2]


def test_colour_becomes_grey_as_when_grey_images_are_loaded() -> None:
    colour = _pixels(0, 16, 16, 3)
    expected = np.asarray(Image.fromarray(colour).convert("L"))
    assert np.array_equal(with_channels(colour.transpose(2, 0, 1)[None], 1)[0, 0], expected)


def test_grey_is_repeated_for_a_model_of_colour_images() -> None:
    grey = _pixels(0, 2, 1, 4, 4)
    found = with_channels(grey, 3)
    assert all(np.array_equal(found[:, channel], grey[:, 0]) for channel in range(3))


def test_images_are_resized_to_the_models_input(tmp_path: Path) -> None:
    write_small_model(tmp_path / "m", image_shape=(3, 16, 16))
    np.savez(tmp_path / "a.npz", images=_pixels(0, 3, 20, 30))
    found = _embed(tmp_path / "m", f"npz:{tmp_path / 'a.npz'}", tmp_path / "e.parquet")
    assert len(found) == 3


def test_model_of_no_square_refuses_to_stretch(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=_pixels(0, 3, 8, 8))
    with pytest.raises(ConfigError, match="8×12 pixels"):
        read_images(f"npz:{tmp_path / 'a.npz'}", (1, 8, 12))


def test_unreadable_images_are_counted_and_nothing_is_written(tmp_path: Path, images: Path) -> None:
    write_small_model(tmp_path / "m")
    (images / "cats" / "secret-name.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="among 8 images: 1 unreadable") as caught:
        _embed(tmp_path / "m", f"folder:{images}", tmp_path / "e.parquet")
    assert "secret-name" not in str(caught.value)
    assert not (tmp_path / "e.parquet").exists()


def test_npz_holds_what_parquet_holds(tmp_path: Path, images: Path) -> None:
    write_small_model(tmp_path / "m")
    table = _embed(tmp_path / "m", f"folder:{images}", tmp_path / "e.parquet")
    main(["--model", str(tmp_path / "m"), "--images", f"folder:{images}", "--to", str(tmp_path / "e.npz")])
    with np.load(tmp_path / "e.npz", allow_pickle=False) as archive:
        assert archive["ids"].tolist() == list(table)
        assert np.array_equal(archive["embeddings"], np.stack(list(table.values())))


def test_file_says_which_model_made_it_and_that_it_is_private(
    tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_small_model(tmp_path / "m")
    _embed(tmp_path / "m", f"folder:{images}", tmp_path / "e.parquet")
    about = json.loads(pq.read_schema(tmp_path / "e.parquet").metadata[b"dpgcl"])
    assert about["model_sha256"] == load_encoder(tmp_path / "m")[1].sha256
    assert "private data themselves" in about["note"]
    assert about["note"] in capsys.readouterr().out


@pytest.mark.parametrize("name", ["e.csv", "e"])
def test_other_formats_are_refused_before_anything_is_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"\.parquet or \.npz"):
        main(["--model", "none", "--images", "digits", "--to", str(tmp_path / name)])


def test_existing_file_is_not_overwritten(tmp_path: Path, images: Path) -> None:
    write_small_model(tmp_path / "m")
    (tmp_path / "e.parquet").write_text("mine")
    with pytest.raises(StorageError, match="not overwritten"):
        main(
            [
                "--model",
                str(tmp_path / "m"),
                "--images",
                f"folder:{images}",
                "--to",
                str(tmp_path / "e.parquet"),
            ]
        )
    assert (tmp_path / "e.parquet").read_text() == "mine"


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not an exported model"):
        main(["--model", str(tmp_path), "--images", "digits", "--to", str(tmp_path / "e.npz")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "digits"], "--model"),
        (["--model", "m"], "nothing to embed"),
        (["--model", "m", "--images", "digits", "--batch-size", "0"], "batch_size must be at least 1; got 0"),
        (["--model", "m", "--images", "digits", "--features", "head"], "invalid choice 'head'.*projection"),
        (["--model", "m", "--imagse", "digits"], "unknown option '--imagse'; did you mean '--images'"),
    ],
)
def test_command_refuses_bad_input_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        main(arguments)
    assert "\n" not in str(caught.value)


def test_labels_and_ids_are_the_same_in_both_formats(tmp_path: Path, images: Path) -> None:
    write_small_model(tmp_path / "m")
    (images / "cats/tabby").mkdir()
    Image.fromarray(_pixels(9, 8, 8)).save(images / "cats/tabby/9.png")
    _embed(tmp_path / "m", f"folder:{images}", tmp_path / "e.parquet")
    main(["--model", str(tmp_path / "m"), "--images", f"folder:{images}", "--to", str(tmp_path / "e.npz")])
    rows = pq.read_table(tmp_path / "e.parquet").to_pydict()
    with np.load(tmp_path / "e.npz") as arrays:
        assert (rows["id"], rows["label"]) == (arrays["ids"].tolist(), arrays["labels"].tolist())
    assert dict(zip(rows["id"], rows["label"], strict=True))["cats/tabby/9.png"] == "cats"
    assert rows["label"] == [name.partition("/")[0] for name in rows["id"]]


def test_numbered_classes_stay_numbers(tmp_path: Path) -> None:
    write_small_model(tmp_path / "m")
    np.savez(tmp_path / "own.npz", images=_pixels(0, 4, 8, 8), labels=np.array([3, 1, 1, 2]))
    main(
        [
            "--model",
            str(tmp_path / "m"),
            "--images",
            f"npz:{tmp_path}/own.npz",
            "--to",
            f"{tmp_path}/e.parquet",
        ]
    )
    assert pq.read_table(tmp_path / "e.parquet")["label"].to_pylist() == [3, 1, 1, 2]
