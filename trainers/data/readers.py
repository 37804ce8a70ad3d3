"""What reads each data source of `trainers.data.registry`: a request to a data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.data.dataset import Dataset
from trainers.data.image_text import load_csv_pairs, load_parquet_pairs
from trainers.data.own import load_folder, load_npz, load_parquet
from trainers.data.pair_options import PairOptions
from trainers.data.pairs import LoadedPairs
from trainers.data.registry import DATA_SOURCES
from trainers.data.shapes import SHAPE_NAMES, load_shapes
from trainers.data.sources import load_builtin
from trainers.data.webdataset import load_webdataset


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be read.

    Attributes:
      name: of the data set; `path` is what stands behind the colon.
      image_size: of every image, in pixels; None for its own.
      unit_column: that names the privacy unit; None where a row is one.
      pairs: how images with captions are read.
      has_captions: whether these data have some.
      max_image_pixels: of one image as stored.
    """

    name: str
    image_size: int | None
    unit_column: str | None
    pairs: PairOptions
    has_captions: bool
    max_image_pixels: int

    @property
    def path(self) -> Path:
        """The file or folder."""
        return Path(self.name.partition(":")[2]).expanduser()


def read_builtin_images(request: Request) -> Dataset:
    """Read the images of a built-in data set."""
    train, test = load_builtin(request.name, request.image_size)
    names = DATA_SOURCES[request.name].class_names
    return Dataset(name=request.name, train=train, test=test, is_builtin=True, class_names=names)


def read_shapes(request: Request) -> Dataset:
    """Read generated images with captions."""
    train, test = load_shapes(request.name, request.image_size)
    names = () if train.labels is None else SHAPE_NAMES
    return Dataset(name=request.name, train=train, test=test, is_builtin=True, class_names=names)


def _own_images(request: Request, reader: Callable[..., Any]) -> Dataset:
    unit = {} if request.unit_column is None else {"unit_column": request.unit_column}
    train, test, names = reader(request.path, request.image_size, max_pixels=request.max_image_pixels, **unit)
    return Dataset(name=request.name, train=train, test=test, is_builtin=False, class_names=names)


def _own_pairs(request: Request, loaded: LoadedPairs) -> Dataset:
    return Dataset(
        name=request.name,
        train=loaded.train,
        test=loaded.test,
        is_builtin=False,
        num_skipped=loaded.num_skipped,
        class_names=loaded.class_names,
    )


def _pairs_of_file(request: Request, reader: Callable[..., LoadedPairs]) -> Dataset:
    size, pixels = request.image_size, request.max_image_pixels
    return _own_pairs(request, reader(request.path, request.pairs, image_size=size, max_pixels=pixels))


def read_npz(request: Request) -> Dataset:
    """Read the images of an `.npz` file."""
    return _own_images(request, load_npz)


def read_folder(request: Request) -> Dataset:
    """Read the images below a folder."""
    return _own_images(request, load_folder)


def read_parquet(request: Request) -> Dataset:
    """Read the images of parquet files, with captions where a column has them."""
    if not request.has_captions:
        return _own_images(request, load_parquet)
    return _pairs_of_file(request, load_parquet_pairs)


def read_csv(request: Request) -> Dataset:
    """Read the images with captions that a csv file names."""
    return _pairs_of_file(request, load_csv_pairs)


def read_webdataset(request: Request) -> Dataset:
    """Read the images with captions of tar shards."""
    loaded = load_webdataset(
        request.path,
        image_size=request.image_size,
        unit_field=request.pairs.unit,
        skip_corrupt=request.pairs.skip_corrupt,
        max_pixels=request.max_image_pixels,
    )
    return _own_pairs(request, loaded)
