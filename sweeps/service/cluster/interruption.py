"""The events that end a sweep before its trainings end: a signal, or a full disk."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpgcl_core.errors import DpgclError, is_disk_full
from sweeps.service.cluster.stopping import Stopping
from sweeps.service.cluster.supervision import Supervisor
from sweeps.service.cluster.trial_queue import TrialQueue
from sweeps.service.console.display import leave_terminal_usable
from sweeps.service.console.terminal import count, warn
from sweeps.service.storage.sweep_folder import SweepFolder
from trainers.files.launch_record import resume_line

_PATIENCE_SECONDS = {signal.SIGINT: math.inf, signal.SIGTERM: 2.0}
"""How long a stop waits until trainings have saved. The user can press Ctrl-C again to end the wait; whoever
sends SIGTERM kills the process soon, a Ray job after three seconds."""


class StopRequest(BaseException):
    """A request of the user or the system to stop the sweep.

    Attributes:
      signal_number: the number of the received signal.
      is_saved: whether every training has saved the steps that it drew.
    """

    def __init__(self, signal_number: int, *, is_saved: bool = False) -> None:
        super().__init__(signal_number)
        self.signal_number, self.is_saved = signal_number, is_saved


class DiskFull(BaseException):
    """No space is left for durable files: the sweep ends, and a resume continues it."""


def stopping_text(num_drawing: int) -> str:
    """Return the line to print for a stop that waits for trainings.

    >>> stopping_text(2)
    'stopping when the current step of 2 trainings is saved; press Ctrl-C again to stop at once'
    """
    trainings = count(num_drawing, "training")
    return f"stopping when the current step of {trainings} is saved; press Ctrl-C again to stop at once"


def no_room_text(folder: SweepFolder) -> str:
    """Return the message for a sweep that ended because no space was left."""
    return (
        f"stopped: no space is left in {folder.root}. No finished result is lost. Free some space, then "
        f"continue with {resume_line(folder.path)}"
    )


@contextmanager
def full_disk_ends_sweep() -> Iterator[None]:
    """End the sweep if no space is left; otherwise Tune would treat the error as a training's error."""
    try:
        yield
    except (DpgclError, OSError) as error:
        if not is_disk_full(error):
            raise
        raise DiskFull from error


def stop_trainings(queue: TrialQueue, stopping: Stopping, *, must_end: bool = False) -> None:
    """Answer trainings that ask to continue; once time is over or `must_end`, end all and begin no more."""
    stopping.update(queue.running, must_end=must_end)
    if stopping.is_over:
        queue.close()


class Interruption:
    """Ends a sweep after a signal; an open sweep ends after its trainings have saved.

    Args:
      queue, supervisor, stopping: as in `Execution`.
      saves: whether to wait until trainings have saved; not in a sealed sweep, which never resumes a trial.

    Attributes:
      signals: the numbers of the received signals; the second ends the waiting.
    """

    def __init__(self, queue: TrialQueue, supervisor: Supervisor, stopping: Stopping, *, saves: bool) -> None:
        self._queue, self._supervisor, self._stopping, self._saves = queue, supervisor, stopping, saves
        self._deadline: float | None = None
        self.signals: list[int] = []

    def check(self) -> None:
        """After a signal, stop all trainings; raise StopRequest once they have saved or the wait is over."""
        if not self.signals:
            return
        number, now = self.signals[0], time.monotonic()
        if not self._saves:
            raise StopRequest(number)
        stop_trainings(self._queue, self._stopping, must_end=True)
        num_drawing = len(self._supervisor.drawing)
        if self._deadline is None:
            self._deadline = now + _PATIENCE_SECONDS[signal.Signals(number)]
            if num_drawing:
                warn(stopping_text(num_drawing))
        if not num_drawing or len(self.signals) > 1 or now >= self._deadline:
            raise StopRequest(number, is_saved=not num_drawing)

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Within this context, SIGINT and SIGTERM end the sweep at Tune's next step, in less than a second.

        Raising in the handler itself would break any call into Ray's core that it interrupts. A third signal
        ends the process at once; `--resume` handles that, too.
        """

        def record(number: int, frame: Any) -> None:
            self.signals.append(number)
            if len(self.signals) > 2:
                leave_terminal_usable()
                os._exit(128 + number)

        old_handlers = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
        os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
        try:
            yield
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
