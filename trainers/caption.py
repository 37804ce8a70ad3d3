"""Write captions of images with an exported captioner.

    python -m trainers.caption --model FOLDER --images folder:/data/scans --to captions.csv

Each token is the likeliest one after the preceding tokens (greedy decoding). Images are read as
`python -m trainers.embed` reads them; their own captions, if any, are ignored. The file has the columns `id`
and `caption`, and one row per image.

Captions of private images reveal their content, so they are private data themselves. The model's guarantee
is about the records that the model was trained on. It covers the model, and not the data that
the model is applied to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.command_line import run_command
from dpgcl_core.errors import exit_on_bad_input
from trainers.embed.options import ModelOptions

if TYPE_CHECKING:  # torch is loaded to run the command, but not to print its help
    from trainers.models.captioner import Captioner

_DEFAULT_BATCH_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class CaptionOptions(ModelOptions):
    """The images to describe, the captioner to use, and the file to write.

    Attributes:
      images: a folder:, npz:, parquet:, hf:, csv: or webdataset:PATH, or the name of a built-in data set.
      to: new file, .csv.
    """

    images: str
    to: Path = Path("captions.csv")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0.

    Raises:
      ConfigError, DataError, StorageError: an option, the images or the model are unusable.
    """
    options: CaptionOptions = run_command(
        CaptionOptions, prog="python -m trainers.caption", description=__doc__, arguments=arguments
    )
    from trainers.embed.embed_images import chosen_device, read_images
    from trainers.embed.embedding_files import CSV, check_target, write_answers
    from trainers.export.export_folder import load_captioner

    check_target(options.to, CSV)
    network, description = load_captioner(options.model)
    names, images = read_images(
        options.images, description.image_shape, options.pairs, options.max_image_pixels
    )
    network.to(chosen_device(options.device))
    captions = generated(network, images, batch_size=options.batch_size or _DEFAULT_BATCH_SIZE)
    rows = zip(names.tolist(), captions, strict=True)
    write_answers(options.to, ("id", "caption"), rows, f"{len(captions)} captions", "Captions", description)
    return 0


def generated(
    network: Captioner, images: NDArray[np.uint8], *, batch_size: int = _DEFAULT_BATCH_SIZE
) -> list[str]:
    """Generate a caption for each image by greedy decoding, in the order of the images.

    Args:
      network: an exported captioner, on any device.
      images: uint8 `[num_images, channels, height, width]`, not normalised.
      batch_size: number of images per pass.
    """
    from trainers.evaluation.features import frozen, normalised_batches

    with frozen(network):
        batches = normalised_batches(images, batch_size, next(network.parameters()).device)
        return [caption for batch in batches for caption in network.generate(batch)]


if __name__ == "__main__":
    exit_on_bad_input(main)
