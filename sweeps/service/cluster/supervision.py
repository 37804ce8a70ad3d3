"""Monitors running attempts at trainings: whether each one continues, and the messages on lost attempts.

Messages consist of fixed sentences and of the sweep's own counts. Ray's message about a process's death stays
in Ray's logs, because the user's network code may have written into it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpgcl_core.attempts import DrawCounts
from dpgcl_core.errors import DpgclError
from sweeps.service.cluster.trial_failure import FailureKind, TrialFailure, why_lost
from sweeps.service.console.terminal import count, warn
from sweeps.service.options.service import ServiceOptions
from sweeps.service.storage.log import LOST, RESTARTED, SweepLog
from sweeps.service.storage.sweep_folder import SweepFolder
from trainers.config.training import TrainingConfig

if TYPE_CHECKING:
    from trainers.ray_worker import RayTrial

_CHECK_EVERY_SECONDS = 1.0


@dataclass
class Attempt:
    """One attempt at a training.

    Attributes:
      end: function that ends its processes.
      num_before: the number of attempts that had begun to draw before this attempt.
      start_seconds: the time from which its duration is measured; before it has begun, the last check.
      has_begun: whether it trains; if it waits for workers, this begins with their first counted step.
      state: its count of steps and its checkpoint's time at the last check; a change is progress.
      last_change: the time of the last such change.
      end_reason: the reason why this driver ended it; "" if it did not.
    """

    end: Callable[[], None]
    num_before: int
    start_seconds: float
    has_begun: bool
    state: object = None
    last_change: float = 0.0
    end_reason: str = ""

    def has_counted(self, counts: DrawCounts | None) -> bool:
        """Return whether this attempt has counted its first step."""
        return counts is not None and counts.num_attempts > self.num_before


class Supervisor:
    """Monitors all attempts of one sweep.

    Args:
      folder: the sweep's folder.
      service: the sweep's limits.
      log: the sweep's log. None for a sealed sweep: nothing is logged or printed, because files and a job's
        log must not reveal anything about its trials.
      ray_logs: the folder of Ray's own logs, for a printed line; "" to print none.
      clock: returns seconds.
    """

    def __init__(
        self,
        folder: SweepFolder,
        service: ServiceOptions,
        log: SweepLog | None,
        ray_logs: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._service, self._log, self._clock = folder, service, log, clock
        self._ray_logs = ray_logs
        self._running: dict[str, Attempt] = {}
        self._loss_reasons: dict[str, str] = {}
        self._last_check_time = -float("inf")

    @property
    def num_begun(self) -> int:
        """The number of monitored attempts that have begun."""
        return sum(attempt.has_begun for attempt in self._running.values())

    @property
    def drawing(self) -> list[str]:
        """The names of the trainings that may be drawing steps: their attempts have counted a step."""
        running = self._running.items()
        return [name for name, attempt in running if attempt.has_counted(self._folder.read_counts(name))]

    def note_start(self, trial_input: RayTrial, end: Callable[[], None], *, in_place: bool) -> None:
        """Monitor a new attempt, and log it as a restart if the last attempt was lost.

        Args:
          trial_input: the input of its processes.
          end: function that ends its processes.
          in_place: whether the started process itself trains, without waiting for workers.
        """
        name, now = trial_input.name, self._clock()
        if (reason := self._loss_reasons.pop(name, None)) is not None:
            self._log_restart(name, reason, trial_input.config)
        counts = self._folder.read_counts(name)
        num_before = counts.num_attempts if counts is not None else 0
        self._running[name] = Attempt(end, num_before, now, in_place, None, now)

    def note_loss(self, name: str, error: object) -> str:
        """Note and return the reason why a training's attempt was lost.

        Args:
          name: the training's name.
          error: Ray's message on the last process.
        """
        attempt = self._running.pop(name, None)
        reason = attempt.end_reason if attempt is not None and attempt.end_reason else why_lost(error)
        self._loss_reasons[name] = reason
        if self._ray_logs:
            self._warn(f"note: {name}: {reason}; Ray's messages about its processes are in {self._ray_logs}")
            self._ray_logs = ""
        return reason

    def note_end(self, name: str) -> None:
        """Stop monitoring a training that has ended and will not be restarted."""
        self._running.pop(name, None)
        self._loss_reasons.pop(name, None)

    def give_up(self, name: str, reason: str) -> TrialFailure:
        """Log that a lost training will not start again, and return its failure."""
        failure = TrialFailure(kind=FailureKind.LOST, reason=reason)
        if self._log is not None:
            self._log.write(LOST, name, str(failure))
        return failure

    def check_attempts(self) -> None:
        """Check all attempts, at most once a second, and end those beyond a time limit."""
        now = self._clock()
        if now - self._last_check_time < _CHECK_EVERY_SECONDS:
            return
        self._last_check_time = now
        for name, attempt in self._running.items():
            if not attempt.end_reason:
                self._check_attempt(name, attempt, now)

    def _check_attempt(self, name: str, attempt: Attempt, now: float) -> None:
        counts, file = self._folder.read_counts(name), self._folder.checkpoint_folder(name) / "checkpoint.pt"
        state = counts, file.stat().st_mtime_ns if file.exists() else 0
        if state != attempt.state:
            attempt.state, attempt.last_change = state, now
        if not attempt.has_begun:
            attempt.start_seconds = attempt.last_change = now
            attempt.has_begun = attempt.has_counted(counts)
            return
        idle_minutes, total_minutes = (now - attempt.last_change) / 60, (now - attempt.start_seconds) / 60
        if (limit := self._service.trial_timeout) is not None and total_minutes >= limit:
            attempt.end_reason = f"ended after {limit:g} min (--trial-timeout)"
        elif (limit := self._service.stall_timeout) is not None and idle_minutes >= limit:
            attempt.end_reason = f"ended after {limit:g} min without a checkpoint (--stall-timeout)"
        if attempt.end_reason:
            attempt.end()

    def _warn(self, text: str) -> None:
        if self._log is not None:
            warn(text)

    def _log_restart(self, name: str, reason: str, config: TrainingConfig) -> None:
        """Log and print the step at which a lost training continues, and the steps that it repeats."""
        checkpoints = self._folder.checkpoints(name, every_steps=config.performance.checkpoint_every_steps)
        try:
            step, num_drawn = checkpoints.saved_step(), checkpoints.read_counts().num_steps
        except DpgclError:  # the training itself will report the damage
            return
        num_repeated = max(0, num_drawn - step)
        cost = f"{count(num_repeated, 'step')} charged"
        if (num_in_advance := config.mechanism.num_restart_steps) is not None:
            cost = f"{num_repeated} of the R = {num_in_advance} restart steps used"
        text = f"{reason}, restarted at step {step}, {cost}"
        self._warn(f"{name}: {text}")
        if self._log is not None:
            self._log.write(RESTARTED, name, text, step=step, num_steps_repeated=num_repeated)
