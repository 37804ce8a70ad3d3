#!/usr/bin/env python
"""How large should a group be? Sweeps the group size S of DP-GCL, private and non-private.

    python sweeps/group_size.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/group_size.py --dataset fashion-mnist

Draws the paper's Figure 4 for your data: score and gradient SNR against S, for every N_a.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import exit_on_bad_input
from dpgcl_core.sampling.groups import GroupSize
from sweeps.service.options.data import DataOptions
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.options.sweep_options import SweepOptions, varies
from sweeps.service.planning.points import at, check_groups, of_samplings
from sweeps.service.planning.trials import Point
from sweeps.service.script_runner import run_question
from trainers.config.tree import replace_options

SIZES, PAIRS = (2, 4, 8, 16, 32, 64), "shapes:10000:7:short"
ALL_SIZES = (*SIZES, 128, 256, "batch")
OF_PAIRS: dict[str, Any] = {"group_sizes": (4, 16, 64)}
OF_DIGITS: dict[str, Any] = {"group_sizes": SIZES[:5], "repeats": 2}


@dataclass(frozen=True, kw_only=True)
class GroupSizeOptions(
    SweepOptions,
    tiny={"dataset": "digits", "group_sizes": (4,)},
    full={"num_augmentations_grid": (1,), "group_sizes": ALL_SIZES},
):
    """The axes of this sweep."""

    data: DataOptions = field(default_factory=lambda: DataOptions(dataset=PAIRS))
    group_sizes: tuple[GroupSize, ...] = field(default=(*SIZES, "batch"), metadata=varies("group_size"))
    """Values of S; "batch" makes the whole realised batch one group."""
    non_private: bool = True
    """Also run every point without noise and clipping (ε = ∞); public data only."""
    num_augmentations_grid: tuple[int, ...] = ()
    """Values of N_a; the value of --num-augmentations by default."""
    epsilon_grid: tuple[float, ...] = ()
    """Values of the target ε, in place of --epsilon."""
    sampling_grid: tuple[str, ...] = ()
    """Values of --sampling to compare, groups and records; the value of --sampling by default."""

    def of_dataset(self) -> Self:
        return replace_options(self, **{PAIRS: OF_PAIRS, "digits": OF_DIGITS}.get(self.data.dataset, {}))


def points(options: GroupSizeOptions) -> list[Point]:
    """Return one point per group size S, augmentation count N_a, ε and way of sampling."""
    grid: list[Point] = []
    for size in dict.fromkeys(options.group_sizes):
        for count in dict.fromkeys(options.num_augmentations_grid or (options.objective.num_augmentations,)):
            label, changes = f"S{size}-Na{count}", {"group_size": size, "num_augmentations": count}
            grid += at(options, label, changes, epsilons=options.epsilon_grid)
    return of_samplings(grid, options.sampling_grid)


def main() -> int:
    """Run the sweep."""
    options = parse_options(GroupSizeOptions, description=__doc__)
    check_groups(options.mechanism.method)
    return run_question("group-size", options, points(options))


if __name__ == "__main__":
    exit_on_bad_input(main)
