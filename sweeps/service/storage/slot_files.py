"""The files of slot tables, which decide which records are held out for scoring, and at which worker one is.

They are next to the ledger's mark on the data, else (also for data in a bucket) in the storage folder. A
record must be trained on by all trials of a sweep or scored by all, and be in the same shard in all, also
after a resume. So a table is written before the first trial of the first sweep that needs one, and all later
sweeps read it. It reveals who is in the data set, so only its owner may read the file.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from dpgcl_core.durable_files import make_folder, replacing
from dpgcl_core.errors import DataError, StorageError
from dpgcl_core.ledger.marks import MARK, expand_ranges, mark_path
from dpgcl_core.noise.chacha20 import SecureGenerator
from dpgcl_core.object_store import address_of
from dpgcl_core.sampling.record_ids import Ids
from dpgcl_core.sampling.slot_table import SlotTable
from sweeps.service.options.data import DataOptions, data_path

SLOTS = ".dpgcl-slots"
_FOLDER = "slot-tables"


@dataclass(kw_only=True)
class SlotFiles:
    """The slot tables of one data set, one for each capacity (number of slots).

    Attributes:
      base_path: the path of the tables, to whose name the capacity is appended.
    """

    base_path: Path
    _file_contents: dict[int, bytes | None] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, data: DataOptions, root: Path, *, has_ledger: bool) -> SlotFiles:
        """Return the files of a data set: next to its mark if a ledger marks it and that folder is writable.

        Args:
          data: the data set, with the column that names its privacy units, to which slots are assigned.
          root: the storage folder.
          has_ledger: whether the data set is charged to a ledger, which marks it.
        """
        path = data_path(data.dataset)
        if has_ledger and path is not None and not address_of(path):
            mark = mark_path(expand_ranges(path)[0])
            if os.access(mark.parent, os.W_OK):
                return cls(base_path=mark.with_name(mark.name.removesuffix(MARK) + SLOTS))
        place = data.dataset if path is None else address_of(path) or str(path.resolve())
        identity = repr((place, data.unit_column))
        return cls(base_path=root / _FOLDER / hashlib.blake2b(identity.encode(), digest_size=12).hexdigest())

    def path(self, capacity: int) -> Path:
        """Return the file of the table with this number of slots."""
        return self.base_path.with_name(f"{self.base_path.name}-{capacity}.npz")

    def holding(self, capacity: int, ids: Ids) -> SlotTable:
        """Return the stored table, extended by slots for the new ones of these ids; `keep` writes it.

        Raises:
          ConfigError: there are more ids than slots.
          StorageError: the file cannot be read, or its table has another number of slots.
        """
        path = self.path(capacity)
        self._file_contents[capacity] = content = _content(path)
        try:
            table = SlotTable.empty(capacity) if content is None else SlotTable.from_bytes(content)
        except DataError as error:
            raise StorageError(f"{path} is not a readable slot table. Restore it") from error
        if table.capacity != capacity:
            raise StorageError(f"{path} must have {capacity} slots; got {table.capacity}. Restore its table")
        return table.holding(ids, SecureGenerator())

    def keep(self, table: SlotTable) -> None:
        """Write a table from `holding`, for all later sweeps.

        Raises:
          StorageError: another process has written a table in the meantime, or the table cannot be written.
        """
        path = self.path(table.capacity)
        try:
            make_folder(path.parent)
            with FileLock(f"{path}.lock"):
                if _content(path) != self._file_contents[table.capacity]:
                    raise StorageError(f"another sweep wrote {path} meanwhile. Start this sweep again")
                with replacing(path, mode=0o600) as file:
                    file.write(table.to_bytes())
        except OSError as error:
            raise StorageError(f"the slot table {path} cannot be written ({type(error).__name__})") from error


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"{path} is not a readable slot table. Restore it") from error
