#!/usr/bin/env python
"""What the cryptographic stream costs: seconds of one noise draw, plain against secure, in one run.

    python benchmarks/secure_noise.py                              # 11 million coordinates, with a dated file
    python benchmarks/secure_noise.py --num-coordinates 1000000 --repeats 3 --json

Each round draws the noise of one step from every source in turn, back and forth, key and generator
included. A draw runs in one thread, whose own processor seconds are reported beside those of the clock:
on a machine with other work the clock counts their turns, too. Ratios are over the plain generator.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks import reports
from benchmarks.reports import say
from dpgcl_core.errors import ConfigError
from dpgcl_core.noise.chacha20 import SecureRandomness
from dpgcl_core.noise.gaussian import NUM_SUMMED, GaussianNoise
from dpgcl_core.noise.sources import DrawSource, SecretRandomness

STD = 1.5
SOURCES: dict[str, tuple[Callable[[], DrawSource], int]] = {
    "plain": (SecretRandomness, 1),
    "plain, four summed": (SecretRandomness, NUM_SUMMED),
    "secure, one normal": (SecureRandomness, 1),
    "secure": (SecureRandomness, NUM_SUMMED),
}
"""By name: the source of a step's generator, and how many normals are summed for a coordinate."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    num_coordinates: int = 11_000_000
    """Length of a draw; ResNet-18 has 11 million parameters."""
    repeats: int = 7
    """Timed rounds, one draw from each source."""
    json: bool = False
    """Print one JSON object and write no file."""
    output: Path = reports.RESULTS
    """Folder of the dated result file."""

    def __post_init__(self) -> None:
        for name in ("num_coordinates", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}")


def seconds_of_draw(name: str, num_coordinates: int) -> tuple[float, float]:
    """Returns the seconds of one draw, generator included: this thread's on a processor, and the clock's."""
    source, num_summed = SOURCES[name]
    noise = GaussianNoise(std=STD, num_summed=num_summed)
    clock, processor = time.perf_counter(), time.thread_time()
    noise.draw(num_coordinates, source().generator(0, "noise"))
    return time.thread_time() - processor, time.perf_counter() - clock


def measure(options: Options) -> dict[str, Any]:
    """Returns one row per source: medians, all rounds and ratios over the plain generator."""
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SOURCES}
    for name in SOURCES:
        seconds_of_draw(name, options.num_coordinates)
    for index in range(options.repeats):
        for name in list(SOURCES)[:: -1 if index % 2 else 1]:
            found[name].append(seconds_of_draw(name, options.num_coordinates))
        say(f"  round {index + 1} of {options.repeats}")
    rows: list[dict[str, Any]] = []
    for name, rounds in found.items():
        processor, clock = ([pair[i] for pair in rounds] for i in (0, 1))
        rows.append(
            {
                "source": name,
                "num_summed": SOURCES[name][1],
                "processor_seconds": statistics.median(processor),
                "clock_seconds": statistics.median(clock),
                "all_processor_seconds": processor,
                "all_clock_seconds": clock,
            }
        )
    for row in rows:
        for kind in ("processor", "clock"):
            row[f"{kind}_ratio"] = row[f"{kind}_seconds"] / rows[0][f"{kind}_seconds"]
    return {"num_coordinates": options.num_coordinates, "draws": rows}


def table(result: dict[str, Any]) -> str:
    """Returns the rows in Markdown."""
    columns = ["source", "normals summed", "processor s", "over plain", "clock s", "over plain"]
    lines = [
        [
            row["source"],
            row["num_summed"],
            reports.seconds_text(row["processor_seconds"]),
            f"{row['processor_ratio']:.2f}",
            reports.seconds_text(row["clock_seconds"]),
            f"{row['clock_ratio']:.2f}",
        ]
        for row in result["draws"]
    ]
    heading = f"One draw of {result['num_coordinates']:,} coordinates:"
    return f"{heading}\n\n{reports.markdown_table(columns, lines)}"


def main() -> int:
    """Measures all sources."""
    import tyro

    options = tyro.cli(Options, description=__doc__)
    facts = reports.about(device="cpu", threads=1)
    result = measure(options)
    if options.json:
        print(json.dumps({**facts, **result}))
        return 0
    print(table(result))
    title = "Cost of the cryptographic stream"
    files = reports.write("secure_noise", title, PAGE, facts, result, [table(result)], options.output)
    print("written: " + ", ".join(map(str, files)))
    return 0


PAGE = f"""
Seconds of one step's noise draw on one thread, median of several rounds in which all sources take turns in
one process. Plain is PCG64DXSM with numpy's ziggurat; secure is ChaCha20 under a fresh key with
{NUM_SUMMED} normals by Box and Muller summed for every coordinate. The rows between them show which part
costs what. In a training a long draw runs beside the gradients.
"""


if __name__ == "__main__":
    sys.exit(main())
