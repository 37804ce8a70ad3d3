"""Data sets as a training uses them: images and ids, perhaps labels, and who may see results on them.

A record is the privacy unit. With a unit column it holds several rows (all images of one person). At each
step **one** of its rows, chosen by a keyed hash of the record's id and the step, represents the record. So a
record is sampled as a whole and takes one place in one group, whatever its number of rows, and the
sensitivity of the step is the same as for records with one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from dpgcl_core.sampling.slot_table import SlotTable
from dpgcl_core.sampling.slots import ShardedGroups
from trainers.data.pairs import ImageTextRecords, LoadedData
from trainers.data.records import Records

AnyRecords: TypeAlias = Records | ImageTextRecords
"""Images, perhaps with labels, or images with captions."""

Modality = Literal["image", "image-text"]
"""The kind of a record: an image, or an image with its captions."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Another data set on which frozen features are scored, to measure how well they transfer.

    Attributes:
      name: a short name, valid as part of a metric's name.
      index: labelled records for k-NN and the probe, with images of the training data's shape.
      queries: labelled records that are scored, with images of the same shape.
      class_names: the labels' names, for the zero-shot score of image-text trainings; empty if unknown.

    Raises:
      DataError: some labels of the queries have names and others have none.
    """

    name: str
    index: Records
    queries: Records
    class_names: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_class_names(self.class_names, self.queries)


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data that one training may access.

    Attributes:
      train: the records that the guarantee covers.
      index: records for k-NN and the probe; None omits these scores. Like `queries`, they have the modality
        of `train`.
      queries: records that are scored; None omits all scores.
      train_is_public: whether `train` is public; if private, only releasable metrics leave the training.
      evaluation_is_public: whether `index`, `queries` and `probes` are public.
      held_out_records: records split from `train` (`trainers.data.loading.split_held_out`) and scored with
        noised counts against `index`; the guarantee covers them, too.
      slots: the slot table that splits the records into `train` and `held_out_records`, and `train` into
        shards; as private as the records. None without either.
      probes: other data sets that the features are scored on.
      class_names: names of the labels of `queries`, for zero-shot scores; empty if unknown.
      train_class_names: names of the labels of public training records; empty if unknown or if private.
      is_part: whether these are the data of one worker, from `parts`, checked before they were cut.

    Raises:
      DataError: some labels of the queries have names and others have none, or there are names and no
        queries, or there are names of private classes.
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
    is_part: bool = False

    def __post_init__(self) -> None:
        if self.class_names and self.queries is None:  # such names could only be of training labels
            raise DataError("class_names name the labels of queries; got names and no queries. Pass queries")
        if self.train_class_names and not self.train_is_public:
            raise DataError(
                "train_class_names must be empty for private training records, because they are private, too"
            )
        if self.queries is not None:
            check_class_names(self.class_names, self.queries)

    def rows_of_shards(self, stage: ShardedGroups) -> list[NDArray[np.int64]]:
        """Return the rows of the training records in each shard, ascending."""
        assert self.slots is not None
        return stage.rows_of(self.slots.slots_of(self.train.ids))

    def parts(self, stage: ShardedGroups) -> Iterator[TrainingData]:
        """Yield each worker's data: the training records of its shard, and at the first worker all others.

        A worker without a record gets the first one instead, which its draw never uses (the slot is in
        another range): whether a shard is empty depends on the records, and must end no training.
        """
        assert self.slots is not None
        no_scores: dict[str, Any] = {"index": None, "queries": None, "held_out_records": None, "probes": ()}
        for shard, rows in enumerate(self.rows_of_shards(stage)):
            train = self.train.take(rows if len(rows) else np.arange(1))
            slots = self.slots.holding(train.ids, None)
            part = dataclasses.replace(self, train=train, slots=slots, is_part=True)
            yield dataclasses.replace(part, **no_scores, class_names=()) if shard else part


@dataclass(frozen=True, kw_only=True)
class Dataset(LoadedData):
    """A data set as loaded: training records and, if the source has them, test records.

    Attributes:
      name: the name as given on the command line.
      is_builtin: whether it is a public benchmark; the user's own data count as private by default.

    Raises:
      DataError: some labels have names and others have none.
    """

    name: str
    is_builtin: bool

    def __post_init__(self) -> None:
        for part in (self.train, self.test):
            if part is not None:
                check_class_names(self.class_names, part)

    @property
    def modality(self) -> Modality:
        """The modality of a record."""
        return modality_of(self.train)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        return image_shape_of(self.train)


def modality_of(records: AnyRecords) -> Modality:
    """Return the modality of a record."""
    return "image" if isinstance(records, Records) else "image-text"


def image_shape_of(records: AnyRecords) -> tuple[int, int, int]:
    """Return (channels, height, width) of the records' images."""
    _, channels, height, width = records.images.shape
    return channels, height, width


def images_alone(records: AnyRecords) -> Records | None:
    """Return the records if they are images without captions, else None."""
    return records if isinstance(records, Records) else None


def captions_of(records: AnyRecords) -> tuple[list[str], NDArray[np.int64]] | None:
    """Return all captions and each caption's row, or None if the records have no captions."""
    return None if isinstance(records, Records) else records.flat_captions()


def num_public_classes(data: TrainingData) -> int | None:
    """Return the number of classes of public training records; None for private or unlabelled records.

    The number is the count of class names if the classes have names, else the largest label plus one.
    """
    labels = data.train.labels
    if not data.train_is_public or labels is None or not len(labels):
        return None
    return len(data.train_class_names) or int(labels.max()) + 1


def check_class_names(class_names: Sequence[str], records: AnyRecords) -> None:
    """Check that all labels have names; zero-shot scores would silently count the others as wrong.

    Raises:
      DataError: there are names, and labels outside their list; the message holds neither.
    """
    if not class_names or records.labels is None:
        return
    unnamed = int(np.sum((records.labels < 0) | (records.labels >= len(class_names))))
    if unnamed:
        raise DataError(
            f"labels must be indices in the list of class names, from 0 on; {unnamed} of "
            f"{len(records.labels)} labels are not. Name every class, or none"
        )
