"""Rows as version 0.1.0 could write them: a data set's keyed fingerprint, in a part that no export holds."""

from __future__ import annotations

from dpgcl_core.ledger.chain import next_entry
from dpgcl_core.ledger.ledger import Ledger

TAG = "5c" * 32


def add_fingerprint(ledger: Ledger, dataset_id: str) -> None:
    """Adds a row with a trusted part."""
    with ledger._session.writing() as draft:
        last, trusted = draft.books.last, {"key_id": "ab" * 8, "tag": TAG}
        draft.entries.append(next_entry(last, "fingerprint", {"dataset_id": dataset_id}, trusted=trusted))
