"""Tar shards in a bucket: the records of local ones, few requests, an index that grows, what fails."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dpgcl_core.errors import ConfigError, DataError
from tests.buckets import Bucket, bucket
from tests.trainers.data.test_stored_images import (
    NUM,
    config_for,
    content_of,
    encoded,
    write_classes,
    write_folder,
    write_parquet,
    write_parquet_pairs,
    write_shards,
)
from tests.trainers.data.test_webdataset import write_files
from trainers.data.dataset import Dataset, TrainingData
from trainers.data.faults import RecordsError
from trainers.data.loading import check_dataset_name, load_dataset
from trainers.data.pair_options import PairOptions
from trainers.data.pair_tables import image_files
from trainers.data.stored_images import StoredImages
from trainers.training.loop import train

__all__ = ["bucket"]
WRITERS: dict[str, Callable[[Path], str]] = {
    "webdataset": write_shards,
    "shards": write_classes,
    "parquet": lambda folder: write_parquet(folder, person=lambda row: f"person {row // 2}"),
    "parquet pairs": write_parquet_pairs,
}
SOURCES = pytest.mark.parametrize("source", WRITERS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, where an index of a bucket is by default."""
    monkeypatch.setenv("DPGCL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def copies(source: str, folder: Path, bucket: Bucket) -> tuple[str, str]:
    """Return the names of shards on this machine and of their copy in a bucket."""
    (folder / "local").mkdir()
    name = WRITERS[source](folder / "local")
    address = bucket.upload(folder / "local", "team/shards")
    bucket.requests.clear()
    return name, f"{source.partition(' ')[0]}:{address}"


def load(name: str, **options: Any) -> Dataset:
    return load_dataset(name, **{"in_memory": False, **options})


def shards_read(bucket: Bucket) -> list[str]:
    """Return the names of the shards whose content was read, in the order of the requests."""
    return [line[1].partition("?")[0].rpartition("/")[2] for line in bucket.requests.reading()]


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("shards", {}),
        ("shards", {"unit_column": "person"}),
        ("shards", {"pairs": PairOptions(label="cls")}),
        ("parquet", {}),
        ("parquet", {"unit_column": "person"}),
        ("parquet pairs", {}),
        ("webdataset", {}),
        ("webdataset", {"image_size": 5}),
    ],
)
def test_records_are_those_of_local_shards(
    source: str, options: dict[str, Any], tmp_path: Path, bucket: Bucket
) -> None:
    local, remote = copies(source, tmp_path, bucket)
    expected = content_of(load(local, **options))
    for in_memory in (True, False, False):  # decoded, indexed, by the index
        loaded = load(remote, in_memory=in_memory, **options)
        assert isinstance(loaded.train.images, StoredImages) != in_memory
        assert content_of(loaded) == expected


@pytest.mark.parametrize("path", ["team/shards", "team/shards/{0..2}.tar"])
def test_a_folder_and_ranges_are_the_same_shards(path: str, tmp_path: Path, bucket: Bucket) -> None:
    local, _ = copies("shards", tmp_path, bucket)
    assert content_of(load(f"shards:{bucket.address}/{path}")) == content_of(load(local))


@SOURCES
def test_training_is_the_same_bit_for_bit(source: str, tmp_path: Path, bucket: Bucket) -> None:
    def weights(name: str) -> dict[str, torch.Tensor]:
        records = load(name, image_size=32).train
        data = TrainingData(
            train=records, index=None, queries=None, train_is_public=True, evaluation_is_public=True
        )
        return train(config_for(records), data).encoder.state_dict()

    local, remote = map(weights, copies(source, tmp_path, bucket))
    assert all(torch.equal(local[key], remote[key]) for key in local)


