"""Reports on a ledger: its charges, its part of a privacy statement, and its verification."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dpgcl_core.accounting.composition import epsilon_pld
from dpgcl_core.accounting.filters import QuotaFilter, StepClass, composed_event
from dpgcl_core.errors import LedgerError
from dpgcl_core.ledger.account import Account
from dpgcl_core.ledger.books import Books
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.chain import Entry, Head


@dataclass(frozen=True, kw_only=True)
class Charges:
    """The charges to a data set at some moment.

    The guarantee is the cap. `epsilon_filter` and `epsilon_pld` are for information: the amount spent under
    adaptive choices is not an (ε, δ) statement.

    Attributes:
      dataset_id, cap: the data set and its budget.
      num_steps: charged steps, by class: the reserved steps before settlement, the executed steps after it.
      num_open, num_settled, num_sealed: numbers of open and settled reservations of trainings, and of sealed
        sweeps.
      num_losses, closed: how often rows were stated to be lost, and whether all further charges are refused.
      sealed_epsilon, sealed_delta: ε and δ charged by basic composition to the share that the cap sets aside.
      rdp, rdp_budget: RDP charged and allowed at the filter's order; None with quotas.
      epsilon_filter: ε of the charge at the cap's δ and order, plus `sealed_epsilon`; with quotas, the ε of
        all quotas. For information.
      epsilon_pld: the PLD total at the cap's δ of all charged steps, plus the sealed sweeps' stated
        (ε, δ) by basic composition; None if the sealed sweeps leave no δ, if rows were lost, or if it was
        not requested. For information.
    """

    dataset_id: str
    cap: Cap
    num_steps: Mapping[StepClass, int]
    num_open: int
    num_settled: int
    num_sealed: int
    num_losses: int
    closed: bool
    sealed_epsilon: float
    sealed_delta: float
    rdp: float | None
    rdp_budget: float | None
    epsilon_filter: float
    epsilon_pld: float | None

    @property
    def title(self) -> str:
        """The data set and its cap in one line."""
        cap = self.cap
        rule = "step quotas" if cap.quotas else f"RDP filter at order {cap.order:g}"
        return f"{self.dataset_id}: cap ε = {cap.epsilon:g} at δ = {cap.delta:.4g}, {rule}"


def charges_of(account: Account, *, with_pld: bool) -> Charges:
    """Return the charges to an account; `with_pld` computes `epsilon_pld`, which is slow."""
    steps, budget = account.steps(), account.cap.filter()
    settled_reservations = [r for r in account.reservations.values() if r.num_steps_executed is not None]
    sealed_epsilon, sealed_delta = (float(value) for value in account.sealed_spent())
    rdp = rdp_budget = None
    if isinstance(budget, QuotaFilter):
        epsilon_filter = budget.epsilon_of_quotas
    else:
        rdp, rdp_budget = account.rdp_spent(), budget.rdp_budget
        epsilon_filter = budget.epsilon(rdp) if rdp else 0.0
    return Charges(
        dataset_id=account.dataset_id,
        cap=account.cap,
        num_steps=dict(steps),
        num_open=len(account.reservations) - len(settled_reservations),
        num_settled=len(settled_reservations),
        num_sealed=len(account.sealed),
        num_losses=account.num_losses,
        closed=account.closed,
        sealed_epsilon=sealed_epsilon,
        sealed_delta=sealed_delta,
        rdp=rdp,
        rdp_budget=rdp_budget,
        epsilon_filter=epsilon_filter + sealed_epsilon,
        epsilon_pld=_epsilon_pld(account, steps) if with_pld else None,
    )


def _epsilon_pld(account: Account, steps: Mapping[StepClass, int]) -> float | None:
    """Return `Charges.epsilon_pld`; None if it has no value."""
    delta = account.cap.delta - sum(s.delta for s in account.sealed.values())
    if delta <= 0 or account.num_losses:  # lost rows are known only by a bound on their RDP or steps
        return None
    drawn = {step_class: num for step_class, num in steps.items() if num}
    steps_epsilon = epsilon_pld(composed_event(drawn), delta) if drawn else 0.0
    return steps_epsilon + sum(s.epsilon for s in account.sealed.values())


@dataclass(frozen=True, kw_only=True)
class LedgerStatement:
    """The ledger's part of a privacy statement; releasable.

    Attributes:
      dataset_id, unit, neighboring_relation: the protected data set, unit and relation.
      epsilon, delta: the guarantee of everything charged together: the highest cap ever in force.
      rule: the filter that enforced it, in words.
      num_raised: how often the cap was raised; each time is a decision outside the guarantee.
      head: the ledger's head at that moment, with which `verify` detects a truncated or rewritten ledger.
    """

    dataset_id: str
    unit: str
    neighboring_relation: str
    epsilon: float
    delta: float
    rule: str
    num_raised: int
    head: Head

    def to_json(self) -> str:
        """Return the statement as JSON, for `verify --against`."""
        return json.dumps(asdict(self), indent=2)


def statement_of(account: Account, head: Head) -> LedgerStatement:
    """Return the statement of an account at `head`.

    Raises:
      LedgerError: more is charged than the highest cap allows.
    """
    cap = account.cap
    if not account.is_within(replace(cap, epsilon=account.highest_epsilon)):
        raise LedgerError(
            f"there is no guarantee to state for data set {account.dataset_id!r}: its charges exceed the "
            "cap. A training drew more steps than it reserved, or a lost ledger was charged, too. The cap of "
            "an RDP filter can be raised to cover them"
        )
    return LedgerStatement(
        dataset_id=account.dataset_id,
        unit=account.unit,
        neighboring_relation=account.neighboring_relation,
        epsilon=account.highest_epsilon,
        delta=cap.delta,
        rule="step quotas composed by PLD" if cap.quotas else f"RDP filter at order {cap.order:g}",
        num_raised=account.num_raised,
        head=replace(head, num_budgets=account.num_budgets),
    )


def read_head(path: Path) -> Head:
    """Return the ledger's head in a statement: at its top level, in `head` or in `ledger.head`.

    Raises:
      LedgerError: the file contains no head.
    """
    try:
        values: Any = json.loads(path.read_text())
        for name in ("ledger", "head"):
            values = values.get(name, values)
        return Head.from_facts(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(
            f"{path} is not a statement with a ledger's head ({type(error).__name__}); it needs ledger_id, "
            "num_entries and head_hash"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of verifying an intact ledger.

    Attributes:
      head: the ledger's head.
      notes: events that a reader should know: clocks set back, raised caps, overrun reservations, lost rows.
    """

    head: Head
    notes: tuple[str, ...]


def verified(entries: Iterable[Entry], against: Head | None) -> Verification:
    """Replay checked entries, check every admission again, and compare with a statement's head.

    Raises:
      LedgerError: a row contradicts the rows before it or exceeded its cap; or the ledger is not the
        statement's ledger, is shorter than the statement says, or was rewritten.
    """
    books = Books()
    for entry in entries:
        books.apply(entry, check=True)
    if against is not None:
        books.check_has(against, "the statement")
    return Verification(head=books.head, notes=tuple(books.notes))
