"""Image-text files: what is read, what is refused, and that no record's id or caption depends on another."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dpgcl_core.errors import ConfigError, DataError
from dpgcl_core.sampling.record_ids import ids_from_names
from tests.trainers.data.readers import load_csv_pairs, load_parquet_pairs
from trainers.data.faults import RecordsError
from trainers.data.loading import load_dataset
from trainers.data.pair_options import PairOptions
from trainers.data.pair_tables import image_folders
from trainers.data.pairs import SKIPPED, ImageTextRecords, LoadedData

SECRET = "secret-words"
USERS_DATA = os.environ.get("DPGCL_DATA")
needs_users_data = pytest.mark.skipif(
    not USERS_DATA or not (Path(USERS_DATA) / "emoji_image_text").is_dir(), reason="not in DPGCL_DATA"
)

Row = tuple[str, str]  # (name of the picture, caption)


def picture(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape or (4, 5, 3), dtype=np.uint8)


def encoded(image: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, kind)
    return out.getvalue()


def of(name: str) -> np.ndarray:
    return picture(sum(name.encode()))


def write_csv(folder: Path, rows: list[Row], separator: str = "\t", header: str = "filepath,title") -> Path:
    folder.mkdir(exist_ok=True)
    for name, _ in rows:
        (folder / name).write_bytes(encoded(of(name)))
    lines = [header.replace(",", separator), *(separator.join(row) for row in rows)]
    (folder / "pairs.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder / "pairs.csv"


def write_parquet(folder: Path, **columns) -> Path:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "pairs.parquet")
    return folder / "pairs.parquet"


def load(scheme: str, folder: Path, rows: list[Row], **options) -> LoadedData:
    names, captions = [name for name, _ in rows], [caption for _, caption in rows]
    if scheme == "csv":
        return load_csv_pairs(write_csv(folder, rows), **options)
    if scheme == "parquet-paths":
        write_csv(folder, rows)
        return load_parquet_pairs(write_parquet(folder, filepath=names, title=captions), **options)
    images = [encoded(of(name)) for name in names]
    if scheme == "parquet-structs":
        images = [{"bytes": image, "path": None} for image in images]
    return load_parquet_pairs(write_parquet(folder, image=images, caption=captions), **options)


SCHEMES = ("csv", "parquet-paths", "parquet-bytes", "parquet-structs")
ROWS = [("a.png", "one"), ("b.png", "two"), ("a.png", "three"), ("c.png", "two"), ("b.png", "four")]


def contents(records: ImageTextRecords) -> dict[int, tuple[bytes, tuple[str, ...]]]:
    """What each id stands for, where a record is one image."""
    return {
        int(i): (image.tobytes(), captions)
        for i, image, captions in zip(records.ids, records.images, records.captions, strict=True)
    }


def made(num_captions: list[int], **more) -> ImageTextRecords:
    return ImageTextRecords(
        images=picture(0, len(num_captions), 3, 4, 4),
        captions=tuple(tuple(f"{i}-{k}" for k in range(n)) for i, n in enumerate(num_captions)),
        **({"ids": ids_from_names(f"r{i}" for i in range(len(num_captions)))} | more),
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_image_with_all_its_captions_is_one_record(scheme, tmp_path):
    records = load(scheme, tmp_path / "x", ROWS).train
    expected = {of("a.png").tobytes(): ("one", "three"), of("b.png").tobytes(): ("two", "four")}
    expected[of("c.png").tobytes()] = ("two",)
    got = {im.transpose(1, 2, 0).tobytes(): c for im, c in zip(records.images, records.captions, strict=True)}
    assert (got, len(records)) == (expected, 3)


@pytest.mark.parametrize("spelled", ["./a.png", "../x/a.png", "{}/a.png", "{}/../x/./a.png"])
@pytest.mark.parametrize("scheme", ["csv", "parquet-paths"])
def test_two_spellings_of_a_path_are_one_record(scheme, spelled, tmp_path):
    rows = [("a.png", "one"), (spelled.format(tmp_path / "x"), "two")]
    assert load(scheme, tmp_path / "x", rows).train.captions == (("one", "two"),)


def test_two_absolute_paths_through_a_link_to_the_folder_are_one_record(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "x")
    path = write_csv(tmp_path / "x", [(str(tmp_path / name / "a.png"), name) for name in ("x", "link")])
    assert load_csv_pairs(tmp_path / "link" / path.name).train.captions == (("x", "link"),)


@pytest.mark.parametrize("spelled", ["a.png", "./a.png", "{}/a.png"])
def test_ids_stay_when_the_folder_moves(spelled, tmp_path):
    ids = [
        load("csv", tmp_path / name, [(spelled.format(tmp_path / name), "one")]).train.ids.tolist()
        for name in ("x", "y")
    ]
    assert ids[0] == ids[1] == ids_from_names(["a.png"]).tolist()


def test_an_image_in_another_folder_is_known_by_its_absolute_path(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(of("a.png")))
    records = load("csv", tmp_path / "x", [("../a.png", "one"), (str(tmp_path / "a.png"), "two")]).train
    assert records.ids.tolist() == ids_from_names([str(tmp_path / "a.png")]).tolist()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ids_stay_when_any_one_image_is_removed(scheme, tmp_path):
    whole = contents(load(scheme, tmp_path / "whole", ROWS).train)
    for gone in ("a.png", "b.png", "c.png"):
        fewer = load(scheme, tmp_path / gone, [row for row in ROWS if row[0] != gone]).train
        assert contents(fewer).items() < whole.items(), gone


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ids_do_not_depend_on_the_captions(scheme, tmp_path):
    other = [(name, f"other {caption}") for name, caption in ROWS]
    ids = load(scheme, tmp_path / "x", ROWS).train.ids
    assert load(scheme, tmp_path / "y", other).train.ids.tolist() == ids.tolist()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_image_size_makes_every_image_square_and_keeps_the_ids(scheme, tmp_path):
    plain, square = (load(scheme, tmp_path / f"{s}", ROWS, image_size=s).train for s in (None, 8))
    assert square.images.shape == (3, 3, 8, 8)
    assert square.ids.tolist() == plain.ids.tolist()


def test_parquet_lists_give_several_captions(tmp_path):
    path = write_parquet(tmp_path, image=[encoded(of("a"))], title=[["one", "two", "one"]])
    assert load_parquet_pairs(path).train.captions == (("one", "two"),)


def test_grey_images_become_colour(tmp_path):
    path = write_parquet(tmp_path, image=[encoded(picture(1, 4, 4))], title=["grey"])
    assert (load_parquet_pairs(path).train.images[0] == picture(1, 4, 4)).all()


def test_captions_that_look_like_missing_values_are_kept(tmp_path):
    assert load("csv", tmp_path / "x", [("a.png", "NA"), ("a.png", "null")]).train.captions == (
        ("NA", "null"),
    )


def test_csv_reads_another_separator_and_quotes(tmp_path):
    path = write_csv(tmp_path / "x", [("a.png", '"one, ""two"""')], separator=",")
    assert load_csv_pairs(path, PairOptions(separator=",")).train.captions == (('one, "two"',),)


