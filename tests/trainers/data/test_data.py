"""Own data: what is read, what is refused, and that no record's id or split depends on another record."""

from __future__ import annotations

import io
import logging
import pickle
import pkgutil
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dpgcl_core.errors import ConfigError, DataError
from dpgcl_core.sampling.record_ids import ids_from_names
from trainers.data.dataset import Dataset
from trainers.data.dataset_registry import BUILTIN_DATASETS, DATA_SOURCES
from trainers.data.faults import RecordsError
from trainers.data.loading import check_dataset_name, load_dataset, split_train_test
from trainers.data.records import Records
from trainers.data.shapes import SHAPE_NAMES

SECRET = "secret-name"


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, kind)
    return out.getvalue()


def write_npz(tmp_path: Path, **arrays) -> str:
    np.savez(tmp_path / "own.npz", **arrays)
    return f"npz:{tmp_path / 'own.npz'}"


def write_parquet(tmp_path: Path, **columns) -> str:
    pq.write_table(pa.table(columns), tmp_path / "own.parquet")
    return f"parquet:{tmp_path / 'own.parquet'}"


def write_folder(tmp_path: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return f"folder:{tmp_path / 'own'}"


def write_own(scheme: str, folder: Path, rows: list[tuple[np.ndarray, str, str]]) -> str:
    """Rows of (image, label, name); `npz` and `parquet` without, `*-ids` with the names as ids."""
    folder.mkdir()
    images, labels, names = (list(column) for column in zip(*rows, strict=True))
    kind, _, with_ids = scheme.partition("-")
    if kind == "npz":
        extra = {"ids": np.array(names)} if with_ids else {}
        return write_npz(folder, images=np.stack(images), labels=np.array(labels), **extra)
    if kind == "parquet":
        extra = {"id": names} if with_ids else {}
        return write_parquet(folder, image=[encoded(image) for image in images], label=labels, **extra)
    files = zip(images, labels, names, strict=True)
    return write_folder(folder, {f"{label}/{name}.png": encoded(image) for image, label, name in files})


SCHEMES = ("npz", "npz-ids", "parquet", "parquet-ids", "folder")


def rows_with_duplicates() -> list[tuple[np.ndarray, str, str]]:
    """Twelve records: "b" labels one alone, and three are the same image with the same label."""
    images = [noise(6, 6, 3, seed=seed % 10) for seed in range(12)]
    images[3] = images[0]
    labels = ["a", "b", "c", "a", "c", "c", "a", "c", "c", "c", "a", "c"]
    images[10] = images[0]
    return [(image, label, f"r{i}") for i, (image, label) in enumerate(zip(images, labels, strict=True))]


def pairs(records: Records) -> set[tuple[int, bytes]]:
    return {(int(i), image.tobytes()) for i, image in zip(records.ids, records.images, strict=True)}


# One contract for every way to give data of one's own.


@pytest.mark.parametrize("scheme", SCHEMES)
def test_own_data_keep_every_image_with_its_label(scheme, tmp_path):
    rows = rows_with_duplicates()
    loaded = load_dataset(write_own(scheme, tmp_path / "x", rows)).train
    got = sorted((image.tobytes(), int(k)) for image, k in zip(loaded.images, loaded.labels, strict=True))
    assert got == sorted((im.transpose(2, 0, 1).tobytes(), "abc".index(label)) for im, label, _ in rows)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_own_data_count_as_private(scheme, tmp_path):
    assert not load_dataset(write_own(scheme, tmp_path / "x", rows_with_duplicates())).is_builtin


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ids_stay_when_any_one_record_is_removed(scheme, tmp_path):
    rows = rows_with_duplicates()
    whole = pairs(load_dataset(write_own(scheme, tmp_path / "whole", rows)).train)
    assert len(whole) == len(rows)
    for gone in range(len(rows)):
        fewer = load_dataset(write_own(scheme, tmp_path / f"{gone}", rows[:gone] + rows[gone + 1 :])).train
        assert pairs(fewer) < whole, f"record {gone}"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_split_of_the_others_stays_when_any_one_record_is_removed(scheme, tmp_path):
    rows = rows_with_duplicates()
    train, test = split_train_test(load_dataset(write_own(scheme, tmp_path / "whole", rows)), 0.5)
    for gone in range(len(rows)):
        fewer = load_dataset(write_own(scheme, tmp_path / f"{gone}", rows[:gone] + rows[gone + 1 :]))
        fewer_train, fewer_test = split_train_test(fewer, 0.5)
        assert pairs(fewer_train) <= pairs(train), f"record {gone}"
        assert pairs(fewer_test) <= pairs(test), f"record {gone}"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ids_do_not_depend_on_image_size(scheme, tmp_path):
    name = write_own(scheme, tmp_path / "x", rows_with_duplicates())
    assert load_dataset(name, image_size=4).train.ids.tolist() == load_dataset(name).train.ids.tolist()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_image_size_makes_every_image_square(scheme, tmp_path):
    name = write_own(scheme, tmp_path / "x", rows_with_duplicates())
    assert load_dataset(name, image_size=9).image_shape == (3, 9, 9)


@pytest.mark.parametrize("scheme", ["npz", "parquet", "folder"])
def test_missing_path_is_refused(scheme, tmp_path):
    with pytest.raises(DataError, match=f"{scheme}:PATH must be"):
        load_dataset(f"{scheme}:{tmp_path / 'nowhere'}")


def write_images(scheme: str, folder: Path, contents: list[bytes | None]) -> str:
    if scheme == "parquet":
        return write_parquet(folder, image=pa.array(contents, pa.binary()))
    name = write_folder(folder, {f"{SECRET}{i}.png": content or b"" for i, content in enumerate(contents)})
    for i in [i for i, content in enumerate(contents) if content is None]:
        (folder / "own" / f"{SECRET}{i}.png").unlink()
        (folder / "own" / f"{SECRET}{i}.png").symlink_to(folder / "gone.png")
    return name


BOTH = pytest.mark.parametrize("scheme", ["parquet", "folder"])


@BOTH
def test_mixed_sizes_are_refused_with_counts_in_details_alone(scheme, tmp_path):
    contents = [encoded(noise(4, 4)), encoded(noise(5, 7)), encoded(noise(4, 4))]
    with pytest.raises(RecordsError, match=r"3 images have 2 different sizes.*--image-size") as caught:
        load_dataset(write_images(scheme, tmp_path, contents))
    assert caught.value.details == {"num_images_by_height_and_width": {(4, 4): 2, (5, 7): 1}}
    assert SECRET not in str(caught.value)


@BOTH
def test_mixed_sizes_are_usable_with_image_size(scheme, tmp_path):
    name = write_images(scheme, tmp_path, [encoded(noise(4, 4)), encoded(noise(5, 7))])
    assert load_dataset(name, image_size=4).image_shape == (1, 4, 4)


@BOTH
@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("unreadable", b"not an image"),
        ("unreadable", encoded(noise(64, 64))[:-900]),
        ("missing", None),
        ("not 8-bit", encoded(noise(4, 4).astype(np.uint16))),
    ],
)
def test_unusable_images_are_refused_by_number_alone(scheme, kind, bad, tmp_path):
    with pytest.raises(RecordsError, match=f"among 3 images: 1 {kind}") as caught:
        load_dataset(write_images(scheme, tmp_path, [encoded(noise(4, 4)), bad, encoded(noise(4, 4))]))
    named = caught.value.details[kind]
    assert named == ([1] if scheme == "parquet" else [str(tmp_path / f"own/{SECRET}1.png")])
    assert SECRET not in str(caught.value)
    assert caught.value.__context__ is None, "a traceback would print the decoder's message too"


