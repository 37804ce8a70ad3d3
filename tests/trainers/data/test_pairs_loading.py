"""Image-text data by name: what is read of each kind of source, and what a name tells beforehand."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dpgcl_core.errors import ConfigError, DataError
from dpgcl_core.sampling.record_ids import ids_from_names
from tests.trainers.conftest import make_config, make_slots
from trainers.config.training import EvaluationConfig
from trainers.data.dataset import Dataset, TrainingData
from trainers.data.faults import RecordsError
from trainers.data.loading import (
    is_builtin_name,
    is_split_held_out,
    load_dataset,
    modality_of_name,
    split_held_out,
    split_train_test,
)
from trainers.data.pair_options import PairOptions
from trainers.data.pair_tables import image_folders
from trainers.data.pairs import SKIPPED, ImageTextRecords
from trainers.data.probes import load_probe
from trainers.data.records import Records
from trainers.data.stored_images import StoredImages
from trainers.training.release import check_release

CAPTIONS = ("one", "two", "three", "four")
SCHEMES = ("csv", "parquet", "webdataset")


def picture(seed: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def write(scheme: str, folder: Path, captions: tuple[str, ...] = CAPTIONS, **columns: str) -> str:
    """One picture with a caption per row; the third one's fault is an empty caption where there is one."""
    folder.mkdir(exist_ok=True)
    images = [picture(row) for row in range(len(captions))]
    persons = [f"person {row // 2}" for row in range(len(captions))]
    image, caption = columns.get("image"), columns.get("caption", "title")
    if scheme == "csv":
        separator = columns.get("separator", "\t")
        lines = [separator.join((image or "filepath", caption, "person"))]
        for row, content in enumerate(images):
            (folder / f"{row}.png").write_bytes(content)
            lines.append(separator.join((f"{row}.png", captions[row], persons[row])))
        path = folder / "own.csv"
        path.write_text("\n".join(lines))
    elif scheme == "parquet":
        path = folder / "own.parquet"
        pq.write_table(pa.table({image or "image": images, caption: captions, "person": persons}), path)
    else:
        path = folder / "own.tar"
        with tarfile.open(path, "w") as shard:
            for row, content in enumerate(images):
                fields = json.dumps({"person": persons[row]}).encode()
                for kind, value in (("png", content), ("txt", captions[row].encode()), ("json", fields)):
                    member = tarfile.TarInfo(f"{row:03d}.{kind}")
                    member.size = len(value)
                    shard.addfile(member, io.BytesIO(value))
    return f"{scheme}:{path}"


def write_images(folder: Path) -> str:
    pq.write_table(pa.table({"image": [picture(0), picture(1)], "label": [0, 1]}), folder / "images.parquet")
    return f"parquet:{folder / 'images.parquet'}"


# Own pairs