def test_csv_with_another_separator_is_refused_with_the_columns_in_details_alone(tmp_path):
    path = write_csv(tmp_path / "x", ROWS, separator=",")
    expected = r"one column named filepath .*none has such a name with separator '\\t'"
    with pytest.raises(DataError, match=expected) as caught:
        load_csv_pairs(path)
    assert caught.value.details == {"columns": ["filepath,title"]}


def test_csv_without_column_names_tells_nothing_of_its_first_record(tmp_path):
    (tmp_path / "pairs.csv").write_text(f"{SECRET}.png\t{SECRET}\n2.png\ttwo\n")
    with pytest.raises(DataError, match="none has such a name") as caught:
        load_csv_pairs(tmp_path / "pairs.csv")
    assert SECRET not in str(caught.value)


SWALLOWED = [("a.png", f'"{SECRET}'), ("b.png", "two"), ("c.png", 'three"'), ("d.png", "four")]


@pytest.mark.parametrize("skip_corrupt", [False, True])
def test_rows_that_a_quote_joins_are_refused(skip_corrupt, tmp_path):
    options = PairOptions(skip_corrupt=skip_corrupt)
    with pytest.raises(RecordsError, match="must take one line; rows with line breaks: 1") as caught:
        load("csv", tmp_path / "x", SWALLOWED, options=options)
    assert caught.value.details == {"rows with line breaks": [0]}
    assert SECRET not in str(caught.value)


