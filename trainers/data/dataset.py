"""What a data set is to a training: images and ids, perhaps labels, and who may see results on it.

A record is the privacy unit. With a unit column it holds several rows (all images of one person); at a
step **one** of them, chosen by a keyed hash of the record's id and the step, stands for the record. So a
record is sampled as one, is one place of one group whatever its number of rows, and the sensitivity of
the step is that of records with one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from dpgcl_core.sampling.slot_table import SlotTable
from trainers.data.pairs import ImageTextRecords, LoadedData
from trainers.data.records import Records

AnyRecords: TypeAlias = Records | ImageTextRecords
"""Images, perhaps with labels, or images with captions."""

Modality = Literal["image", "image-text"]
"""What a record is: an image, or an image with its captions."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Another data set, on which frozen features are scored: how far what was learned transfers.

    Attributes:
      name: short and fit for a metric's name.
      index: labelled records for k-NN and the probe, images of the training data's shape.
      queries: labelled records that are scored, likewise.
      class_names: of the labels, for the zero-shot score of image-text trainings; empty where unknown.

    Raises:
      DataError: a label of the queries has no name though others have.
    """

    name: str
    index: Records
    queries: Records
    class_names: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_class_names(self.class_names, self.queries)


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What one training may touch.

    Attributes:
      train: the records the guarantee is about.
      index: records for k-NN and the probe, or None: none of their scores. Of the modality of `train`, as
        `queries` are.
      queries: records that are scored, or None: no scores.
      train_is_public: with private records only releasable metrics leave the training.
      evaluation_is_public: whether `index`, `queries` and `probes` are public.
      held_out_records: split from `train` (`trainers.data.loading.split_held_out`), scored with noised counts
        against `index`; the guarantee is about them, too.
      slots: of `train` and `held_out_records`, which the split went by; as private as the records.
      probes: other data sets that the features are scored on.
      class_names: of the labels of `queries`, for zero-shot scores; empty where unknown.
      train_class_names: of the labels of public training records; empty where unknown, and of private ones.

    Raises:
      DataError: a label of the queries has no name though others have, or there are names and no queries; or
        names of private classes.
    """

    train: AnyRecords
    index: AnyRecords | None
    queries: AnyRecords | None
    train_is_public: bool
    evaluation_is_public: bool
    held_out_records: AnyRecords | None = None
    slots: SlotTable | None = field(default=None, repr=False)
    probes: tuple[Probe, ...] = ()
    class_names: tuple[str, ...] = field(default=(), repr=False)
    train_class_names: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.class_names and self.queries is None:  # of the training records they would be as private
            raise DataError("class_names are of the labels of queries; got names and no queries. Give both")
        if self.train_class_names and not self.train_is_public:
            raise DataError(
                "train_class_names are of public training records; those of private ones go nowhere"
            )
        if self.queries is not None:
            check_class_names(self.class_names, self.queries)


@dataclass(frozen=True, kw_only=True)
class Dataset(LoadedData):
    """A data set as loaded: training records and, where the source has them, test records.

    Attributes:
      name: as given on the command line.
      is_builtin: one of the public benchmarks; the user's own data count as private by default.

    Raises:
      DataError: a label has no name though others have.
    """

    name: str
    is_builtin: bool

    def __post_init__(self) -> None:
        for part in (self.train, self.test):
            if part is not None:
                check_class_names(self.class_names, part)

    @property
    def modality(self) -> Modality:
        """What a record is."""
        return modality_of(self.train)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        return image_shape_of(self.train)


def modality_of(records: AnyRecords) -> Modality:
    """Return what a record is."""
    return "image" if isinstance(records, Records) else "image-text"


def image_shape_of(records: AnyRecords) -> tuple[int, int, int]:
    """Return (channels, height, width) of the records' images."""
    _, channels, height, width = records.images.shape
    return channels, height, width


def images_alone(records: AnyRecords) -> Records | None:
    """Return the records if they are images without captions; None of others."""
    return records if isinstance(records, Records) else None


def captions_of(records: AnyRecords) -> tuple[list[str], NDArray[np.int64]] | None:
    """Return all captions, and the row each belongs to; None of records that have no captions."""
    return None if isinstance(records, Records) else records.flat_captions()


def num_public_classes(data: TrainingData) -> int | None:
    """Return how many classes public training records have; None of private ones, and without labels.

    That is the number of their own names where the classes have some, and else the largest label and one.
    """
    labels = data.train.labels
    if not data.train_is_public or labels is None or not len(labels):
        return None
    return len(data.train_class_names) or int(labels.max()) + 1


def check_class_names(class_names: Sequence[str], records: AnyRecords) -> None:
    """Refuse names that are not of all labels: those left out would count as wrong answers, unseen.

    Raises:
      DataError: there are names, and labels outside their list; the message holds neither.
    """
    if not class_names or records.labels is None:
        return
    unnamed = int(np.sum((records.labels < 0) | (records.labels >= len(class_names))))
    if unnamed:
        raise DataError(
            f"labels must be places in the list of class names, from 0 on; {unnamed} of "
            f"{len(records.labels)} labels are not. Name every class, or none"
        )
