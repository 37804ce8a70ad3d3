"""The charges of an open sweep: reserved before a worker starts, extended before a resume, settled after.

Only the driver uses the ledger. A worker reads its *grant*, a file next to its checkpoint with the number of
reserved steps (`trainers.files.checkpoint`), and draws no further steps. The driver checks every few seconds
that the reservations are still valid. If the ledger does not answer, all grants are withdrawn and every
training stops at its next checkpoint.

*An old copy of the ledger.* Every charge is on disk first, then in the mark on the data, then in the sweep's
plan, and only then granted to a worker (`dpgcl_core.ledger.ledger` has the proposition). The next start
refuses a ledger that lacks rows recorded in the mark or the plan.

The plan also has the ids of ledger and data set, and a resume with other ids is refused. The charge of each
trial is described in `sweeps.service.privacy.reservations`.
"""

from __future__ import annotations

import logging
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpgcl_core.errors import BudgetExceeded, ConfigError, DpgclError, LedgerError
from dpgcl_core.ledger.account import PlannedTraining
from dpgcl_core.ledger.chain import RECORD
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.report import LedgerStatement
from sweeps.service.options.data import DataOptions
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial, is_proven
from sweeps.service.privacy.ledger_choice import bind_images, check_account, unit_of
from sweeps.service.privacy.reservations import TrialReservations, planned_trainings
from sweeps.service.storage.sweep_folder import SweepFolder

_log = logging.getLogger(__name__)
NO_LEDGER = "no ledger: nothing stops other trainings on the same data from adding to this ε"


