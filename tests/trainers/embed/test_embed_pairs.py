"""Embedding with a CLIP model: images and captions, each by its own name or place, whose is whose beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from dpgcl_core.errors import ConfigError, DataError
from tests.trainers.data.test_webdataset import sample, write_shard
from tests.trainers.exporting import write_pairs, write_small_clip, write_small_model
from trainers.data.loading import load_dataset
from trainers.embed.command import main
from trainers.embed.embed_pairs import names_of, read_captions
from trainers.models.clip.clip_encoder import ImageTextEncoder
from trainers.views.image_views import normalise

LONG = "word " * 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ImageTextEncoder]:
    """An exported CLIP model, and what was trained."""
    folder = tmp_path_factory.mktemp("exported") / "m"
    return folder, write_small_clip(folder)


def _pixels(number: int, size: int = 32) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)


def _embed(model: tuple[Path, ImageTextEncoder], to: Path, *more: str) -> dict[str, NDArray[Any]]:
    assert main(["--model", str(model[0]), "--to", str(to), "--device", "cpu", *more]) == 0
    with np.load(to, allow_pickle=False) as archive:
        return dict(archive)


@torch.no_grad()
def _image(encoder: ImageTextEncoder, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = encoder.embed_images(normalise(torch.from_numpy(pixels)[None]))[0].numpy()
    return found


@torch.no_grad()
def _text(encoder: ImageTextEncoder, caption: str) -> NDArray[np.float32]:
    found: NDArray[np.float32] = encoder.embed_texts(encoder.tokenizer([caption]).tokens)[0].numpy()
    return found


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Three images in a csv file with commas, the first with two captions."""
    for number in range(3):
        Image.fromarray(_pixels(number)).save(tmp_path / f"{number}.png")
    rows = [
        "filepath,title",
        "0.png,a red square",
        "1.png,one",
        "./0.png,a blue dog",
        '2.png,"two, and more"',
    ]
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    return tmp_path / "pairs.csv"


