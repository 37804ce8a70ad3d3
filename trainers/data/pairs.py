"""Image-text records: one image with all its captions, and how rows of a source become such records.

An image with several captions is **one record**: it is sampled as a whole, and at each step one of its
captions, chosen by a keyed hash of the record's id and the step, represents it. So the adjacency is "add or
remove one image with all its captions", whatever their number. With a unit column (for example, a person) the
record is the unit with all its images, as in `trainers.data.dataset`. An image in several units is a row of
each of them. Adding or removing one unit changes only that unit's rows, so the adjacency "add or remove one
unit" holds. It promises nothing for the image itself, which stays with the other units when one is removed.

An id depends only on its own record: on the unit's name, else on the image's key (its path, or its bytes as
stored), and never on a caption or on a row's position. Whether a row is corrupt also depends only on that
row, so dropping corrupt rows moves no other record. They are dropped before the data set is fingerprinted. No
message holds a path, a caption or a position: the positions of faults are only in `RecordsError.details`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from dpgcl_core.sampling.record_ids import ids_from_names, keyed_uniform
from trainers.data.class_names import ClassNames, class_indices, encodable
from trainers.data.columns import ArrowColumn, are_all, codes_of, combined, mask_of, take_rows, values_of
from trainers.data.faults import RecordsError
from trainers.data.image_index import ScannedImages
from trainers.data.records import Records, RecordsOfRows
from trainers.data.rows import row_of_each
from trainers.data.stored_images import Images

if TYPE_CHECKING:
    import pyarrow as pa

MAX_CAPTION_CHARACTERS = 100_000
"""Limit of one caption. A text model reads a few hundred, and its tokenizer takes quadratic time."""

SKIPPED = "corrupt rows, skipped (--skip-corrupt)"

SPLITS = ("train", "test")
"""The values that a split column may hold."""


@dataclass(frozen=True, kw_only=True)
class ImageTextRecords(RecordsOfRows):
    """Images with their captions; the counterpart of `Records`.

    Attributes:
      images: uint8 `[num_rows, channels, height, width]`, in memory or stored; a record's rows lie together.
      captions: `[num_rows][captions of the row]`; every row has at least one caption, and none is empty.
    """

    images: Images
    captions: Sequence[tuple[str, ...]]

    def __post_init__(self) -> None:
        num_rows = len(self.captions)
        if len(self.images.shape) != 4 or self.images.shape[0] != num_rows:
            raise DataError(
                "images must be [num_rows, channels, height, width] with captions for each row; "
                f"got {list(self.images.shape)} and captions for {num_rows} rows"
            )
        self._check_columns()
        if isinstance(self.captions, ArrowColumn):  # its reader has checked each row
            return
        empty = sum(not row or not all(caption.strip() for caption in row) for row in self.captions)
        if empty:
            raise RecordsError(
                f"every image must have captions, and none may be empty; {empty} break this rule"
            )

    def pairs_at(
        self, records: NDArray[np.int64], *, seed: int, step: int
    ) -> tuple[NDArray[np.uint8], list[str]]:
        """Return the image `[n, channels, height, width]` and the caption `[n]` of `records` at `step`.

        A record's image and caption depend only on the record, the public seed and the step. So adding or
        removing one record changes no other record's pair, and a record takes one place of one group however
        many captions it has.
        """
        rows, captions = row_of_each(self.row_starts, self.ids, records, seed=seed, step=step), []
        uniform = keyed_uniform(self.ids[records], "caption", int(seed), int(step))
        for row, u in zip(rows.tolist(), uniform.tolist(), strict=True):
            row_captions = self.captions[row]
            captions.append(row_captions[min(int(u * len(row_captions)), len(row_captions) - 1)])
        return self.images[rows], captions

    def flat_captions(self) -> tuple[list[str], NDArray[np.int64]]:
        """Return all captions, `[num_captions]`, and the row of each caption, for retrieval scores."""
        owners = np.repeat(np.arange(len(self.captions)), [len(row) for row in self.captions])
        return [caption for row in self.captions for caption in row], owners.astype(np.int64)

    def _columns_at(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        captions = self.captions
        if isinstance(captions, ArrowColumn):
            return super()._columns_at(rows) | {"captions": captions.select(rows)}
        return super()._columns_at(rows) | {"captions": tuple(captions[row] for row in rows.tolist())}


@dataclass(frozen=True, kw_only=True)
class LoadedData:
    """The data that a source's reader has read.

    Attributes:
      train: records to train on.
      test: held-out records, or None if the source has no split of its own.
      reading_counts: how many images were converted, and how many rows and files were left out, by kind; as
        private as the records: not for logs or MLflow.
      class_names: one name for every label 0, 1, …, empty if unknown; likewise as private as the records.
      names: the owner's name of each image, strings or numbers, test images after the training images; None
        if images have no names; likewise as private as the records.
    """

    train: Records | ImageTextRecords
    test: Records | ImageTextRecords | None = None
    reading_counts: Counter[str] = field(default_factory=Counter, repr=False)
    class_names: ClassNames = field(default=(), repr=False)
    names: Sequence[str | int] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class PairRows:
    """Rows as stored, in columns with one entry for each row.

    Attributes:
      keys: the key of the row's image: its path, or a digest of its bytes.
      captions: the row's captions, a list column; None for images alone.
      faults: the row's fault; "" for a sound row.
      images: the images of the data set.
      image_of: the row's image among `images`.
      units: the name of the row's privacy unit; None if each image is its own unit.
      splits: `train` or `test`; None if all rows are training rows.
      labels: the class of the row's image, by name or number; None if images have no labels.
      names: the owner's name of the row's image, or None; None instead of a column if no image has a name.
      num_left_out: as in `LoadedData.reading_counts`, of rows and files that are not among these rows.
    """

    keys: pa.Array
    captions: pa.Array | None
    faults: pa.Array
    images: ScannedImages
    image_of: NDArray[np.int64]
    units: pa.Array | None = None
    splits: pa.Array | None = None
    labels: pa.Array | None = None
    names: pa.Array | None = None
    num_left_out: Counter[str] = field(default_factory=Counter)


def assemble(rows: PairRows, *, skip_corrupt: bool) -> LoadedData:
    """Return the records of `rows`: rows with the same key are one image, and images of one unit one record.

    Args:
      rows: the rows as stored; a corrupt row carries its fault.
      skip_corrupt: drop corrupt rows instead of rejecting the whole data set.

    Raises:
      RecordsError: some rows are corrupt, no row is left, a record is in both splits, or an image has
        several labels.
      DataError: the splits differ in shape.
    """
    sound, faults = _sound_rows(rows, skip_corrupt)
    splits = [sound]
    if rows.splits is not None:
        splits = [sound[mask_of(take_rows(rows.splits, sound), split.__eq__)] for split in SPLITS]
    if not all(map(len, splits)):
        raise RecordsError(
            f"every split must hold at least one valid row; {len(sound)} of {len(rows.keys)} rows are valid, "
            "and some split has none",
            faults,
        )
    names = rows.keys if rows.units is None else rows.units
    unit_of = codes_of(names)
    shared = np.intersect1d(unit_of[splits[0]], unit_of[splits[1]]) if len(splits) > 1 else ()
    if len(shared):
        raise RecordsError(f"a record must be in one split only; {len(shared)} are in both train and test")
    key_of = None if rows.units is None else codes_of(rows.keys)
    labels, class_names = _labels(rows, sound, unit_of if key_of is None else key_of)
    parts = [_images_by_unit(part, unit_of, key_of) for part in splits]
    del unit_of, key_of  # as large as the ids
    has_colour = rows.captions is not None or not rows.images.are_grey(rows.image_of[sound])
    train, *test = (
        _records(rows, part, names, labels, channels=3 if has_colour else 1, class_names=class_names)
        for part in parts
    )
    if test and train.images.shape[1:] != test[0].images.shape[1:]:
        raise DataError("training and test images must have the same size; they differ. Pass --image-size")
    return LoadedData(
        train=train,
        test=test[0] if test else None,
        reading_counts=+Counter({SKIPPED: len(rows.keys) - len(sound)})
        + rows.images.reading_counts
        + rows.num_left_out,
        class_names=class_names,
        names=_names(rows, parts),
    )


class _Images(NamedTuple):
    """The images of a split, those of one unit together.

    Attributes:
      rows: the rows in the order of their images.
      starts: `[num_images + 1]`: image i has the rows from `starts[i]` up to `starts[i + 1]` in `rows`.
      unit_starts: `[num_units + 1]`: unit u has the images from `unit_starts[u]` up to `unit_starts[u + 1]`.
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    unit_starts: NDArray[np.int64]