@BOTH
def test_grayscale_images_have_one_channel(scheme, tmp_path):
    name = write_images(scheme, tmp_path, [encoded(noise(4, 4)), encoded(noise(4, 4, 2))])
    assert load_dataset(name).image_shape == (1, 4, 4)


@BOTH
def test_grayscale_among_colour_becomes_rgb(scheme, tmp_path):
    gray = noise(4, 4)
    loaded = load_dataset(write_images(scheme, tmp_path, [encoded(gray), encoded(noise(4, 4, 3))]))
    assert (loaded.train.images[0] == gray).all()
    assert loaded.image_shape == (3, 4, 4)


def transparent() -> bytes:
    """A picture whose palette is transparent in parts, of which the decoder warns."""
    image, out = Image.fromarray(noise(4, 4, 3)).quantize(4), io.BytesIO()
    image.save(out, "PNG", transparency=bytes((0, 9, 255)))
    return out.getvalue()


@pytest.mark.parametrize("scheme", ["folder", "parquet", "csv"])
@pytest.mark.parametrize("kind", ["many pixels", "transparent palette"])
def test_decoder_says_nothing_of_an_image(kind, scheme, tmp_path, monkeypatch, capfd):
    if kind == "many pixels":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    content = encoded(noise(4, 4, 3)) if kind == "many pixels" else transparent()
    if scheme == "csv":
        (tmp_path / "a.png").write_bytes(content)
        (tmp_path / "a.csv").write_text("filepath\ttitle\na.png\tone\n")
        name = f"csv:{tmp_path / 'a.csv'}"
    else:
        name = write_images(scheme, tmp_path, [content])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        load_dataset(name)
        assert [str(each.message) for each in heard] == []
        Image.open(io.BytesIO(content)).convert("RGB")
        warnings.simplefilter("always")
        Image.open(io.BytesIO(content)).convert("RGB")
        assert heard, "the picture must be one of which the decoder warns"
    assert capfd.readouterr().err == ""


