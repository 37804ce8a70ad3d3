"""`--notify COMMAND`: a program of the user's is told how a sweep ended, by variables of its environment.

No shell reads the command, so nothing that a sweep or a data set is called can become a command of its own.
Of a sealed sweep it is told once, after its moment of publication, and nothing but what was published then.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dpgcl_core.addresses import masked_text
from sweeps.service.options.service import words_of
from sweeps.service.running.terminal import say

_SECONDS = 60.0
_PREFIX = "DPGCL_"
FINISHED, FAILED, STOPPED, REFUSED, PUBLISHED = "finished", "failed", "stopped", "refused", "published"


def outcome_of(code: int) -> str:
    """Return what an open sweep's exit code says of it.

    >>> [outcome_of(code) for code in (0, 1, 130)]
    ['finished', 'failed', 'stopped']
    """
    return FINISHED if code == 0 else STOPPED if code > 128 else FAILED


def notify(
    command: str | None, outcome: str, sweep: str, folder: Path, told: Mapping[str, str] | None = None
) -> None:
    """Run the command and wait for it, at most a minute; whatever becomes of it changes nothing.

    Args:
      command: the user's; None for none.
      outcome: one of this module's five words.
      sweep: the sweep's name.
      folder: where its results lie.
      told: more of the outcome, by the variable's name without `DPGCL_`.
    """
    if command is None:
        return
    program, *arguments = words_of(command)
    values = {"OUTCOME": outcome, "SWEEP": sweep, "FOLDER": str(folder), **(told or {})}
    environment = {f"{_PREFIX}{name}": masked_text(value) for name, value in values.items()}
    if failure := _failure(program, arguments, os.environ | environment):
        say(f"note: --notify {program} {failure}; the sweep is as it was")


def _failure(program: str, arguments: list[str], environment: Mapping[str, str]) -> str:
    """Run a program and return what went wrong; "" where nothing did. Its output is nobody's."""
    try:
        done = subprocess.run(
            [program, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"had not ended after {_SECONDS:g} s, and was ended"
    except (OSError, ValueError) as error:
        return f"could not be run ({getattr(error, 'strerror', None) or error})"
    return f"ended with code {done.returncode}" if done.returncode else ""
