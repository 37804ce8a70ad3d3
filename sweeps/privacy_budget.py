#!/usr/bin/env python
"""What does privacy cost? Sweeps the target ε (the paper's Figure 6).

    python sweeps/privacy_budget.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/privacy_budget.py --dataset fashion-mnist

Reports accuracy against ε; on public data also at ε = ∞.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import exit_on_bad_input
from sweeps.service.options.sweep_options import SweepOptions, varies
from sweeps.service.planning.points import of_samplings
from sweeps.service.planning.trials import Point
from sweeps.service.script_runner import run_script


@dataclass(frozen=True, kw_only=True)
class PrivacyBudgetOptions(SweepOptions, tiny={"epsilons": (10.0,)}):
    """The axes of this sweep."""

    epsilons: tuple[float, ...] = field(default=(0.2, 1.0, 5.0, 10.0, 15.0, 20.0), metadata=varies("epsilon"))
    """Values of the target ε; inf trains without noise and clipping (public data only)."""
    non_private: bool = True
    """Also run every point without noise and clipping (ε = ∞); public data only."""
    sampling_grid: tuple[str, ...] = ()
    """Values of --sampling to compare, groups and records; the value of --sampling by default."""


def points(options: PrivacyBudgetOptions) -> list[Point]:
    """Return one point per ε and way of sampling."""
    values = dict.fromkeys([*options.epsilons, *((math.inf,) if options.non_private else ())])
    grid = [Point(label=f"eps{value:g}", changes={"epsilon": value}) for value in values]
    return of_samplings(grid, options.sampling_grid)


def main() -> int:
    """Run the sweep."""
    return run_script("privacy-budget", PrivacyBudgetOptions, points, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
