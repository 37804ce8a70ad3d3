"""Sending results to MLflow in a thread, so that the sweep waits for no absent, slow or hanging server.

The thread empties a queue of names, because the results themselves are on disk. If the server fails, the
thread tries again with longer and longer pauses. `--resume` sends the results that remain at the sweep's end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from dpgcl_core.addresses import masked_text
from dpgcl_core.errors import DpgclError
from sweeps.service.console.terminal import count, duration
from trainers.tracking.mlflow_server import NoAnswer

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_START_TRIES = 7
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Two limits on waiting for a server that accepts nothing; the first limit reached ends the wait.

    Attributes:
      tries: the number of failed calls; with the pauses, seven take a minute if each call fails at once.
      seconds: the time without any progress, in case a call hangs.
    """

    tries: int
    seconds: float


AT_THE_END = Patience(tries=7, seconds=75.0)
AT_A_STOP = Patience(tries=4, seconds=10.0)


def pauses() -> Iterator[float]:
    """Yield the seconds between attempts, without end.

    >>> from itertools import islice
    >>> list(islice(pauses(), 8))
    [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    """
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def patiently(
    call: Callable[[], T], print_line: Callable[[str], None], *, sleep: Callable[[float], None] = time.sleep
) -> T:
    """Return the result of `call`, which is repeated for a minute while the server does not answer.

    Args:
      call: a call to the server that may be repeated; it raises `NoAnswer` without an answer.
      print_line: prints one line before the first repetition.
      sleep: waits for a number of seconds.

    Raises:
      TrackingError: the server answers with an error, or still does not answer.
    """
    for number, pause in zip(range(1, _START_TRIES), pauses(), strict=False):
        try:
            return call()
        except NoAnswer as error:
            if number == 1:
                print_line(f"MLflow does not answer yet ({error.reason}); trying again for a minute …")
        sleep(pause)
    return call()


class Outbox:
    """A queue of results to send, by name, and the thread that sends them; use it as a context manager.

    The empty name stands for data other than a result, which printed lines do not count.

    Args:
      send: sends the result of this name; it raises on failure, and is then called again.
      print_line: prints a line when the server fails, and when it has caught up.
      place: the folder that keeps the unsent results, for the printed line.
    """

    def __init__(self, send: Callable[[str], None], print_line: Callable[[str], None], place: str) -> None:
        self._send, self._print_line, self._place = send, print_line, place
        self._unsent: dict[str, None] = {}
        self._condition = threading.Condition()
        self._retry_now = threading.Event()
        self._is_closed = False
        self._num_recovered: int | None = None
        self._num_failures = 0
        self._thread = threading.Thread(target=self._run, name="to MLflow", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """End the thread after its current call, without waiting for a server that hangs."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._retry_now.set()

    def put(self, name: str) -> None:
        """Queue a name; return at once."""
        with self._condition:
            self._unsent[name] = None
            self._condition.notify_all()

    def finish(self, patience: Patience) -> list[str]:
        """Wait until everything is sent or patience ends; return the names that were not sent."""
        self._retry_now.set()
        with self._condition:
            if self._num_recovered is not None and self._unsent:
                what = count(sum(map(bool, self._unsent)), "result")
                self._print_line(f"waiting up to {duration(patience.seconds)} for MLflow to accept {what} …")
            num_left = len(self._unsent) + 1
            while self._unsent and len(self._unsent) < num_left:  # as long as the server accepts names
                num_left, last = len(self._unsent), self._num_failures + patience.tries
                self._condition.wait_for(self._progress_test(num_left, last), patience.seconds)
            return list(self._unsent)

    def _progress_test(self, num_left: int, last: int) -> Callable[[], bool]:
        return lambda: len(self._unsent) < num_left or self._num_failures >= last

    def _run(self) -> None:
        waits = pauses()
        while (name := self._next()) is not None:
            try:
                self._send(name)
            except Exception as error:  # of any kind, because the thread and the sweep must continue
                self._record_failure(error)
                if self._retry_now.wait(next(waits)):
                    self._retry_now.clear()
                    waits = pauses()
            else:
                waits = pauses()
                self._mark_sent(name)

    def _next(self) -> str | None:
        """Wait for a name, and return the oldest one; None when the outbox is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._unsent or self._is_closed)
            return None if self._is_closed else next(iter(self._unsent))

    def _record_failure(self, error: Exception) -> None:
        with self._condition:
            is_first, self._num_recovered = self._num_recovered is None, self._num_recovered or 0
        if is_first:
            text = str(error) if isinstance(error, DpgclError) else f"{type(error).__name__}: {error}"
            line = " ".join(masked_text(text).split())
            self._print_line(f"warning: {line}; results are kept in {self._place} and sent later")
        with self._condition:
            self._num_failures += 1
            self._condition.notify_all()

    def _mark_sent(self, name: str) -> None:
        with self._condition:
            if self._num_recovered is not None:
                self._num_recovered += bool(name)
            self._unsent.pop(name)
            num_sent = self._num_recovered if not self._unsent else None
            if num_sent is not None:
                self._num_recovered = None
                what = count(num_sent, "result")
                self._print_line(f"MLflow answers again, and has received the {what} that waited")
            self._condition.notify_all()
