#!/usr/bin/env python
"""How accurate is a classifier of private labels? Trains the linear head alone, and all layers, at each ε.

    python sweeps/classify.py --dataset fashion-mnist --network wide_cnn --warm-start synthetic:1200
    ray job submit --working-dir . -- python sweeps/classify.py --dataset fashion-mnist

Reports accuracy against ε for each choice of layers; on public data also at ε = ∞ and before training.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import ConfigError, exit_on_bad_input
from dpgcl_core.release.metrics import CLASSIFIER_SCORE
from sweeps.service.options.sweep_options import SweepOptions, varies
from sweeps.service.planning.points import at
from sweeps.service.planning.trials import Point
from sweeps.service.script_runner import run_script
from trainers.config.networks import TRAINED_LAYERS
from trainers.config.tree import replace_options

METHOD = "dp_classifier"


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions(SweepOptions, tiny={"epsilons": (10.0,), "layers": TRAINED_LAYERS[:1]}):
    """The axes of this sweep."""

    epsilons: tuple[float, ...] = field(default=(1.0, 3.0, 10.0), metadata=varies("epsilon"))
    """Values of the target ε."""
    layers: tuple[str, ...] = field(default=TRAINED_LAYERS, metadata=varies("trained_layers"))
    """Layers to train: head (a linear layer on frozen features), all (the encoder, too)."""
    non_private: bool = True
    """Also train without noise and clipping (ε = ∞); public data only."""

    def completed(self, overrides: Collection[str]) -> Self:
        if "method" in overrides and self.mechanism.method != METHOD:
            raise ConfigError(f"method must be {METHOD}; got {self.mechanism.method}. Leave it out.")
        chosen = {} if "select_by" in overrides or self.release.is_open else {"select_by": CLASSIFIER_SCORE}
        return replace_options(self, method=METHOD, num_augmentations=0, **chosen)


def points(options: ClassifyOptions) -> list[Point]:
    """Return one point per choice of trained layers and ε."""
    points_at = partial(at, options, epsilons=options.epsilons)
    choices = dict.fromkeys(options.layers)
    return [point for layers in choices for point in points_at(layers, {"trained_layers": layers})]


def main() -> int:
    """Run the sweep."""
    return run_script("classify", ClassifyOptions, points, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
