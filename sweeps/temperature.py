#!/usr/bin/env python
"""How sharp should the contrast be? Sweeps the temperature of the loss.

    python sweeps/temperature.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/temperature.py --dataset fashion-mnist

Ends in accuracy against τ, private and not.
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

TINY = {"temperatures": (0.5,), "repeats": 1, "num_steps": 10, "expected_batch_size": 64}
TINY |= {"max_index_records": 500, "max_query_records": 500}
FULL = {"dataset": "fashion-mnist", "repeats": 5}


@dataclass(frozen=True, kw_only=True)
class TemperatureOptions(SweepOptions):
    """The axes of this sweep."""

    temperatures: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 0.7071, 1.0)
    """Values of τ."""
    non_private: bool = True
    """Also run every point without noise and clipping (ε = ∞); public data only."""


def main() -> int:
    """Runs the sweep."""
    options = parse_options(TemperatureOptions, description=__doc__, tiny=TINY, full=FULL, by_dataset={})
    points = along(options, "temperature", options.temperatures, "tau", non_private=options.non_private)
    return run_sweep("temperature", options, points, partial(draw, "temperature"))


if __name__ == "__main__":
    exit_on_bad_input(main)
