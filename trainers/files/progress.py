"""The progress of a training: a small file next to its checkpoint, for observers.

It holds two public numbers, the steps done and the steps planned. It holds no time, because a step's duration
depends on the number of records drawn. An observer can derive a rate from two readings, so only the operator
of a training on private data gets exact steps; others get tenths (`Progress.in_tenths`). A training never
reads the file back, and a failure to write it has no effect. A training of a sealed sweep writes none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dpgcl_core.durable_files import new_file

PROGRESS_FILE = "progress.json"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a training.

    Attributes:
      step: number of steps done.
      num_steps: T, the number of steps planned.
    """

    step: int
    num_steps: int

    @property
    def in_tenths(self) -> Progress:
        """The same progress with its steps rounded down to a tenth of all, so that it discloses no rate.

        >>> Progress(step=57, num_steps=100).in_tenths
        Progress(step=50, num_steps=100)
        >>> Progress(step=7, num_steps=7).in_tenths
        Progress(step=7, num_steps=7)
        """
        tenths = 10 * self.step // max(1, self.num_steps)
        return Progress(step=tenths * self.num_steps // 10, num_steps=self.num_steps)


def fraction_done(progress: Progress | None) -> float:
    """Return the share of its steps that a training has done.

    >>> fraction_done(Progress(step=30, num_steps=120)), fraction_done(None)
    (0.25, 0.0)
    """
    if progress is None:
        return 0.0
    return min(1.0, progress.step / progress.num_steps) if progress.num_steps > 0 else 1.0


class ProgressWriter:
    """Replaces a training's progress file at most once a second, in addition to the first and the last time.

    Args:
      path: path of the file, in an existing folder.
      num_steps: T, the number of steps planned.
      clock: function that returns seconds.
    """

    def __init__(self, path: Path, num_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._num_steps, self._clock = path, num_steps, clock
        self._next = -float("inf")

    def __call__(self, step: int) -> None:
        """Record that `step` steps are done."""
        now = self._clock()
        if now < self._next and step < self._num_steps:
            return
        self._next = now + 1
        part = self._path.with_suffix(".part")
        with suppress(OSError):  # a file that is only for observers must not stop a training
            with open(part, "w", opener=new_file) as file:
                json.dump(vars(Progress(step=step, num_steps=self._num_steps)), file)
            part.replace(self._path)


def read_progress(path: Path) -> Progress | None:
    """Return the progress in a file; None if there is no file, or if its format is of another version."""
    try:
        values = json.loads(path.read_text())
        return Progress(step=int(values["step"]), num_steps=int(values["num_steps"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
