"""Attempts that run at once: one goes on, and nothing that any of them draws is uncounted."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from dpgcl_core.attempts import Attempts, DrawCounts
from dpgcl_core.errors import StorageError
from trainers.files import checkpoint
from trainers.files.checkpoint import Checkpoint, CheckpointFolder, read_drawn, write_drawn

FORK = multiprocessing.get_context("fork")  # no import of torch in every process
T, EVERY = 4, 2
EACH = 11
"""Of the places of the second one, every 11th is tried with one of the first, others with the next."""


def test_numbers_of_processes_that_claim_at_once_differ(tmp_path: Path) -> None:
    """Each ends by itself: a pool would end them by a signal, for which Ray may have set a handler."""
    go, told = FORK.Event(), FORK.SimpleQueue()
    processes = [FORK.Process(target=_claim, args=(tmp_path / "attempts", go, told)) for _ in range(8)]
    for process in processes:
        process.start()
    go.set()
    numbers = [told.get() for _ in range(64)]
    for process in processes:
        process.join()
    assert sorted(numbers) == list(range(1, 65))


def _claim(folder: Path, go: Event, told: SimpleQueue[int]) -> None:
    go.wait()
    for _ in range(8):
        told.put(Attempts(folder).claim())


def test_newer_attempt_outdates_the_earlier_ones(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path / "one")
    first, second = attempts.claim(), attempts.claim()
    attempts.refuse_outdated(second)
    with pytest.raises(StorageError, match=r"attempt 1 of this training, on .+, is outdated by attempt 2"):
        attempts.refuse_outdated(first)


def test_attempt_that_cannot_look_stops(tmp_path: Path) -> None:
    """As on a node that the shared folder is out of reach of."""
    attempts = Attempts(tmp_path / "one")
    number = attempts.claim()
    shutil.rmtree(attempts.folder)
    with pytest.raises(StorageError, match=r"cannot be read .* may be outdated. It stops"):
        attempts.refuse_outdated(number)


def test_attempt_that_may_not_draw_takes_its_count_back(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path / "one")
    number = attempts.claim()
    attempts.count(number, DrawCounts(num_attempts=1, num_steps=2))
    attempts.claim()
    with pytest.raises(StorageError, match="outdated"):
        attempts.count(number, DrawCounts(num_attempts=1, num_steps=4))
    assert attempts.total() == DrawCounts(num_attempts=1, num_steps=2)


def test_attempt_looks_for_newer_ones_after_it_has_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer one that begins before the count lies there has not read it."""
    attempts, write = Attempts(tmp_path / "one"), Attempts._write
    number = attempts.claim()

    def write_late(own: Attempts, *count: Any) -> None:
        Attempts(own.folder).claim()
        write(own, *count)

    monkeypatch.setattr(Attempts, "_write", write_late)
    with pytest.raises(StorageError, match="outdated"):
        attempts.count(number, DrawCounts(num_attempts=1, num_steps=2))


def test_damaged_count_of_an_attempt_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    folder.begin_attempt(0, T)
    file = next((tmp_path / "count.attempts").iterdir())
    file.write_text('{"steps": 1}')
    with pytest.raises(StorageError, match=r"000001\.json is damaged\. Restore it"):
        folder.read_counts()


def test_count_of_either_file_alone_stands(tmp_path: Path) -> None:
    """Of an earlier version there is the sum alone; and one that two wrote at once may lack a part."""
    folder = _folder(tmp_path)
    write_drawn(folder.count_file, DrawCounts(num_attempts=1, num_steps=9))
    assert folder.read_counts() == DrawCounts(num_attempts=1, num_steps=9)
    folder.begin_attempt(0, T)
    assert folder.read_counts() == DrawCounts(num_attempts=2, num_steps=9 + EVERY)
    write_drawn(folder.count_file, DrawCounts())
    assert folder.read_counts() == DrawCounts(num_attempts=1, num_steps=EVERY)


