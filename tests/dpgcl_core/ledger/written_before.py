"""Rows as version 0.1.0 could write them: a data set's keyed fingerprint, in a part that no export holds."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dpgcl_core.ledger.chain import Entry, canonical, next_entry
from dpgcl_core.ledger.ledger import Ledger

TAG = "5c" * 32


def fingerprint(last: Entry | None, facts: Mapping[str, Any]) -> Entry:
    """Returns the row that follows `last`, with a trusted part and its nonce."""
    trusted = canonical({"key_id": "ab" * 8, "tag": TAG, "nonce": secrets.token_hex(32)})
    digest = hashlib.sha256(trusted.encode()).hexdigest()
    row = next_entry(last, "fingerprint", {**facts, "trusted_sha256": digest})
    return replace(row, trusted_text=trusted)


def add_fingerprint(ledger: Ledger, dataset_id: str) -> None:
    """Adds a row with a trusted part."""
    with ledger._session.writing() as draft:
        draft.entries.append(fingerprint(draft.books.last, {"dataset_id": dataset_id}))
