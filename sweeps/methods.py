#!/usr/bin/env python
"""Which method learns most under one budget? Compares all methods, each tuned on the same grid.

    python sweeps/methods.py --dataset fashion-mnist --epsilon 10
    ray job submit --working-dir . -- python sweeps/methods.py --dataset fashion-mnist --epsilon 10

Prints the paper's Table 1 for your data, with a guarantee label on every row.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import exit_on_bad_input
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.options.sweep_options import SweepOptions, varies
from sweeps.service.planning.points import changes_for
from sweeps.service.planning.trials import Point
from sweeps.service.script_runner import run_tuned_question
from trainers.config.tree import replace_options

TINY = {"num_steps": 5, "group_size": 4, "methods": ("dp_gcl", "dp_clip"), "l2_clip_norm_grid": (1.0,)}


@dataclass(frozen=True, kw_only=True)
class MethodsOptions(SweepOptions, tiny=TINY, full={"epsilon_grid": (1.0, 10.0)}):
    """The axes of this sweep."""

    methods: tuple[str, ...] = field(default=(), metadata=varies("method"))
    """Methods to compare; by default all methods that can train on the data."""
    epsilon_grid: tuple[float, ...] = ()
    """Values of ε; the value of --epsilon by default."""
    l2_clip_norm_grid: tuple[float, ...] = (0.1, 1.0)
    """Values of C that every method is tuned over."""
    learning_rate_grid: tuple[float, ...] = ()
    """Learning rates that every method is tuned over; by default --learning-rate and a third of it."""
    whole_batch_size: float = 256
    """B of methods whose time or noise grows with B, because each of their terms needs the whole batch."""

    def tiny(self) -> Self:
        return replace_options(super().tiny(), max_index_records=self.evaluation.max_index_records)


def candidates(options: MethodsOptions) -> list[Point]:
    """Return one candidate per private method and target ε, and one for each non-private method."""
    from sweeps.service.running.two_stage_policy import select_methods  # imported late: it loads Ray

    points, mechanism, total = [], options.mechanism, options.service.total_epsilon
    epsilons = options.epsilon_grid or (None if total else mechanism.target_epsilon(),)
    targets = {"" if epsilon is None else f"-eps{epsilon:g}": epsilon for epsilon in epsilons}
    for method in select_methods(options.methods, options.data):
        changes = changes_for(method)
        if method.small_batches:
            changes["expected_batch_size"] = min(options.whole_batch_size, mechanism.expected_batch_size)
        for suffix, epsilon in (targets if method.label != "none" else {"": math.inf}).items():
            target = {} if epsilon is None else {"epsilon": epsilon}
            points.append(Point(label=f"{method.name}{suffix}", changes=changes | target))
    return points


def main() -> int:
    """Run the sweep."""
    options = parse_options(MethodsOptions, description=__doc__)
    rate = options.optimizer.learning_rate
    rates, norms = options.learning_rate_grid or (rate / 3, rate), options.l2_clip_norm_grid
    grid = [{"l2_clip_norm": norm, "learning_rate": rate} for norm in norms for rate in rates]
    return run_tuned_question("methods", options, candidates(options), grid)


if __name__ == "__main__":
    exit_on_bad_input(main)
