"""A user's own network that makes a training's secrets recognisable, for the search in what it leaves.

In the process that trains it puts a number of its own in place of every private-only metric, where the
observing code takes it from, and has everything observed, private data or not. So what keeps these numbers
back is the release policy alone. It does so in the processes of a sweep of their own and within `planting`,
nowhere else. All records begin with `PIXELS`; with the public seeds below the network fails on them, with the
records in its message.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dpgcl_core.private_step import PrivateStep
from dpgcl_core.workers import SingleWorker
from trainers.files.checkpoint import Attempt, CheckpointFolder
from trainers.training import loop
from trainers.training.observation import Observer
from trainers.views.image_views import PIXEL_MEAN, PIXEL_STD

NUM_STEPS = 8

MAY_PLANT = "DPGCL_TEST_MAY_PLANT"
"""Set in the environment of sweeps whose processes end with them."""
_allowed = MAY_PLANT in os.environ

METRICS = {
    "snr_first_step": 961473.125,
    "snr_first_step_no_augmentation": 537286.625,
    "snr": 829651.375,
    "train_loss": 712345.625,
    "clip_fraction": 594127.875,
    "mean_group_grad_norm": 683914.375,
    "realised_batch_size": 4871203.0,
    "num_groups": 3692581.0,
    "num_non_finite_groups": 8274619.0,
    "num_restarts": 5938271.0,
    "train_seconds": 394894.625,
    "step_seconds": 394894.625 / NUM_STEPS,
    "evaluation_seconds": 275813.375,
}
"""What each private-only metric is planted as; all of them exact in float32."""

PIXELS = bytes([13, 241, 87, 166, 29, 203, 118, 72])
"""How every record begins."""
LABEL = "Quillfeather"
FILE_NAME = "Vexborough"
WORDS = "the words of a record: Ombrelune"

RAISES = 1
RAISES_BASE_EXCEPTION = 2
EXITS = 3
"""Public seeds with which the network fails."""


class BeyondError(BaseException):
    """No `Exception`: `except Exception` lets it pass."""


class Planted(nn.Module):
    """A small convolution that fails on real records, if its seed says so."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self._layers = nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self._seed = torch.initial_seed()

    def forward(self, images: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self._seed in (RAISES, RAISES_BASE_EXCEPTION, EXITS):
            _fail(self._seed, images)
        features: Tensor = self._layers(images)
        return features


def _fail(seed: int, images: Tensor) -> None:
    """Fails with all forms of a record in the message, but not on the random images of a probe."""
    rows = images.detach().flatten(1)[:, : len(PIXELS)] * PIXEL_STD + PIXEL_MEAN
    pixels = (rows[0] * 255).round().to(torch.uint8).numpy().tobytes()
    if pixels != PIXELS:
        return
    message = f"{WORDS} {list(pixels)} {pixels.hex()} {pixels!r} {images.detach()[0].flatten().tolist()}"
    kinds = {RAISES: RuntimeError, RAISES_BASE_EXCEPTION: BeyondError, EXITS: SystemExit}
    raise kinds[seed](message)


def network(shape: tuple[int, int, int]) -> nn.Module:
    """The factory."""
    plant()
    return Planted(shape[0])


_draw: Callable[..., Any] = PrivateStep.draw
_record_snr = Observer.record_snr
_begin_attempt: Callable[..., Attempt] = CheckpointFolder.begin_attempt


def plant() -> None:
    """Plants all metrics in this process; once more for every training, for the clock begins anew.

    Raises:
      RuntimeError: the process is neither one that ends with its sweep nor within `planting`.
    """
    if not _allowed:
        raise RuntimeError("plants would reach later tests: train within `planting`, or set " + MAY_PLANT)
    for place, name, value in _plants():
        setattr(place, name, value)


@contextmanager
def planting() -> Iterator[None]:
    """Let trainings of this process be planted, and take all of it away at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "_allowed", True)
        for place, name, _ in _plants():
            patch.setattr(place, name, getattr(place, name))
        yield


def _plants() -> list[tuple[Any, str, Any]]:
    """All that is planted: the place, the name there, and what it becomes."""
    batch_size, restarts = int(METRICS["realised_batch_size"]), int(METRICS["num_restarts"])
    return [
        (PrivateStep, "draw", lambda *given: dataclasses.replace(_draw(*given), batch_size=batch_size)),
        (loop, "time", SimpleNamespace(perf_counter=_clock().__next__)),
        (
            CheckpointFolder,
            "begin_attempt",
            lambda *given: dataclasses.replace(_begin_attempt(*given), num_restarts=restarts),
        ),
        (SingleWorker, "sum_shares", _sum_shares),
        (Observer, "record_snr", _planted_snr),
        (Observer, "wants", lambda observer, step: True),
    ]


def _clock() -> itertools.cycle[float]:
    return itertools.cycle([0.0, METRICS["train_seconds"], 0.0, METRICS["evaluation_seconds"]])


def _sum_shares(workers: SingleWorker, values: Tensor) -> None:
    """Replaces the seven sums that loss, norms and counts are made of."""
    if values.shape != (7,):
        return
    groups, records = METRICS["num_groups"], 1024.0
    norms, losses = METRICS["mean_group_grad_norm"] * groups, METRICS["train_loss"] * records
    sums = [norms, losses, METRICS["num_non_finite_groups"], METRICS["clip_fraction"] * groups]
    counts = [groups, records, METRICS["realised_batch_size"]]
    values.copy_(torch.tensor([*sums, *counts], dtype=values.dtype))


def _planted_snr(
    observer: Observer, step: int, clean_norm: float, bare_norm: float | None, noise_norm: float
) -> None:
    clean = METRICS["snr_first_step" if step == 0 else "snr"]
    bare = None if bare_norm is None else METRICS["snr_first_step_no_augmentation"]
    _record_snr(observer, step, clean, bare, 1.0)


def write_records(folder: Path, num_records: int) -> str:
    """Writes a folder of grey images, all of which begin with `PIXELS`; returns the data set's name."""
    generator = np.random.default_rng(3)
    for number in range(num_records):
        image = generator.integers(0, 256, (8, 8), dtype=np.uint8)
        image[0] = list(PIXELS)
        path = folder / f"{LABEL}-{number % 3}" / f"{FILE_NAME}-{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return f"folder:{folder}"
