#!/usr/bin/env python
"""How far does what was learned carry? Trains on one data set and scores the features on others.

    python sweeps/transfer.py --dataset fashion-mnist --probe-datasets digits cifar10
    ray job submit --working-dir . -- python sweeps/transfer.py --dataset fashion-mnist

Ends in accuracy on every data set, for each method and ε, and of the untrained network.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dashboards.figures import draw
from dpgcl_core.errors import exit_on_bad_input
from sweeps.service.options import SweepOptions, parse_options
from sweeps.service.points import of_methods
from sweeps.service.run import run_sweep

TINY: dict[str, Any] = {"epsilons": (10.0,), "repeats": 1, "num_steps": 10, "expected_batch_size": 64}
TINY |= {"max_index_records": 500, "max_query_records": 500}
FULL = {"dataset": "fashion-mnist", "probe_datasets": ("digits", "cifar10", "eurosat"), "repeats": 5}
# Probed unless others are named: for all but digits itself nothing has to be downloaded.
PROBED = {"digits": ("fashion-mnist",)}
PROBED_ELSE = ("digits",)


@dataclass(frozen=True, kw_only=True)
class TransferOptions(SweepOptions):
    """The axes of this sweep."""

    methods: tuple[str, ...] = ("dp_gcl",)
    """Methods to train with; `python -m dpgcl_core.methods` lists them."""
    epsilons: tuple[float, ...] = (1.0, 10.0)
    """Values of the target ε."""
    non_private: bool = True
    """Also train without noise and clipping (ε = ∞); public data only."""


def main() -> int:
    """Runs the sweep."""
    options = parse_options(TransferOptions, description=__doc__, tiny=TINY, full=FULL, by_dataset={})
    probed = options.probe_datasets or PROBED.get(options.dataset, PROBED_ELSE)
    options = dataclasses.replace(options, probe_datasets=probed)
    points = of_methods(options, options.methods, epsilons=options.epsilons, non_private=options.non_private)
    return run_sweep("transfer", options, points, partial(draw, "transfer"))


if __name__ == "__main__":
    exit_on_bad_input(main)