def test_each_shard_is_read_once_and_never_again(tmp_path: Path, bucket: Bucket) -> None:
    _, remote = copies("shards", tmp_path, bucket)
    load(remote)
    assert shards_read(bucket) == ["0.tar", "0.tar", "1.tar", "2.tar"], "first some images of the first one"
    bucket.requests.clear()
    load(remote)
    assert shards_read(bucket) == ["0.tar"]


def test_an_index_goes_on_and_grows(tmp_path: Path, bucket: Bucket) -> None:
    local, remote = copies("shards", tmp_path, bucket)
    bucket.requests.answer = lambda method, path: "403 Forbidden" if path.endswith("/2.tar") else None
    with pytest.raises(DataError, match="must be readable"):
        load(remote)
    bucket.requests.answer = lambda method, path: None
    write_files(tmp_path / "local" / "3.tar", {"new.png": encoded(NUM), "new.json": b'{"person": "new"}'})
    bucket.put("team/shards/3.tar", (tmp_path / "local" / "3.tar").read_bytes())
    bucket.requests.clear()
    loaded = load(remote)
    assert shards_read(bucket) == ["0.tar", "2.tar", "3.tar"], "the first images, and what was not read yet"
    assert content_of(loaded) == content_of(load(local))


def test_random_draws_take_few_requests_and_bytes(tmp_path: Path, bucket: Bucket) -> None:
    folder = tmp_path / "big"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for shard in range(4):
        write_files(folder / f"{shard}.tar", {f"{row}.ppm": picture(rng) for row in range(100)})
    images = load(f"shards:{bucket.upload(folder)}").train.images
    bucket.requests.clear()
    rows = np.flatnonzero(rng.random(400) < 0.2)
    rng.shuffle(rows)
    assert images[rows].shape == (len(rows), 3, 40, 40)
    assert isinstance(images, StoredImages)
    needed = int(images.places["num_bytes"][rows].sum())
    assert needed <= bucket.requests.num_bytes() <= 1.1 * needed
    ordered = np.sort(rows)
    neighbours = (np.diff(ordered) == 1) & (ordered[1:] % 100 != 0)
    assert len(bucket.requests.reading()) == len(rows) - neighbours.sum() > 50


