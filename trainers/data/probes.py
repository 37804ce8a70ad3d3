"""Loads probe data sets, with images in the shape of the training data so that the network can read them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpgcl_core.errors import ConfigError
from trainers.data.dataset import AnyRecords, Dataset, Probe
from trainers.data.loading import load_dataset, split_train_test
from trainers.data.own_images import label_place
from trainers.data.pair_options import PairOptions
from trainers.data.records import Records
from trainers.data.stored_images import in_channels


def load_probes(names: Sequence[str], dataset: Dataset, **options: Any) -> tuple[Probe, ...]:
    """Return the probe data sets of these names, with images in the shape of `dataset`.

    `options` are the further arguments of `load_probe`.

    Raises:
      ConfigError: as in `load_probe`, or two data sets have the same short name.
      DataError: as in `load_probe`.
    """
    short_names = [probe_name(name) for name in names]
    if len(set(short_names)) < len(short_names):
        raise ConfigError(
            "probe_datasets must have different names, without their folders, to tell their scores apart; "
            f"got {', '.join(short_names)}. Rename the files"
        )
    return tuple(load_probe(name, image_shape=dataset.image_shape, **options) for name in names)


def load_probe(
    name: str,
    *,
    image_shape: tuple[int, int, int],
    test_fraction: float,
    pairs: PairOptions | None = None,
    **reading: Any,
) -> Probe:
    """Return a public labelled data set to score features on.

    Its images are resized to the training data's square, and converted to the training data's channels, see
    `with_channels`. Index and queries are its own training and test split, if it has one. For images with
    captions, the images and labels are used.

    Args:
      name: a name that `trainers.data.load_dataset` accepts.
      image_shape: (channels, height, width) of the training data.
      test_fraction: the share of its records that are scored, if it has no split of its own.
      pairs: how images with captions are read; options that do not apply to this data set are ignored.
      reading: `max_image_pixels`, `in_memory` and `index_folder` for `load_dataset`.

    Raises:
      ConfigError: its records have no labels, or the training images are not square.
      DataError: the data are missing or unusable.
    """
    channels, height, width = image_shape
    if height != width:
        raise ConfigError(
            "probe_datasets are resized to the training images' size, which must be square; got "
            f"{height} × {width} pixels. Pass --image-size"
        )
    fitting = None if pairs is None else pairs.fitting(name)
    dataset = load_dataset(name, image_size=height, pairs=fitting, **reading)
    index, queries = split_train_test(dataset, test_fraction)
    if index.labels is None or queries.labels is None:
        raise ConfigError(f"probe_datasets need labels, for k-NN and linear probe. Add {label_place(name)}")
    index, queries = _image_records(index, channels), _image_records(queries, channels)
    return Probe(name=probe_name(name), index=index, queries=queries, class_names=dataset.class_names)


def probe_name(dataset: str) -> str:
    """Return a data set's name in the form used in a metric's name.

    >>> probe_name("fashion-mnist"), probe_name("npz:/data/some faces.npz")
    ('fashion-mnist', 'npz-some-faces')
    """
    scheme, _, path = dataset.partition(":")
    return f"{scheme}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', Path(path).stem)}" if path else dataset


def _image_records(records: AnyRecords, channels: int) -> Records:
    records = records.one_row_each()
    images = in_channels(records.images, channels)
    if isinstance(records, Records):
        return dataclasses.replace(records, images=images)
    return Records(images=images, ids=records.ids, labels=records.labels)
