"""The data sources: one entry each, with all properties of a data set that are known before it is read.

The name of a data set begins with the name of its source: `digits`, `shapes:500:7`, `npz:PATH`. Options,
planner, figures and `trainers.data.loading.load_dataset` read the entry. Entries are light: the reader of the
records is given by name and imported only when data are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CLASS_CAPTIONS = "class_captions"
Captions = Literal["always", "never", "in a column"]
IN_A_COLUMN: Captions = "in a column"


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One data source.

    Attributes:
      name: the first part of a data set's name.
      reader: `module:function` that takes a `trainers.data.request.Request` and returns `LoadedData`. It
        raises DataError if the data are missing, damaged, empty or of several shapes.
      title: the title in figures and tables.
      is_builtin: whether the data are public, and downloaded or generated when they are needed.
      image_shape: (channels, height, width) of a built-in data set as loaded; None for your own data.
      class_names: the class names of a built-in data set, one for every label 0, 1, …
      captions: whether images have captions: "always", "never" or "in a column" of the file, if it exists.
      has_columns: whether a column may name the privacy unit.
      is_in_buckets: whether the data may be at an address, see `dpgcl_core.object_store`.
      options: the fields of `PairOptions` that apply to this source.
    """

    name: str
    reader: str
    title: str = ""
    is_builtin: bool = False
    image_shape: tuple[int, int, int] | None = None
    class_names: tuple[str, ...] = ()
    captions: Captions = "never"
    has_columns: bool = False
    is_in_buckets: bool = False
    options: tuple[str, ...] = (CLASS_CAPTIONS,)


def source_of(name: str) -> DataSource | None:
    """Return the source of the data set with this name; None if there is no such source.

    >>> source_of("shapes:500:7").title, source_of("npz:scans.npz").is_builtin, source_of("digit")
    ('Shapes', False, None)
    """
    return DATA_SOURCES.get(name.partition(":")[0])


_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_CLOTHES = (
    *("t-shirt or top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
_CIFAR10 = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_LAND = (
    *("annual crop", "forest", "herbaceous vegetation", "highway", "industrial buildings"),
    *("pasture", "permanent crop", "residential buildings", "river", "sea or lake"),
)  # the publishers' names in the order of the labels, as words of a sentence
_COLUMNS = ("image", "caption", "unit", "split", "label", "skip_corrupt")


def _builtin(name: str, title: str, shape: tuple[int, int, int], class_names: tuple[str, ...]) -> DataSource:
    reader = f"trainers.data.builtin_datasets:load_{name.replace('-', '_')}"
    return DataSource(
        name=name, reader=reader, title=title, is_builtin=True, image_shape=shape, class_names=class_names
    )


_SOURCES = (
    _builtin("digits", "Digits", (1, 8, 8), tuple(f"handwritten digit {digit}" for digit in _DIGITS)),
    _builtin("fashion-mnist", "Fashion-MNIST", (1, 28, 28), _CLOTHES),
    _builtin("cifar10", "CIFAR-10", (3, 32, 32), _CIFAR10),
    _builtin("eurosat", "EuroSAT", (3, 32, 32), _LAND),
    DataSource(
        name="shapes",
        reader="trainers.data.shapes:load_shapes",
        title="Shapes",
        is_builtin=True,
        image_shape=(3, 32, 32),
        captions="always",
        options=(),
    ),
    DataSource(
        name="procedural",
        reader="trainers.data.procedural:load_procedural",
        title="Procedural",
        is_builtin=True,
        image_shape=(3, 32, 32),
        class_names=("dead leaves", "objects", "octaves", "stripes", "fractals"),
    ),
    DataSource(name="npz", reader="trainers.data.own_images:load_npz", has_columns=True),
    DataSource(name="folder", reader="trainers.data.own_images:load_folder"),
    DataSource(
        name="parquet",
        reader="trainers.data.pair_tables:load_parquet_of_either",
        captions=IN_A_COLUMN,
        has_columns=True,
        is_in_buckets=True,
        options=(*_COLUMNS, CLASS_CAPTIONS),
    ),
    DataSource(
        name="hf",
        reader="trainers.data.pair_tables:load_hf",
        captions=IN_A_COLUMN,
        has_columns=True,
        options=(*_COLUMNS, CLASS_CAPTIONS),
    ),
    DataSource(
        name="csv",
        reader="trainers.data.pair_tables:load_csv",
        captions=IN_A_COLUMN,
        has_columns=True,
        options=(*_COLUMNS, "separator", CLASS_CAPTIONS),
    ),
    DataSource(
        name="webdataset",
        reader="trainers.data.webdataset:load_webdataset",
        captions="always",
        has_columns=True,
        is_in_buckets=True,
        options=("unit", "skip_corrupt"),
    ),
    DataSource(
        name="shards",
        reader="trainers.data.webdataset:load_webdataset",
        has_columns=True,
        is_in_buckets=True,
        options=("unit", "label", "skip_corrupt", CLASS_CAPTIONS),
    ),
)
DATA_SOURCES: dict[str, DataSource] = {source.name: source for source in _SOURCES}
BUILTIN_DATASETS: tuple[str, ...] = tuple(source.name for source in _SOURCES if source.is_builtin)
"""Names of the public data sets: downloaded when they are needed, or generated."""