def test_decoder_logs_nothing_of_an_image(tmp_path):
    load_dataset(write_images("folder", tmp_path, [encoded(noise(4, 4))]))
    assert not logging.getLogger("PIL.TiffImagePlugin").isEnabledFor(logging.CRITICAL)


def test_records_error_keeps_its_details_through_pickle():
    copy = pickle.loads(pickle.dumps(RecordsError("rule", {"missing": [1]})))
    assert (str(copy), copy.details) == ("rule", {"missing": [1]})


# npz:PATH


@pytest.mark.parametrize("shape", [(5, 6, 7), (5, 1, 6, 7), (5, 6, 7, 1)])
def test_npz_reads_every_layout(shape, tmp_path):
    images = noise(*shape)
    assert (
        load_dataset(write_npz(tmp_path, images=images)).train.images[:, 0] == images.reshape(5, 6, 7)
    ).all()


def test_npz_keeps_integer_labels(tmp_path):
    name = write_npz(tmp_path, images=noise(3, 4, 4), labels=np.array([7, 2, 7]))
    assert load_dataset(name).train.labels.tolist() == [7, 2, 7]


def test_npz_train_and_test_share_one_class_index(tmp_path):
    name = write_npz(
        tmp_path,
        train_images=noise(2, 4, 4),
        train_labels=np.array(["cat", "dog"]),
        test_images=noise(2, 4, 4),
        test_labels=np.array(["dog", "ant"]),
    )
    loaded = load_dataset(name)
    assert (loaded.train.labels.tolist(), loaded.test.labels.tolist()) == ([1, 2], [2, 0])


def test_npz_text_and_integer_ids_of_the_same_digits_agree(tmp_path):
    text = load_dataset(write_npz(tmp_path, images=noise(2, 4, 4), ids=np.array(["4", "5"]))).train.ids
    assert load_dataset(
        write_npz(tmp_path, images=noise(2, 4, 4), ids=np.array([4, 5]))
    ).train.ids.tolist() == (text.tolist())


OK = noise(3, 4, 4)
BAD_NPZ = {
    "no images": ({"pictures": OK}, "either images or train_images; found pictures"),
    "both": ({"images": OK, "train_images": OK}, "either images or train_images"),
    "labels without images": (
        {"images": OK, "test_labels": np.arange(3)},
        "test_labels must also hold test_images; found",
    ),
    "float images": ({"images": OK / 255}, "images must be uint8, 0 to 255; got float64"),
    "2 axes": ({"images": OK[0]}, "got 2 axes"),
    "4 channels": ({"images": noise(3, 4, 4, 4)}, "exactly one channel axis"),
    "ambiguous": ({"images": noise(3, 3, 4, 3)}, "exactly one channel axis"),
    "empty": ({"images": OK[:0]}, "at least one record, "),
    "no pixels": ({"images": OK[:, :0]}, "at least one record, with at least one pixel"),
    "empty test": ({"train_images": OK, "test_images": OK[:0]}, "some split holds none"),
    "few labels": (
        {"images": OK, "labels": np.arange(2)},
        r"labels must have one entry per image; got shape \(2,\)",
    ),
    "float labels": ({"images": OK, "labels": np.ones(3)}, "all integers or all strings; got float64"),
    "negative labels": ({"images": OK, "labels": np.array([0, -1, -2])}, "2 are not"),
    "half labels": (
        {"train_images": OK, "train_labels": np.arange(3), "test_images": OK},
        "or neither; only one has them",
    ),
    "few ids": ({"images": OK, "ids": np.arange(2)}, "ids must have one entry per image"),
    "repeated ids": ({"images": OK, "ids": np.array(["q", "q", "r"])}, "ids must be unique.*1 of 3 repeat"),
    "float ids": ({"images": OK, "ids": np.arange(3.0)}, "strings or integers; got float64"),
    "two shapes": ({"train_images": OK, "test_images": noise(2, 5, 5)}, r"\(1, 4, 4\) and \(1, 5, 5\)"),
    "objects": ({"images": OK, "labels": np.array([None, 1, "x"], dtype=object)}, "without Python objects"),
}