def test_images_stand_by_their_paths(model: tuple[Path, ImageTextEncoder], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(3):
        Image.fromarray(_pixels(number)).save(tmp_path / "a" / f"{number}.png")
    found = _embed(model, tmp_path / "e.npz", "--images", f"folder:{tmp_path / 'a'}", "--batch-size", "2")
    assert set(found) == {"ids", "image_embeddings", "about"}
    for name, row in zip(found["ids"].tolist(), found["image_embeddings"], strict=True):
        expected = _image(model[1], _pixels(int(name[0])).transpose(2, 0, 1))
        assert row == pytest.approx(expected, abs=1e-5)


def test_grey_images_of_another_size_become_the_models(
    model: tuple[Path, ImageTextEncoder], tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", images=_pixels(0, 20)[None, :, :, 0])
    found = _embed(model, tmp_path / "e.npz", "--images", f"npz:{tmp_path / 'a.npz'}")
    resized = load_dataset(f"npz:{tmp_path / 'a.npz'}", image_size=32).train.images[np.arange(1)][0]
    assert found["image_embeddings"][0] == pytest.approx(_image(model[1], resized), abs=1e-5)


def test_both_sides_of_pairs_are_embedded_and_captions_know_their_image(
    model: tuple[Path, ImageTextEncoder], tmp_path: Path, pairs: Path
) -> None:
    found = _embed(model, tmp_path / "e.npz", "--images", f"csv:{pairs}", "--csv-separator", ",")
    assert found["ids"].tolist() == ["0.png", "1.png", "2.png"]
    captions = ["a red square", "a blue dog", "one", "two, and more"]
    assert found["text_owners"].tolist() == [0, 0, 1, 2]
    for number, row in enumerate(found["image_embeddings"]):
        expected = _image(model[1], _pixels(number).transpose(2, 0, 1))
        assert row == pytest.approx(expected, abs=1e-5)
    for caption, row in zip(captions, found["text_embeddings"], strict=True):
        assert row == pytest.approx(_text(model[1], caption), abs=1e-5)


def test_parquet_holds_what_npz_holds(
    model: tuple[Path, ImageTextEncoder], tmp_path: Path, pairs: Path
) -> None:
    options = ["--images", f"csv:{pairs}", "--csv-separator", ","]
    arrays = _embed(model, tmp_path / "e.npz", *options)
    main(["--model", str(model[0]), "--to", str(tmp_path / "e.parquet"), "--device", "cpu", *options])
    rows = pq.read_table(tmp_path / "e.parquet").to_pylist()
    images = [row for row in rows if row["image_embedding"] is not None]
    texts = [row for row in rows if row["text_embedding"] is not None]
    assert [row["id"] for row in images] == arrays["ids"].tolist()
    assert [row["text_owner"] for row in texts] == arrays["text_owners"].tolist()
    assert [row["id"] for row in texts] == arrays["ids"][arrays["text_owners"]].tolist()
    assert np.array_equal([row["image_embedding"] for row in images], arrays["image_embeddings"])
    assert np.array_equal([row["text_embedding"] for row in texts], arrays["text_embeddings"])
    assert len(images) + len(texts) == len(rows)


def test_images_are_named_by_the_column_id(model: tuple[Path, ImageTextEncoder], tmp_path: Path) -> None:
    for number in range(3):
        Image.fromarray(_pixels(number)).save(tmp_path / f"{number}.png")
    people = [("0.png", "x", "b"), ("1.png", "y", "a"), ("2.png", "z", "b")]
    lines = ["\t".join(row) for row in [("filepath", "title", "id"), *people]]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    found = _embed(model, tmp_path / "e.npz", "--images", f"csv:{tmp_path / 'a.csv'}")
    assert found["ids"].tolist() == ["b", "a", "b"]
    for row, number in enumerate(range(3)):
        expected = _image(model[1], _pixels(number).transpose(2, 0, 1))
        assert found["image_embeddings"][row] == pytest.approx(expected, abs=1e-5)


def test_stored_pairs_are_embedded_in_their_order(
    model: tuple[Path, ImageTextEncoder], tmp_path: Path
) -> None:
    write_shard(tmp_path / "a.tar", [sample(1, "one"), sample(2, "two", "more"), sample(3, "three")])
    source = f"webdataset:{tmp_path / 'a.tar'}"
    found = _embed(model, tmp_path / "e.npz", "--images", source, "--batch-size", "2")
    images = load_dataset(source, image_size=32).train.images[np.arange(3)]
    assert found["ids"].tolist() == [0, 1, 2]
    assert found["text_owners"].tolist() == [0, 1, 1, 2]
    for row, pixels in zip(found["image_embeddings"], images, strict=True):
        assert row == pytest.approx(_image(model[1], pixels), abs=1e-5)


def test_test_pairs_follow_the_training_pairs(model: tuple[Path, ImageTextEncoder], tmp_path: Path) -> None:
    dataset = load_dataset("shapes:20")
    assert dataset.test is not None
    found = _embed(model, tmp_path / "e.npz", "--images", "shapes:20")
    num_images = len(dataset.train) + len(dataset.test)
    assert found["ids"].tolist() == list(range(num_images))
    assert found["text_owners"].tolist() == sorted(found["text_owners"].tolist())
    assert set(found["text_owners"].tolist()) == set(range(num_images))
    last = dataset.test.images[np.array([len(dataset.test) - 1])][0]
    assert found["image_embeddings"][-1] == pytest.approx(_image(model[1], last), abs=1e-5)


def test_captions_are_read_in_the_order_of_their_file(tmp_path: Path) -> None:
    captions, path = ["a red, square", "zwei", "a red, square"], tmp_path / "a.txt"
    path.write_text("\r\n".join(captions) + "\r\n")
    assert read_captions(path) == captions


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.parquet"])
def test_tables_of_captions_are_refused_with_the_fix(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("title\none\n")
    with pytest.raises(ConfigError, match="one caption per line"):
        read_captions(tmp_path / name)


def test_texts_alone_are_embedded(model: tuple[Path, ImageTextEncoder], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a red square\na blue dog\n")
    found = _embed(model, tmp_path / "e.npz", "--texts", str(tmp_path / "a.txt"))
    assert set(found) == {"text_embeddings", "about"}
    assert found["text_embeddings"][1] == pytest.approx(_text(model[1], "a blue dog"), abs=1e-5)
    assert np.linalg.norm(found["text_embeddings"], axis=1) == pytest.approx(1, abs=1e-5)


def test_texts_beside_images_belong_to_none(model: tuple[Path, ImageTextEncoder], tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=_pixels(0)[None])
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    more = ["--images", f"npz:{tmp_path / 'a.npz'}", "--texts", str(tmp_path / "a.txt")]
    found = _embed(model, tmp_path / "e.npz", *more)
    assert (len(found["image_embeddings"]), len(found["text_embeddings"])) == (1, 2)
    assert "text_owners" not in found


def test_captions_that_were_cut_are_counted_on_the_terminal_alone(
    model: tuple[Path, ImageTextEncoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(f"short\n{LONG}\n{LONG}and more\n")
    found = _embed(model, tmp_path / "e.npz", "--texts", str(tmp_path / "a.txt"), "--batch-size", "2")
    shown = capsys.readouterr()
    assert "2 of 3 captions" in shown.err
    assert "captions were cut" not in shown.out
    about = json.loads(str(found["about"]))
    assert set(about) == {"model_sha256", "features", "note"}


def test_captions_that_fit_are_not_spoken_of(
    model: tuple[Path, ImageTextEncoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("short\n")
    _embed(model, tmp_path / "e.npz", "--texts", str(tmp_path / "a.txt"))
    assert capsys.readouterr().err == ""


def test_empty_captions_are_counted_and_none_is_shown(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a secret\n\nb\n")
    with pytest.raises(DataError, match=r"1 of the 3 in .* are not valid") as caught:
        read_captions(tmp_path / "a.txt")
    assert "secret" not in str(caught.value)


def test_images_within_a_table_are_named_by_the_column_id(tmp_path: Path) -> None:
    images = []
    for number in (0, 1, 0):
        Image.fromarray(_pixels(number)).save(tmp_path / "a.png")
        images.append((tmp_path / "a.png").read_bytes())
    pq.write_table(pa.table({"image": images, "title": ["x"] * 3, "id": [7, 8, 9]}), tmp_path / "a.parquet")
    dataset = load_dataset(f"parquet:{tmp_path / 'a.parquet'}")
    assert list(names_of(dataset)) == ["7", "8"]


@pytest.mark.parametrize("content", [None, b""])
def test_captions_that_cannot_be_read_are_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError):
        read_captions(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ((), "nothing to embed"),
        (("--images", "digits", "--features", "backbone"), "--features applies only to image encoders"),
        (("--images", "shapes:20", "--texts", "a.txt"), "cannot be combined with images that have captions"),
    ],
)
def test_what_a_clip_model_cannot_do_is_refused(
    model: tuple[Path, ImageTextEncoder], tmp_path: Path, more: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        _embed(model, tmp_path / "e.npz", *more)
    assert not (tmp_path / "e.npz").exists()


def test_encoder_of_images_takes_no_texts(tmp_path: Path) -> None:
    write_small_model(tmp_path / "m")
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(ConfigError, match="needs a CLIP model"):
        main(["--model", str(tmp_path / "m"), "--texts", str(tmp_path / "a.txt"), "--to", "e.npz"])


def test_encoder_of_images_embeds_the_images_of_pairs(tmp_path: Path) -> None:
    write_small_model(tmp_path / "m", image_shape=(3, 8, 8))
    source = write_pairs(tmp_path / "pairs.parquet", 3)
    main(["--model", str(tmp_path / "m"), "--images", source, "--to", str(tmp_path / "e.npz")])
    with np.load(tmp_path / "e.npz", allow_pickle=False) as archive:
        assert set(archive) == {"ids", "embeddings", "about"}
        assert len(archive["embeddings"]) == 3
