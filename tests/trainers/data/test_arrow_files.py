"""Hugging Face data sets on disk: the rules of parquet files, splits, class names, images in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from dpgcl_core.errors import DataError
from tests.trainers.data.saved_datasets import images, save_dataset, save_splits
from tests.trainers.data.test_stored_images import NUM, content_of, encoded
from trainers.data.arrow_files import ArrowFile
from trainers.data.faults import RecordsError
from trainers.data.image_index import INDEX_FOLDER, places_of
from trainers.data.loading import load_dataset
from trainers.data.pair_options import PairOptions
from trainers.data.pair_tables import image_files
from trainers.data.pairs import ImageTextRecords
from trainers.data.records import Records
from trainers.data.stored_images import StoredImages

CLASSES = {"label": ["cat", "dog", "eel"]}


def columns(rows: range = range(NUM), *, captions: bool = False) -> dict[str, Any]:
    contents = [encoded(row, grey=row % 5 == 1) for row in rows]
    own = {"image": images(contents, [f"{row}.png" for row in rows]), "label": [row % 3 for row in rows]}
    return own | ({"caption": [f"caption {row}" for row in rows]} if captions else {})


# The same records as from parquet


@pytest.mark.parametrize("captions", [False, True])
@pytest.mark.parametrize("in_memory", [False, True])
def test_records_are_those_of_the_same_rows_in_parquet(
    captions: bool, in_memory: bool, tmp_path: Path
) -> None:
    own = columns(captions=captions)
    pq.write_table(pa.table(own), tmp_path / "own.parquet")
    save_dataset(tmp_path / "saved", own)
    options = {"in_memory": in_memory, "pairs": PairOptions(label="label") if captions else None}
    saved = load_dataset(f"hf:{tmp_path / 'saved'}", **options)
    assert isinstance(saved.train, ImageTextRecords if captions else Records)
    assert content_of(saved) == content_of(load_dataset(f"parquet:{tmp_path / 'own.parquet'}", **options))


@pytest.mark.parametrize("write", ["stream", "file", "feather"])
def test_one_arrow_file_is_a_data_set(write: str, tmp_path: Path) -> None:
    file, table = tmp_path / f"own.{'feather' if write == 'feather' else 'arrow'}", pa.table(columns())
    if write == "feather":
        feather.write_feather(table, file, compression="uncompressed")
    else:
        new = pa.ipc.new_stream if write == "stream" else pa.ipc.new_file
        with pa.OSFile(str(file), "wb") as out, new(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    stored, decoded = (load_dataset(f"hf:{file}", in_memory=kept) for kept in (False, True))
    assert len(stored.train) == NUM
    assert content_of(stored) == content_of(decoded)


def test_images_are_read_in_their_place_and_not_copied(tmp_path: Path) -> None:
    contents = [encoded(row, size=64) for row in range(NUM)]
    folder = save_dataset(tmp_path / "saved", {"image": images(contents)})
    records = load_dataset(f"hf:{folder}", in_memory=False).train
    assert isinstance(records.images, StoredImages)
    assert set(records.images.files) == {str(file).encode() for file in folder.glob("*.arrow")}
    for row, (number, offset, num_bytes) in enumerate(records.images.places.tolist()):
        file = Path(records.images.files[number].decode())
        assert file.read_bytes()[offset : offset + num_bytes] == contents[row]
    index = sum(file.stat().st_size for file in (folder / INDEX_FOLDER).glob("*.arrow"))
    assert index < sum(map(len, contents)) / 10


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_plain_columns_of_bytes_are_images(kind: pa.DataType, tmp_path: Path) -> None:
    own = {"image": pa.array([encoded(row) for row in range(NUM)], kind)}
    name = f"hf:{save_dataset(tmp_path / 'saved', own)}"
    stored, decoded = (load_dataset(name, in_memory=kept) for kept in (False, True))
    assert content_of(stored) == content_of(decoded)


def test_images_by_path_are_read_from_their_files(tmp_path: Path) -> None:
    paths = [f"{row}.png" for row in range(NUM)]
    folder = save_dataset(tmp_path / "saved", {"image": images([None] * NUM, paths)})
    for row, path in enumerate(paths):
        (folder / path).write_bytes(encoded(row))
    assert len(load_dataset(f"hf:{folder}").train) == NUM
    assert image_files(f"hf:{folder}") == [str(folder / path) for path in paths]


def test_path_of_an_image_with_bytes_is_no_file_of_it(tmp_path: Path) -> None:
    own = images([encoded(0), None, encoded(2)], ["a.png", "b.png", "c.png"])
    folder = save_dataset(tmp_path / "saved", {"image": own}, num_files=1)
    assert image_files(f"hf:{folder}") == [str(folder / "b.png")]
    (file,) = folder.glob("*.arrow")
    assert len(ArrowFile(file).rows_without_bytes("image")) == 1


def test_missing_images_are_refused_by_their_rows(tmp_path: Path) -> None:
    own = images([encoded(0), None, encoded(2)])
    folder = save_dataset(tmp_path / "saved", {"image": own}, num_files=1)
    for kept in (False, True):
        with pytest.raises(RecordsError, match="1 missing") as caught:
            load_dataset(f"hf:{folder}", in_memory=kept)
        assert caught.value.details["missing"] == [1]


# Splits and class names


@pytest.mark.parametrize("captions", [False, True])
@pytest.mark.parametrize("in_memory", [False, True])
def test_splits_of_a_dataset_dict_are_training_and_test_records(
    captions: bool, in_memory: bool, tmp_path: Path
) -> None:
    """In any order; a test split of grey images alone has the training data's channels."""
    test = {"image": images([encoded(row, grey=True) for row in range(30, 36)]), "label": [0, 1, 2] * 2}
    test |= {"caption": [f"test caption {row}" for row in range(6)]} if captions else {}
    splits = {"validation": columns(range(40, 44)), "test": test, "train": columns(captions=captions)}
    folder = save_splits(tmp_path / "saved", splits, class_names=CLASSES)
    pairs = PairOptions(label="label") if captions else None
    loaded = load_dataset(f"hf:{folder}", in_memory=in_memory, pairs=pairs)
    assert loaded.test is not None
    assert (len(loaded.train), len(loaded.test)) == (NUM, 6)
    assert loaded.train.labels.tolist() == [row % 3 for row in range(NUM)]
    assert loaded.test.labels.tolist() == [0, 1, 2] * 2
    assert loaded.class_names == ("cat", "dog", "eel")
    assert loaded.reading_counts["splits left out (validation)"] == 1
    alone = load_dataset(f"hf:{folder / 'train'}", in_memory=in_memory, pairs=pairs)
    assert alone.test is None
    assert alone.train.ids.tolist() == loaded.train.ids.tolist()


