#!/usr/bin/env python
"""How fast does training converge? Scores and loss during training, for group sizes and methods.

    python sweeps/convergence.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/convergence.py --dataset fashion-mnist

Draws the paper's Figures 2 and 8 for your data: accuracy and relative loss against the step.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import exit_on_bad_input
from dpgcl_core.sampling.groups import GroupSize
from sweeps.service.options.sweep_options import SweepOptions, varies
from sweeps.service.planning.points import of_methods
from sweeps.service.planning.trials import Point
from sweeps.service.script_runner import run_script
from trainers.config.tree import replace_options


@dataclass(frozen=True, kw_only=True)
class ConvergenceOptions(
    SweepOptions, tiny={"group_sizes": (4,)}, full={"group_sizes": (4, 16, 64, "batch")}
):
    """The axes of this sweep. By default, scores and loss are recorded after every tenth of the steps."""

    methods: tuple[str, ...] = field(default=("dp_gcl",), metadata=varies("method"))
    """Methods to train with; `python -m dpgcl_core.methods` lists them."""
    group_sizes: tuple[GroupSize, ...] = field(default=(4, 32), metadata=varies("group_size"))
    """Values of S, for methods that take a group size; "batch" makes the whole realised batch one group."""
    non_private: bool = True
    """Also train without noise and clipping (ε = ∞); public data only."""

    def completed(self, overrides: Collection[str]) -> Self:
        evaluation, tenth = self.evaluation, max(1, self.mechanism.num_steps // 10)
        return replace_options(
            self,
            score_every_steps=evaluation.score_every_steps or tenth,
            record_every_steps=min(evaluation.record_every_steps, tenth),
        )


def points(options: ConvergenceOptions) -> list[Point]:
    """Return one point per method and group size."""
    return of_methods(options, options.methods, group_sizes=options.group_sizes)


def main() -> int:
    """Run the sweep."""
    return run_script("convergence", ConvergenceOptions, points, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
