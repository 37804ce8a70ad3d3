#!/usr/bin/env python
"""How the cost of a record grows with the batch B and with the group size S.

    python benchmarks/growth.py                      # B from 256 to 16,384, S from 2 to 256, a dated file
    python benchmarks/growth.py --model resnet18     # B up to 1,024
    python benchmarks/growth.py --batch-sizes 256 1024 --group-sizes --json

All sizes of an axis are timed in turn in one process; seconds per record are medians, and are divided by
those of the smallest and of the reference size. One microbatch is used throughout an axis, because it, and
not B, must decide the memory. Memory is the peak of a fresh process per size (`benchmarks/memory.py`).
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import harness
from benchmarks.harness import Output, Page, in_turn, say, seconds_of
from benchmarks.memory import peak_bytes
from benchmarks.steps import OurStep, Task
from dpgcl_core.errors import exit_on_bad_input

BATCH_SIZES = {
    "tiny_cnn": (256, 1024, 4096, 16_384),
    "small_cnn": (256, 1024, 4096, 16_384),
    "wide_cnn": (256, 1024, 4096, 16_384),
    "resnet18": (64, 256, 1024),
    "vit_b_32_lora": (16, 64, 256),
}
GROUP_SIZES = {
    "tiny_cnn": (2, 8, 32, 64, 128, 256),
    "small_cnn": (2, 8, 32, 64, 128, 256),
    "wide_cnn": (2, 8, 32, 64, 128, 256),
    "resnet18": (2, 8, 32, 64),
    "vit_b_32_lora": (2, 4, 16),
}
REFERENCE_BATCH = 1024
MICROBATCH = {"tiny_cnn": 384, "small_cnn": 384, "wide_cnn": 384, "resnet18": 96, "vit_b_32_lora": 48}
"""Views passed at once; a group of more views is passed whole."""


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """The axes to measure."""

    model: Literal["small_cnn", "tiny_cnn", "wide_cnn", "resnet18", "vit_b_32_lora"] = "small_cnn"
    """The network."""
    batch_sizes: tuple[int, ...] | None = None
    """Values of B; a range by model unless given, none if given empty."""
    group_sizes: tuple[int, ...] | None = None
    """Values of S; a range by model unless given, none if given empty."""
    group_size: int = 8
    """S on the axis of B."""
    expected_batch_size: int | None = None
    """B on the axis of S; 1,024 or the largest of the model's range unless given."""
    views_per_microbatch: int | None = None
    """Views passed at once; by model unless given."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure."""
    threads: int = dataclasses.field(default_factory=harness.default_threads)
    """CPU threads."""
    image_size: int | None = None
    """Pixels of the square images; by model unless given."""
    repeats: int = 3
    """Timed rounds, one step of each size."""


def axis(options: Options, name: str, tasks: Sequence[Task], reference: int) -> list[dict[str, Any]]:
    """Return one row per task: seconds per record and peak memory, and their ratios along the axis.

    Args:
      options: the user's.
      name: the field of `Task` that grows.
      tasks: from small to large.
      reference: the size, besides the smallest, by which the rows are divided if it is among them.
    """
    microbatch = options.views_per_microbatch or MICROBATCH[options.model]
    times = _seconds_per_record(tasks, microbatch, options.repeats)
    rows: list[dict[str, Any]] = []
    for task, seconds in zip(tasks, times, strict=True):
        memory = peak_bytes("ours", task, microbatch)
        row = {**dataclasses.asdict(task), "views_per_microbatch": microbatch}
        row |= {"seconds_per_record": statistics.median(seconds), "all_seconds_per_record": seconds}
        rows.append(row | {"memory_bytes": memory})
        say(f"  {name} = {row[name]}: {row['seconds_per_record']:.2e} s a record, {memory / 2**20:.0f} MiB")
    against = {"smallest": rows[0]} | {str(reference): row for row in rows if row[name] == reference}
    for measured in ("seconds_per_record", "memory_bytes"):
        for label, other in against.items():
            for row in rows:
                row[f"{measured}_over_{label}"] = row[measured] / other[measured]
    return rows


def _seconds_per_record(tasks: Sequence[Task], microbatch: int, repeats: int) -> list[list[float]]:
    """Return each task's seconds per record in each round."""
    steps = [OurStep(task, microbatch) for task in tasks]
    for step in steps:
        step.take()

    def seconds_per_record(step: OurStep) -> float:
        return seconds_of(step.take, step.task.device) / step.task.expected_batch_size

    sides = {index: partial(seconds_per_record, step) for index, step in enumerate(steps)}
    return list(in_turn(sides, repeats).values())


def measure(options: Options) -> dict[str, Any]:
    """Return the rows of both axes."""
    model = options.model
    batches = BATCH_SIZES[model] if options.batch_sizes is None else options.batch_sizes
    sizes = GROUP_SIZES[model] if options.group_sizes is None else options.group_sizes
    batch = options.expected_batch_size or min(REFERENCE_BATCH, max(batches or BATCH_SIZES[model]))

    def task(batch_size: int, group_size: int) -> Task:
        return Task(
            model=model,
            group_size=group_size,
            expected_batch_size=batch_size,
            threads=options.threads,
            image_size=options.image_size,
            device=options.device,
        )

    result: dict[str, Any] = {"model": model, "by_batch_size": [], "by_group_size": []}
    if batches:
        tasks = [task(size, options.group_size) for size in sorted(batches)]
        result["by_batch_size"] = axis(options, "expected_batch_size", tasks, REFERENCE_BATCH)
    if sizes:
        tasks = [task(batch, size) for size in sorted(sizes)]
        result["by_group_size"] = axis(options, "group_size", tasks, tasks[0].group_size)
    return result


def tables(result: dict[str, Any]) -> list[str]:
    """Return one Markdown table per axis that was measured."""
    found = []
    for key, name, short in (
        ("by_batch_size", "expected_batch_size", "B"),
        ("by_group_size", "group_size", "S"),
    ):
        rows = result[key]
        if not rows:
            continue
        columns = [short, "µs per record", "over the smallest", "peak memory", "over the smallest"]
        reference = f"seconds_per_record_over_{REFERENCE_BATCH}"
        if reference in rows[0]:
            columns.append(f"µs over B = {REFERENCE_BATCH}")
        lines = [
            [
                row[name],
                f"{1e6 * row['seconds_per_record']:.0f}",
                f"{row['seconds_per_record_over_smallest']:.2f}",
                f"{row['memory_bytes'] / 2**20:.0f} MiB",
                f"{row['memory_bytes_over_smallest']:.2f}",
                *([f"{row[reference]:.2f}"] if reference in row else []),
            ]
            for row in rows
        ]
        fixed = f"S = {rows[0]['group_size']}"
        if short == "S":
            fixed = f"B = {rows[0]['expected_batch_size']}"
        heading = f"{result['model']}, {fixed}, {rows[0]['views_per_microbatch']} views at once:"
        found.append(f"{heading}\n\n{harness.markdown_table(columns, lines)}")
    return found


def main() -> int:
    """Measure both axes."""
    options = harness.read_options(Options, __doc__)
    facts = harness.about(device=options.device, threads=options.threads)
    result = measure(options)
    page = Page(name=f"growth-{options.model}", title="Growth of a step's cost with B and S", text=PAGE)
    return harness.publish(page, options, facts, result, tables(result))


PAGE = """
Seconds per record of a whole private step (medians; all sizes of an axis timed in turn in one process), and
the peak resident memory of two steps in a fresh process, less what was resident before the network was built.
"""


if __name__ == "__main__":
    exit_on_bad_input(main)
