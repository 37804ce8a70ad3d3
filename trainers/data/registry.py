"""The data sources: one entry each, with all that is known of a data set before it is read.

The name of a data set begins with that of its source, as `digits`, `shapes:500:7` and `npz:PATH` do. Options,
planner, figures and `trainers.data.loading.load_dataset` read the entry. Entries are light: what reads the
records is imported when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from trainers.data.dataset import Dataset
    from trainers.data.pair_options import PairOptions
    from trainers.data.pairs import LoadedPairs

CLASS_CAPTIONS = "class_captions"
Captions = Literal["always", "never", "in a column"]
IN_A_COLUMN: Captions = "in a column"


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


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One source.

    Attributes:
      name: what a data set's name begins with.
      load: reads it; raises DataError where the data are missing, damaged, empty or of several shapes.
      title: for figures and tables.
      is_builtin: whether the data are public, and downloaded or generated when they are needed.
      image_shape: (channels, height, width) of a built-in one as it is loaded.
      class_names: of a built-in one, one for every label 0, 1, …
      captions: whether images have captions: "always", "never" or "in a column" of the file, if it is there.
      has_columns: whether a column may name the privacy unit.
      options: fields of `PairOptions` that mean something here.
    """

    name: str
    load: Callable[[Request], Dataset]
    title: str = ""
    is_builtin: bool = False
    image_shape: tuple[int, int, int] | None = None
    class_names: tuple[str, ...] = ()
    captions: Captions = "never"
    has_columns: bool = False
    options: tuple[str, ...] = (CLASS_CAPTIONS,)


def source_of(name: str) -> DataSource | None:
    """Return the source of a data set by its name, or None.

    >>> source_of("shapes:500:7").title, source_of("npz:scans.npz").is_builtin, source_of("digit")
    ('Shapes', False, None)
    """
    return DATA_SOURCES.get(name.partition(":")[0])


def _builtin_images(request: Request) -> Dataset:
    from trainers.data.dataset import Dataset
    from trainers.data.sources import load_builtin

    train, test = load_builtin(request.name, request.image_size)
    names = DATA_SOURCES[request.name].class_names
    return Dataset(name=request.name, train=train, test=test, is_builtin=True, class_names=names)


def _shapes(request: Request) -> Dataset:
    from trainers.data.dataset import Dataset
    from trainers.data.shapes import SHAPE_NAMES, load_shapes

    train, test = load_shapes(request.name, request.image_size)
    names = () if train.labels is None else SHAPE_NAMES
    return Dataset(name=request.name, train=train, test=test, is_builtin=True, class_names=names)


def _own_images(request: Request, reader: Callable[..., Any]) -> Dataset:
    from trainers.data.dataset import Dataset

    unit = {} if request.unit_column is None else {"unit_column": request.unit_column}
    train, test, names = reader(request.path, request.image_size, max_pixels=request.max_image_pixels, **unit)
    return Dataset(name=request.name, train=train, test=test, is_builtin=False, class_names=names)


def _own_pairs(request: Request, loaded: LoadedPairs) -> Dataset:
    from trainers.data.dataset import Dataset

    return Dataset(
        name=request.name,
        train=loaded.train,
        test=loaded.test,
        is_builtin=False,
        num_skipped=loaded.num_skipped,
        class_names=loaded.class_names,
    )


def _npz(request: Request) -> Dataset:
    from trainers.data.own import load_npz

    return _own_images(request, load_npz)


def _folder(request: Request) -> Dataset:
    from trainers.data.own import load_folder

    return _own_images(request, load_folder)


def _parquet(request: Request) -> Dataset:
    from trainers.data.image_text import load_parquet_pairs
    from trainers.data.own import load_parquet

    if not request.has_captions:
        return _own_images(request, load_parquet)
    size, pixels = request.image_size, request.max_image_pixels
    return _own_pairs(
        request, load_parquet_pairs(request.path, request.pairs, image_size=size, max_pixels=pixels)
    )


def _csv(request: Request) -> Dataset:
    from trainers.data.image_text import load_csv_pairs

    size, pixels = request.image_size, request.max_image_pixels
    return _own_pairs(
        request, load_csv_pairs(request.path, request.pairs, image_size=size, max_pixels=pixels)
    )


def _webdataset(request: Request) -> Dataset:
    from trainers.data.webdataset import load_webdataset

    loaded = load_webdataset(
        request.path,
        image_size=request.image_size,
        unit_field=request.pairs.unit,
        skip_corrupt=request.pairs.skip_corrupt,
        max_pixels=request.max_image_pixels,
    )
    return _own_pairs(request, loaded)


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
    return DataSource(
        name=name,
        load=_builtin_images,
        title=title,
        is_builtin=True,
        image_shape=shape,
        class_names=class_names,
    )


_SOURCES = (
    _builtin("digits", "Digits", (1, 8, 8), tuple(f"handwritten digit {digit}" for digit in _DIGITS)),
    _builtin("fashion-mnist", "Fashion-MNIST", (1, 28, 28), _CLOTHES),
    _builtin("cifar10", "CIFAR-10", (3, 32, 32), _CIFAR10),
    _builtin("eurosat", "EuroSAT", (3, 32, 32), _LAND),
    DataSource(
        name="shapes",
        load=_shapes,
        title="Shapes",
        is_builtin=True,
        image_shape=(3, 32, 32),
        captions="always",
        options=(),
    ),
    DataSource(name="npz", load=_npz, has_columns=True),
    DataSource(name="folder", load=_folder),
    DataSource(
        name="parquet",
        load=_parquet,
        captions=IN_A_COLUMN,
        has_columns=True,
        options=(*_COLUMNS, CLASS_CAPTIONS),
    ),
    DataSource(name="csv", load=_csv, captions="always", has_columns=True, options=(*_COLUMNS, "separator")),
    DataSource(
        name="webdataset",
        load=_webdataset,
        captions="always",
        has_columns=True,
        options=("unit", "skip_corrupt"),
    ),
)
DATA_SOURCES: dict[str, DataSource] = {source.name: source for source in _SOURCES}
BUILTIN_DATASETS: tuple[str, ...] = tuple(source.name for source in _SOURCES if source.is_builtin)
"""Names of the public data sets: downloaded when they are needed, or generated."""