@pytest.mark.parametrize("case", BAD_NPZ)
def test_npz_that_breaks_a_rule_is_refused(case, tmp_path):
    arrays, message = BAD_NPZ[case]
    with pytest.raises(DataError, match=message):
        load_dataset(write_npz(tmp_path, **arrays))


@pytest.mark.parametrize("damage", ["cut", "text", "npy", "pickle"])
def test_npz_that_cannot_be_read_is_refused(damage, tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, images=OK)
    whole = path.read_bytes()
    npy = io.BytesIO()
    np.save(npy, OK)
    contents = {"cut": whole[:-40], "text": b"hello", "npy": npy.getvalue(), "pickle": pickle.dumps([1])}
    path.write_bytes(contents[damage])
    with pytest.raises(DataError, match=r"readable .npz"):
        load_dataset(f"npz:{path}")


# parquet:PATH

PNG = encoded(noise(4, 4))


def test_parquet_reads_the_struct_of_bytes_and_path(tmp_path):
    column = [{"bytes": encoded(image), "path": None} for image in OK]
    assert (load_dataset(write_parquet(tmp_path, image=column)).train.images[:, 0] == OK).all()


def test_parquet_ids_of_64_bits_stay_apart(tmp_path):
    ids = pa.array([1, 2**63 + 1, 2**63 + 2], pa.uint64())
    assert len(set(load_dataset(write_parquet(tmp_path, image=[PNG] * 3, id=ids)).train.ids)) == 3


def test_parquet_folder_is_one_data_set(tmp_path):
    for i, image in enumerate(OK):
        pq.write_table(pa.table({"image": [encoded(image)], "label": [i]}), tmp_path / f"{i}.parquet")
    assert load_dataset(f"parquet:{tmp_path}").train.labels.tolist() == [0, 1, 2]


def test_parquet_reads_labels_stored_as_a_dictionary(tmp_path):
    labels = pa.array(["b", "a", "b"]).dictionary_encode()
    assert load_dataset(write_parquet(tmp_path, image=[PNG] * 3, label=labels)).train.labels.tolist() == [
        1,
        0,
        1,
    ]


BAD_PARQUET = {
    "no image": ({"picture": [PNG], "text": ["x"]}, "one column named image. Columns found: picture, text"),
    "number as image": ({"image": [1]}, "image must hold encoded image bytes or paths.*got int64"),
    "path of no file": ({"image": [{"path": "x"}]}, "among 1 images: 1 missing"),
    "float label": ({"image": [PNG], "label": [0.5]}, "label must hold integers or strings; got double"),
    "null label": (
        {"image": [PNG] * 2, "label": ["x", None]},
        "label must have a value in every row; 1 have none",
    ),
    "caption number": ({"image": [PNG], "caption": [1]}, "caption must hold strings"),
    "repeated image": (pa.table([[PNG], [PNG]], names=["image", "image"]), "one column named image"),
    "repeated label": (pa.table([[PNG], [1], [1]], names=["image", "label", "label"]), "each only once"),
    "float id": ({"image": [PNG], "id": [0.5]}, "id must hold integers or strings"),
    "null id": ({"image": [PNG] * 2, "id": ["x", None]}, "id must have a value in every row"),
    "repeated id": ({"image": [PNG] * 2, "id": ["x", "x"]}, "ids must be unique"),
    "empty": ({"image": pa.array([], pa.binary())}, "at least one image"),
}


@pytest.mark.parametrize("case", BAD_PARQUET)
def test_parquet_that_breaks_a_rule_is_refused(case, tmp_path):
    columns, message = BAD_PARQUET[case]
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), tmp_path / "own.parquet")
    with pytest.raises(DataError, match=message):
        load_dataset(f"parquet:{tmp_path / 'own.parquet'}")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"image": [PNG]}, "the same columns"),
        ({"image": [PNG], "label": ["x"]}, "the same types"),
    ],
)
def test_parquet_files_that_differ_are_refused(second, message, tmp_path):
    for i, columns in enumerate(({"image": [PNG], "label": [1]}, second)):
        pq.write_table(pa.table(columns), tmp_path / f"{i}.parquet")
    with pytest.raises(DataError, match=message):
        load_dataset(f"parquet:{tmp_path}")


