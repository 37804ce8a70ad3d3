#!/usr/bin/env python
"""How well do learned features transfer? Trains on one data set and scores its features on others.

    python sweeps/transfer.py --dataset fashion-mnist --probe-datasets digits cifar10
    ray job submit --working-dir . -- python sweeps/transfer.py --dataset fashion-mnist

Reports accuracy on every data set, for each method and ε, and for the untrained network.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import exit_on_bad_input
from sweeps.service.options.sweep_options import SweepOptions, varies
from sweeps.service.planning.points import of_methods
from sweeps.service.planning.trials import Point
from sweeps.service.script_runner import run_script
from trainers.config.tree import replace_options

# Default probe data sets, by training data. Only training on digits needs a download.
PROBES_BY_DATASET = {"digits": ("fashion-mnist",)}


@dataclass(frozen=True, kw_only=True)
class TransferOptions(
    SweepOptions, tiny={"epsilons": (10.0,)}, full={"probe_datasets": ("digits", "cifar10", "eurosat")}
):
    """The axes of this sweep."""

    methods: tuple[str, ...] = field(default=("dp_gcl",), metadata=varies("method"))
    """Methods to train with; `python -m dpgcl_core.methods` lists them."""
    epsilons: tuple[float, ...] = field(default=(1.0, 10.0), metadata=varies("epsilon"))
    """Values of the target ε."""
    non_private: bool = True
    """Also train without noise and clipping (ε = ∞); public data only."""

    def completed(self, overrides: Collection[str]) -> Self:
        probes = self.data.probe_datasets or PROBES_BY_DATASET.get(self.data.dataset, ("digits",))
        return replace_options(self, probe_datasets=probes)


def points(options: TransferOptions) -> list[Point]:
    """Return one point per method and ε."""
    return of_methods(options, options.methods, epsilons=options.epsilons)


def main() -> int:
    """Run the sweep."""
    return run_script("transfer", TransferOptions, points, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