def _images_by_unit(
    part: NDArray[np.int64], unit_of: NDArray[np.int64], key_of: NDArray[np.int64] | None
) -> _Images:
    """Return the images of the rows in `part`; units, and a unit's images, in order of first occurrence.

    Without `key_of` each unit is one image.
    """
    if key_of is None:
        place_of = codes_of(unit_of[part])
        rows = part if are_all(place_of, len(part)) else part[np.argsort(place_of, kind="stable")]
        return _Images(rows, _starts(place_of), np.arange(int(place_of.max()) + 2))
    units, keys = unit_of[part], key_of[part]
    image_of = codes_of(units * (int(keys.max()) + 1) + keys)
    unit_of_image = codes_of(units[np.unique(image_of, return_index=True)[1]])
    order = np.argsort(unit_of_image, kind="stable")
    place_of = np.argsort(order)[image_of]
    return _Images(part[np.argsort(place_of, kind="stable")], _starts(place_of), _starts(unit_of_image))


def _starts(number_of: NDArray[np.int64], num: int = 0) -> NDArray[np.int64]:
    """Return where each number 0, 1, … begins if equal numbers lie together, and the end."""
    return np.concatenate([[0], np.cumsum(np.bincount(number_of, minlength=num))]).astype(np.int64)


def _names(rows: PairRows, parts: Sequence[_Images]) -> ArrowColumn | None:
    """Return each image's first name among its rows; None if some image has no name."""
    import pyarrow as pa

    if rows.names is None:
        return None
    names: list[pa.Array] = []
    for part in parts:
        column = take_rows(rows.names, part.rows)
        image_of = np.repeat(np.arange(len(part.starts) - 1), np.diff(part.starts))
        rows_with_names = np.flatnonzero(column.is_valid())
        images, firsts = np.unique(image_of[rows_with_names], return_index=True)
        if len(images) < len(part.starts) - 1:
            return None
        names.append(pa.array(map(encodable, values_of(column.take(rows_with_names[firsts])))))
    return ArrowColumn(pa.chunked_array(names))


