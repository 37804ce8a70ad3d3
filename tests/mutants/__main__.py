"""Breaks the code in every way that `breakages` lists, one at a time, and sees the named tests fail.

    python -m tests.mutants                     # all
    python -m tests.mutants --slice 5           # five, chosen by the commit
    python -m tests.mutants --name "short last group is kept"

First the named tests pass on the code as it is. Prints a table; exit code 1 when a breakage survives or no
longer fits the code, and when a test fails without it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.breakages import BREAKAGES, Breakage

ROOT = Path(__file__).resolve().parents[2]
_TESTS_FAILED, _PASSED = 1, 0


def main() -> int:
    """Run the chosen breakages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", action="append", help="a breakage by its name; any number of times")
    parser.add_argument("--slice", type=int, metavar="N", help="N of all, chosen by the current commit")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    given = parser.parse_args()
    chosen = list(BREAKAGES)
    if given.name:
        if unknown := set(given.name) - {each.name for each in BREAKAGES}:
            parser.error(f"unknown breakage {', '.join(sorted(unknown))}; see --list")
        chosen = [each for each in BREAKAGES if each.name in given.name]
    if given.slice is not None:
        chosen = part_for(_commit(), chosen, given.slice)
    if given.list:
        print("\n".join(each.name for each in chosen))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        copy_tree(copy)
        return run(chosen, copy)


def part_for(commit: str, breakages: Sequence[Breakage], count: int) -> list[Breakage]:
    """Return `count` of the breakages; other commits choose others.

    >>> [len(part_for(commit, BREAKAGES, 5)) for commit in ("a", "b")]
    [5, 5]
    """

    def rank(breakage: Breakage) -> bytes:
        return hashlib.sha256(f"{commit} {breakage.name}".encode()).digest()

    kept = sorted(breakages, key=rank)[:count]
    return [each for each in breakages if each in kept]


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


def run(breakages: Sequence[Breakage], copy: Path) -> int:
    """Run breakages on a copy of the tree; return the exit code."""
    misfits = [each for each in breakages if _count(each, copy) != 1]
    for each in misfits:
        print(f"{each.name}: its text stands {_count(each, copy)} times in {each.file}, not once")
    tests = list(dict.fromkeys(test for each in breakages for test in each.tests))
    code, seconds, output = _tests(tests, copy)
    if code != _PASSED:
        print(f"the named tests must pass on the code as it is:\n{output}")
        return 1
    print(f"{len(tests)} named tests pass on the code as it is ({seconds:.0f} s)", flush=True)
    survived = 0
    for each in (each for each in breakages if each not in misfits):
        file = copy / each.file
        right = file.read_text(encoding="utf-8")
        file.write_text(right.replace(each.before, each.after), encoding="utf-8")
        code, seconds, output = _tests(each.tests, copy)
        file.write_text(right, encoding="utf-8")
        verdict = {_TESTS_FAILED: "killed", _PASSED: "SURVIVED"}.get(code, f"NOT RUN (exit code {code})")
        survived += verdict != "killed"
        print(f"{verdict:<10} {seconds:5.1f} s  {each.name}", flush=True)
        if code not in (_TESTS_FAILED, _PASSED):
            print(output)
    print(f"{len(breakages) - len(misfits) - survived} of {len(breakages)} breakages killed")
    return 1 if survived or misfits else 0


def _count(breakage: Breakage, copy: Path) -> int:
    file = copy / breakage.file
    return file.read_text(encoding="utf-8").count(breakage.before) if file.is_file() else 0


def _tests(tests: Sequence[str], copy: Path) -> tuple[int, float, str]:
    """Run tests up to the first failure: exit code, seconds, and the end of the output."""
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, time.monotonic() - started, (done.stdout + done.stderr)[-4000:]


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
