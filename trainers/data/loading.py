"""Stage 1 in practice: loading data sets by name, and splitting them into training and test records."""

from __future__ import annotations

import dataclasses
import pkgutil
import re
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.addresses import masked
from dpgcl_core.errors import ConfigError, DataError, unknown_choice
from dpgcl_core.object_store import address_of
from dpgcl_core.sampling.record_ids import held_out
from dpgcl_core.sampling.slot_table import SlotTable
from trainers.data.class_captions import with_class_captions
from trainers.data.dataset import AnyRecords, Dataset, Modality
from trainers.data.dataset_registry import (
    BUILTIN_DATASETS,
    CLASS_CAPTIONS,
    DATA_SOURCES,
    IN_A_COLUMN,
    source_of,
)
from trainers.data.decoding import MAX_IMAGE_PIXELS, PILLOW_MAX_PIXELS
from trainers.data.pair_options import PairOptions
from trainers.data.pair_tables import csv_has_captions, has_captions
from trainers.data.pairs import LoadedData
from trainers.data.procedural import procedural_name
from trainers.data.request import Request
from trainers.data.shapes import shapes_name

MAX_IMAGE_SIZE = 1024
"""Largest `image_size`, in pixels."""

_RESERVED_COLUMNS = ("image", "images", "label", "labels", "caption", "")

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def check_dataset_name(name: str) -> None:
    """Check that `name` is a built-in data set or your own file, such as `npz:PATH`.

    Nothing is read; whether PATH exists is checked when the data are loaded.

    Raises:
      ConfigError: `name` is neither.

    >>> check_dataset_name("digit")
    Traceback (most recent call last):
    ...
    dpgcl_core.errors.ConfigError: unknown data set 'digit'; did you mean 'digits'? Valid: cifar10, \
csv:PATH, digits, eurosat, fashion-mnist, folder:PATH, hf:PATH, npz:PATH, parquet:PATH, procedural, \
procedural:NUM:CxHxW, shapes, shapes:NUM:SEED, shards:PATH, webdataset:PATH
    """
    source, path = source_of(name), name.partition(":")[2]
    if is_builtin_name(name):
        if source is DATA_SOURCES["shapes"]:
            shapes_name(name)
        elif source is DATA_SOURCES["procedural"]:
            procedural_name(name)
    elif source is None or source.is_builtin or not path:
        schemes = (f"{entry.name}:PATH" for entry in DATA_SOURCES.values() if not entry.is_builtin)
        shown = masked(name) if set("/@=") & set(name) else name
        choices = [*BUILTIN_DATASETS, "procedural:NUM:CxHxW", "shapes:NUM:SEED", *schemes]
        raise ConfigError(unknown_choice("data set", shown, choices))
    elif _REMOTE.match(path) and not (source.is_in_buckets and address_of(path)):
        in_buckets = ", ".join(entry.name for entry in DATA_SOURCES.values() if entry.is_in_buckets)
        raise ConfigError(
            f"PATH must be a local file or folder; only {in_buckets} may be at s3://BUCKET/PATH; got "
            f"{masked(name)!r}. Write the data as tar shards, download them, or mount them"
        )


def is_builtin_name(name: str) -> bool:
    """Whether `name` is a public data set of `BUILTIN_DATASETS`, including generated ones of any number.

    >>> is_builtin_name("digits"), is_builtin_name("shapes:500:7"), is_builtin_name("csv:pairs.csv")
    (True, True, False)
    """
    return name in BUILTIN_DATASETS or name.startswith(("shapes:", "procedural:"))


def modality_of_name(name: str, pairs: PairOptions | None = None) -> Modality:
    """Return the modality of a data set's records, before it is loaded.

    At most the schema of a parquet file is read. If it cannot be read, the result is "image", and loading
    then reports the reason.

    >>> modality_of_name("shapes"), modality_of_name("digits")
    ('image-text', 'image')
    """
    has_class_captions = pairs is not None and pairs.fitting(name).class_captions is not None
    return "image-text" if has_class_captions or _holds_pairs(name, pairs) else "image"


def _holds_pairs(name: str, pairs: PairOptions | None) -> bool:
    """Whether the data set has its own captions; at most a parquet file's schema is read."""
    source, path = source_of(name), name.partition(":")[2]
    if source is not None and source.captions == IN_A_COLUMN and path:
        file = Path(path).expanduser()
        return (
            csv_has_captions(file, pairs) if source.name == "csv" else has_captions(file, pairs, source.name)
        )
    return source is not None and source.captions == "always"


