#!/usr/bin/env python
"""What a private step of a CLIP model with LoRA costs over the ordinary one, in time and memory.

    python benchmarks/clip_step.py --group-sizes 2 --augmentations 0 --json
    python benchmarks/clip_step.py           # S = 2 and 16, N_a = 0 and 1, with a file in benchmarks/results/
    python benchmarks/clip_step.py --views-per-microbatch 32
    python benchmarks/clip_step.py --model clip-tiny --expected-batch-size 32 --repeats 1 --json

The private step is a training's own: views, clipped sum in its microbatches, noise, Adam. Two ordinary
steps of the same network, views and optimizer are measured against it: *whole batch*, symmetric InfoNCE among
all B pairs in one forward and one backward pass, which is how CLIP is trained; and *in groups*, the private
step's loss in the private step's microbatches, which needs less memory. Sides are timed in turn in one
process, the order turning round with every round; a ratio is the median over rounds of the ratio within a
round, for seconds do not survive a noisy machine. Memory is the peak of a fresh process per side (see
`benchmarks/memory.py`). Weights are random, so nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import reports
from benchmarks.memory import MeasurementError, peak_bytes
from benchmarks.pair_steps import IN_GROUPS, ORDINARY, WHOLE_BATCH, PairTask, build_step, usual_microbatch
from benchmarks.reports import say, seconds_text
from benchmarks.steps import Check, OurStep, Step, seconds_of
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError

Seconds = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    model: str = "ViT-B-32"
    """CLIP model: open_clip's name, or clip-tiny."""
    group_sizes: tuple[int, ...] = (2, 16)
    """S, each of them."""
    augmentations: tuple[int, ...] = (0, 1)
    """N_a, each of them."""
    expected_batch_size: int = 64
    """B, pairs per step, exactly."""
    lora_rank: int = 16
    """Rank of the adapters on queries and values of both towers; 0 trains every weight."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure."""
    threads: int = dataclasses.field(default_factory=reports.default_threads)
    """CPU threads."""
    views_per_microbatch: int | None = None
    """Images and texts at once, of the private step and in groups; what a training takes unless given."""
    repeats: int = 5
    """Timed rounds, one step of each side."""
    measure_memory: bool = True
    """Measure memory, too: two more steps of each side."""
    json: bool = False
    """Print one JSON object and write no file."""
    output: Path = reports.RESULTS
    """Folder of the dated result file."""


def tasks(options: Options) -> list[PairTask]:
    """Returns every N_a with every S."""
    return [
        PairTask(
            model=options.model,
            group_size=size,
            expected_batch_size=options.expected_batch_size,
            num_augmentations=copies,
            lora_rank=options.lora_rank,
            device=options.device,
            threads=options.threads,
        )
        for copies in options.augmentations
        for size in options.group_sizes
    ]


def measure(options: Options, task: PairTask) -> dict[str, Any]:
    """Returns one row: seconds, memory and microbatch of every side, and the private step's ratios."""
    size = options.views_per_microbatch or usual_microbatch(task)
    size = min(size, task.expected_batch_size * task.num_views)
    gc.collect()
    steps: dict[str, Step] = {side: build_step(side, task, size) for side in ("ours", *ORDINARY)}
    ours = steps["ours"]
    assert isinstance(ours, OurStep)
    for side, step in steps.items():  # adapters are no longer zero after it
        seconds = seconds_of(step, task.device)
        say(f"  {side}: {step.views_per_microbatch} views at once, first step {seconds:.3f} s")
    check, num_parameters = ours.check(), num_trainable(ours.run.encoder)
    times = alternate(steps, options.repeats, task.device)
    at_once = {side: step.views_per_microbatch for side, step in steps.items()}
    del steps, step, ours  # the measuring processes need the memory
    gc.collect()
    sides: dict[str, dict[str, Any]] = {
        side: {
            "seconds": statistics.median(times[side]),
            "all_seconds": times[side],
            "memory_bytes": _memory(side, task, views) if options.measure_memory else None,
            "views_per_microbatch": views,
        }
        for side, views in at_once.items()
    }
    return {
        **dataclasses.asdict(task),
        "image_shape": task.image_shape,
        "views_per_record": task.num_views,
        "num_parameters": num_parameters,
        **_ratios(sides),
        **dataclasses.asdict(check),
        "num_layers_by_path": _count(check),
        "sides": sides,
    }