def test_csv_with_an_open_quote_is_refused(tmp_path):
    rows = [("a.png", "one"), ("b.png", f'"{SECRET}'), ("c.png", "three")]
    with pytest.raises(DataError, match="no unclosed quote") as caught:
        load("csv", tmp_path / "x", rows)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("separator", ["", "ab", '"', "\n"])
def test_separator_of_another_length_or_meaning_is_refused(separator):
    with pytest.raises(ConfigError, match="must be one character"):
        PairOptions(separator=separator)


def test_parquet_with_paths_and_images_is_refused_until_one_is_named(tmp_path):
    columns = {"image": [encoded(of("a"))], "filepath": ["a"], "title": ["one"]}
    path = write_parquet(tmp_path, **columns)
    with pytest.raises(DataError, match="must have one column named filepath or image"):
        load_parquet_pairs(path)
    assert len(load_parquet_pairs(path, PairOptions(image="image")).train) == 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [({"image": [1], "title": ["x"]}, "must hold paths"), ({"image": [b"x"], "title": [1]}, "hold strings")],
)
def test_parquet_of_other_types_is_refused(columns, message, tmp_path):
    with pytest.raises(DataError, match=message):
        load_parquet_pairs(write_parquet(tmp_path, **columns))


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more"])
def test_parquet_that_cannot_be_read_is_refused(content, tmp_path):
    (tmp_path / "pairs.parquet").write_bytes(content)
    with pytest.raises(DataError, match="must be readable") as caught:
        load_parquet_pairs(tmp_path / "pairs.parquet")
    assert caught.value.__context__ is None, "a traceback would print the reader's message too"


# Corrupt rows

GOOD = encoded(picture(7, 64, 64))
FAULTS = {
    "missing image": (None, "words"),
    "unreadable image": (GOOD[:-900], "words"),
    "not 8-bit image": (encoded(picture(7, 4, 4).astype(np.uint16)), "words"),
    "empty caption": (GOOD, " "),
}


def with_fault(scheme: str, folder: Path, fault: str) -> Path:
    image, caption = FAULTS[fault]
    images = [encoded(picture(1, 64, 64)), image, encoded(picture(2, 64, 64))]
    captions = ["first", caption, "third"]
    if scheme == "parquet":
        return write_parquet(folder, image=pa.array(images, pa.binary()), title=captions)
    for i, content in enumerate(images):
        if content is not None:
            (folder / f"{SECRET}{i}.png").write_bytes(content)
    lines = [f"{SECRET}{i}.png\t{caption}" for i, caption in enumerate(captions)]
    (folder / "pairs.csv").write_text("\n".join(["filepath\ttitle", *lines]))
    return folder / "pairs.csv"


LOADERS = {"csv": load_csv_pairs, "parquet": load_parquet_pairs}


