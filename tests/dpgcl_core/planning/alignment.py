"""How far groups' gradients agree: S₀ of the expected SNR, from `benchmarks/results/calibration/`.

Nothing is trained. A table with first-step SNRs holds one row of the whole batch as one group, whose
alignment is 1: its SNR is C/(σΔ√d). What another row of the same table has in place of it, over its K = B/S
groups and at its own sensitivity, is that row's alignment, whatever σ and d; and S₀ follows
(`dpgcl_core.planning.snr`).
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.answers import RESULTS
from dpgcl_core.planning.snr import alignment_size_of

CALIBRATION = RESULTS / "calibration"
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


def measured(table: str) -> list[Measured]:
    """Return the rows of one table that have a first-step SNR, but for that of the whole batch."""
    page = (CALIBRATION / f"{table}.md").read_text()
    with (CALIBRATION / f"{table}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = re.search(r"B = (\d+) expected", page)
    whole = [row for row in rows if row["group_size"] == "batch" and row["snr_first_step_mean"]]
    assert expected is not None
    assert len(whole) == 1
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


def size_of_table(rows: Sequence[Measured]) -> float:
    """Return the geometric mean of S₀ over the rows of a table."""
    return statistics.geometric_mean(row.alignment_size for row in rows)
