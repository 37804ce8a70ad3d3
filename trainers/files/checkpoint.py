"""Checkpoints: model, optimizer, average and step, written atomically, and **no** random state.

After a resume sampling, permutation and noise draw fresh entropy, so a step repeated since the last
checkpoint is an independent draw and is charged once more.

*The count.* Steps are counted *before* they are drawn, a checkpoint interval at a time, in a file that is
durable when its interval begins. So at every moment, and after a kill at any moment, no more steps were drawn
than are counted: a kill wastes what is left of its interval, and nothing else. A stop that is asked for
wastes nothing: the attempt saves, and takes back what it counted and will not draw. The file lies outside the
folder of the checkpoints, so an older checkpoint that somebody puts back does not take the count back; an
older copy of both, or a disk that loses what it said to have written, does. Every attempt has a number and a
count of its own as well, so that one that goes on unseen ends, and stays counted, even where the folder's
lock holds on one node alone (`trainers.files.attempts`).

*Charged in advance.* Where R steps for restarts are (`num_restart_steps`), an attempt that could bring the
count beyond T + R is refused before its first step. What all attempts draw together is then at most T + R
steps, whoever stops and resumes them and after seeing what (docs/theory/restarts.md).

*A grant.* A training that a budget ledger pays for has one beside its checkpoint: the number of steps that
the driver has reserved. It draws no step beyond the grant, and stops at the next checkpoint once the driver,
which has lost the ledger, has taken it back.
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

from dpgcl_core.errors import LedgerError, StorageError
from trainers.config.removed_options import check_removed_field
from trainers.files.attempts import Attempts, DrawCounts
from trainers.files.durable_files import make_folder, replacing, sync_folder

_WAIT_SECONDS = 900.0
"""An attempt that is outdated ends with its step, and a large one takes minutes."""


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
      is_paid: whether a ledger pays for the training, so that it needs a grant.
      count_file: of the drawn steps, kept by whoever starts the training; a file beside the folder unless
        given.
    """

    def __init__(
        self, folder: Path, *, every_steps: int, is_paid: bool = False, count_file: Path | None = None
    ) -> None:
        self.folder = folder
        self.every_steps = every_steps
        self.is_paid = is_paid
        self.count_file = count_file or folder.with_name(f"{folder.name}.drawn.json")
        self._is_kept = count_file is not None
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
        """Hold the folder for a new attempt, which outdates the earlier ones; wait for one that still runs.

        It ends at its next step, where it finds itself outdated. The system releases a dead one's folder.

        Raises:
          StorageError: another process still trains here; or it has begun a newer attempt.
        """
        # A soft lock would stay behind a process that was killed: a folder without flock is refused.
        # It lies beside the count: folders of checkpoints are put in the place of others.
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
                f"{self.folder} cannot be locked ({error}): give a storage folder with flock"
            ) from error
        try:
            self.refuse_outdated()
            yield
        finally:
            lock.release()
            self._number, self._own_counts = None, DrawCounts()

    def outdate(self) -> None:
        """Outdate the attempts so far: what is counted when this returns bounds what they may still draw.

        Raises:
          StorageError: the folder cannot be written.
        """
        try:
            self._attempts.claim()
        except OSError as error:
            raise StorageError(f"{self._attempts.folder} cannot be written: {error.strerror}") from error

    def refuse_outdated(self) -> None:
        """Refuse to draw more once a newer attempt has begun.

        Raises:
          StorageError: it has, or it cannot be known.
        """
        if self._number is not None:
            self._attempts.refuse_outdated(self._number)

    def save(self, checkpoint: Checkpoint, *, is_last: bool = False) -> None:
        """Replace the checkpoint; a crash leaves the old one or the new one, never a part.

        Then the steps up to the next one are counted: it must be durable before any of them is drawn. After
        the last one of an attempt nothing more is drawn: what it has counted beyond it is taken back.

        Raises:
          LedgerError: the grant was taken back; what has been drawn is saved.
          StorageError: a newer attempt has begun, or with its steps more than T + R would be drawn.
        """
        self.refuse_outdated()
        with replacing(self.folder / "checkpoint.pt") as file:
            torch.save(vars(checkpoint), file)
        self._check_grant(self._num_steps_possible)
        if is_last:
            self._take_back(checkpoint.step)
            return
        if not (num_ahead := self._steps_until_saved(checkpoint.step)):
            return
        counts, restarts = self.read_counts(), self._num_restart_steps
        if restarts is not None and counts.num_steps + num_ahead > self._num_steps + restarts:
            raise StorageError(
                f"{self.count_file} counts {counts.num_steps} steps, more than this training has drawn: "
                "another process trains here, and more would be drawn than is charged"
            )
        self._count(DrawCounts(num_steps=num_ahead))
        self._counted_to = checkpoint.step + num_ahead

    def _take_back(self, step: int) -> None:
        """Count no more than was drawn, by an attempt that ends after `step` steps and draws nothing more."""
        if (num_undrawn := self._counted_to - step) > 0:
            self._count(DrawCounts(num_steps=-num_undrawn))
            self._counted_to = step

    def load(self) -> Checkpoint | None:
        """Return the last checkpoint, or None.

        Raises:
          StorageError: the file is damaged; starting over silently would hide a spend.
          ConfigError: it is of a training in a public subspace, which an earlier version made.
        """
        path = self.folder / "checkpoint.pt"
        if not path.is_file():
            return None
        try:
            # A GPU's checkpoint is read by machines without one, too, and needs no second place on a GPU.
            content = torch.load(path, weights_only=True, map_location="cpu")
            basis = content.pop("basis", None)  # files of 0.1 hold one, mostly None
            checkpoint = Checkpoint(**content)
        except Exception as error:
            raise StorageError(
                f"checkpoint {path} cannot be read ({type(error).__name__}): "
                "restore it, or delete this one file to start the training over; what was spent stays charged"
            ) from error
        check_removed_field("public.subspace_dim", 0 if basis is None else len(basis))
        return checkpoint

    def begin_attempt(self, start_step: int, num_steps: int, num_restart_steps: int | None = None) -> Attempt:
        """Count one more attempt and its first steps, before any is drawn.

        Args:
          start_step: steps in the checkpoint that this attempt starts from (0 without one).
          num_steps: T; no attempt goes beyond it.
          num_restart_steps: R, charged in advance; None for no limit.

        Raises:
          StorageError: earlier attempts cannot be counted any more, or with this one more than T + R steps
            could be drawn.
          LedgerError: the grant does not cover it.
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
        """Return why no further attempt may begin, in a sentence; None where one may.

        Args:
          num_steps, num_restart_steps: as of `begin_attempt`.
          start_step: likewise; that of the checkpoint unless given.
        """
        counts = read_drawn(self.count_file)
        if start_step is None:
            start_step = self.saved_step() if counts is not None and counts.num_steps else 0
        if counts is None and (start_step > 0 or (self._is_kept and num_restart_steps is not None)):
            return (
                f"the count of drawn steps {self.count_file} is missing, so earlier attempts cannot be "
                "charged; restore it, or start this training in a new folder"
            )
        if counts is None or num_restart_steps is None:
            return None
        num_repeated = counts.num_steps - start_step
        if num_repeated <= num_restart_steps:
            return None
        return (
            f"left out: its restarts could repeat {num_repeated} steps, and R = {num_restart_steps} are "
            "charged in advance; the other trainings and the stated ε stand as they are. Start a new sweep "
            "with a larger --restart-steps, or with --ledger; neither can be added to this one"
        )

    def goes_on_text(self, num_restart_steps: int) -> str:
        """Return where the next attempt would begin, and how much of R is left by then.

        Args:
          num_restart_steps: R, the repeated steps that are charged in advance.
        """
        saved, counts = self.saved_step(), self.read_counts()
        num_remaining = num_restart_steps - max(0, counts.num_steps - saved)
        return f"goes on from step {saved}; {num_remaining} of R = {num_restart_steps} left"

    def read_counts(self) -> DrawCounts:
        """Return what may have been drawn so far."""
        return read_drawn(self.count_file) or DrawCounts()

    def check_grant(self, num_steps: int) -> None:
        """Refuse a training whose next attempt the grant does not cover.

        Raises:
          LedgerError: the steps that all attempts may draw are more than the ledger grants.
        """
        self._check_grant(self.steps_if_resumed(num_steps))

    def steps_if_resumed(self, num_steps: int) -> int:
        """Return an upper bound on the steps drawn by all attempts, if one more began now."""
        saved = self.saved_step()
        return max(self.read_counts().num_steps, saved) + num_steps - saved

    def saved_step(self) -> int:
        """Return the steps in the checkpoint; 0 without one. Raises as `load`."""
        saved = self.load()
        return saved.step if saved is not None else 0

    def _steps_until_saved(self, step: int) -> int:
        """Return the steps from `step` to the next checkpoint."""
        return max(0, min(self.every_steps - step % self.every_steps, self._num_steps - step))

    def begin_scoring(self) -> int:
        """Count one more drawing of noised scores, before it is made; return how many there may have been.

        Scores that a lost checkpoint held are drawn again, with other noise, and cost as much again.

        Raises:
          LedgerError: the grant does not cover it.
        """
        counts = self.read_counts() + DrawCounts(num_scorings=1)
        if self._num_restart_steps is not None and counts.num_scorings > 1:
            raise StorageError(
                "left out: it was stopped while its noised scores were drawn, and one drawing of them is "
                "charged in advance; the other trainings and the stated ε stand as they are"
            )
        if self.is_paid:
            grant = read_grant(self.folder)
            if grant is None or grant.num_scorings < counts.num_scorings:
                raise LedgerError(
                    f"the budget ledger grants {grant.num_scorings if grant else 0} drawings of noised "
                    f"scores to the training in {self.folder}, and this would be number "
                    f"{counts.num_scorings}; --resume charges it"
                )
        self._count(DrawCounts(num_scorings=1))
        return counts.num_scorings

    def scorings_if_resumed(self) -> int:
        """Return an upper bound on the drawings of noised scores by all attempts, if one more began now."""
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
                f"the budget ledger grants {max(0, granted)} steps to the training in {self.folder}, and "
                f"{num_steps} may be drawn; see that the ledger can be reached and has room, then --resume"
            )

    def _count(self, draws: DrawCounts) -> None:
        """Count what this attempt draws next, in its own file and in the sum of all.

        Raises:
          StorageError: a newer attempt has begun: it may not draw this.
        """
        if self._number is None:
            self._number = self._attempts.claim()
        total, own_counts = self.read_counts() + draws, self._own_counts + draws
        self._attempts.count(self._number, own_counts)
        self._own_counts = own_counts
        write_drawn(self.count_file, total)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What an attempt to train begins with.

    Attributes:
      num_restarts: attempts before this one.
      num_steps_repeated: upper bound on the steps that are drawn more than once when it comes to its end.
    """

    num_restarts: int = 0
    num_steps_repeated: int = 0


