"""What a data set is to a training: images and ids, perhaps labels, and who may see results on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from dpgcl_core.records import Ids


@dataclass(frozen=True, kw_only=True)
class Records:
    """Records in memory; one row is one privacy unit.

    Attributes:
      images: uint8 `[num_records, channels, height, width]`.
      ids: uint64 `[num_records]`, stable under adding or removing other records.
      labels: int64 `[num_records]`, or None.
    """

    images: NDArray[np.uint8]
    ids: Ids
    labels: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise DataError(
                "images must be uint8 [num_records, channels, height, width]; "
                f"got {self.images.dtype} with {self.images.ndim} axes"
            )
        for name in ("ids", "labels"):
            column = getattr(self, name)
            if column is not None and column.shape != (len(self.images),):
                raise DataError(f"{name} must have one entry per image; got shape {column.shape}")

    def __len__(self) -> int:
        return len(self.images)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Records:
        """Returns the records at `rows` (indices or a mask)."""
        return Records(
            images=self.images[rows],
            ids=self.ids[rows],
            labels=None if self.labels is None else self.labels[rows],
        )


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set as loaded: training records and, where the source has them, test records.

    Attributes:
      name: as given on the command line.
      train: records to train on.
      test: held-out records, or None when the source has no split of its own.
      is_builtin: one of the public benchmarks; the user's own data count as private by default.
    """

    name: str
    train: Records
    test: Records | None
    is_builtin: bool

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        _, channels, height, width = self.train.images.shape
        return channels, height, width
