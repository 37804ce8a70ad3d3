#!/usr/bin/env python
"""How large should a group be? Sweeps the group size S of DP-GCL, private and not.

    python sweeps/group_size.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/group_size.py --dataset fashion-mnist

Ends in the paper's Figure 4 for your data: accuracy against S, and gradient SNR against S with and
without augmented negatives.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import exit_on_bad_input
from dpgcl_core.sampling.groups import GroupSize
from sweeps.service.options import SweepOptions, parse_options
from sweeps.service.plan import Point
from sweeps.service.points import at, check_groups
from sweeps.service.run import run_sweep

TINY = {"group_sizes": (4,), "repeats": 1, "num_steps": 10, "expected_batch_size": 64}
TINY |= {"max_index_records": 500, "max_query_records": 500}
FULL = {"dataset": "fashion-mnist", "num_augmentations_grid": (1,), "repeats": 5}
FULL |= {"group_sizes": (2, 4, 8, 16, 32, 64, 128, 256, "batch")}
BY_DATASET = {"digits": {"group_sizes": (2, 4, 8, 16, 32), "repeats": 2}}


@dataclass(frozen=True, kw_only=True)
class GroupSizeOptions(SweepOptions):
    """The axes of this sweep."""

    group_sizes: tuple[GroupSize, ...] = (2, 4, 8, 16, 32, 64, "batch")
    """Values of S; "batch" makes the whole realised batch one group."""
    non_private: bool = True
    """Also run every point without noise and clipping (ε = ∞); public data only."""
    num_augmentations_grid: tuple[int, ...] = ()
    """Values of N_a; the one of --num-augmentations unless given."""


def points(options: GroupSizeOptions) -> list[Point]:
    """Returns one point per S, N_a and ε."""
    found: list[Point] = []
    for size in dict.fromkeys(options.group_sizes):
        for count in dict.fromkeys(options.num_augmentations_grid or (options.num_augmentations,)):
            label, changes = f"S{size}-Na{count}", {"group_size": size, "num_augmentations": count}
            found += at(options, label, changes, non_private=options.non_private)
    return found


def figure(tracking_uri: str, sweep: str, folder: Path) -> list[Path]:
    """Draw the figure and its tables from MLflow alone."""
    from dashboards.figures import draw

    return draw("group-size", tracking_uri, sweep, folder)


def main() -> int:
    """Runs the sweep."""
    options = parse_options(
        GroupSizeOptions, description=__doc__, tiny=TINY, full=FULL, by_dataset=BY_DATASET
    )
    check_groups(options.method)
    return run_sweep("group-size", options, points(options), figure)


if __name__ == "__main__":
    exit_on_bad_input(main)
