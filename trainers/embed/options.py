"""Options of the commands that run an exported model on images, and of `python -m trainers.embed`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dpgcl_core.errors import ConfigError, require_least
from trainers.data.decoding import MAX_IMAGE_PIXELS
from trainers.data.pair_options import PairOptions


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """An exported model and the preparation of its images.

    Attributes:
      model: folder of an exported model of the command's kind.
      batch_size: images or texts per pass; by default a number that suits the model.
      device: the device to compute on.
      max_image_pixels: maximum pixels of a stored image; larger images are rejected before decoding.
      csv_separator: character between the columns of a csv file.
      csv_img_key: csv, parquet or hf column with images; filepath or image by default.
      csv_caption_key: csv, parquet or hf column with captions; title or caption by default.
    """

    model: Path
    batch_size: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_image_pixels: int = MAX_IMAGE_PIXELS
    csv_separator: str = "\t"
    csv_img_key: str | None = None
    csv_caption_key: str | None = None

    def __post_init__(self) -> None:
        require_least(self, 1, "batch_size")

    @property
    def pairs(self) -> PairOptions:
        """How images with captions are read."""
        return PairOptions(image=self.csv_img_key, caption=self.csv_caption_key, separator=self.csv_separator)


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(ModelOptions):
    """Data to embed, the model, and the output.

    Attributes:
      images: folder:, npz:, parquet:, hf:, csv:, shards: or webdataset:PATH, or the name of a built-in data
        set.
      index_folder: folder of the index of images that do not fit into memory; by default beside them.
      texts: file of captions, one per line; needs a CLIP model.
      to: new file, .parquet or .npz.
      features: features to write, for an image encoder; backbone by default.
      network: your own network that the model names, if you trust it.
    """

    images: str | None = None
    index_folder: Path | None = None
    texts: Path | None = None
    to: Path = Path("embeddings.parquet")
    features: Literal["backbone", "projection"] | None = None
    network: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images is None and self.texts is None:
            raise ConfigError("there is nothing to embed. Pass --images, or --texts with a CLIP model.")
