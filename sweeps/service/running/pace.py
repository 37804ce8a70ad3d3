"""How fast trainings go and when they end, from the steps seen of them; times are passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainers.files.progress import Progress

_WINDOW_SECONDS = 60.0


@dataclass
class Pace:
    """The steps of one training as they were seen, over the last minute.

    >>> pace = Pace()
    >>> for now, step in ((0.0, 10), (5.0, 20), (10.0, 30)):
    ...     pace.see(now, Progress(step=step, num_steps=100))
    >>> pace.rate, pace.seconds_left(10.0), pace.seconds_left(12.0)
    (2.0, 35.0, 33.0)
    """

    seen: deque[tuple[float, int]] = field(default_factory=deque)
    latest: Progress | None = None

    def see(self, now: float, progress: Progress) -> None:
        """Note how far the training is at `now`, in seconds; one that went back begins anew."""
        if self.seen and progress.step < self.seen[-1][1]:
            self.seen.clear()
        if not self.seen or progress.step > self.seen[-1][1]:
            self.seen.append((now, progress.step))
        while len(self.seen) > 2 and now - self.seen[1][0] > _WINDOW_SECONDS:
            self.seen.popleft()
        self.latest = progress

    @property
    def rate(self) -> float | None:
        """Steps per second; None until two different steps were seen."""
        if len(self.seen) < 2:
            return None
        (first, before), (last, now) = self.seen[0], self.seen[-1]
        return (now - before) / (last - first) if last > first else None

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the last step, at the rate seen; None where that is not known."""
        if self.latest is None or (rate := self.rate) is None:
            return None
        when, step = self.seen[-1]
        return max(0.0, when + (self.latest.num_steps - step) / rate - now)


def sweep_seconds_left(
    elapsed: float, done: float, running: Sequence[float], num_waiting: int
) -> float | None:
    """Return the seconds until all trainings of a sweep have ended, at the rate so far; None without one.

    All trainings count as much as each other.

    Args:
      elapsed: seconds since the first of them was started.
      done: trainings done in that time, parts of running ones included.
      running: the share of its steps that each running one has done.
      num_waiting: trainings that have not begun.

    >>> sweep_seconds_left(60.0, 1.5, [0.5, 0.0], 3)
    180.0
    >>> sweep_seconds_left(60.0, 0.0, [0.0], 3) is None
    True
    """
    if done <= 0 or elapsed <= 0:
        return None
    return elapsed / done * (num_waiting + sum(1 - share for share in running))
