"""Checkpoints: model, optimizer, average and step, written atomically, and **no** random state.

After a resume sampling, permutation and noise draw fresh entropy, so a step repeated since the last
checkpoint is an independent draw and is charged once more. How often a training was resumed is counted
in a file of its own, written *before* the first step of each attempt: a crash cannot hide a repetition.

A training that a budget ledger pays for has a *grant* beside its checkpoint: the number of steps that the
driver has reserved. It draws no step beyond the grant, and stops at the next checkpoint once the driver,
which has lost the ledger, has taken it back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from filelock import FileLock, Timeout

from dpgcl_core.errors import LedgerError, StorageError

_WAIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a training after `step` steps.

    Attributes:
      step: steps done.
      model, optimizer: state dictionaries.
      series: the per-step metrics recorded so far that may leave the training.
      final: values that exist once (scores of the untrained network, SNR of the first step), likewise.
      average: averaged weights by name, where the training keeps an average; older files hold none.
    """

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    series: dict[str, list[tuple[int, float]]]
    final: dict[str, float]
    average: dict[str, Any] | None = None


def holds_noised_scores(final: dict[str, float]) -> bool:
    """Whether a training's final values have its noised scores, which are drawn together."""
    return "noised_knn_accuracy" in final


class CheckpointFolder:
    """The durable state of one training in one folder.

    Args:
      folder: created if missing.
      every_steps: steps between checkpoints.
      charged: whether a ledger pays for the training, so that it needs a grant.
    """

    def __init__(self, folder: Path, *, every_steps: int, charged: bool = False) -> None:
        self.folder = folder
        self.every_steps = every_steps
        self.charged = charged
        self._num_steps_possible = 0
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for one process, which the system releases when it dies; wait a minute for another.

        Raises:
          StorageError: another process still trains here; two would not see each other's steps.
        """
        # A soft lock would stay behind a process that was killed: a folder without flock is refused.
        lock = FileLock(
            self.folder / "lock", timeout=_WAIT_SECONDS, poll_interval=0.2, fallback_to_soft=False
        )
        try:
            lock.acquire()
        except Timeout as error:
            raise StorageError(f"another process is training in {self.folder}") from error
        except (OSError, NotImplementedError) as error:
            raise StorageError(
                f"{self.folder} cannot be locked ({error}): give a storage folder with flock"
            ) from error
        try:
            yield
        finally:
            lock.release()

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint; a crash leaves the old one or the new one, never a part.

        The step is noted first: should the crash fall between the two, the charge is too high, not too low.

        Raises:
          LedgerError: the grant was taken back; what has been drawn is saved.
        """
        attempt = self._read_attempts()
        if attempt is not None:
            self._write_attempts(replace(attempt, saved_step=checkpoint.step))
        with _replacing(self.folder / "checkpoint.pt") as file:
            torch.save(vars(checkpoint), file)
        self._check_grant(self._num_steps_possible)

    def load(self) -> Checkpoint | None:
        """Return the last checkpoint, or None.

        Raises:
          StorageError: the file is damaged; starting over silently would hide a spend.
        """
        path = self.folder / "checkpoint.pt"
        if not path.is_file():
            return None
        try:
            return Checkpoint(**torch.load(path, weights_only=True))
        except Exception as error:
            raise StorageError(
                f"checkpoint {path} cannot be read ({type(error).__name__}): "
                "restore it, or delete this one file to start the training over; what was spent stays charged"
            ) from error

    def begin_attempt(self, start_step: int, num_steps: int) -> Attempt:
        """Count one more attempt, before its first step.

        Args:
          start_step: steps in the checkpoint that this attempt starts from (0 without one).
          num_steps: T; no attempt goes beyond it.

        Every earlier attempt may have gone as far as the step before its next checkpoint, so the steps
        between `start_step` and there are charged again. The farthest checkpoint is remembered apart
        from the checkpoint itself: a lost one makes the repetition larger, and visible.
        """
        attempt = self._next_attempt(start_step, num_steps)
        self._num_steps_possible = num_steps + attempt.num_steps_repeated
        self._check_grant(self._num_steps_possible)
        self._write_attempts(attempt)
        return attempt

    def check_grant(self, num_steps: int) -> None:
        """Refuse a training whose next attempt the grant does not cover.

        Raises:
          LedgerError: the steps that all attempts may draw are more than the ledger grants.
        """
        self._check_grant(self.steps_if_resumed(num_steps))

    def steps_if_resumed(self, num_steps: int) -> int:
        """Return an upper bound on the steps drawn by all attempts, if one more began now."""
        saved = self.load()
        attempt = self._next_attempt(saved.step if saved is not None else 0, num_steps)
        return num_steps + attempt.num_steps_repeated

    def _next_attempt(self, start_step: int, num_steps: int) -> Attempt:
        before = self._read_attempts()
        if before is None and start_step > 0:
            raise StorageError(
                f"{self.folder / 'attempts.json'} is missing beside a checkpoint, so earlier attempts cannot "
                "be charged; restore it, or start this training in a new folder"
            )
        if before is None:
            return Attempt(
                num_restarts=0, num_steps_repeated=0, saved_step=start_step, every_steps=self.every_steps
            )
        farthest = min(before.saved_step + before.every_steps, num_steps)
        return Attempt(
            num_restarts=before.num_restarts + 1,
            num_steps_repeated=before.num_steps_repeated + max(0, farthest - start_step),
            saved_step=start_step,
            every_steps=self.every_steps,
            num_scorings=before.num_scorings,
        )

    def begin_scoring(self) -> int:
        """Count one more drawing of noised scores, before it is made; return how many there may have been.

        Scores that a lost checkpoint held are drawn again, with other noise, and cost as much again.

        Raises:
          LedgerError: the grant does not cover it.
        """
        attempt = self._read_attempts()
        if attempt is None:
            raise StorageError(
                f"{self.folder / 'attempts.json'} is missing; start this training in a new folder"
            )
        attempt = replace(attempt, num_scorings=attempt.num_scorings + 1)
        if self.charged:
            grant = read_grant(self.folder)
            if grant is None or grant.num_scorings < attempt.num_scorings:
                raise LedgerError(
                    f"the budget ledger grants {grant.num_scorings if grant else 0} drawings of noised "
                    f"scores to the training in {self.folder}, and this would be number "
                    f"{attempt.num_scorings}; --resume charges it"
                )
        self._write_attempts(attempt)
        return attempt.num_scorings

    def num_scorings(self) -> int:
        """Return how often noised scores may have been drawn so far."""
        attempt = self._read_attempts()
        return attempt.num_scorings if attempt is not None else 0

    def scorings_if_resumed(self) -> int:
        """Return an upper bound on the drawings of noised scores by all attempts, if one more began now."""
        saved = self.load()
        drawn = saved is not None and holds_noised_scores(saved.final)
        return self.num_scorings() + (0 if drawn else 1)

    def _check_grant(self, num_steps: int) -> None:
        if not self.charged:
            return
        grant = read_grant(self.folder)
        granted = grant.num_steps - grant.num_steps_lost if grant is not None else 0
        if granted < num_steps:
            raise LedgerError(
                f"the budget ledger grants {max(0, granted)} steps to the training in {self.folder}, and "
                f"{num_steps} may be drawn; see that the ledger can be reached and has room, then --resume"
            )

    def _read_attempts(self) -> Attempt | None:
        return read_attempt(self.folder)

    def _write_attempts(self, attempt: Attempt) -> None:
        with _replacing(self.folder / "attempts.json") as file:
            file.write(json.dumps(vars(attempt)).encode())


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How often a training was resumed, and what that costs.

    Attributes:
      num_restarts: attempts before this one.
      num_steps_repeated: upper bound on the steps drawn more than once so far.
      saved_step: the farthest step a checkpoint was written for.
      every_steps: steps between checkpoints of this attempt; a later one may use another number.
      num_scorings: times that noised scores may have been drawn; noted before each drawing.
    """

    num_restarts: int
    num_steps_repeated: int
    saved_step: int
    every_steps: int
    num_scorings: int = 0


def read_attempt(folder: Path) -> Attempt | None:
    """Return what is known of a training's attempts; None where none has begun.

    Raises:
      StorageError: the file is damaged.
    """
    path = folder / "attempts.json"
    try:
        return Attempt(**json.loads(path.read_text())) if path.is_file() else None
    except (ValueError, TypeError) as error:
        raise StorageError(
            f"{path} is damaged; restore it, or start this training in a new folder"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Grant:
    """What a ledger pays for.

    Attributes:
      num_steps: steps reserved, lost ones included; 0 takes the grant back.
      num_steps_lost: of these, steps of attempts that no file here knows of any more.
      num_scorings: drawings of noised scores, where the training draws any.
    """

    num_steps: int
    num_steps_lost: int = 0
    num_scorings: int = 1


def read_grant(folder: Path) -> Grant | None:
    """Return the grant of the training in `folder`; None without one.

    Raises:
      StorageError: the file is damaged.
    """
    path = folder / "grant.json"
    try:
        return Grant(**json.loads(path.read_text())) if path.is_file() else None
    except (ValueError, TypeError) as error:
        raise StorageError(f"{path} is damaged; delete it, and --resume charges the training anew") from error


def write_grant(folder: Path, grant: Grant) -> None:
    """Note a grant durably, in place of an earlier one."""
    folder.mkdir(parents=True, exist_ok=True)
    with _replacing(folder / "grant.json") as file:
        file.write(json.dumps(vars(grant)).encode())


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `path` at the end, durably and at once."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a renaming in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
