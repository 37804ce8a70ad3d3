#!/usr/bin/env python
"""Do cheap trainings predict the score of the full one? Trains at B/k and σ/k for the same T (TAN).

    python sweeps/tan.py --dataset fashion-mnist --epsilon 1
    ray job submit --working-dir . -- python sweeps/tan.py --dataset fashion-mnist --epsilon 1

Compares the score at every k with the score of the full training, k = 1. If the ratio of noise to batch is
fixed, trainings are expected to behave alike (Sander, Stock and Sablayrolles 2023), so settings may be
searched at a large k. Each k has its own ε, much larger than the target: search on public data.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import ConfigError, exit_on_bad_input
from sweeps.service.options.sweep_options import SweepOptions, varies
from sweeps.service.planning.trials import Point
from sweeps.service.script_runner import run_script


@dataclass(frozen=True, kw_only=True)
class TanOptions(SweepOptions, tiny={"tan_factors": (1.0, 2.0)}):
    """The axes of this sweep."""

    tan_factors: tuple[float, ...] = field(default=(1.0, 2.0, 4.0), metadata=varies("tan_factor"))
    """Values of k; 1 is the full training. A large σ (a small ε) allows larger values."""


def points(options: TanOptions) -> list[Point]:
    """Return one point per factor k, which divides B and σ."""
    factors = dict.fromkeys(options.tan_factors)
    if any(factor < 1 for factor in factors):
        raise ConfigError(f"tan_factors must be at least 1; got {min(factors):g}")
    return [
        Point(label=f"k{factor:g}", changes={"tan_factor": factor}, params={"tan_factor": factor})
        for factor in factors
    ]


def main() -> int:
    """Run the sweep."""
    return run_script("tan", TanOptions, points, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
