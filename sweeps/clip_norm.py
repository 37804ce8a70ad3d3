#!/usr/bin/env python
"""How strongly should a group's gradient be clipped? Sweeps the clip norm C.

    python sweeps/clip_norm.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/clip_norm.py --dataset fashion-mnist

Reports accuracy against C. A large C adds more noise; a small C cuts off more of each gradient.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import exit_on_bad_input
from sweeps.service.options.sweep_options import SweepOptions, varies
from sweeps.service.planning.points import along
from sweeps.service.script_runner import run_script


@dataclass(frozen=True, kw_only=True)
class ClipNormOptions(SweepOptions, tiny={"l2_clip_norms": (0.3, 1.0)}):
    """The axes of this sweep."""

    l2_clip_norms: tuple[float, ...] = field(
        default=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0), metadata=varies("l2_clip_norm", "C")
    )
    """Values of C."""


def main() -> int:
    """Run the sweep."""
    return run_script("clip-norm", ClipNormOptions, along, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
