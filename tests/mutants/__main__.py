"""Breaks the code in every way that `breakages` lists, one at a time, and sees the named tests fail.

    python -m tests.mutants                     # all
    python -m tests.mutants --since-base        # of files that changed since .ci/base, or whose tests did
    python -m tests.mutants --name "short last group is kept"

First the named tests pass on the code as it is. Prints a table; exit code 1 when a breakage survives or no
longer fits the code, and when a test fails without it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.breakages import BREAKAGES, Breakage
from tests.mutants.running import FAILED, PASSED, copy_tree, preload, run_tests
from tests.selection import NUM_BREAKAGES, changed_breakages, changed_paths


def main() -> int:
    """Run the chosen breakages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", action="append", help="a breakage by its name; any number of times")
    parser.add_argument(
        "--since-base",
        action="store_true",
        help=f"those whose file or tests changed since the commit in .ci/base; at most {NUM_BREAKAGES}",
    )
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    given = parser.parse_args()
    chosen = list(BREAKAGES)
    if given.name:
        if unknown := set(given.name) - {each.name for each in BREAKAGES}:
            parser.error(f"unknown breakage {', '.join(sorted(unknown))}; see --list")
        chosen = [each for each in BREAKAGES if each.name in given.name]
    if given.since_base:
        chosen = changed_breakages(chosen, changed_paths())
    if given.list:
        print("\n".join(each.name for each in chosen))
        return 0
    if not chosen:
        print("no breakage is of a file that changed, or has tests that did")
        return 0
    preload()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve() / "copy"
        copy_tree(copy)
        return run(chosen, copy)


def run(breakages: Sequence[Breakage], copy: Path) -> int:
    """See that the named tests pass, then run the breakages on a copy of the tree; return the exit code."""
    tests = list(dict.fromkeys(test for each in breakages for test in each.tests))
    code, seconds, output = run_tests(tests, copy)
    if code != PASSED:
        print(f"the named tests must pass on the code as it is:\n{output}")
        return 1
    print(f"{len(tests)} named tests pass on the code as it is ({seconds:.0f} s)", flush=True)
    return break_each(breakages, copy)


def break_each(breakages: Sequence[Breakage], copy: Path) -> int:
    """Apply one breakage after the other to a copy of the tree, and print what the tests say to it."""
    num_killed = 0
    for each in breakages:
        file = copy / each.file
        right = file.read_text(encoding="utf-8") if file.is_file() else ""
        if right.count(each.before) != 1:
            print(f"NOT FOUND: {each.name}: its text stands {right.count(each.before)} times in {each.file}")
            continue
        file.write_text(right.replace(each.before, each.after), encoding="utf-8")
        code, seconds, output = run_tests(each.tests, copy)
        file.write_text(right, encoding="utf-8")
        verdict = {FAILED: "killed", PASSED: "SURVIVED"}.get(code, f"NOT RUN (exit code {code})")
        num_killed += verdict == "killed"
        print(f"{verdict:<10} {seconds:5.1f} s  {each.name}", flush=True)
        if code not in (FAILED, PASSED):
            print(output)
    print(f"{num_killed} of {len(breakages)} breakages killed")
    return 0 if num_killed == len(breakages) else 1


if __name__ == "__main__":
    sys.exit(main())
