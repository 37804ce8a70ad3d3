"""Tar shards: any record is read by itself, an index is used as long as it fits, corrupt samples are seen."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpgcl_core.errors import DataError
from dpgcl_core.sampling.record_ids import ids_from_names
from tests.trainers.data.readers import load_webdataset
from trainers.data.faults import RecordsError
from trainers.data.image_index import INDEX_FOLDER
from trainers.data.pairs import SKIPPED, ImageTextRecords

SECRET = "secret-words"

Sample = dict[str, bytes]  # content by the part of its name after the first dot


def picture(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape or (6, 7, 3), dtype=np.uint8)


def encoded(image: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def sample(seed: int, *captions: str, **more: bytes) -> Sample:
    texts = {f"{k}.txt": caption.encode() for k, caption in enumerate(captions)}
    return {"png": encoded(picture(seed))} | texts | more


def write_shard(file: Path, samples: list[Sample]) -> Path:
    """Samples get their number as their name, as writers do."""
    file.parent.mkdir(exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for number, parts in enumerate(samples):
            for kind, content in parts.items():
                member = tarfile.TarInfo(f"{number:05d}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return file


def write_three(folder: Path) -> Path:
    write_shard(folder / "s-00.tar", [sample(1, "one"), sample(2, "two", "more")])
    write_shard(folder / "s-01.tar", [sample(3, "three")])
    return folder


def contents(records: ImageTextRecords) -> dict[int, tuple[bytes, tuple[str, ...]]]:
    images = records.images[np.arange(len(records))]
    return {
        int(i): (image.tobytes(), captions)
        for i, image, captions in zip(records.ids, images, records.captions, strict=True)
    }


def index_of(shard: Path) -> Path:
    return next((shard.parent / INDEX_FOLDER).glob("*.arrow"))


def replace_in_index(shard: Path, old: bytes, new: bytes) -> None:
    index = index_of(shard)
    index.write_bytes(index.read_bytes().replace(old, new))


def test_every_sample_is_read_with_its_captions(tmp_path):
    records = load_webdataset(write_three(tmp_path)).train
    expected = [picture(seed).transpose(2, 0, 1) for seed in (1, 2, 3)]
    assert (records.images[np.arange(3)] == np.stack(expected)).all()
    assert records.captions == (("one",), ("two", "more"), ("three",))


def test_records_are_read_in_any_order_and_repeated(tmp_path):
    records = load_webdataset(write_three(tmp_path)).train
    images, captions = records.pairs_at(np.array([2, 0, 2]), seed=0, step=0)
    assert captions == ["three", "one", "three"]
    assert (images == np.stack([picture(seed).transpose(2, 0, 1) for seed in (3, 1, 3)])).all()


def test_an_empty_draw_reads_nothing(tmp_path):
    images, captions = load_webdataset(write_three(tmp_path)).train.pairs_at(
        np.array([], dtype=np.int64), seed=0, step=0
    )
    assert (images.shape, captions) == ((0, 3, 6, 7), [])


def test_reading_one_record_touches_no_other(tmp_path):
    """The other images are destroyed behind the index's back; only who reads them may notice."""
    shard = write_shard(tmp_path / "s.tar", [sample(seed, "words") for seed in range(5)])
    records, state = load_webdataset(shard).train, shard.stat()
    with shard.open("r+b") as opened:
        for row in (0, 1, 3, 4):
            opened.seek(int(records.images.places["offset"][row]))
            opened.write(bytes(40))
    os.utime(shard, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (records.images[np.array([2])][0] == picture(2).transpose(2, 0, 1)).all()
    with pytest.raises(RecordsError, match="some sampled images no longer are") as caught:
        records.images[np.array([2, 3])]
    (place,) = caught.value.details["files and offsets"]
    assert place.startswith(f"{shard}, ")
    assert not re.search(r"\d", str(caught.value)), "a number tells how many were drawn"


def test_taken_records_read_their_own_images(tmp_path):
    records = load_webdataset(write_three(tmp_path)).train
    assert contents(records.take(np.array([2, 1]))).items() < contents(records).items()


def test_stored_images_go_through_pickle(tmp_path):
    records = load_webdataset(write_three(tmp_path)).train
    assert contents(pickle.loads(pickle.dumps(records))) == contents(records)


def test_image_size_makes_every_image_square(tmp_path):
    mixed = [sample(1, "a"), {"png": encoded(picture(2, 9, 4, 3)), "txt": b"b"}]
    shard = write_shard(tmp_path / "s.tar", mixed)
    assert load_webdataset(shard, image_size=5).train.images[np.arange(2)].shape == (2, 3, 5, 5)
    with pytest.raises(RecordsError, match="2 different sizes"):
        load_webdataset(shard)


def test_captions_come_from_texts_and_from_json(tmp_path):
    parts = {"txt": b"plain", "json": json.dumps({"captions": ["one", "two"], "url": "x"}).encode()}
    shard = write_shard(tmp_path / "s.tar", [sample(1, **parts)])
    assert load_webdataset(shard).train.captions == (("plain", "one", "two"),)


def test_one_image_in_two_samples_is_one_record(tmp_path):
    shard = write_shard(tmp_path / "s.tar", [sample(1, "one"), sample(2, "x"), sample(1, "two")])
    assert load_webdataset(shard).train.captions == (("one", "two"), ("x",))


def test_ids_stay_when_a_sample_is_removed_and_the_others_are_renumbered(tmp_path):
    samples = [sample(seed, f"c{seed}") for seed in range(4)]
    whole = contents(load_webdataset(write_shard(tmp_path / "whole.tar", samples)).train)
    for gone in range(4):
        shard = write_shard(tmp_path / f"{gone}.tar", samples[:gone] + samples[gone + 1 :])
        assert contents(load_webdataset(shard).train).items() < whole.items()


def test_a_unit_field_makes_one_record_of_its_samples(tmp_path):
    def person(seed: int, name: str) -> Sample:
        return sample(seed, f"c{seed}", json=json.dumps({"person": name}).encode())

    shard = write_shard(tmp_path / "s.tar", [person(1, "p"), person(2, "q"), person(3, "p")])
    records = load_webdataset(shard, unit_field="person").train
    assert records.ids.tolist() == ids_from_names(["p", "q"]).tolist()
    assert records.captions == (("c1",), ("c3",), ("c2",))
    assert (records.images[np.array([1])][0] == picture(3).transpose(2, 0, 1)).all()


def test_another_unit_field_is_not_answered_from_the_index(tmp_path):
    fields = json.dumps({"person": "p", "house": 7}).encode()
    shard = write_shard(tmp_path / "s.tar", [sample(1, "one", json=fields)])
    names = [load_webdataset(shard, unit_field=field).train.ids[0] for field in ("person", "house")]
    assert names == ids_from_names(["p", "7"]).tolist()


# The index


def test_an_index_that_fits_is_used(tmp_path):
    shard = write_shard(tmp_path / "s.tar", [sample(1, "one")])
    load_webdataset(shard)
    replace_in_index(shard, b"one", b"ONE")
    assert load_webdataset(shard).train.captions == (("ONE",),)


@pytest.mark.parametrize("change", ["content", "time", "damage", "format"])
def test_an_index_that_does_not_fit_is_built_again(change, tmp_path):
    shard = write_shard(tmp_path / "s.tar", [sample(1, "one")])
    load_webdataset(shard)
    replace_in_index(shard, b"one", b"ONE")
    index = index_of(shard)
    if change == "content":
        write_shard(shard, [sample(1, "one"), sample(2, "two")])
    elif change == "time":
        os.utime(shard, ns=(0, 12345))
    else:
        index.write_bytes(index.read_bytes()[:-5] if change == "damage" else b"no index")
    assert load_webdataset(shard).train.captions[0] == ("one",)


def test_an_index_is_no_more_readable_than_its_shard(tmp_path):
    shard = write_shard(tmp_path / "s.tar", [sample(1, "one")])
    shard.chmod(0o600)
    load_webdataset(shard)
    assert index_of(shard).stat().st_mode & 0o777 == 0o600


def test_an_index_that_cannot_be_kept_is_no_error(tmp_path, caplog):
    shard = write_shard(tmp_path / "s.tar", [sample(1, "one")])
    (shard.parent / INDEX_FOLDER).write_text("in the place of the folder")
    assert len(load_webdataset(shard).train) == 1
    assert "Make the folder of the data writable" in caplog.text


def test_a_shard_that_changed_after_loading_is_refused(tmp_path):
    shard = write_shard(tmp_path / "s.tar", [sample(1, "one")])
    records = load_webdataset(shard).train
    write_shard(shard, [sample(2, "two"), sample(1, "one")])
    with pytest.raises(RecordsError, match="must not change after it was indexed") as caught:
        records.images[np.array([0])]
    assert caught.value.details == {"files": [str(shard)]}
    assert not re.search(r"\d", str(caught.value)), "which shard tells which records were drawn"


# What is refused

FAULTS = {
    "missing image": {"txt": b"words"},
    "several images": sample(8, "words", jpg=b"x"),
    "several files of one kind": sample(8, "words", **{"0.TXT": b"which one?"}),
    "unreadable image": {"png": encoded(picture(8, 64, 64))[:-900], "txt": b"words"},
    "not 8-bit image": {"png": encoded(picture(8, 4, 4).astype(np.uint16)), "txt": b"words"},
    "empty caption": sample(8, " "),
    "caption not UTF-8": sample(8, txt=b"thr\xff"),
    "unreadable json": sample(8, "words", json=b'{"captions": "no list"}'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_corrupt_samples_are_refused_by_count_with_positions_in_details_alone(fault, tmp_path):
    shard = write_shard(tmp_path / "s.tar", [sample(1, "one"), FAULTS[fault], sample(2, SECRET)])
    for _ in range(2):  # from the shard and from its index
        with pytest.raises(RecordsError, match=f"among 3 rows: 1 {fault}") as caught:
            load_webdataset(shard)
        assert caught.value.details == {fault: [1]}
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_skipping_leaves_the_records_of_the_shard_without_the_corrupt_samples(fault, tmp_path):
    good = [sample(1, "one"), sample(2, "two")]
    shard = write_shard(tmp_path / "s.tar", [good[0], FAULTS[fault], good[1]])
    loaded = load_webdataset(shard, skip_corrupt=True)
    assert loaded.reading_counts == {SKIPPED: 1}
    assert contents(loaded.train) == contents(load_webdataset(write_shard(tmp_path / "t.tar", good)).train)


@pytest.mark.parametrize("place", ["in a file", "in a header", "between samples"])
def test_a_shard_that_is_cut_off_is_refused(place, tmp_path):
    shard = write_shard(tmp_path / "s.tar", [sample(1, "one"), sample(2, "two")])
    with tarfile.open(shard) as archive:
        second = archive.getmember("00001.png")
    cut = {"in a file": second.offset_data + 30, "in a header": second.offset + 100}
    shard.write_bytes(shard.read_bytes()[: cut.get(place, second.offset)])
    for skip_corrupt in (False, True):
        with pytest.raises(DataError, match=r"truncated\. Download it again"):
            load_webdataset(shard, skip_corrupt=skip_corrupt)


@pytest.mark.parametrize("content", [b"", b"hello" * 1000])
def test_what_is_no_tar_is_refused(content, tmp_path):
    (tmp_path / "s.tar").write_bytes(content)
    with pytest.raises(DataError, match="uncompressed tar") as caught:
        load_webdataset(tmp_path / "s.tar")
    assert caught.value.__context__ is None


def test_a_compressed_shard_is_refused(tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w:gz"):
        pass
    with pytest.raises(DataError, match="uncompressed tar"):
        load_webdataset(tmp_path / "s.tar")


def test_ranges_name_shards(tmp_path):
    write_three(tmp_path)
    assert len(load_webdataset(tmp_path / "s-{00..01}.tar").train) == 3
    with pytest.raises(DataError, match="1 of 3 shards"):
        load_webdataset(tmp_path / "s-{00..02}.tar")


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"a folder of \.tar files"):
        load_webdataset(tmp_path)


# Names


def write_files(file: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file


def pair(name: str, seed: int, caption: str) -> Sample:
    return {f"{name}.png": encoded(picture(seed)), f"{name}.txt": caption.encode()}


def captions_by_image(records: ImageTextRecords) -> dict[bytes, tuple[str, ...]]:
    images = records.images[np.arange(len(records))]
    return {image.tobytes(): c for image, c in zip(images, records.captions, strict=True)}


@pytest.mark.parametrize("names", [["v1.0_1", "v1.0_2"], ["v1", "v1.1", "v1.2"], ["a.b.c", "a.b", "a"]])
def test_image_whose_name_has_points_keeps_its_own_caption(names, tmp_path):
    files = {k: v for i, name in enumerate(names) for k, v in pair(name, i, f"of {name}").items()}
    loaded = load_webdataset(write_files(tmp_path / "s.tar", files))
    expected = {picture(i).transpose(2, 0, 1).tobytes(): (f"of {n}",) for i, n in enumerate(names)}
    assert captions_by_image(loaded.train) == expected
    assert loaded.reading_counts == {}


def test_numbered_captions_stay_with_their_image(tmp_path):
    files = pair("a", 0, "one") | {"a.0.txt": b"two", "a.1.txt": b"three"}
    loaded = load_webdataset(write_files(tmp_path / "s.tar", files))
    assert loaded.train.captions == (("one", "two", "three"),)


def test_further_images_of_a_sample_are_left_out_and_counted(tmp_path):
    files = pair("a", 0, "one") | {
        "a.seg.png": encoded(picture(1)),
        "a.cls": b"3",
        "readme": b"",
        "a.wav": b"x",
    }
    loaded = load_webdataset(write_files(tmp_path / "s.tar", files))
    assert captions_by_image(loaded.train) == {picture(0).transpose(2, 0, 1).tobytes(): ("one",)}
    left_out = "files skipped, because they are neither images nor captions (cls, no suffix, png, wav)"
    assert loaded.reading_counts == {left_out: 4}


@pytest.mark.parametrize("extra", ["v1.0_9.txt", "v1.txt"])
def test_caption_without_an_image_is_a_fault(extra, tmp_path):
    files = pair("v1.0_1", 1, "one") | pair("v1.0_2", 2, "two") | {extra: b"stray"}
    with pytest.raises(RecordsError, match="among 3 rows: 1 missing image"):
        load_webdataset(write_files(tmp_path / "s.tar", files))


def test_files_are_those_of_records_and_those_left_out(tmp_path):
    """Every file of a shard is part of a record, or of a corrupt row, or counted as left out."""
    files = pair("a", 0, "one") | pair("v1.0", 1, "two") | pair("v1.1", 2, "three")
    files |= {"b.png": b"no image", "b.txt": b"four", "c.txt": b"five", "a.json": b"{}", "a.npy": b"x"}
    loaded = load_webdataset(write_files(tmp_path / "s.tar", files), skip_corrupt=True)
    assert len(loaded.train) == 3
    left_out = "files skipped, because they are neither images nor captions (npy)"
    assert loaded.reading_counts == {SKIPPED: 2, left_out: 1}
    parts_of_records, parts_of_corrupt_rows = 2 * 3 + 1, 2 + 1
    assert len(files) == parts_of_records + parts_of_corrupt_rows + 1


def test_stored_index_gives_the_same_counts(tmp_path):
    shard = write_files(tmp_path / "s.tar", pair("a", 0, "one") | {"a.npy": b"x"})
    assert load_webdataset(shard).reading_counts == load_webdataset(shard).reading_counts != {}
    assert index_of(shard).exists()


def test_images_without_captions_are_faults_whatever_their_names(tmp_path):
    files = pair("a", 0, "one") | {
        f"v1.{part}.png": encoded(picture(seed)) for seed, part in ((1, "x"), (2, "y"))
    }
    with pytest.raises(RecordsError, match="among 3 rows: 2 empty caption"):
        load_webdataset(write_files(tmp_path / "s.tar", files))