@pytest.mark.parametrize("scheme", SCHEMES)
def test_own_pairs_are_loaded_by_name(scheme, tmp_path):
    loaded = load_dataset(write(scheme, tmp_path))
    assert isinstance(loaded.train, ImageTextRecords)
    assert {row for (row,) in loaded.train.captions} == set(CAPTIONS)
    assert (loaded.image_shape, loaded.is_builtin, loaded.reading_counts) == ((3, 6, 6), False, {})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_image_size_makes_own_pairs_square(scheme, tmp_path):
    assert load_dataset(write(scheme, tmp_path), image_size=9).image_shape == (3, 9, 9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_unit_column_makes_all_images_of_a_person_one_record(scheme, tmp_path):
    train = load_dataset(write(scheme, tmp_path), unit_column="person").train
    assert (len(train), train.images.shape[0]) == (2, 4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_corrupt_rows_are_refused_unless_they_are_skipped(scheme, tmp_path):
    name = write(scheme, tmp_path, ("one", "two", " ", "four"))
    with pytest.raises(RecordsError, match="among 4 rows: 1 empty caption") as caught:
        load_dataset(name)
    assert caught.value.details == {"empty caption": [2]}
    loaded = load_dataset(name, pairs=PairOptions(skip_corrupt=True))
    assert (len(loaded.train), loaded.reading_counts) == (3, {SKIPPED: 1})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_skipping_leaves_the_records_that_stay_as_they_are(scheme, tmp_path):
    skipping = PairOptions(skip_corrupt=True)
    fewer = load_dataset(write(scheme, tmp_path / "a", ("one", "two", "", "four")), pairs=skipping).train
    whole = load_dataset(write(scheme, tmp_path / "b"), pairs=skipping).train
    kept = [row != ("three",) for row in whole.captions]
    assert fewer.ids.tolist() == whole.ids[kept].tolist()


def test_number_of_skipped_rows_is_not_shown(tmp_path):
    assert "reading_counts" not in repr(load_dataset(write("csv", tmp_path)))


def test_csv_is_read_with_the_separator_and_columns_given(tmp_path):
    name = write("csv", tmp_path, separator=",", image="file", caption="words")
    given = PairOptions(separator=",", image="file", caption="words")
    assert len(load_dataset(name, pairs=given).train) == 4


def test_parquet_columns_are_read_by_the_names_given(tmp_path):
    name = write("parquet", tmp_path, image="picture", caption="words")
    assert len(load_dataset(name, pairs=PairOptions(image="picture", caption="words")).train) == 4


def test_parquet_without_captions_stays_image_data(tmp_path):
    loaded = load_dataset(write_images(tmp_path))
    assert isinstance(loaded.train, Records)
    assert loaded.modality == "image"


@pytest.mark.parametrize(
    ("name", "given", "unused"),
    [
        ("digits", {"skip_corrupt": True}, "skip_corrupt"),
        ("shapes:5", {"image": "x"}, "image"),
        ("npz:x", {"caption": "x"}, "caption"),
        ("webdataset:x", {"separator": ",", "skip_corrupt": True}, "separator. Leave"),
        ("parquet", {"skip_corrupt": True}, "parquet data without captions do not use skip_corrupt"),
    ],
)
def test_pair_options_that_mean_nothing_are_refused(name, given, unused, tmp_path):
    name = write_images(tmp_path) if name == "parquet" else name
    with pytest.raises(ConfigError, match=unused):
        load_dataset(name, pairs=PairOptions(**given))


def test_default_pair_options_are_taken_for_any_data():
    assert len(load_dataset("digits", pairs=PairOptions()).train) == 1797


# What a name tells


@pytest.mark.parametrize("scheme", SCHEMES)
def test_modality_by_name_is_that_of_what_is_loaded(scheme, tmp_path):
    name = write(scheme, tmp_path)
    assert modality_of_name(name) == load_dataset(name).modality == "image-text"


@pytest.mark.parametrize("name", ["digits", "npz:x", "folder:x", "parquet:/nowhere", "parquet:", "nonsense"])
def test_modality_of_anything_else_is_image(name):
    assert modality_of_name(name) == "image"


def test_modality_of_a_damaged_parquet_file_is_image(tmp_path):
    (tmp_path / "own.parquet").write_bytes(b"PAR1 and no more")
    assert modality_of_name(f"parquet:{tmp_path / 'own.parquet'}") == "image"


def test_modality_of_parquet_follows_the_caption_column_given(tmp_path):
    name = write("parquet", tmp_path, caption="words")
    assert [modality_of_name(name, given) for given in (None, PairOptions(caption="words"))] == [
        "image",
        "image-text",
    ]


def test_only_built_in_names_are_public():
    names = ("digits", "shapes", "shapes:5", "shapes:5:3", "csv:x", "webdataset:x", "parquet:x", "shapesx")
    assert [is_builtin_name(name) for name in names] == [True] * 4 + [False] * 4


# Shapes


def test_shapes_have_training_and_test_pairs_of_the_default_size():
    loaded = load_dataset("shapes:50")
    assert (len(loaded.train), len(loaded.test), loaded.image_shape) == (50, 2000, (3, 32, 32))
    assert loaded.is_builtin


def test_test_shapes_are_in_no_training_set():
    test = load_dataset("shapes:1").test.ids
    assert not set(test.tolist()) & set(ids_from_names(f"shapes/0/{i}" for i in range(60_000)).tolist())


def test_fewer_shapes_are_the_first_of_the_more():
    few, many = (load_dataset(name).train for name in ("shapes:20", "shapes:40:0"))
    assert (few.images == many.images[:20]).all()
    assert few.captions == many.captions[:20]


def test_shapes_of_another_seed_are_other_pictures():
    one, other = (load_dataset(name).train for name in ("shapes:3000", "shapes:3000:1"))
    assert not set(one.ids.tolist()) & set(other.ids.tolist())
    assert not {i.tobytes() for i in one.images} & {i.tobytes() for i in other.images}


def test_image_size_of_shapes_is_drawn():
    assert load_dataset("shapes:5", image_size=48).image_shape == (3, 48, 48)


@pytest.mark.parametrize(
    "name",
    [
        "shapes:",
        "shapes:0",
        "shapes:60001",
        "shapes:5:",
        "shapes:x",
        "shapes:5:-1",
        "shapes:5:1:2",
        "shapes:5:common",
    ],
)
def test_shapes_of_another_form_are_refused(name):
    with pytest.raises(ConfigError, match="shapes:NUM:SEED must have 1 to 60000 training pairs"):
        load_dataset(name)


# Splits


@pytest.fixture
def stored(tmp_path, monkeypatch) -> Dataset:
    """Pairs in a shard, of which no image may be read any more."""
    name = write("webdataset", tmp_path, tuple(f"caption {i}" for i in range(40)))
    loaded = load_dataset(name, in_memory=False)
    assert isinstance(loaded.train.images, StoredImages)
    monkeypatch.setattr(StoredImages, "__getitem__", lambda *_: pytest.fail("images were read"))
    return loaded


def test_split_of_stored_pairs_reads_no_image(stored):
    train, test = split_train_test(stored, 0.3)
    assert train.images.shape == (len(train), 3, 6, 6)
    assert sorted([*train.ids, *test.ids]) == sorted(stored.train.ids)
    assert 0 < len(test) < 25


def test_records_held_out_of_stored_pairs_are_those_of_their_slots(stored):
    slots = make_slots(stored.train)
    train, scored = split_held_out(stored.train, 0.4, slots)
    assert sorted([*train.ids, *scored.ids]) == sorted(stored.train.ids)
    assert is_split_held_out(train, scored, 0.4, slots)
    assert not is_split_held_out(scored, train, 0.4, slots)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_split_moves_no_other_pair_when_one_is_removed(scheme, tmp_path):
    captions = tuple(f"caption {i}" for i in range(30))
    whole = split_train_test(load_dataset(write(scheme, tmp_path / "a", captions)), 0.5)
    fewer = split_train_test(load_dataset(write(scheme, tmp_path / "b", captions[:-1])), 0.5)
    gone = [set(w.ids.tolist()) - set(f.ids.tolist()) for w, f in zip(whole, fewer, strict=True)]
    assert sorted(map(len, gone)) == [0, 1]
    assert not any(set(f.ids.tolist()) - set(w.ids.tolist()) for w, f in zip(whole, fewer, strict=True))


def test_one_row_each_keeps_the_pairs_together(tmp_path):
    records = load_dataset(write("csv", tmp_path), unit_column="person").train
    each = records.one_row_each()
    known = {i.tobytes(): c for i, c in zip(records.images, records.captions, strict=True)}
    assert each.ids.tolist() == records.ids.tolist()
    assert len(each.captions) == 2
    assert all(known[i.tobytes()] == c for i, c in zip(each.images, each.captions, strict=True))


# Release


def test_noised_scores_of_pairs_are_refused():
    records = load_dataset("shapes:80").train
    slots = make_slots(records)
    train, scored = split_held_out(records, 0.3, slots)
    data = TrainingData(
        train=train,
        slots=slots,
        index=load_dataset("shapes:50:1").train,
        queries=None,
        train_is_public=False,
        evaluation_is_public=True,
        held_out_records=scored,
    )
    asked = EvaluationConfig(also_untrained=False, score_on_held_out=0.3, score_noise_multiplier=5.0)
    with pytest.raises(ConfigError, match=r"score is a recall.*one record can change all answers"):
        check_release(make_config(evaluation=asked, num_records_public=56), data)


# Probes


def test_labelled_pairs_are_probed_by_their_images():
    probe = load_probe("shapes:60", image_shape=(1, 32, 32), test_fraction=0.2)
    assert isinstance(probe.index, Records)
    assert probe.index.images.shape == (60, 1, 32, 32)
    assert set(probe.queries.labels.tolist()) == set(range(6))


def test_pairs_without_labels_are_no_probe(tmp_path):
    with pytest.raises(ConfigError, match="probe_datasets need labels"):
        load_probe(write("csv", tmp_path), image_shape=(3, 6, 6), test_fraction=0.5)


def test_probe_ignores_what_means_nothing_for_it():
    given = PairOptions(separator=",", skip_corrupt=True)
    probe = load_probe("digits", image_shape=(3, 32, 32), test_fraction=0.2, pairs=given)
    assert probe.index.images.shape[1:] == (3, 32, 32)


# Where images lie


def test_folders_of_named_images_are_found_without_reading_them(tmp_path):
    (tmp_path / "own.csv").write_text("filepath\ttitle\na/1.png\tx\n../b/2.png\ty\n")
    found = [folder.resolve() for folder in image_folders(f"csv:{tmp_path / 'own.csv'}")]
    assert sorted(found) == sorted([tmp_path / "a", tmp_path.parent / "b"])


def test_folders_that_links_lead_to_are_found(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "link.png").symlink_to(tmp_path / "far" / "1.png")
    pq.write_table(pa.table({"filepath": ["link.png"], "title": ["x"]}), tmp_path / "own.parquet")
    assert image_folders(f"parquet:{tmp_path / 'own.parquet'}") == [tmp_path, tmp_path / "far"]


@pytest.mark.parametrize("scheme", ["parquet", "webdataset"])
def test_images_within_a_file_have_no_folder(scheme, tmp_path):
    assert image_folders(write(scheme, tmp_path)) == []


def test_missing_files_are_reported_when_they_are_loaded(tmp_path):
    for scheme in SCHEMES:
        with pytest.raises(DataError, match=f"{scheme}:PATH must be"):
            load_dataset(f"{scheme}:{tmp_path / 'nowhere'}")
        assert image_folders(f"{scheme}:{tmp_path / 'nowhere'}") == []