@pytest.mark.parametrize("scheme", LOADERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_corrupt_rows_are_refused_by_count_with_positions_in_details_alone(fault, scheme, tmp_path):
    with pytest.raises(RecordsError, match=f"among 3 rows: 1 {fault}") as caught:
        LOADERS[scheme](with_fault(scheme, tmp_path, fault))
    assert caught.value.details == {fault: [1]}
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("scheme", LOADERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_skipping_leaves_the_records_of_the_file_without_the_corrupt_rows(fault, scheme, tmp_path):
    loaded = LOADERS[scheme](with_fault(scheme, tmp_path, fault), PairOptions(skip_corrupt=True))
    assert (loaded.reading_counts, loaded.train.captions) == ({SKIPPED: 1}, (("first",), ("third",)))
    clean = tmp_path / "clean"
    clean.mkdir()
    FAULTS["none"] = (GOOD, "words")
    whole = contents(LOADERS[scheme](with_fault(scheme, clean, "none")).train)
    del FAULTS["none"]
    assert contents(loaded.train).items() < whole.items()


def test_a_path_that_may_not_be_looked_at_is_a_missing_image(tmp_path):
    path = write_csv(tmp_path / "x", ROWS)
    path.write_text(f"{path.read_text()}\n{'x' * 5000}.png\t{SECRET}")
    with pytest.raises(RecordsError, match="among 6 rows: 1 missing image"):
        load_csv_pairs(path)


def test_csv_rows_of_another_length_are_corrupt(tmp_path):
    rows = [("a.png", "one"), ("b.png", f"two\t{SECRET}"), ("c.png", "three")]
    loaded = load("csv", tmp_path / "x", rows, options=PairOptions(skip_corrupt=True))
    assert (loaded.reading_counts, len(loaded.train)) == ({SKIPPED: 1}, 2)


def test_captions_that_are_no_text_are_corrupt(tmp_path):
    path = write_csv(tmp_path / "x", ROWS)
    path.write_bytes(path.read_bytes().replace(b"three", b"thr\xff"))
    with pytest.raises(RecordsError, match="among 5 rows: 1 caption not UTF-8"):
        load_csv_pairs(path)


def test_reading_counts_are_not_shown(tmp_path):
    assert "reading_counts" not in repr(load("csv", tmp_path / "x", ROWS))


def test_a_file_of_corrupt_rows_alone_is_refused(tmp_path):
    with pytest.raises(DataError, match="at least one valid row; 0 of 1 rows"):
        load("csv", tmp_path / "x", [("a.png", "")], options=PairOptions(skip_corrupt=True))


def test_images_of_several_sizes_are_refused_with_counts_in_details_alone(tmp_path):
    images = [encoded(picture(1, 4, 4, 3)), encoded(picture(2, 5, 7, 3)), encoded(picture(3, 4, 4, 3))]
    with pytest.raises(RecordsError, match=r"3 images have 2 different sizes.*--image-size") as caught:
        load_parquet_pairs(write_parquet(tmp_path, image=images, title=list("abc")))
    assert caught.value.details == {"num_images_by_height_and_width": {(4, 4): 2, (5, 7): 1}}


# Units and splits


def with_units(folder: Path, rows: list[tuple[str, str, str]]) -> ImageTextRecords:
    images, captions, units = zip(*rows, strict=True)
    path = write_parquet(folder, image=[encoded(of(i)) for i in images], title=captions, person=units)
    return load_parquet_pairs(path, PairOptions(unit="person")).train


UNIT_ROWS = [
    ("a", "one", "p"),
    ("b", "two", "q"),
    ("c", "three", "p"),
    ("a", "four", "p"),
    ("a", "five", "q"),
]


def test_a_unit_is_one_record_with_all_its_images(tmp_path):
    records = with_units(tmp_path, UNIT_ROWS)
    assert records.captions == (("one", "four"), ("three",), ("two",), ("five",))
    assert records.row_starts.tolist() == [0, 2, 4]


def test_ids_of_units_stay_when_one_unit_is_removed(tmp_path):
    whole = with_units(tmp_path / "x", UNIT_ROWS)
    fewer = with_units(tmp_path / "y", [row for row in UNIT_ROWS if row[2] == "q"])
    assert fewer.ids.tolist() == whole.ids[1:].tolist() == ids_from_names(["q"]).tolist()


def test_rows_without_a_unit_are_corrupt(tmp_path):
    with pytest.raises(RecordsError, match="1 missing unit"):
        with_units(tmp_path, [*UNIT_ROWS, ("d", "six", "")])


def test_an_id_column_is_no_unit(tmp_path):
    """Each caption of one image with an id of its own: as units they would be two records."""
    images = [encoded(of("a"))] * 2
    records = load_parquet_pairs(write_parquet(tmp_path, image=images, title=["one", "two"], id=[1, 2])).train
    assert (records.captions, records.row_starts) == ((("one", "two"),), None)


NO_UNITS = {"NaN": [1.5, float("nan")], "null": [1, None], "empty": ["p", ""], "blank": ["p", " \t"]}


@pytest.mark.parametrize("kind", NO_UNITS)
def test_units_without_a_value_are_missing(kind, tmp_path):
    person = pa.array(NO_UNITS[kind], from_pandas=False)
    path = write_parquet(tmp_path, image=[encoded(of(i)) for i in "ab"], title=["one", "two"], person=person)
    with pytest.raises(
        RecordsError, match="unit, split and label; faults among 2 rows: 1 missing unit"
    ) as caught:
        load_parquet_pairs(path, PairOptions(unit="person"))
    assert caught.value.details == {"missing unit": [1]}


def test_an_image_in_two_units_is_a_row_of_each(tmp_path):
    records = with_units(tmp_path, [("a", "one", "p"), ("a", "two", "q")])
    assert (records.captions, len(records)) == ((("one",), ("two",)), 2)
    assert with_units(tmp_path / "p", [("a", "one", "p")]).ids.tolist() == records.ids[:1].tolist()


def with_splits(folder: Path, splits: list[str]) -> LoadedData:
    images = [encoded(of(name)) for name, _ in ROWS]
    path = write_parquet(folder, image=images, title=[caption for _, caption in ROWS], part=splits)
    return load_parquet_pairs(path, PairOptions(split="part"))


def test_a_split_column_divides_the_records(tmp_path):
    loaded = with_splits(tmp_path, ["train", "test", "train", "train", "test"])
    assert (loaded.train.captions, loaded.test.captions) == ((("one", "three"), ("two",)), (("two", "four"),))


def test_a_record_in_both_splits_is_refused(tmp_path):
    with pytest.raises(RecordsError, match="1 are in both train and test"):
        with_splits(tmp_path, ["train", "test", "train", "train", "train"])


LABELS = {"a.png": "dog", "b.png": "cat", "c.png": "dog"}


def with_labels(folder: Path, labels: list[str | int | None], splits: list[str] | None = None) -> LoadedData:
    images, captions = [encoded(of(name)) for name, _ in ROWS], [caption for _, caption in ROWS]
    more = {} if splits is None else {"part": splits}
    path = write_parquet(folder, image=images, title=captions, kind=labels, **more)
    return load_parquet_pairs(path, PairOptions(label="kind", split=None if splits is None else "part"))


def test_a_label_column_names_the_classes_of_images(tmp_path):
    loaded = with_labels(tmp_path, [LABELS[name] for name, _ in ROWS])
    assert loaded.class_names == ("cat", "dog")
    assert loaded.train.labels is not None
    assert loaded.train.labels.tolist() == [1, 0, 1]


def test_a_label_column_of_a_csv_file_is_read(tmp_path):
    path = write_csv(tmp_path, ROWS)
    lines = path.read_text().splitlines()
    kinds = ["kind", *(LABELS[name] for name, _ in ROWS)]
    path.write_text("\n".join(f"{line}\t{kind}" for line, kind in zip(lines, kinds, strict=True)))
    loaded = load_csv_pairs(path, PairOptions(label="kind"))
    assert (loaded.class_names, loaded.train.labels.tolist()) == (("cat", "dog"), [1, 0, 1])


@pytest.mark.parametrize("kind", [int, str])
def test_labels_that_are_numbers_have_no_names(kind, tmp_path):
    loaded = with_labels(tmp_path, [kind(label) for label in (7, 0, 7, 10, 0)])
    assert (loaded.class_names, loaded.train.labels.tolist()) == ((), [7, 0, 10])


def test_labels_of_both_splits_share_one_list_of_classes(tmp_path):
    loaded = with_labels(
        tmp_path, [LABELS[name] for name, _ in ROWS], ["train", "test", "train", "train", "test"]
    )
    assert (loaded.train.labels.tolist(), loaded.test.labels.tolist()) == ([1, 1], [0])


def test_rows_without_a_label_are_corrupt(tmp_path):
    with pytest.raises(RecordsError, match="unit, split and label; faults among 5 rows: 1 missing label"):
        with_labels(tmp_path, ["dog", None, "dog", "dog", "cat"])


def test_an_image_with_two_labels_is_refused_without_saying_which(tmp_path):
    with pytest.raises(RecordsError, match="1 have several in their rows") as caught:
        with_labels(tmp_path, [SECRET, "cat", "dog", "dog", "cat"])
    assert SECRET not in str(caught.value)


# Records


def test_pairs_of_the_others_stay_when_any_one_record_is_removed():
    num = 30
    records = made([1 + i % 4 for i in range(num)])
    images, captions = records.pairs_at(np.arange(num), seed=1, step=7)
    for gone in range(num):
        fewer = records.take(np.delete(np.arange(num), gone))
        fewer_images, fewer_captions = fewer.pairs_at(np.arange(num - 1), seed=1, step=7)
        assert fewer_captions == captions[:gone] + captions[gone + 1 :]
        assert fewer_images.tobytes() == np.delete(images, gone, axis=0).tobytes()


def test_pairs_stay_when_another_record_gets_more_captions():
    few, many = (made([n, *[3] * 20]).pairs_at(np.arange(21), seed=0, step=1)[1] for n in (1, 9))
    assert few[1:] == many[1:]


def test_every_caption_is_drawn_equally_often():
    records, num_steps = made([3]), 3000
    drawn = [records.pairs_at(np.array([0]), seed=0, step=step)[1][0] for step in range(num_steps)]
    counts = [drawn.count(f"0-{k}") for k in range(3)]
    assert sum(counts) == num_steps
    assert max(abs(count - num_steps / 3) for count in counts) < 4 * (num_steps * 2 / 9) ** 0.5


def test_a_pair_is_an_image_of_the_record_with_a_caption_of_that_image():
    records = made([1, 2, 1, 3], ids=ids_from_names(["p", "q"]), row_starts=np.array([0, 3, 4]))
    seen = set()
    for step in range(40):
        images, captions = records.pairs_at(np.array([0, 1]), seed=0, step=step)
        rows = [int(caption[0]) for caption in captions]
        assert images.tobytes() == records.images[rows].tobytes()
        assert rows[1] == 3
        seen.add(rows[0])
    assert seen == {0, 1, 2}


def test_take_keeps_rows_captions_and_labels_of_a_record_together():
    records = made(
        [1, 2, 1, 3], ids=ids_from_names(["p", "q"]), row_starts=np.array([0, 3, 4]), labels=np.arange(4)
    )
    taken = records.take(np.array([1, 0]))
    assert [row[0][0] for row in taken.captions] == ["3", "0", "1", "2"]
    assert (taken.labels.tolist(), taken.row_starts.tolist()) == ([3, 0, 1, 2], [0, 1, 4])


def test_flat_captions_name_the_row_of_each():
    captions, rows = made([2, 1]).flat_captions()
    assert (captions, rows.tolist()) == (["0-0", "0-1", "1-0"], [0, 0, 1])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"captions": (("a",), ())}, "1 break this rule"),
        ({"captions": (("a",), ("b", " "))}, "1 break this rule"),
        ({"captions": (("a",),)}, "captions for each"),
        ({"ids": np.zeros(3, dtype=np.uint64)}, "one entry per image"),
        ({"labels": np.zeros(3, dtype=np.int64)}, "one entry per image"),
        ({"row_starts": np.array([0, 0, 2])}, "row_starts must assign"),
    ],
)
def test_records_that_do_not_belong_together_are_refused(more, message):
    whole = {"images": picture(0, 2, 3, 4, 4), "captions": (("a",), ("b",)), "ids": np.arange(2)}
    with pytest.raises(DataError, match=message):
        ImageTextRecords(**(whole | more))


