"""The trainings of a sweep that run: how far each is, and when all will have ended.

Steps done are public. How long a step takes depends on how many records are drawn: with private ones the time
left is told in a terminal, to its operator, and in no line that a log may keep, nor steps from whose times it
would follow: there they are in tenths. Of a sealed sweep's trainings nothing
is looked at.
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

_MOST_ROWS = 12
_MOST_NAMED = 3


@dataclass
class _Running:
    num_steps: int
    file: Path
    latest: Progress | None = None

    def look(self) -> None:
        self.latest = read_progress(self.file) or self.latest

    @property
    def share(self) -> float:
        return fraction_done(self.latest)

    def stage(self, *, in_tenths: bool = False) -> str:
        """Return in words what the training does."""
        if self.latest is None:
            return "starting"
        step = (self.latest.in_tenths if in_tenths else self.latest).step
        return "scoring" if step >= self.num_steps else f"step {step} of {self.num_steps}"


class SweepWatch:
    """The trainings of one open sweep.

    Args:
      num_trials: of the sweep.
      num_over: of these, ones that will not run any more.
      tells_times: whether a line may say the time left, or from what it would follow.
    """

    def __init__(self, num_trials: int, num_over: int, *, tells_times: bool = False) -> None:
        self._num_trials, self._num_over = num_trials, num_over
        self._tells_times = tells_times
        self._first: tuple[float, float] | None = None
        self._num_before = num_over
        self._shares_before = 0.0
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()

    def note_start(self, name: str, num_steps: int, file: Path | None) -> None:
        """Watch a training that was started.

        Args:
          name: of the training.
          num_steps: T.
          file: where it writes its steps; one of an earlier attempt is removed.
        """
        if file is None:
            return
        share = fraction_done(read_progress(file))
        file.unlink(missing_ok=True)
        with self._lock:
            if name not in self._running:  # what an attempt that was lost had done counts for this watch
                self._shares_before += share
            self._running[name] = _Running(num_steps, file)

    def note_end(self, name: str) -> None:
        """Count a training that ended for good."""
        with self._lock:
            if self._running.pop(name, None) is not None:
                self._num_over += 1

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until all trainings have ended; None if that is not known yet."""
        shares = [run.share for _, run in self._look()]
        num_done = self._num_over - self._num_before + sum(shares) - self._shares_before
        if num_done > 0 and self._first is None:
            self._first = now, num_done  # from here on: Ray's start and imports come once
        if self._first is None:
            return None
        waiting = self._num_trials - self._num_over - len(shares)
        return sweep_seconds_left(now - self._first[0], num_done - self._first[1], shares, waiting)

    def line(self, now: float) -> str:
        """Return how far the sweep is, in a line."""
        running, in_tenths = self._look(), not self._tells_times
        stages = [f"{name}: {run.stage(in_tenths=in_tenths)}" for name, run in running[:_MOST_NAMED]]
        rest = [f"{len(running) - _MOST_NAMED} more run"] if len(running) > _MOST_NAMED else []
        over, *end = self._summary(now)
        end = end if self._tells_times else []
        return "; ".join([over, *(stages or ["waiting for Ray's first process"]), *rest, *end])

    def summary(self, now: float) -> str:
        """Return how far the sweep is, without its trainings."""
        return "; ".join(self._summary(now))

    def _summary(self, now: float) -> list[str]:
        seconds = self.seconds_left(now)
        end = [] if seconds is None else [f"about {duration(seconds)} left"]
        return [f"{self._num_over} of {count(self._num_trials, 'trial')} done", *end]

    def table(self, now: float) -> Table | None:
        """Return the trainings that run, as a table."""
        running = self._look()
        if not running:
            return None
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("running", no_wrap=True, overflow="ellipsis")
        table.add_column("step", justify="right", no_wrap=True)
        for name, run in running[:_MOST_ROWS]:
            table.add_row(Text(name), run.stage().removeprefix("step "))
        if len(running) > _MOST_ROWS:
            table.add_row(f"and {len(running) - _MOST_ROWS} more", "")
        return table

    def _look(self) -> list[tuple[str, _Running]]:
        with self._lock:
            running = list(self._running.items())
        for _, run in running:
            run.look()
        return running


def sweep_seconds_left(
    elapsed: float, num_done: float, running: Sequence[float], num_waiting: int
) -> float | None:
    """Return the seconds until all trainings of a sweep have ended, at the rate so far; None without one.

    All trainings count as much as each other.

    Args:
      elapsed: seconds since the first of them was started.
      num_done: trainings done in that time, parts of running ones included.
      running: the share of its steps that each running one has done.
      num_waiting: trainings that have not begun.

    >>> sweep_seconds_left(60.0, 1.5, [0.5, 0.0], 3)
    180.0
    >>> sweep_seconds_left(60.0, 0.0, [0.0], 3) is None
    True
    """
    if num_done <= 0 or elapsed <= 0:
        return None
    return elapsed / num_done * (num_waiting + sum(1 - share for share in running))
