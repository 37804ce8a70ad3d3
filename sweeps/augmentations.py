#!/usr/bin/env python
"""How should views be augmented? Sweeps augmentations of images and texts (the paper's Table 7).

    python sweeps/augmentations.py --dataset shapes
    python sweeps/augmentations.py --image-augmentations none crop crop+jitter --text-augmentations none
    ray job submit --working-dir . -- python sweeps/augmentations.py --dataset shapes

Reports scores for every combination of both, private and non-private. Images without captions get only image
augmentations. The setting gives the strengths. If it has an augmentation off, the strengths of the paper or
of SimCLR are used. Flips are on together with crops, if the setting has flips.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.errors import exit_on_bad_input
from sweeps.service.options.sweep_options import PairSweepOptions
from sweeps.service.planning.augmentation_sets import IMAGE_AUGMENTATIONS, combinations
from sweeps.service.planning.points import at
from sweeps.service.planning.trials import Point
from sweeps.service.script_runner import run_script
from trainers.views.caption_views import TEXT_AUGMENTATIONS


@dataclass(frozen=True, kw_only=True)
class AugmentationsOptions(
    PairSweepOptions, tiny={"image_augmentations": ("crop",), "text_augmentations": ("word_swap",)}
):
    """The axes of this sweep."""

    image_augmentations: tuple[str, ...] = tuple(IMAGE_AUGMENTATIONS)
    """Image augmentations: crop, jitter, blur, several joined by +, or none."""
    text_augmentations: tuple[str, ...] = tuple(TEXT_AUGMENTATIONS)
    """Caption augmentations: sentence_swap, word_swap, word_delete, several joined by +, or none."""
    non_private: bool = True
    """Also run every point without noise and clipping (ε = ∞); public data only."""


def points(options: AugmentationsOptions) -> list[Point]:
    """Return one point per combination of augmentations and ε."""
    grid: list[Point] = []
    texts = options.text_augmentations if options.data.modality == "image-text" else None
    images = options.image_augmentations
    for name, changes in combinations(options.views, options.text_views, images, texts).items():
        params = {"augmentation": name.replace("_", " ")}
        grid += at(options, name, changes, params)
    return grid


def main() -> int:
    """Run the sweep."""
    return run_script("augmentations", AugmentationsOptions, points, description=__doc__)


if __name__ == "__main__":
    exit_on_bad_input(main)
