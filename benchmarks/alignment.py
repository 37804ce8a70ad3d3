#!/usr/bin/env python
"""How far groups' gradients agree: S₀ of the expected SNR, from `benchmarks/results/calibration/`.

    python benchmarks/alignment.py            # one line per row, one per table, and the constant
    python benchmarks/alignment.py --json

Nothing is trained. A table with first-step SNRs holds one row of the whole batch as one group, whose
alignment is 1: its SNR is C/(σΔ√d). What another row of the same table has in place of it, over its K = B/S
groups and at its own sensitivity, is that row's alignment, whatever σ and d; and S₀ follows
(`dpgcl_core.planning.snr`).
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from dpgcl_core.command_line import run_command
from dpgcl_core.errors import DataError, exit_on_bad_input
from dpgcl_core.planning.snr import alignment_size_of

RESULTS = Path(__file__).resolve().parent / "results" / "calibration"
TABLES = ("group_size_fashion_mnist", "group_size_shapes", "regime_epsilon_1")
"""The tables with first-step SNRs of several group sizes. Where a row does not say, records were sampled."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One row of a table.

    Attributes:
      table: its name.
      group_size: S.
      num_groups: K = B/S.
      sampled: groups or records.
      snr: of the first step.
      alignment: a.
      alignment_size: S₀.
    """

    table: str
    group_size: int
    num_groups: float
    sampled: str
    snr: float
    alignment: float
    alignment_size: float


def measured(table: str, folder: Path = RESULTS) -> list[Measured]:
    """Return the rows of one table that have a first-step SNR, but for that of the whole batch.

    Raises:
      DataError: the table has no whole batch, or its page no B.
    """
    page, rows = (folder / f"{table}.md").read_text(), _rows(folder / f"{table}.csv")
    expected = re.search(r"B = (\d+) expected", page)
    whole = [row for row in rows if row["group_size"] == "batch" and row["snr_first_step_mean"]]
    if expected is None or len(whole) != 1:
        raise DataError(f"{table} must tell B and have one row of the whole batch with a first-step SNR")
    batch, unit = int(expected.group(1)), float(whole[0]["snr_first_step_mean"])
    found = []
    for row in rows:
        if not row["group_size"].isdigit() or not row["snr_first_step_mean"]:
            continue
        size, sampled = int(row["group_size"]), row.get("sampled") or "records"
        groups, snr = batch / size, float(row["snr_first_step_mean"])
        alignment = snr / unit / groups / (2 if sampled == "groups" else 1)
        found.append(
            Measured(
                table=table,
                group_size=size,
                num_groups=groups,
                sampled=sampled,
                snr=snr,
                alignment=alignment,
                alignment_size=alignment_size_of(alignment, groups, size),
            )
        )
    return found


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def size_of_table(rows: Sequence[Measured]) -> float:
    """Return the geometric mean of S₀ over the rows of a table."""
    return statistics.geometric_mean(row.alignment_size for row in rows)


def show(json: bool = False) -> int:
    """Print what the tables say of S₀.

    Args:
      json: print one JSON object.
    """
    tables = {name: measured(name) for name in TABLES}
    sizes = {name: size_of_table(rows) for name, rows in tables.items()}
    mean = statistics.geometric_mean(sizes.values())
    if json:
        rows = [asdict(row) for found in tables.values() for row in found]
        print(dumps({"rows": rows, "tables": sizes, "alignment_size": mean}))
        return 0
    for name, found in tables.items():
        for row in found:
            print(
                f"{name:<26} S = {row.group_size:<3} K = {row.num_groups:<5g} {row.sampled:<8} "
                f"a = {row.alignment:.3f}  S0 = {row.alignment_size:.0f}"
            )
        print(f"{name:<26} S0 = {sizes[name]:.0f}")
    print(f"all tables, each as one: S0 = {mean:.0f}")
    return 0


def main() -> int:
    """Read the command line and print."""
    code: int = run_command(show, prog="python benchmarks/alignment.py", description=__doc__)
    return code


if __name__ == "__main__":
    exit_on_bad_input(main)
