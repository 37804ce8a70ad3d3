"""Predict the classes of images with an exported classifier.

    python -m trainers.classify --model FOLDER --images folder:/data/scans --to classes.csv

Images are read as `python -m trainers.embed` reads them; their own labels, if any, are ignored. The file has
the columns `id`, `label` and `probability`, and one row per image: the likeliest class, numbered as in
the training's labels, and the probability that the classifier assigns to it.

Classes of private images reveal their content, so they are private data themselves. The model's guarantee
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
    from trainers.models.classifier import Classifier


_DEFAULT_BATCH_SIZE = 512


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions(ModelOptions):
    """The images to classify, the classifier to use, and the file to write.

    Attributes:
      images: a folder:, npz:, parquet:, hf:, csv: or webdataset:PATH, or the name of a built-in data set.
      to: new file, .csv.
      network: your own network that the model names, if you trust it.
    """

    images: str
    to: Path = Path("classes.csv")
    network: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0.

    Raises:
      ConfigError, DataError, StorageError: an option, the images or the model are unusable.
    """
    options: ClassifyOptions = run_command(
        ClassifyOptions, prog="python -m trainers.classify", description=__doc__, arguments=arguments
    )
    from trainers.embed.embed_images import chosen_device, read_images
    from trainers.embed.embedding_files import CSV, check_target, write_answers
    from trainers.export.export_folder import load_classifier

    check_target(options.to, CSV)
    network, description = load_classifier(options.model, own_network=options.network)
    names, images = read_images(
        options.images, description.image_shape, options.pairs, options.max_image_pixels
    )
    network.to(chosen_device(options.device))
    found = probabilities(network, images, batch_size=options.batch_size or _DEFAULT_BATCH_SIZE)
    rows = zip(names.tolist(), found.argmax(1).tolist(), found.max(1).round(6).tolist(), strict=True)
    columns, content = ("id", "label", "probability"), f"classes of {len(found)} images"
    write_answers(options.to, columns, rows, content, "Classes", description)
    return 0


def probabilities(
    network: Classifier, images: NDArray[np.uint8], *, batch_size: int = _DEFAULT_BATCH_SIZE
) -> NDArray[np.float64]:
    """Return the classifier's probability of each class for each image, `[num_images, num_classes]`.

    Args:
      network: an exported classifier, on any device.
      images: uint8 `[num_images, channels, height, width]`, not normalised.
      batch_size: number of images per pass; changes nothing beyond rounding.
    """
    from trainers.evaluation.features import frozen, normalised_batches

    row_blocks = [np.zeros((0, network.num_classes))]
    with frozen(network):
        for batch in normalised_batches(images, batch_size, next(network.parameters()).device):
            row_blocks.append(network(batch).double().softmax(1).cpu().numpy())
    return np.concatenate(row_blocks)


if __name__ == "__main__":
    exit_on_bad_input(main)
