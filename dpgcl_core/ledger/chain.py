"""The ledger's hash chain: one canonical text per entry, and a hash of this text and the previous hash.

`hash_1 = SHA-256(GENESIS, text_1)`, `hash_k = SHA-256(hash_(k−1), text_k)`. Whoever knows the last hash and
the number of rows can distinguish this ledger from any other with at least that many rows: an edited,
deleted or inserted row changes every later hash, and a truncated tail changes the number. The chain does not
itself reveal that its tail was cut off or that all of it was rewritten; the head in a privacy statement does.

A row of version 0.1.0 may have a *trusted* part, a data set's fingerprint. The chain covers the hash of this
part and a nonce, so an export without the part can still be verified, and reveals nothing about the part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dpgcl_core.errors import LedgerError

RECORD = "record"
FORMAT = 1
GENESIS = "0" * 64


@dataclass(frozen=True, kw_only=True)
class Head:
    """The end of a ledger at some moment; privacy statements contain it.

    Attributes:
      ledger_id: the ledger's id.
      num_entries: number of rows so far.
      head_hash: hash of the last row, hexadecimal.
      num_budgets: bound on the data set's charges, as a multiple of its highest cap, see `Account`; not
        hashed. It exceeds 1 only after a loss of rows was charged on top. It is 1 for marks, plans and
        statements without it, since their version could not state a loss.
    """

    ledger_id: str
    num_entries: int
    head_hash: str
    num_budgets: int = 1

    def __post_init__(self) -> None:
        numbers = (self.num_entries, self.num_budgets)
        are_integers = all(isinstance(each, int) and not isinstance(each, bool) for each in numbers)
        are_texts = isinstance(self.ledger_id, str) and isinstance(self.head_hash, str)
        if not (are_integers and are_texts and min(numbers) >= 1 and len(self.head_hash) == 64):
            raise LedgerError(
                "a ledger's head needs ledger_id (text), num_entries (at least 1), head_hash (64 digits) and "
                f"num_budgets (at least 1); got {self.ledger_id!r}, {self.num_entries!r}, "
                f"{self.head_hash!r}, {self.num_budgets!r}"
            )

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Head:
        """Return the head from the values of a mark, a plan or a statement; other values are ignored.

        Raises:
          KeyError: a value is missing.
          LedgerError: a value is invalid.
        """
        return cls(
            ledger_id=facts["ledger_id"],
            num_entries=facts["num_entries"],
            head_hash=facts["head_hash"],
            num_budgets=facts.get("num_budgets", 1),
        )


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the ledger.

    Attributes:
      number: 1 for the first row; defines the order, independently of clocks.
      text: canonical JSON of `facts`; this text is hashed.
      entry_hash: SHA-256 of the previous row's hash and of `text`, hexadecimal.
      trusted_text: canonical JSON of the part that stays on the trusted side, with its nonce; or None.
      facts: the content of `text`; always has `kind`, `time` and `number`.
    """

    number: int
    text: str
    entry_hash: str
    trusted_text: str | None = field(default=None, repr=False)
    facts: Mapping[str, Any] = field(compare=False, repr=False)

    @property
    def kind(self) -> str:
        """Kind of the entry, for example `reserve`."""
        return str(self.facts["kind"])

    @property
    def time(self) -> str:
        """Time in UTC; never earlier than the previous entry's time."""
        return str(self.facts["time"])


def canonical(values: Mapping[str, Any]) -> str:
    """Return the canonical JSON of `values`: sorted, without spaces, ASCII, floats in their shortest form.

    >>> canonical({"b": 0.1, "a": "ε"})
    '{"a":"\\\\u03b5","b":0.1}'
    """
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def next_entry(
    last: Entry | None,
    kind: str,
    facts: Mapping[str, Any],
    *,
    now: datetime | None = None,
) -> Entry:
    """Create the entry to append after `last`, or the first entry if `last` is None.

    `now` is the clock's time by default. If it is before the last entry's time, the new entry repeats that
    time and records the difference in seconds.
    """
    number = last.number + 1 if last else 1
    values: dict[str, Any] = {**facts, "format": FORMAT, "kind": kind, "number": number}
    moment = now or datetime.now(UTC)
    if last and moment < (last_moment := datetime.fromisoformat(last.time)):
        values["clock_behind_seconds"] = (last_moment - moment).total_seconds()
        moment = last_moment
    values["time"] = moment.isoformat(timespec="microseconds")
    text = canonical(values)
    return Entry(
        number=number,
        text=text,
        entry_hash=_hash(last.entry_hash if last else GENESIS, text),
        facts=values,
    )


def checked_entries(
    rows: Iterable[tuple[int, str, str, str | None]],
    last: Entry | None = None,
    *,
    with_trusted: bool = True,
) -> Iterator[Entry]:
    """Yield the rows after `last` as entries, each checked against the previous entry.

    Args:
      rows: (number, text, entry_hash, trusted_text) in order.
      last: the entry before the first row; None at the beginning of the chain.
      with_trusted: whether the trusted parts are required; an export may omit them.

    Raises:
      LedgerError: a row is missing, edited or out of place, or was written by a newer version.
    """
    for number, text, entry_hash, trusted_text in rows:
        before = last.number if last else 0
        if number != before + 1:
            raise LedgerError(f"the ledger was tampered with: row {number} follows row {before}")
        if entry_hash != _hash(last.entry_hash if last else GENESIS, text):
            raise LedgerError(f"the ledger was tampered with: row {number} or an earlier row was changed")
        facts = _parse_facts(number, text)
        if with_trusted and _sha256(trusted_text) != facts.get("trusted_sha256"):
            raise LedgerError(f"the ledger was tampered with: the trusted part of row {number} was edited")
        last = Entry(number=number, text=text, entry_hash=entry_hash, trusted_text=trusted_text, facts=facts)
        yield last


def _parse_facts(number: int, text: str) -> dict[str, Any]:
    """Parse a row's JSON, or raise LedgerError if it is invalid or of a newer format than `FORMAT`."""
    try:
        facts = json.loads(text)
        row_format = facts["format"]
        if row_format > FORMAT:
            raise LedgerError(
                f"row {number} of the ledger has format {row_format}, but this version reads formats up to "
                f"{FORMAT}; update dpgcl"
            )
        if facts["number"] != number or not facts["kind"] or not datetime.fromisoformat(facts["time"]):
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, LedgerError):
            raise
        raise LedgerError(f"row {number} of the ledger is not a valid entry") from error
    return dict(facts)


def _hash(previous_hash: str, text: str) -> str:
    return hashlib.sha256(f"{previous_hash}\n{text}".encode()).hexdigest()


def _sha256(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()
