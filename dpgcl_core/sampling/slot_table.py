"""The slot table: the slot of each record of a data set, kept on the trusted side.

A split or a shard of records chosen by a hash of their ids has a random size, which no capacity can bound.
A range of slots has an exact size. So every record gets one of N slots when it is first seen, uniformly at
random among the empty slots, and keeps it. When a record is removed, its slot becomes empty, and a later
record may fill it.

Guarantee. Whichever records were added and removed before, the table is a uniformly random injection of the
present records into N slots, and the injection of D' = D ∪ {r}, restricted to D, has the law of the injection
of D: the table couples the two, with the slot of r empty under D. Condition on the table. Every range of
slots then holds the same records in both, except for r, and its size is public. The proof of
`dpgcl_core.sampling.slots` holds in each range, whose placement may be drawn again at every step
(`ShardedGroups` does so in several ranges). The table itself reveals the present records: **private-only**.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError, DataError
from dpgcl_core.noise.randomness import Draws
from dpgcl_core.sampling.record_ids import Ids
from dpgcl_core.sampling.slots import more_records_than_slots


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotTable:
    """The slots of the records that are in the data set now.

    Attributes:
      capacity: N, the number of slots.
      ids: `[num_records]` record ids, each once.
      slots: int64 `[num_records]`, the records' slots, in [0, N), each at most once.

    Raises:
      DataError: ids or slots are repeated or differ in number, or a slot is outside [0, N).

    >>> from dpgcl_core.sampling.record_ids import ids_from_names
    >>> ids = ids_from_names(["a", "b", "c"])
    >>> table = SlotTable.empty(4).holding(ids, np.random.default_rng())
    >>> set(table.slots_of(ids).tolist()) < {0, 1, 2, 3}, len(table.holding(ids[:2], None).ids)
    (True, 2)
    """

    capacity: int
    ids: Ids
    slots: NDArray[np.int64]

    def __post_init__(self) -> None:
        injective = len(np.unique(self.slots)) == len(self.slots) == len(np.unique(self.ids)) == len(self.ids)
        if not injective or (
            len(self.slots) and not 0 <= self.slots.min() <= self.slots.max() < self.capacity
        ):
            raise DataError(
                f"a slot table must assign each record a different one of its {self.capacity} slots"
            )

    @classmethod
    def empty(cls, capacity: int) -> SlotTable:
        """Return the table of no records."""
        return cls(capacity=capacity, ids=np.empty(0, dtype=np.uint64), slots=np.empty(0, dtype=np.int64))

    def holding(self, ids: Ids, generator: Draws | None) -> SlotTable:
        """Return the table of these records: known records keep their slots, new records get empty slots.

        Args:
          ids: the ids of all records that are in the data set now, each once, in any order.
          generator: secret draws that place new records; None if no record is new.

        Raises:
          ConfigError: there are more records than slots; the message contains no number of records.
        """
        if len(ids) > self.capacity:
            raise ConfigError(more_records_than_slots(self.capacity))
        stays = np.isin(self.ids, ids)
        new = np.sort(ids[~np.isin(ids, self.ids)])
        slots = self.slots[stays]
        if not len(new):
            return SlotTable(capacity=self.capacity, ids=self.ids[stays], slots=slots)
        assert generator is not None
        free = generator.permutation(np.setdiff1d(np.arange(self.capacity, dtype=np.int64), slots))
        return SlotTable(
            capacity=self.capacity,
            ids=np.concatenate([self.ids[stays], new]),
            slots=np.concatenate([slots, free[: len(new)]]),
        )

    def slots_of(self, ids: Ids) -> NDArray[np.int64]:
        """Return the slots of the records with these ids, `[len(ids)]`.

        Raises:
          DataError: a record has no slot; the message does not identify it.
        """
        order = np.argsort(self.ids)
        rank = np.searchsorted(self.ids, ids, sorter=order)
        rows = order[np.minimum(rank, len(order) - 1)] if len(order) else np.zeros(len(ids), dtype=np.int64)
        if len(ids) and not (len(order) and np.array_equal(self.ids[rows], ids)):
            raise DataError("a record has no slot in the slot table: the table belongs to other data")
        return self.slots[rows]

    def to_bytes(self) -> bytes:
        """Return the table as an npz file without pickled objects."""
        file = io.BytesIO()
        np.savez_compressed(file, capacity=np.int64(self.capacity), ids=self.ids, slots=self.slots)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> SlotTable:
        """Return the table that `to_bytes` wrote.

        Raises:
          DataError: `content` is not such a table.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                capacity, ids, slots = int(file["capacity"]), file["ids"], file["slots"]
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"the slot table cannot be read ({type(error).__name__})") from None
        if ids.dtype != np.uint64 or slots.dtype != np.int64 or ids.ndim != 1 or slots.ndim != 1:
            raise DataError("the slot table cannot be read (its columns have the wrong type or shape)")
        return cls(capacity=capacity, ids=ids, slots=slots)