def _sound_rows(rows: PairRows, skip_corrupt: bool) -> tuple[NDArray[np.int64], dict[str, list[int]]]:
    """Return the sound rows, and for each fault the rows that have it."""
    own_faults = rows.faults.dictionary_encode()
    kinds, fault_of = own_faults.dictionary.to_pylist(), own_faults.indices.to_numpy().astype(np.int64)
    rules: list[tuple[str, pa.Array | None, Callable[[str], bool]]] = [
        ("missing unit", rows.units, _is_blank),
        ("split neither train nor test", rows.splits, lambda split: split not in SPLITS),
        ("missing label", rows.labels, _is_blank),
    ]
    is_sound = mask_of(rows.faults, "".__eq__)
    for kind, column, is_broken in rules:
        if column is not None:
            broken = is_sound & mask_of(column, is_broken)
            fault_of[broken], is_sound = len(kinds), is_sound & ~broken
            kinds.append(kind)
    faults = {kind: np.flatnonzero(fault_of == number).tolist() for number, kind in enumerate(kinds) if kind}
    faults = {kind: positions for kind, positions in faults.items() if positions}
    if faults and not skip_corrupt:
        counts = ", ".join(f"{len(faults[fault])} {fault}" for fault in sorted(faults))
        has_captions = rows.captions is not None
        caption = f"a caption of at most {MAX_CAPTION_CHARACTERS} characters " if has_captions else ""
        raise RecordsError(
            f"every row must have a readable image of at most {rows.images.request.max_image_pixels} pixels "
            f"(--max-image-pixels), {caption}and (if used) unit, split and label; faults among "
            f"{len(rows.faults)} rows: {counts}. Repair or remove them, or pass --skip-corrupt",
            faults,
        )
    return np.flatnonzero(is_sound), faults


