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
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from dpgcl_core.sampling.record_ids import ids_from_names, keyed_uniform
from trainers.data.class_names import ClassNames, class_indices, encodable
from trainers.data.decoding import MAX_IMAGE_PIXELS, stacked
from trainers.data.faults import RecordsError, check_one_size
from trainers.data.records import Records, RecordsOfRows
from trainers.data.rows import row_of_each

MAX_CAPTION_CHARACTERS = 100_000
"""Limit of one caption. A text model reads a few hundred, and its tokenizer takes quadratic time."""

SKIPPED = "corrupt rows, skipped (--skip-corrupt)"

SPLITS = ("train", "test")
"""The values that a split column may hold."""


class StoredImages(Protocol):
    """Images that are read on access; an array has the same interface with all images in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(number of images, channels, height, width)."""

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the images at `rows`, `[n, channels, height, width]`."""

    def select(self, rows: NDArray[np.int64]) -> StoredImages:
        """Return the same store with only the images at `rows`, without reading any."""


Images = NDArray[np.uint8] | StoredImages
"""Images in memory, or images that are read on access."""


@dataclass(frozen=True, kw_only=True)
class ImageTextRecords(RecordsOfRows):
    """Images with their captions; the counterpart of `Records`.

    Attributes:
      images: uint8 `[num_rows, channels, height, width]`, in memory or stored; a record's rows lie together.
      captions: `[num_rows][captions of the row]`; every row has at least one caption, and none is empty.
    """

    images: Images
    captions: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        num_rows = len(self.captions)
        if len(self.images.shape) != 4 or self.images.shape[0] != num_rows:
            raise DataError(
                "images must be [num_rows, channels, height, width] with captions for each row; "
                f"got {list(self.images.shape)} and captions for {num_rows} rows"
            )
        self._check_columns()
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
        captions = tuple(self.captions[row] for row in rows.tolist())
        return super()._columns_at(rows) | {"captions": captions}


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
    """Rows as stored; every list has one entry for each row.

    Attributes:
      keys: the key of the row's image: its path, or a digest of its bytes.
      captions: the row's captions.
      faults: the row's fault; "" for a sound row.
      units: the name of the row's privacy unit; None if each image is its own unit.
      splits: `train` or `test`; None if all rows are training rows.
      labels: the class of the row's image, by name or number; None if images have no labels.
      names: the owner's name of the row's image, or None; None instead of a list if no image has a name.
      max_pixels: the largest number of pixels that an image may have, for messages.
      reading_counts: as in `LoadedData`, without the corrupt rows.
    """

    keys: Sequence[str]
    captions: Sequence[tuple[str, ...]]
    faults: Sequence[str]
    units: Sequence[str] | None = None
    splits: Sequence[str] | None = None
    labels: Sequence[str] | None = None
    names: Sequence[str | None] | None = None
    max_pixels: int = MAX_IMAGE_PIXELS
    reading_counts: Counter[str] = field(default_factory=Counter)


def assemble(rows: PairRows, images_of: Callable[[list[int]], Images], *, skip_corrupt: bool) -> LoadedData:
    """Return the records of `rows`: rows with the same key are one image, and images of one unit one record.

    Args:
      rows: the rows as stored; a corrupt row carries its fault.
      images_of: function from sound rows, one per image, to their images `[n, channels, height, width]`.
      skip_corrupt: drop corrupt rows instead of rejecting the whole data set.

    Raises:
      RecordsError: some rows are corrupt, no row is left, a record is in both splits, or an image has
        several labels.
      DataError: the splits differ in shape.
    """
    sound, faults = _sound_rows(rows, skip_corrupt)
    splits = [[row for row in sound if rows.splits[row] == s] for s in SPLITS] if rows.splits else [sound]
    if not all(splits):
        raise RecordsError(
            f"every split must hold at least one valid row; {len(sound)} of {len(rows.keys)} rows are valid, "
            "and some split has none",
            faults,
        )
    names = rows.keys if rows.units is None else rows.units
    shared = set.intersection(*({names[row] for row in part} for part in splits)) if len(splits) > 1 else ()
    if shared:
        raise RecordsError(f"a record must be in one split only; {len(shared)} are in both train and test")
    labels, class_names = _labels(rows, sound)
    parts = [_images_by_unit(rows, part) for part in splits]
    train, *test = (_records(rows, part, labels, images_of) for part in parts)
    if test and train.images.shape[1:] != test[0].images.shape[1:]:
        raise DataError("training and test images must have the same size; they differ. Pass --image-size")
    return LoadedData(
        train=train,
        test=test[0] if test else None,
        reading_counts=+Counter({SKIPPED: len(rows.keys) - len(sound)}) + Counter(rows.reading_counts),
        class_names=class_names,
        names=_names(rows, parts),
    )


def _names(rows: PairRows, parts: Sequence[_Units]) -> list[str] | None:
    """Return each image's first name among its rows; None if some image has no name."""
    names = rows.names or [None] * len(rows.keys)
    images = [image_rows for part in parts for unit in part.values() for image_rows in unit.values()]
    first_names = [
        next((names[row] for row in image_rows if names[row] is not None), None) for image_rows in images
    ]
    return None if None in first_names else [encodable(str(name)) for name in first_names]


