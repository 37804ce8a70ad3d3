"""The ledger's hash chain: what was edited, deleted, cut off or written anew is found."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import LedgerError
from dpgcl_core.ledger.account import PlannedTraining
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.chain import GENESIS, Entry, canonical, checked_entries, next_entry
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.report import verified
from dpgcl_core.ledger.store import TABLE
from tests.dpgcl_core.ledger.written_before import TAG, add_fingerprint

STEPS = StepClass(sampling_prob=0.01, noise_multiplier=1.0)
CAP = Cap(epsilon=4.0, delta=1e-5, order=4.0)


@pytest.fixture
def ledger(ledger_url: str) -> Ledger:
    created = Ledger.create(ledger_url)
    created.register("scans", CAP, num_records_public=10_000)
    add_fingerprint(created, "scans")
    for label in "abc":
        created.reserve("scans", [PlannedTraining(label=label, step_class=STEPS, num_steps=10)])
    return created


def tamper(ledger: Ledger, *statements: str, **values: Any) -> None:
    """Changes rows as an administrator can: without the triggers."""
    engine = ledger._session.store.engine
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            for trigger in ("update", "delete", "insert"):
                connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS {TABLE}_{trigger}")
        else:
            connection.exec_driver_sql(f"ALTER TABLE {TABLE} DISABLE TRIGGER USER")
        for statement in statements:
            connection.execute(sqlalchemy.text(statement), values)


def rewrite(ledger: Ledger, entries: list[Entry]) -> None:
    """Replaces all rows by others."""
    tamper(ledger, f"DELETE FROM {TABLE}")
    with ledger._session.store.writing() as connection:
        ledger._session.store.add(connection, entries)


def chained(texts: list[dict[str, Any]]) -> list[Entry]:
    """A flawless chain of the facts given."""
    entries: list[Entry] = []
    for facts in texts:
        entry = next_entry(entries[-1] if entries else None, str(facts["kind"]), facts)
        entries.append(entry)
    return entries


def test_untouched_ledger_is_whole(ledger: Ledger) -> None:
    head = ledger.head()
    ledger.reserve("scans", [PlannedTraining(label="d", step_class=STEPS, num_steps=10)])
    assert ledger.verify(against=head).head == ledger.head()


@pytest.mark.parametrize("number", [1, 4, 6])
def test_edited_row_is_found(ledger: Ledger, number: int) -> None:
    text = ledger.entries()[number - 1].text
    edited = re.sub(r'"time":"2', '"time":"1', text)
    assert edited != text
    tamper(ledger, f"UPDATE {TABLE} SET content = :edited WHERE number = {number}", edited=edited)
    with pytest.raises(LedgerError, match=f"tampered with: row {number}"):
        ledger.verify()


def test_edited_row_with_its_hash_recomputed_is_found(ledger: Ledger) -> None:
    before, entry = ledger.entries()[3:5]
    facts = {k: v for k, v in entry.facts.items() if k != "number"}
    forged = next_entry(before, entry.kind, facts | {"num_steps": 1})
    tamper(
        ledger,
        f"UPDATE {TABLE} SET content = :text, entry_hash = :hash WHERE number = {entry.number}",
        text=forged.text,
        hash=forged.entry_hash,
    )
    with pytest.raises(LedgerError, match=f"tampered with: row {entry.number + 1}"):
        ledger.verify()


def test_deleted_row_is_found(ledger: Ledger) -> None:
    tamper(ledger, f"DELETE FROM {TABLE} WHERE number = 4")
    with pytest.raises(LedgerError, match="row 5 follows row 3"):
        ledger.verify()


def test_cut_off_tail_is_found_by_a_statement(ledger: Ledger) -> None:
    statement = ledger.statement("scans")
    tamper(ledger, f"DELETE FROM {TABLE} WHERE number > 4")
    ledger.verify()  # a chain alone cannot show it
    with pytest.raises(LedgerError, match="its tail was cut off"):
        ledger.verify(against=statement.head)


def test_cut_off_tail_is_found_by_the_mark_on_the_data(ledger: Ledger, tmp_path: Path) -> None:
    data = tmp_path / "scans.npz"
    data.write_bytes(b"records")
    ledger.bind("scans", data)
    ledger.reserve("scans", [PlannedTraining(label="d", step_class=STEPS, num_steps=10)])
    tamper(ledger, f"DELETE FROM {TABLE} WHERE number > 4")
    with pytest.raises(LedgerError, match="lacks rows 5 to 7"):
        Ledger.open(str(ledger._session.store.url.render_as_string(hide_password=False))).bind("scans", data)


def test_rewritten_chain_is_found_by_a_statement(ledger: Ledger) -> None:
    statement = ledger.statement("scans")
    facts = [dict(entry.facts) for entry in ledger.entries() if entry.kind != "fingerprint"]
    facts[-1]["num_steps"] = 1
    rewrite(ledger, chained([*facts, {**facts[-1], "label": "padding"}]))
    ledger.verify()
    with pytest.raises(LedgerError, match="was rewritten"):
        ledger.verify(against=statement.head)


def test_statement_of_another_ledger_is_refused(ledger: Ledger) -> None:
    head = dataclasses.replace(ledger.head(), ledger_id="0123456789abcdef")
    with pytest.raises(LedgerError, match="the statement names ledger 0123456789abcdef"):
        ledger.verify(against=head)


def test_row_that_no_rule_admitted_is_found(ledger: Ledger) -> None:
    facts = [dict(entry.facts) for entry in ledger.entries() if entry.kind != "fingerprint"]
    rewrite(ledger, chained([*facts, {**facts[-1], "label": "d", "num_steps": 10_000_000}]))
    with pytest.raises(LedgerError, match="row 6 of the ledger is invalid: the cap"):
        ledger.verify()


@pytest.mark.parametrize("change", [{"order": 8.0}, {"delta": 1e-4}, {"sealed_epsilon": 0.01}])
def test_row_that_changes_the_rule_of_a_cap_is_found(ledger: Ledger, change: dict[str, float]) -> None:
    facts = [dict(entry.facts) for entry in ledger.entries() if entry.kind != "fingerprint"]
    changed = {"kind": "cap", "dataset_id": "scans", "cap": CAP.facts() | change}
    rewrite(ledger, chained([*facts, changed]))
    with pytest.raises(LedgerError, match="it changes a cap in more than epsilon"):
        ledger.verify()


def test_row_that_registers_too_large_a_delta_is_found(ledger: Ledger) -> None:
    facts = [dict(entry.facts) for entry in ledger.entries()[:2]]
    rewrite(ledger, chained([facts[0], facts[1] | {"num_records_public": 10**6}]))
    with pytest.raises(LedgerError, match="row 2 of the ledger is invalid: target_delta"):
        ledger.verify()


@pytest.mark.parametrize("change", ["'{}'", "NULL"])
def test_edited_fingerprint_is_found(ledger: Ledger, change: str) -> None:
    tamper(ledger, f"UPDATE {TABLE} SET trusted = {change} WHERE number = 3")
    with pytest.raises(LedgerError, match="the trusted part of row 3"):
        ledger.verify()


def test_tampered_ledger_charges_nothing(ledger: Ledger) -> None:
    tamper(ledger, f"UPDATE {TABLE} SET content = '{{}}' WHERE number = 4")
    with pytest.raises(LedgerError, match="tampered"):
        Ledger.open(ledger.url)


def test_last_row_that_changes_under_an_open_ledger_is_found(ledger: Ledger) -> None:
    tamper(ledger, f"UPDATE {TABLE} SET content = '{{}}' WHERE number = 6")
    with pytest.raises(LedgerError, match="row 6 has changed since it was read"):
        ledger.reserve("scans", [PlannedTraining(label="d", step_class=STEPS, num_steps=10)])


def test_ledger_cut_off_under_an_open_ledger_is_found(ledger: Ledger) -> None:
    tamper(ledger, f"DELETE FROM {TABLE} WHERE number > 4")
    with pytest.raises(LedgerError, match="row 6 has changed since it was read"):
        ledger.head()


@pytest.mark.parametrize(
    "statement",
    [
        f"UPDATE {TABLE} SET content = '{{}}'",
        f"DELETE FROM {TABLE} WHERE number = 6",
        f"INSERT INTO {TABLE} VALUES (9, '{{}}', 'x', NULL)",
    ],
)
def test_database_refuses_what_is_not_an_appended_row(ledger: Ledger, statement: str) -> None:
    before = ledger.entries()
    with (
        pytest.raises(LedgerError, match="rows are only added"),
        ledger._session.store.writing() as connection,
    ):
        connection.execute(sqlalchemy.text(statement))
    assert ledger.entries() == before


def test_database_refuses_to_replace_a_row(ledger: Ledger) -> None:
    engine = ledger._session.store.engine
    replace = "INSERT OR REPLACE INTO" if engine.dialect.name == "sqlite" else "TRUNCATE"
    values = " VALUES (6, '{}', 'x', NULL)" if engine.dialect.name == "sqlite" else ""
    with (
        pytest.raises(LedgerError, match="rows are only added"),
        ledger._session.store.writing() as connection,
    ):
        connection.execute(sqlalchemy.text(f"{replace} {TABLE}{values}"))


def test_ledger_of_a_newer_version_is_refused(ledger: Ledger) -> None:
    last = ledger.entries()[-1]
    text = canonical({**last.facts, "format": 2, "number": last.number + 1})
    sealed = hashlib.sha256(f"{last.entry_hash}\n{text}".encode()).hexdigest()
    forged = dataclasses.replace(next_entry(last, "reserve", {}), text=text, entry_hash=sealed)
    with ledger._session.store.writing() as connection:
        ledger._session.store.add(connection, [forged])
    with pytest.raises(LedgerError, match=r"row 7 .* format 2, .* update dpgcl"):
        Ledger.open(ledger.url)


def test_unknown_kind_of_entry_is_refused(ledger: Ledger) -> None:
    rewrite(ledger, chained([dict(ledger.entries()[0].facts), {"kind": "refund"}]))
    with pytest.raises(LedgerError, match="row 2"):
        Ledger.open(ledger.url)


def test_clock_behind_the_last_entry_is_recorded_monotone_and_noted() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    first = next_entry(None, "ledger", {"ledger_id": "x"}, now=now)
    second = next_entry(first, "register", {}, now=now - timedelta(seconds=90))
    assert second.time == first.time
    assert second.facts["clock_behind_seconds"] == 90


def test_clock_that_went_backwards_is_noted_by_verify() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    first = next_entry(None, "ledger", {"ledger_id": "x"}, now=now)
    facts = {
        "dataset_id": "scans",
        "unit": "record",
        "neighboring_relation": "add or remove one record",
        "num_records_public": 1000,
        "cap": CAP.facts(),
    }
    second = next_entry(first, "register", facts, now=now - timedelta(seconds=90))
    assert verified([first, second], None).notes == ("entry 2: the clock was 90 s behind the previous entry",)


def test_chain_begins_with_the_genesis_hash() -> None:
    entry = next_entry(None, "ledger", {"ledger_id": "x"})
    assert entry.entry_hash == hashlib.sha256(f"{GENESIS}\n{entry.text}".encode()).hexdigest()


def test_every_row_is_canonical_json_of_its_facts(ledger: Ledger) -> None:
    for entry in ledger.entries():
        assert entry.text == canonical(json.loads(entry.text))


def test_chain_without_its_trusted_parts_can_be_checked(ledger: Ledger) -> None:
    rows = [(e.number, e.text, e.entry_hash, None) for e in ledger.entries()]
    assert len(list(checked_entries(rows, with_trusted=False))) == len(rows)


def test_public_text_of_a_fingerprint_does_not_contain_it(ledger: Ledger) -> None:
    assert TAG in str([entry.trusted_text for entry in ledger.entries()])
    assert TAG not in "".join(entry.text for entry in ledger.entries())