def test_parquet_that_cannot_be_read_is_refused_by_number_alone(tmp_path):
    write_parquet(tmp_path, image=[PNG])
    (tmp_path / f"{SECRET}.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(RecordsError, match="1 of 2 are not") as caught:
        load_dataset(f"parquet:{tmp_path}")
    assert SECRET not in str(caught.value)


# Class names

PETS = ("cat", "dog", "golden_retriever")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_labels_are_places_in_the_class_names(scheme, tmp_path):
    rows = [
        (image, {"a": "dog", "b": "eel", "c": "cat"}[k], name) for image, k, name in rows_with_duplicates()
    ]
    loaded = load_dataset(write_own(scheme, tmp_path / "x", rows))
    assert loaded.class_names == ("cat", "dog", "eel")
    got = sorted((image.tobytes(), loaded.class_names[k]) for image, k in labelled(loaded.train))
    assert got == sorted((im.transpose(2, 0, 1).tobytes(), label) for im, label, _ in rows)


def labelled(records: Records) -> list[tuple[np.ndarray, int]]:
    return list(zip(records.images, records.labels.tolist(), strict=True))


def test_class_names_are_those_of_both_splits(tmp_path):
    splits = {"train_images": noise(2, 4, 4), "test_images": noise(2, 4, 4)}
    labels = {"train_labels": np.array(["cat", "dog"]), "test_labels": np.array(["dog", "ant"])}
    assert load_dataset(write_npz(tmp_path, **splits, **labels)).class_names == ("ant", "cat", "dog")


def test_class_names_of_a_parquet_dictionary_are_its_words(tmp_path):
    labels = pa.array(["b", "a", "b"]).dictionary_encode()
    assert load_dataset(write_parquet(tmp_path, image=[PNG] * 3, label=labels)).class_names == ("a", "b")


def test_integer_labels_have_no_class_names(tmp_path):
    name = write_npz(tmp_path, images=noise(3, 4, 4), labels=np.array([0, 1, 0]))
    assert load_dataset(name).class_names == ()


def test_data_without_labels_have_no_class_names(tmp_path):
    assert load_dataset(write_folder(tmp_path, {"1.png": PNG})).class_names == ()


def test_class_names_that_are_no_unicode_can_be_tokenised(tmp_path):
    """What the file system gives for a folder whose name is in another encoding."""
    place = tmp_path / "own" / "caf\udce9"
    place.mkdir(parents=True)
    (place / "1.png").write_bytes(PNG)
    (name,) = load_dataset(f"folder:{tmp_path / 'own'}").class_names
    assert name.encode().startswith(b"caf")


@pytest.mark.parametrize("name", sorted({*BUILTIN_DATASETS} - {"shapes", "procedural"}))
def test_built_in_classes_have_ten_names_of_their_own(name):
    assert len(set(DATA_SOURCES[name].class_names)) == 10


def test_shapes_have_class_names():
    assert load_dataset("shapes:20").class_names == SHAPE_NAMES


@pytest.mark.parametrize("name", DATA_SOURCES)
def test_source_names_a_reader_that_exists(name):
    assert callable(pkgutil.resolve_name(DATA_SOURCES[name].reader))


@pytest.mark.parametrize("name", BUILTIN_DATASETS)
def test_built_in_source_has_a_title_and_a_shape(name):
    assert DATA_SOURCES[name].title
    assert len(DATA_SOURCES[name].image_shape) == 3


def test_digits_are_named_in_the_order_of_their_labels():
    assert [name.split()[-1] for name in load_dataset("digits").class_names] == [
        *("zero", "one", "two", "three", "four"),
        *("five", "six", "seven", "eight", "nine"),
    ]


def test_eurosat_classes_are_named_in_the_order_of_their_folders():
    folders = ["River", "SeaLake", "Forest", "AnnualCrop", "Highway", "HerbaceousVegetation"]
    folders += ["Industrial", "Pasture", "PermanentCrop", "Residential"]
    firsts = [name.split()[0].capitalize() for name in DATA_SOURCES["eurosat"].class_names]
    assert all(a.startswith(b) for a, b in zip(sorted(folders), firsts, strict=True))


def test_dataset_with_a_label_without_a_name_is_refused():
    records = Records(images=OK[:, None], ids=ids_from_names("xyz"), labels=np.array([0, 1, 2]))
    with pytest.raises(DataError, match="1 of 3 labels are not"):
        Dataset(name="x", train=records, test=None, is_builtin=False, class_names=PETS[:2])


def test_class_names_do_not_show_where_a_data_set_is_printed(tmp_path):
    files = {f"{SECRET} {i}/1.png": PNG for i in range(3)}
    loaded = load_dataset(write_folder(tmp_path, files))
    assert loaded.class_names[0] == f"{SECRET} 0"
    assert SECRET not in repr(loaded)


# folder:PATH


def test_folder_ids_are_the_relative_paths(tmp_path):
    name = write_folder(tmp_path, {"dog/2.png": PNG, "cat/deep/1.png": PNG})
    assert load_dataset(name).train.ids.tolist() == ids_from_names(["cat/deep/1.png", "dog/2.png"]).tolist()


def test_folder_without_classes_has_no_labels(tmp_path):
    assert load_dataset(write_folder(tmp_path, {"1.png": PNG})).train.labels is None


def test_folder_skips_hidden_and_other_files(tmp_path):
    files = {"a/1.png": PNG, "a/.2.png": PNG, ".b/3.png": PNG, "a/notes.txt": b"x"}
    assert len(load_dataset(write_folder(tmp_path, files)).train) == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a/1.png": PNG, "2.png": PNG}, "class sub-folders, or none of them; 1 of 2 images are outside"),
        ({"train/1.png": PNG, "test/1.png": PNG}, "not splits"),
        ({"notes.txt": b"x"}, "at least one image"),
    ],
)
def test_folder_that_breaks_a_rule_is_refused(files, message, tmp_path):
    with pytest.raises(DataError, match=message):
        load_dataset(write_folder(tmp_path, files))