# Real data


@needs_users_data
def test_emoji_pairs_are_read_with_their_published_counts():
    path = Path(USERS_DATA) / "emoji_image_text" / "noto.parquet"
    loaded = load_parquet_pairs(path, PairOptions(caption="name", split="split"))
    names = [caption for split in (loaded.train, loaded.test) for caption in split.flat_captions()[0]]
    # 3,789 pairs with as many names on 3,771 distinct images: an image with several names is one record.
    assert (len(set(names)), len(loaded.train) + len(loaded.test)) == (3789, 3771)
    assert loaded.train.images.shape[1:] == (3, 72, 72)


@needs_users_data
def test_nlvr_images_keep_all_their_true_sentences(tmp_path):
    table = pq.read_table(Path(USERS_DATA) / "nlvr" / "nlvr.parquet", columns=["image", "sentence", "label"])
    true = table.filter(pc.equal(table["label"], True)).slice(0, 1200)
    pq.write_table(true, tmp_path / "true.parquet")
    records = load_parquet_pairs(tmp_path / "true.parquet", PairOptions(caption="sentence")).train
    pairs = {(row["image"], row["sentence"]) for row in true.to_pylist()}
    assert len(records) == len({image for image, _ in pairs})
    assert len(records.flat_captions()[0]) == len(pairs)


