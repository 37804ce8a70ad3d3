"""The budget ledger: it enforces a data set's privacy budget before anything is spent.

    python -m dpgcl_core.ledger cap    --dataset scans --epsilon 8 --delta 1e-6 --num-records-public 60000
    python -m dpgcl_core.ledger show
    python -m dpgcl_core.ledger verify --against statement.json
    python -m dpgcl_core.ledger export --output ledger.jsonl
    python -m dpgcl_core.ledger restored --dataset scans --data /data/scans.npz

Guarantee. Fix a registered data set, its unit and the relation "add or remove one record". All releases of
trainings and sealed sweeps that were charged as below are, together, (ε, δ)-differentially private with the
data set's cap. This holds for every choice of each of them after seeing the results of others, if each
training's mechanism is proven and each step has the parameters of its class.

The reasons, in short (docs/theory/ledger.md has the proofs):

1. *The charge dominates the budget spent, at every moment.* A training draws its first step after `reserve`
   has returned, when the row with all its planned steps is on disk. A step that a restart repeats is drawn
   after `extend` has returned. Rows are never changed. Only `settle` reduces a charge, to a number of steps
   that its caller guarantees the training has not exceeded and will not exceed.
2. *The charge stays within the cap.* One writer at a time reads all rows, queries the cap's filter and adds
   its row, in one transaction, for any number of concurrent sweeps.
3. *The filter is valid.* It is an RDP filter at an order that is fixed with the cap, or it has step quotas
   that are fixed with the cap (`dpgcl_core.accounting.filters`). The number of executed steps must not be
   secret: a training that ends early does so by a public criterion or by its own releases. After a crash
   nobody knows the number; then all steps stay charged. The PLD total admits nothing: it is not a valid
   filter, and is shown for information.
4. *Sealed sweeps.* A sealed sweep has one row, its tuned bound, which is added before K is drawn. It has no
   rows per trial and no refund. Charged by its Papernot-Steinke RDP curve at the filter's order, it is one
   more mechanism of the RDP filter. Charged as (ε_i, δ_i), it uses a share (ε_s, δ_s) that was set aside when
   the cap was fixed, and the filter keeps (ε − ε_s, δ − δ_s).

A cap that is raised later is stated at its highest value. Whoever raises it must know that the guarantee
refers to the highest cap that any results would have led them to.

*The ledger is the newest one.* The above is about the rows that the ledger has. An older copy of the ledger
(last night's backup) lacks the rows added since. `bind` writes a *mark* next to the data, which names a head:
a number of rows, and the hash of the last row.

Proposition. Let a step of a training be drawn after its row was added by a process that had bound the data,
and let nobody restore, edit or delete the mark. Then every later `bind` of these data refuses a ledger
without that row, until the loss is stated (`state_loss`).
Sketch: `reserve`, `extend`, `settle` and `reserve_sealed` return after the row is on disk and, after that,
the mark. Under the ledger's lock the mark is created with, or moved on to, the last row of the data set, so
its head is the head of this row or of a later row. The mark only moves to heads whose rows include the rows
of its previous head, so this stays true. A ledger has the mark's head only if its rows up to that head hash
to it. Those are then the same rows (SHA-256 has no known collisions), and the training's row is among them.
Conversely, no complete ledger is refused: the row is on disk before the mark names it, so a crash between the
two leaves a ledger that is ahead of the mark. This ledger is accepted, and the mark moves on. No step was
drawn for a row without its mark.

The mark names the last row of its own data set, so lost rows of other data sets do not affect it. If two
ledgers begin on unmarked data at once, one mark is created, exclusively: the other ledger is refused before
it reserves.

The ledger cannot detect: a training that nobody reserves; data that were copied, or moved without their mark;
a mark and a ledger that are restored together; a database administrator who rewrites everything, if no
statement remains to compare with.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import ConfigError, LedgerError, require_whole
from dpgcl_core.ledger.account import PlannedTraining, Reservation, SealedReservation
from dpgcl_core.ledger.cap import Cap, check_registration
from dpgcl_core.ledger.chain import RECORD, Entry, Head, checked_entries, next_entry
from dpgcl_core.ledger.marks import (
    Place,
    advance_marks,
    check_owner,
    heads_of_marks,
    place_of,
    read_mark,
    trusted_marks,
)
from dpgcl_core.ledger.report import (
    Charges,
    LedgerStatement,
    Verification,
    charges_of,
    statement_of,
    verified,
)
from dpgcl_core.ledger.session import LedgerSession
from dpgcl_core.ledger.store import LedgerStore
from dpgcl_core.mechanism.numbers import ADD_OR_REMOVE_ONE, check_delta


@dataclass(frozen=True)
class Ledger:
    """One ledger, shared by any number of sweeps; see the module for the guarantee.

    A sweep's driver process reserves every trial before it starts a worker. It extends the reservation
    before it resumes the trial, confirms it at every checkpoint, and settles it when the training has ended.

    Every method raises LedgerError if the ledger is missing, locked for too long, unreachable or
    tampered with. Then nothing is charged, and nothing may be trained.
    """

    url: str
    _session: LedgerSession = field(compare=False, repr=False)
    _places: dict[str, dict[Path, Place]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def create(cls, url: str, *, wait_seconds: float = 60.0) -> Ledger:
        """Create an empty ledger; an existing ledger raises an error and is never emptied.

        Args:
          url: a path, `sqlite:////absolute/path.db` or `postgresql://user@host/database`. SQLite must
            not be in a network folder.
          wait_seconds: how long to wait for other writers.
        """
        store = LedgerStore.at(url, wait_seconds=wait_seconds)
        store.create(next_entry(None, "ledger", {"ledger_id": secrets.token_hex(8)}))
        return cls.open(url, wait_seconds=wait_seconds)

    @classmethod
    def open(cls, url: str, *, wait_seconds: float = 60.0) -> Ledger:
        """Open a ledger and check its chain; never create one, since a new ledger would lack all charges."""
        store = LedgerStore.at(url, wait_seconds=wait_seconds)
        ledger = cls(store.name, LedgerSession(store))
        ledger.head()
        return ledger

    def register(
        self,
        dataset_id: str,
        cap: Cap,
        *,
        num_records_public: int,
        unit: str = RECORD,
        neighboring_relation: str = ADD_OR_REMOVE_ONE,
    ) -> None:
        """Register a data set with its cap; repeating the same registration changes nothing.

        Args:
          dataset_id: the data set's id, to which all charges refer.
          cap: the budget and its filter.
          num_records_public: declared public number of records; δ is at most 1/num_records_public.
          unit: the meaning of one record, such as "record" or "person".
          neighboring_relation: the relation of the guarantee.

        Raises:
          ConfigError: the unit, the relation, the number or δ is invalid.
          LedgerError: the id is already registered with other values.
        """
        if not dataset_id or not isinstance(dataset_id, str):
            raise ConfigError(f"dataset_id must be non-empty text; got {dataset_id!r}")
        values: dict[str, Any] = {
            "unit": unit,
            "neighboring_relation": neighboring_relation,
            "num_records_public": num_records_public,
        }
        check_registration(**values, cap=cap)
        with self._session.writing() as draft:
            account = draft.books.accounts.get(dataset_id)
            if account is None:
                draft.add("register", dataset_id=dataset_id, cap=cap.facts(), **values)
            elif cap != account.cap or any(getattr(account, name) != value for name, value in values.items()):
                raise LedgerError(
                    f"data set {dataset_id!r} is registered with unit {account.unit!r}, "
                    f"{account.num_records_public} records and cap {account.cap}; a repeated registration "
                    "must have the same values. Use change_cap to change epsilon"
                )

    def change_cap(self, dataset_id: str, epsilon: float, *, allow_raise: bool = False) -> None:
        """Change ε of an RDP filter's cap; δ, the order and the shares set aside stay as they are.

        A lower cap refuses more charges; the statement keeps the highest cap. Quotas cannot change.

        Raises:
          ConfigError: the cap has quotas, or the new cap is higher and `allow_raise` is false.
        """
        with self._session.writing() as draft:
            cap = draft.books.account(dataset_id).cap
            if cap.quotas:
                raise ConfigError(f"data set {dataset_id!r} has step quotas; such a cap cannot change")
            if epsilon > cap.epsilon and not allow_raise:
                raise ConfigError(
                    f"epsilon = {epsilon:g} is above the cap {cap.epsilon:g} of data set {dataset_id!r}. To "
                    "raise the cap, set allow_raise (--allow-raise); every statement will contain the new cap"
                )
            if epsilon != cap.epsilon:
                changed = replace(cap, epsilon=epsilon)
                draft.add("cap", dataset_id=dataset_id, cap=changed.facts())

    def bind(self, dataset_id: str, *data: Path, follow: bool = True) -> tuple[str, ...]:
        """Write a mark next to data files or folders, which names this ledger and the data set's last row.

        From now on in this process, each call that adds a row of the data set updates the mark before it
        returns; see the module. Call `bind` before `reserve`, in every process that charges.

        Args:
          dataset_id: the id of the data set.
          data: paths of the data.
          follow: whether later rows update the marks.

        Returns:
          Notes for the user: the data had no mark although there are charges, or had an older mark.

        Raises:
          LedgerError: a mark on the data, on a folder above them or on anything in them names another ledger
            or id, or a head that this ledger does not have (an old or separate copy of the ledger); or a
            mark cannot be read or written.
        """
        notes = [note for path in data for note in self.check_marks(dataset_id, path)]
        self.verify()
        places = {path: place_of(path, self._marks_folder) for path in data}
        if self._advance(dataset_id, list(places.values())):  # another ledger may have made marks meanwhile
            for path in data:
                self.check_marks(dataset_id, path)
        if follow:
            self._places.setdefault(dataset_id, {}).update(places)
        return tuple(notes)

    def check_marks(self, dataset_id: str, data: Path) -> tuple[str, ...]:
        """Raise LedgerError if the ledger lacks rows that the marks on the data name; change nothing.

        Returns:
          The same notes as `bind`.

        Raises:
          LedgerError: as in `bind`.
        """
        heads = self.heads_of_marks(dataset_id, data)
        with self._session.reading() as books:
            for head in heads:
                books.check_has(head, f"the mark on {data}")
            account = books.account(dataset_id)
        newest = max((head.num_entries for head in heads), default=0)
        num_newer = sum(number > newest for number in account.rows)
        if not heads and (account.reservations or account.sealed or account.num_losses):
            return (
                f"{data} has no mark, but data set {dataset_id!r} has charges: the data are a copy, were "
                "moved without their mark, or the mark was deleted. The ledger may be an old copy",
            )
        if heads and num_newer:
            rows = "row" if num_newer == 1 else "rows"
            return (
                f"the mark on {data} lacks the newest {num_newer} {rows} of data set {dataset_id!r}: the cap "
                "was changed, a start was interrupted, another copy of the data was charged, or the mark is "
                "old. Every sweep on the data updates it",
            )
        return ()

    def owner_of(self, data: Path) -> str | None:
        """Return the data-set id in a mark on the data, next to them or with the ledger; None without one."""
        marks = (read_mark(data), *trusted_marks(self._marks_folder, data, by_content=False))
        return next((mark[0] for mark in marks if mark is not None), None)

    def heads_of_marks(self, dataset_id: str, data: Path) -> list[Head]:
        """Return the heads that the marks on the data name, stored next to the data or with the ledger.

        Raises:
          LedgerError: a mark names another data set, or cannot be read.
        """
        heads = dict.fromkeys(heads_of_marks(data, dataset_id))
        for mark in trusted_marks(self._marks_folder, data, by_content=not heads):
            check_owner(data, mark, dataset_id)
            heads[mark[1]] = None
        return list(heads)

    def state_loss(
        self, dataset_id: str, heads: Sequence[Head], *, close: bool = False, used_since: bool = False
    ) -> None:
        """Record that rows of a data set are lost for good, and charge its whole cap for them.

        All charges of the lost rows are within the highest cap times `num_budgets` of their head (a lost row
        may itself have stated a loss that was charged on top); see `Account`. All known
        reservations are settled in full, so their trainings cannot resume. If a lost row raised the cap,
        raise the cap again first. A cap that is raised later admits the amount that was added.

        Args:
          dataset_id: the data set whose rows are lost.
          heads: heads that marks, plans or statements name, and this ledger does not have.
          close: whether to refuse all further charges to the data set.
          used_since: whether the data set was charged in this ledger after the rows were lost. The cap is
            then charged on top of all known charges. The same happens if a head shows such charges.

        Raises:
          LedgerError: the data set is unknown.
          ConfigError: no head is missing.
        """
        with self._session.writing() as draft:
            books = draft.books
            account = books.account(dataset_id)
            missing = [head for head in heads if not books.has(head) and head not in books.lost_heads]
            if not missing:
                raise ConfigError("the ledger has every named row, so there is no loss to state")
            on_top = used_since or any(books.was_used_since(account, head) for head in missing)
            draft.add(
                "loss",
                dataset_id=dataset_id,
                heads=[vars(head) for head in missing],
                on_top=on_top,
                closed=close,
            )
        self._advance(dataset_id)

    def reserve(
        self,
        dataset_id: str,
        planned: Sequence[PlannedTraining],
        *,
        unit: str = RECORD,
        neighboring_relation: str = ADD_OR_REMOVE_ONE,
    ) -> tuple[Reservation, ...]:
        """Charge all planned steps of all trainings, or nothing; afterwards the first step may be drawn.

        Args:
          dataset_id: the data set whose budget is charged.
          planned: the trainings, such as one trial or all trials of an open sweep.
          unit, neighboring_relation: the protection of the trainings; must equal the registered values.

        Raises:
          BudgetExceeded: the cap's filter does not admit all trainings.
          LedgerError: the data set is unknown, a label is taken, or unit or relation differ; or the mark on
            the data now names another ledger, or cannot be written (the charge then remains).
          ConfigError: a number is out of range.
        """
        with self._session.writing() as draft:
            account = draft.books.account(dataset_id)
            account.check_use(unit, neighboring_relation)
            account.admit_all(planned)
            numbers = []
            for each in planned:
                facts = {**vars(each), **vars(each.step_class)}
                del facts["step_class"]
                numbers.append(draft.add("reserve", dataset_id=dataset_id, **facts).number)
        self._advance(dataset_id)
        with self._session.reading() as books:
            return tuple(books.reservation(number) for number in numbers)

    def would_admit(self, dataset_id: str, planned: Sequence[PlannedTraining]) -> None:
        """Raise BudgetExceeded if `reserve` would raise it now, and charge nothing: for dry runs."""
        with self._session.reading() as books:
            books.account(dataset_id).admit_all(planned)

    def num_admitted(self, dataset_id: str, step_class: StepClass, num_steps: int) -> int:
        """Return how many more trainings of `num_steps` steps of a class `reserve` would now admit together.

        The filter itself is queried with growing numbers of trainings, below 2·`MOST_TRAININGS`.

        Raises:
          LedgerError, ConfigError: as in `reserve`.
        """
        with self._session.reading() as books:
            return books.account(dataset_id).num_admitted(step_class, num_steps)

    def would_admit_sealed(
        self, dataset_id: str, *, epsilon: float, delta: float, rdp_curve: Callable[[float], float] | None
    ) -> None:
        """Raise BudgetExceeded if `reserve_sealed` would raise it now, and charge nothing: for dry runs."""
        with self._session.reading() as books:
            account = books.account(dataset_id)
            rdp = None if rdp_curve is None else float(rdp_curve(account.cap.order or 2.0))
            account.admit_sealed(epsilon=epsilon, delta=delta, rdp=rdp)

    def extend(self, reservation: Reservation, num_steps: int) -> Reservation:
        """Charge the `num_steps` steps that a resumed training repeats; call this before it resumes.

        Pass 0 if no earlier attempt can have drawn a step: then the reservation is only confirmed.

        Raises:
          BudgetExceeded: the cap's filter does not admit the steps; the training must not resume.
          LedgerError: the reservation is settled.
        """
        if num_steps == 0:
            return self.confirm(reservation)
        with self._session.writing() as draft:
            current = draft.books.open_reservation(reservation)
            draft.books.account(current.dataset_id).admit_steps(current.step_class, num_steps)
            draft.add("extend", reservation=current.number, num_steps=num_steps)
        self._advance(current.dataset_id)
        return self._reservation(reservation.number)

    def settle(self, reservation: Reservation, num_steps_executed: int) -> Reservation:
        """Refund the reserved steps that were not executed to the RDP sum or quota that they were charged to.

        Args:
          reservation: the reservation of the training, which has ended and will not resume.
          num_steps_executed: the largest number of steps that may have been drawn, repeated ones
            included. If that is not known, do not settle.

        Raises:
          LedgerError: the reservation was settled with more steps; or more steps were executed than
            reserved. All executed steps are then charged, above the cap if necessary, before the error.
        """
        executed = num_steps_executed
        require_whole("num_steps_executed", executed, least=0)
        with self._session.writing() as draft:
            current = draft.books.known_reservation(reservation)
            before = current.num_steps_executed
            if before is not None and executed < before:
                raise LedgerError(
                    f"{current.label!r} was settled with {before} steps; {executed} would reduce its charge"
                )
            if executed != before:
                draft.add("settle", reservation=current.number, num_steps_executed=executed)
        self._advance(current.dataset_id)
        if executed > current.num_steps:
            raise LedgerError(
                f"{current.label!r} drew {executed} steps but had reserved {current.num_steps}; all are "
                "charged now. A training must extend its reservation before it continues"
            )
        return self._reservation(reservation.number)

    def confirm(self, reservation: Reservation) -> Reservation:
        """Return the current reservation; a training calls this at every checkpoint, and stops if it fails.

        Raises:
          LedgerError: the ledger cannot be reached or does not hold the reservation, or the reservation is
            settled.
        """
        with self._session.reading() as books:
            return books.open_reservation(reservation)

    def reserve_sealed(
        self,
        dataset_id: str,
        *,
        label: str,
        epsilon: float,
        delta: float,
        rdp_curve: Callable[[float], float] | None = None,
        unit: str = RECORD,
        neighboring_relation: str = ADD_OR_REMOVE_ONE,
    ) -> SealedReservation:
        """Charge a sealed sweep's bound, tuning included, once, before its number of trials is drawn.

        There are no rows per trial, which would reveal the number, and no refund. After a crash that loses
        the number of trials, a new sealed sweep is needed, charged under its own label.

        Args:
          dataset_id, unit, neighboring_relation: as in `reserve`.
          label: the sweep's name.
          epsilon, delta: the sweep's bound, tuning included; δ is at most 1 over the registered number of
            records. Without a curve, this bound itself is charged.
          rdp_curve: a function from an order to the RDP of the sweep's release (Papernot and Steinke 2022);
            its value at the filter's order is charged.

        Raises:
          BudgetExceeded: the cap does not admit it.
          LedgerError, ConfigError: as in `reserve`; or `rdp_curve` is set and the cap has quotas.
        """
        with self._session.writing() as draft:
            account = draft.books.account(dataset_id)
            account.check_use(unit, neighboring_relation)
            order = account.cap.order or 2.0  # a cap with quotas has no order, and admits no curve
            rdp = None if rdp_curve is None else float(rdp_curve(order))
            account.check_label(label)
            check_delta(delta, account.num_records_public)
            account.admit_sealed(epsilon=epsilon, delta=delta, rdp=rdp)
            entry = draft.add(
                "seal", dataset_id=dataset_id, label=label, epsilon=epsilon, delta=delta, rdp=rdp
            )
        self._advance(dataset_id)
        with self._session.reading() as books:
            return books.account(dataset_id).sealed[entry.number]

    def reservations(self, dataset_id: str) -> tuple[Reservation, ...]:
        """Return all reservations of a data set, open and settled, in the order in which they were made."""
        with self._session.reading() as books:
            return tuple(books.account(dataset_id).reservations.values())

    def reservation(self, dataset_id: str, label: str) -> Reservation | None:
        """Return the reservation with a label, or None; a resumed sweep finds its reservations this way."""
        return next((r for r in self.reservations(dataset_id) if r.label == label), None)

    def entries(self) -> tuple[Entry, ...]:
        """Return all rows, checked against their hashes."""
        with self._session.store.reading() as connection:
            return tuple(checked_entries(self._session.store.rows(connection, first=1)))

    def dataset_ids(self) -> tuple[str, ...]:
        """Return the registered ids, in the order of their registration."""
        with self._session.reading() as books:
            return tuple(books.accounts)

    def head(self) -> Head:
        """Return the ledger's head, for a privacy statement."""
        with self._session.reading() as books:
            return books.head

    def head_of(self, dataset_id: str) -> Head:
        """Return the ledger's head after the last row of a data set."""
        with self._session.reading() as books:
            return books.head_of(dataset_id)

    def check_has(self, head: Head, source: str) -> None:
        """Raise LedgerError if the ledger lacks rows that it once had.

        Args:
          head: a head known from outside the ledger, such as from a sweep's plan.
          source: a name of the head's source, for the message.

        Raises:
          LedgerError: rows are missing or were rewritten; the message names them.
        """
        with self._session.reading() as books:
            books.check_has(head, source)

    def read_charges(self, dataset_id: str, *, with_pld: bool = True) -> Charges:
        """Return the charges to a data set, with the PLD total for information."""
        with self._session.reading() as books:
            account = books.account(dataset_id)
            return charges_of(account, with_pld=with_pld)

    spent = read_charges  # the former name, for one version

    def num_records_public(self, dataset_id: str) -> int:
        """Return the number of records that was declared when the data set was registered.

        Raises:
          LedgerError: no such data set is registered.
        """
        with self._session.reading() as books:
            return books.account(dataset_id).num_records_public

    def statement(self, dataset_id: str) -> LedgerStatement:
        """Return the ledger's part of a privacy statement: the cap, its filter and the head.

        Raises:
          LedgerError: a training drew steps beyond its reservation and above the cap.
        """
        with self._session.reading() as books:
            return statement_of(books.account(dataset_id), books.head)

    def verify(self, against: Head | None = None) -> Verification:
        """Read all rows again, check chain and admissions, and compare with a statement's head.

        Raises:
          LedgerError: a row was edited, deleted, inserted or admitted above its cap; with `against`, also if
            the tail was cut off or the chain was rewritten.
        """
        return verified(self.entries(), against)

    @property
    def _marks_folder(self) -> Path:
        return self._session.store.marks_folder

    def _advance(self, dataset_id: str, places: Collection[Place] | None = None) -> int:
        """Update the marks on a data set to its last row, on disk; return how many marks are new.

        `places` are the marks' locations, by default those of all bound data. Meanwhile the ledger is locked
        for other processes. A mark never moves to an earlier row.
        """
        all_places = self._places.get(dataset_id, {}).values() if places is None else places
        if not all_places:
            return 0
        with self._session.writing() as draft:
            books, newest = draft.books, draft.books.head_of(dataset_id)

            def successor(place: Place, head: Head) -> Head | None:
                """Return the head to write in place of `head`; None if `head` is new enough."""
                books.check_has(head, f"the mark on {place.data}")
                has_all = head.num_entries >= newest.num_entries and head.num_budgets >= newest.num_budgets
                is_new_enough = books.has(head) and has_all
                return None if is_new_enough else newest

            return sum(advance_marks(p, dataset_id, partial(successor, p), newest) for p in all_places)

    def _reservation(self, number: int) -> Reservation:
        with self._session.reading() as books:
            return books.reservation(number)
