#!/usr/bin/env python
"""What does each option gain at the same ε? Switches the options on one by one, and all together.

    python sweeps/ablation.py --dataset fashion-mnist --epsilon 3
    ray job submit --working-dir . -- python sweeps/ablation.py --dataset fashion-mnist --epsilon 3

Reports the accuracy of every option, and its paired difference to the plain training. `--ema-decay` and
similar options set the value to try. A warm start is tried if --warm-start names public weights.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import exit_on_bad_input
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.free_options import free_options
from sweeps.service.planning.trials import Point
from sweeps.service.script_runner import run_script


@dataclass(frozen=True, kw_only=True)
class AblationOptions(SweepOptions, tiny={"options": ("plain", "all")}):
    """The axes of this sweep."""

    options: tuple[str, ...] = ()
    """Options to try: plain, ema, schedule, automatic-clipping, warm-start, all; every one by default."""
    learning_rates: tuple[str, ...] = ()
    """OPTION=RATE, such as ema=0.03: a learning rate for that option in place of --learning-rate."""


def points(options: AblationOptions) -> list[Point]:
    """Return one point per option; no option costs any ε."""
    changes = free_options(options, options.options, options.learning_rates)
    return [Point(label=name, changes=changes[name], params={"option": name}) for name in changes]


def main() -> int:
    """Run the sweep."""
    return run_script("ablation", AblationOptions, points, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