def _sound_rows(rows: PairRows, skip_corrupt: bool) -> tuple[list[int], dict[str, list[int]]]:
    """Return the sound rows, and for each fault the rows that have it."""
    faults: dict[str, list[int]] = {}
    for row, fault in enumerate(rows.faults):
        if not fault and rows.units is not None and not rows.units[row].strip():
            fault = "missing unit"
        if not fault and rows.splits is not None and rows.splits[row] not in SPLITS:
            fault = "split neither train nor test"
        if not fault and rows.labels is not None and not rows.labels[row].strip():
            fault = "missing label"
        faults.setdefault(fault, []).append(row)
    sound = faults.pop("", [])
    if faults and not skip_corrupt:
        counts = ", ".join(f"{len(faults[fault])} {fault}" for fault in sorted(faults))
        raise RecordsError(
            f"every row must have a readable image of at most {rows.max_pixels} pixels (--max-image-pixels), "
            f"a caption of at most {MAX_CAPTION_CHARACTERS} characters and (if used) unit, split and label; "
            f"faults among {len(rows.faults)} rows: {counts}. Repair or remove them, or pass --skip-corrupt",
            faults,
        )
    return sound, faults


def _labels(rows: PairRows, sound: list[int]) -> tuple[dict[int, int] | None, ClassNames]:
    """Return the label of each sound row, and the class names, which are empty if all labels are numbers.

    A step uses no labels; they only serve to score public records.
    """
    if rows.labels is None:
        return None, ()
    texts = [rows.labels[row].strip() for row in sound]
    are_numbers = all(text.isdecimal() and len(text) <= 18 for text in texts)
    values = np.array([int(text) for text in texts]) if are_numbers else np.array(texts)
    (indices,), class_names = class_indices([values])
    assert indices is not None
    labels_by_image: dict[str, set[int]] = {}
    for row, label in zip(sound, indices.tolist(), strict=True):
        labels_by_image.setdefault(rows.keys[row], set()).add(label)
    num_ambiguous = sum(len(labels) > 1 for labels in labels_by_image.values())
    if num_ambiguous:
        raise RecordsError(f"an image must have one label; {num_ambiguous} have several in their rows")
    return dict(zip(sound, indices.tolist(), strict=True)), class_names


_Units = dict[str, dict[str, list[int]]]


def _images_by_unit(rows: PairRows, sound: list[int]) -> _Units:
    """Return, for each unit, its images by key, each as the list of its rows."""
    units: _Units = {}
    for row in sound:
        name = rows.keys[row] if rows.units is None else rows.units[row]
        units.setdefault(name, {}).setdefault(rows.keys[row], []).append(row)
    return units


def _records(
    rows: PairRows, units: _Units, labels: dict[int, int] | None, images_of: Callable[[list[int]], Images]
) -> ImageTextRecords:
    """Return one record per unit, each image with the distinct captions of its rows."""
    images = [image_rows for unit_images in units.values() for image_rows in unit_images.values()]
    sizes = np.array([len(unit_images) for unit_images in units.values()], dtype=np.int64)
    return ImageTextRecords(
        images=images_of([image_rows[0] for image_rows in images]),
        captions=tuple(
            tuple(dict.fromkeys(caption for row in image_rows for caption in rows.captions[row]))
            for image_rows in images
        ),
        ids=ids_from_names(map(encodable, units)),
        row_starts=None if rows.units is None else np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        labels=None
        if labels is None
        else np.array([labels[image_rows[0]] for image_rows in images], dtype=np.int64),
    )


def caption_fault(captions: Iterable[str]) -> str:
    """Return the name of the fault of one row's captions, "" if there is none."""
    texts = list(captions)
    if not texts or not all(text.strip() for text in texts):
        return "empty caption"
    if any(len(text) > MAX_CAPTION_CHARACTERS for text in texts):
        return f"caption of more than {MAX_CAPTION_CHARACTERS} characters"
    return "caption not UTF-8" if any(not _is_utf8(text) for text in texts) else ""


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def stack_images(decoded: list[Any]) -> NDArray[np.uint8]:
    """Stack images as RGB even if all are grey: towers take colour, and no record may decide the shape."""
    check_one_size(Counter(image.shape[:2] for image in decoded))
    return stacked(decoded, 3)
