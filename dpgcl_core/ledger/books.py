"""The ledger's books: the state of all accounts, built by applying the entries in order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import LedgerError, LedgerMissing, unknown_choice
from dpgcl_core.ledger.account import Account, Reservation, SealedReservation
from dpgcl_core.ledger.cap import Cap, check_registration, line_to_register
from dpgcl_core.ledger.chain import Entry, Head


@dataclass
class Books:
    """All accounts after some number of entries; `apply` applies the next one.

    Attributes:
      last: the entry applied last; None before the first.
      ledger_id: the id in the first entry.
      accounts: the accounts by data-set id.
      hashes: the hashes of all entries, in order.
      lost_heads: heads that entries state to be lost, with the rows up to them.
      notes: events that a reader of the ledger should know, such as a clock that was set back.
    """

    last: Entry | None = None
    ledger_id: str = ""
    accounts: dict[str, Account] = field(default_factory=dict)
    hashes: list[str] = field(default_factory=list)
    lost_heads: set[Head] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def head(self) -> Head:
        """The end of the ledger."""
        if self.last is None:
            raise LedgerError("the ledger has no rows")
        return Head(ledger_id=self.ledger_id, num_entries=self.last.number, head_hash=self.last.entry_hash)

    def head_of(self, dataset_id: str) -> Head:
        """Return the head after the last row of a data set; rows of other data sets do not move it."""
        account = self.account(dataset_id)
        number = account.rows[-1]
        return Head(
            ledger_id=self.ledger_id,
            num_entries=number,
            head_hash=self.hashes[number - 1],
            num_budgets=account.num_budgets,
        )

    def has(self, head: Head) -> bool:
        """Return whether the ledger's first entries are those that the head covers."""
        return (
            head.ledger_id == self.ledger_id
            and head.num_entries <= len(self.hashes)
            and self.hashes[head.num_entries - 1] == head.head_hash
        )

    def check_has(self, head: Head, source: str) -> None:
        """Raise LedgerError if the ledger lacks rows that it once had.

        Args:
          head: a head known from outside the ledger.
          source: a name of the head's source, for the message.

        Raises:
          LedgerError: the head is another ledger's, the ledger's last rows are missing, or the ledger was
            rewritten. No error is raised for a loss that was stated.
        """
        if self.has(head) or head in self.lost_heads:
            return
        own_head, remedy = self.head, "state the loss (see python -m dpgcl_core.ledger restored --help)"
        if own_head.ledger_id != head.ledger_id:
            raise LedgerError(
                f"{source} names ledger {head.ledger_id}, but this is ledger {own_head.ledger_id}. Use the "
                f"named ledger. If it is lost, {remedy}"
            )
        num_missing = head.num_entries - own_head.num_entries
        if num_missing > 0 and self.last is not None:
            first = own_head.num_entries + 1
            rows = f"row {first}" if num_missing == 1 else f"rows {first} to {head.num_entries}"
            raise LedgerError(
                f"the ledger lacks {rows}: {source} names row {head.num_entries}, but the last row is row "
                f"{own_head.num_entries} ({self.last.kind}, {self.last.time}). This is an old copy, or its "
                f"tail was cut off. Restore the newest copy. If there is none, {remedy}"
            )
        raise LedgerError(
            f"the ledger was tampered with: its first {head.num_entries} rows do not match {source}. It was "
            f"rewritten, or it diverged from a copy. Restore the right copy. If there is none, {remedy}"
        )

    def was_used_since(self, account: Account, lost_head: Head) -> bool:
        """Return whether an account certainly has rows that the ledger of a lost head never had.

        These are all rows with at least the lost head's number: the chain up to there differs.
        """
        return lost_head.ledger_id != self.ledger_id or account.rows[-1] >= lost_head.num_entries

    def account(self, dataset_id: str) -> Account:
        """Return a data set's account; if there is none, raise LedgerError with the registered ids."""
        if dataset_id not in self.accounts:
            raise LedgerMissing(
                unknown_choice("data set in the ledger", str(dataset_id), self.accounts)
                + f". To register it, run {line_to_register(dataset_id=str(dataset_id))}"
            )
        return self.accounts[dataset_id]

    def reservation(self, number: int) -> Reservation:
        """Return the reservation that the entry with this number made."""
        for account in self.accounts.values():
            if number in account.reservations:
                return account.reservations[number]
        raise LedgerError(f"the ledger has no reservation {number}")

    def known_reservation(self, reservation: Reservation) -> Reservation:
        """Return the current state of a caller's reservation."""
        if reservation.ledger_id != self.ledger_id:
            raise LedgerError(f"the reservation of {reservation.label!r} belongs to another ledger")
        return self.reservation(reservation.number)

    def open_reservation(self, reservation: Reservation) -> Reservation:
        """Return the current state of a caller's reservation, or raise LedgerError if it is settled."""
        current = self.known_reservation(reservation)
        if current.num_steps_executed is not None:
            raise LedgerError(
                f"the reservation of {current.label!r} is settled; make a new one for a new training"
            )
        return current

    def apply(self, entry: Entry, *, check: bool = False) -> None:
        """Apply the next entry to the accounts.

        Args:
          entry: the next entry of a checked chain.
          check: whether to check again that the cap admits its charge.

        Raises:
          LedgerError: the entry contradicts earlier entries, or (with `check`) its admission was invalid.
        """
        try:
            if entry.number == 1:
                self.ledger_id = str(entry.facts["ledger_id"])
            else:
                getattr(self, f"_apply_{entry.kind}")(entry, check).rows.append(entry.number)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"row {entry.number} of the ledger is invalid: {error}") from error
        behind = entry.facts.get("clock_behind_seconds")
        if behind:
            self.notes.append(f"entry {entry.number}: the clock was {behind:g} s behind the previous entry")
        self.hashes.append(entry.entry_hash)
        self.last = entry

    def _apply_register(self, entry: Entry, check: bool) -> Account:
        facts = entry.facts
        if facts["dataset_id"] in self.accounts:
            raise LedgerError("it registers a data set a second time")
        cap = Cap.from_facts(facts["cap"])
        values = {name: facts[name] for name in ("unit", "neighboring_relation", "num_records_public")}
        if check:
            check_registration(**values, cap=cap)
        account = Account(dataset_id=facts["dataset_id"], **values, cap=cap)
        self.accounts[account.dataset_id] = account
        return account

    def _apply_fingerprint(self, entry: Entry, check: bool) -> Account:
        """Skip a row that version 0.1.0 could write; no charge has ever depended on it."""
        return self.account(entry.facts["dataset_id"])

    def _apply_loss(self, entry: Entry, check: bool) -> Account:
        account = self.account(entry.facts["dataset_id"])
        lost_heads = {Head(**head) for head in entry.facts["heads"]}
        on_top, close = entry.facts["on_top"], entry.facts["closed"]
        if check and not on_top and any(self.was_used_since(account, head) for head in lost_heads):
            raise LedgerError("it states a loss that must be added to the known charges")
        num_budgets = max(head.num_budgets for head in lost_heads)
        account.lose(num_budgets, on_top=on_top, close=close)
        self.lost_heads |= lost_heads
        times = "" if num_budgets == 1 else f", {num_budgets} times"
        self.notes.append(
            f"entry {entry.number}: rows of {account.dataset_id!r} were lost; "
            + ("it is closed" if close else f"its whole cap is charged for them{times}")
        )
        return account

    def _apply_cap(self, entry: Entry, check: bool) -> Account:
        account, cap = self.account(entry.facts["dataset_id"]), Cap.from_facts(entry.facts["cap"])
        if cap != replace(account.cap, epsilon=cap.epsilon) or cap.quotas:
            raise LedgerError("it changes a cap in more than epsilon")
        if cap.epsilon > account.highest_epsilon:
            account.num_raised += 1
            account.highest_epsilon = cap.epsilon
            self.notes.append(
                f"entry {entry.number}: the cap of {account.dataset_id!r} was raised from "
                f"{account.cap.epsilon:g} to {cap.epsilon:g}"
            )
        account.cap = cap
        return account

    def _apply_reserve(self, entry: Entry, check: bool) -> Account:
        facts = entry.facts
        account = self.account(facts["dataset_id"])
        step_class = StepClass(facts["sampling_prob"], facts["noise_multiplier"])
        if check:
            account.check_label(facts["label"])
            account.admit_steps(step_class, facts["num_steps"])
        account.charge(
            Reservation(
                ledger_id=self.ledger_id,
                number=entry.number,
                dataset_id=account.dataset_id,
                label=facts["label"],
                step_class=step_class,
                num_steps=facts["num_steps"],
            )
        )
        return account

    def _apply_extend(self, entry: Entry, check: bool) -> Account:
        before = self.reservation(entry.facts["reservation"])
        account = self.account(before.dataset_id)
        if check:
            account.admit_steps(before.step_class, entry.facts["num_steps"])
        account.charge(replace(before, num_steps=before.num_steps + entry.facts["num_steps"]))
        return account

    def _apply_settle(self, entry: Entry, check: bool) -> Account:
        before, executed = self.reservation(entry.facts["reservation"]), entry.facts["num_steps_executed"]
        if check and before.num_steps_executed is not None and executed < before.num_steps_executed:
            raise LedgerError("it reduces the number of settled steps")
        if executed > before.num_steps:
            self.notes.append(
                f"entry {entry.number}: {before.label!r} drew {executed} steps but had reserved "
                f"{before.num_steps}; all are charged"
            )
        account = self.account(before.dataset_id)
        account.charge(replace(before, num_steps_executed=executed))
        return account

    def _apply_seal(self, entry: Entry, check: bool) -> Account:
        facts = entry.facts
        account = self.account(facts["dataset_id"])
        if check:
            account.check_label(facts["label"])
            account.admit_sealed(epsilon=facts["epsilon"], delta=facts["delta"], rdp=facts["rdp"])
        account.charge(
            SealedReservation(
                ledger_id=self.ledger_id,
                number=entry.number,
                dataset_id=account.dataset_id,
                label=facts["label"],
                epsilon=facts["epsilon"],
                delta=facts["delta"],
                rdp=facts["rdp"],
            )
        )
        return account