def test_driver_that_charges_a_restart_stops_the_living_attempt(tmp_path: Path) -> None:
    living = _folder(tmp_path)
    living.begin_attempt(0, T)
    _folder(tmp_path).outdate()
    counted = _folder(tmp_path).read_counts()
    with pytest.raises(StorageError, match="outdated"):
        living.save(_state(EVERY))
    with pytest.raises(StorageError, match="outdated"):
        living.begin_scoring()
    assert _folder(tmp_path).read_counts() == counted


# Interleavings of two attempts, at the places where one of them reads or writes a file that both see.


class _Attempt:
    """An attempt in a thread that stops at one place until it is let go.

    Attributes:
      draws: of this attempt.
      told: why it ended before its time.
    """

    def __init__(self, path: Path, journal: list[int]) -> None:
        self.draws, self.at, self.told = 0, 0, ""
        self._path, self._journal = path, journal
        self._stop_at, self._reached, self._go = 0, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, stop_at: int) -> None:
        """Goes to a place, or to its end where that comes first."""
        self._stop_at = stop_at
        self._thread.start()
        self._reached.wait()

    def end(self) -> None:
        self._go.set()
        self._thread.join()

    def come(self) -> None:
        """Called at every place, by whichever thread is there."""
        if threading.current_thread() is self._thread:
            self.at += 1
            if self.at == self._stop_at:
                self._reached.set()
                self._go.wait()

    def _run(self) -> None:
        try:
            self._train()
        except StorageError as error:
            self.told = str(error)
        finally:
            self._reached.set()

    def _train(self) -> None:
        folder = _folder(self._path)
        with folder.hold():
            saved = folder.load()
            start = saved.step if saved is not None else 0
            folder.begin_attempt(start, T)
            for step in range(start, T):
                folder.refuse_outdated()
                self.draws += 1
                self._journal.append(step)
                assert len(self._journal) <= _counted(self._path)
                if (step + 1) % EVERY == 0:
                    folder.save(_state(step + 1))


@pytest.mark.ci
def test_no_draw_of_attempts_that_run_at_once_is_uncounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lock holds, the counts of both are written at once, and each may be stopped anywhere."""
    attempts: list[_Attempt] = []
    _come_by(monkeypatch, lambda: [each.come() for each in attempts])
    monkeypatch.setattr(checkpoint, "FileLock", lambda *given, **options: _NoLock())
    alone = _Attempt(tmp_path / "alone", [])
    attempts.append(alone)
    alone.start(0)
    alone.end()
    assert (alone.draws, alone.told) == (T, "")
    assert alone.at > 40
    for first_at in range(1, alone.at + 1):
        for second_at in range(1 + first_at % EACH, alone.at + 1, EACH):
            path, journal = tmp_path / f"{first_at}-{second_at}", list[int]()
            attempts[:] = first, second = _Attempt(path, journal), _Attempt(path, journal)
            first.start(first_at)
            drawn = first.draws
            second.start(second_at)
            first.end()
            second.end()
            place = f"{first_at}, {second_at}: {first.told}, {second.told}"
            assert len(journal) == first.draws + second.draws <= _counted(path), place
            assert not (first.told and second.told), place
            assert first.draws <= drawn + 1 or not first.told, "an outdated attempt ends with its step"
            shutil.rmtree(path)


class _NoLock(nullcontext[None]):
    def acquire(self) -> None: ...

    def release(self) -> None: ...


def _come_by(monkeypatch: pytest.MonkeyPatch, come: Callable[[], object]) -> None:
    """Call `come` before and after a file is replaced, and where numbers of attempts are read or made."""
    for owner, name in ((Path, "replace"), (Attempts, "_numbers"), (Attempts, "_create_file")):
        original = getattr(owner, name)

        def placed(*given: object, original: Callable[..., object] = original) -> object:
            come()
            found = original(*given)
            come()
            return found

        monkeypatch.setattr(owner, name, placed)


def _folder(path: Path) -> CheckpointFolder:
    return CheckpointFolder(path / "checkpoints", every_steps=EVERY, count_file=path / "count.json")


def _counted(path: Path) -> int:
    found = read_drawn(path / "count.json")
    return found.num_steps if found is not None else 0


def _state(step: int) -> Checkpoint:
    return Checkpoint(step=step, model={}, optimizer={}, series={}, final={})
