#!/usr/bin/env python
"""What a private step of an auto-encoder or a captioner costs over the ordinary one, in time and memory.

    python benchmarks/record_step.py --models mae-toy --json
    python benchmarks/record_step.py        # the toys and both ViT-B sizes, a file in benchmarks/results/

The private step is a training's own: views, one clipped gradient per record, noise, AdamW. The ordinary step
is of the same network, records, loss and optimizer, with one backward pass per microbatch. Each side runs at
its own fastest microbatch. Both are timed in turn in one process, the order turning round with every round;
the ratio is the median over rounds of the ratio within a round. Memory is the peak of a fresh process per
side (see `benchmarks/memory.py`), both at the private step's microbatch. Weights are random and records made
up, so nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import harness
from benchmarks.harness import Output, Page, in_turn, or_warning, ratio_of, say, seconds_of, side_text
from benchmarks.memory import peak_bytes
from benchmarks.record_steps import ORDINARY, RecordTask, build_step
from benchmarks.steps import OurStep, Step
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import exit_on_bad_input

MODELS = ("mae-toy", "cap-toy", "mae-base", "cap-base")
BATCH_SIZES = {"mae-toy": 512, "cap-toy": 256}
MICROBATCHES = {"mae-toy": (64, 128, 256, 512), "cap-toy": (32, 64, 128, 256)}
LARGE_BATCH, LARGE_MICROBATCHES = 64, (8, 16)


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """What to measure."""

    models: tuple[str, ...] = MODELS
    """Networks of dp_mae and dp_cap, each of them."""
    expected_batch_sizes: tuple[int, ...] = ()
    """B, records per step, exactly, a row each; 512 of mae-toy, 256 of cap-toy and 64 of the others unless
    given."""
    microbatches: tuple[int, ...] = ()
    """Records at once that are tried; a few by model unless given."""
    tie_embeddings: bool = False
    """Of captioners: one table for tokens read and predicted."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of both sides' passes."""
    threads: int = dataclasses.field(default_factory=harness.default_threads)
    """CPU threads."""
    repeats: int = 5
    """Timed rounds, one step of each side."""
    measure_memory: bool = True
    """Measure memory, too: two more steps of each side."""


def tasks(options: Options) -> list[RecordTask]:
    """Return what is measured."""
    return [
        RecordTask(
            model=model,
            expected_batch_size=size,
            tie_embeddings=options.tie_embeddings and model.startswith("cap"),
            device=options.device,
            precision=options.precision,
            threads=options.threads,
        )
        for model in options.models
        for size in options.expected_batch_sizes or (BATCH_SIZES.get(model, LARGE_BATCH),)
    ]


def fastest(side: str, options: Options, task: RecordTask) -> Step:
    """Return a side at the microbatch whose step is shortest, each tried twice after a warm-up."""
    seen = {}
    for size in options.microbatches or MICROBATCHES.get(task.model, LARGE_MICROBATCHES):
        size = min(size, task.expected_batch_size)
        gc.collect()
        step = build_step(side, task, size)
        seconds_of(step.take, task.device)
        seen[size] = min(seconds_of(step.take, task.device) for _ in range(2))
        say(f"  {side}: {size} records at once: {seen[size]:.3f} s")
    return build_step(side, task, min(seen, key=lambda size: seen[size]))


def measure(options: Options, task: RecordTask) -> dict[str, Any]:
    """Return one row: seconds, memory and microbatch of both sides, and their ratios."""
    steps = {side: fastest(side, options, task) for side in ("ours", ORDINARY)}
    ours = steps["ours"]
    assert isinstance(ours, OurStep)
    for step in steps.values():
        step.take()
    check, num_parameters = ours.check(), num_trainable(ours.run.encoder)
    times = in_turn(
        {side: partial(seconds_of, step.take, task.device) for side, step in steps.items()}, options.repeats
    )
    at_once = {side: step.views_per_microbatch for side, step in steps.items()}
    del steps, step, ours  # the measuring processes need the memory
    gc.collect()
    sides = {
        side: harness.side_row(
            times[side],
            _memory(options, side, task, at_once["ours"]),
            views,
            memory_views=at_once["ours"],
        )
        for side, views in at_once.items()
    }
    ratio, *ends = ratio_of(sides["ours"]["all_seconds"], sides[ORDINARY]["all_seconds"])
    return {
        **dataclasses.asdict(task),
        "image_shape": task.image_shape,
        "num_parameters": num_parameters,
        "time_ratio": ratio,
        "time_ratio_range": ends,
        "memory_ratio": harness.memory_ratio(sides["ours"], sides[ORDINARY]),
        **dataclasses.asdict(check),
        "num_layers_by_path": check.num_layers_by_path(),
        "sides": sides,
    }


def _memory(options: Options, side: str, task: RecordTask, views_per_microbatch: int) -> int | None:
    if not options.measure_memory:
        return None
    return or_warning(lambda: peak_bytes(side, task, views_per_microbatch))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    columns = ["network", "weights", "B", "private", "ordinary", "time", "memory", "error"]
    lines = [
        [
            row["model"] + ", tied" * row["tie_embeddings"],
            f"{row['num_parameters'] / 1e6:.1f} M",
            row["expected_batch_size"],
            *(side_text(row["sides"][side]) for side in ("ours", ORDINARY)),
            harness.with_spread(row["time_ratio"], row["time_ratio_range"]),
            harness.ratio_text(row["memory_ratio"]),
            f"{row['relative_error']:.0e}",
        ]
        for row in rows
    ]
    return harness.markdown_table(columns, lines)


def main() -> int:
    """Measure every row and write the table."""
    options = harness.read_options(Options, __doc__)
    facts = harness.about(device=options.device, threads=options.threads)
    name = "record_step" if options.models == MODELS else "record_step_" + "_".join(options.models)
    page = Page(name=name, title="Private step of auto-encoders and captioners", text=PAGE)
    rows: list[dict[str, Any]] = []
    for task in tasks(options):
        say(f"{task.model}, B = {task.expected_batch_size}")
        rows.append(measure(options, task))
        say(table(rows[-1:]))
        if not options.json:  # after every row, for a table takes long
            harness.write(page, facts, {"rows": rows}, [table(rows)], options.output)
    return harness.publish(page, options, facts, {"rows": rows}, [table(rows)])


PAGE = """
The private step of a training (views, one clipped gradient per record, noise, AdamW) over the ordinary step
of the same network, records, loss and optimizer, each at its own fastest microbatch ("at", in records).
Ratios are medians over rounds of the ratio within a round; both sides were timed in turn in one process.
Memory: peak resident memory of two steps in a fresh process less what was resident before the network was
built (on a GPU: peak allocated), both at the private step's microbatch; a training on a CPU keeps up to
256 MiB of what it has freed besides. `error`: relative error of the clipped sum against one exact backward
pass per record, with norms and sum in float64. Weights are random, and records made up.
"""


if __name__ == "__main__":
    exit_on_bad_input(main)