def _is_blank(text: str) -> bool:
    return not text.strip()


def _labels(
    rows: PairRows, sound: NDArray[np.int64], key_of: NDArray[np.int64]
) -> tuple[NDArray[np.int64] | None, ClassNames]:
    """Return the label of each row, and the class names, which are empty if all labels are numbers.

    A step uses no labels; they only serve to score public records. Labels of rows that are not sound are 0.
    """
    if rows.labels is None:
        return None, ()
    texts = [text.strip() for text in values_of(take_rows(rows.labels, sound))]
    # Classes of images alone are names, even if they look like numbers: one record must not decide which.
    are_numbers = rows.captions is not None and all(t.isdecimal() and len(t) <= 18 for t in texts)
    (indices,), class_names = class_indices([np.array(list(map(int, texts)) if are_numbers else texts)])
    assert indices is not None
    labels = np.zeros(len(rows.keys), dtype=np.int64)
    labels[sound] = indices
    image_labels = np.unique(np.stack([key_of[sound], indices]), axis=1)
    num_ambiguous = int((np.bincount(image_labels[0]) > 1).sum())
    if num_ambiguous:
        raise RecordsError(f"an image must have one label; {num_ambiguous} have several in their rows")
    return labels, class_names


def _records(
    rows: PairRows,
    part: _Images,
    names: pa.Array,
    labels: NDArray[np.int64] | None,
    *,
    channels: int,
    class_names: ClassNames,
) -> Records | ImageTextRecords:
    """Return one record per unit; each image has the distinct captions of its rows, if there are captions."""
    first_rows = part.rows[part.starts[:-1]]
    unit_names = take_rows(names, first_rows[part.unit_starts[:-1]])
    columns: dict[str, Any] = {
        "images": rows.images.images(rows.image_of[first_rows], channels),
        "ids": ids_from_names(map(encodable, values_of(unit_names))),
        "row_starts": None if rows.units is None else part.unit_starts,
        "labels": None if labels is None else labels[first_rows],
    }
    if rows.captions is None:
        return Records(**columns, classes_from_data=bool(class_names))
    return ImageTextRecords(**columns, captions=_captions(rows.captions, part))


def _captions(captions: pa.Array, part: _Images) -> ArrowColumn:
    """Return the distinct captions of each image, in order of first occurrence."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column, num_images = take_rows(captions, part.rows), len(part.starts) - 1
    if len(column) == num_images and pc.max(pc.list_value_length(column)).as_py() == 1:
        return ArrowColumn(column)
    column = combined(column)
    rows_of_images = np.repeat(np.arange(num_images), np.diff(part.starts))
    owners = np.repeat(rows_of_images, column.value_lengths().to_numpy())
    texts = column.flatten()
    if len(owners) > num_images:  # some image has several captions
        kept = np.sort(np.unique(owners * (len(texts) + 1) + codes_of(texts), return_index=True)[1])
        owners, texts = owners[kept], texts.take(kept)
    return ArrowColumn(pa.LargeListArray.from_arrays(_starts(owners, num_images), texts))


def caption_fault(captions: Iterable[str]) -> str:
    """Return the name of the fault of one row's captions, "" if there is none."""
    texts = list(captions)
    if not texts or not all(text.strip() for text in texts):
        return "empty caption"
    if any(len(text) > MAX_CAPTION_CHARACTERS for text in texts):
        return f"caption of more than {MAX_CAPTION_CHARACTERS} characters"
    return "caption not UTF-8" if any(encodable(text) != text for text in texts) else ""
