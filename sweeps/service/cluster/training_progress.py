"""The progress of a sweep's running trainings, and the time until all will have ended.

The number of steps done is public. But the time of a step depends on the number of records drawn. So for
private records the time left is shown only in a terminal, to the operator. Lines that a log may store contain
neither the time left nor exact steps, from which it could be derived: they give progress in tenths. A sealed
sweep's trainings are not watched at all.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from sweeps.service.console.terminal import count, duration
from trainers.files.progress import Progress, fraction_done, read_progress

_MAX_ROWS = 12
_MAX_NAMED = 3


@dataclass
class _Running:
    num_steps: int
    file: Path
    latest: Progress | None = None

    def stage(self, *, in_tenths: bool = False) -> str:
        """Return the training's current stage in words."""
        if self.latest is None:
            return "starting"
        step = (self.latest.in_tenths if in_tenths else self.latest).step
        return "scoring" if step >= self.num_steps else f"step {step} of {self.num_steps}"


class SweepWatch:
    """The progress of one open sweep's trainings.

    Args:
      num_trials: the sweep's number of trials.
      num_over: how many of these trials will not run any more, because they ended earlier.
      shows_times: whether a line may contain the time left and exact steps.
    """

    def __init__(self, num_trials: int, num_over: int, *, shows_times: bool = False) -> None:
        self._num_trials, self._num_over = num_trials, num_over
        self._shows_times = shows_times
        self._rate_start: tuple[float, float] | None = None
        self._num_before = num_over
        self._shares_before = 0.0
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()

    def note_start(self, name: str, num_steps: int, file: Path | None) -> None:
        """Watch a training that was started; without a file do nothing.

        Args:
          name: the training's name.
          num_steps: T, its number of steps.
          file: the file where it writes its steps; a file of an earlier attempt is removed.
        """
        if file is None:
            return
        share = fraction_done(read_progress(file))
        file.unlink(missing_ok=True)
        with self._lock:
            if name not in self._running:  # an attempt lost under this watch counts as work done
                self._shares_before += share
            self._running[name] = _Running(num_steps, file)

    def note_end(self, name: str) -> None:
        """Count a training that has ended and will not be restarted."""
        with self._lock:
            if self._running.pop(name, None) is not None:
                self._num_over += 1

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds until all trainings have ended; None before the first progress."""
        shares = [fraction_done(run.latest) for _, run in self._refresh()]
        num_done = self._num_over - self._num_before + sum(shares) - self._shares_before
        if num_done > 0 and self._rate_start is None:
            self._rate_start = now, num_done  # the rate excludes the start of Ray and imports
        if self._rate_start is None:
            return None
        waiting = self._num_trials - self._num_over - len(shares)
        return sweep_seconds_left(now - self._rate_start[0], num_done - self._rate_start[1], shares, waiting)

    def line(self, now: float) -> str:
        """Return a line with the sweep's progress."""
        running, in_tenths = self._refresh(), not self._shows_times
        stages = [f"{name}: {run.stage(in_tenths=in_tenths)}" for name, run in running[:_MAX_NAMED]]
        remainder = [f"{len(running) - _MAX_NAMED} more running"] if len(running) > _MAX_NAMED else []
        num_done_text, *time_left = self._summary(now)
        stages = stages or ["waiting for the first Ray process"]
        return "; ".join([num_done_text, *stages, *remainder, *(time_left if self._shows_times else [])])

    def summary(self, now: float) -> str:
        """Return the number of trials done and the time left, as text."""
        return "; ".join(self._summary(now))

    def _summary(self, now: float) -> list[str]:
        seconds = self.seconds_left(now)
        time_left = [] if seconds is None else [f"about {duration(seconds)} left"]
        return [f"{self._num_over} of {count(self._num_trials, 'trial')} done", *time_left]

    def table(self, now: float) -> Table | None:
        """Return the running trainings and their steps as a table; None if none is running."""
        running = self._refresh()
        if not running:
            return None
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("running", no_wrap=True, overflow="ellipsis")
        table.add_column("step", justify="right", no_wrap=True)
        for name, run in running[:_MAX_ROWS]:
            table.add_row(Text(name), run.stage().removeprefix("step "))
        if len(running) > _MAX_ROWS:
            table.add_row(f"and {len(running) - _MAX_ROWS} more", "")
        return table

    def _refresh(self) -> list[tuple[str, _Running]]:
        with self._lock:
            running = list(self._running.items())
        for _, run in running:
            run.latest = read_progress(run.file) or run.latest
        return running


def sweep_seconds_left(
    elapsed: float, num_done: float, running: Sequence[float], num_waiting: int
) -> float | None:
    """Return the seconds until all trainings of a sweep have ended, at the rate so far; None without a rate.

    All trainings are assumed to take equally long.

    Args:
      elapsed: seconds over which the rate is measured.
      num_done: number of trainings done in that time, including fractions of running trainings.
      running: for each running training, the fraction of its steps done.
      num_waiting: number of trainings that have not begun.

    >>> sweep_seconds_left(60.0, 1.5, [0.5, 0.0], 3)
    180.0
    >>> sweep_seconds_left(60.0, 0.0, [0.0], 3) is None
    True
    """
    if num_done <= 0 or elapsed <= 0:
        return None
    return elapsed / num_done * (num_waiting + sum(1 - share for share in running))
