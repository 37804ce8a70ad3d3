"""Station 1 in practice: data sets by name, and the split into training and test records."""

from __future__ import annotations

from pathlib import Path

from dpgcl_core.errors import ConfigError, DataError, unknown_choice
from dpgcl_core.records import held_out
from trainers.data.dataset import Dataset, Records
from trainers.data.own import load_folder, load_npz, load_parquet
from trainers.data.sources import SOURCES, RecordsError, load_builtin

BUILTIN_DATASETS: tuple[str, ...] = tuple(SOURCES)
"""Names of the public data sets that are downloaded when they are needed."""

MAX_IMAGE_SIZE = 1024
"""Larger squares would fill the memory: all images are held in it."""

_OWN = {"npz": load_npz, "parquet": load_parquet, "folder": load_folder}

__all__ = [
    "BUILTIN_DATASETS",
    "Dataset",
    "Records",
    "RecordsError",
    "check_dataset_name",
    "load_dataset",
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


def load_dataset(name: str, *, image_size: int | None = None) -> Dataset:
    """Returns a data set with all its images in memory.

    Args:
      name: one of `BUILTIN_DATASETS`, or `npz:PATH`, `parquet:PATH` or `folder:PATH` for your own.
      image_size: resize every image to this many pixels square; None keeps the images' own size
        (EuroSAT: 32) and refuses data of several sizes.

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
    if is_builtin:
        train, test = load_builtin(name, image_size)
    else:
        scheme, _, path = name.partition(":")
        train, test = _OWN[scheme](Path(path).expanduser(), image_size)
    return Dataset(name=name, train=train, test=test, is_builtin=is_builtin)


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
