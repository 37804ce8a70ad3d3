#!/usr/bin/env python
"""How many extra augmented copies of every key? Sweeps N_a (the paper's Table 6).

    python sweeps/num_augmentations.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/num_augmentations.py --dataset fashion-mnist

Ends in accuracy against N_a, private and not.
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

TINY = {"augmentation_counts": (1,), "repeats": 1, "num_steps": 10, "expected_batch_size": 64}
TINY |= {"max_index_records": 500, "max_query_records": 500}
FULL = {"dataset": "fashion-mnist", "repeats": 5}


@dataclass(frozen=True, kw_only=True)
class NumAugmentationsOptions(SweepOptions):
    """The axes of this sweep."""

    augmentation_counts: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Values of N_a."""
    non_private: bool = True
    """Also run every point without noise and clipping (ε = ∞); public data only."""


def main() -> int:
    """Runs the sweep."""
    options = parse_options(NumAugmentationsOptions, description=__doc__, tiny=TINY, full=FULL, by_dataset={})
    points = along(
        options,
        "num_augmentations",
        options.augmentation_counts,
        "Na",
        non_private=options.non_private,
    )
    return run_sweep("num-augmentations", options, points, partial(draw, "num-augmentations"))


if __name__ == "__main__":
    exit_on_bad_input(main)
