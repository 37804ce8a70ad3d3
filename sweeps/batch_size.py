#!/usr/bin/env python
"""How large should a batch be? Sweeps the expected batch size B (the paper's Figure 3).

    python sweeps/batch_size.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/batch_size.py --dataset fashion-mnist

Reports accuracy against B. The target ε is fixed, so σ grows with B.
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
class BatchSizeOptions(SweepOptions, tiny={"expected_batch_sizes": (64,), "group_size": 4}):
    """The axes of this sweep."""

    expected_batch_sizes: tuple[float, ...] = field(
        default=(64, 128, 256, 512, 1024, 2048), metadata=varies("expected_batch_size", "B")
    )
    """Values of B = q·n; with --sampling records the group size is at most a quarter of the smallest B."""
    non_private: bool = True
    """Also run every point without noise and clipping (ε = ∞); public data only."""


def main() -> int:
    """Run the sweep."""
    return run_script("batch-size", BatchSizeOptions, along, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
