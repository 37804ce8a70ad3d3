#!/usr/bin/env python
"""How many extra augmented copies should every key have? Sweeps N_a (the paper's Table 6).

    python sweeps/num_augmentations.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/num_augmentations.py --dataset fashion-mnist

Reports accuracy against N_a, private and non-private.
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
class NumAugmentationsOptions(SweepOptions, tiny={"augmentation_counts": (1,)}):
    """The axes of this sweep."""

    augmentation_counts: tuple[int, ...] = field(
        default=(0, 1, 2, 3, 4), metadata=varies("num_augmentations", "Na")
    )
    """Values of N_a."""
    non_private: bool = True
    """Also run every point without noise and clipping (ε = ∞); public data only."""


def main() -> int:
    """Run the sweep."""
    return run_script("num-augmentations", NumAugmentationsOptions, along, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
