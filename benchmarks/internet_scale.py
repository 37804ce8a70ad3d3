#!/usr/bin/env python
"""Compute the costs of a training on 233 million images and 64 GPUs, and measure the draw of one step.

    python benchmarks/internet_scale.py                    # the numbers, and draws up to 233 million records
    python benchmarks/internet_scale.py --num-records 1000000 --repeats 1 --json

The numbers are computed by this package's own accounting and ledger. The first worker draws for all workers.
This draw is measured with the cryptographic stream, which private data use, and with the plain generator, in
CPU seconds of one thread.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import harness
from benchmarks.harness import Output, Page, Seconds, in_turn, timed
from dpgcl_core.accounting.composition import calibrate_noise_multiplier
from dpgcl_core.errors import ConfigError, exit_on_bad_input, require_least
from dpgcl_core.noise.chacha20 import SecureRandomness
from dpgcl_core.noise.randomness import DrawSource, SecretRandomness
from dpgcl_core.sampling.slots import SampledGroups, num_blocks
from trainers.data.stored_images import PLACE

SOURCES: dict[str, type[DrawSource]] = {"plain": SecretRandomness, "secure": SecureRandomness}
_FLOAT32, _FLOAT64 = 4, 8
_PLACE_BYTES = PLACE.itemsize + 8
"""Bytes per record for its place and its id, if images stay in their files."""


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """The training, and the measurement of its draws."""

    num_records: int = 233_000_000
    """N, the most records that the data may hold."""
    expected_batch_size: int = 98_304
    """B, the expected number of records per step."""
    group_size: int = 16
    """S, the number of records per group."""
    num_steps: int = 6_000
    """T, the number of steps."""
    epsilon: float = 8.0
    """Target ε, at δ = 1/(2N)."""
    num_workers: int = 64
    """W, the number of workers, each with one GPU."""
    num_weights: int = 86_000_000
    """d, the number of weights; a ViT-B by default."""
    num_trials: int = 10
    """Number of trainings of a sweep, for the ledger's rows."""
    repeats: int = 3
    """Timed rounds of draws."""

    def __post_init__(self) -> None:
        names = ("num_records", "expected_batch_size", "group_size", "num_steps", "num_workers")
        require_least(self, 1, *names, "num_weights", "num_trials", "repeats")
        if self.expected_batch_size > self.num_records:
            raise ConfigError(f"expected_batch_size must be at most num_records = {self.num_records}")

    @property
    def sampling_prob(self) -> float:
        """q, the sampling probability."""
        return self.expected_batch_size / self.num_records


def numbers(options: Options) -> dict[str, float]:
    """Return the costs of a training, by the formulas of the code.

    >>> found = numbers(Options(num_records=60_000, expected_batch_size=1_024, num_steps=100, num_workers=4))
    >>> round(found["noise_multiplier"], 2), found["groups_per_worker"], found["blocks_drawn_per_step"]
    (0.52, 16.0, 3750)
    """
    delta = 1 / (2 * options.num_records)
    noise = calibrate_noise_multiplier(
        target_epsilon=options.epsilon,
        target_delta=delta,
        sampling_prob=options.sampling_prob,
        num_steps=options.num_steps,
    )
    weights = options.num_weights
    return {
        "delta": delta,
        "sampling_prob": options.sampling_prob,
        "noise_multiplier": noise.noise_multiplier,
        "epochs": options.num_steps * options.sampling_prob,
        "records_per_worker": options.expected_batch_size / options.num_workers,
        "groups_per_worker": options.expected_batch_size / options.group_size / options.num_workers,
        "blocks_drawn_per_step": num_blocks(options.num_records, options.group_size),
        "sum_bytes_per_worker": weights * _FLOAT64,
        "broadcast_bytes_per_worker": weights * _FLOAT32,
        "drawn_rows_bytes": options.expected_batch_size * 8.0,
        "checkpoint_bytes": 3 * weights * _FLOAT32,
        "place_bytes": options.num_records * float(_PLACE_BYTES),
        "pixel_bytes": options.num_records * 3.0 * 224 * 224,
        "ledger_rows": 2 * options.num_trials,
    }


