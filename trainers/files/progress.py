"""How far a training is: a small file beside its checkpoint, for whoever looks on.

It holds two public numbers, the steps done and those planned, and no time: how long a step takes depends on
how many records are drawn. Whoever wants a rate looks twice; so others than the operator of a training on
private data are told tenths (`Progress.in_tenths`). Nothing is read back by a training, and a file
that cannot be written costs nothing. A training of a sealed sweep writes none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainers.files.durable_files import new_file

PROGRESS_FILE = "progress.json"
_LEAST_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training is.

    Attributes:
      step: steps done.
      num_steps: T.
    """

    step: int
    num_steps: int

    @property
    def in_tenths(self) -> Progress:
        """The same, its steps rounded down to a tenth of all: what is told where no rate may be.

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
    """Replace a training's file as it goes on, once a second at most, besides the first and the last time.

    Args:
      path: of the file; its folder is there.
      num_steps: T.
      clock: seconds.
    """

    def __init__(self, path: Path, num_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._num_steps, self._clock = path, num_steps, clock
        self._next = -float("inf")

    def __call__(self, step: int) -> None:
        """Note that `step` steps are done."""
        now = self._clock()
        if now < self._next and step < self._num_steps:
            return
        self._next = now + _LEAST_SECONDS
        part = self._path.with_suffix(".part")
        with suppress(OSError):  # what is only looked at stops no training
            with open(part, "w", opener=new_file) as file:
                json.dump(vars(Progress(step=step, num_steps=self._num_steps)), file)
            part.replace(self._path)


def read_progress(path: Path) -> Progress | None:
    """Return what a file tells; None where there is none, or it is of another version."""
    try:
        found = json.loads(path.read_text())
        return Progress(step=int(found["step"]), num_steps=int(found["num_steps"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
