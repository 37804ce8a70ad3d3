"""A user's own network, found through PYTHONPATH, that a test can hold or break while it trains.

What it does is decided by the training's public seed and by files in $DPGCL_TEST_FOLDER: with seed 1 it
waits as long as `hold` is there, once the checkpoint $DPGCL_TEST_CHECKPOINT was written anew; with seed 2
it fails as long as `fail` is there.
Planning builds and probes it like any network, and finds nothing wrong.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn


class Watched(nn.Module):
    """A small convolution that looks at the test's folder in every pass with gradients."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self._layers = nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self._seed, self._checkpoint = torch.initial_seed(), _checkpoint()

    def forward(self, images: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self._obey(Path(os.environ["DPGCL_TEST_FOLDER"]))
        features: Tensor = self._layers(images)
        return features

    def _obey(self, folder: Path) -> None:
        if self._seed == 2 and (folder / "fail").exists():
            raise RuntimeError("the words of a record")
        if self._seed == 1 and (folder / "hold").exists() and _checkpoint() != self._checkpoint:
            (folder / "held").write_text(str(os.getpid()))
            while (folder / "hold").exists():
                time.sleep(0.02)


def _checkpoint() -> int:
    path = Path(os.environ.get("DPGCL_TEST_CHECKPOINT", "none"))
    return path.stat().st_mtime_ns if path.exists() else 0


def network(shape: tuple[int, int, int]) -> nn.Module:
    """The factory."""
    return Watched(shape[0])