MEANINGS: dict[str, tuple[str, float, str]] = {
    "delta": ("δ = 1/(2N)", 1, ""),
    "sampling_prob": ("q = B/N", 1, ""),
    "noise_multiplier": ("σ", 1, ""),
    "epochs": ("epochs, T·q", 1, ""),
    "records_per_worker": ("records per step and worker, B/W", 1, ""),
    "groups_per_worker": ("groups per step and worker, B/(S·W)", 1, ""),
    "blocks_drawn_per_step": ("random bits per draw, N/S, on the first worker", 1e6, "million"),
    "sum_bytes_per_worker": ("clipped sum sent by each worker per step, float64", 1e6, "MB"),
    "broadcast_bytes_per_worker": ("noisy gradient received by each worker per step, float32", 1e6, "MB"),
    "drawn_rows_bytes": ("row numbers of the drawn records, sent by the first worker", 1e6, "MB"),
    "checkpoint_bytes": ("checkpoint: weights and Adam's two moments", 1e6, "MB"),
    "place_bytes": ("places and ids of the records, one copy per node in Ray", 1e9, "GB"),
    "pixel_bytes": ("all pixels at 224×224, if they were held in memory", 1e12, "TB"),
    "ledger_rows": ("ledger rows per sweep: a reservation and a settlement per trial", 1, ""),
}
"""The meaning of each number, its unit in the table, and the unit's name."""


def format_number(name: str, value: float) -> list[str]:
    """Return a number's row in the table.

    >>> format_number("sum_bytes_per_worker", 6.88e8)
    ['clipped sum sent by each worker per step, float64', '688 MB']
    """
    meaning, unit, text = MEANINGS[name]
    return [meaning, f"{value / unit:,.4g} {text}".strip()]


def seconds_of_draw(source: str, num_records: int, options: Options) -> Seconds:
    """Return the seconds of one step's draw by the first worker, generators included."""
    stage = SampledGroups(
        capacity=num_records,
        group_size=options.group_size,
        sampling_prob=min(1.0, options.expected_batch_size / num_records),
    )

    def draw() -> None:
        made = SOURCES[source]()
        sampling, permutation = made.generator(0, "sampling"), made.generator(0, "permutation")
        stage.draw(num_records, sampling=sampling, permutation=permutation)

    return timed(draw, time.thread_time)


def sizes_up_to(num_records: int, batch: int) -> list[int]:
    """Return the numbers of records to measure: each ten times the previous one, and finally `num_records`.

    >>> sizes_up_to(233_000_000, 98_304)
    [2000000, 20000000, 233000000]
    """
    exponents = range(1, max(2, round(math.log10(num_records / batch))))
    return [2 * 10 ** (5 + exponent) for exponent in exponents if 4 * 10 ** (5 + exponent) < num_records] + [
        num_records
    ]


def measure(options: Options) -> dict[str, Any]:
    """Return the numbers, and a row for each source and number of records."""
    sides = {
        (source, size): partial(seconds_of_draw, source, size, options)
        for source in SOURCES
        for size in sizes_up_to(options.num_records, options.expected_batch_size)
    }
    rows = [
        {
            "source": source,
            "num_records": size,
            "processor_seconds": statistics.median(each.processor for each in rounds),
            "all_processor_seconds": [each.processor for each in rounds],
        }
        for (source, size), rounds in in_turn(sides, options.repeats).items()
    ]
    return {"numbers": numbers(options), "draws": rows}


def tables(options: Options, result: dict[str, Any]) -> list[str]:
    """Return both tables in Markdown."""
    of_paper = [format_number(name, value) for name, value in result["numbers"].items()]
    draw_rows = [
        [row["source"], f"{row['num_records']:,}", harness.seconds_text(row["processor_seconds"])]
        for row in result["draws"]
    ]
    return [
        harness.markdown_table(["number", "value"], of_paper),
        f"One draw of B = {options.expected_batch_size:,} records in groups of {options.group_size}:\n\n"
        + harness.markdown_table(["source", "N", "processor s"], draw_rows),
    ]


def main() -> int:
    """Compute the costs and measure the draws."""
    options = harness.read_options(Options, __doc__)
    facts = harness.about(device="cpu", threads=1)
    result = measure(options)
    page = Page(name="internet_scale", title="A training at internet scale, computed", text=PAGE)
    return harness.publish(page, options, facts, result, tables(options, result))


PAGE = """
The first table is computed, not measured. The second table measures the draw of a step's groups by the first
worker: one bit for each of the N/S blocks, and the slots of the blocks that are kept. The cost of the bits
grows with N, the rest with B.
"""


if __name__ == "__main__":
    exit_on_bad_input(main)