def test_dataset_dict_without_a_training_split_is_refused(tmp_path: Path) -> None:
    folder = save_splits(tmp_path / "saved", {"test": columns()})
    with pytest.raises(DataError, match="with a split train"):
        load_dataset(f"hf:{folder}")


def test_class_names_are_those_of_the_class_label(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "saved", columns(), class_names=CLASSES)
    for name in (f"hf:{folder}", f"hf:{next(folder.glob('*.arrow'))}"):
        loaded = load_dataset(name)
        assert loaded.class_names == ("cat", "dog", "eel")
        assert not loaded.train.classes_from_data
    pairs = PairOptions(class_captions="a photo of a {}.")
    assert load_dataset(f"hf:{folder}", pairs=pairs).train.captions[1] == ("a photo of a dog.",)


def test_integers_without_a_class_label_have_no_names(tmp_path: Path) -> None:
    assert load_dataset(f"hf:{save_dataset(tmp_path / 'saved', columns())}").class_names == ()


def test_captions_in_another_column_make_pairs(tmp_path: Path) -> None:
    own = columns()
    own["text"], own["img"] = [f"text {row}" for row in range(NUM)], own.pop("image")
    folder = save_dataset(tmp_path / "saved", own)
    records = load_dataset(f"hf:{folder}", pairs=PairOptions(image="img", caption="text")).train
    assert records.captions[3] == ("text 3",)


# What is refused


@pytest.mark.parametrize("kind", ["_indices_files", "_indices_data_files", "indices-00000.arrow"])
def test_rows_selected_by_indices_are_refused_with_the_fix(kind: str, tmp_path: Path) -> None:
    state = {kind: [{"filename": "indices.arrow"}]} if kind.startswith("_") else {}
    folder = save_dataset(tmp_path / "saved", columns(), state=state)
    if not state:
        (folder / kind).write_bytes(b"")
    with pytest.raises(DataError, match=r"dataset\.flatten_indices\(\)"):
        load_dataset(f"hf:{folder}")


def test_compressed_images_cannot_stay_in_their_file(tmp_path: Path) -> None:
    file = tmp_path / "own.feather"
    feather.write_feather(pa.table(columns()), file, compression="zstd")
    assert len(load_dataset(f"hf:{file}", in_memory=True).train) == NUM
    with pytest.raises(DataError, match=r"not compressed.*save_to_disk, or pass --in-memory"):
        load_dataset(f"hf:{file}", in_memory=False)


@pytest.mark.parametrize("damage", ["cut between rows", "cut", "text", "gone"])
def test_damaged_files_are_refused_by_number_alone(damage: str, tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "saved", columns())
    file = sorted(folder.glob("*.arrow"))[1]
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        end = {"cut between rows": -8, "cut": len(content) // 2, "text": None}[damage]
        file.write_bytes(b"no table" if damage == "text" else content[:end])
    with pytest.raises(DataError, match=r"1 of 2 (are not|files are missing)"):
        load_dataset(f"hf:{folder}")


def test_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table(columns()), tmp_path / "own.parquet")
    with pytest.raises(
        DataError, match=r"hf:PATH must be a folder on this machine that dataset\.save_to_disk wrote.*'$"
    ):
        load_dataset(f"hf:{tmp_path}")


def test_file_of_something_else_is_refused(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "saved", columns())
    with pytest.raises(DataError, match=r"or an \.arrow file; got '.*state\.json'"):
        load_dataset(f"hf:{folder / 'state.json'}")


def test_places_go_beyond_two_gigabytes() -> None:
    encoded_images = pa.array([b"x", b"image", b""])
    offsets, sizes = places_of(encoded_images[1:], encoded_images.buffers()[2].address - 2**33)
    assert (offsets.tolist(), sizes.tolist()) == ([2**33 + 1, 2**33 + 6], [5, 0])


def test_many_batches_have_their_own_places(tmp_path: Path) -> None:
    """Rows of a batch that is cut into several have places in the same buffer."""
    contents = [encoded(row) for row in range(600)]
    folder = save_dataset(tmp_path / "saved", {"image": images(contents)}, num_files=1, rows_at_once=450)
    stored, decoded = (load_dataset(f"hf:{folder}", in_memory=kept).train for kept in (False, True))
    rows = np.arange(600)
    assert (stored.images[rows] == decoded.images[rows]).all()
