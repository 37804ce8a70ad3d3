#!/usr/bin/env python
"""Which network learns best? Sweeps the architecture (the paper's Figure 5).

    python sweeps/architectures.py --dataset shapes
    python sweeps/architectures.py --full --networks ViT-L-14-336 --image-size 336
    ray job submit --working-dir . -- python sweeps/architectures.py --dataset shapes

Reports the scores of every network, private and non-private, next to its scores before training. All networks
of a sweep have one image size, so a network of 336 pixels needs a separate sweep. --pretrained names
published weights in open_clip; --networks ViT-B-32=/models/b32 loads weights from files.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import ConfigError, exit_on_bad_input
from sweeps.service.options.sweep_options import PairSweepOptions, varies
from sweeps.service.planning.points import at
from sweeps.service.planning.trials import Point
from sweeps.service.script_runner import run_script

OF_PAIRS = ("clip-tiny", "clip-tiny-patch4", "clip-small")
# The networks of --full; openai is the one name of weights that all of them have.
FULL = {"networks": ("ViT-B-32", "ViT-B-16", "ViT-L-14"), "pretrained": "openai"}
OF_IMAGES = ("tiny_cnn", "wide_cnn", "small_cnn", "resnet18")


@dataclass(frozen=True, kw_only=True)
class ArchitecturesOptions(PairSweepOptions, tiny={"networks": ("clip-tiny",)}, full=FULL):
    """The axes of this sweep."""

    networks: tuple[str, ...] = field(default=(), metadata=varies("network"))
    """Networks (CLIP models for pairs), as NAME or NAME=WEIGHTS; by default small ones that fit the data."""
    non_private: bool = True
    """Also run every point without noise and clipping (ε = ∞); public data only."""


def points(options: ArchitecturesOptions) -> list[Point]:
    """Return one point per network and ε, private and, on request, at ε = ∞."""
    small_networks = OF_PAIRS if options.data.modality == "image-text" else OF_IMAGES
    grid: list[Point] = []
    for network in dict.fromkeys(options.networks or small_networks):
        name, _, weights = network.partition("=")
        changes: dict[str, Any] = {"network": name}
        if weights:
            changes |= {"warm_start": Path(weights), "pretrained": "random"}
        label = f"{Path(name).stem}-{len(grid)}" if "/" in name else name
        if any(point.changes["network"] == name for point in grid):
            raise ConfigError(f"networks must have different names, which the figure shows; got {name} twice")
        grid += at(options, label, changes)
    return grid


def main() -> int:
    """Run the sweep."""
    return run_script("architectures", ArchitecturesOptions, points, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
