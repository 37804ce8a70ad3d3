"""The options of commands that show images to an exported model, and those of `python -m trainers.embed`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dpgcl_core.errors import ConfigError
from trainers.config.networks import require_least
from trainers.data.decoding import MAX_IMAGE_PIXELS
from trainers.data.pair_options import PairOptions


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """An exported model and the preparation of its images.

    Attributes:
      model: folder of an exported model of the command's kind.
      batch_size: images or texts at once; a number that fits the model unless given.
      device: where to compute.
      max_image_pixels: of one image as stored; a larger one is refused before it is decoded.
      csv_separator: character between the columns of a csv file.
      csv_img_key: column of csv or parquet with images; filepath or image unless given.
      csv_caption_key: column of csv or parquet with captions; title or caption unless given.
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
      images: folder:, npz:, parquet:, csv: or webdataset:PATH, or the name of a built-in data set.
      texts: file of captions, one per line; needs a CLIP model.
      to: new file, .parquet or .npz.
      features: what to write of an image encoder; backbone unless given.
      network: the network of your own that the model names, if you trust it.
    """

    images: str | None = None
    texts: Path | None = None
    to: Path = Path("embeddings.parquet")
    features: Literal["backbone", "projection"] | None = None
    network: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images is None and self.texts is None:
            raise ConfigError("there is nothing to embed: give --images, or of a CLIP model --texts")
