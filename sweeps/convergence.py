#!/usr/bin/env python
"""How fast is it learned? Scores and loss on the way, for group sizes and methods.

    python sweeps/convergence.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/convergence.py --dataset fashion-mnist

Ends in the paper's Figures 2 and 8 for your data: accuracy and relative loss against the step.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dashboards.figures import draw
from dpgcl_core.errors import exit_on_bad_input
from dpgcl_core.sampling.groups import GroupSize
from sweeps.service.options import SweepOptions, parse_options
from sweeps.service.points import of_methods
from sweeps.service.run import run_sweep

TINY: dict[str, Any] = {"group_sizes": (4,), "repeats": 1, "num_steps": 10, "expected_batch_size": 64}
TINY |= {"max_index_records": 500, "max_query_records": 500}
FULL = {"dataset": "fashion-mnist", "group_sizes": (4, 16, 64, "batch"), "repeats": 5}
SCORED = 10


@dataclass(frozen=True, kw_only=True)
class ConvergenceOptions(SweepOptions):
    """The axes of this sweep. Scores and loss are taken every tenth of the steps unless given otherwise."""

    methods: tuple[str, ...] = ("dp_gcl",)
    """Methods to train with; `python -m dpgcl_core.methods` lists them."""
    group_sizes: tuple[GroupSize, ...] = (4, 32)
    """Values of S, for methods that take one; "batch" makes the whole realised batch one group."""
    non_private: bool = True
    """Also train without noise and clipping (ε = ∞); public data only."""


def main() -> int:
    """Runs the sweep."""
    options = parse_options(ConvergenceOptions, description=__doc__, tiny=TINY, full=FULL, by_dataset={})
    tenth = max(1, options.num_steps // SCORED)
    options = dataclasses.replace(
        options,
        score_every_steps=options.score_every_steps or tenth,
        record_every_steps=min(options.record_every_steps, tenth),
    )
    points = of_methods(
        options, options.methods, group_sizes=options.group_sizes, non_private=options.non_private
    )
    return run_sweep("convergence", options, points, partial(draw, "convergence"))


if __name__ == "__main__":
    exit_on_bad_input(main)
