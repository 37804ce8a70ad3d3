"""One data set's account: its charges, and the checks that admit more charges.

`Ledger` makes the checks inside the transaction that adds a row; `verify` repeats them for every row.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from dpgcl_core.accounting.filters import QuotaFilter, RdpFilter, StepClass
from dpgcl_core.errors import BudgetExceeded, ConfigError, LedgerError, require_whole
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.mechanism.numbers import check_delta

MOST_TRAININGS = 1 << 20
"""From this number on, the number that `num_admitted` returns may be too small."""


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """The charge for one training, reserved before a worker of the training starts.

    Attributes:
      label: the trial's name; unique in the data set, so a trial cannot be started twice.
      step_class: sampling probability and noise multiplier of every step.
      num_steps: the number of all planned steps.
      delta: δ of the training's own privacy statement, or None; at most 1 over the number of records.
    """

    label: str
    step_class: StepClass
    num_steps: int
    delta: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Steps of one training, charged before the first of them is drawn.

    Attributes:
      ledger_id, number: the ledger, and the number of the entry that reserved the first steps.
      dataset_id: the data set whose budget is charged.
      label: the trial's name, unique in the data set.
      step_class: sampling probability and noise multiplier of every step.
      num_steps: number of reserved steps, extensions included.
      num_steps_executed: number of executed steps as settled; None while steps may still be drawn.
    """

    ledger_id: str
    number: int
    dataset_id: str
    label: str
    step_class: StepClass
    num_steps: int
    num_steps_executed: int | None = None

    @property
    def num_steps_charged(self) -> int:
        """The charged steps: all reserved steps before settlement, and the executed steps afterwards."""
        return self.num_steps if self.num_steps_executed is None else self.num_steps_executed


@dataclass(frozen=True, kw_only=True)
class SealedReservation:
    """The one charge of a sealed sweep; never settled, never refunded.

    Attributes:
      ledger_id, number: the ledger, and the number of the entry.
      dataset_id: the data set whose budget is charged.
      label: the sweep's name, unique in the data set.
      epsilon, delta: the bound on the whole sweep, tuning included.
      rdp: RDP of the sweep's release at the filter's order, or None if (epsilon, delta) itself is charged.
    """

    ledger_id: str
    number: int
    dataset_id: str
    label: str
    epsilon: float
    delta: float
    rdp: float | None