@dataclass
class SweepBudget:
    """The reservations of one open sweep.

    Attributes:
      reservations: each trial's reservations; the folder's plan must hold their `sweep_id` before any charge.
      trials: all trials of the sweep.
      unit: the privacy unit that one record stands for, as registered in the ledger.
      source: the data options; if None, the folders of images that a list names get no ledger mark.
      later: trials of a sweep that follows this one; `check` requires that the budget has room for them, too.
      outage: the reason why the ledger is unreachable; None while it answers.
    """

    reservations: TrialReservations
    trials: Sequence[Trial]
    unit: str = RECORD
    source: DataOptions | None = None
    later: Sequence[Trial] = ()
    outage: str | None = None
    _last_check_seconds: float = 0.0

    @property
    def ledger(self) -> Ledger:
        """The ledger that the sweep is charged to."""
        return self.reservations.ledger

    @property
    def dataset_id(self) -> str:
        """The id of the data set whose budget is charged."""
        return self.reservations.dataset_id

    @property
    def folder(self) -> SweepFolder:
        """The sweep's folder."""
        return self.reservations.folder

    def check(self) -> None:
        """Check that the ledger would admit the sweep, before anything is started or charged.

        Raises:
          ConfigError: a trial has no guarantee, or steps that a ledger cannot add up.
          LedgerError: the data set is registered with another unit, or the ledger cannot be read.
          BudgetExceeded: the remaining budget has no room for all trials, later ones included.
        """
        unproven = [trial.name for trial in self.trials if not is_proven(trial)]
        if unproven:
            raise ConfigError(
                f"a ledger accepts only trainings with a guarantee, and {unproven[0]} has none. Leave such "
                "trials out: pass --no-non-private, and do not pass --seeded-non-private"
            )
        methods = [t.config.mechanism.method for t in self.trials if not t.config.mechanism.rules.plain_event]
        if methods:
            raise ConfigError(
                "a ledger can add up only Poisson-sampled Gaussian steps for adding or removing one record, "
                f"and {methods[0]} has other steps. Leave it out of the sweep, or pass --no-ledger"
            )
        registered = self.ledger.statement(self.dataset_id).unit
        if registered != self.unit:
            raise LedgerError(
                f"data set {self.dataset_id!r} is registered with unit {registered!r}, but this sweep "
                f"protects {self.unit!r}. --unit-column must name the registered unit; leave it out for "
                f"{RECORD!r}"
            )
        try:
            planned = self.reservations.plan([*self.reservations.without_any(self.trials), *self.later])
            self.ledger.would_admit(self.dataset_id, planned)
        except BudgetExceeded as error:
            num_trials = len(self.trials) + len(self.later)
            raise BudgetExceeded(
                f"{error}. The whole sweep ({num_trials} trial{'s' * (num_trials != 1)}) must fit before it "
                "starts, so nothing was started. Use fewer points, repeats or steps, or a smaller epsilon"
            ) from error

    def text(self) -> str:
        """Return the line on the sweep's share of the ledger's cap, and on the remaining budget."""
        spending = self.ledger.read_charges(self.dataset_id, with_pld=False)
        planned = self.reservations.plan([*self.reservations.without_any(self.trials), *self.later])
        cap = f"cap ε = {spending.cap.epsilon:g} at δ = {spending.cap.delta:.4g}"
        line = f"ledger: {self.dataset_id!r} has a {cap} for everything ever charged to it"
        if spending.rdp is not None and spending.rdp_budget is not None:
            rule = spending.cap.rdp_filter()
            needed_rdp = sum(rule.cost(training.step_class, training.num_steps) for training in planned)
            needed_share, charged_share = needed_rdp / spending.rdp_budget, spending.rdp / spending.rdp_budget
            line += (
                f"; {charged_share:.1%} of it is charged, and these trials need {needed_share:.1%} "
                f"(RDP {needed_rdp:.4g} of {spending.rdp_budget:.4g} at order {rule.order:g})"
            )
        costliest = max(self.trials, key=lambda trial: trial.config.epsilon())
        num_more = _num_admitted(self.ledger, self.dataset_id, costliest, planned)
        return (
            f"{line}; after them, {num_more} more like {costliest.name} fit. The cost of this sweep is the ε "
            "above. The ledger counts the same trials by a coarser rule: later sweeps may depend on the "
            "results of earlier ones, and the cap holds for all of them together"
        )

    def begin(self, remaining: Sequence[Trial], data: Path | None) -> None:
        """Charge all planned steps and the steps that resumed trainings may repeat, then write the grants.

        All new trainings are reserved in one transaction. The reservation of a training that already has one
        is extended to the largest number of steps that all its attempts may have drawn.

        Args:
          remaining: the trials that are about to run.
          data: the file or folder of private records, which gets the ledger's mark; None for public data. If
            it lists images, folders that hold nothing but these images are marked, too.

        Raises:
          BudgetExceeded, LedgerError: the ledger refuses the charge or cannot be reached; nothing may start.
        """
        if (self.folder.read_plan() or {}).get("sweep_id") != self.reservations.sweep_id:
            raise LedgerError(f"{self.folder.path} does not hold this sweep's id, which a resume needs")
        if data is not None:
            for note in self.ledger.bind(self.dataset_id, data):
                _log.warning("note: %s", note)
            if self.source is not None and not bind_images(self.ledger, self.dataset_id, self.source):
                _log.warning(
                    "not all images have the ledger's mark, because some are among other files or in "
                    "folders that cannot be written. Another list of these images would not be recognised"
                )
        unreserved = self.reservations.without_any(self.trials)
        for trial in unreserved:  # write grants of 0 steps: a missing grant then means that a folder was lost
            self.reservations.withdraw_grant(trial.name)
        if unreserved:
            self.ledger.reserve(
                self.dataset_id,
                self.reservations.plan(unreserved),
                unit=self.unit,
                neighboring_relation=unreserved[0].config.mechanism.neighboring_relation,
            )
        for trial in remaining:
            self.reservations.extend(trial)
        self.reservations.keep_head()
        if data is not None and self.source is not None:
            bind_images(self.ledger, self.dataset_id, self.source)
        self._last_check_seconds = time.monotonic()

    def restarted(self, name: str) -> None:
        """Charge the steps that a training repeats after its process died, before it starts again.

        If the ledger refuses, the grant is withdrawn, and the training ends when it first reads the grant.
        """
        try:
            self.reservations.extend(self._trial(name))
        except DpgclError:
            self.reservations.withdraw_grant(name)

    def confirm(self, *, every_seconds: float = 5.0) -> None:
        """Check with the ledger that all reservations are valid; else set `outage` and withdraw all grants.

        No-op after an outage, and within `every_seconds` of the last check.
        """
        if self.outage is not None or time.monotonic() - self._last_check_seconds < every_seconds:
            return
        try:
            for reservation in (r for parts in self.reservations.by_trial.values() for r in parts.values()):
                self.ledger.confirm(reservation)
        except LedgerError as error:
            self.outage = str(error)
            for name in self.reservations.by_trial:
                self.reservations.withdraw_grant(name)
        self._last_check_seconds = time.monotonic()

    def settle(self, name: str, metrics: Mapping[str, float]) -> None:
        """Refund the unused steps of a finished training.

        Trainings that failed or never started keep their whole charge: the number of their steps is unknown.

        Raises:
          LedgerError: the ledger is unreachable (settle again later), or more steps were drawn than reserved.
        """
        self.reservations.settle(self._trial(name), metrics)

    def statement(self) -> LedgerStatement:
        """Return the ledger's lines of the privacy statement."""
        return self.ledger.statement(self.dataset_id)

    def remaining_budget(self) -> tuple[float | None, int]:
        """Return the remaining ε, and how many more trainings like the sweep's costliest would fit."""
        return remaining_budget(self.ledger, self.dataset_id, self.trials)

    def _trial(self, name: str) -> Trial:
        return next(trial for trial in self.trials if trial.name == name)


