"""Runs tests of a copy of the tree in a child process that has imported already what takes long."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED = 0, 1
SECONDS_AT_MOST = 900.0
"""Tests that take longer hang; that counts as failed."""

_OWN = ("dpgcl_core", "trainers", "sweeps", "dashboards", "benchmarks", "tests")
_PRELOADED: tuple[str, ...] = (
    "torch",
    "numpy",
    "pytest",
    "hypothesis",
    "scipy.stats",
    "dp_accounting.pld",
    "opacus",
)
_PRELOADED += ("dp_accounting.rdp", "sqlalchemy", "cryptography.hazmat.primitives.ciphers")


def copy_tree(target: Path) -> None:
    """Copy what git tracks or would track, as it lies in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, os.fsdecode(listed).split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def preload() -> None:
    """Import the libraries that tests need, but nothing of this package and no thread."""
    for name in _PRELOADED:
        importlib.import_module(name)


def run_tests(tests: Sequence[str], copy: Path) -> tuple[int, float, str]:
    """Run tests of a copy up to the first failure.

    Args:
      tests: pytest's names.
      copy: root of the copy.

    Returns:
      Pytest's exit code, the seconds, and the end of the output.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            os.setsid()
            _become_pytest(tests, copy, output.fileno())
        code = _wait(child, started + SECONDS_AT_MOST)
        output.seek(0)
        text = output.read().decode(errors="replace")[-4000:]
    return code, time.monotonic() - started, text


def _wait(child: int, end: float) -> int:
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return FAILED


def _become_pytest(tests: Sequence[str], copy: Path, output: int) -> None:
    """Run the tests in this process, of the copy alone, and end it."""
    code = 3
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)  # of processes that tests start
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        sys.path[:] = [str(copy), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        for name in [name for name in sys.modules if name.partition(".")[0] in _OWN]:
            del sys.modules[name]
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
        code = int(pytest.main([*options, *tests]))
        sys.stdout.flush()
    finally:
        os._exit(code)
