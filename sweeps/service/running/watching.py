"""The trainings of a sweep that run: how far each is, how fast it goes, and when all will have ended.

Steps done are public. How long a step takes depends on how many records are drawn: with private ones the rate
of a training and the time left are told in a terminal, to its operator, and in no line that a log may keep,
nor steps from whose times they would follow: there they are in tenths. Of a sealed sweep's trainings nothing
is looked at.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from sweeps.service.running.pace import Pace, sweep_seconds_left
from sweeps.service.running.terminal import count, duration
from trainers.files.progress import fraction_done, read_progress

_MOST_ROWS = 12
_MOST_NAMED = 3


@dataclass
class _Running:
    num_steps: int
    file: Path
    pace: Pace = field(default_factory=Pace)
    begun: bool = False

    def look(self, now: float) -> None:
        if (found := read_progress(self.file)) is not None:
            self.begun = True
            self.pace.see(now, found)

    @property
    def share(self) -> float:
        return fraction_done(self.pace.latest)

    def stage(self, *, in_tenths: bool = False) -> str:
        """What it does, in words."""
        if not self.begun or (latest := self.pace.latest) is None:
            return "starting"
        step = (latest.in_tenths if in_tenths else latest).step
        return "scoring" if step >= self.num_steps else f"step {step} of {self.num_steps}"


class SweepWatch:
    """The trainings of one open sweep.

    Args:
      num_trials: of the sweep.
      num_over: of these, ones that will not run any more.
      tells_rates: whether a line may say how fast a training goes, or from what it would follow.
    """

    is_open = True

    def __init__(self, num_trials: int, num_over: int, *, tells_rates: bool = False) -> None:
        self._num_trials, self._num_over = num_trials, num_over
        self._tells_rates = tells_rates
        self._first: tuple[float, float] | None = None
        self._num_before = num_over
        self._shares_before = 0.0
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()

    @property
    def has_result(self) -> bool:
        """Whether a training has ended."""
        return self._num_over > self._num_before

    def started(self, name: str, num_steps: int, file: Path | None) -> None:
        """Hear that a training was started.

        Args:
          name: of the training.
          num_steps: T.
          file: where it tells its steps; one of an earlier attempt is removed.
        """
        if file is None:
            return
        share = fraction_done(read_progress(file))
        file.unlink(missing_ok=True)
        with self._lock:
            if name not in self._running:  # what an attempt that was lost had done counts for this watch
                self._shares_before += share
            self._running[name] = _Running(num_steps, file)

    def ended(self, name: str) -> None:
        """Hear that a training ended for good."""
        with self._lock:
            if self._running.pop(name, None) is not None:
                self._num_over += 1

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until all have ended; None where that is not known yet."""
        shares = [each.share for _, each in self._look(now)]
        done = self._num_over - self._num_before + sum(shares) - self._shares_before
        if done > 0 and self._first is None:
            self._first = now, done  # from here on: Ray's start and imports come once
        if self._first is None:
            return None
        waiting = self._num_trials - self._num_over - len(shares)
        return sweep_seconds_left(now - self._first[0], done - self._first[1], shares, waiting)

    def line(self, now: float) -> str:
        """Return how far the sweep is, in a line."""
        running = self._look(now)
        told = [
            f"{name}: {each.stage()}{_rate(each, now)}"
            if self._tells_rates
            else f"{name}: {each.stage(in_tenths=True)}"
            for name, each in running[:_MOST_NAMED]
        ]
        more = [f"{len(running) - _MOST_NAMED} more run"] if len(running) > _MOST_NAMED else []
        over, *end = self._summary(now)
        end = end if self._tells_rates else []
        return "; ".join([over, *(told or ["waiting for Ray's first process"]), *more, *end])

    def summary(self, now: float) -> str:
        """Return how far the sweep is, without its trainings."""
        return "; ".join(self._summary(now))

    def _summary(self, now: float) -> list[str]:
        left = self.seconds_left(now)
        end = [] if left is None else [f"about {duration(left)} left"]
        return [f"{self._num_over} of {count(self._num_trials, 'trial')} done", *end]

    def table(self, now: float) -> Table | None:
        """Return the trainings that run, as a table."""
        running = self._look(now)
        if not running:
            return None
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("running", no_wrap=True, overflow="ellipsis")
        for heading in ("step", "steps/s", "left"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, each in running[:_MOST_ROWS]:
            left = each.pace.seconds_left(now)
            rate = each.pace.rate
            shown = (
                each.stage().removeprefix("step "),
                "" if rate is None else f"{rate:.3g}",
                "" if left is None else duration(left),
            )
            table.add_row(Text(name), *shown)
        if len(running) > _MOST_ROWS:
            table.add_row(f"and {len(running) - _MOST_ROWS} more", "", "", "")
        return table

    def _look(self, now: float) -> list[tuple[str, _Running]]:
        with self._lock:
            running = list(self._running.items())
        for _, each in running:
            each.look(now)
        return running


class SealedWatch:
    """Trainings of a sealed sweep: that it is under way is all that is shown."""

    is_open = has_result = False

    def __init__(self, started: float) -> None:
        self._started = started

    def line(self, now: float) -> str:
        """Return that it is under way."""
        return f"sealed sweep under way, {duration(now - self._started)}; nothing of its trials is shown"

    summary = line

    def table(self, now: float) -> None:
        """Return nothing."""

    def started(self, name: str, num_steps: int, file: Path | None) -> None:
        """Hear nothing."""

    def ended(self, name: str) -> None:
        """Hear nothing."""


def _rate(each: _Running, now: float) -> str:
    left = each.pace.seconds_left(now)
    if left is None or each.stage() == "scoring":
        return ""
    return f", {each.pace.rate:.3g} steps/s, {duration(left)} left"
