"""The reservations of each trial in a ledger: their labels and parts, and the resulting grant.

*Labels.* Labels are `name-id/trial`. The id is random, drawn with the sweep's folder and stored in its plan.
So a sweep of the same name elsewhere, or one that was begun again, neither extends nor settles the charges of
this sweep. The charges of a deleted folder remain.

*Lost checkpoints.* The sweep's folder counts the starts of every trial (`SweepFolder.mark_start`). A start
without a trace among the checkpoints may have drawn all steps, so all planned steps are charged once more.

*Noised releases.* A training that releases its noised norm or noised counts has further reservations,
labelled `name-id/trial/snr` and `name-id/trial/scores`:
- The first step of every attempt is in the class with the joint noise multiplier, all other steps are in the
  plain class. A joint step dominates a plain step. So if it is unknown which executed steps were first steps,
  some plain steps may count as joint, but no joint step counts as plain.
- Each noised count is a step on all held-out records: q = 1 and the count's own noise. Within one sweep the
  larger of training and scoring would be enough, because their records are disjoint. The ledger adds both:
  its filter has neither records nor splits, and the next sweep may train on a record that is scored here. The
  sum is at least the larger one, whatever the splits. A restart that may draw counts again reserves them
  again. Counts are not given back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dpgcl_core.errors import LedgerError
from dpgcl_core.ledger.account import PlannedTraining, Reservation
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.planning.trials import Trial, trial_class
from sweeps.service.storage.sweep_folder import SweepFolder
from trainers.files.checkpoint import CheckpointFolder, Grant, read_grant, write_grant

SNR, SCORES = "/snr", "/scores"
"""The ends of the labels of a trial's further reservations: for its first steps, and for noised counts."""


