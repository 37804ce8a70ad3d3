"""The request to the reader of a data source, see `trainers.data.dataset_registry`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainers.data.pair_options import PairOptions


@dataclass(frozen=True, kw_only=True)
class Request:
    """The data to read, and how to read them.

    Attributes:
      name: the data set's name; `path` is the part after the colon.
      image_size: resize every image to this many pixels square; None keeps its own size.
      unit_column: the column that names the privacy unit; None if each row is a unit.
      pairs: how images with captions are read.
      has_captions: whether these data have captions.
      max_image_pixels: largest allowed image as stored; a larger one is never decoded.
      in_memory: whether pixels are kept in memory; None: if they take at most a quarter of what is free.
      index_folder: the folder of the index of images that stay in files; None: a folder next to them.
    """

    name: str
    image_size: int | None
    unit_column: str | None
    pairs: PairOptions
    has_captions: bool
    max_image_pixels: int
    in_memory: bool | None = None
    index_folder: Path | None = None

    @property
    def scheme(self) -> str:
        """The name of the data source."""
        return self.name.partition(":")[0]

    @property
    def path(self) -> Path:
        """The file or folder."""
        return Path(self.name.partition(":")[2]).expanduser()
