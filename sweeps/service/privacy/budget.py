"""The budget ledger in a sweep: reserved before any worker starts, extended before a resume, settled after.

The driver alone talks to the ledger. A worker sees its *grant*, a file beside its checkpoint that says how
many steps are reserved (`trainers.files.checkpoint`): it draws no step beyond it. The driver asks the ledger
every few seconds whether the reservations still stand; when it does not answer, all grants are taken back
and every training stops at its next checkpoint.

*Whose charge.* Labels are `sweep-id/trial`. The id is random, drawn with the sweep's folder and kept in its
plan, so that a sweep of the same name elsewhere, or one begun anew, neither extends nor settles the charges
of this one. What a deleted folder had charged stays charged. The plan also keeps the ledger's id and the data
set's, and a resume with others is refused.

*An old copy of the ledger.* Every charge is on disk first, then in the mark on the data, then in the sweep's
plan, and only then granted to a worker (`dpgcl_core.ledger.ledger` has the proposition). A ledger that lacks
what mark or plan know is refused on the next start.

*Lost checkpoints.* The sweep's folder counts the starts of every trial (`SweepFolder.mark_start`). A start
without a trace among the checkpoints may have drawn everything: all planned steps are charged once more.

*Noised releases.* A training that releases its noised norm or noised counts has further reservations,
labelled `sweep-id/trial/snr` and `sweep-id/trial/scores`:
- The first step of every attempt goes to the class with the joint noise multiplier, all others to the plain
  class. A joint step dominates a plain one, so where it is not known which of the executed steps were first
  ones, some plain steps may count as joint, never the other way round.
- Each noised count is a step on all held-out records: q = 1 and the count's own noise. Within one sweep the
  larger of training and scoring would do, for their records are disjoint. The ledger adds them: its filter
  knows neither records nor splits, and a record that is scored here may be trained on by the next sweep. A
  sum is at least the larger one, whatever the splits. A restart that may draw them again reserves them
  again. Counts are not given back.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dpgcl_core.errors import BudgetExceeded, ConfigError, DpgclError, LedgerError
from dpgcl_core.ledger.account import PlannedTraining, Reservation
from dpgcl_core.ledger.chain import RECORD
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.report import LedgerStatement
from sweeps.service.options.data import DataOptions
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial, is_proven, trial_class
from sweeps.service.privacy.account import bind_images, check_account, unit_of
from sweeps.service.storage.folder import SweepFolder
from trainers.files.checkpoint import CheckpointFolder, Grant, read_grant, write_grant

CONFIRM_EVERY_SECONDS = 5.0
SNR, SCORES = "/snr", "/scores"
_log = logging.getLogger(__name__)
NO_LEDGER = "no ledger: nothing stops other trainings on the same data from adding to this ε"


@dataclass
class SweepBudget:
    """The reservations of one open sweep.

    Attributes:
      ledger: the ledger.
      dataset_id: whose budget.
      sweep_id: random; labels are `name-id/trial`.
      trials: all trials of the sweep.
      later: trials that follow in a sweep of their own, which the budget must hold, too, in advance.
      folder: of the sweep; its plan must hold the id before anything is charged.
      unit: what one record stands for.
      source: of the data; None: images that they name are not marked.
      lost: why the ledger is out of reach; None while it answers.
    """

    ledger: Ledger
    dataset_id: str
    sweep_id: str
    trials: Sequence[Trial]
    folder: SweepFolder
    unit: str = RECORD
    source: DataOptions | None = None
    later: Sequence[Trial] = ()
    lost: str | None = None
    _open: dict[str, dict[str, Reservation]] = field(default_factory=dict)
    _confirmed: float = 0.0

    def check(self) -> None:
        """Refuse a sweep that the ledger would not admit, before anything is started or charged.

        Raises:
          ConfigError: a trial has no guarantee, or one that a ledger cannot add up.
          BudgetExceeded, LedgerError: as `Ledger.reserve`.
        """
        loose = [trial.name for trial in self.trials if not is_proven(trial)]
        if loose:
            raise ConfigError(
                f"a ledger takes trainings with a guarantee only, and {loose[0]} has none; leave such trials "
                "out (--no-non-private, no --seeded-non-private)"
            )
        other = [t.config.mechanism.method for t in self.trials if not t.config.mechanism.rules.plain_event]
        if other:
            raise ConfigError(
                f"a ledger adds up Poisson-sampled Gaussian steps for adding or removing one record, and "
                f"{other[0]} has others: leave it out of the sweep, or give --no-ledger"
            )
        registered = self.ledger.statement(self.dataset_id).unit
        if registered != self.unit:
            raise LedgerError(
                f"data set {self.dataset_id!r} is registered with unit {registered!r}, and this sweep "
                f"protects {self.unit!r}: --unit-column must name the registered unit, and be left out "
                f"for {RECORD!r}"
            )
        try:
            planned = self._planned([*self._missing(), *self.later])
            self.ledger.would_admit(self.dataset_id, planned)
        except BudgetExceeded as error:
            number = len(self.trials) + len(self.later)
            raise BudgetExceeded(
                f"{error}. The whole sweep ({number} trial{'s' * (number != 1)}) must fit before it "
                "starts, and nothing was started: take fewer points or repeats, fewer steps, or a smaller "
                "epsilon"
            ) from error

    def text(self) -> str:
        """Return what the sweep takes of the ledger and what it leaves, beside the sweep's own ε."""
        spent = self.ledger.spent(self.dataset_id, with_pld=False)
        planned = self._planned([*self._missing(), *self.later])
        cap = f"cap ε = {spent.cap.epsilon:g} at δ = {spent.cap.delta:.4g}"
        first = f"ledger: {self.dataset_id!r} has a {cap} for all that is ever charged to it"
        if spent.rdp is not None and spent.rdp_budget is not None:
            rule = spent.cap.rdp_filter()
            needed = sum(rule.cost(each.step_class, each.num_steps) for each in planned)
            taken, charged = needed / spent.rdp_budget, spent.rdp / spent.rdp_budget
            first += (
                f"; {charged:.1%} of it is charged, and these trials take {taken:.1%} (RDP {needed:.4g} of "
                f"{spent.rdp_budget:.4g} at order {rule.order:g})"
            )
        costliest = max(self.trials, key=lambda trial: trial.config.epsilon())
        more = _num_admitted(self.ledger, self.dataset_id, costliest, planned)
        return (
            f"{first}; then {more} more like {costliest.name} fit. What this sweep costs is the ε above. The "
            "ledger counts the same trials by a coarser rule, under which later sweeps may follow what "
            "earlier ones found, and promises its cap for all of them together"
        )

    def begin(self, remaining: Sequence[Trial], data: Path | None) -> None:
        """Charge all planned steps and those that resumed trainings may repeat, then write the grants.

        All new trainings are reserved in one transaction. A training that has a reservation already is
        extended to the largest number of steps that all its attempts may have drawn.

        Args:
          remaining: the trials that are about to run.
          data: where the records lie, to leave the ledger's mark there; also on the images of a list, where
            they lie by themselves.

        Raises:
          BudgetExceeded, LedgerError: nothing may start.
        """
        if (self.folder.read_plan() or {}).get("sweep_id") != self.sweep_id:
            raise LedgerError(f"{self.folder.path} does not hold this sweep's id: a resume would not find it")
        if data is not None:
            for note in self.ledger.bind(self.dataset_id, data):
                _log.warning("note: %s", note)
            if self.source is not None and not bind_images(self.ledger, self.dataset_id, self.source):
                _log.warning(
                    "not all images have the ledger's mark, for some lie among other files or in folders "
                    "that cannot be written: another list of them would not be recognised"
                )
        missing = self._missing()
        for trial in missing:  # from here on a missing grant tells that a folder was lost
            self._take_back(trial.name)
        if missing:
            self.ledger.reserve(
                self.dataset_id,
                self._planned(missing),
                unit=self.unit,
                neighboring_relation=missing[0].config.mechanism.neighboring_relation,
            )
        for trial in remaining:
            self._extend(trial, self._open.get(trial.name) or self._found(trial))
        self._keep_head()
        if data is not None and self.source is not None:
            bind_images(self.ledger, self.dataset_id, self.source)
        self._confirmed = time.monotonic()

    def restarted(self, name: str) -> None:
        """Charge what a training repeats whose process has died, before it starts again.

        Where the ledger refuses, the grant is taken back, and the training ends at its first look at it.
        """
        trial = next(trial for trial in self.trials if trial.name == name)
        try:
            self._extend(trial, self._open[name])
        except DpgclError:
            self._take_back(name)

    def confirm(self, *, every_seconds: float = CONFIRM_EVERY_SECONDS) -> None:
        """Ask the ledger whether the reservations stand; if it does not say so, take all grants back."""
        if self.lost is not None or time.monotonic() - self._confirmed < every_seconds:
            return
        try:
            for reservation in (each for held in self._open.values() for each in held.values()):
                self.ledger.confirm(reservation)
        except LedgerError as error:
            self.lost = str(error)
            for name in self._open:
                self._take_back(name)
        self._confirmed = time.monotonic()

    def settle(self, name: str, metrics: Mapping[str, float]) -> None:
        """Refund the unused steps of a finished training.

        Trainings that failed or never started keep their whole charge: nobody knows how far they came.

        Raises:
          LedgerError: the ledger is out of reach (settle again later), or the training overdrew.
        """
        trial = next(trial for trial in self.trials if trial.name == name)
        held = self._open.get(name) or self._found(trial)
        executed = {part: reservation.num_steps for part, reservation in held.items()}
        grant = read_grant(self.folder.checkpoint_folder(name))
        if grant is not None:
            total = int(metrics["num_steps_charged"]) + grant.num_steps_lost
            counted = self.folder.drawn(name)
            if (
                SNR in held and counted is not None and not grant.num_steps_lost
            ):  # else nobody knows the first
                first = max(counted.num_attempts, total - held[""].num_steps)
                executed[SNR] = min(held[SNR].num_steps, first)
            executed[""] = max(0, total - executed.get(SNR, 0))
        for part, reservation in held.items():
            if reservation.num_steps_executed is None:
                self.ledger.settle(reservation, executed[part])
        self._open.pop(name, None)
        self._keep_head()

    def statement(self) -> LedgerStatement:
        """Return the ledger's lines of the privacy statement."""
        return self.ledger.statement(self.dataset_id)

    def left(self) -> tuple[float | None, int]:
        """Return what the ledger has left, as `what_is_left`."""
        return what_is_left(self.ledger, self.dataset_id, self.trials)

    def _keep_head(self) -> None:
        """Keep the ledger's head in the plan, before anything more may be drawn."""
        self.folder.keep_head(vars(self.ledger.head_of(self.dataset_id)))

    def _missing(self) -> list[Trial]:
        """The trials without a reservation."""
        return [t for t in self.trials if self.ledger.reservation(self.dataset_id, self._label(t)) is None]

    def _found(self, trial: Trial) -> dict[str, Reservation]:
        """The reservations of a trial, by the end of their labels: "" for its steps, and those for more."""
        found = {}
        for label in (planned.label for planned in self._planned([trial])):
            reservation = self.ledger.reservation(self.dataset_id, label)
            if reservation is None:
                raise LedgerError(f"the ledger holds no reservation {label!r}; it is another ledger")
            found[label.removeprefix(self._label(trial))] = reservation
        return found

    def _extend(self, trial: Trial, held: dict[str, Reservation]) -> None:
        """Reserve what one more attempt may draw in all, and grant its steps."""
        path, num_steps = self.folder.checkpoint_folder(trial.name), trial.config.mechanism.num_steps
        before, starts = read_grant(path), self.folder.starts(trial.name)
        if self.folder.has_begun(trial.name):
            self._checkpoints(trial).outdate()  # one that was cut off may still draw what it has counted
        more = dict.fromkeys(held, 0)
        if SNR in held:
            more[SNR] = self._more_first_steps(trial.name, held[SNR], before)
        reserved = held[""].num_steps + (held[SNR].num_steps if SNR in held else 0)
        # Reserved or started, and no trace of what came of it: all of it may have been drawn.
        lost = max(starts.num_lost * num_steps, reserved if before is None else before.num_steps_lost)
        needed = lost + self._checkpoints(trial).steps_if_resumed(num_steps)
        more[""] = max(0, needed - reserved - more.get(SNR, 0))
        grant = Grant(num_steps=0, num_steps_lost=lost)
        if SCORES in held:
            more[SCORES], num_scorings = self._more_scores(trial, held[SCORES], lost)
            grant = replace(grant, num_scorings=num_scorings)
        extended = {part: self.ledger.extend(each, more[part]) for part, each in held.items()}
        self._open[trial.name] = extended
        self._keep_head()
        granted = extended[""].num_steps + (extended[SNR].num_steps if SNR in held else 0)
        write_grant(path, replace(grant, num_steps=granted))

    def _more_first_steps(self, name: str, held: Reservation, before: Grant | None) -> int:
        """Return how many first steps one more attempt needs on top; those that drew nothing had none."""
        if before is None or before.num_steps_lost or self.folder.starts(name).num_lost:
            return 1  # nobody knows how many there were
        counted = self.folder.drawn(name)
        return max(0, (counted.num_attempts if counted is not None else 0) + 1 - held.num_steps)

    def _more_scores(self, trial: Trial, held: Reservation, num_steps_lost: int) -> tuple[int, int]:
        """Return how many noised counts one more attempt needs on top, and the scorings to grant."""
        per_scoring, planned = trial.config.evaluation.num_noised_scores, trial.config.mechanism.num_steps
        grant, starts = read_grant(self.folder.checkpoint_folder(trial.name)), self.folder.starts(trial.name)
        reserved = held.num_steps // per_scoring
        unknown = reserved - (grant.num_scorings if grant is not None else 0)
        lost = max(starts.num_lost, num_steps_lost // planned, unknown)
        wanted = max(reserved, lost + self._checkpoints(trial).scorings_if_resumed())
        return (wanted - reserved) * per_scoring, wanted - lost

    def _checkpoints(self, trial: Trial) -> CheckpointFolder:
        every = trial.config.performance.checkpoint_every_steps
        return self.folder.checkpoints(trial.name, every_steps=every)

    def _take_back(self, name: str) -> None:
        """Grant no step; what is known to be lost, and the scorings that are paid for, stay."""
        path = self.folder.checkpoint_folder(name)
        write_grant(path, replace(read_grant(path) or Grant(num_steps=0), num_steps=0))

    def _planned(self, trials: Sequence[Trial]) -> list[PlannedTraining]:
        """What is charged for each trial before it starts."""
        return planned_trainings({self._label(trial): trial for trial in trials})

    def _label(self, trial: Trial) -> str:
        return f"{self.folder.name}-{self.sweep_id}/{trial.name}"


def _parts(trial: Trial, label: str, times: int = 1) -> list[PlannedTraining]:
    """What is charged for so many trials of one kind before they start: steps, and what is released more."""
    released, delta = trial_class(trial), trial.config.mechanism.target_delta
    parts = [("", released.step_class, max(1, released.num_steps - released.num_joint_steps))]
    if released.joint_class is not None:
        parts.append((SNR, released.joint_class, released.num_joint_steps))
    if released.score_class is not None:
        parts.append((SCORES, released.score_class, released.num_scores))
    return [
        PlannedTraining(label=f"{label}{part}", step_class=each, num_steps=times * num, delta=delta)
        for part, each, num in parts
    ]


def what_is_left(ledger: Ledger, dataset_id: str, trials: Sequence[Trial]) -> tuple[float | None, int]:
    """Return what a data set's ledger has left: ε of its filter, and trainings like the costliest of these.

    The first one is None with step quotas, which have no common ε. All of it follows from what was charged,
    and so from public numbers alone.
    """
    costliest = max(filter(is_proven, trials), key=lambda trial: trial.config.epsilon())
    spent = ledger.spent(dataset_id, with_pld=False)
    epsilon = None if spent.cap.quotas else max(0.0, spent.cap.epsilon - spent.epsilon_filter)
    return epsilon, _num_admitted(ledger, dataset_id, costliest)


def _num_admitted(
    ledger: Ledger, dataset_id: str, trial: Trial, planned: Sequence[PlannedTraining] = ()
) -> int:
    """How many trainings like one a ledger would admit now, or after those that are planned."""

    def admits(number: int) -> bool:
        more = _parts(trial, f"more-{new_sweep_id()}", number)
        try:
            ledger.would_admit(dataset_id, [*planned, *more])
        except BudgetExceeded:
            return False
        return True

    return largest_admitted(admits, 2**20)


def largest_admitted(admits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that is admitted, by bisection; 0 where 1 is not.

    >>> [largest_admitted(lambda number: number <= limit, 2**20) for limit in (0, 1, 5, 64, 2**21)]
    [0, 1, 5, 64, 1048576]
    >>> [largest_admitted(lambda number: number <= limit, 5) for limit in (0, 4, 5, 9)]
    [0, 4, 5, 5]
    """
    low, high = 0, 1
    while high <= most and admits(high):
        low, high = high, min(2 * high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if admits(middle) else (low, middle)
    return low


def planned_trainings(trials: Mapping[str, Trial]) -> list[PlannedTraining]:
    """Return what is charged for each trial before it starts, by the label of its charge."""
    return [part for label, trial in trials.items() for part in _parts(trial, label)]


def new_sweep_id() -> str:
    """Return a random id, by which a sweep is told from another one of the same name."""
    return secrets.token_hex(6)


def sweep_budget(
    plan: SweepPlan, ledger: Ledger | None, dataset_id: str | None, folder: SweepFolder
) -> SweepBudget | None:
    """Return the budget of an open sweep; None without a ledger, and of a sealed one, charged as a whole.

    Raises:
      LedgerError: the folder's sweep, whichever it is, was begun otherwise.
    """
    check_account(folder, ledger, dataset_id)
    if ledger is None or dataset_id is None or not plan.release.is_open:
        return None
    known = folder.read_plan()
    return SweepBudget(
        ledger=ledger,
        dataset_id=dataset_id,
        sweep_id=known["sweep_id"] if known is not None else new_sweep_id(),
        trials=plan.trials,
        folder=folder,
        unit=unit_of(plan.source),
        source=plan.source,
        later=plan.later,
    )