@dataclass(kw_only=True)
class Account:
    """One data set's account: its registration, and everything charged to it.

    *Lost rows.* If `lose` states that rows of the data set are lost, everything that these rows may have
    admitted is charged, and no reservation that is known at that time is refunded any more.

    Proposition. Let the rows known when a loss is stated be rows of the lost ledger, too. Let no cap in a
    lost row exceed the highest known cap, and let no training in a lost row have drawn beyond its
    reservation. Then the charge after `lose` is at least everything that was executed, or still is, under
    known and lost rows.
    Sketch: let B be the highest cap's budget (for quotas: every class's quota) and m = `num_budgets` of a
    ledger. All its charges are at most m B: without a loss m = 1, since each charge was admitted within the
    cap that was in force. A loss of rows of a ledger with m' raises the charge to at least m' B, and m to at
    least m', which dominates all that was executed under the lost rows. A refund cannot lower it, since the
    reservations that are known then count as settled in full, and later charges are added to it. If charges
    were added after the rows were lost (`on_top`), the charges of both ledgers are at most the sum of the
    known charge and m' B. In this case the sum is charged, which is at most (m + m') B. The heads of the data
    set contain m', so m' is known even though the lost rows, and losses among them, are not. If the same
    backup is restored a second time, the charge is the same as after the first time. m never decreases, in
    the ledger and on the mark.
    """

    dataset_id: str
    unit: str
    neighboring_relation: str
    num_records_public: int
    cap: Cap
    highest_epsilon: float = 0.0
    num_raised: int = 0
    rows: list[int] = field(default_factory=list)
    closed: bool = False
    num_losses: int = 0
    num_budgets: int = 1
    reservations: dict[int, Reservation] = field(default_factory=dict)
    sealed: dict[int, SealedReservation] = field(default_factory=dict)
    _steps: Counter[StepClass] = field(default_factory=Counter)
    _labels: set[str] = field(default_factory=set)
    _lost_rdp: float = 0.0
    _lost_sealed: tuple[Fraction, Fraction] = (Fraction(), Fraction())
    _covered_steps: Counter[StepClass] = field(default_factory=Counter)
    _covered_sealed: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.highest_epsilon = self.cap.epsilon

    def charge(self, reservation: Reservation | SealedReservation) -> None:
        """Add a reservation, or replace it with its extended or settled form."""
        self._labels.add(reservation.label)
        if isinstance(reservation, SealedReservation):
            self.sealed[reservation.number] = reservation
            return
        before = self.reservations.get(reservation.number)
        charged = reservation.num_steps_charged - (before.num_steps_charged if before else 0)
        self._steps[reservation.step_class] += charged
        self.reservations[reservation.number] = reservation

    def steps(self) -> Mapping[StepClass, int]:
        """Return the steps charged, by class."""
        return self._steps

    def sealed_spent(self) -> tuple[Fraction, Fraction]:
        """Return the exact sums of ε and δ charged by basic composition: sealed sweeps, and lost rows."""
        basic = [s for s in self.sealed.values() if s.rdp is None]
        return (
            sum((Fraction(s.epsilon) for s in basic), self._lost_sealed[0]),
            sum((Fraction(s.delta) for s in basic), self._lost_sealed[1]),
        )

    def rdp_spent(self) -> float:
        """Return the RDP charged at the filter's order, rounded up (RDP filter only).

        The charge for lost rows covers everything charged before; only later charges are added to it.
        """
        steps = {each: num - self._covered_steps[each] for each, num in self._steps.items()}
        of_steps = self.cap.rdp_filter().total_cost(steps)
        curves = [
            s.rdp for n, s in self.sealed.items() if s.rdp is not None and n not in self._covered_sealed
        ]
        parts = [part for part in (self._lost_rdp, of_steps, *curves) if part]
        return math.nextafter(math.fsum(parts), math.inf) if len(parts) > 1 or curves else sum(parts)

    def lose(self, num_budgets: int = 1, *, on_top: bool, close: bool) -> None:
        """Charge the whole cap `num_budgets` times for lost rows; see the class.

        Args:
          num_budgets: how many times the whole cap the lost ledger may have charged.
          on_top: whether to add this amount to the existing charge, instead of raising the charge to it.
          close: whether to refuse all further charges, whatever the cap.
        """
        for number, reservation in self.reservations.items():
            if reservation.num_steps_executed is None:
                self.reservations[number] = replace(reservation, num_steps_executed=reservation.num_steps)
        highest = replace(self.cap, epsilon=self.highest_epsilon)
        budget = highest.filter()
        if isinstance(budget, QuotaFilter):
            for step_class, quota in highest.quotas:
                known_steps, whole_quota = self._steps[step_class], num_budgets * quota
                self._steps[step_class] = (
                    known_steps + whole_quota if on_top else max(known_steps, whole_quota)
                )
        else:
            rdp, whole_rdp = self.rdp_spent(), num_budgets * budget.rdp_budget
            whole_rdp = math.nextafter(whole_rdp, math.inf) if num_budgets > 1 else whole_rdp
            self._lost_rdp = (
                math.nextafter(rdp + whole_rdp, math.inf) if on_top and rdp else max(rdp, whole_rdp)
            )
            self._covered_steps = Counter(self._steps)
            self._covered_sealed = frozenset(self.sealed)
        share = [num_budgets * Fraction(part) for part in (highest.sealed_epsilon, highest.sealed_delta)]
        added_share = [
            part if on_top else max(Fraction(), part - charged_part)
            for part, charged_part in zip(share, self.sealed_spent(), strict=True)
        ]
        self._lost_sealed = (self._lost_sealed[0] + added_share[0], self._lost_sealed[1] + added_share[1])
        self.closed = self.closed or close
        self.num_losses += 1
        self.num_budgets = self.num_budgets + num_budgets if on_top else max(self.num_budgets, num_budgets)

    def check_use(self, unit: str, neighboring_relation: str) -> None:
        """Raise LedgerError unless a training's unit and relation equal the registered values."""
        for name, value in (("unit", unit), ("neighboring_relation", neighboring_relation)):
            if value != getattr(self, name):
                raise LedgerError(
                    f"data set {self.dataset_id!r} is registered with {name} {getattr(self, name)!r}; a "
                    f"training with {value!r} cannot be charged to it"
                )

    def is_within(self, cap: Cap) -> bool:
        """Return whether the charge is within a cap; overrun reservations and lost rows may exceed a cap."""
        budget, steps = cap.filter(), self.steps()
        sealed_epsilon, sealed_delta = self.sealed_spent()
        if sealed_epsilon > cap.sealed_epsilon or sealed_delta > cap.sealed_delta:
            return False
        if isinstance(budget, QuotaFilter):
            return all(budget.admits(steps, step_class, 0) for step_class, num in steps.items() if num)
        return budget.admits(self.rdp_spent(), 0.0)

    def check_label(self, label: str) -> None:
        """Raise LedgerError if a reservation already has the label."""
        if not label or not isinstance(label, str):
            raise ConfigError(f"a reservation needs a label, such as its trial's name; got {label!r}")
        if label in self._labels:
            raise LedgerError(
                f"{label!r} is already charged to data set {self.dataset_id!r}. To resume it, extend its "
                "reservation by the repeated steps. A new training or sweep needs another label"
            )

    def admit_all(self, planned: Sequence[PlannedTraining]) -> None:
        """Raise BudgetExceeded unless the filter admits all planned trainings together; charge nothing."""
        draft = copy.copy(self)
        draft.reservations, draft._steps, draft._labels = {}, Counter(self._steps), set(self._labels)
        for number, training in enumerate(planned):
            if training.delta is not None:
                check_delta(training.delta, self.num_records_public)
            draft.check_label(training.label)
            try:
                draft.admit_steps(training.step_class, training.num_steps)
            except BudgetExceeded:
                if len(planned) == 1 or self.closed or isinstance(budget := self.cap.filter(), QuotaFilter):
                    raise
                rdp = sum(budget.cost(training.step_class, training.num_steps) for training in planned)
                raise BudgetExceeded(
                    self._rdp_message(budget, f"{len(planned)} more trainings", rdp)
                ) from None
            draft.charge(
                Reservation(
                    ledger_id="",
                    number=number,
                    dataset_id=self.dataset_id,
                    label=training.label,
                    step_class=training.step_class,
                    num_steps=training.num_steps,
                )
            )

    def admit_steps(self, step_class: StepClass, num_steps: int) -> None:
        """Raise BudgetExceeded unless the filter admits `num_steps` more steps."""
        require_whole("num_steps of a reservation", num_steps, least=1)
        self._check_open()
        budget = self.cap.filter()
        if isinstance(budget, QuotaFilter):
            if not budget.admits(self.steps(), step_class, num_steps):
                raise BudgetExceeded(self._quota_message(step_class, num_steps))
            return
        cost = budget.cost(step_class, num_steps)
        if not budget.admits(self.rdp_spent(), cost):
            steps = f"{num_steps} more steps of ({step_class.text})"
            raise BudgetExceeded(self._rdp_message(budget, steps, cost))

    def num_admitted(self, step_class: StepClass, num_steps: int) -> int:
        """Return how many trainings of `num_steps` steps would be admitted together; see `MOST_TRAININGS`."""

        def admits(number: int) -> bool:
            try:
                self.admit_steps(step_class, number * num_steps)
            except BudgetExceeded:
                return False
            return True

        return bisect_left(range(1, 2 * MOST_TRAININGS), True, key=lambda number: not admits(number))

    def admit_sealed(self, *, epsilon: float, delta: float, rdp: float | None) -> None:
        """Raise BudgetExceeded unless the cap admits a sealed sweep's tuned bound."""
        if not (0 < epsilon < math.inf and 0 <= delta < 1):
            raise ConfigError(
                f"a sealed sweep needs a finite positive epsilon and delta in [0, 1); got {epsilon}, {delta}"
            )
        self._check_open()
        if rdp is not None:
            self._admit_rdp(rdp)
            return
        spent_epsilon, spent_delta = self.sealed_spent()
        cap = self.cap
        if (
            spent_epsilon + Fraction(epsilon) > cap.sealed_epsilon
            or spent_delta + Fraction(delta) > cap.sealed_delta
        ):
            raise BudgetExceeded(
                f"{self._cap_text()} sets ({cap.sealed_epsilon:g}, {cap.sealed_delta:g}) aside for sealed "
                f"sweeps by basic composition; ({float(spent_epsilon):g}, {float(spent_delta):g}) of it is "
                f"charged, and this sweep needs ({epsilon:g}, {delta:g}). Pass its RDP curve (RDP filter "
                f"only), or tune with a smaller budget{self._raise_text()}"
            )

    def _check_open(self) -> None:
        if self.closed:
            raise BudgetExceeded(f"data set {self.dataset_id!r} is closed for good: rows of it were lost")

    def _admit_rdp(self, rdp: float) -> None:
        budget = self.cap.filter()
        if isinstance(budget, QuotaFilter):
            raise ConfigError(
                f"data set {self.dataset_id!r} has step quotas, and an RDP curve cannot be charged to them. "
                "Leave the curve out to charge (epsilon, delta) to the share that the cap sets aside"
            )
        if not rdp > 0:
            raise ConfigError(f"a sealed sweep's RDP must be positive; got {rdp}")
        if not budget.admits(self.rdp_spent(), rdp):
            raise BudgetExceeded(self._rdp_message(budget, "this sealed sweep", rdp))

    def _rdp_message(self, budget: RdpFilter, request: str, rdp: float) -> str:
        used_share, needed_share = (value / (budget.rdp_budget or 1.0) for value in (self.rdp_spent(), rdp))
        digits = 1 if used_share + needed_share > 1.001 else 6
        return (
            f"{self._cap_text()} does not cover {request}: {used_share:.{digits}%} of it is used, "
            f"{needed_share:.{digits}%} is needed and {1 - used_share:.{digits}%} is left. Use fewer steps, "
            f"fewer trainings, more noise or a smaller sampling_prob{self._raise_text()}"
        )

    def _quota_message(self, step_class: StepClass, num_steps: int) -> str:
        quota = dict(self.cap.quotas).get(step_class)
        if quota is None:
            known = "; ".join(f"({step_class.text})" for step_class, _ in self.cap.quotas)
            return f"{self._cap_text()} has no quota for ({step_class.text}); it has quotas for {known}"
        return (
            f"{self._cap_text()} does not cover {num_steps} more steps of ({step_class.text}): "
            f"{self._steps[step_class]} of {quota} are charged. Use fewer steps{self._raise_text()}"
        )

    def _raise_text(self) -> str:
        """Return the end of a refusal's message: the remedy if lost rows are charged, "" otherwise."""
        if not self.num_losses:
            return ""
        if self.cap.quotas:
            return ". Rows were lost, and all quotas are charged for them"
        return (
            ". Rows were lost, and the whole cap is charged for them; raise the cap with "
            "`python -m dpgcl_core.ledger cap --epsilon E --allow-raise`"
        )

    def _cap_text(self) -> str:
        return f"the cap ({self.cap.epsilon:g}, {self.cap.delta:g}) of data set {self.dataset_id!r}"
