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
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dashboards.figures import draw
from dpgcl_core.errors import ConfigError, exit_on_bad_input, unknown_choice
from sweeps.service.options import SweepOptions, parse_options
from sweeps.service.plan import Point
from sweeps.service.run import run_sweep

TINY: dict[str, Any] = {"options": ("plain", "all"), "repeats": 1, "num_steps": 10, "expected_batch_size": 64}
TINY |= {"max_index_records": 500, "max_query_records": 500}
FULL = {"dataset": "fashion-mnist", "repeats": 5}
PLAIN = {"ema_decay": 0.0, "num_view_draws": 1, "warmup_steps": 0, "learning_rate_decay": "none"}
PLAIN |= {"clipping": "flat", "warm_start": None}


@dataclass(frozen=True, kw_only=True)
class AblationOptions(SweepOptions):
    """The axes of this sweep."""

    options: tuple[str, ...] = ()
    """Of plain, ema, view-draws, schedule, automatic-clipping, warm-start, all; each of them unless given."""


def points(options: AblationOptions) -> list[Point]:
    """Returns one point per option; none of them costs any ε."""
    decay = options.learning_rate_decay
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "ema": {"ema_decay": options.ema_decay or 0.95},
        "view-draws": {"num_view_draws": max(2, options.num_view_draws)},
        "schedule": {
            "warmup_steps": options.warmup_steps or options.num_steps // 10,
            "learning_rate_decay": "cosine" if decay == "none" else decay,
        },
        "automatic-clipping": {"clipping": "automatic"},
    }
    if options.warm_start is not None:
        found["warm-start"] = {"warm_start": options.warm_start}
    elif "warm-start" in options.options:
        raise ConfigError("the option warm-start needs public weights: give --warm-start")
    found["all"] = {name: value for changes in found.values() for name, value in changes.items()}
    for name in options.options:
        if name not in found:
            raise ConfigError(unknown_choice("option", name, found))
    names = dict.fromkeys(options.options or found)
    return [Point(label=name, changes=PLAIN | found[name], params={"option": name}) for name in names]


def main() -> int:
    """Runs the sweep."""
    options = parse_options(AblationOptions, description=__doc__, tiny=TINY, full=FULL, by_dataset={})
    return run_sweep("ablation", options, points(options), partial(draw, "ablation"))


if __name__ == "__main__":
    exit_on_bad_input(main)
