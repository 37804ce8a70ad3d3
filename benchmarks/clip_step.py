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
from benchmarks.pair_steps import IN_GROUPS, ORDINARY, WHOLE_BATCH, PairTask, build_step, usual_microbatch
from benchmarks.steps import OurStep, Step
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import exit_on_bad_input


@dataclass(frozen=True, kw_only=True)
class Options(Output):
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
    threads: int = dataclasses.field(default_factory=harness.default_threads)
    """CPU threads."""
    views_per_microbatch: int | None = None
    """Images and texts at once, of the private step and in groups; what a training takes unless given."""
    repeats: int = 5
    """Timed rounds, one step of each side."""
    measure_memory: bool = True
    """Measure memory, too: two more steps of each side."""


def tasks(options: Options) -> list[PairTask]:
    """Return every N_a with every S."""
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
    """Return one row: seconds, memory and microbatch of every side, and the private step's ratios."""
    size = options.views_per_microbatch or usual_microbatch(task)
    size = min(size, task.expected_batch_size * task.num_views)
    gc.collect()
    steps: dict[str, Step] = {side: build_step(side, task, size) for side in ("ours", *ORDINARY)}
    ours = steps["ours"]
    assert isinstance(ours, OurStep)
    for side, step in steps.items():  # adapters are no longer zero after it
        seconds = seconds_of(step.take, task.device)
        say(f"  {side}: {step.views_per_microbatch} views at once, first step {seconds:.3f} s")
    check, num_parameters = ours.check(), num_trainable(ours.run.encoder)
    takes = {side: partial(seconds_of, step.take, task.device) for side, step in steps.items()}
    times = in_turn(takes, options.repeats)
    at_once = {side: step.views_per_microbatch for side, step in steps.items()}
    del steps, step, ours, takes  # the measuring processes need the memory
    gc.collect()
    sides = {
        side: harness.side_row(times[side], _memory(options, side, task, views), views)
        for side, views in at_once.items()
    }
    return {
        **dataclasses.asdict(task),
        "image_shape": task.image_shape,
        "views_per_record": task.num_views,
        "num_parameters": num_parameters,
        **_ratios(sides),
        **dataclasses.asdict(check),
        "num_layers_by_path": check.num_layers_by_path(),
        "sides": sides,
    }


def _ratios(sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The private step over each ordinary one: medians of the rounds' ratios, and their ends."""
    found: dict[str, Any] = {}
    ours = sides["ours"]
    for side in ORDINARY:
        found[f"time_over_{side}"], *ends = ratio_of(ours["all_seconds"], sides[side]["all_seconds"])
        found[f"time_over_{side}_range"] = ends
        found[f"memory_over_{side}"] = harness.memory_ratio(ours, sides[side])
    return found


def _memory(options: Options, side: str, task: PairTask, views_per_microbatch: int) -> int | None:
    if not options.measure_memory:
        return None
    return or_warning(lambda: peak_bytes(side, task, views_per_microbatch))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    columns = ["N_a", "S", "private", "whole batch", "in groups"]
    columns += ["time, memory / whole batch", "time, memory / in groups", "error"]
    lines = [
        [
            row["num_augmentations"],
            row["group_size"],
            *(side_text(row["sides"][side]) for side in ("ours", WHOLE_BATCH, IN_GROUPS)),
            *(_ratio_text(row, side) for side in ORDINARY),
            f"{row['relative_error']:.0e}",
        ]
        for row in rows
    ]
    return harness.markdown_table(columns, lines)


def _ratio_text(row: dict[str, Any], side: str) -> str:
    time = harness.with_spread(row[f"time_over_{side}"], row[f"time_over_{side}_range"])
    return f"{time}, {harness.ratio_text(row[f'memory_over_{side}'])}"


def main() -> int:
    """Measure every row and write the table."""
    options = harness.read_options(Options, __doc__)
    chosen = tasks(options)
    facts = harness.about(device=options.device, threads=options.threads)
    size = options.views_per_microbatch
    name = f"clip_step_{Path(options.model).stem}" + (f"_{size}_views" if size else "")
    page = Page(name=name, title=f"Private step of {options.model}", text=PAGE)
    rows: list[dict[str, Any]] = []
    for task in chosen:
        say(f"{task.model}, N_a = {task.num_augmentations}, S = {task.group_size}")
        rows.append(measure(options, task))
        say(table(rows[-1:]))
        if not options.json:  # after every row, for a table takes long
            harness.write(page, facts, {"rows": rows}, [table(rows)], options.output)
    return harness.publish(page, options, facts, {"rows": rows}, [table(rows)])


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
    exit_on_bad_input(main)
