"""Station 1 in practice: data sets by name, and the split into training and test records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dpgcl_core.errors import ConfigError, DataError, unknown_choice
from dpgcl_core.records import held_out
from trainers.data.dataset import Dataset, Records, TrainingData
from trainers.data.own import load_folder, load_npz, load_parquet
from trainers.data.sources import SOURCES, RecordsError, Splits, load_builtin

BUILTIN_DATASETS: tuple[str, ...] = tuple(SOURCES)
"""Names of the public data sets that are downloaded when they are needed."""

MAX_IMAGE_SIZE = 1024
"""Larger squares would fill the memory: all images are held in it."""

_WITH_COLUMNS = ("npz", "parquet")
_RESERVED = ("image", "images", "label", "labels", "caption", "")
_OWN: dict[str, Callable[..., Splits]] = {"npz": load_npz, "parquet": load_parquet, "folder": load_folder}

__all__ = [
    "BUILTIN_DATASETS",
    "Dataset",
    "Records",
    "RecordsError",
    "TrainingData",
    "check_dataset_name",
    "is_split_held_out",
    "load_dataset",
    "split_held_out",
    "split_train_test",
]


def check_dataset_name(name: str) -> None:
    """Checks that `name` is a built-in data set or `npz:PATH`, `parquet:PATH` or `folder:PATH`.

    Nothing is read: whether there is anything at PATH shows when it is loaded.

    Raises:
      ConfigError: it is neither.

    >>> check_dataset_name("digit")
    Traceback (most recent call last):
    ...
    dpgcl_core.errors.ConfigError: unknown data set 'digit'; did you mean 'digits'? Valid: cifar10, digits, \
eurosat, fashion-mnist, folder:PATH, npz:PATH, parquet:PATH
    """
    scheme, _, path = name.partition(":")
    if name not in BUILTIN_DATASETS and not (scheme in _OWN and path):
        schemes = (f"{own}:PATH" for own in _OWN)
        raise ConfigError(unknown_choice("data set", name, [*BUILTIN_DATASETS, *schemes]))


def load_dataset(name: str, *, image_size: int | None = None, unit_column: str | None = None) -> Dataset:
    """Returns a data set with all its images in memory.

    Args:
      name: one of `BUILTIN_DATASETS`, or `npz:PATH`, `parquet:PATH` or `folder:PATH` for your own.
      image_size: resize every image to this many pixels square; None keeps the images' own size
        (EuroSAT: 32) and refuses data of several sizes.
      unit_column: the column (npz: array) that names the privacy unit: all rows of one person, say, are
        one record. None protects one row; a person with k rows then has group privacy only.

    Raises:
      ConfigError: the name is unknown or `image_size` is not a positive integer.
      DataError: the data are missing, damaged, empty or of several shapes.

    >>> load_dataset("digits").image_shape
    (1, 8, 8)
    """
    check_dataset_name(name)
    if image_size is not None and (type(image_size) is not int or image_size < 1):
        raise ConfigError(f"image_size must be a positive integer, in pixels, or None; got {image_size!r}")
    if image_size is not None and image_size > MAX_IMAGE_SIZE:
        raise ConfigError(f"image_size must be at most {MAX_IMAGE_SIZE} pixels; got {image_size}")
    is_builtin = name in BUILTIN_DATASETS
    has_columns = not is_builtin and name.partition(":")[0] in _WITH_COLUMNS
    if unit_column is not None and (not has_columns or unit_column in _RESERVED):
        raise ConfigError(
            "unit_column must name a column of npz:PATH or parquet:PATH other than image and label; "
            f"got {unit_column!r} of {name.partition(':')[0]}"
        )
    if is_builtin:
        train, test = load_builtin(name, image_size)
    else:
        scheme, _, path = name.partition(":")
        more = {} if unit_column is None else {"unit_column": unit_column}
        train, test = _OWN[scheme](Path(path).expanduser(), image_size, **more)
    return Dataset(name=name, train=train, test=test, is_builtin=is_builtin)


_SCORE_SPLIT = "score-split"


def split_held_out(records: Records, share: float) -> tuple[Records, Records | None]:
    """Returns the records to train on, and those held out to be scored with noise; None for a share of 0.

    Each record goes by a keyed hash of its own id, so the split is the same in all trials, and one record
    more or less moves no other. An empty side is no error: to tell would depend on the records.

    >>> import numpy as np
    >>> from dpgcl_core.records import ids_from_names
    >>> ids = ids_from_names([f"r{i}" for i in range(100)])
    >>> records = Records(images=np.zeros((100, 1, 8, 8), dtype=np.uint8), ids=ids)
    >>> train, scored = split_held_out(records, 0.2)
    >>> len(train) + len(scored), len(set(train.ids) & set(scored.ids))
    (100, 0)
    """
    if not 0 <= share < 1:
        raise ConfigError(f"score_on_held_out must be a share in [0, 1); got {share}")
    if share == 0:
        return records, None
    held = held_out(records.ids, share, key=_SCORE_SPLIT)
    return records.take(~held), records.take(held)


def is_split_held_out(train: Records, scored: Records, share: float) -> bool:
    """Whether `train` and `scored` are the two sides of `split_held_out`, record by record."""
    return bool(
        held_out(scored.ids, share, key=_SCORE_SPLIT).all()
        and not held_out(train.ids, share, key=_SCORE_SPLIT).any()
    )


def split_train_test(dataset: Dataset, test_fraction: float) -> tuple[Records, Records]:
    """Returns the records to train on and those held out for testing.

    The source's own split is kept where it has one. Otherwise each record goes by its own id alone, so
    adding or removing one record moves no other between the two.

    Args:
      dataset: as loaded.
      test_fraction: in [0, 1), the share to hold out of a source without a split of its own.

    Raises:
      ConfigError: `test_fraction` lies outside [0, 1).
      DataError: the split leaves no record to train on, or none to test on though some were asked for.
    """
    if not 0 <= test_fraction < 1:
        raise ConfigError(f"test_fraction must be in [0, 1); got {test_fraction}")
    if dataset.test is not None:
        return dataset.train, dataset.test
    held = held_out(dataset.train.ids, test_fraction)
    train, test = dataset.train.take(~held), dataset.train.take(held)
    if len(train) == 0 or (len(test) == 0 and test_fraction > 0):
        raise DataError(
            f"a split must leave records on both sides; test_fraction {test_fraction} of {len(held)} leaves "
            f"{len(train)} to train on and {len(test)} to test on. Change test_fraction or add records"
        )
    return train, test
