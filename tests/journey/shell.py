"""A shell in which somebody works through an hour: types commands, reads, and pastes what is printed."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

_WAIT_SECONDS = 600.0


class Shell:
    """One working folder and all that was said in it.

    Args:
      folder: of the clone, where commands are typed.
      root: where everything lands that is not given a place.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.transcript = folder, list[str]()
        python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        names = ("DPGCL_LEDGER", "MLFLOW_TRACKING_URI", "PYTHONPATH", "RAY_ADDRESS")
        self._environment = {name: value for name, value in os.environ.items() if name not in names}
        self._environment |= {"PATH": python, "DPGCL_STORAGE": str(root / "my results"), "COLUMNS": "200"}

    def type(self, command: str, *, codes: tuple[int, ...] = (0,)) -> str:
        """Run a line, and return what it printed.

        Raises:
          AssertionError: its exit code is another one.
        """
        return self._ended(command, self._begun(command), codes)

    def interrupt(self, command: str, *, after: str) -> str:
        """Run a line, press Ctrl-C once `after` was printed, and return all that was printed."""
        begun, said = self._begun(command), list[str]()
        assert begun.stdout is not None
        for line in begun.stdout:
            said.append(line)
            if after in line:
                time.sleep(1.0)  # into the next training's steps; anywhere does
                os.killpg(begun.pid, signal.SIGINT)
                break
        return self._ended(command, begun, (128 + signal.SIGINT,), "".join(said))

    def serve(self, command: str, address: str) -> None:
        """Run a server until its page answers, and end it.

        Raises:
          AssertionError: it ends by itself, or no page comes.
        """
        server, deadline = self._begun(f"{command} > /dev/null 2>&1"), time.monotonic() + _WAIT_SECONDS
        try:
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=10.0) as page:
                    assert page.status == 200, address
                    return
                assert server.poll() is None, f"{command}\nended by itself"
                assert time.monotonic() < deadline, f"{command}\nshows no page at {address}"
                time.sleep(0.5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.communicate()

    def _begun(self, command: str) -> subprocess.Popen[str]:
        print(f"$ {command}", flush=True)
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _ended(
        self, command: str, begun: subprocess.Popen[str], codes: tuple[int, ...], said: str = ""
    ) -> str:
        try:
            said += begun.communicate(timeout=_WAIT_SECONDS)[0]
        finally:
            if begun.poll() is None:
                os.killpg(begun.pid, signal.SIGKILL)
        print(said, flush=True)
        self.transcript.append(f"$ {command}\n{said}")
        assert begun.returncode in codes, f"{command}\nexit code {begun.returncode}\n{said[-4000:]}"
        return said

    def paste(self, printed: str, *, before: str, change: Callable[[str], str] = str.strip) -> str:
        """Run what was printed after these words, and return what it printed.

        Args:
          printed: what a command has said.
          before: the words, up to the command; the rest of the line is the command.
          change: what the reader does to it first, such as adding what is missing.
        """
        return self.type(change(printed_after(printed, before)))


def printed_after(printed: str, before: str) -> str:
    """Return the rest of the one line that holds these words.

    >>> printed_after("a\\nstopped; continue with python x.py\\n", "continue with ")
    'python x.py'
    """
    found = re.findall(rf"{re.escape(before)}(.*)", printed)
    assert found, f"nothing was printed after {before!r} in:\n{printed}"
    return str(found[-1])


def quoted(path: Path | str) -> str:
    """Return a path as it is typed."""
    return shlex.quote(str(path))


def fill_in(line: str, free: Mapping[str, str]) -> str:
    """Return a printed command with what it leaves free, such as FILE, filled in.

    >>> fill_in("python x.py --texts FILE", {"FILE": "'my texts.txt'"})
    "python x.py --texts 'my texts.txt'"
    """
    return " ".join(free.get(word, word) for word in line.split(" "))