def alternate(steps: dict[str, Step], repeats: int, device: str) -> Seconds:
    """Returns the seconds of each side's steps, taken in turn."""
    times: Seconds = {side: [] for side in steps}
    for index in range(repeats):
        for side in list(steps)[:: -1 if index % 2 else 1]:
            times[side].append(seconds_of(steps[side], device))
    return times


def _ratios(sides: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """The private step over each ordinary one: medians of the rounds' ratios."""
    found: dict[str, float | None] = {}
    ours = sides["ours"]
    for side in ORDINARY:
        plain = sides[side]
        rounds = zip(ours["all_seconds"], plain["all_seconds"], strict=True)
        found[f"time_over_{side}"] = statistics.median(a / b for a, b in rounds)
        known = ours["memory_bytes"] and plain["memory_bytes"]
        found[f"memory_over_{side}"] = ours["memory_bytes"] / plain["memory_bytes"] if known else None
    return found


def _memory(side: str, task: PairTask, views_per_microbatch: int) -> int | None:
    try:
        return peak_bytes(side, task, views_per_microbatch)
    except MeasurementError as error:
        say(f"warning: {error}")
        return None


def _count(check: Check) -> dict[str, int]:
    """Layers by how their norm was taken."""
    ways = list(check.paths.values())
    return {way: ways.count(way) for way in sorted(set(ways))}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    columns = ["N_a", "S", "private", "whole batch", "in groups"]
    columns += ["time, memory / whole batch", "time, memory / in groups", "error"]
    lines = [
        [
            row["num_augmentations"],
            row["group_size"],
            *(_side_text(row["sides"][side]) for side in ("ours", WHOLE_BATCH, IN_GROUPS)),
            *(_ratio_text(row, side) for side in ORDINARY),
            f"{row['max_relative_error']:.0e}",
        ]
        for row in rows
    ]
    return reports.markdown_table(columns, lines)


def _side_text(side: dict[str, Any]) -> str:
    memory = f"{side['memory_bytes'] / 2**20:.0f} MiB" if side["memory_bytes"] else "?"
    return f"{seconds_text(side['seconds'])} s, {memory} at {side['views_per_microbatch']}"


def _ratio_text(row: dict[str, Any], side: str) -> str:
    memory = row[f"memory_over_{side}"]
    return f"**{row[f'time_over_{side}']:.2f}**, {'?' if memory is None else f'{memory:.2f}'}"


def main() -> int:
    """Measures every row and writes the table."""
    import tyro

    options = tyro.cli(Options, description=__doc__)
    chosen = tasks(options)
    facts = reports.about(device=options.device, threads=options.threads)
    size = options.views_per_microbatch
    name, rows = f"clip_step_{Path(options.model).stem}" + (f"_{size}_views" if size else ""), []
    for task in chosen:
        say(f"{task.model}, N_a = {task.num_augmentations}, S = {task.group_size}")
        rows.append(measure(options, task))
        say(table(rows[-1:]))
        if not options.json:  # after every row, for a table takes long
            files = reports.write(
                name, f"Private step of {options.model}", PAGE, facts, {"rows": rows}, [table(rows)],
                options.output,
            )  # fmt: skip
    if options.json:
        print(json.dumps({**facts, "rows": rows}))
    else:
        print(table(rows))
        print("written: " + ", ".join(map(str, files)))
    return 0


PAGE = """
The private step of a training (views, clipped sum, noise, Adam) over two ordinary steps of the same
network, views and optimizer, LoRA on queries and values of both towers unless the command says otherwise.
`whole batch`: symmetric InfoNCE among all pairs of the step, one forward and one backward pass. `in groups`:
the private step's loss without clipping and noise, in the private step's microbatches. "At": views in a
microbatch, images and texts. Ratios are medians over rounds of the ratio within a round; sides were timed
in turn in one process. Memory: peak resident memory of two steps in a fresh process less what was resident
before the network was built (on a GPU: peak allocated). `error`: relative error of the clipped sum against
one exact backward pass per group, with norms and sum in float64. Weights are random, and pairs generated.
"""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
