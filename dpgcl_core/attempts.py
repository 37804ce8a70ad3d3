"""The attempts at one training: numbered, each with its own count, and outdated by the next attempt.

A node that loses its connection continues to train while its training is restarted elsewhere, and a lock on
the shared folder may be effective on only one node. So no attempt relies on being the only one:

*A number.* An attempt, and a driver that charges a restart, first takes the next number by creating a file
that did not exist. If two try, only one succeeds.

*A separate count.* An attempt counts the draws that it may make in its own file, which nobody else writes,
before it makes them. So no writer can undo another's count, as two writers of one file could.

*Fencing.* An attempt checks for higher numbers **after** it has counted and before it draws, and before every
step and checkpoint. An attempt that finds a higher number, or that cannot check, draws nothing more.

*Proposition.* Assume a file system on which every later reader sees a file that was created, or written and
closed. Then each step that any attempt draws is included in the counts that the next attempt reads before its
own first step, or in the counts written afterwards by an attempt whose number is the highest. *Sketch.*
Attempt a counts, then checks. Attempt b > a creates its file, then reads. If a's check does not find b, the
check came before b's file was created, so a's count came before b's reading, which includes it. If the check
finds b, a draws nothing of what it counted last.

After it was outdated, a disconnected attempt draws at most its current step, which was counted before.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpgcl_core.durable_files import make_folder, new_file, replacing, storage_errors, sync_folder
from dpgcl_core.errors import ConfigError, StorageError

_NAME = re.compile(r"(\d{6})\.json")


@dataclass(frozen=True, kw_only=True)
class DrawCounts:
    """Upper bounds on the draws of a training's attempts, each counted before the draw.

    Attributes:
      num_attempts: number of attempts begun.
      num_steps: number of steps.
      num_scorings: number of draws of noised scores.

    >>> DrawCounts(num_attempts=1, num_steps=5) + DrawCounts(num_steps=2)
    DrawCounts(num_attempts=1, num_steps=7, num_scorings=0)
    """

    num_attempts: int = 0
    num_steps: int = 0
    num_scorings: int = 0

    def __add__(self, counts: DrawCounts) -> DrawCounts:
        """Return the sum of each count."""
        return DrawCounts(**{name: value + vars(counts)[name] for name, value in vars(self).items()})

    def at_least(self, counts: DrawCounts) -> DrawCounts:
        """Return the maximum of each count."""
        return DrawCounts(**{name: max(value, vars(counts)[name]) for name, value in vars(self).items()})


class Attempts:
    """The numbered attempts at one training.

    Args:
      folder: the folder of the attempts' files, on the storage that all nodes share; the first attempt
        creates it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def claim(self) -> int:
        """Take and return the next number; every earlier attempt is outdated when this returns."""
        make_folder(self.folder)
        number = self._newest() + 1
        while not self._create_file(number):
            number += 1
        sync_folder(self.folder)
        sync_folder(self.folder.parent)
        return number

    def refuse_outdated(self, number: int) -> None:
        """Raise StorageError unless the attempt of this number is the newest.

        Raises:
          StorageError: there is a newer attempt, or this cannot be determined.
        """
        try:
            newest = self._newest()
        except OSError as error:
            raise StorageError(
                f"{self.folder} cannot be read ({error.strerror}), so this attempt may be outdated. It stops "
                "before it draws more steps."
            ) from error
        if newest > number:
            raise StorageError(
                f"attempt {number} of this training, on {socket.gethostname()}, is outdated by attempt "
                f"{newest}. It stops before it draws more steps."
            )

    def count(self, number: int, counts: DrawCounts) -> None:
        """Record durably all that an attempt may have drawn, then check that it may still draw.

        If it may not, it makes none of the newly counted draws, and the count is set back.

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
        """Return the counts of one attempt.

        Raises:
          StorageError: the attempt's file is damaged.
        """
        path = self._file(number)
        try:
            return DrawCounts(**json.loads(path.read_text() or "{}"))  # empty until its first count
        except FileNotFoundError:
            return DrawCounts()
        except (ValueError, TypeError) as error:
            raise StorageError(
                f"{path} is damaged. Restore it, or start this training in a new folder."
            ) from error

    def total(self) -> DrawCounts:
        """Return the sum of all attempts' counts.

        Raises:
          StorageError: a file is damaged.
        """
        if not self.folder.is_dir():
            return DrawCounts()
        return sum(map(self.of, self._numbers()), DrawCounts())

    def _write(self, number: int, counts: DrawCounts) -> None:
        with replacing(self._file(number)) as file:
            file.write(json.dumps(vars(counts)).encode())

    def _create_file(self, number: int) -> bool:
        try:
            os.close(new_file(self._file(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        """Return all attempts' numbers by listing the folder: a cached lookup may miss a file."""
        found = map(_NAME.fullmatch, os.listdir(self.folder))
        return sorted(int(match[1]) for match in found if match)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06}.json"


