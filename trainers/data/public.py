"""Public records that help a private training: where they come from, and which ones a step takes.

They must be chosen without the private data and share no record with it: a step uses them as it uses the
weights, as a constant (docs/theory/public-records.md). So a source knows a seed, a step and a purpose, and
nothing of the records that are trained on.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from dpgcl_core.errors import ConfigError
from trainers.data.channels import with_channels
from trainers.data.dataset import AnyRecords, Dataset, Modality, image_shape_of
from trainers.data.decoding import MAX_IMAGE_PIXELS
from trainers.data.loading import PairOptions, check_dataset_name, load_dataset, modality_of_name
from trainers.data.procedural import procedural_images
from trainers.data.records import Records

PROCEDURAL = "procedural"
"""The name of public images that nobody has to give."""


@dataclass(frozen=True, kw_only=True)
class PublicPool:
    """A public data set of which every step draws some records, afresh and without replacement.

    Attributes:
      name: of the data set.
      pool: its training records.
    """

    name: str
    pool: AnyRecords = field(repr=False)

    def check(self, num_records: int) -> None:
        """Raise ConfigError if a step asks for more records than there are."""
        if num_records > len(self.pool):
            raise ConfigError(
                f"a step may take at most the {len(self.pool)} public records of {self.name}; got "
                f"{num_records}: ask for fewer, or name a larger public data set"
            )

    def records(self, num_records: int, *, seed: int, step: int, purpose: str) -> AnyRecords:
        """Return the records of a step for a purpose: a function of the arguments alone."""
        self.check(num_records)
        generator = np.random.default_rng([seed, step, *purpose.encode()])
        return self.pool.take(np.sort(generator.choice(len(self.pool), num_records, replace=False)))


@dataclass(frozen=True, kw_only=True)
class ProceduralImages:
    """Images made from numbers alone (`trainers.data.procedural`), others at every step: no file, no pool.

    Attributes:
      image_shape: (channels, height, width), that of the training data.
    """

    image_shape: tuple[int, int, int]
    name: ClassVar[str] = PROCEDURAL

    def check(self, num_records: int) -> None:
        """Any number can be made."""

    def records(self, num_records: int, *, seed: int, step: int, purpose: str) -> Records:
        """Return the images of a step for a purpose: a function of the arguments and the shape alone."""
        first = np.random.default_rng([seed, step, *purpose.encode()]).integers(2**40)
        indices = np.arange(first, first + num_records, dtype=np.uint64)
        images = procedural_images(indices, self.image_shape, seed=seed)
        return Records(images=images, ids=indices)


def load_public_records(
    name: str,
    dataset: Dataset,
    *,
    pairs: PairOptions | None = None,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> PublicPool | ProceduralImages:
    """Return the training records of a public data set, of the kind and image shape of those trained on.

    By the name `PROCEDURAL`, images that are made as they are needed.

    Images are resized to the square of `dataset` and get its channels
    (`trainers.data.channels.with_channels`).

    Args:
      name: `PROCEDURAL`, or as for `trainers.data.load_dataset`.
      dataset: what is trained on; of it, kind and image shape are looked at.
      pairs, max_image_pixels: as for `load_dataset`.

    Raises:
      ConfigError: the kinds differ, or the images cannot be made alike.
      DataError: the data are missing or unusable.
    """
    channels, height, width = dataset.image_shape
    if name == PROCEDURAL:
        _check_modality("image", dataset)
        procedural_images(
            np.zeros(1, dtype=np.uint64), dataset.image_shape, seed=0
        )  # or says what is too small
        return ProceduralImages(image_shape=dataset.image_shape)
    if height != width:
        raise ConfigError(
            "public_records are resized to the training images' square, and these are "
            f"{height} × {width} pixels: give --image-size"
        )
    fitting = (pairs or PairOptions()).fitting(name)
    _check_modality(modality_of_name(name, fitting), dataset)
    found = load_dataset(name, image_size=height, pairs=fitting, max_image_pixels=max_image_pixels).train
    if isinstance(found, Records):
        found = dataclasses.replace(found, images=with_channels(found.images, channels))
    if image_shape_of(found) != dataset.image_shape:
        raise ConfigError(
            f"public_records must have images of the training data's shape {dataset.image_shape}; got "
            f"{image_shape_of(found)}"
        )
    return PublicPool(name=name, pool=found)


def check_public_records_name(name: str) -> None:
    """Raise ConfigError unless public records can have this name."""
    check_dataset_name(name, also=(PROCEDURAL,))


def _check_modality(modality: Modality, dataset: Dataset) -> None:
    if modality != dataset.modality:
        raise ConfigError(
            "public_records must be of the kind that is trained on, image or image-text; got "
            f"{modality} for {dataset.modality}: name another public data set"
        )