def test_folder_with_a_linked_sub_folder_is_refused(tmp_path):
    name = write_folder(tmp_path, {"a/1.png": PNG})
    (tmp_path / "own" / SECRET).symlink_to(tmp_path / "own" / "a", target_is_directory=True)
    with pytest.raises(RecordsError, match="1 are links") as caught:
        load_dataset(name)
    assert SECRET not in str(caught.value)


# Names and splits


def test_names_of_built_ins_and_schemes_are_valid():
    for name in (
        *BUILTIN_DATASETS,
        "npz:x",
        "parquet:x",
        "folder:x",
        "hf:x",
        "csv:x",
        "webdataset:x",
        "shapes:9:1",
    ):
        check_dataset_name(name)


@pytest.mark.parametrize("name", ["digit", "npz", "npz:", "csv", "webdataset:", "tsv:x", ""])
def test_unknown_name_is_refused_with_the_valid_ones(name):
    with pytest.raises(
        ConfigError, match=r"unknown data set.*cifar10.*folder:PATH, hf:PATH, npz:PATH, parquet:PATH"
    ):
        load_dataset(name)


def test_digits_span_the_range_of_uint8():
    loaded = load_dataset("digits")
    assert (loaded.train.images.shape, loaded.test) == ((1797, 1, 8, 8), None)
    assert set(np.unique(loaded.train.images)) == {round(k * 255 / 16) for k in range(17)}


def test_digits_ids_do_not_depend_on_image_size():
    assert (load_dataset("digits", image_size=16).train.ids == load_dataset("digits").train.ids).all()


@pytest.mark.parametrize("image_size", [0, -3, True, 8.0])
def test_image_size_must_be_a_positive_integer(image_size):
    with pytest.raises(ConfigError, match="image_size must be a positive integer"):
        load_dataset("digits", image_size=image_size)


def test_split_keeps_the_sources_own(tmp_path):
    loaded = load_dataset(write_npz(tmp_path, train_images=OK, test_images=OK[:2]))
    train, test = split_train_test(loaded, 0.9)
    assert train is loaded.train
    assert test is loaded.test


def test_split_holds_out_about_the_fraction():
    train, test = split_train_test(load_dataset("digits"), 0.25)
    assert len(train) + len(test) == 1797
    assert abs(len(test) - 449) < 5 * (1797 * 0.25 * 0.75) ** 0.5


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_split_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(ConfigError, match=r"test_fraction must be in \[0, 1\)"):
        split_train_test(load_dataset("digits"), fraction)


def test_split_that_leaves_a_side_empty_is_refused():
    one = Records(images=OK[:1, None], ids=ids_from_names(["x"]))
    with pytest.raises(DataError, match=r"test_fraction = 0\.5 leaves"):
        split_train_test(Dataset(name="one", train=one, test=None, is_builtin=False), 0.5)
