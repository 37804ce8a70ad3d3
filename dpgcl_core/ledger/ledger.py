"""The budget ledger: it enforces a data set's privacy budget before anything is spent.

    python -m dpgcl_core.ledger cap    --dataset scans --epsilon 8 --delta 1e-6 --num-records-public 60000
    python -m dpgcl_core.ledger show
    python -m dpgcl_core.ledger verify --against statement.json
    python -m dpgcl_core.ledger export --output ledger.jsonl

Guarantee. Fix a registered data set, its unit and the relation "add or remove one record". Everything that
is released by trainings and sealed sweeps that were charged as below is, together, (ε, δ)-differentially
private with the data set's cap, however each of them was chosen after seeing the results of others; given
that each training's own mechanism is proven, and each step as its class says.

Why it holds, in short (docs/theory/ledger.md has the proofs):

1. *The charge dominates what was spent, at every moment.* A training draws its first step after `reserve` has
   returned, when the row with all its planned steps is on disk; a step that a restart repeats is drawn after
   `extend` has returned. Rows are never changed, and a charge only goes down by `settle`, to a number of
   steps that its caller guarantees the training has not exceeded and will not.
2. *The charge stays within the cap.* One writer at a time reads all rows, asks the cap's filter and adds its
   row, in one transaction, however many sweeps run at once.
3. *The filter is valid*: an RDP filter at an order fixed with the cap, or step quotas fixed with it
   (`dpgcl_core.accounting.filters`). The number of executed steps must be no secret: a training that ends
   early does so by a public criterion or by what it has released. After a crash nobody knows the number; then
   all stays charged. The PLD total admits nothing: it is not a valid filter, and shown for information.
4. *Sealed sweeps.* One row, the tuned bound, before K is drawn; no rows per trial, no refund. By its
   Papernot-Steinke RDP curve at the filter's order it is one more mechanism of the RDP filter. As (ε_i, δ_i)
   it is charged to a share (ε_s, δ_s) of the cap that was set aside with it, and the filter keeps
   (ε − ε_s, δ − δ_s).

A cap that is raised later is stated at its highest value. Whoever raises it must know that the guarantee
refers to the highest cap that any results would have led them to.

The ledger cannot see a training that nobody reserves; a copy of the data that nobody registers as one (`bind`
leaves a mark beside the data that refuses a second ledger); a database administrator who rewrites everything,
where no statement is left to compare with.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpgcl_core.errors import ConfigError, LedgerError
from dpgcl_core.ledger.account import PlannedTraining, Reservation, SealedReservation
from dpgcl_core.ledger.cap import RECORD, Cap, check_registration
from dpgcl_core.ledger.chain import Entry, Head, checked_entries, next_entry
from dpgcl_core.ledger.fingerprints import Fingerprint, heads_of_marks, write_mark
from dpgcl_core.ledger.report import (
    LedgerStatement,
    Spent,
    Verification,
    spent_of,
    statement_of,
    verified,
)
from dpgcl_core.ledger.session import LedgerSession
from dpgcl_core.ledger.store import LedgerStore
from dpgcl_core.mechanism.numbers import ADD_OR_REMOVE_ONE, check_delta


@dataclass(frozen=True)
class Ledger:
    """One ledger, shared by any number of sweeps; see the module for the guarantee.

    A driver reserves every trial before it starts a worker, extends before it resumes one, confirms at
    every checkpoint, and settles when the training has ended.

    Every method raises LedgerError when the ledger is missing, locked for too long, unreachable or
    tampered with; nothing is charged then, and nothing may be trained.
    """

    url: str
    _session: LedgerSession = field(compare=False, repr=False)

    @classmethod
    def create(cls, url: str, *, wait_seconds: float = 60.0) -> Ledger:
        """Create an empty ledger; an existing one is refused, never emptied.

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
        """Open a ledger and check its chain; a missing one is refused: a new one has no charges."""
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
        fingerprint: Fingerprint | None = None,
    ) -> None:
        """Register a data set with its cap; the same registration once more changes nothing.

        Args:
          dataset_id: the name that the budget belongs to.
          cap: the budget and its filter.
          num_records_public: declared public number of records; δ is at most one over it.
          unit: what one record stands for, such as "record" or "person".
          neighboring_relation: the relation of the guarantee.
          fingerprint: of the records; a copy of them then cannot be registered under another id.

        Raises:
          ConfigError: the unit, the relation, the number or δ is invalid.
          LedgerError: the id is registered otherwise, or the records under another id.
        """
        if not dataset_id or not isinstance(dataset_id, str):
            raise ConfigError(f"a data set needs an id that is text; got {dataset_id!r}")
        check_registration(
            unit=unit,
            neighboring_relation=neighboring_relation,
            num_records_public=num_records_public,
            cap=cap,
        )
        values: dict[str, Any] = {
            "unit": unit,
            "neighboring_relation": neighboring_relation,
            "num_records_public": num_records_public,
        }
        with self._session.writing() as draft:
            known = draft.books.accounts.get(dataset_id)
            if known is None:
                draft.add("register", dataset_id=dataset_id, cap=cap.facts(), **values)
            elif cap != known.cap or any(getattr(known, name) != value for name, value in values.items()):
                raise LedgerError(
                    f"data set {dataset_id!r} is registered with unit {known.unit!r}, "
                    f"{known.num_records_public} records and cap {known.cap}; a second registration must "
                    "agree with it (change_cap changes epsilon)"
                )
            if fingerprint is not None:
                draft.add_fingerprint(dataset_id, fingerprint)

    def add_copy(self, dataset_id: str, fingerprint: Fingerprint) -> None:
        """Register an edited copy under the id of the original, whose charges it shares.

        Raises:
          LedgerError: the id is unknown, or these records belong to another id.
        """
        with self._session.writing() as draft:
            draft.books.account(dataset_id)
            draft.add_fingerprint(dataset_id, fingerprint)

    def change_cap(self, dataset_id: str, epsilon: float, *, allow_raise: bool = False) -> None:
        """Change ε of an RDP filter's cap; δ, the order and the shares set aside stay as they are.

        A lower cap refuses more; the statement keeps the highest. Quotas cannot change.

        Raises:
          ConfigError: the cap has quotas, or a higher one comes without `allow_raise`.
        """
        with self._session.writing() as draft:
            cap = draft.books.account(dataset_id).cap
            if cap.quotas:
                raise ConfigError(f"the quotas of data set {dataset_id!r} are fixed for good")
            if epsilon > cap.epsilon and not allow_raise:
                raise ConfigError(
                    f"epsilon = {epsilon:g} is above the cap {cap.epsilon:g} of data set {dataset_id!r}; a "
                    "raised cap is what every statement will carry: allow it explicitly"
                )
            if epsilon != cap.epsilon:
                changed = replace(cap, epsilon=epsilon)
                draft.add("cap", dataset_id=dataset_id, cap=changed.facts())

    def bind(self, dataset_id: str, data: Path) -> None:
        """Leave a mark beside a data file or folder that names this ledger and its head.

        Raises:
          LedgerError: a mark on the data, on a folder above them or on anything in them names another ledger
            or id, or a head that this ledger does not have (an old or separate copy of the ledger); or a
            mark cannot be read or written.
        """
        with self._session.reading() as books:
            books.account(dataset_id)
        for head in heads_of_marks(data, dataset_id):
            self.verify(against=head)
        write_mark(data, dataset_id, self.verify().head)

    def reserve(
        self,
        dataset_id: str,
        planned: Sequence[PlannedTraining],
        *,
        unit: str = RECORD,
        neighboring_relation: str = ADD_OR_REMOVE_ONE,
        fingerprint: Fingerprint | None = None,
    ) -> tuple[Reservation, ...]:
        """Charge all planned steps of all trainings, or nothing; after it, the first step may be drawn.

        Args:
          dataset_id: whose budget.
          planned: the trainings, such as one trial or all trials of an open sweep.
          unit, neighboring_relation: what the trainings protect; must be what is registered.
          fingerprint: of the records; refused unless registered under this id.

        Raises:
          BudgetExceeded: the cap's filter does not admit them all.
          LedgerError: the data set is unknown, a label taken, or unit, relation or records differ.
          ConfigError: a number is out of range.
        """
        with self._session.writing() as draft:
            account = draft.books.account(dataset_id)
            account.check_use(unit, neighboring_relation, fingerprint)
            account.admit_all(planned)
            numbers = []
            for each in planned:
                facts = {**vars(each), **vars(each.step_class)}
                del facts["step_class"]
                numbers.append(draft.add("reserve", dataset_id=dataset_id, **facts).number)
        with self._session.reading() as books:
            return tuple(books.reservation(number) for number in numbers)

    def would_admit(self, dataset_id: str, planned: Sequence[PlannedTraining]) -> None:
        """Raise BudgetExceeded if `reserve` would now, and charge nothing: for dry runs."""
        with self._session.reading() as books:
            books.account(dataset_id).admit_all(planned)

    def extend(self, reservation: Reservation, num_steps: int) -> Reservation:
        """Charge `num_steps` more, which a resumed training repeats; call it before the training resumes.

        With 0, when no earlier attempt can have drawn a step, it only confirms the reservation.

        Raises:
          BudgetExceeded: the cap's filter does not admit them; the training must not resume.
          LedgerError: the reservation is settled.
        """
        if num_steps == 0:
            return self.confirm(reservation)
        with self._session.writing() as draft:
            known = draft.books.open_reservation(reservation)
            draft.books.account(known.dataset_id).admit_steps(known.step_class, num_steps)
            draft.add("extend", reservation=known.number, num_steps=num_steps)
        return self._reservation(reservation.number)

    def settle(self, reservation: Reservation, num_steps_executed: int) -> Reservation:
        """Refund the steps that were not executed, to the sum or quota that they were charged to.

        Args:
          reservation: of the training, which has ended and will not resume.
          num_steps_executed: the largest number of steps that may have been drawn, repeated ones
            included. If that is not known, do not settle.

        Raises:
          LedgerError: it was settled with more steps; or more were executed than reserved. These are
            charged nevertheless, above the cap if necessary, before the error is raised.
        """
        executed = num_steps_executed
        if isinstance(executed, bool) or not isinstance(executed, int) or executed < 0:
            raise ConfigError(f"num_steps_executed must be a whole number of at least 0; got {executed!r}")
        with self._session.writing() as draft:
            known = draft.books.known_reservation(reservation)
            before = known.num_steps_executed
            if before is not None and executed < before:
                raise LedgerError(
                    f"{known.label!r} was settled with {before} steps; {executed} would take charges back"
                )
            if executed != before:
                draft.add("settle", reservation=known.number, num_steps_executed=executed)
        if executed > known.num_steps:
            raise LedgerError(
                f"{known.label!r} drew {executed} steps and had reserved {known.num_steps}; all are charged "
                "now, but a training must extend its reservation before it goes on"
            )
        return self._reservation(reservation.number)

    def confirm(self, reservation: Reservation, *, num_steps_drawn: int = 0) -> Reservation:
        """Return the reservation as it stands; a training calls this at every checkpoint, or stops.

        Raises:
          LedgerError: the ledger cannot be reached or does not hold the reservation, it is settled, or
            fewer steps are reserved than drawn.
        """
        with self._session.reading() as books:
            known = books.open_reservation(reservation)
        if num_steps_drawn > known.num_steps:
            raise LedgerError(
                f"{known.label!r} has drawn {num_steps_drawn} steps and reserved {known.num_steps}; stop, "
                "and extend the reservation before going on"
            )
        return known

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
        fingerprint: Fingerprint | None = None,
    ) -> SealedReservation:
        """Charge a sealed sweep's tuned bound, once, before its number of trials is drawn.

        There are no rows per trial, which would reveal the number, and no refund. A crash that loses the
        number of trials means a new sealed sweep, charged under a label of its own.

        Args:
          dataset_id, unit, neighboring_relation, fingerprint: as in `reserve`.
          label: the sweep's name.
          epsilon, delta: the tuned bound; δ is at most one over the registered number of records. Without
            a curve they are what is charged.
          rdp_curve: the tuned release's RDP at any order (Papernot and Steinke 2022); charged at the
            filter's order.

        Raises:
          BudgetExceeded: the cap does not admit it.
          LedgerError, ConfigError: as in `reserve`; or a curve meets a cap with quotas.
        """
        with self._session.writing() as draft:
            account = draft.books.account(dataset_id)
            account.check_use(unit, neighboring_relation, fingerprint)
            order = account.cap.order or 2.0  # quotas have no order, and refuse every curve
            rdp = None if rdp_curve is None else float(rdp_curve(order))
            account.check_label(label)
            check_delta(delta, account.num_records_public)
            account.admit_sealed(epsilon=epsilon, delta=delta, rdp=rdp)
            entry = draft.add(
                "seal", dataset_id=dataset_id, label=label, epsilon=epsilon, delta=delta, rdp=rdp
            )
        with self._session.reading() as books:
            return books.account(dataset_id).sealed[entry.number]

    def reservation(self, dataset_id: str, label: str) -> Reservation | None:
        """Return the reservation of a label, by which a resumed sweep finds its own, or None."""
        with self._session.reading() as books:
            reservations = books.account(dataset_id).reservations.values()
            return next((known for known in reservations if known.label == label), None)

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

    def spent(self, dataset_id: str, *, with_pld: bool = True) -> Spent:
        """Return what is charged to a data set, with the PLD total for information."""
        with self._session.reading() as books:
            account = books.account(dataset_id)
            return spent_of(account, with_pld=with_pld)

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
          LedgerError: a row was edited, deleted, inserted or admitted above its cap; with `against` also:
            the tail was cut off, or the chain was written anew.
        """
        return verified(self.entries(), against)

    def _reservation(self, number: int) -> Reservation:
        with self._session.reading() as books:
            return books.reservation(number)
