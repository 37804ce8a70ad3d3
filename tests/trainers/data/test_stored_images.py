"""Own images that stay in their files: the same records, the same training, an index that can be trusted."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from dpgcl_core.errors import DataError
from tests.trainers.conftest import make_config
from tests.trainers.data.saved_datasets import images as image_column
from tests.trainers.data.saved_datasets import save_dataset
from tests.trainers.data.test_webdataset import write_files
from trainers.config.networks import ClipNetworkConfig
from trainers.config.training import TrainingConfig
from trainers.data import image_index, own_images, parquet_files
from trainers.data.columns import codes_of, combined, text_column
from trainers.data.dataset import Dataset, TrainingData
from trainers.data.dataset_registry import DATA_SOURCES
from trainers.data.faults import RecordsError
from trainers.data.image_index import INDEX_FOLDER
from trainers.data.loading import load_dataset
from trainers.data.pair_options import PairOptions
from trainers.data.pairs import ImageTextRecords
from trainers.data.records import Records
from trainers.data.stored_images import ArrayImages, StoredImages, digests_of, in_channels
from trainers.training.loop import train
from trainers.views.caption_views import TextViewConfig

NUM = 24


def encoded(row: int, *, grey: bool = False, size: int = 8, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(row).integers(0, 256, (size, size, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if grey else pixels).save(out, kind)
    return out.getvalue()


def write_folder(folder: Path, num: int = NUM) -> str:
    for row in range(num):
        file = folder / f"class{row % 3}" / f"{row:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.write_bytes(encoded(row, grey=row % 5 == 1))
    return f"folder:{folder}"


def write_npz(folder: Path, num: int = NUM, **columns: Any) -> str:
    images = np.random.default_rng(0).integers(0, 256, (num, 8, 8, 3), dtype=np.uint8)
    np.savez(folder / "own.npz", images=images, labels=np.arange(num) % 3, **columns)
    return f"npz:{folder / 'own.npz'}"


def write_parquet(folder: Path, num: int = NUM, **columns: Any) -> str:
    for part, rows in enumerate(np.array_split(np.arange(num), 2)):
        images = [encoded(row, grey=row % 5 == 1) for row in rows]
        table = pa.table(
            {"image": images, "label": rows % 3} | {k: [v(r) for r in rows] for k, v in columns.items()}
        )
        pq.write_table(table, folder / f"{part}.parquet")
    return f"parquet:{folder}"


def write_parquet_pairs(folder: Path) -> str:
    return write_parquet(folder, title=lambda row: [f"caption {row}", "another"][: 1 + row % 2])


def write_parquet_of_paths(folder: Path) -> str:
    write_folder(folder / "images")
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.png"))
    pq.write_table(
        pa.table({"image": names, "label": [row % 3 for row in range(NUM)]}), folder / "own.parquet"
    )
    return f"parquet:{folder / 'own.parquet'}"


def write_csv(folder: Path) -> str:
    write_folder(folder / "images")
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.png"))
    lines = [f"{name}\tcaption {row}\tperson {row // 2}" for row, name in enumerate(names)]
    (folder / "own.csv").write_text(
        "\n".join(["filepath\ttitle\tperson", *lines, f"{names[0]}\tmore\tperson 0"])
    )
    return f"csv:{folder / 'own.csv'}"


def write_shards(folder: Path, num: int = NUM) -> str:
    for part, rows in enumerate(np.array_split(np.arange(num), 3)):
        images = {f"{row:03d}.png": encoded(row) for row in rows.tolist()}
        texts = {f"{row:03d}.txt": f"caption {row}".encode() for row in rows.tolist()}
        write_files(folder / f"{part}.tar", images | texts)
    return f"webdataset:{folder}"


def write_table(folder: Path, separator: str = "\t") -> str:
    write_folder(folder / "images")
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.png"))
    rows = [(name, f"class {row % 3}", f"person {row // 2}") for row, name in enumerate(names)]
    lines = [separator.join(row) for row in (("filepath", "label", "person"), *rows)]
    (folder / "labels.csv").write_text("\n".join(lines))
    return f"csv:{folder / 'labels.csv'}"


def write_classes(folder: Path, num: int = NUM) -> str:
    for part, rows in enumerate(np.array_split(np.arange(num), 3)):
        write_files(
            folder / f"{part}.tar",
            {
                f"{row:03d}.{kind}": content
                for row in rows.tolist()
                for kind, content in {
                    "jpg": encoded(row, grey=row % 5 == 1, kind="JPEG"),
                    "cls": f"{row % 3}\n".encode(),
                    "json": f'{{"person": "person {row // 2}"}}'.encode(),
                }.items()
            },
        )
    return f"shards:{folder}"


def write_saved(folder: Path, num: int = NUM, **columns: Any) -> str:
    images = image_column([encoded(row, grey=row % 5 == 1) for row in range(num)])
    labels = {"label": np.arange(num) % 3}
    save_dataset(folder / "saved", {"image": images} | labels | columns)
    return f"hf:{folder / 'saved'}"


def write_saved_pairs(folder: Path) -> str:
    return write_saved(folder, caption=[[f"caption {row}", "another"][: 1 + row % 2] for row in range(NUM)])


WRITERS: dict[str, Callable[[Path], str]] = {
    "folder": lambda folder: write_folder(folder / "photos"),
    "npz": write_npz,
    "parquet": write_parquet,
    "parquet pairs": write_parquet_pairs,
    "parquet paths": write_parquet_of_paths,
    "hf": write_saved,
    "hf pairs": write_saved_pairs,
    "csv": write_csv,
    "csv of images": write_table,
    "webdataset": write_shards,
    "shards": write_classes,
}
SOURCES = pytest.mark.parametrize("source", WRITERS)


def content_of(dataset: Dataset) -> dict[str, Any]:
    records, rows = dataset.train, np.arange(dataset.train.images.shape[0])
    images = records.images[rows]
    return {
        "images": (images.shape, images.tobytes()),
        "ids": records.ids.tolist(),
        "labels": None if records.labels is None else records.labels.tolist(),
        "starts": None if records.row_starts is None else records.row_starts.tolist(),
        "captions": list(getattr(records, "captions", ())),
        "counts": dataset.reading_counts,
        "classes": dataset.class_names,
        "names": None if dataset.names is None else list(dataset.names),
    }


def count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    decoded, decode = [], image_index.decode_image

    def counting(*arguments: Any) -> Any:
        decoded.append(arguments)
        return decode(*arguments)

    monkeypatch.setattr(image_index, "decode_image", counting)
    return decoded


def test_every_own_source_is_covered() -> None:
    own = {name for name, source in DATA_SOURCES.items() if not source.is_builtin}
    assert own == {source.partition(" ")[0] for source in WRITERS}


# The same records and the same training


@SOURCES
@pytest.mark.parametrize("image_size", [None, 5])
def test_stored_images_give_the_records_of_decoded_ones(
    source: str, image_size: int | None, tmp_path: Path
) -> None:
    name = WRITERS[source](tmp_path)
    decoded = content_of(load_dataset(name, image_size=image_size, in_memory=True))
    for _ in ("the index is built", "the index is read"):
        stored = load_dataset(name, image_size=image_size, in_memory=False)
        assert isinstance(stored.train.images, StoredImages | ArrayImages)
        assert content_of(stored) == decoded


@SOURCES
def test_digests_of_stored_images_are_those_of_their_pixels(source: str, tmp_path: Path) -> None:
    name = WRITERS[source](tmp_path)
    stored, decoded = (
        load_dataset(name, image_size=5, in_memory=kept).train.images for kept in (False, True)
    )
    rows = np.array([4, 1, 9])
    for channels in (3, 1):
        expected = digests_of(in_channels(decoded, channels))
        assert len(set(expected.tolist())) == NUM
        assert digests_of(in_channels(stored, channels)).tolist() == expected.tolist()
        assert digests_of(in_channels(stored, channels).select(rows)).tolist() == expected[rows].tolist()


@pytest.mark.parametrize("source", ["npz", "parquet", "hf", "csv", "csv of images", "shards"])
def test_units_of_stored_images_are_those_of_decoded_ones(source: str, tmp_path: Path) -> None:
    persons = {"person": lambda row: f"person {row // 2}"}
    name = {
        "npz": lambda: write_npz(tmp_path, person=np.array([f"person {row // 2}" for row in range(NUM)])),
        "parquet": lambda: write_parquet(tmp_path, **persons),
        "hf": lambda: write_saved(tmp_path, person=[f"person {row // 2}" for row in range(NUM)]),
        "csv": lambda: write_csv(tmp_path),
        "csv of images": lambda: write_table(tmp_path),
        "shards": lambda: write_classes(tmp_path),
    }[source]()
    stored, decoded = (load_dataset(name, unit_column="person", in_memory=kept) for kept in (False, True))
    assert content_of(stored) == content_of(decoded)
    assert len(stored.train) == NUM // 2


@SOURCES
def test_training_is_the_same_bit_for_bit(source: str, tmp_path: Path) -> None:
    name = WRITERS[source](tmp_path)

    def weights(in_memory: bool) -> dict[str, torch.Tensor]:
        records = load_dataset(name, in_memory=in_memory, image_size=32).train
        data = TrainingData(
            train=records, index=None, queries=None, train_is_public=True, evaluation_is_public=True
        )
        return train(config_for(records), data).encoder.state_dict()

    decoded, stored = weights(True), weights(False)
    assert all(torch.equal(decoded[key], stored[key]) for key in decoded)


def config_for(records: Any) -> TrainingConfig:
    options: dict[str, Any] = {"num_records_public": len(records), "num_steps": 2, "seeded_non_private": True}
    if hasattr(records, "captions"):
        options |= {"network": ClipNetworkConfig(lora_rank=2, lora_alpha=4), "text_views": TextViewConfig()}
    return make_config(**options)


@pytest.mark.parametrize(
    ("free", "kind"), [(4 * 3 * 64 * NUM, np.ndarray), (4 * 3 * 64 * NUM - 4, StoredImages)]
)
def test_images_are_decoded_if_they_take_a_quarter_of_the_free_memory(
    free: int, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write_folder(tmp_path / "photos")
    monkeypatch.setattr(image_index, "free_memory", lambda: free)
    assert isinstance(load_dataset(name).train.images, kind)
    assert (tmp_path / INDEX_FOLDER).exists() == (kind is StoredImages)


def test_an_npz_stays_in_its_file_if_it_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write_npz(tmp_path)
    monkeypatch.setattr(own_images, "free_memory", lambda: 4 * 3 * 64 * NUM)
    assert isinstance(load_dataset(name).train.images, ArrayImages)


def test_a_compressed_npz_cannot_stay_in_its_file(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "own.npz", images=np.zeros((3, 8, 8), np.uint8))
    with pytest.raises(DataError, match=r"not compressed.*np\.savez"):
        load_dataset(f"npz:{tmp_path / 'own.npz'}", in_memory=False)


def test_images_as_channels_first_and_grey_stay_in_an_npz(tmp_path: Path) -> None:
    for shape in ((5, 3, 8, 7), (5, 8, 7), (5, 8, 7, 1)):
        pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        np.savez(tmp_path / "own.npz", images=pixels)
        stored, decoded = (
            load_dataset(f"npz:{tmp_path / 'own.npz'}", in_memory=kept) for kept in (False, True)
        )
        assert content_of(stored) == content_of(decoded)


@SOURCES
def test_an_empty_draw_has_the_shape_of_the_images(source: str, tmp_path: Path) -> None:
    images = load_dataset(WRITERS[source](tmp_path), in_memory=False).train.images
    assert images[np.zeros(0, dtype=np.int64)].shape == (0, 3, 8, 8)


@SOURCES
def test_workers_get_no_pixels(source: str, tmp_path: Path) -> None:
    records = load_dataset(WRITERS[source](tmp_path), image_size=100, in_memory=False).train
    sent = pickle.dumps(records)
    assert len(sent) < 10_000
    rows = np.array([3, 1])
    assert (pickle.loads(sent).images[rows] == records.images[rows]).all()


def test_grey_records_in_colour_and_colour_records_in_grey(tmp_path: Path) -> None:
    images = load_dataset(write_folder(tmp_path), in_memory=False).train.images
    colour = images[np.arange(NUM)]
    grey = images.in_channels(1)[np.arange(NUM)]
    first_grey = next(row for row in range(NUM) if (colour[row, 0] == colour[row, 2]).all())
    assert (grey[first_grey, 0] == colour[first_grey, 0]).all()
    assert grey.shape == (NUM, 1, 8, 8)


def test_reading_one_image_opens_no_other_file(tmp_path: Path) -> None:
    records = load_dataset(write_folder(tmp_path), in_memory=False).train
    for file in sorted(tmp_path.rglob("*.png"))[1:]:
        file.unlink()
    assert records.images[np.array([0])].shape == (1, 3, 8, 8)
    assert records.take(np.array([0])).images[np.array([0])].shape == (1, 3, 8, 8)


# Files that change


@pytest.mark.parametrize("change", ["other", "shorter", "gone"])
@SOURCES
def test_a_file_that_changed_is_refused_without_its_name(source: str, change: str, tmp_path: Path) -> None:
    records = load_dataset(WRITERS[source](tmp_path), in_memory=False).train
    for file in (file for file in tmp_path.rglob("*") if file.suffix in (".png", ".npz", ".tar", ".arrow")):
        if change == "gone":
            file.unlink()
        elif change == "shorter":
            os.truncate(file, file.stat().st_size - 1)
        else:
            os.utime(file, ns=(0, 12345))
    with pytest.raises(RecordsError, match="must not change after it was indexed") as caught:
        records.images[np.array([0, 1])]
    assert not any(character.isdigit() for character in str(caught.value)), "a number tells what was drawn"
    assert str(tmp_path) not in str(caught.value)


def test_a_changed_image_is_read_again_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write_folder(tmp_path)
    load_dataset(name, in_memory=False)
    (tmp_path / "class0/000.png").write_bytes(encoded(77))
    decoded = count_decoded(monkeypatch)
    stored = load_dataset(name, in_memory=False)
    assert len(decoded) == 1
    assert content_of(stored) == content_of(load_dataset(name, in_memory=True))


@pytest.mark.parametrize("num", [7, NUM])  # one more than 7 makes two parts of one
def test_a_folder_that_grows_is_read_only_where_it_grew(
    num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_index, "_FILES_PER_PART", 8)
    before = load_dataset(write_folder(tmp_path, num), in_memory=False).train
    decoded = count_decoded(monkeypatch)
    for added in (1, 2):
        stored = load_dataset(write_folder(tmp_path, num + added), in_memory=False)
        assert len(decoded) == added
    assert set(before.ids.tolist()) < set(stored.train.ids.tolist())
    assert content_of(stored) == content_of(load_dataset(f"folder:{tmp_path}", in_memory=True))


def test_a_folder_that_shrinks_loses_only_its_records(tmp_path: Path) -> None:
    name = write_folder(tmp_path)
    load_dataset(name, in_memory=False)
    (tmp_path / "class0/000.png").unlink()
    for _ in range(2):
        assert content_of(load_dataset(name, in_memory=False)) == content_of(
            load_dataset(name, in_memory=True)
        )


def test_a_new_shard_is_read_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write_shards(tmp_path)
    load_dataset(name, in_memory=False)
    (tmp_path / "more").mkdir()
    write_shards(tmp_path / "more", 3)
    (tmp_path / "more/2.tar").rename(tmp_path / "3.tar")
    decoded = count_decoded(monkeypatch)
    load_dataset(name, in_memory=False)
    assert len(decoded) == 1


def test_data_sets_with_the_same_names_share_an_index_folder(tmp_path: Path) -> None:
    names = []
    for place in ("one", "other"):
        for row in range(3):
            file = tmp_path / place / f"{row}.bmp"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(encoded(row if place == "one" else row + 10, kind="BMP"))
            os.utime(file, ns=(0, 12345))
        names.append(f"folder:{tmp_path / place}")
    for name in (*names, *names):
        stored = load_dataset(name, in_memory=False, index_folder=tmp_path / "index")
        expected = digests_of(load_dataset(name, in_memory=True).train.images)
        assert digests_of(stored.train.images).tolist() == expected.tolist()


# The index


class Stopped(BaseException):
    """A kill, as far as Python code can see one."""


@pytest.mark.parametrize("source", ["folder", "parquet", "webdataset", "csv"])
def test_an_interrupted_index_goes_on_where_it_stopped(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = WRITERS[source](tmp_path)
    monkeypatch.setattr(image_index, "_FILES_PER_PART", 8)
    decoded, decode = [], image_index.decode_image

    def stopping(*arguments: Any) -> Any:
        decoded.append(arguments)
        if len(decoded) == NUM - 1:
            raise Stopped
        return decode(*arguments)

    monkeypatch.setattr(image_index, "decode_image", stopping)
    with pytest.raises(Stopped):
        load_dataset(name, in_memory=False)
    monkeypatch.setattr(image_index, "decode_image", decode)
    decoded = count_decoded(monkeypatch)
    stored = load_dataset(name, in_memory=False)
    assert 0 < len(decoded) < NUM
    assert content_of(stored) == content_of(load_dataset(name, in_memory=True))


@pytest.mark.parametrize("source", ["folder", "parquet", "webdataset", "csv"])
@pytest.mark.parametrize("damage", ["cut", "other", "empty"])
def test_a_damaged_index_is_built_again(source: str, damage: str, tmp_path: Path) -> None:
    name = WRITERS[source](tmp_path)
    first = content_of(load_dataset(name, in_memory=False))
    for index in tmp_path.rglob("*.arrow"):
        content = {"cut": index.read_bytes()[:-9], "other": b"ARROW1" * 9, "empty": b""}[damage]
        index.write_bytes(content)
    assert content_of(load_dataset(name, in_memory=False)) == first


@pytest.mark.parametrize("source", ["folder", "parquet", "webdataset", "csv"])
def test_two_sweeps_build_one_index(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = WRITERS[source](tmp_path)
    decoded = count_decoded(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: load_dataset(name, in_memory=False), range(2))
    assert len(decoded) == NUM
    assert content_of(first) == content_of(second)


@pytest.mark.parametrize("source", ["folder", "parquet", "webdataset", "csv"])
@pytest.mark.parametrize("has_own_folder", [False, True])
def test_an_index_is_readable_by_its_user_alone(source: str, has_own_folder: bool, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    index = tmp_path / "index" if has_own_folder else None
    name = WRITERS[source](tmp_path / "data")
    before = os.umask(0)
    try:
        load_dataset(name, in_memory=False, index_folder=index)
    finally:
        os.umask(before)
    files = [
        file
        for file in tmp_path.rglob("*")
        if (file.is_file() and INDEX_FOLDER in str(file)) or index in file.parents
    ]
    assert files
    assert {file.stat().st_mode & 0o777 for file in files if file.is_file()} == {0o600}
    assert {file.parent.stat().st_mode & 0o777 for file in files if file.is_file()} == {0o700}


def test_an_index_that_others_could_write_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write_shards(tmp_path)
    load_dataset(name, in_memory=False)
    (tmp_path / INDEX_FOLDER).chmod(0o777)
    decoded = count_decoded(monkeypatch)
    load_dataset(name, in_memory=False)
    assert len(decoded) >= NUM


@pytest.mark.parametrize("source", ["folder", "csv"])
def test_a_file_that_could_not_be_read_is_read_again(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = WRITERS[source](tmp_path)
    decode = image_index.decode_image
    monkeypatch.setattr(image_index, "decode_image", lambda *_: ("unreadable", ()))
    with pytest.raises(RecordsError, match="unreadable"):
        load_dataset(name, in_memory=False)
    monkeypatch.setattr(image_index, "decode_image", decode)
    assert content_of(load_dataset(name, in_memory=False)) == content_of(load_dataset(name, in_memory=True))


@SOURCES
def test_another_sweep_with_other_options_leaves_the_images_of_the_first(source: str, tmp_path: Path) -> None:
    name = WRITERS[source](tmp_path)
    first = load_dataset(name, in_memory=False)
    before = content_of(first)
    for options in ({"image_size": 4}, {"max_image_pixels": 100}):
        load_dataset(name, in_memory=False, **options)
    assert content_of(first) == before


@SOURCES
def test_relative_paths_are_read_from_any_working_folder(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme, _, path = WRITERS[source](tmp_path).partition(":")
    monkeypatch.chdir(tmp_path)
    images = load_dataset(f"{scheme}:{os.path.relpath(path)}", in_memory=False).train.images
    monkeypatch.chdir("/")
    assert images[np.array([0])].shape == (1, 3, 8, 8)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("write", [write_parquet, write_parquet_pairs, write_npz])
def test_files_that_change_while_they_are_read_are_refused(
    write: Callable[[Path], str], kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(tmp_path)
    module = own_images if write is write_npz else parquet_files
    step = "_npz_part" if write is write_npz else "read_parquet" if write is write_parquet else "_read_images"
    called, change = getattr(module, step), [file for file in tmp_path.iterdir() if file.is_file()]

    def changing(*arguments: Any, **options: Any) -> Any:
        os.utime(change[0], ns=(0, 12345))
        return called(*arguments, **options)

    monkeypatch.setattr(module if step != "read_parquet" else own_images, step, changing)
    with pytest.raises(DataError, match="must not change"):
        load_dataset(name, in_memory=kept)


def test_parquet_with_an_empty_file_is_read(tmp_path: Path) -> None:
    name = write_parquet(tmp_path)
    pq.write_table(pq.read_table(tmp_path / "0.parquet").slice(0, 0), tmp_path / "-empty.parquet")
    assert content_of(load_dataset(name, in_memory=False)) == content_of(load_dataset(name, in_memory=True))


def test_pairs_with_paths_and_bytes_in_different_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for row in range(3):
        (tmp_path / f"images/{row}.png").write_bytes(encoded(row))
    paths = [{"bytes": None, "path": f"images/{row}.png"} for row in range(3)]
    for name, values in (("a", paths), ("b", [{"bytes": encoded(9), "path": None}])):
        table = pa.table({"image": pa.array(values, kind), "title": ["words"] * len(values)})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    for kept in (True, False):
        with pytest.raises(DataError, match="must hold paths or encoded image bytes"):
            load_dataset(f"parquet:{tmp_path}", in_memory=kept)


@pytest.mark.parametrize("encode", [lambda p: p.dictionary_encode(), lambda p: p.cast(pa.large_string())])
def test_paths_in_other_encodings_of_parquet_keep_their_ids(
    encode: Callable[[Any], Any], tmp_path: Path
) -> None:
    write_folder(tmp_path / "images", 4)
    names = pa.array(sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.png")))
    ids = []
    for column in (names, encode(names)):
        pq.write_table(pa.table({"image": column, "title": ["words"] * 4}), tmp_path / "own.parquet")
        ids.append(load_dataset(f"parquet:{tmp_path / 'own.parquet'}").train.ids.tolist())
    assert ids[0] == ids[1]


def test_a_null_structure_is_a_missing_image(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = pa.array([None, {"bytes": encoded(1), "path": None}], kind)
    pq.write_table(pa.table({"image": values, "title": ["one", "two"]}), tmp_path / "own.parquet")
    for kept in (True, False):
        with pytest.raises(RecordsError, match="1 missing image"):
            load_dataset(f"parquet:{tmp_path / 'own.parquet'}", in_memory=kept)


@pytest.mark.parametrize("kind", [tarfile.DIRTYPE, tarfile.SYMTYPE])
def test_what_is_no_file_in_a_shard_is_left_out(kind: bytes, tmp_path: Path) -> None:
    write_shards(tmp_path)
    with tarfile.open(tmp_path / "-first.tar", "w") as shard:
        member = tarfile.TarInfo("folder.jpg")
        member.type, member.linkname = kind, "nowhere.jpg"
        shard.addfile(member)
    assert len(load_dataset(f"webdataset:{tmp_path}").train) == NUM


def test_an_index_in_a_folder_of_its_own_leaves_the_data_as_they_are(tmp_path: Path) -> None:
    name = write_folder(tmp_path / "data")
    before = sorted((tmp_path / "data").rglob("*"))
    stored = load_dataset(name, in_memory=False, index_folder=tmp_path / "index")
    assert sorted((tmp_path / "data").rglob("*")) == before
    assert list((tmp_path / "index").rglob("*.arrow"))
    assert content_of(stored) == content_of(load_dataset(name))


def test_an_index_is_no_part_of_its_folder(tmp_path: Path) -> None:
    name = write_folder(tmp_path / "photos")
    assert (
        len(load_dataset(name, in_memory=False).train)
        == len(load_dataset(name, in_memory=False).train)
        == NUM
    )
    assert sorted(folder.name for folder in (tmp_path / "photos").iterdir()) == ["class0", "class1", "class2"]


@pytest.mark.parametrize("source", ["folder", "webdataset", "csv"])
def test_an_index_that_cannot_be_written_is_built_each_time(
    source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = WRITERS[source](tmp_path)
    (tmp_path / INDEX_FOLDER).write_text("a file in the place of the folder")
    stored = load_dataset(name, in_memory=False)
    assert "Make the folder of the data writable, or pass --index-folder" in caplog.text
    assert content_of(stored) == content_of(load_dataset(name, in_memory=True))


def test_images_in_parquet_need_an_index_that_can_be_written(tmp_path: Path) -> None:
    name = write_parquet(tmp_path)
    (tmp_path / INDEX_FOLDER).write_text("a file in the place of the folder")
    with pytest.raises(DataError, match="Pass --index-folder, or --in-memory"):
        load_dataset(name, in_memory=False)


def test_a_full_disk_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write_shards(tmp_path)
    written, write = [], pa.ipc.new_file

    class Full:
        def __init__(self, *arguments: Any) -> None:
            self.writer = write(*arguments)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None: ...

        def write_batch(self, batch: pa.RecordBatch) -> None:
            written.append(batch)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pa.ipc, "new_file", Full)
    stored = load_dataset(name, in_memory=False)
    assert written
    assert content_of(stored) == content_of(load_dataset(name, in_memory=True))


def test_other_options_are_not_answered_from_the_index(tmp_path: Path) -> None:
    name = write_parquet_pairs(tmp_path)
    load_dataset(name, in_memory=False)
    with pytest.raises(RecordsError, match="at most 10 pixels"):
        load_dataset(name, in_memory=False, max_image_pixels=10)
    other = load_dataset(name, in_memory=False, pairs=PairOptions(caption="title"))
    assert len(other.train) == NUM


@SOURCES
def test_an_index_answers_for_its_image_size_alone(source: str, tmp_path: Path) -> None:
    name = WRITERS[source](tmp_path)
    for image_size in (4, None, 5, 4):
        stored, decoded = (
            load_dataset(name, image_size=image_size, in_memory=kept) for kept in (False, True)
        )
        assert digests_of(stored.train.images).tolist() == digests_of(decoded.train.images).tolist()
        assert content_of(stored) == content_of(decoded)


@pytest.mark.parametrize("source", ["folder", "parquet", "parquet pairs", "csv"])
def test_faults_are_counted_alike(source: str, tmp_path: Path) -> None:
    name = WRITERS[source](tmp_path)
    if "parquet" in source:
        table = pq.read_table(tmp_path / "0.parquet")
        images = [b"no image", None, *table["image"].to_pylist()[2:]]
        pq.write_table(table.set_column(0, "image", pa.array(images)), tmp_path / "0.parquet")
    else:
        next(iter(sorted(tmp_path.rglob("*.png")))).write_bytes(b"no image")
    messages = []
    for kept in (True, False, False):
        with pytest.raises(RecordsError) as caught:
            load_dataset(name, in_memory=kept)
        messages.append((str(caught.value), caught.value.details))
    assert messages[0] == messages[1] == messages[2]
    assert "unreadable" in messages[0][0]


def test_images_of_several_sizes_are_refused_alike(tmp_path: Path) -> None:
    name = write_folder(tmp_path)
    (tmp_path / "class0/000.png").write_bytes(encoded(0, size=9))
    for kept in (True, False):
        with pytest.raises(RecordsError, match="2 different sizes"):
            load_dataset(name, in_memory=kept)
    assert load_dataset(name, image_size=4, in_memory=False).image_shape == (3, 4, 4)


# Tables and shards of images alone


def test_a_table_gives_classes_and_units_to_a_folder(tmp_path: Path) -> None:
    loaded = load_dataset(write_table(tmp_path))
    assert isinstance(loaded.train, Records)
    assert loaded.class_names == ("class 0", "class 1", "class 2")
    assert loaded.train.labels is not None
    assert loaded.train.labels.tolist() == [row % 3 for row in range(NUM)]
    assert loaded.train.classes_from_data
    assert loaded.names is not None
    assert loaded.names[0] == "images/class0/000.png"


def test_an_image_in_a_table_keeps_its_id_whatever_its_class(tmp_path: Path) -> None:
    name = write_table(tmp_path)
    before = load_dataset(name).train.ids
    table = tmp_path / "labels.csv"
    table.write_text(table.read_text().replace("class 0", "class 9"))
    assert load_dataset(name).train.ids.tolist() == before.tolist()


def test_a_table_without_labels_has_images_alone(tmp_path: Path) -> None:
    name = write_table(tmp_path)
    table = tmp_path / "labels.csv"
    table.write_text(table.read_text().replace("label", "ward", 1))
    assert load_dataset(name).train.labels is None
    labelled = load_dataset(name, pairs=PairOptions(label="ward"))
    assert len(labelled.class_names) == 3


def test_a_table_with_another_separator(tmp_path: Path) -> None:
    name = write_table(tmp_path, ",")
    assert len(load_dataset(name, pairs=PairOptions(separator=",")).train) == NUM
    with pytest.raises(DataError, match="none has such a name"):
        load_dataset(name)


def test_rows_of_a_table_without_image_or_class_are_dropped_if_asked(tmp_path: Path) -> None:
    name = write_table(tmp_path)
    table = tmp_path / "labels.csv"
    table.write_text(table.read_text() + "\nnowhere.png\tclass 0\tsomeone\nimages/class0/000.png\t\tsomeone")
    with pytest.raises(RecordsError, match="1 missing image, 1 missing label"):
        load_dataset(name)
    assert len(load_dataset(name, pairs=PairOptions(skip_corrupt=True)).train) == NUM


CLASSES = PairOptions(label="cls")


def test_shards_of_classes_give_labels(tmp_path: Path) -> None:
    loaded = load_dataset(write_classes(tmp_path), pairs=CLASSES)
    assert isinstance(loaded.train, Records)
    assert loaded.train.labels is not None
    assert loaded.train.labels.tolist() == [row % 3 for row in range(NUM)]
    assert loaded.class_names == ("0", "1", "2")
    assert loaded.train.classes_from_data


def test_classes_are_not_read_unless_they_are_asked_for(tmp_path: Path) -> None:
    loaded = load_dataset(write_classes(tmp_path))
    assert isinstance(loaded.train, Records)
    assert loaded.train.labels is None
    assert sum(loaded.reading_counts.values()) == NUM


@pytest.mark.parametrize("extra", [{"9.cls": b"1"}, {"9.txt": b"a caption"}, {"9.json": b"{}"}])
def test_no_record_decides_what_shards_hold(extra: dict[str, bytes], tmp_path: Path) -> None:
    images = {f"{row}.png": encoded(row) for row in range(5)}
    write_files(tmp_path / "own.tar", images)
    ids = load_dataset(f"shards:{tmp_path}", pairs=PairOptions(skip_corrupt=True)).train.ids
    write_files(tmp_path / "own.tar", images | {"9.png": encoded(9)} | extra)
    more = load_dataset(f"shards:{tmp_path}", pairs=PairOptions(skip_corrupt=True)).train
    assert isinstance(more, Records)
    assert set(ids.tolist()) < set(more.ids.tolist())


def test_a_sample_without_a_class_among_classes_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path / "own.tar", {"a.png": encoded(0), "a.cls": b"1", "b.png": encoded(1)})
    with pytest.raises(RecordsError, match="1 missing label"):
        load_dataset(f"shards:{tmp_path}", pairs=CLASSES)


@pytest.mark.parametrize("write", [write_table, write_classes])
def test_images_of_tables_and_shards_get_captions_from_their_classes(
    write: Callable[[Path], str], tmp_path: Path
) -> None:
    label = "cls" if write is write_classes else None
    options = PairOptions(class_captions="a {}", label=label)
    loaded = load_dataset(write(tmp_path), pairs=options, in_memory=False)
    assert isinstance(loaded.train, ImageTextRecords)
    assert loaded.train.captions[1] == ("a 1" if write is write_classes else "a class 1",)
    assert loaded.train.images[np.array([0])].shape == (1, 3, 8, 8)


def test_a_caption_column_is_no_option_of_images_alone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="captions"):
        load_dataset(write_table(tmp_path), pairs=PairOptions(caption="text"))


A, B, C = b"a" * 16, b"b" * 16, b"a" * 15 + b"c"


@pytest.mark.parametrize("digests", [[], [A], [B, A, B], [C, A]])
def test_codes_of_digests_are_those_of_their_first_occurrence(digests: list[bytes]) -> None:
    kind = pa.binary(16)
    column = pa.chunked_array([pa.array([b"x" * 16, *digests], kind).slice(1), pa.array([], kind)])
    expected = [list(dict.fromkeys(digests)).index(digest) for digest in digests]
    assert codes_of(column).tolist() == codes_of(combined(column)).tolist() == expected
    assert codes_of(text_column(digest.hex() for digest in digests)).tolist() == expected
    assert (
        codes_of(np.array([int(digest.hex(), 16) % 97 for digest in digests], np.int64)).tolist() == expected
    )