def load_dataset(
    name: str,
    *,
    image_size: int | None = None,
    unit_column: str | None = None,
    pairs: PairOptions | None = None,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    in_memory: bool | None = None,
    index_folder: Path | None = None,
) -> Dataset:
    """Return a data set; your own images are decoded into memory, or stay in their files and are indexed.

    Args:
      name: one of `BUILTIN_DATASETS`, `shapes:NUM[:SEED[:common|short]]` or
        `procedural:NUM[:CHANNELSxHEIGHTxWIDTH]`; or your own: `npz:PATH`, `folder:PATH` and `shards:PATH` of
        images, `webdataset:PATH` of images with captions, `csv:PATH`,
        `parquet:PATH` and `hf:PATH` of either: they hold captions if they have a caption column.
      image_size: resize every image to this many pixels square; None keeps the images' own size
        (EuroSAT, shapes: 32) and rejects data of several sizes.
      unit_column: the column (npz: array, webdataset: json field) that names the privacy unit: for example,
        all rows of one person are one record. None protects one row, or one image with all its captions; a
        person with k of them then has only group privacy.
      pairs: how images with captions are read, or how images get captions from their classes; None reads
        them as open_clip does.
      max_image_pixels: largest allowed image as stored; a larger one is never decoded, and is rejected like a
        damaged one.
      in_memory: whether your own images are decoded into memory; None: if they take at most a quarter of the
        free memory. The results are the same.
      index_folder: the folder of the index of images that stay in their files; None: `.dpgcl-index` beside
        them. It is as private as the data.

    Raises:
      ConfigError: the name is unknown, an argument does not apply to this data set, or `image_size` is not
        a positive integer.
      DataError: the data are missing, damaged, empty or of several shapes.

    >>> load_dataset("digits").image_shape
    (1, 8, 8)
    """
    check_dataset_name(name)
    _check_image_size(image_size)
    check_max_image_pixels(max_image_pixels)
    _check_unit_column(name, unit_column)
    pairs = pairs or PairOptions()
    source = DATA_SOURCES[name.partition(":")[0]]
    holds_pairs = _holds_pairs(name, pairs)
    _check_pair_options(name, pairs, holds_pairs and not source.is_builtin)
    request = Request(
        name=name,
        image_size=image_size,
        unit_column=unit_column,
        pairs=dataclasses.replace(pairs, unit=unit_column or pairs.unit),
        has_captions=holds_pairs,
        max_image_pixels=max_image_pixels,
        in_memory=in_memory,
        index_folder=index_folder,
    )
    loaded: LoadedData = pkgutil.resolve_name(source.reader)(request)
    contents = vars(loaded) | {"class_names": source.class_names or loaded.class_names}
    dataset = Dataset(name=name, is_builtin=source.is_builtin, **contents)
    if pairs.class_captions is None:
        return dataset
    caption = partial(with_class_captions, class_names=dataset.class_names, template=pairs.class_captions)
    test = None if dataset.test is None else caption(dataset.test)
    return dataclasses.replace(dataset, train=caption(dataset.train), test=test)


def check_max_image_pixels(limit: int) -> None:
    """Raise ConfigError unless `limit` is a valid maximum number of pixels for images."""
    if type(limit) is not int or not 1 <= limit <= PILLOW_MAX_PIXELS:
        raise ConfigError(f"--max-image-pixels must be from 1 to {PILLOW_MAX_PIXELS}; got {limit!r}")


def _check_image_size(image_size: int | None) -> None:
    if image_size is not None and (type(image_size) is not int or not 1 <= image_size <= MAX_IMAGE_SIZE):
        raise ConfigError(
            f"image_size must be a positive integer of at most {MAX_IMAGE_SIZE}, or None; got {image_size!r}"
        )


def _check_unit_column(name: str, unit_column: str | None) -> None:
    source = source_of(name)
    has_columns = source is not None and source.has_columns
    if unit_column is not None and (not has_columns or unit_column in _RESERVED_COLUMNS):
        raise ConfigError(
            "unit_column must name a column of npz:PATH, parquet:PATH, hf:PATH, csv:PATH or tar shards "
            f"other than image, label and caption; got {unit_column!r} for {name.partition(':')[0]}"
        )


