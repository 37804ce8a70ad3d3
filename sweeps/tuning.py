#!/usr/bin/env python
"""How to tune within one total ε? Compares the strategies of `--tuning` on public data.

    python sweeps/tuning.py --dataset fashion-mnist --totals 1 3 10
    ray job submit --working-dir . -- python sweeps/tuning.py --dataset fashion-mnist

Trains every setting once per repeat at every ε that a strategy needs, on the data and on a proxy, and replays
each strategy on these trainings many times, with the accounting of a real run.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import exit_on_bad_input
from dpgcl_core.sampling.groups import GroupSize
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.options.sweep_options import SweepOptions, errors_in_flags, varies
from sweeps.service.planning.trials import Point

TINY = {"totals": (3.0,), "learning_rate_grid": (1e-2, 1e-3), "num_draws": 20, "repeats": 2}


@dataclass(frozen=True, kw_only=True)
class BankOptions(SweepOptions, tiny=TINY):
    """The axes of this sweep. The setting that is not tuned has the first value of each of them."""

    totals: tuple[float, ...] = (1.0, 3.0, 10.0)
    """Values of the total ε."""
    learning_rate_grid: tuple[float, ...] = field(
        default=(1e-2, 3e-3, 3e-2), metadata=varies("learning_rate")
    )
    """Learning rates to choose among."""
    l2_clip_norm_grid: tuple[float, ...] = field(default=(1.0,), metadata=varies("l2_clip_norm"))
    """Values of C to choose among."""
    group_sizes: tuple[GroupSize, ...] = field(default=(), metadata=varies("group_size"))
    """Values of S to choose among; the value of --group-size by default."""
    num_steps_grid: tuple[int, ...] = ()
    """Values of T to choose among; the value of --num-steps by default."""
    num_draws: int = 1000
    """Number of replays of each strategy."""


def settings(options: BankOptions) -> list[Point]:
    """Return every combination of the axes' values."""
    axes = {
        "lr": ("learning_rate", options.learning_rate_grid),
        "C": ("l2_clip_norm", options.l2_clip_norm_grid),
        "S": ("group_size", options.group_sizes),
        "T": ("num_steps", options.num_steps_grid),
    }
    values = [[(symbol, name, value) for value in grid] for symbol, (name, grid) in axes.items() if grid]
    return [
        Point(
            label="-".join(f"{symbol}{value}" for symbol, _, value in each),
            changes={name: value for _, name, value in each},
        )
        for each in itertools.product(*values)
    ]


def main() -> int:
    """Run the sweep."""
    options = parse_options(BankOptions, description=__doc__)
    from sweeps.service.running.strategy_bank import StrategyBank  # imported late: it loads torch and Ray

    with errors_in_flags(BankOptions):
        bank = StrategyBank(options, settings(options), options.totals)
        return bank.run(options.num_draws)


if __name__ == "__main__":
    exit_on_bad_input(main)
