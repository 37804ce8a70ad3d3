#!/usr/bin/env python
"""Which layers should be adapted? Sweeps the projections that get LoRA (the paper's Table 5).

    python sweeps/lora_layers.py --dataset shapes --warm-start /models/public
    ray job submit --working-dir . -- python sweeps/lora_layers.py --dataset shapes

Reports recall in both directions for Q, K, V and their combinations, private and non-private. Adapters learn
little from random weights, so set --warm-start or --pretrained.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import ConfigError, exit_on_bad_input, require_choice
from sweeps.service.options.sweep_options import PairSweepOptions
from sweeps.service.planning.points import at
from sweeps.service.planning.trials import Point
from sweeps.service.script_runner import run_script

LAYERS = ("Q", "K", "V", "Q+K", "Q+V", "K+V", "Q+K+V")
RANK, RANK_OF_SMALL = 16, 4


@dataclass(frozen=True, kw_only=True)
class LoraLayersOptions(PairSweepOptions, tiny={"layers": ("Q+V",)}):
    """The axes of this sweep. --lora-rank sets the rank; by default it is 16, or 4 for the small models."""

    always_adapts: ClassVar[bool] = True

    layers: tuple[str, ...] = LAYERS
    """Projections to adapt in every attention block: Q, K, V, or some of them joined by +."""
    non_private: bool = True
    """Also run every point without noise and clipping (ε = ∞); public data only."""


def points(options: LoraLayersOptions) -> list[Point]:
    """Return one point per choice of layers and ε."""
    if options.data.modality != "image-text":
        raise ConfigError(
            "adapters need a CLIP model, which trains on pairs of images and texts; got "
            f"--dataset {options.data.dataset}. Set --dataset shapes, or use pairs of your own."
        )
    from trainers.models.clip.published_models import SMALL_MODELS  # imported late: it loads torch

    rank = options.network.lora_rank or (RANK_OF_SMALL if options.network.name in SMALL_MODELS else RANK)
    grid: list[Point] = []
    for name in dict.fromkeys(options.layers):
        require_choice("choice of layers", name, LAYERS)
        changes = {"lora_targets": tuple(name.lower().split("+")), "lora_rank": rank}
        params = {"lora_layers": name}
        grid += at(options, name, changes, params)
    return grid


def main() -> int:
    """Run the sweep."""
    return run_script("lora-layers", LoraLayersOptions, points, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
