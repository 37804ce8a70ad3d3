"""A user's own network, found through PYTHONPATH, that a test can hold or break while it trains.

What it does is decided by the training's public seed and by files in $DPGCL_TEST_FOLDER: with seed 1 it
waits after some steps as long as `hold` is there; with seed 2 it fails as long as `fail` is there.
Planning builds and probes it like any network, and finds nothing wrong.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

STEPS_BEFORE_HOLD = 9


class Watched(nn.Module):
    """A small convolution that looks at the test's folder in every pass with gradients."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self._layers = nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self._seed, self._passes = torch.initial_seed(), 0

    def forward(self, images: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self._passes += 1
            self._obey(Path(os.environ["DPGCL_TEST_FOLDER"]))
        features: Tensor = self._layers(images)
        return features

    def _obey(self, folder: Path) -> None:
        if self._seed == 2 and (folder / "fail").exists():
            raise RuntimeError("the words of a record")
        if self._seed == 1 and self._passes > STEPS_BEFORE_HOLD and (folder / "hold").exists():
            (folder / "held").write_text(str(os.getpid()))
            while (folder / "hold").exists():
                time.sleep(0.02)


def network(shape: tuple[int, int, int]) -> nn.Module:
    """The factory."""
    return Watched(shape[0])
