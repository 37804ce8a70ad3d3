"""The constants of the expected gains of tuning strategies, from `benchmarks/results/tuning_*.csv`.

Nothing is trained. A cell is a table at one total ε. Its G is the score of the best setting, if it were
known, minus the score of the setting that is not tuned. The slope b is that of the best setting's score over
ln ε, of tables with several totals. A strategy's share κ is what it gains, with the ε that it took added back
by b, over G.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.answers import RESULTS
from dpgcl_core.planning.tuning_strategies import StrategyGains

KNOWN, UNTUNED = "best setting known", "none"
STRATEGIES = ("none", "open", "sealed", "public", "scaling")
SMALLEST_GAIN = 0.5
"""Points of G below which a cell shows nothing of a share."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A table at one total ε; scores in points.

    Attributes:
      table: the table's name.
      total: the total ε.
      scores: the score of each strategy, and of `KNOWN`.
      epsilons: ε of the model, by strategy.
    """

    table: str
    total: float
    scores: dict[str, float]
    epsilons: dict[str, float]

    @property
    def gain(self) -> float:
        """G: what tuning could gain if it were free."""
        return self.scores[KNOWN] - self.scores[UNTUNED]


def cells() -> list[Cell]:
    """Return the cells of all committed tables."""
    found = []
    for path in sorted(RESULTS.glob("tuning_*.csv")):
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["target_epsilon"] not in ("", "inf")]
        (score,) = [name for name in rows[0] if name.endswith("_mean")][:1]
        for total in sorted({float(row["target_epsilon"]) for row in rows}):
            at_total = [row for row in rows if float(row["target_epsilon"]) == total]
            found.append(
                Cell(
                    table=path.stem,
                    total=total,
                    scores={row["tuning"]: 100 * float(row[score]) for row in at_total},
                    epsilons={row["tuning"]: float(row["epsilon_max"] or total) for row in at_total},
                )
            )
    return found


def gains_of(of_cells: Sequence[Cell]) -> StrategyGains:
    """Return the constants of some cells."""
    slopes = []
    for table in {cell.table for cell in of_cells}:
        series = [(math.log(cell.total), cell.scores[KNOWN]) for cell in of_cells if cell.table == table]
        if len(series) > 1:
            slopes.append(float(np.polyfit(*zip(*series, strict=True), 1)[0]))
    slope = statistics.mean(slopes) if slopes else 0.0

    def share(cell: Cell, strategy: str) -> float:
        taken = slope * math.log(cell.total / cell.epsilons[strategy])
        return (cell.scores[strategy] - cell.scores[UNTUNED] + taken) / cell.gain

    telling = [cell for cell in of_cells if cell.gain >= SMALLEST_GAIN]
    return StrategyGains(
        tuning=statistics.mean(cell.gain for cell in of_cells),
        per_log_epsilon=slope,
        shares={name: statistics.mean(share(cell, name) for cell in telling) for name in STRATEGIES},
    )


def regret(cell: Cell, gains: StrategyGains) -> float:
    """Return by how many points the strategy that the constants recommend is below the best in a cell."""
    shares = {name: cell.epsilons[name] / cell.total for name in STRATEGIES}
    recommended = max(STRATEGIES, key=lambda name: gains.of(name, shares[name]))
    return max(cell.scores[name] for name in STRATEGIES) - cell.scores[recommended]
