"""Faults of every kind: the charge is never below what was spent, and nothing uncharged goes on."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import BudgetExceeded, LedgerError
from dpgcl_core.ledger.account import PlannedTraining, Reservation
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger

STEPS = StepClass(sampling_prob=0.01, noise_multiplier=1.0)
QUOTA = 400
QUOTA_CAP = Cap(epsilon=8.0, delta=1e-5, quotas=((STEPS, QUOTA),))
RDP_CAP = Cap(epsilon=4.0, delta=1e-5, order=4.0)
FORK = multiprocessing.get_context("fork")  # no import of torch in every process
NUM_STEPS = 8


@pytest.fixture
def ledger(ledger_url: str) -> Ledger:
    return registered(Ledger.create(ledger_url))


@pytest.fixture
def sqlite_ledger(tmp_path: Path) -> Ledger:
    return registered(Ledger.create(str(tmp_path / "ledger.db"), wait_seconds=0.2))


def registered(ledger: Ledger) -> Ledger:
    ledger.register("quotas", QUOTA_CAP, num_records_public=10_000)
    ledger.register("scans", RDP_CAP, num_records_public=10_000)
    return ledger


def reserve(ledger: Ledger, num_steps: int, label: str = "trial", dataset: str = "scans") -> Reservation:
    return ledger.reserve(dataset, [PlannedTraining(label=label, step_class=STEPS, num_steps=num_steps)])[0]


def train(ledger: Ledger, reservation: Reservation, drawn: Callable[[int], None], first: int = 0) -> None:
    """A stand-in for a training: says of each step that it is drawn, confirms at every checkpoint."""
    for step in range(first, NUM_STEPS):
        if step % 4 == 0:
            ledger.confirm(reservation)
        drawn(step)


def path_of(ledger: Ledger) -> Path:
    return Path(str(ledger._session.store.url.database))


def hammer(url: str, worker: int, dataset: str, notes: Path) -> None:
    """Reserves, extends and settles at random until the budget is refused; notes every charge it got."""
    ledger, chance = Ledger.open(url), random.Random(worker)
    with (notes / str(worker)).open("w", buffering=1) as file:
        for trial in range(1000):
            try:
                reservation = reserve(ledger, 10, f"{worker}-{trial}", dataset)
                file.write(f"reserve {reservation.label} {reservation.num_steps}\n")
                if chance.random() < 0.3:
                    extended = ledger.extend(reservation, 2)
                    file.write(f"extend {extended.label} {extended.num_steps}\n")
            except BudgetExceeded:
                return
            if chance.random() < 0.4:
                executed = chance.randrange(10)
                ledger.settle(reservation, executed)
                file.write(f"settle {reservation.label} {executed}\n")


@pytest.mark.parametrize("dataset", ["quotas", "scans"])
def test_eight_processes_never_overspend_and_lose_no_row(
    ledger: Ledger, tmp_path: Path, dataset: str
) -> None:
    if dataset == "scans":  # a cap that holds about as many steps as the quotas
        cost = RDP_CAP.rdp_filter().cost(STEPS, 1)
        taken = RDP_CAP.rdp_filter().rdp_budget - QUOTA * cost
        ledger.reserve_sealed("scans", label="s", epsilon=3.0, delta=1e-6, rdp_curve=lambda _: taken)
    notes = tmp_path / "notes"
    notes.mkdir()
    workers = [FORK.Process(target=hammer, args=(ledger.url, n, dataset, notes)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 8
    noted = [line.split() for file in notes.iterdir() for line in file.read_text().splitlines()]
    charged = {label: int(num_steps) for _, label, num_steps in noted}
    account = {r.label: r.num_steps_charged for r in reservations(ledger, dataset)}
    assert account == charged
    assert QUOTA - 10 * 8 < sum(charged.values()) <= QUOTA
    rows = Counter(entry.kind for entry in ledger.entries())
    assert [rows[kind] for kind in ("reserve", "extend", "settle")] == [
        sum(kind == noted_kind for noted_kind, _, _ in noted) for kind in ("reserve", "extend", "settle")
    ]
    ledger.verify()


def exit_codes(target: Callable[[int], object], count: int = 8) -> list[int]:
    """Runs so many processes at once; a process that is refused by the ledger ends with code 3."""

    def run(worker: int) -> None:
        try:
            target(worker)
        except LedgerError:
            os._exit(3)

    workers = [FORK.Process(target=run, args=(n,)) for n in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sorted(worker.exitcode or 0 for worker in workers)


def test_one_of_eight_processes_gets_a_label(ledger: Ledger) -> None:
    assert exit_codes(lambda _: reserve(Ledger.open(ledger.url), 1)) == [0] + [3] * 7


def test_one_of_eight_processes_creates_a_ledger(ledger_url: str) -> None:
    assert exit_codes(lambda _: Ledger.create(ledger_url)) == [0] + [3] * 7
    assert Ledger.open(ledger_url).head().num_entries == 1


def test_one_ledger_object_serves_several_threads(ledger: Ledger) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda n: reserve(ledger, 1, f"trial-{n}"), range(40)))
    assert len({reservation.number for reservation in found}) == 40
    ledger.verify()


def test_one_ledger_object_serves_a_forked_process(ledger: Ledger) -> None:
    ledger.head()
    assert exit_codes(lambda n: reserve(ledger, 1, f"trial-{n}"), count=2) == [0, 0]
    assert reserve(ledger, 1, "parent").number == 6


def reservations(ledger: Ledger, dataset: str) -> list[Reservation]:
    labels = [e.facts["label"] for e in ledger.entries() if e.kind == "reserve"]
    found = [ledger.reservation(dataset, label) for label in labels]
    return [reservation for reservation in found if reservation is not None]


def spend(url: str, notes: Path, tick: Callable[[], None]) -> None:
    """A driver that trains one trial after the other; after a crash it resumes the last from its beginning.

    A step is noted before it runs, so the notes are what may really have been spent.
    """
    ledger = Ledger.open(url)
    store = ledger._session.store
    add = store.add

    def ticking_add(*arguments: Any) -> None:
        tick()
        add(*arguments)
        tick()  # written, and not committed

    object.__setattr__(store, "add", ticking_add)
    with notes.open("a", buffering=1) as file:

        def drawn(step: int) -> None:
            file.write(f"{label}\n")
            tick()

        for trial in range(100):
            label = f"trial-{trial}"
            known = ledger.reservation("scans", label)
            if known is not None and known.num_steps_executed is not None:
                continue
            reservation = ledger.extend(known, NUM_STEPS) if known else reserve(ledger, NUM_STEPS, label)
            tick()
            train(ledger, reservation, drawn)
            tick()
            if known is None:
                ledger.settle(reservation, NUM_STEPS)
            tick()


def spent_and_charged(ledger: Ledger, notes: Path) -> list[tuple[int, int]]:
    """Steps noted and steps charged, of every trial that noted any."""
    noted = Counter(notes.read_text().split() if notes.exists() else [])
    charged = {r.label: r.num_steps_charged for r in reservations(ledger, "scans")}
    return [(num, charged.get(label, 0)) for label, num in noted.items()]


def killed_after(url: str, notes: Path, num_ticks: int) -> int | None:
    """Runs `spend` in a process that kills itself, as kill -9 would, at its `num_ticks`-th tick."""

    def run() -> None:
        ticks = iter(range(num_ticks))

        def tick() -> None:
            if next(ticks, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        spend(url, notes, tick)

    process = FORK.Process(target=run)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.ci
def test_kill_at_any_point_leaves_the_charge_at_least_as_large_as_the_spend(
    ledger: Ledger, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    for num_ticks in range(30):  # a trial has fifteen ticks
        assert killed_after(ledger.url, notes, num_ticks) == -signal.SIGKILL
        assert all(spent <= charged for spent, charged in spent_and_charged(ledger, notes))
    assert sum(spent for spent, _ in spent_and_charged(ledger, notes)) > 200
    ledger.verify()


@pytest.mark.ci
def test_kill_at_a_random_moment_leaves_the_charge_at_least_as_large_as_the_spend(
    sqlite_ledger: Ledger, tmp_path: Path
) -> None:
    notes, chance = tmp_path / "notes", random.Random(0)
    for _ in range(15):
        process = FORK.Process(target=spend, args=(sqlite_ledger.url, notes, lambda: time.sleep(0.001)))
        process.start()
        time.sleep(0.02 + chance.random() * 0.1)
        process.kill()
        process.join()
        assert all(spent <= charged for spent, charged in spent_and_charged(sqlite_ledger, notes))
    sqlite_ledger.verify()


def test_resumed_training_is_refused_when_its_repeated_steps_do_not_fit(ledger: Ledger) -> None:
    reservation = reserve(ledger, QUOTA, dataset="quotas")
    with pytest.raises(BudgetExceeded):
        ledger.extend(reservation, NUM_STEPS)


def test_training_stops_at_its_next_checkpoint_when_the_ledger_is_gone(sqlite_ledger: Ledger) -> None:
    steps: list[int] = []

    def drawn(step: int) -> None:
        steps.append(step)
        if step == 1:
            path_of(sqlite_ledger).unlink()

    reservation = reserve(sqlite_ledger, NUM_STEPS)
    with pytest.raises(LedgerError, match="there is no such file"):
        train(sqlite_ledger, reservation, drawn)
    assert steps == [0, 1, 2, 3]
    assert not path_of(sqlite_ledger).exists()


def test_training_stops_when_another_ledger_takes_the_place_of_its_own(
    sqlite_ledger: Ledger, tmp_path: Path
) -> None:
    reservation = reserve(sqlite_ledger, NUM_STEPS)
    registered(Ledger.create(str(tmp_path / "other.db")))
    os.replace(tmp_path / "other.db", path_of(sqlite_ledger))
    with pytest.raises(LedgerError, match="tampered"):
        train(sqlite_ledger, reservation, lambda step: None)


def test_locked_ledger_is_refused_after_the_wait(sqlite_ledger: Ledger) -> None:
    other = sqlite3.connect(path_of(sqlite_ledger), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(LedgerError, match=r"another process locked it for more than 0\.2 s"):
        reserve(sqlite_ledger, 1)
    other.execute("ROLLBACK")
    assert reserve(sqlite_ledger, 1).num_steps == 1
    other.close()


@pytest.mark.server
@pytest.mark.ci
def test_locked_postgresql_ledger_is_refused_after_the_wait(postgres_url: str) -> None:
    ledger = registered(Ledger.create(postgres_url))
    impatient = Ledger.open(postgres_url, wait_seconds=0.2)
    with ledger._session.writing(), pytest.raises(LedgerError, match=r"locked it for more than 0\.2 s"):
        reserve(impatient, 1)
    assert reserve(impatient, 1).num_steps == 1


def test_full_disk_charges_nothing_and_says_so(sqlite_ledger: Ledger) -> None:
    def limit(connection: Any, record: Any) -> None:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")

    before = sqlite_ledger.head()
    event.listen(sqlite_ledger._session.store.engine, "connect", limit)
    with pytest.raises(LedgerError, match="database or disk is full"):
        reserve(sqlite_ledger, 1, "x" * 10_000)
    assert sqlite_ledger.head() == before


def test_missing_ledger_is_refused_and_not_created(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="there is no such file"):
        Ledger.open(str(tmp_path / "ledger.db"))
    assert list(tmp_path.iterdir()) == []


def test_database_without_a_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    with pytest.raises(LedgerError, match="the database contains no ledger"):
        Ledger.open(str(path))


def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(LedgerError, match="not a database"):
        Ledger.open(str(path))


def test_server_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(LedgerError) as caught:
        Ledger.open("postgresql://user:secret@127.0.0.1:1/ledger")
    assert "127.0.0.1" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["mysql://host/db", "sqlite://", "sqlite:///:memory:", "://"])
def test_url_that_cannot_hold_a_ledger_is_refused(url: str) -> None:
    with pytest.raises(LedgerError):
        Ledger.open(url)


def test_ledger_file_is_for_its_owner_alone(sqlite_ledger: Ledger) -> None:
    assert path_of(sqlite_ledger).stat().st_mode & 0o077 == 0


def test_relative_path_means_the_same_ledger_after_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = registered(Ledger.create("ledger.db"))
    monkeypatch.chdir("/")
    assert Ledger.open(ledger.url).head() == ledger.head()
