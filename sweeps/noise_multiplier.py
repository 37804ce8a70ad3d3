#!/usr/bin/env python
"""What does noise cost? Sweeps the noise multiplier σ, and reports the ε of each.

    python sweeps/noise_multiplier.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/noise_multiplier.py --dataset fashion-mnist

Ends in accuracy against σ.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dashboards.figures import draw
from dpgcl_core.errors import exit_on_bad_input
from sweeps.service.options import SweepOptions, parse_options
from sweeps.service.points import along
from sweeps.service.run import run_sweep

TINY = {"noise_multipliers": (1.0, 2.0), "repeats": 1, "num_steps": 10, "expected_batch_size": 64}
TINY |= {"max_index_records": 500, "max_query_records": 500}
FULL = {"dataset": "fashion-mnist", "repeats": 5}


@dataclass(frozen=True, kw_only=True)
class NoiseMultiplierOptions(SweepOptions):
    """The axes of this sweep."""

    noise_multipliers: tuple[float, ...] = (0.5, 0.7, 1.0, 1.5, 2.0, 4.0)
    """Values of σ = noise std / sensitivity."""


def main() -> int:
    """Runs the sweep."""
    options = parse_options(NoiseMultiplierOptions, description=__doc__, tiny=TINY, full=FULL, by_dataset={})
    points = along(options, "noise_multiplier", options.noise_multipliers, "sigma")
    return run_sweep("noise-multiplier", options, points, partial(draw, "noise-multiplier"))


if __name__ == "__main__":
    exit_on_bad_input(main)