# Files of several writers and encodings


def test_columns_of_short_and_long_offsets_are_one_column(tmp_path):
    kinds = {"a": (pa.binary(), pa.string()), "b": (pa.large_binary(), pa.large_string())}
    for (name, (image, text)), (picture_name, caption) in zip(kinds.items(), ROWS, strict=False):
        content = pa.array([encoded(of(picture_name))], image)
        table = pa.table({"image": content, "caption": pa.array([caption], text)})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    assert load_parquet_pairs(tmp_path).train.captions == (("one",), ("two",))


def test_paths_in_structures_are_read_where_the_bytes_are_missing(tmp_path):
    names = [name for name, _ in ROWS]
    write_csv(tmp_path / "x", ROWS)
    images = [{"bytes": None, "path": name} for name in names]
    columns = {"image": images, "caption": [caption for _, caption in ROWS]}
    loaded = load_parquet_pairs(write_parquet(tmp_path / "x", **columns))
    assert contents(loaded.train) == contents(load("csv", tmp_path / "x", ROWS).train)
    assert image_folders(f"parquet:{tmp_path / 'x'}") == [tmp_path / "x"]


def test_folder_of_a_path_among_bytes_is_found(tmp_path):
    images = [{"bytes": encoded(of("a.png")), "path": None}, {"bytes": None, "path": "far/b.png"}]
    write_parquet(tmp_path / "x", image=images, caption=["one", "two"])
    assert image_folders(f"parquet:{tmp_path / 'x'}") == [tmp_path / "x/far"]


