"""Records what the command lines do: `python -m tests.recorded --write [NAME …]`, where it was decided anew.

Without `--write` every difference is printed, and the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.recorded.cases import CASES
from tests.recorded.running import differences, expected, record, write


def main() -> int:
    """Record or compare the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; all unless given")
    parser.add_argument("--write", action="store_true", help="keep what they do now")
    given = parser.parse_args()
    if unknown := set(given.names) - {case.name for case in CASES}:
        parser.error(f"unknown case {', '.join(sorted(unknown))}; valid: {', '.join(c.name for c in CASES)}")
    found = 0
    for case in (case for case in CASES if case.name in given.names or not given.names):
        with tempfile.TemporaryDirectory() as folder:
            if given.write:
                write(case, Path(folder).resolve())
                print(f"{case.name}: written", flush=True)
                continue
            for difference in differences(expected(case), record(case, Path(folder).resolve())):
                found += 1
                print(f"{case.name}{difference}", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
