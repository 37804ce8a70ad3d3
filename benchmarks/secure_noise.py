#!/usr/bin/env python
"""Measure the cost of the cryptographic stream: one noise draw from it and from the plain generator.

    python benchmarks/secure_noise.py                              # 11 million coordinates, with a dated file
    python benchmarks/secure_noise.py --num-coordinates 1000000 --repeats 3 --json

Each round draws the noise of one step from both sources in turn, in alternating order, including key and
generator. A draw runs in one thread. The thread's CPU seconds are reported next to the wall-clock seconds,
which also count other work on a busy machine. Ratios are to the plain generator.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks import harness
from benchmarks.harness import Output, Page, Seconds, in_turn, timed
from dpgcl_core.errors import exit_on_bad_input, require_least
from dpgcl_core.noise.chacha20 import SecureRandomness
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.randomness import DrawSource, SecretRandomness

STD = 1.5
SOURCES: dict[str, Callable[[], DrawSource]] = {"plain": SecretRandomness, "secure": SecureRandomness}
"""The sources of a step's generator, by name."""


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """What to measure."""

    num_coordinates: int = 11_000_000
    """Number of coordinates per draw; ResNet-18 has 11 million parameters."""
    repeats: int = 7
    """Timed rounds, one draw from each source."""

    def __post_init__(self) -> None:
        require_least(self, 1, "num_coordinates", "repeats")


def seconds_of_draw(name: str, num_coordinates: int) -> Seconds:
    """Return the seconds of one draw, generator included: this thread's CPU time, and wall-clock time."""
    source = SOURCES[name]()
    noise = GaussianNoise.of(STD, 1.0, num_coordinates if source.is_exact else None)
    return timed(lambda: noise.draw(num_coordinates, source.generator(0, "noise")), time.thread_time)


def measure(options: Options) -> dict[str, Any]:
    """Return one row per source: medians, all rounds and ratios over the plain generator."""
    torch.set_num_threads(1)
    sides = {name: partial(seconds_of_draw, name, options.num_coordinates) for name in SOURCES}
    for take in sides.values():
        take()
    rows: list[dict[str, Any]] = []
    for name, rounds in in_turn(sides, options.repeats).items():
        row: dict[str, Any] = {"source": name}
        for kind in ("processor", "clock"):
            every = [getattr(seconds, kind) for seconds in rounds]
            row |= {f"{kind}_seconds": statistics.median(every), f"all_{kind}_seconds": every}
        rows.append(row)
    for row in rows:
        for kind in ("processor", "clock"):
            row[f"{kind}_ratio"] = row[f"{kind}_seconds"] / rows[0][f"{kind}_seconds"]
            _, *ends = harness.ratio_of(row[f"all_{kind}_seconds"], rows[0][f"all_{kind}_seconds"])
            row[f"{kind}_ratio_range"] = ends
    return {"num_coordinates": options.num_coordinates, "draws": rows}


def table(result: dict[str, Any]) -> str:
    """Return the rows in Markdown."""
    columns = ["source", "CPU s", "ratio to plain", "wall-clock s", "ratio to plain"]
    lines = [
        [
            row["source"],
            harness.seconds_text(row["processor_seconds"]),
            harness.with_spread(row["processor_ratio"], row["processor_ratio_range"]),
            harness.seconds_text(row["clock_seconds"]),
            harness.with_spread(row["clock_ratio"], row["clock_ratio_range"]),
        ]
        for row in result["draws"]
    ]
    heading = f"One draw of {result['num_coordinates']:,} coordinates:"
    return f"{heading}\n\n{harness.markdown_table(columns, lines)}"


def main() -> int:
    """Measure all sources."""
    options = harness.read_options(Options, __doc__)
    facts = harness.about(device="cpu", threads=1)
    result = measure(options)
    page = Page(name="secure_noise", title="Cost of the cryptographic stream", text=PAGE)
    return harness.publish(page, options, facts, result, [table(result)])


PAGE = """
Seconds of one step's noise draw on one thread: the median of several rounds in which both sources take turns
in one process. `plain` is PCG64DXSM with numpy's ziggurat. `secure` is ChaCha20 with a fresh key, Box and
Muller's transformation, and exact rounding to a grid. In a training, long draws run in parallel with the
gradients.
"""


if __name__ == "__main__":
    exit_on_bad_input(main)
