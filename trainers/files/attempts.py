"""The attempts at one training: numbered, each with a count of its own, and outdated by the next one.

A node that is cut off goes on training while its training is restarted elsewhere, and a lock of the shared
folder may hold on one node alone. So no attempt relies on being the only one:

*A number.* An attempt, and a driver that charges a restart, first takes the next number, by creating a file
that did not exist. Of two that try, one gets it.

*A count of its own.* An attempt counts what it may draw in its own file, which nobody else writes, before it
draws it. No writer takes another's count back, as two that read and write one file do.

*Fencing.* An attempt looks for higher numbers **after** it has counted and before it draws, and before every
step and checkpoint. One that finds a higher number, or that cannot look, draws nothing more.

*Proposition.* On a file system where a file that was created, or written and closed, is seen by whoever looks
later, each step that any attempt draws is counted in what the next attempt reads before its own first step,
or in what is counted afterwards by an attempt whose number is the highest. *Sketch.* Attempt a counts, then
looks; attempt b > a creates its file, then reads. If a's look does not find b, it came before b's file was
created, so its count came before b's reading, which includes it. If it does, a draws nothing of what it
counted last.

What a cut-off attempt draws after it was outdated is at most the step that it is in. This was counted before.
"""

from __future__ import annotations

import json
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dpgcl_core.errors import StorageError
from trainers.files.durable_files import make_folder, new_file, replacing, sync_folder

_NAME = re.compile(r"(\d{6})\.json")


@dataclass(frozen=True, kw_only=True)
class DrawCounts:
    """Upper bounds on what attempts of a training have drawn, each counted before it is drawn.

    Attributes:
      num_attempts: attempts begun.
      num_steps: steps.
      num_scorings: drawings of noised scores.

    >>> DrawCounts(num_attempts=1, num_steps=5) + DrawCounts(num_steps=2)
    DrawCounts(num_attempts=1, num_steps=7, num_scorings=0)
    """

    num_attempts: int = 0
    num_steps: int = 0
    num_scorings: int = 0

    def __add__(self, counts: DrawCounts) -> DrawCounts:
        """Return the counts of both."""
        return DrawCounts(**{name: value + vars(counts)[name] for name, value in vars(self).items()})

    def at_least(self, counts: DrawCounts) -> DrawCounts:
        """Return the larger of each count."""
        return DrawCounts(**{name: max(value, vars(counts)[name]) for name, value in vars(self).items()})


class Attempts:
    """The numbered attempts at one training.

    Args:
      folder: of their files, on the storage that all nodes share; made with the first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def claim(self) -> int:
        """Take the next number; every earlier attempt is outdated when this returns."""
        make_folder(self.folder)
        number = self._newest() + 1
        while not self._created(number):
            number += 1
        sync_folder(self.folder)
        sync_folder(self.folder.parent)
        return number

    def refuse_outdated(self, number: int) -> None:
        """Refuse to go on with an attempt that is not the newest.

        Raises:
          StorageError: there is a newer one, or it cannot be known whether there is.
        """
        try:
            newest = self._newest()
        except OSError as error:
            raise StorageError(
                f"{self.folder} cannot be read ({error.strerror}), so this attempt may be outdated: it stops "
                "before it draws more"
            ) from error
        if newest > number:
            raise StorageError(
                f"attempt {number} of this training, on {socket.gethostname()}, is outdated by attempt "
                f"{newest}: it stops before it draws more"
            )

    def count(self, number: int, counts: DrawCounts) -> None:
        """Note durably all that an attempt may have drawn, and see that it may draw it.

        One that may not draws nothing of it, and takes it back.

        Raises:
          StorageError: as `refuse_outdated`.
        """
        before = self.of(number)
        self._write(number, counts)
        try:
            self.refuse_outdated(number)
        except StorageError:
            with suppress(OSError):
                self._write(number, before)
            raise

    def of(self, number: int) -> DrawCounts:
        """Return what one attempt has counted.

        Raises:
          StorageError: its file is damaged.
        """
        path = self._file(number)
        try:
            return DrawCounts(**json.loads(path.read_text() or "{}"))  # empty until it counts
        except FileNotFoundError:
            return DrawCounts()
        except (ValueError, TypeError) as error:
            raise StorageError(
                f"{path} is damaged; restore it, or start this training in a new folder"
            ) from error

    def total(self) -> DrawCounts:
        """Return what all attempts have counted.

        Raises:
          StorageError: a file is damaged.
        """
        if not self.folder.is_dir():
            return DrawCounts()
        return sum(map(self.of, self._numbers()), DrawCounts())

    def _write(self, number: int, counts: DrawCounts) -> None:
        with replacing(self._file(number)) as file:
            file.write(json.dumps(vars(counts)).encode())

    def _created(self, number: int) -> bool:
        try:
            os.close(new_file(self._file(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        """Return the numbers taken, from the folder's list: that a name is missing may come from a cache."""
        found = map(_NAME.fullmatch, os.listdir(self.folder))
        return sorted(int(match[1]) for match in found if match)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06}.json"
