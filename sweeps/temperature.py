#!/usr/bin/env python
"""How sharp should the contrast be? Sweeps the temperature of the loss.

    python sweeps/temperature.py --dataset fashion-mnist
    ray job submit --working-dir . -- python sweeps/temperature.py --dataset fashion-mnist

Reports accuracy against τ, private and non-private.
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
class TemperatureOptions(SweepOptions, tiny={"temperatures": (0.5,)}):
    """The axes of this sweep."""

    temperatures: tuple[float, ...] = field(
        default=(0.05, 0.1, 0.2, 0.5, 0.7071, 1.0), metadata=varies("temperature", "tau")
    )
    """Values of τ."""
    non_private: bool = True
    """Also run every point without noise and clipping (ε = ∞); public data only."""


def main() -> int:
    """Run the sweep."""
    return run_script("temperature", TemperatureOptions, along, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
