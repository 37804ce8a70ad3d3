"""Captions made from class names, so that a method for pairs can learn from images with labels and no texts.

A record's caption is a function of its own label and a public template, so its pair depends on no other
record. The label then enters the training: the guarantee protects the image together with its class.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpgcl_core.errors import ConfigError
from trainers.data.pairs import ImageTextRecords
from trainers.data.records import Records
from trainers.data.stored_images import in_channels


def with_class_captions(
    records: Records | ImageTextRecords, class_names: Sequence[str], template: str
) -> ImageTextRecords:
    """Return the records in colour, as image towers need, each image with a caption that names its class.

    Args:
      records: images with labels.
      class_names: one name for every label 0, 1, …, as in a `Dataset`.
      template: text with `{}` where the class's name goes.

    Raises:
      ConfigError: there are no labels, or classes have no names.

    >>> import numpy as np
    >>> records = Records(images=np.zeros((2, 1, 8, 8), dtype=np.uint8), ids=np.arange(2, dtype=np.uint64),
    ...     labels=np.array([1, 0]))
    >>> with_class_captions(records, ("cat", "dog"), "a photo of a {}.").captions
    (('a photo of a dog.',), ('a photo of a cat.',))
    """
    if records.labels is None or not class_names:
        raise ConfigError(
            "class_captions need class names, and these images have none. Use text labels, or data with "
            "captions"
        )
    texts = [(template.replace("{}", name),) for name in class_names]
    return ImageTextRecords(
        images=in_channels(records.images, 3),
        captions=tuple(texts[label] for label in records.labels.tolist()),
        ids=records.ids,
        row_starts=records.row_starts,
        labels=records.labels,
    )