def read_drawn(count_file: Path) -> DrawCounts | None:
    """Return what a training may have drawn; None where nothing was counted.

    Raises:
      StorageError: the file is damaged.
    """
    if not count_file.is_file():
        return None
    try:
        total = DrawCounts(**json.loads(count_file.read_text()))
    except (ValueError, TypeError) as error:
        raise StorageError(
            f"{count_file} is damaged; restore it, or start this training in a new folder"
        ) from error
    return total.at_least(attempts_of(count_file).total())


def attempts_of(count_file: Path) -> Attempts:
    """Return the attempts whose steps are counted in a file: they lie beside it."""
    return Attempts(count_file.with_suffix(".attempts"))


def write_drawn(count_file: Path, counts: DrawCounts) -> None:
    """Note durably what a training may have drawn, before it draws it."""
    if not count_file.parent.is_dir():
        make_folder(count_file.parent)
        sync_folder(count_file.parent.parent)
    with replacing(count_file) as file:
        file.write(json.dumps(vars(counts)).encode())


GRANT_FILE = "grant.json"
"""Beside the checkpoints, for the driver to write and the worker to read."""


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
    path = folder / GRANT_FILE
    try:
        return Grant(**json.loads(path.read_text())) if path.is_file() else None
    except (ValueError, TypeError) as error:
        raise StorageError(f"{path} is damaged; delete it, and --resume charges the training anew") from error


def write_grant(folder: Path, grant: Grant) -> None:
    """Note a grant durably, in place of an earlier one."""
    make_folder(folder)
    with replacing(folder / GRANT_FILE) as file:
        file.write(json.dumps(vars(grant)).encode())