def test_path_of_bytes_is_not_read(tmp_path):
    images = [{"bytes": encoded(of("a.png")), "path": "gone/a.png"}]
    loaded = load_parquet_pairs(write_parquet(tmp_path / "x", image=images, caption=["one"]))
    assert (loaded.train.images[0].transpose(1, 2, 0) == of("a.png")).all()
    assert image_folders(f"parquet:{tmp_path / 'x'}") == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_csv_is_read_in_the_encoding_that_its_mark_names(encoding, tmp_path):
    path = write_csv(tmp_path / "x", [("a.png", "café – one")])
    path.write_text(path.read_text(encoding="utf-8"), encoding=encoding)
    assert load_csv_pairs(path).train.captions == (("café – one",),)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-32-be"])
def test_csv_in_an_encoding_without_its_mark_is_refused_by_name(encoding, tmp_path):
    path = write_csv(tmp_path / "x", ROWS)
    path.write_text(path.read_text(encoding="utf-8"), encoding=encoding)
    with pytest.raises(DataError, match=r"UTF-16 with a byte order mark.*save it as UTF-8"):
        load_csv_pairs(path)


def test_csv_cut_off_in_a_character_is_refused(tmp_path):
    path = write_csv(tmp_path / "x", ROWS)
    path.write_bytes(path.read_text(encoding="utf-8").encode("utf-16")[:-1])
    with pytest.raises(DataError, match="must be a readable text file"):
        load_csv_pairs(path)


def test_structure_that_is_no_image_is_refused_as_a_caption(tmp_path):
    columns = {"image": [encoded(of("a.png"))], "caption": [{"text": "one"}]}
    with pytest.raises(DataError, match="must hold strings or lists of strings"):
        load_parquet_pairs(write_parquet(tmp_path / "x", **columns))


def test_images_without_captions_are_read_by_path(tmp_path):
    write_csv(tmp_path / "x", ROWS[:2])
    path = write_parquet(tmp_path / "x", image=["a.png", "b.png"], label=[0, 1])
    assert (load_dataset(f"parquet:{path}").train.images[0].transpose(1, 2, 0) == of("a.png")).all()
    assert image_folders(f"parquet:{path}") == [tmp_path / "x"]