@dataclass(kw_only=True)
class TrialReservations:
    """The reservations of a sweep's trials, and the grants that their workers read.

    A charge is written to the ledger, then the ledger's head to the sweep's plan; only then is it granted.

    Attributes:
      ledger: the ledger.
      dataset_id: the id of the data set whose budget is charged.
      sweep_id: the sweep's random id; labels are `name-id/trial`.
      folder: the sweep's folder.
      by_trial: the open reservations by the trial's name and the end of their label: "" for its plain steps,
        `SNR` for first steps that release a noised norm, `SCORES` for noised counts.
    """

    ledger: Ledger
    dataset_id: str
    sweep_id: str
    folder: SweepFolder
    by_trial: dict[str, dict[str, Reservation]] = field(default_factory=dict)

    def plan(self, trials: Sequence[Trial]) -> list[PlannedTraining]:
        """Return the charges to reserve before the trials start."""
        return planned_trainings({self._label(trial): trial for trial in trials})

    def without_any(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials for which the ledger holds no reservation."""
        return [t for t in trials if self.ledger.reservation(self.dataset_id, self._label(t)) is None]

    def of_trial(self, trial: Trial) -> dict[str, Reservation]:
        """Return the reservations of a trial, by the ends of their labels.

        Raises:
          LedgerError: the ledger lacks a reservation.
        """
        if trial.name in self.by_trial:
            return self.by_trial[trial.name]
        parts = {}
        for label in (planned.label for planned in self.plan([trial])):
            reservation = self.ledger.reservation(self.dataset_id, label)
            if reservation is None:
                raise LedgerError(f"the ledger has no reservation {label!r}: it is not this sweep's ledger")
            parts[label.removeprefix(self._label(trial))] = reservation
        return parts

    def extend(self, trial: Trial) -> None:
        """Reserve all steps that one more attempt of a trial may draw, and grant them.

        Raises:
          BudgetExceeded, LedgerError: the ledger refuses, and nothing more is granted.
        """
        parts = self.of_trial(trial)
        path, num_steps = self.folder.checkpoint_folder(trial.name), trial.config.mechanism.num_steps
        before, starts = read_grant(path), self.folder.starts(trial.name)
        if self.folder.has_begun(trial.name):
            self._checkpoints(trial).outdate()  # a disconnected attempt may still draw its counted steps
        num_extra = dict.fromkeys(parts, 0)
        if SNR in parts:
            num_extra[SNR] = self._more_first_steps(trial.name, parts[SNR], before)
        num_reserved = _num_steps(parts)
        # A missing grant, or a start without a trace, may stand for attempts that drew all their steps.
        num_lost = max(starts.num_lost * num_steps, num_reserved if before is None else before.num_steps_lost)
        num_needed = num_lost + self._checkpoints(trial).steps_if_resumed(num_steps)
        num_extra[""] = max(0, num_needed - num_reserved - num_extra.get(SNR, 0))
        grant = Grant(num_steps=0, num_steps_lost=num_lost)
        if SCORES in parts:
            num_extra[SCORES], num_scorings = self._more_scores(trial, parts[SCORES], num_lost)
            grant = replace(grant, num_scorings=num_scorings)
        extended = {part: self.ledger.extend(r, num_extra[part]) for part, r in parts.items()}
        self.by_trial[trial.name] = extended
        self.keep_head()
        write_grant(path, replace(grant, num_steps=_num_steps(extended)))

    def settle(self, trial: Trial, metrics: Mapping[str, float]) -> None:
        """Refund the unused steps of a finished training.

        Raises:
          LedgerError: the ledger is unreachable (settle again later), or more steps were drawn than reserved.
        """
        name, parts = trial.name, self.of_trial(trial)
        executed = {part: reservation.num_steps for part, reservation in parts.items()}
        grant = read_grant(self.folder.checkpoint_folder(name))
        if grant is not None:
            total = int(metrics["num_steps_charged"]) + grant.num_steps_lost
            counted = self.folder.read_counts(name)
            if SNR in parts and counted is not None and not grant.num_steps_lost:  # else unknown
                num_first_steps = max(counted.num_attempts, total - parts[""].num_steps)
                executed[SNR] = min(parts[SNR].num_steps, num_first_steps)
            executed[""] = max(0, total - executed.get(SNR, 0))
        for part, reservation in parts.items():
            if reservation.num_steps_executed is None:
                self.ledger.settle(reservation, executed[part])
        self.by_trial.pop(name, None)
        self.keep_head()

    def withdraw_grant(self, name: str) -> None:
        """Set the number of granted steps to 0; the numbers of lost steps and granted scorings stay."""
        path = self.folder.checkpoint_folder(name)
        write_grant(path, replace(read_grant(path) or Grant(num_steps=0), num_steps=0))

    def keep_head(self) -> None:
        """Store the head of the data set's rows in the sweep's plan, before anything more may be drawn."""
        self.folder.keep_head(vars(self.ledger.head_of(self.dataset_id)))

    def _more_first_steps(self, name: str, reservation: Reservation, grant: Grant | None) -> int:
        """Return how many first steps to add for one more attempt; an attempt that drew nothing had none."""
        if grant is None or grant.num_steps_lost or self.folder.starts(name).num_lost:
            return 1  # the number of earlier first steps is unknown
        counted = self.folder.read_counts(name)
        return max(0, (counted.num_attempts if counted is not None else 0) + 1 - reservation.num_steps)

    def _more_scores(self, trial: Trial, reservation: Reservation, num_steps_lost: int) -> tuple[int, int]:
        """Return how many noised counts to add for one more attempt, and how many scorings to grant."""
        per_scoring, num_steps = trial.config.evaluation.num_noised_scores, trial.config.mechanism.num_steps
        path, starts = self.folder.checkpoint_folder(trial.name), self.folder.starts(trial.name)
        grant, num_reserved = read_grant(path), reservation.num_steps // per_scoring
        num_unknown = num_reserved - (grant.num_scorings if grant is not None else 0)
        num_lost = max(starts.num_lost, num_steps_lost // num_steps, num_unknown)
        num_needed = max(num_reserved, num_lost + self._checkpoints(trial).scorings_if_resumed())
        return (num_needed - num_reserved) * per_scoring, num_needed - num_lost

    def _checkpoints(self, trial: Trial) -> CheckpointFolder:
        every = trial.config.performance.checkpoint_every_steps
        return self.folder.checkpoints(trial.name, every_steps=every)

    def _label(self, trial: Trial) -> str:
        return f"{self.folder.name}-{self.sweep_id}/{trial.name}"


def _num_steps(parts: Mapping[str, Reservation]) -> int:
    """Return the number of steps that a trial has reserved, first steps and others."""
    return sum(parts[part].num_steps for part in ("", SNR) if part in parts)


def planned_trainings(trials: Mapping[str, Trial], *, num_of_each: int = 1) -> list[PlannedTraining]:
    """Return the labelled charges to reserve before each trial starts.

    Args:
      trials: the trials by label.
      num_of_each: the number of equal trainings that each charge is for.
    """
    return [part for label, trial in trials.items() for part in _planned_charges(trial, label, num_of_each)]


def _planned_charges(trial: Trial, label: str, num_trials: int) -> list[PlannedTraining]:
    """Return the charges for equal trials: for their plain steps, first steps and noised counts."""
    trial_release, delta = trial_class(trial), trial.config.mechanism.target_delta
    parts = [("", trial_release.step_class, max(1, trial_release.num_steps - trial_release.num_joint_steps))]
    if trial_release.joint_class is not None:
        parts.append((SNR, trial_release.joint_class, trial_release.num_joint_steps))
    if trial_release.score_class is not None:
        parts.append((SCORES, trial_release.score_class, trial_release.num_scores))
    return [
        PlannedTraining(label=f"{label}{part}", step_class=kind, num_steps=num_trials * num, delta=delta)
        for part, kind, num in parts
    ]
