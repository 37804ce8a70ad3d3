"""Old copies of a ledger, two ledgers at once, and crashes between a charge and its mark."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import BudgetExceeded, LedgerError
from dpgcl_core.ledger.account import PlannedTraining, Reservation
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.marks import MARK, mark_path, read_mark
from dpgcl_core.ledger.report import read_head
from dpgcl_core.ledger.store import LedgerStore

FORK = multiprocessing.get_context("fork")
STEPS = StepClass(sampling_prob=0.01, noise_multiplier=1.0)
CAP = Cap(epsilon=4.0, delta=1e-5, order=8.0, sealed_epsilon=1.0, sealed_delta=1e-6)
QUOTAS = Cap(epsilon=4.0, delta=1e-5, quotas=((STEPS, 1000),))


def registered(path: Path, *names: str, cap: Cap = CAP) -> Ledger:
    ledger = Ledger.create(str(path))
    for name in names:
        ledger.register(name, cap, num_records_public=10_000)
    return ledger


def reserve(ledger: Ledger, label: str, num_steps: int = 10, dataset: str = "scans") -> Reservation:
    planned = PlannedTraining(label=label, step_class=STEPS, num_steps=num_steps)
    return ledger.reserve(dataset, [planned])[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger of two data sets."""
    return Path(registered(tmp_path / "ledger.db", "scans", "others").url.removeprefix("sqlite:///"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data" / "scans.npz"
    file.parent.mkdir()
    file.write_bytes(b"records")
    return file


@pytest.fixture
def bound(path: Path, data: Path) -> Ledger:
    ledger = Ledger.open(str(path))
    ledger.bind("scans", data)
    return ledger


def opened(path: Path, data: Path) -> Ledger:
    """The ledger as a new process uses it."""
    ledger = Ledger.open(str(path))
    ledger.bind("scans", data)
    return ledger


def overrun(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="all are charged"):
        ledger.settle(known(ledger), 11)


CHARGES: dict[str, Callable[[Ledger], object]] = {
    "reserve": lambda ledger: reserve(ledger, "later"),
    "extend": lambda ledger: ledger.extend(known(ledger), 3),
    "settle": lambda ledger: ledger.settle(known(ledger), 4),
    "overrun": overrun,
    "sealed": lambda ledger: ledger.reserve_sealed("scans", label="s", epsilon=0.5, delta=1e-7),
}


def known(ledger: Ledger) -> Reservation:
    reservation = ledger.reservation("scans", "first")
    assert reservation is not None
    return reservation


@pytest.mark.parametrize("charge", CHARGES)
def test_copy_older_than_a_charge_is_refused_and_what_is_missing_named(
    charge: str, path: Path, data: Path, bound: Ledger
) -> None:
    reserve(bound, "first")
    shutil.copy(path, path.with_name("backup"))
    CHARGES[charge](bound)
    newest = bound.head()
    os.replace(path.with_name("backup"), path)
    with pytest.raises(LedgerError, match=r"lacks row 5.* the last row is row 4 \(reserve, "):
        opened(path, data)
    with pytest.raises(LedgerError, match="lacks row 5"):
        Ledger.open(str(path)).verify(against=newest)


def test_copy_older_by_a_whole_sweep_is_refused(path: Path, data: Path, bound: Ledger) -> None:
    shutil.copy(path, path.with_name("backup"))
    for label in "abc":
        reserve(bound, label)
    os.replace(path.with_name("backup"), path)
    with pytest.raises(LedgerError, match="lacks rows 4 to 6"):
        opened(path, data)


def test_copy_that_went_on_by_as_many_rows_is_refused(path: Path, data: Path, bound: Ledger) -> None:
    shutil.copy(path, path.with_name("backup"))
    reserve(bound, "lost")
    os.replace(path.with_name("backup"), path)
    reserve(Ledger.open(str(path)), "another", dataset="others")
    with pytest.raises(LedgerError, match="diverged from a copy"):
        opened(path, data)


def test_lost_rows_of_other_data_sets_refuse_nothing(path: Path, data: Path, bound: Ledger) -> None:
    reserve(bound, "first")
    shutil.copy(path, path.with_name("backup"))
    reserve(bound, "first", dataset="others")
    os.replace(path.with_name("backup"), path)
    assert known(opened(path, data)).num_steps == 10


def test_mark_is_never_moved_backwards_by_a_concurrent_sweep(path: Path, data: Path, bound: Ledger) -> None:
    other = opened(path, data)
    reserve(bound, "first")
    head = reserve(other, "second").number
    bound.extend(known(bound), 0)
    opened(path, data)
    mark = read_mark(data)
    assert mark is not None
    assert mark[1].num_entries == head == bound.head_of("scans").num_entries


def test_mark_of_an_earlier_build_that_knows_fewer_rows_moves_on(
    path: Path, data: Path, bound: Ledger
) -> None:
    reserve(bound, "first")
    old = mark_path(data).read_text()
    for label in "abc":
        reserve(bound, label)
    mark_path(data).write_text(old)
    (note,) = Ledger.open(str(path)).bind("scans", data)
    assert "lacks the newest 3 rows of data set 'scans'" in note
    assert opened(path, data).check_marks("scans", data) == ()
    Ledger.open(str(path)).change_cap("scans", 9.0, allow_raise=True)
    (note,) = Ledger.open(str(path)).bind("scans", data)
    assert "lacks the newest 1 row of data set 'scans': the cap was changed" in note


def test_moved_data_are_told_of_and_marked_again(path: Path, data: Path, bound: Ledger) -> None:
    reserve(bound, "first")
    moved = data.with_name("moved.npz")
    data.rename(moved)
    (note,) = Ledger.open(str(path)).bind("scans", moved)
    assert "has no mark, but data set 'scans' has charges" in note
    assert mark_path(moved).exists()


def test_mark_that_cannot_be_written_stops_before_anything_is_drawn(
    bound: Ledger, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(LedgerError, match=r"mark on .* cannot be written"):
        reserve(bound, "first")
    monkeypatch.undo()
    assert known(bound).num_steps == 10  # the charge stands
    opened(Path(bound.url.removeprefix("sqlite:///")), data)
    assert not [file for file in data.parent.iterdir() if file.suffix == ".tmp"]


# Two first uses at once


def first_use(path: Path, data: Path, ready: Any, go: Any, end: Any) -> None:
    ledger = Ledger.open(str(path))
    ready.release()
    go.wait()
    try:
        ledger.bind("scans", data)
        reserve(ledger, f"of {path.name}")
        end.put((path.name, "accepted"))
    except LedgerError as error:
        end.put((path.name, str(error)))


def uses_at_once(paths: list[Path], data: Path) -> dict[str, str]:
    """What processes are told that use the same data at the same moment, by the ledger's name."""
    ready, go, end = FORK.Semaphore(0), FORK.Event(), FORK.SimpleQueue()
    processes = [FORK.Process(target=first_use, args=(path, data, ready, go, end)) for path in paths]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    go.set()
    for process in processes:
        process.join()
    return dict(end.get() for _ in paths)


@pytest.mark.parametrize("num_tries", [3, pytest.param(25, marks=pytest.mark.ci)])
def test_of_two_ledgers_that_begin_at_once_one_is_refused_uncharged(num_tries: int, tmp_path: Path) -> None:
    for number in range(num_tries):
        paths = [tmp_path / f"{name}-{number}.db" for name in ("one", "two")]
        ledgers = [registered(path, "scans") for path in paths]
        data = tmp_path / f"{number}.npz"
        data.write_bytes(b"records")
        told = uses_at_once(paths, data)
        assert sorted(text == "accepted" for text in told.values()) == [False, True], told
        for path, ledger in zip(paths, ledgers, strict=True):
            is_charged = ledger.reservation("scans", f"of {path.name}") is not None
            assert is_charged == (told[path.name] == "accepted")
            assert is_charged or "names ledger" in told[path.name]


def test_of_two_copies_of_a_ledger_that_charge_at_once_one_is_refused(
    path: Path, data: Path, bound: Ledger
) -> None:
    twin = path.with_name("twin.db")
    shutil.copy(path, twin)
    told = uses_at_once([path, twin], data)
    assert sorted(text == "accepted" for text in told.values()) == [False, True], told


@pytest.mark.parametrize("link_error", [None, 1])
def test_mark_is_created_exclusively_by_the_file_system_alone(
    link_error: int | None, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine does not see this one's lock; and not every file system has links."""
    one, two = (registered(tmp_path / name, "scans") for name in ("one.db", "two.db"))
    link = os.link

    def link_late(source: Any, target: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        two.bind("scans", data)
        if link_error is not None:
            raise OSError(link_error, "no links here")
        link(source, target)

    monkeypatch.setattr("dpgcl_core.ledger.marks.fcntl.flock", lambda *_: None)
    monkeypatch.setattr(os, "link", link_late)
    with pytest.raises(LedgerError, match="names ledger"):
        one.bind("scans", data)
    two.bind("scans", data)


# Crashes


def charge_and_draw(path: Path, data: Path, drawn: Path) -> None:
    """A sweep as a driver does it; a line is noted before each step may be drawn."""
    ledger = opened(path, data)
    reservation = reserve(ledger, "first")
    drawn.write_text("10\n")
    ledger.extend(reservation, 5)
    drawn.write_text("15\n")
    ledger.settle(reservation, 12)


def killed_at(number: int, events: frozenset[str], folder: Path, run: Callable[[], None]) -> bool:
    """Runs in a process that ends, as by a power failure, at its `number`-th event; whether it came to it."""

    def child() -> None:
        left = [number]

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            writes = event != "open" or (
                str(arguments[0]).startswith(str(folder)) and arguments[2] & os.O_WRONLY
            )
            if event in events and writes:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)

        sys.addaudithook(hook)
        run()

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode in (0, 9)
    return process.exitcode == 9


MARK_EVENTS = frozenset(("open", "os.link", "os.rename", "os.remove"))


@pytest.mark.parametrize(
    "events",
    [
        MARK_EVENTS,
        pytest.param(MARK_EVENTS | {"sqlite3.connect", "sqlite3.connect/handle"}, marks=pytest.mark.ci),
    ],
    ids=["marks", "rows and marks"],
)
def test_crash_anywhere_leaves_a_ledger_that_goes_on_and_an_old_copy_that_does_not(
    events: frozenset[str], path: Path, tmp_path: Path
) -> None:
    number, crashed = 0, True
    while crashed:
        folder = tmp_path / str(number)
        folder.mkdir()
        data, drawn, used = folder / "scans.npz", folder / "drawn", folder / "ledger.db"
        data.write_bytes(b"records")
        shutil.copy(path, used)
        crashed = killed_at(number, events, folder, partial(charge_and_draw, used, data, drawn))
        ledger = opened(used, data)
        num_drawn = int(drawn.read_text() or 0) if drawn.exists() else 0
        assert num_drawn == 0 or known(ledger).num_steps >= num_drawn
        if num_drawn:
            shutil.copy(path, used)
            with pytest.raises(LedgerError, match="the ledger lacks row"):
                opened(used, data)
        number += 1
    assert number > 12


# Data that cannot be written beside


@pytest.fixture
def read_only(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data on a disk that the system says cannot be written; writing there fails."""
    access, open_, link = os.access, os.open, os.link

    def is_there(target: Any) -> bool:
        return str(target).startswith(str(data.parent))

    def refuse(function: Callable[..., Any], writes: Callable[..., bool], place: int) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if is_there(arguments[place]) and writes(*arguments):
                raise OSError(30, "Read-only file system")
            return function(*arguments, **more)

        return call

    monkeypatch.setattr(os, "access", lambda p, mode: not is_there(p) and access(p, mode))
    monkeypatch.setattr(os, "open", refuse(open_, lambda p, flags, *_: bool(flags & os.O_CREAT), 0))
    monkeypatch.setattr(os, "link", refuse(link, lambda *_: True, 1))
    return data


def test_read_only_data_have_their_mark_with_the_ledger(path: Path, read_only: Path) -> None:
    ledger = opened(path, read_only)
    shutil.copy(path, path.with_name("backup"))
    reserve(ledger, "first")
    assert [file.name for file in read_only.parent.iterdir()] == ["scans.npz"]
    assert path.with_name("ledger.db.marks").stat().st_mode & 0o077 == 0
    assert known(opened(path, read_only)).num_steps == 10
    os.replace(path.with_name("backup"), path)
    with pytest.raises(LedgerError, match="lacks row 4"):
        opened(path, read_only)


def test_read_only_data_are_known_by_their_content_elsewhere(
    path: Path, read_only: Path, tmp_path: Path
) -> None:
    ledger = opened(path, read_only)
    copy = Path(shutil.copy(read_only, tmp_path / "copy.npz"))
    with pytest.raises(LedgerError, match=r"data set 'scans', not as 'others', to ledger .*-id scans"):
        ledger.bind("others", copy)
    ledger.bind("scans", copy)


def test_mark_with_the_ledger_tells_neither_content_nor_guesses_of_it(path: Path, read_only: Path) -> None:
    opened(path, read_only)
    (mark,) = path.with_name("ledger.db.marks").iterdir()
    first = mark.read_text()
    mark.unlink()
    opened(path, read_only)
    assert first != mark.read_text()
    assert "records" not in first


def test_ledger_in_a_database_keeps_such_marks_with_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg", reason="PostgreSQL's driver is not installed")
    monkeypatch.setenv("HOME", "/home/somebody")
    folder = LedgerStore.at("postgresql://somebody@host/ledger").marks_folder
    assert folder == Path("/home/somebody/.dpgcl/marks")


def test_mark_beside_read_only_data_holds_although_it_cannot_follow(
    path: Path, bound: Ledger, read_only: Path
) -> None:
    reserve(opened(path, read_only), "first")
    other = registered(path.with_name("other.db"), "scans")
    with pytest.raises(LedgerError, match="names ledger"):
        other.bind("scans", read_only)


# A loss that is stated


def lost(path: Path, data: Path, num_lost: int = 20) -> Ledger:
    """A ledger whose newest charge is gone, with one open training of 10 steps."""
    ledger = opened(path, data)
    reserve(ledger, "first")
    shutil.copy(path, path.with_name("backup"))
    reserve(ledger, "gone", num_lost)
    os.replace(path.with_name("backup"), path)
    return Ledger.open(str(path))


def test_stated_loss_charges_the_whole_cap_and_the_mark_follows(path: Path, data: Path) -> None:
    ledger = lost(path, data)
    ledger.state_loss("scans", ledger.heads_of_marks("scans", data))
    again = opened(path, data)
    spent = again.read_charges("scans")
    assert (spent.rdp, spent.num_losses, spent.closed, spent.epsilon_pld) == (
        spent.rdp_budget,
        1,
        False,
        None,
    )
    assert spent.sealed_epsilon == CAP.sealed_epsilon
    with pytest.raises(BudgetExceeded):
        reserve(again, "second", 1)
    with pytest.raises(BudgetExceeded):
        again.reserve_sealed("scans", label="s", epsilon=1e-3, delta=1e-9)
    assert again.statement("scans").epsilon == CAP.epsilon
    assert "rows of 'scans' were lost; its whole cap is charged for them" in again.verify().notes[0]
    reserve(again, "first", dataset="others")  # which has lost nothing


def test_raised_cap_holds_what_it_adds_after_a_loss(path: Path, data: Path) -> None:
    ledger = lost(path, data)
    ledger.state_loss("scans", ledger.heads_of_marks("scans", data))
    ledger.change_cap("scans", 6.0, allow_raise=True)
    budgets = [Cap(**{**CAP.facts(), "epsilon": e, "quotas": ()}).rdp_filter() for e in (4.0, 6.0)]
    before = ledger.read_charges("scans", with_pld=False).rdp
    num = 0
    while True:
        try:
            reserve(ledger, f"after-{num}", 50)
        except BudgetExceeded:
            break
        num += 1
    spent = Fraction(budgets[0].rdp_budget) + Fraction(budgets[0].cost(STEPS, 50)) * num
    assert before == budgets[0].rdp_budget
    assert spent <= Fraction(budgets[1].rdp_budget) < spent + Fraction(budgets[0].cost(STEPS, 51))
    assert ledger.statement("scans").epsilon == 6.0


def test_nothing_known_before_a_loss_is_refunded_or_goes_on(path: Path, data: Path) -> None:
    ledger = lost(path, data)
    ledger.state_loss("scans", ledger.heads_of_marks("scans", data))
    with pytest.raises(LedgerError, match="would reduce its charge"):
        ledger.settle(known(ledger), 0)
    with pytest.raises(LedgerError, match="is settled"):
        ledger.extend(known(ledger), 1)


def test_closed_data_set_admits_nothing_under_any_cap(path: Path, data: Path) -> None:
    ledger = lost(path, data)
    ledger.state_loss("scans", ledger.heads_of_marks("scans", data), close=True)
    ledger.change_cap("scans", 50.0, allow_raise=True)
    with pytest.raises(BudgetExceeded, match="is closed"):
        reserve(ledger, "second", 1)
    with pytest.raises(BudgetExceeded, match="is closed"):
        ledger.reserve_sealed("scans", label="s", epsilon=0.1, delta=1e-9, rdp_curve=lambda _: 1e-3)


def test_loss_of_rows_that_were_charged_beside_is_charged_on_top(path: Path, data: Path) -> None:
    ledger = lost(path, data)
    for label in "ab":  # by a process that had not bound the data
        reserve(ledger, label, 30)
    known_rdp = ledger.read_charges("scans", with_pld=False).rdp
    ledger.state_loss("scans", ledger.heads_of_marks("scans", data))
    spent = ledger.read_charges("scans", with_pld=False)
    assert spent.rdp is not None
    assert spent.rdp_budget is not None
    assert known_rdp is not None
    assert spent.rdp > spent.rdp_budget + 0.99 * known_rdp
    with pytest.raises(LedgerError, match="no guarantee to state"):
        ledger.statement("scans")


def test_ledger_begun_anew_takes_over_with_its_cap_charged(path: Path, data: Path) -> None:
    lost(path, data)
    anew = registered(path.with_name("anew.db"), "scans")
    with pytest.raises(LedgerError, match="names ledger"):
        anew.bind("scans", data)
    anew.state_loss("scans", anew.heads_of_marks("scans", data))
    anew.bind("scans", data)
    with pytest.raises(BudgetExceeded):
        reserve(anew, "first", 1)
    assert anew.statement("scans").epsilon == CAP.epsilon
    with pytest.raises(LedgerError, match="names ledger"):
        opened(path, data)


def test_quotas_are_full_after_a_loss(data: Path, tmp_path: Path) -> None:
    registered(tmp_path / "quotas.db", "scans", cap=QUOTAS)
    ledger = lost(tmp_path / "quotas.db", data)
    ledger.state_loss("scans", ledger.heads_of_marks("scans", data))
    assert ledger.read_charges("scans").num_steps == {STEPS: 1000}
    with pytest.raises(BudgetExceeded):
        reserve(ledger, "second", 1)


@pytest.mark.parametrize("cap", [CAP, QUOTAS], ids=["rdp", "quotas"])
def test_same_backup_put_back_again_refunds_no_loss_that_was_charged_on_top(
    cap: Cap, data: Path, tmp_path: Path
) -> None:
    """Two lines of rows, each within the budget; the backup knows neither of them, nor the first loss."""
    path = tmp_path / "scans.db"
    registered(path, "scans", cap=cap)
    backup = path.read_bytes()
    reserve(opened(path, data), "first")
    path.write_bytes(backup)
    ledger = Ledger.open(str(path))
    reserve(ledger, "beside")  # by a process that had not bound the data
    ledger.state_loss("scans", ledger.heads_of_marks("scans", data), used_since=True)
    ledger.bind("scans", data)
    for num_restored in (1, 2):
        path.write_bytes(backup)
        ledger = Ledger.open(str(path))
        ledger.state_loss("scans", ledger.heads_of_marks("scans", data))
        again = opened(path, data)
        spent = again.read_charges("scans", with_pld=False)
        if spent.rdp is None or spent.rdp_budget is None:
            assert spent.num_steps == {STEPS: 2000}
        else:
            assert spent.rdp >= 2 * spent.rdp_budget
        assert spent.sealed_epsilon == 2 * cap.sealed_epsilon
        with pytest.raises(LedgerError, match="no guarantee to state"):
            again.statement("scans")
        assert "charged for them, 2 times" in again.verify().notes[0], num_restored


def test_heads_outside_carry_how_many_budgets_were_charged(path: Path, data: Path, tmp_path: Path) -> None:
    ledger = lost(path, data)
    ledger.state_loss("scans", ledger.heads_of_marks("scans", data), used_since=True)
    ledger.bind("scans", data)
    ledger.change_cap("scans", 20.0, allow_raise=True)
    reserve(ledger, "later")
    (tmp_path / "statement.json").write_text(ledger.statement("scans").to_json())
    (tmp_path / "plan.json").write_text(json.dumps({"head": vars(ledger.head_of("scans"))}))
    heads = [*ledger.heads_of_marks("scans", data)]
    heads += [read_head(tmp_path / name) for name in ("statement.json", "plan.json")]
    assert [head.num_budgets for head in heads] == [2, 2, 2]
    values = json.loads(mark_path(data).read_text())
    del values["num_budgets"]
    mark_path(data).write_text(json.dumps(values))  # of a version that knew no losses
    opened(path, data)
    assert [head.num_budgets for head in ledger.heads_of_marks("scans", data)] == [2]


NAMES = st.sampled_from("aaab")
BACKUPS = st.just(0) | st.integers(0, 100)  # last night's, again and again


class Restores(RuleBasedStateMachine):
    """Charges, backups and restores of one ledger with two data sets, against a plain model.

    The model keeps the ids of all charges in the ledger as it is now, and for each data set the newest one
    and what was executed: steps of processes that bound the data at once, steps beside the mark once the
    loss is stated with the mark at hand. Before that nothing outside the ledger knows of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(os.environ["HYPOTHESIS_FOLDER"], os.urandom(8).hex())
        self.folder.mkdir()
        self.path, self.backups = self.folder / "ledger.db", []
        registered(self.path, "a", "b", cap=QUOTAS)
        for name in "ab":
            (self.folder / name).write_bytes(name.encode())
        self.history: tuple[int, ...] = ()
        self.newest: dict[str, int] = {}
        self.drawn = {"a": 0, "b": 0}
        self.beside: dict[str, dict[int, int]] = {"a": {}, "b": {}}
        self.count = 0
        self.store()

    def use(self, name: str) -> Ledger | None:
        """The ledger as a new process opens it; refused exactly if the data set's newest charge is gone."""
        is_lost = name in self.newest and self.newest[name] not in self.history
        ledger = Ledger.open(str(self.path))
        if is_lost:
            with pytest.raises(LedgerError, match=r"the ledger lacks row|diverged from a copy"):
                ledger.bind(name, self.folder / name)
            return None
        ledger.bind(name, self.folder / name)
        assert self.drawn[name] <= ledger.read_charges(name, with_pld=False).num_steps.get(STEPS, 0)
        if self.drawn[name] > 1000:
            with pytest.raises(LedgerError, match="no guarantee to state"):
                ledger.statement(name)
        return ledger

    def charged(self, name: str) -> None:
        self.count += 1
        self.history += (self.count,)
        self.newest[name] = self.count

    @rule()
    def store(self) -> None:
        self.backups.append((self.path.read_bytes(), self.history))

    @rule(number=BACKUPS)
    def restore(self, number: int) -> None:
        content, self.history = self.backups[number % len(self.backups)]
        self.path.write_bytes(content)

    @rule(
        name=NAMES,
        num_steps=st.just(1000) | st.integers(1, 300),
        share=st.sampled_from([1.0, 0.5, 0.0]),
    )
    def train(self, name: str, num_steps: int, share: float) -> None:
        ledger = self.use(name)
        if ledger is None:
            return
        try:
            reservation = reserve(ledger, f"{self.count}", num_steps, name)
        except BudgetExceeded:
            return
        self.charged(name)
        executed = int(share * num_steps)
        self.drawn[name] += executed
        if share == 0.5:
            ledger.settle(reservation, executed)
            self.charged(name)

    @rule(
        name=NAMES,
        number=BACKUPS,
        num_steps=st.sampled_from([1000, 600]),
        is_stated=st.sampled_from([True, True, False]),
    )
    def train_beside(self, name: str, number: int, num_steps: int, is_stated: bool) -> None:
        """A copy is put back and charged on data without the mark; maybe the loss is stated then."""
        self.restore(number)
        if self.use(name) is None:
            try:
                reserve(Ledger.open(str(self.path)), f"{self.count}", num_steps, name)
            except BudgetExceeded:
                return
            self.count += 1
            self.history += (self.count,)
            self.beside[name][self.count] = num_steps
            if is_stated:
                self.state_loss(name, close=False)

    @rule(name=NAMES, close=st.booleans(), number=st.none() | BACKUPS)
    def state_loss(self, name: str, close: bool, number: int | None = None) -> None:
        if number is not None:
            self.restore(number)
        if self.use(name) is None:
            ledger = Ledger.open(str(self.path))
            beside = self.beside[name].keys() & set(self.history)
            ledger.state_loss(
                name, ledger.heads_of_marks(name, self.folder / name), close=close, used_since=bool(beside)
            )
            ledger.bind(name, self.folder / name)
            self.charged(name)
            for each in beside:  # executed once, however often the loss is stated
                self.drawn[name] += self.beside[name][each]
                self.beside[name][each] = 0
            assert self.use(name) is not None

    @precondition(lambda self: self.count)
    @invariant()
    def admitted_within_the_quota(self) -> None:
        assert all(
            drawn <= 1000 or any(done == 0 for done in self.beside[name].values())
            for name, drawn in self.drawn.items()
        )


@pytest.mark.parametrize(
    "num_examples", [3, pytest.param(40, marks=pytest.mark.ci), pytest.param(150, marks=pytest.mark.long)]
)
def test_restore_that_loses_a_charge_is_never_accepted_silently(
    num_examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPOTHESIS_FOLDER", str(tmp_path))
    run_state_machine_as_test(
        Restores, settings=settings(max_examples=num_examples, stateful_step_count=12, deadline=None)
    )


def test_marks_have_the_name_that_data_folders_are_searched_for(bound: Ledger, data: Path) -> None:
    assert [file.name for file in data.parent.iterdir() if file != data] == [f"scans.npz{MARK}"]
