"""One process's view of a ledger: its transactions read every new row before they add a row."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from dpgcl_core.errors import LedgerError
from dpgcl_core.ledger.books import Books
from dpgcl_core.ledger.chain import Entry, checked_entries, next_entry
from dpgcl_core.ledger.store import LedgerStore


@dataclass
class Draft:
    """The rows that one transaction will add; the books include them only once they are on disk."""

    books: Books
    entries: list[Entry] = field(default_factory=list)

    def add(self, kind: str, **facts: Any) -> Entry:
        """Add a row to the draft and return it."""
        last = self.entries[-1] if self.entries else self.books.last
        self.entries.append(next_entry(last, kind, facts))
        return self.entries[-1]


@dataclass
class LedgerSession:
    """The books as this process has read them; every access reads new rows first.

    Args:
      store: the rows' storage.
    """

    store: LedgerStore
    _books: Books = field(default_factory=Books)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @contextmanager
    def reading(self) -> Iterator[Books]:
        """Give access to the up-to-date books.

        Raises:
          LedgerError: the ledger is missing, unreachable or tampered with.
        """
        with self._lock:
            with self.store.reading() as connection:
                self._catch_up(connection)
            yield self._books

    @contextmanager
    def writing(self) -> Iterator[Draft]:
        """Run one transaction: read all rows, let the caller check and add rows, and write these to disk.

        Raises:
          LedgerError: as in `reading`, or the ledger cannot be written; nothing was added.
        """
        with self._lock:
            with self.store.writing() as connection:
                self._catch_up(connection)
                draft = Draft(self._books)
                yield draft
                self.store.add(connection, draft.entries)
            for entry in draft.entries:
                self._books.apply(entry)

    def _catch_up(self, connection: Connection) -> None:
        """Apply the rows added since the last access, after checking that the last known row is unchanged."""
        books = self._books
        last = books.last
        rows = self.store.rows(connection, first=last.number if last else 1)
        if last is not None:
            seen = (last.number, last.text, last.entry_hash, last.trusted_text)
            if not rows or rows.pop(0) != seen:
                raise LedgerError(
                    f"the ledger was tampered with: row {last.number} has changed since it was read"
                )
        elif not rows:
            raise LedgerError(f"there is no ledger in {self.store.name}")
        for entry in checked_entries(rows, last):
            books.apply(entry)