class ChargedAttempt:
    """One attempt at a training whose restarts are charged in advance.

    Guarantee: all attempts with one folder together make at most T + R draws, whatever states they start
    from, and whenever they are killed (docs/theory/restarts.md). *Proof.* Let N be the number of counted
    draws. A draw of step s < T is made only after N − s ≤ R was checked and N + 1 was written, and N + 1 ≤
    R + s + 1 ≤ T + R. By the proposition above, N includes every draw of every other attempt. ∎

    Args:
      folder: the training's folder, on the storage that all nodes share. It is created at the first draw.
      numbers: the mechanism's numbers by name, with R as `num_restart_steps`. They must not change between
        attempts: an R that is chosen after results were seen is not charged in advance.
    """

    def __init__(self, folder: Path, numbers: Mapping[str, Any]) -> None:
        self._numbers, self._numbers_file = dict(numbers), folder / "mechanism.json"
        self._attempts = Attempts(folder / "attempts")
        self._number: int | None = None
        self._num_draws, self._process = 0, os.getpid()

    def count_draw(self, step: int) -> None:
        """Count one draw durably, before it is made; the first one outdates all earlier attempts.

        Args:
          step: the number of the draw's step, from 0 to T − 1.

        Raises:
          ConfigError: the folder belongs to a training with other numbers.
          StorageError: more than T + R draws would be possible, a newer attempt has begun, this process is a
            fork, or the folder is damaged or cannot be written.
        """
        if os.getpid() != self._process:
            raise StorageError(
                "an attempt must draw in the process that began it; got a fork, whose draws would not be "
                "counted. Begin a training in the new process"
            )
        with storage_errors(self._attempts.folder):
            if self._number is None:
                self._number = self._claim()
            num_drawn = self._attempts.total().num_steps
            num_restart_steps = self._numbers["num_restart_steps"]
            if num_drawn < step:
                raise StorageError(
                    f"{self._attempts.folder} counts {num_drawn} draws, but the training continues after "
                    f"{step} steps. Restore the folder of this training, or start a new one in a new folder"
                )
            if num_drawn - step > num_restart_steps:
                raise StorageError(
                    f"restarts may repeat at most num_restart_steps = {num_restart_steps} steps, which are "
                    f"charged in advance; to continue after {step} steps would repeat {num_drawn - step}. "
                    "Load a later state, or start a new training in a new folder and add up both ε"
                )
            self._num_draws += 1
            self._attempts.count(self._number, DrawCounts(num_attempts=1, num_steps=self._num_draws))

    def _claim(self) -> int:
        """Take the next number, then record the numbers of the mechanism, or compare them.

        Of two first attempts with different numbers, the earlier one is outdated and draws nothing.
        """
        number = self._attempts.claim()
        if not self._numbers_file.exists() and not self._attempts.total().num_steps:
            with replacing(self._numbers_file) as file:
                file.write(json.dumps(self._numbers).encode())
        try:
            earlier_numbers = json.loads(self._numbers_file.read_text())
        except (FileNotFoundError, ValueError) as error:
            raise StorageError(
                f"{self._numbers_file} is missing or damaged. Restore it, or start a new training in a new "
                "folder"
            ) from error
        if changed := changed_numbers(earlier_numbers, self._numbers):
            raise ConfigError(
                f"a training keeps its numbers when it is resumed; {self._numbers_file} has another "
                f"{changed}. Set the numbers of the first attempt, or start a new training in a new folder"
            )
        return number


def changed_numbers(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the first name whose number differs, with both numbers; empty if none does.

    >>> changed_numbers({"num_steps": 5}, {"num_steps": 5, "group_size": 8})
    'group_size: None there, 8 here'
    """
    for name in dict.fromkeys([*before, *now]):
        if before.get(name) != now.get(name):
            return f"{name}: {before.get(name)} there, {now.get(name)} here"
    return ""