def picture(rng: np.random.Generator) -> bytes:
    return b"P6 40 40 255\n" + rng.integers(0, 256, 4800, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("change", ["other", "gone", "closed"])
def test_a_shard_that_changed_is_refused_without_its_name(
    change: str, tmp_path: Path, bucket: Bucket
) -> None:
    _, remote = copies("shards", tmp_path, bucket)
    images = load(remote).train.images
    if change == "gone":
        bucket.delete("team/shards/1.tar")
    elif change == "other":
        bucket.put("team/shards/1.tar", bucket.get("team/shards/2.tar"))
    else:
        bucket.requests.answer = lambda method, path: "403 Forbidden"
    rule = "must answer" if change == "closed" else "must not change after it was indexed"
    with pytest.raises(RecordsError, match=rule) as caught:
        images[np.array([0, 9])]
    assert not any(character.isdigit() for character in str(caught.value)), "a number tells what was drawn"
    assert bucket.name not in str(caught.value)
    assert f"{bucket.address}/team/shards/" in str(caught.value.details)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_changed_shard_is_indexed_again_and_no_other(tmp_path: Path, bucket: Bucket) -> None:
    _, remote = copies("shards", tmp_path, bucket)
    load(remote)
    bucket.put("team/shards/1.tar", bucket.get("team/shards/2.tar"))
    bucket.requests.clear()
    load(remote)
    assert shards_read(bucket) == ["0.tar", "1.tar"]


def test_images_of_parquet_files_are_read_once(tmp_path: Path, bucket: Bucket) -> None:
    _, remote = copies("parquet", tmp_path, bucket)
    images = load(remote).train.images
    bucket.requests.clear()
    assert images[np.arange(5)].shape == (5, 3, 8, 8)
    assert bucket.requests.lines == []
    other = load(remote, index_folder=tmp_path / "other").train.images
    bucket.put("team/shards/1.parquet", b"other")
    assert (other[np.arange(5)] == images[np.arange(5)]).all()
    with pytest.raises(RecordsError, match="1 of 2 are not"):
        load(remote)


def test_parquet_in_a_bucket_names_no_file_of_this_machine(tmp_path: Path, bucket: Bucket) -> None:
    write_folder(tmp_path / "private")
    path = str(next((tmp_path / "private").rglob("*.png")))
    image = Path(path).read_bytes()
    rows = {"paths": [path, path], "a path": [{"bytes": image, "path": None}, {"bytes": None, "path": path}]}
    for kind, images in rows.items():
        (tmp_path / kind).mkdir()
        pq.write_table(pa.table({"image": images}), tmp_path / kind / "own.parquet")
        name = f"parquet:{bucket.upload(tmp_path / kind, kind)}"
        for in_memory in (True, False):
            with pytest.raises(DataError, match=r"must hold encoded images|1 missing|must all be paths"):
                load(name, in_memory=in_memory)
        assert image_files(name) == []


def test_missing_shards_are_counted(tmp_path: Path, bucket: Bucket) -> None:
    copies("shards", tmp_path, bucket)
    with pytest.raises(DataError, match=r"parquet:PATH must be .* got 's3://.*/team/shards'"):
        load(f"parquet:{bucket.address}/team/shards")
    for path, missing in (("team/shards/{0..4}.tar", "2 of 5"), ("team/none", "1 of 1")):
        with pytest.raises(DataError, match=rf"got 's3://.*{missing} shards are missing"):
            load(f"shards:{bucket.address}/{path}")


def test_a_truncated_shard_is_named(tmp_path: Path, bucket: Bucket) -> None:
    _, remote = copies("shards", tmp_path, bucket)
    bucket.put("team/shards/1.tar", bucket.get("team/shards/1.tar")[:1500])
    with pytest.raises(DataError, match=rf"{bucket.address}/team/shards/1.tar.*truncated"):
        load(remote)


@pytest.mark.parametrize("number", [0, 1])
def test_an_empty_object_is_named(tmp_path: Path, bucket: Bucket, number: int) -> None:
    _, remote = copies("shards", tmp_path, bucket)
    bucket.put(f"team/shards/{number}.tar", b"")
    with pytest.raises(DataError, match=rf"{bucket.address}/team/shards/{number}.tar.*truncated"):
        load(remote)


def test_an_index_of_a_bucket_is_the_users_alone(tmp_path: Path, bucket: Bucket, cache: Path) -> None:
    _, remote = copies("shards", tmp_path, bucket)
    load(remote)
    (folder,) = (cache / "indices").iterdir()
    assert {file.suffix for file in folder.iterdir()} >= {".arrow"}
    assert all(file.stat().st_mode & 0o077 == 0 for file in (folder, *folder.iterdir()))
    load(remote, index_folder=tmp_path / "index")
    assert len(list((tmp_path / "index").rglob("*.arrow"))) == 3


def test_workers_get_no_pixels_and_read_the_bucket(tmp_path: Path, bucket: Bucket) -> None:
    _, remote = copies("shards", tmp_path, bucket)
    images = load(remote).train.images
    sent, rows = pickle.dumps(images), np.array([3, 1])
    assert len(sent) < 10_000
    assert (pickle.loads(sent)[rows] == images[rows]).all()


@pytest.mark.parametrize(
    "name",
    [
        "shards:s3://../b/x",
        "shards:s3://b?y/x",
        "shards:S3://b/x",
        "folder:s3://b/x",
        "npz:s3://b/x.npz",
        "csv:s3://b/x.csv",
        "shards:gs://b/x",
        "shards:https://b/x",
    ],
)
def test_other_sources_and_addresses_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"only parquet, webdataset, shards may be at s3://BUCKET/PATH"):
        check_dataset_name(name)
    check_dataset_name("shards:s3://b/x")
