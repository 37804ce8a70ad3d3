"""Image records: one record is one privacy unit, with one row, or several if there is a unit column."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from dpgcl_core.sampling.record_ids import Ids
from trainers.data.rows import check_row_starts, row_of_each, rows_of
from trainers.data.stored_images import Images, select


@dataclass(frozen=True, kw_only=True)
class RecordsOfRows:
    """Records of any kind, each with contiguous rows; one record is one privacy unit.

    Attributes:
      images: uint8 `[num_rows, channels, height, width]`, in memory or stored; a record's rows lie together.
      ids: uint64 `[num_records]`, stable under adding or removing other records.
      labels: int64 `[num_rows]`, or None.
      row_starts: int64 `[num_records + 1]`: record i has the rows from `row_starts[i]` up to, but not
        including, `row_starts[i + 1]`; None if every record has one row.
    """

    images: Images
    ids: Ids
    labels: NDArray[np.int64] | None = None
    row_starts: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, records: NDArray[np.int64] | NDArray[np.bool_]) -> Self:
        """Return the records at `records` (indices or a mask), with all their rows."""
        rows, starts = rows_of(self.row_starts, np.arange(len(self))[records])
        return dataclasses.replace(self, ids=self.ids[records], row_starts=starts, **self._columns_at(rows))

    def one_row_each(self) -> Self:
        """Return the same records with one row each, chosen by a keyed hash of the record's id."""
        if self.row_starts is None:
            return self
        rows = row_of_each(self.row_starts, self.ids, np.arange(len(self)))
        return dataclasses.replace(self, row_starts=None, **self._columns_at(rows))

    def images_at(self, records: NDArray[np.int64], *, seed: int, step: int) -> NDArray[np.uint8]:
        """Return each record's image at `step`, chosen by the public seed, `[n, channels, height, width]`."""
        return self.images[row_of_each(self.row_starts, self.ids, records, seed=seed, step=step)]

    def _check_columns(self) -> None:
        num_rows = self.images.shape[0]
        for name in ("ids", "labels") if self.row_starts is None else ("labels",):
            column = getattr(self, name)
            if column is not None and column.shape != (num_rows,):
                raise DataError(f"{name} must have one entry per image; got shape {column.shape}")
        check_row_starts(self.row_starts, num_records=len(self.ids), num_rows=num_rows)

    def _columns_at(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return the per-row fields at `rows`; images that are stored on disk are not read."""
        return {
            "images": select(self.images, rows),
            "labels": None if self.labels is None else self.labels[rows],
        }


@dataclass(frozen=True, kw_only=True)
class Records(RecordsOfRows):
    """Images, perhaps with labels.

    Attributes:
      classes_from_data: whether labels are indices in the list of this data set's own classes: adding one
        record can then change the labels of others.
    """

    classes_from_data: bool = False

    def __post_init__(self) -> None:
        images = self.images
        if isinstance(images, np.ndarray) and (images.dtype != np.uint8 or images.ndim != 4):
            raise DataError(
                "images must be uint8 [num_rows, channels, height, width]; "
                f"got {images.dtype} with {images.ndim} axes"
            )
        self._check_columns()

    def labels_at(self, records: NDArray[np.int64], *, seed: int, step: int) -> NDArray[np.int64]:
        """Return the labels of the images that `images_at` returns, `[n]`.

        Raises:
          DataError: the records have no labels.
        """
        if self.labels is None:
            raise DataError("these records have no labels; load a data set with labels")
        return self.labels[row_of_each(self.row_starts, self.ids, records, seed=seed, step=step)]
