#!/usr/bin/env python
"""What does each option give at the same ε? Switches them on one by one, and all together.

    python sweeps/ablation.py --dataset fashion-mnist --epsilon 3
    ray job submit --working-dir . -- python sweeps/ablation.py --dataset fashion-mnist --epsilon 3

Ends in accuracy for every option, and its paired difference to none. `--ema-decay` and the like say with
which value an option is tried; a warm start is tried where --warm-start names public weights.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dashboards.figures import draw
from dpgcl_core.errors import ConfigError, exit_on_bad_input, unknown_choice
from sweeps.service.options.command_line import parse_options
from sweeps.service.options.sweep import SweepOptions
from sweeps.service.planning.trials import Point
from sweeps.service.running.sweep import run_sweep
from trainers.config.tree import changed

PLAIN = {"ema_decay": 0.0, "num_view_draws": 1, "warmup_steps": 0, "learning_rate_decay": "none"}
PLAIN |= {"clipping": "flat", "warm_start": None}


@dataclass(frozen=True, kw_only=True)
class AblationOptions(SweepOptions):
    """The axes of this sweep."""

    options: tuple[str, ...] = ()
    """Of plain, ema, view-draws, schedule, automatic-clipping, warm-start, all; each of them unless given."""

    def tiny(self) -> Self:
        return changed(super().tiny(), options=("plain", "all"))


def points(options: AblationOptions) -> list[Point]:
    """Return one point per option; none of them costs any ε."""
    optimizer, draws = options.optimizer, options.objective.num_view_draws
    decay, start = optimizer.learning_rate_decay, options.network.warm_start
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "ema": {"ema_decay": optimizer.ema_decay or 0.95},
        "view-draws": {"num_view_draws": max(2, draws)},
        "schedule": {
            "warmup_steps": optimizer.warmup_steps or options.mechanism.num_steps // 10,
            "learning_rate_decay": "cosine" if decay == "none" else decay,
        },
        "automatic-clipping": {"clipping": "automatic"},
    }
    if start is not None:
        found["warm-start"] = {"warm_start": start}
    elif "warm-start" in options.options:
        raise ConfigError("the option warm-start needs public weights: give --warm-start")
    found["all"] = {name: value for changes in found.values() for name, value in changes.items()}
    for name in options.options:
        if name not in found:
            raise ConfigError(unknown_choice("option", name, found))
    names = dict.fromkeys(options.options or found)
    return [Point(label=name, changes=PLAIN | found[name], params={"option": name}) for name in names]


def main() -> int:
    """Run the sweep."""
    options = parse_options(AblationOptions, description=__doc__)
    return run_sweep("ablation", options, points(options), partial(draw, "ablation"))


if __name__ == "__main__":
    exit_on_bad_input(main)
