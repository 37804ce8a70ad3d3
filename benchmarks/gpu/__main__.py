"""Measures what trainings cost and give on a GPU, in parts and slices that add up over many calls.

    python -m benchmarks.gpu --part b --limit-minutes 9    # goes on where the last call ended
    python -m benchmarks.gpu --device cpu --toy            # every part at toy size, on a CPU
    python -m benchmarks.gpu report results/gpu            # table and figure, of the results alone
    python -m benchmarks.gpu bundle                        # the folder for a GPU machine: make gpu-bundle

Parts: a checks, b steps, c Fashion-MNIST, d auto-encoder and captioner, e the regime of new words. A finished
slice is one JSON line in the output folder. See docs/gpu.md.
"""

from __future__ import annotations

import sys

from benchmarks.gpu.packages import BundleError, add_packages

try:
    add_packages()
except BundleError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)

from collections.abc import Callable

from benchmarks.gpu.bundle import Bundle, fill
from benchmarks.gpu.report import Report, write_report
from benchmarks.gpu.running import RunOptions, run
from dpgcl_core.command_line import run_command
from dpgcl_core.errors import exit_on_bad_input

_COMMANDS: dict[str, tuple[type, Callable[..., int]]] = {
    "report": (Report, write_report),
    "bundle": (Bundle, fill),
}


def main() -> int:
    """Run one command: the parts, unless another one is named first."""
    words = sys.argv[1:]
    name = words.pop(0) if words and words[0] in _COMMANDS else ""
    options, command = _COMMANDS.get(name, (RunOptions, run))
    prog = f"python -m benchmarks.gpu {name}".strip()
    description = options.__doc__ if name else __doc__
    return command(run_command(options, prog=prog, description=description, arguments=words))


if __name__ == "__main__":
    exit_on_bad_input(main)