def _check_pair_options(name: str, pairs: PairOptions, has_pairs: bool) -> None:
    """Raise ConfigError if an option is set that does not apply to this data set."""
    fitting = pairs.fitting(name).changed_fields
    own = set(fitting) - {CLASS_CAPTIONS if has_pairs else "caption"}
    if not has_pairs and name.startswith(("parquet:", "hf:")):  # images alone have columns with fixed names
        own &= {CLASS_CAPTIONS}
    unused = [field for field in pairs.changed_fields if field not in own]
    if unused:
        raise ConfigError(
            f"{name.partition(':')[0]} data {'with' if has_pairs else 'without'} captions do not use "
            f"{', '.join(unused)}. Leave these options out, or name the column of the captions"
        )


def split_held_out(
    records: AnyRecords, share: float, slots: SlotTable
) -> tuple[AnyRecords, AnyRecords | None]:
    """Return the records to train on, and the held-out records to score with noise (None for a share of 0).

    The last slots are held out; `dpgcl_core.release.noised_counts.split_public` gives their number. Each side
    has an exact number of slots, and adding or removing one record moves no other. An empty side is not an
    error, because reporting it would depend on the records.

    Args:
      records: all records.
      share: the share of the slots to hold out, in [0, 1).
      slots: the records' slots, the same for all trials of a sweep.

    Raises:
      ConfigError: the share is out of range.
      DataError: a record has no slot.

    >>> import numpy as np
    >>> from dpgcl_core.sampling.record_ids import ids_from_names
    >>> from trainers.data.records import Records
    >>> ids = ids_from_names([f"r{i}" for i in range(100)])
    >>> records = Records(images=np.zeros((100, 1, 8, 8), dtype=np.uint8), ids=ids)
    >>> slots = SlotTable.empty(100).holding(ids, np.random.default_rng())
    >>> train, scored = split_held_out(records, 0.2, slots)
    >>> len(train), len(scored), len(set(train.ids) & set(scored.ids))
    (80, 20, 0)
    """
    if not 0 <= share < 1:
        raise ConfigError(f"score_on_held_out must be a share in [0, 1); got {share}")
    if share == 0:
        return records, None
    is_held = _is_held_out(records, share, slots)
    return records.take(~is_held), records.take(is_held)


def is_split_held_out(train: AnyRecords, held_out: AnyRecords, share: float, slots: SlotTable) -> bool:
    """Whether every record of `train` and `held_out` is on the side that `split_held_out` assigns to it.

    Raises:
      DataError: a record has no slot.
    """
    return bool(_is_held_out(held_out, share, slots).all() and not _is_held_out(train, share, slots).any())


def _is_held_out(records: AnyRecords, share: float, slots: SlotTable) -> NDArray[np.bool_]:
    from dpgcl_core.release.noised_counts import split_public  # imported here, as it loads the accountants

    trained, _ = split_public(slots.capacity, share)
    return slots.slots_of(records.ids) >= trained


def split_train_test(dataset: Dataset, test_fraction: float) -> tuple[AnyRecords, AnyRecords]:
    """Return the records to train on and the records held out for testing.

    If the source has its own split, it is kept. Otherwise each record is assigned by only its own id, so
    adding or removing one record moves no other between the two.

    Args:
      dataset: the loaded data set.
      test_fraction: the share to hold out of a source without its own split, in [0, 1).

    Raises:
      ConfigError: `test_fraction` lies outside [0, 1).
      DataError: the split leaves no record to train on, or none to test on although `test_fraction` > 0.
    """
    if not 0 <= test_fraction < 1:
        raise ConfigError(f"test_fraction must be in [0, 1); got {test_fraction}")
    if dataset.test is not None:
        return dataset.train, dataset.test
    is_test = held_out(dataset.train.ids, test_fraction)
    train, test = dataset.train.take(~is_test), dataset.train.take(is_test)
    if len(train) == 0 or (len(test) == 0 and test_fraction > 0):
        raise DataError(
            f"a split must leave records for training and testing; test_fraction = {test_fraction} leaves "
            f"{len(train)} for training and {len(test)} for testing. Change test_fraction or add records"
        )
    return train, test