def remaining_budget(ledger: Ledger, dataset_id: str, trials: Sequence[Trial]) -> tuple[float | None, int]:
    """Return the ε that a data set's cap leaves, and how many more trainings like the costliest trial fit.

    ε is None if the cap is made of step quotas, which have no common ε. Both values depend only on the
    charges, and so only on public numbers.
    """
    costliest = max(filter(is_proven, trials), key=lambda trial: trial.config.epsilon())
    spending = ledger.read_charges(dataset_id, with_pld=False)
    epsilon = None if spending.cap.quotas else max(0.0, spending.cap.epsilon - spending.epsilon_filter)
    return epsilon, _num_admitted(ledger, dataset_id, costliest)


def _num_admitted(
    ledger: Ledger, dataset_id: str, trial: Trial, planned: Sequence[PlannedTraining] = ()
) -> int:
    """Return how many trainings like `trial` a ledger would admit in addition to the planned trainings."""

    def admits(number: int) -> bool:
        more_trainings = planned_trainings({f"more-{new_sweep_id()}": trial}, num_of_each=number)
        try:
            ledger.would_admit(dataset_id, [*planned, *more_trainings])
        except BudgetExceeded:
            return False
        return True

    return largest_admitted(admits, 2**20)


def largest_admitted(admits: Callable[[int], bool], max_number: int) -> int:
    """Return the largest number up to `max_number` that `admits` accepts, by bisection; 0 if it rejects 1.

    `admits` must also accept every smaller number than one that it accepts.

    >>> [largest_admitted(lambda number: number <= limit, 2**20) for limit in (0, 1, 5, 64, 2**21)]
    [0, 1, 5, 64, 1048576]
    >>> [largest_admitted(lambda number: number <= limit, 5) for limit in (0, 4, 5, 9)]
    [0, 4, 5, 5]
    """
    return bisect_left(range(1, max_number + 1), True, key=lambda number: not admits(number))


def new_sweep_id() -> str:
    """Return a random id, which distinguishes a sweep from another sweep of the same name."""
    return secrets.token_hex(6)


def sweep_budget(
    plan: SweepPlan, ledger: Ledger | None, dataset_id: str | None, folder: SweepFolder
) -> SweepBudget | None:
    """Return an open sweep's budget; None without a ledger, or for a sealed sweep (see `sealed_charge`).

    Raises:
      LedgerError: the folder's sweep was begun with another ledger or data set, or the ledger is an old copy.
    """
    check_account(folder, ledger, dataset_id)
    if ledger is None or dataset_id is None or not plan.release.is_open:
        return None
    folder_plan = folder.read_plan()
    return SweepBudget(
        reservations=TrialReservations(
            ledger=ledger,
            dataset_id=dataset_id,
            sweep_id=folder_plan["sweep_id"] if folder_plan is not None else new_sweep_id(),
            folder=folder,
        ),
        trials=plan.trials,
        unit=unit_of(plan.source),
        source=plan.source,
        later=plan.later,
    )
