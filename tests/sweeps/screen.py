"""What a person sees of a terminal, of the control sequences that rich writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Callable

_END = b"\x1b[end of the test]"
_PART = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def screen_of(written: str) -> list[str]:
    """Return the lines of an endless screen, after all that was written to it."""
    lines, row, column = [""], 0, 0
    for values, command, control, text in _PART.findall(written):
        if command == "A":
            row = max(0, row - int(values or 1))
        elif command == "K":
            lines[row] = ""
        elif control == "\r":
            column = 0
        elif control == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines]


def shown_in_terminal(act: Callable[[], object]) -> str:
    """All that is written to a terminal of 60 columns that is standard output and error."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    found: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):
            while not b"".join(found[-2:]).endswith(_END) and (part := os.read(outer, 4096)):
                found.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    kept = os.dup(2)
    os.dup2(inner, 2)
    try:
        with os.fdopen(inner, "w") as stream, contextlib.redirect_stdout(stream):
            act()
    finally:
        os.write(2, _END)  # a process that was started meanwhile may hold the terminal for longer
        os.dup2(kept, 2)
        os.close(kept)
    reader.join()
    os.close(outer)
    return b"".join(found).removesuffix(_END).decode()
