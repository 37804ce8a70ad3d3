"""The attempts at trainings that run: whether each goes on, and what is said of those that are lost.

What is said is made of fixed sentences and of counts that the sweep keeps itself. Ray's own words about a
death, which a network of the user's could have composed, stay in its logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpgcl_core.errors import DpgclError
from sweeps.service.cluster.trial_failure import FailureKind, TrialFailure, why_lost
from sweeps.service.console.terminal import count, warn
from sweeps.service.options.service import ServiceOptions
from sweeps.service.storage.log import LOST, RESTARTED, SweepLog
from sweeps.service.storage.sweep_folder import SweepFolder
from trainers.files.attempts import DrawCounts
from trainers.files.checkpoint import CheckpointFolder

if TYPE_CHECKING:
    from trainers.ray_worker import RayTrial

_LOOK_EVERY_SECONDS = 1.0


@dataclass
class Attempt:
    """One attempt at a training.

    Attributes:
      given: what its processes were given.
      end: ends them.
      checkpoints: of the training.
      num_before: attempts that had begun to draw before this one.
      since: when it was started, in seconds; it cannot hang before it has its processes.
      has_begun: whether it has its processes.
      mark: what its files told last; a change is progress.
      progressed: when they did.
      ended_for: why this driver ended it.
    """

    given: RayTrial
    end: Callable[[], None]
    checkpoints: CheckpointFolder
    num_before: int
    since: float
    has_begun: bool
    mark: object = None
    progressed: float = 0.0
    ended_for: str = ""

    def has_counted(self, drawn: DrawCounts | None) -> bool:
        """Whether it is among the attempts that have counted their first steps."""
        return drawn is not None and drawn.num_attempts > self.num_before


class Supervisor:
    """Follow all attempts of one sweep.

    Args:
      folder: of the sweep.
      service: its limits.
      log: what is said goes there, too; None for a sealed sweep, of whose trials neither its files nor what
        is printed, which a job's log keeps, may tell.
      ray_logs: where Ray keeps its own account of what died.
      clock: seconds.
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
        self._lost: dict[str, str] = {}
        self._looked = -float("inf")

    @property
    def num_begun(self) -> int:
        """The attempts that have their processes."""
        return sum(attempt.has_begun for attempt in self._running.values())

    @property
    def drawing(self) -> list[str]:
        """The trainings whose attempts have counted steps, and may be drawing them, as of now."""
        running = self._running.items()
        return [name for name, attempt in running if attempt.has_counted(self._folder.drawn(name))]

    def started(self, given: RayTrial, end: Callable[[], None], *, in_place: bool) -> None:
        """Hear that a training was started, and say so where it was lost before.

        Args:
          given: what its processes get.
          end: ends them.
          in_place: whether the process that was started trains itself, and waits for no workers.
        """
        name, now = given.name, self._clock()
        every = given.config.performance.checkpoint_every_steps
        checkpoints = self._folder.checkpoints(name, every_steps=every)
        if (why := self._lost.pop(name, None)) is not None:
            self._tell_restart(name, why, checkpoints, given.config.mechanism.num_restart_steps)
        before = self._folder.drawn(name)
        num_before = before.num_attempts if before is not None else 0
        self._running[name] = Attempt(given, end, checkpoints, num_before, now, in_place, None, now)

    def lost(self, name: str, error: object) -> str:
        """Hear that a training's process died; return why, as it is told."""
        attempt = self._running.pop(name, None)
        why = attempt.ended_for if attempt is not None and attempt.ended_for else why_lost(error)
        self._lost[name] = why
        if self._ray_logs:
            self._say(f"note: {name}: {why}; what Ray says of its processes is in {self._ray_logs}")
            self._ray_logs = ""
        return why

    def ended(self, name: str) -> None:
        """Hear that a training has ended for good."""
        self._running.pop(name, None)
        self._lost.pop(name, None)

    def given_up(self, name: str, why: str) -> TrialFailure:
        """Log that a lost training will not start again, and return its failure."""
        failure = TrialFailure(kind=FailureKind.LOST, reason=why)
        if self._log is not None:
            self._log.write(LOST, name, str(failure))
        return failure

    def look(self) -> None:
        """See once a second which attempts go on, and end those that take too long."""
        now = self._clock()
        if now - self._looked < _LOOK_EVERY_SECONDS:
            return
        self._looked = now
        for name, attempt in self._running.items():
            if not attempt.ended_for:
                self._look_at(name, attempt, now)

    def _look_at(self, name: str, attempt: Attempt, now: float) -> None:
        mark = drawn, _ = self._mark_of(name, attempt)
        if mark != attempt.mark:
            attempt.mark, attempt.progressed = mark, now
        if not attempt.has_begun:
            attempt.since = attempt.progressed = now
            attempt.has_begun = attempt.has_counted(drawn)
            return
        still, whole = (now - attempt.progressed) / 60, (now - attempt.since) / 60
        if (limit := self._service.trial_timeout) is not None and whole >= limit:
            attempt.ended_for = f"ended after {limit:g} min (--trial-timeout)"
        elif (limit := self._service.stall_timeout) is not None and still >= limit:
            attempt.ended_for = f"ended after {limit:g} min without a checkpoint (--stall-timeout)"
        if attempt.ended_for:
            attempt.end()

    def _mark_of(self, name: str, attempt: Attempt) -> tuple[DrawCounts | None, int]:
        """What changes when a training goes on: its count of steps, and its checkpoint."""
        checkpoint = attempt.given.checkpoint_folder / "checkpoint.pt"
        saved = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        return self._folder.drawn(name), saved

    def _say(self, text: str) -> None:
        if self._log is not None:
            warn(text)

    def _tell_restart(
        self, name: str, why: str, checkpoints: CheckpointFolder, num_in_advance: int | None
    ) -> None:
        """Say where a lost training goes on, and what that costs."""
        try:
            step, drawn = checkpoints.saved_step(), checkpoints.read_counts().num_steps
        except DpgclError:  # the training itself will say what is damaged
            return
        repeated = max(0, drawn - step)
        cost = f"{count(repeated, 'step')} charged"
        if num_in_advance is not None:
            cost = f"{repeated} of the R = {num_in_advance} steps for restarts used"
        text = f"{why}, restarted at step {step}, {cost}"
        self._say(f"{name}: {text}")
        if self._log is not None:
            self._log.write(RESTARTED, name, text, step=step, num_steps_repeated=repeated)
