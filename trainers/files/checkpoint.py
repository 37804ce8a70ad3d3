"""Checkpoints: model, optimizer, average and step, written atomically, and **no** random state.

After a resume, sampling, permutation and noise draw fresh entropy. So a step that is repeated since the last
checkpoint is an independent draw and is charged once more.

*The count.* Steps are counted *before* they are drawn, one checkpoint interval at a time, in a file that is
durable when its interval begins. So at every moment, and after a kill at any moment, no more steps were drawn
than are counted. A kill wastes only the rest of its interval. A requested stop wastes nothing: the attempt
saves, and subtracts the steps that it counted and will not draw. The file is outside the folder of the
checkpoints, so restoring an older checkpoint does not reset the count. Restoring an older copy of both resets
it, and so does a disk that loses data that it reported as written. Every attempt also has its own number and
count, so that an attempt that continues unseen ends, and stays counted, even if the folder's lock is
effective on only one node (`dpgcl_core.attempts`).

*Charged in advance.* If R steps for restarts are charged in advance (`num_restart_steps`), an attempt that
could bring the count beyond T + R is refused before its first step. All attempts together then draw at most
T + R steps, whoever stops and resumes them and whatever they have seen (docs/theory/restarts.md).

*A grant.* A training that a budget ledger pays for has a grant next to its checkpoint: the number of steps
that the driver has reserved. The training draws no step beyond the grant. If the driver loses the ledger and
takes the grant back, the training stops at the next checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from dpgcl_core.attempts import Attempts, DrawCounts
from dpgcl_core.durable_files import make_folder, replacing, storage_errors, sync_folder
from dpgcl_core.errors import LedgerError, StorageError
from trainers.config.removed_options import check_removed_field

_WAIT_SECONDS = 900.0
"""An outdated attempt ends after its current step, and a large step takes minutes."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a training after `step` steps.

    Attributes:
      step: number of steps done.
      model, optimizer: state dictionaries.
      series: the per-step metrics recorded so far that may leave the training.
      final: values that exist once (scores of the untrained network, SNR of the first step) and may leave it.
      average: averaged weights by name, if the training keeps an average; older files hold none.
    """

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    series: dict[str, list[tuple[int, float]]]
    final: dict[str, float]
    average: dict[str, Any] | None = None


def holds_noised_scores(final: dict[str, float]) -> bool:
    """Whether a training's final values include its noised scores, which are drawn together."""
    return "noised_knn_accuracy" in final


