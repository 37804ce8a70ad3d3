"""What a person sees of a terminal, of the control sequences that rich writes."""

from __future__ import annotations

import re

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
