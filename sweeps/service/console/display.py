"""The output of a sweep while it works: its lines, and its current activity.

In a terminal, a region below the lines is redrawn with the current activity, and for an open sweep a table of
the running trainings. Elsewhere, a line reports the activity if nothing else was printed for a while, so that
nobody waits without output. With `--quiet` there is neither, and only essential lines are printed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

SILENCE_SECONDS = 10.0
"""The silence after which a line is printed, in the first minute of an activity."""
LATER_SECONDS = 60.0
"""The silence after which a line is printed, after the first minute."""


class Watch(Protocol):
    """The progress of running trainings."""

    def line(self, now: float) -> str:
        """Return a line with the sweep's progress and its running trainings."""

    def summary(self, now: float) -> str:
        """Return the sweep's progress, without the single trainings."""

    def table(self, now: float) -> RenderableType | None:
        """Return the trainings as a table; None if nothing about them may be shown."""


class Display:
    """The output of one process: lines, and in a terminal a redrawn region below them.

    Args:
      quiet: show only essential lines.
      in_terminal: whether to show the region, unless quiet.
      clock: returns seconds.
    """

    def __init__(
        self, *, quiet: bool = False, in_terminal: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.quiet, self._clock = quiet, clock
        self._doing, self._since, self._latest = "", clock(), ""
        self._last_line_time = clock()
        self._lock, self._stop_event = threading.RLock(), threading.Event()
        self._console = Console(file=sys.stdout, highlight=False) if in_terminal and not quiet else None
        self._live: Live | None = None
        self.watch: Watch | None = None

    def put(self, text: str, *, always: bool = False) -> None:
        """Show a line.

        Args:
          text: the line.
          always: show the line even if `quiet`.
        """
        if self.quiet and not always:
            return
        with self._lock:
            self._last_line_time = self._clock()
            if self._console is not None and self._live is not None:
                self._console.print(Text(text), soft_wrap=True)
            else:
                print(text, flush=True, file=sys.stdout)

    def put_result(self, text: str) -> None:
        """Show a training's result as a line, or in the region until the next result."""
        self._latest = text
        if self._live is None:
            self.put(text)

    def doing(self, text: str, *, as_line: bool = True) -> None:
        """Show the activity that begins now.

        Args:
          text: the activity; `""` for none.
          as_line: also print it as a line if there is no region.
        """
        self._doing, self._since = text, self._clock()
        if text and as_line and self._live is None:
            self.put(f"{text} …")

    def print_if_silent(self) -> None:
        """Print the current activity if nothing was printed for a while."""
        now = self._clock()
        due = SILENCE_SECONDS if now - self._since <= LATER_SECONDS else LATER_SECONDS
        if now - self._last_line_time >= due and (text := self.text(now)):
            self.put(f"… {text}")

    def text(self, now: float) -> str:
        """Return a line with the current activity."""
        if self.watch is not None:
            return self.watch.line(now)
        return f"{self._doing}, {now - self._since:.0f} s" if self._doing else ""

    def region(self) -> RenderableType:
        """Return the region: the table of trainings, the latest result, and the activity."""
        now = self._clock()
        parts: list[RenderableType] = []
        if self.watch is not None and (table := self.watch.table(now)) is not None:
            parts.append(table)
        if self._latest and self.watch is not None:
            parts.append(Text(self._latest, overflow="ellipsis", no_wrap=True))
        if text := self.text(now) if self.watch is None else self.watch.summary(now):
            self._spinner.update(text=Text(text, overflow="ellipsis", no_wrap=True))
            parts.append(self._spinner)
        return Group(*parts)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within this context, redraw the region, or elsewhere print the activity after a silence."""
        if self._console is not None:
            self._spinner = Spinner("dots")
            region = Live(
                console=self._console, get_renderable=self.region, refresh_per_second=2, transient=True
            )
            with region as self._live:
                try:
                    yield
                finally:
                    self._live = None
        elif self.quiet:
            yield
        else:
            thread = threading.Thread(target=self._print_in_loop, daemon=True)
            thread.start()
            try:
                yield
            finally:
                self._stop_event.set()
                thread.join()

    @contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        """Within this context, show the progress of running trainings."""
        self.doing("")
        self.watch = watch
        try:
            yield
        finally:
            self.watch = None

    def _print_in_loop(self) -> None:
        while not self._stop_event.wait(1.0):
            self.print_if_silent()


_DISPLAYS: list[Display] = [Display()]
"""A stack of displays, of which the last is used; the first only prints lines."""


@contextmanager
def show_progress(*, quiet: bool) -> Iterator[None]:
    """Within this context, show this process's activity; a nested call uses the outer display."""
    if len(_DISPLAYS) > 1:
        yield
        return
    in_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    display = Display(quiet=quiet, in_terminal=in_terminal)
    _DISPLAYS.append(display)
    try:
        with display.running():
            yield
    finally:
        _DISPLAYS.pop()


def put(text: str, *, always: bool = False) -> None:
    """Show a line, see `Display.put`."""
    _DISPLAYS[-1].put(text, always=always)


def put_result(text: str) -> None:
    """Show a training's result, see `Display.put_result`."""
    _DISPLAYS[-1].put_result(text)


def doing(text: str, *, as_line: bool = True) -> None:
    """Show the activity that begins now, see `Display.doing`."""
    _DISPLAYS[-1].doing(text, as_line=as_line)


def watching(watch: Watch) -> AbstractContextManager[None]:
    """Within this context, show the progress of running trainings."""
    return _DISPLAYS[-1].watching(watch)


def leave_terminal_usable() -> None:
    """Show the cursor that the region hides, before a process ends without cleaning up."""
    if len(_DISPLAYS) > 1 and sys.stdout.isatty():
        with suppress(OSError):
            os.write(1, b"\x1b[?25h")
