#!/usr/bin/env python
"""What per-group clipping costs over the same non-private step, side by side in one run.

    python benchmarks/clipping.py --model small_cnn --group-size 2 --expected-batch-size 512 --json
    python benchmarks/clipping.py            # the whole table, with a dated file in benchmarks/results/

"Non-private" is the same views, the same group loss, one ordinary backward pass and an optimizer step.
Both are timed alternately, each at its own fastest microbatch, and the medians are divided: a ratio of
one run survives a noisy machine, seconds do not.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch

from dpgcl_core.clipping import _loop, num_trainable, trainable_parameters
from dpgcl_core.mechanism import Mechanism, default_delta
from dpgcl_core.randomness import SeededNonPrivateRandomness
from trainers import loop
from trainers.config import (
    EvaluationConfig,
    NetworkConfig,
    OptimizerConfig,
    PerformanceConfig,
    TrainingConfig,
    ViewConfig,
)
from trainers.data.dataset import Records
from trainers.workers import SingleWorker

RESULTS = Path(__file__).parent / "results"
NUM_RECORDS = 20_000
MICROBATCHES = (96, 192, 384, 768)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One measurement, or the whole table."""

    model: str | None = None
    """small_cnn, tiny_cnn or resnet18; None runs the whole table."""
    group_size: int = 2
    """S."""
    expected_batch_size: int = 512
    """Expected records per step."""
    image_size: int = 28
    """Pixels of the square, one-channel images."""
    repeats: int = 5
    """Timed pairs of steps; medians are reported."""
    threads: int = 1
    """CPU threads."""
    json: bool = False
    """Print one JSON object instead of a line of text."""


def measure(options: Options, model: str) -> dict[str, float | int | str]:
    """Returns the time ratio of a private over a non-private step, and the error against the exact loop."""
    steps = {}
    for kind in ("private", "non_private"):
        candidates = [_Step(options, model, kind == "private", size) for size in MICROBATCHES]
        steps[kind] = min(candidates, key=lambda step: step.seconds())
    times: dict[str, list[float]] = {"private": [], "non_private": []}
    for _ in range(options.repeats):
        for kind, step in steps.items():
            times[kind].append(step.seconds())
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    return {
        "model": model,
        "group_size": options.group_size,
        "expected_batch_size": options.expected_batch_size,
        "num_parameters": num_trainable(steps["private"].run.encoder),
        "time_ratio": medians["private"] / medians["non_private"],
        "private_seconds": medians["private"],
        "non_private_seconds": medians["non_private"],
        "max_relative_error": steps["private"].relative_error(),
    }


class _Step:
    """One kind of training step, ready to be timed."""

    def __init__(self, options: Options, model: str, private: bool, views_per_microbatch: int) -> None:
        mechanism = Mechanism(
            num_records_public=NUM_RECORDS,
            sampling_prob=options.expected_batch_size / NUM_RECORDS,
            group_size=options.group_size,
            l2_clip_norm=1.0 if private else math.inf,
            noise_multiplier=1.0 if private else 0.0,
            num_steps=1,
            target_delta=default_delta(NUM_RECORDS),
        )
        config = TrainingConfig(
            mechanism=mechanism,
            views=ViewConfig(min_crop_area=0.3, max_crop_area=1.0, brightness=0.4, contrast=0.4),
            network=NetworkConfig(name=model),
            optimizer=OptimizerConfig(name="adam"),
            performance=PerformanceConfig(
                threads_per_worker=options.threads,
                max_views_per_microbatch=views_per_microbatch,
                device="cpu",
            ),
            evaluation=EvaluationConfig(record_every_steps=0),
            seeded_non_private=True,
        )
        shape = (NUM_RECORDS, 1, options.image_size, options.image_size)
        images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        records = Records(images=images, ids=np.arange(NUM_RECORDS, dtype=np.uint64))
        data = loop.TrainingData(
            train=records, index=None, queries=None, train_is_public=True, evaluation_is_public=True
        )
        self.run = loop._prepare(config, data, SingleWorker())
        self.run.randomness = SeededNonPrivateRandomness(0)
        self.run.step = 1  # nothing is recorded after the first step

    def seconds(self) -> float:
        started = time.perf_counter()
        loop._step(self.run)
        return time.perf_counter() - started

    def relative_error(self) -> float:
        """Compares the clipped sum of a few groups with the exact loop over groups."""
        run = self.run
        groups, _ = loop._draw_groups(run)
        groups = groups[:8]
        actual, exact = torch.zeros_like(run.total), torch.zeros_like(run.total)
        loop._add_clipped_sum(run, groups, actual, 1)

        group_losses = loop.group_losses_of(run.encoder, run.config.temperature)
        views = loop._views(run, groups, 3)
        _loop(exact, trainable_parameters(run.encoder), group_losses, views, 1.0)
        return float((actual - exact).norm() / exact.norm())


def _line(row: dict[str, float | int | str]) -> str:
    return (
        f"{row['model']:<10} S = {row['group_size']:<4} B = {row['expected_batch_size']:<6} "
        f"private / non-private = {row['time_ratio']:.2f}   ({row['private_seconds']:.3f} s and "
        f"{row['non_private_seconds']:.3f} s)   relative error {row['max_relative_error']:.1e}"
    )


def main() -> int:
    """Runs one measurement or the table."""
    import tyro

    options = tyro.cli(Options, description=__doc__)
    if options.model is not None:
        row = measure(options, options.model)
        print(json.dumps(row) if options.json else _line(row))
        return 0
    rows = []
    for model, batch, sizes in (("small_cnn", 512, (2, 4, 16, 64)), ("resnet18", 64, (2, 4, 16))):
        for size in sizes:
            one = dataclasses.replace(options, group_size=size, expected_batch_size=batch)
            rows.append(measure(one, model))
            print(_line(rows[-1]), flush=True)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"clipping-{date.today():%Y-%m-%d}.json"
    about = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "threads": options.threads,
        "rows": rows,
    }
    path.write_text(json.dumps(about, indent=1))
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