class CheckpointFolder:
    """The durable state of one training in one folder.

    Args:
      folder: the training's folder, created if missing.
      every_steps: number of steps between checkpoints.
      is_paid: whether a ledger pays for the training, so that it needs a grant.
      count_file: file with the count of the drawn steps, kept by the caller that starts the training; by
        default a file next to the folder.
    """

    def __init__(
        self, folder: Path, *, every_steps: int, is_paid: bool = False, count_file: Path | None = None
    ) -> None:
        self.folder = folder
        self.every_steps = every_steps
        self.is_paid = is_paid
        self.count_file = count_file or folder.with_name(f"{folder.name}.drawn.json")
        self._caller_keeps_count = count_file is not None
        self._num_steps = 0
        self._num_steps_possible = 0
        self._counted_to = 0
        self._num_restart_steps: int | None = None
        self._attempts = attempts_of(self.count_file)
        self._number: int | None = None
        self._own_counts = DrawCounts()
        make_folder(folder)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Lock the folder for a new attempt, which outdates earlier attempts; wait for one that still runs.

        The earlier attempt ends at its next step, where it finds itself outdated. The operating system
        releases the lock of a dead process.

        Raises:
          StorageError: another process still trains here, or it has begun a newer attempt.
        """
        # A soft lock would remain after a process is killed, so a folder without flock is refused.
        # The lock file is next to the count, because folders of checkpoints may replace each other.
        lock = FileLock(
            self.count_file.with_suffix(".lock"),
            timeout=_WAIT_SECONDS,
            poll_interval=0.2,
            mode=0o600,
            fallback_to_soft=False,
        )
        try:
            self._number, self._own_counts = self._attempts.claim(), DrawCounts()
            lock.acquire()
        except Timeout as error:
            raise StorageError(f"another process is training in {self.folder}") from error
        except (OSError, NotImplementedError) as error:
            raise StorageError(
                f"{self.folder} cannot be locked ({error}). Use a storage folder that supports flock."
            ) from error
        try:
            self.refuse_outdated()
            yield
        finally:
            lock.release()
            self._number, self._own_counts = None, DrawCounts()

    def outdate(self) -> None:
        """Outdate all attempts so far; then the counts bound all that these drew or may still draw.

        Raises:
          StorageError: the folder cannot be written.
        """
        with storage_errors(self._attempts.folder):
            self._attempts.claim()

    def refuse_outdated(self) -> None:
        """Raise StorageError once a newer attempt has begun, so that this one draws no more.

        Raises:
          StorageError: a newer attempt has begun, or this cannot be determined.
        """
        if self._number is not None:
            self._attempts.refuse_outdated(self._number)

    def save(self, checkpoint: Checkpoint, *, is_last: bool = False) -> None:
        """Replace the checkpoint; a crash leaves the old checkpoint or the new one, never a part.

        Then the steps up to the next checkpoint are counted: the count must be durable before any of them is
        drawn. After an attempt's last checkpoint nothing more is drawn, and steps counted beyond it are
        subtracted again.

        Raises:
          LedgerError: the grant was taken back; the steps drawn so far are saved.
          StorageError: a newer attempt has begun, or with its steps more than T + R would be drawn.
        """
        self.refuse_outdated()
        with replacing(self.folder / "checkpoint.pt") as file:
            torch.save(vars(checkpoint), file)
        self._check_grant(self._num_steps_possible)
        if is_last:
            self._subtract_undrawn(checkpoint.step)
            return
        if not (num_ahead := self._steps_until_saved(checkpoint.step)):
            return
        counts, restarts = self.read_counts(), self._num_restart_steps
        if restarts is not None and counts.num_steps + num_ahead > self._num_steps + restarts:
            raise StorageError(
                f"{self.count_file} counts {counts.num_steps} steps, more than this training has drawn. "
                "Another process trains in this folder, and more steps would be drawn than are charged."
            )
        self._count(DrawCounts(num_steps=num_ahead))
        self._counted_to = checkpoint.step + num_ahead

    def _subtract_undrawn(self, step: int) -> None:
        """Reduce the count to the steps drawn, for an attempt that ends after `step` steps."""
        if (num_undrawn := self._counted_to - step) > 0:
            self._count(DrawCounts(num_steps=-num_undrawn))
            self._counted_to = step

    def load(self) -> Checkpoint | None:
        """Return the last checkpoint, or None.

        Raises:
          StorageError: the file is damaged; starting over silently would hide the ε spent.
          ConfigError: an earlier version wrote the file, with its removed option `subspace_dim`.
        """
        path = self.folder / "checkpoint.pt"
        if not path.is_file():
            return None
        try:
            # On the CPU: a checkpoint must load on machines without a GPU, and need not be on a GPU twice.
            content = torch.load(path, weights_only=True, map_location="cpu")
            basis = content.pop("basis", None)  # files of 0.1 hold one, mostly None
            checkpoint = Checkpoint(**content)
        except Exception as error:
            raise StorageError(
                f"checkpoint {path} cannot be read ({type(error).__name__}). "
                "Restore it, or delete only this file to start over. The ε spent so far stays charged."
            ) from error
        check_removed_field("public.subspace_dim", 0 if basis is None else len(basis))
        return checkpoint

    def begin_attempt(self, start_step: int, num_steps: int, num_restart_steps: int | None = None) -> Attempt:
        """Count one more attempt and its first steps, before any of them is drawn.

        Args:
          start_step: number of steps in the checkpoint that this attempt starts from (0 without one).
          num_steps: T; no attempt goes beyond step T.
          num_restart_steps: R, charged in advance; None for no limit.

        Raises:
          StorageError: the count of earlier attempts is missing, or with this attempt more than T + R steps
            could be drawn.
          LedgerError: the grant does not cover the attempt.
        """
        if refusal := self.refusal(num_steps, num_restart_steps, start_step=start_step):
            raise StorageError(refusal)
        if self._number is None or self._own_counts.num_attempts:
            self._number, self._own_counts = self._attempts.claim(), DrawCounts()
        counts = self.read_counts()
        num_before = max(counts.num_steps, start_step)
        possible = num_before + num_steps - start_step
        self._check_grant(possible)
        self._num_steps, self._num_steps_possible = num_steps, possible
        self._num_restart_steps = num_restart_steps
        ahead = self._steps_until_saved(start_step)
        self._count(DrawCounts(num_attempts=1, num_steps=num_before - counts.num_steps + ahead))
        self._counted_to = start_step + ahead
        return Attempt(num_restarts=counts.num_attempts, num_steps_repeated=possible - num_steps)

    def refusal(
        self, num_steps: int, num_restart_steps: int | None, *, start_step: int | None = None
    ) -> str | None:
        """Return the reason why no further attempt may begin, as a sentence; None if one may.

        Args:
          num_steps, num_restart_steps: as in `begin_attempt`.
          start_step: as in `begin_attempt`; the checkpoint's step by default.
        """
        counts = read_drawn(self.count_file)
        if start_step is None:
            start_step = self.saved_step() if counts is not None and counts.num_steps else 0
        if counts is None and (
            start_step > 0 or (self._caller_keeps_count and num_restart_steps is not None)
        ):
            return (
                f"the count of drawn steps {self.count_file} is missing, so earlier attempts cannot be "
                "charged. Restore it, or start this training in a new folder."
            )
        if counts is None or num_restart_steps is None:
            return None
        num_repeated = counts.num_steps - start_step
        if num_repeated <= num_restart_steps:
            return None
        return (
            f"left out: its restarts could repeat {num_repeated} steps, but only R = {num_restart_steps} are "
            "charged in advance. The other trainings and the stated ε are unaffected. Start a new sweep "
            "with a larger --restart-steps, or with --ledger; neither can be added to this sweep."
        )

    def resume_text(self, num_restart_steps: int) -> str:
        """Return a text with the next attempt's first step and the part of R that remains.

        Args:
          num_restart_steps: R, the repeated steps that are charged in advance.
        """
        saved, counts = self.saved_step(), self.read_counts()
        num_remaining = num_restart_steps - max(0, counts.num_steps - saved)
        return f"continues from step {saved}; {num_remaining} of R = {num_restart_steps} restart steps remain"

    def read_counts(self) -> DrawCounts:
        """Return upper bounds on all draws so far."""
        return read_drawn(self.count_file) or DrawCounts()

    def check_grant(self, num_steps: int) -> None:
        """Raise LedgerError if the grant does not cover another attempt at the training.

        Raises:
          LedgerError: all attempts together may draw more steps than the ledger grants.
        """
        self._check_grant(self.steps_if_resumed(num_steps))

    def steps_if_resumed(self, num_steps: int) -> int:
        """Return an upper bound on the steps drawn by all attempts, if another attempt began now."""
        saved = self.saved_step()
        return max(self.read_counts().num_steps, saved) + num_steps - saved

    def saved_step(self) -> int:
        """Return the number of steps in the checkpoint; 0 without one. Raises as `load` does."""
        saved = self.load()
        return saved.step if saved is not None else 0

    def _steps_until_saved(self, step: int) -> int:
        """Return the number of steps from `step` to the next checkpoint."""
        return max(0, min(self.every_steps - step % self.every_steps, self._num_steps - step))

    def begin_scoring(self) -> int:
        """Count one more draw of noised scores, before it is made; return how many there may have been.

        Scores in a lost checkpoint are drawn again, with fresh noise, and cost the same again.

        Raises:
          StorageError: only one draw is charged in advance, and it may have been made.
          LedgerError: the grant does not cover the draw.
        """
        counts = self.read_counts() + DrawCounts(num_scorings=1)
        if self._num_restart_steps is not None and counts.num_scorings > 1:
            raise StorageError(
                "left out: it was stopped while its noised scores were drawn, but only one draw of them is "
                "charged in advance. The other trainings and the stated ε are unaffected."
            )
        if self.is_paid:
            grant = read_grant(self.folder)
            if grant is None or grant.num_scorings < counts.num_scorings:
                raise LedgerError(
                    f"the budget ledger grants {grant.num_scorings if grant else 0} draws of noised "
                    f"scores to the training in {self.folder}, but this would be draw "
                    f"{counts.num_scorings}. Use --resume to charge it."
                )
        self._count(DrawCounts(num_scorings=1))
        return counts.num_scorings

    def scorings_if_resumed(self) -> int:
        """Return an upper bound on all attempts' draws of noised scores, if another attempt began now."""
        saved = self.load()
        is_drawn = saved is not None and holds_noised_scores(saved.final)
        return self.read_counts().num_scorings + (0 if is_drawn else 1)

    def _check_grant(self, num_steps: int) -> None:
        if not self.is_paid:
            return
        grant = read_grant(self.folder)
        granted = grant.num_steps - grant.num_steps_lost if grant is not None else 0
        if granted < num_steps:
            raise LedgerError(
                f"the budget ledger grants {max(0, granted)} steps to the training in {self.folder}, but "
                f"{num_steps} may be drawn. Check the ledger's connection and budget, then use --resume."
            )

    def _count(self, draws: DrawCounts) -> None:
        """Count this attempt's next draws, in its own file and in the sum of all attempts.

        Raises:
          StorageError: a newer attempt has begun, so this one may not make these draws.
        """
        if self._number is None:
            self._number = self._attempts.claim()
        total, own_counts = self.read_counts() + draws, self._own_counts + draws
        self._attempts.count(self._number, own_counts)
        self._own_counts = own_counts
        write_drawn(self.count_file, total)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The state with which an attempt to train begins.

    Attributes:
      num_restarts: number of attempts before this one.
      num_steps_repeated: upper bound on the steps drawn more than once by the end of this attempt.
    """

    num_restarts: int = 0
    num_steps_repeated: int = 0


def read_drawn(count_file: Path) -> DrawCounts | None:
    """Return upper bounds on a training's draws; None if nothing was counted.

    Raises:
      StorageError: the file is damaged.
    """
    if not count_file.is_file():
        return None
    try:
        total = DrawCounts(**json.loads(count_file.read_text()))
    except (ValueError, TypeError) as error:
        raise StorageError(
            f"{count_file} is damaged. Restore it, or start this training in a new folder."
        ) from error
    return total.at_least(attempts_of(count_file).total())


def attempts_of(count_file: Path) -> Attempts:
    """Return the attempts whose steps are counted in a file; their files are next to it."""
    return Attempts(count_file.with_suffix(".attempts"))


def write_drawn(count_file: Path, counts: DrawCounts) -> None:
    """Record durably upper bounds on a training's draws, before it makes them."""
    if not count_file.parent.is_dir():
        make_folder(count_file.parent)
        sync_folder(count_file.parent.parent)
    with replacing(count_file) as file:
        file.write(json.dumps(vars(counts)).encode())


GRANT_FILE = "grant.json"
"""File next to the checkpoints that the driver writes and the worker reads."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """The draws that a ledger pays for.

    Attributes:
      num_steps: number of steps reserved, including lost ones; 0 takes the grant back.
      num_steps_lost: how many of these steps belong to attempts whose files are lost.
      num_scorings: number of draws of noised scores, if the training makes any.
    """

    num_steps: int
    num_steps_lost: int = 0
    num_scorings: int = 1


def read_grant(folder: Path) -> Grant | None:
    """Return the grant of the training in `folder`; None without one.

    Raises:
      StorageError: the file is damaged.
    """
    path = folder / GRANT_FILE
    try:
        return Grant(**json.loads(path.read_text())) if path.is_file() else None
    except (ValueError, TypeError) as error:
        raise StorageError(f"{path} is damaged. Delete it, and --resume charges the training anew") from error


def write_grant(folder: Path, grant: Grant) -> None:
    """Record a grant durably, in place of an earlier one."""
    make_folder(folder)
    with replacing(folder / GRANT_FILE) as file:
        file.write(json.dumps(vars(grant)).encode())
