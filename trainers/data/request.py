"""What is asked of the reader of a data source, see `trainers.data.dataset_registry`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainers.data.pair_options import PairOptions


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be read.

    Attributes:
      name: of the data set; `path` is what stands behind the colon.
      image_size: resize every image to this many pixels square; None for its own size.
      unit_column: that names the privacy unit; None where a row is one.
      pairs: how images with captions are read.
      has_captions: whether these data have some.
      max_image_pixels: of one image as stored; a larger one is never decoded.
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
