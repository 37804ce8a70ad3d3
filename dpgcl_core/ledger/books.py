"""The ledger's books: the state of all accounts, built by applying one entry after the other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import LedgerError, unknown_choice
from dpgcl_core.ledger.account import Account, Reservation, SealedReservation
from dpgcl_core.ledger.cap import Cap, check_registration
from dpgcl_core.ledger.chain import Entry, Head


@dataclass
class Books:
    """All accounts after some number of entries; `apply` applies the next one.

    Attributes:
      last: the entry applied last; None at first.
      ledger_id: of the first entry.
      accounts: by data-set id.
      key_id: which key the fingerprints were made with.
      owners: data-set id by fingerprint.
      notes: events that a reader of the ledger should know of, such as a clock that was set back.
    """

    last: Entry | None = None
    ledger_id: str = ""
    accounts: dict[str, Account] = field(default_factory=dict)
    key_id: str | None = None
    owners: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def head(self) -> Head:
        """The end of the ledger."""
        if self.last is None:
            raise LedgerError("there is no ledger in it")
        return Head(ledger_id=self.ledger_id, num_entries=self.last.number, head_hash=self.last.entry_hash)

    def account(self, dataset_id: str) -> Account:
        """Return the account, or raise LedgerError with the registered ids."""
        if dataset_id not in self.accounts:
            raise LedgerError(
                unknown_choice("data set in the ledger", str(dataset_id), self.accounts)
                + " (register it: python -m dpgcl_core.ledger cap --dataset NAME --epsilon E --delta D "
                "--num-records-public N)"
            )
        return self.accounts[dataset_id]

    def reservation(self, number: int) -> Reservation:
        """Return the reservation of an entry's number."""
        for account in self.accounts.values():
            if number in account.reservations:
                return account.reservations[number]
        raise LedgerError(f"the ledger holds no reservation {number}")

    def known_reservation(self, reservation: Reservation) -> Reservation:
        """Return a caller's reservation in its state according to the entries."""
        if reservation.ledger_id != self.ledger_id:
            raise LedgerError(f"the reservation of {reservation.label!r} belongs to another ledger")
        return self.reservation(reservation.number)

    def open_reservation(self, reservation: Reservation) -> Reservation:
        """Return a caller's reservation in its state according to the entries, unless it is settled."""
        known = self.known_reservation(reservation)
        if known.num_steps_executed is not None:
            raise LedgerError(
                f"the reservation of {known.label!r} is settled; a new training needs a new one"
            )
        return known

    def apply(self, entry: Entry, *, check: bool = False) -> None:
        """Apply one more entry.

        Args:
          entry: the next one of a checked chain.
          check: whether to check its admission again.

        Raises:
          LedgerError: the entry contradicts those before it, or (with `check`) its admission was invalid.
        """
        try:
            if entry.number == 1:
                self.ledger_id = str(entry.facts["ledger_id"])
            else:
                getattr(self, f"_apply_{entry.kind}")(entry, check)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"row {entry.number} of the ledger contradicts it: {error}") from error
        behind = entry.facts.get("clock_behind_seconds")
        if behind:
            self.notes.append(f"entry {entry.number}: the clock was {behind:g} s behind the entry before")
        self.last = entry

    def _apply_register(self, entry: Entry, check: bool) -> None:
        facts = entry.facts
        if facts["dataset_id"] in self.accounts:
            raise LedgerError("it registers a data set a second time")
        account = Account(
            dataset_id=facts["dataset_id"],
            unit=facts["unit"],
            neighboring_relation=facts["neighboring_relation"],
            num_records_public=facts["num_records_public"],
            cap=Cap.from_facts(facts["cap"]),
        )
        if check:
            check_registration(
                unit=account.unit,
                neighboring_relation=account.neighboring_relation,
                num_records_public=account.num_records_public,
                cap=account.cap,
            )
        self.accounts[account.dataset_id] = account

    def _apply_fingerprint(self, entry: Entry, check: bool) -> None:
        trusted, dataset_id = entry.trusted, entry.facts["dataset_id"]
        self.key_id = self.key_id or trusted.get("key_id")
        if "tag" in trusted:
            self.owners[trusted["tag"]] = dataset_id
            self.account(dataset_id).fingerprints.add(trusted["tag"])

    def _apply_cap(self, entry: Entry, check: bool) -> None:
        account, cap = self.account(entry.facts["dataset_id"]), Cap.from_facts(entry.facts["cap"])
        if cap != replace(account.cap, epsilon=cap.epsilon) or cap.quotas:
            raise LedgerError("it changes more of a cap than epsilon")
        if cap.epsilon > account.highest_epsilon:
            account.num_raised += 1
            account.highest_epsilon = cap.epsilon
            self.notes.append(
                f"entry {entry.number}: the cap of {account.dataset_id!r} was raised from "
                f"{account.cap.epsilon:g} to {cap.epsilon:g}"
            )
        account.cap = cap

    def _apply_reserve(self, entry: Entry, check: bool) -> None:
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

    def _apply_extend(self, entry: Entry, check: bool) -> None:
        before = self.reservation(entry.facts["reservation"])
        account = self.account(before.dataset_id)
        if check:
            account.admit_steps(before.step_class, entry.facts["num_steps"])
        account.charge(replace(before, num_steps=before.num_steps + entry.facts["num_steps"]))

    def _apply_settle(self, entry: Entry, check: bool) -> None:
        before, executed = self.reservation(entry.facts["reservation"]), entry.facts["num_steps_executed"]
        if check and before.num_steps_executed is not None and executed < before.num_steps_executed:
            raise LedgerError("it takes back settled steps")
        if executed > before.num_steps:
            self.notes.append(
                f"entry {entry.number}: {before.label!r} drew {executed} steps and had reserved "
                f"{before.num_steps}; all are charged"
            )
        self.account(before.dataset_id).charge(replace(before, num_steps_executed=executed))

    def _apply_seal(self, entry: Entry, check: bool) -> None:
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
