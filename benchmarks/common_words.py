#!/usr/bin/env python
"""Recompute the `common-words` weights of clip-nano, from which `make sweep` starts.

    python benchmarks/common_words.py

This trains `clip-nano` without privacy on short pairs of half of the words, with record numbers that no data
set of shapes has. It takes two minutes on one core, and writes the file next to
`trainers/models/clip/published_models.py`. The same machine gives the same bits again. Another machine may
round differently, so the committed file is authoritative: its hash is in
`trainers.models.clip.published_models.SHIPPED`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tyro

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this copy of the code, before any installed one

from dpgcl_core.release.statement import RESEARCH
from trainers.config.networks import ClipNetworkConfig
from trainers.files.weights import write_weights
from trainers.models.clip.published_models import CLIP_NANO, COMMON_WORDS, shipped_path
from trainers.training.public_start import pretrained, recipe_of


def main(num_steps: int = 1200, seed: int = 0, to: Path | None = None) -> None:
    """Make the weights, and print the hash of their file.

    Args:
      num_steps: number of steps, with 256 new pairs each.
      seed: public seed of weights, pairs and views.
      to: the file to write; by default, the file in this copy of the package.
    """
    recipe = recipe_of(ClipNetworkConfig(name=CLIP_NANO), (3, 32, 32), num_steps=num_steps, seed=seed)
    note = json.dumps({"data": RESEARCH, "recipe": recipe.content}, sort_keys=True)
    to = to or shipped_path(CLIP_NANO, COMMON_WORDS)
    print(write_weights(to, pretrained(recipe).state_dict(), note=note))


if __name__ == "__main__":
    tyro.cli(main)
