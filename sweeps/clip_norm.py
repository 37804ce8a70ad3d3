#!/usr/bin/env python
"""How far should a group's gradient be clipped? Sweeps the clip norm C.

    python sweeps/clip_norm.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/clip_norm.py --dataset fashion-mnist

Ends in accuracy against C: the noise grows with C, and what C cuts off is lost.
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

TINY = {"l2_clip_norms": (0.3, 1.0), "repeats": 1, "num_steps": 10, "expected_batch_size": 64}
TINY |= {"max_index_records": 500, "max_query_records": 500}
FULL = {"dataset": "fashion-mnist", "repeats": 5}


@dataclass(frozen=True, kw_only=True)
class ClipNormOptions(SweepOptions):
    """The axes of this sweep."""

    l2_clip_norms: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    """Values of C."""


def main() -> int:
    """Runs the sweep."""
    options = parse_options(ClipNormOptions, description=__doc__, tiny=TINY, full=FULL, by_dataset={})
    points = along(options, "l2_clip_norm", options.l2_clip_norms, "C")
    return run_sweep("clip-norm", options, points, partial(draw, "clip-norm"))


if __name__ == "__main__":
    exit_on_bad_input(main)
