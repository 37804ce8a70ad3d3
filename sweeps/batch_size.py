#!/usr/bin/env python
"""How many records should a step take? Sweeps the expected batch size B (the paper's Figure 3).

    python sweeps/batch_size.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/batch_size.py --dataset fashion-mnist

Ends in accuracy against B. The target ε stays, so σ grows with B.
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

TINY = {"expected_batch_sizes": (64,), "group_size": 4, "repeats": 1, "num_steps": 10}
TINY |= {"max_index_records": 500, "max_query_records": 500}
FULL = {"dataset": "fashion-mnist", "repeats": 5}


@dataclass(frozen=True, kw_only=True)
class BatchSizeOptions(SweepOptions):
    """The axes of this sweep."""

    expected_batch_sizes: tuple[float, ...] = (64, 128, 256, 512, 1024, 2048)
    """Values of B = q·n; group sizes are at most a quarter of the smallest."""
    non_private: bool = True
    """Also run every point without noise and clipping (ε = ∞); public data only."""


def main() -> int:
    """Runs the sweep."""
    options = parse_options(BatchSizeOptions, description=__doc__, tiny=TINY, full=FULL, by_dataset={})
    points = along(
        options,
        "expected_batch_size",
        options.expected_batch_sizes,
        "B",
        non_private=options.non_private,
    )
    return run_sweep("batch-size", options, points, partial(draw, "batch-size"))


if __name__ == "__main__":
    exit_on_bad_input(main)
