#!/usr/bin/env python
"""What does noise cost? Sweeps the noise multiplier σ, and reports the ε of each value.

    python sweeps/noise_multiplier.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/noise_multiplier.py --dataset fashion-mnist

Reports accuracy against σ.
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
class NoiseMultiplierOptions(SweepOptions, tiny={"noise_multipliers": (1.0, 2.0)}):
    """The axes of this sweep."""

    noise_multipliers: tuple[float, ...] = field(
        default=(0.5, 0.7, 1.0, 1.5, 2.0, 4.0), metadata=varies("noise_multiplier", "sigma")
    )
    """Values of σ = noise std / sensitivity."""


def main() -> int:
    """Run the sweep."""
    return run_script("noise-multiplier", NoiseMultiplierOptions, along, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
