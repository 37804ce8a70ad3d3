#!/usr/bin/env python
"""Measure the cost of a private step relative to the same ordinary step, in time and memory.

    python benchmarks/clipping.py --models resnet18 --group-sizes 4 --expected-batch-sizes 64 --json
    python benchmarks/clipping.py --models small_cnn --threads 1
    python benchmarks/clipping.py --models ViT-B-32 --group-sizes 2 16 --num-augmentations 1
    python benchmarks/clipping.py --models mae-toy cap-toy
    python benchmarks/clipping.py            # the whole table, with a dated file in benchmarks/results/

The private step is the step of a training: views, clipped sum in microbatches, noise, optimizer. The ordinary
step has the same network, records, views, loss and optimizer, with one ordinary backward pass per microbatch
and, for images, the faster of two memory layouts. CLIP models have a further side, *whole batch*: symmetric
InfoNCE among all B pairs in one pass, which is how CLIP is trained. Every side takes exactly B records per
step and runs at its own fastest microbatch, which is found by a search. The sides are then timed in turn in
one process, because ratios within a run survive a noisy machine and seconds do not. Memory is the peak of a
fresh process per side (`benchmarks/memory.py`). The non-private step is measured at the private step's
microbatch, since both could use a smaller one.

To see how cost grows with B or S, measure several of them at one microbatch and compare the microseconds:

    python benchmarks/clipping.py --models small_cnn --group-sizes 8 --microbatches 384 \\
        --expected-batch-sizes 256 1024 4096 16384
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
from benchmarks.harness import Output, Page, in_turn, ratio_text, seconds_of, side_text
from benchmarks.memory import peak_bytes
from benchmarks.steps import (
    MICROBATCHES,
    NON_PRIVATE,
    OURS,
    WHOLE_BATCH,
    ImageTask,
    OurStep,
    PairTask,
    RecordTask,
    Step,
    Task,
    build_step,
    task_class,
)
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import exit_on_bad_input

BATCH_SIZES: dict[str, tuple[int, ...]] = {
    "tiny_cnn": (96, 1024),
    "small_cnn": (96, 1024),
    "wide_cnn": (96, 1024),
    "resnet18": (64, 128),
    "vit_b_32_lora": (16, 64),
    "ViT-B-32": (64,),
    "mae-toy": (512,),
    "cap-toy": (256,),
    "mae-base": (64,),
    "cap-base": (64,),
}
"""The batch sizes B of each network in the whole table; each is measured with every S up to B."""

GROUP_SIZES = (2, 4, 8, 16, 64)
LARGE = ("resnet18", "vit_b_32_lora", "ViT-B-32", "mae-base", "cap-base")
"""Networks whose steps take many seconds: 3 timed rounds instead of 5."""

WORSE_BY = 1.1
"""The search stops at two microbatches in a row that are slower than the best so far by this factor."""

AS_FAST = 1.03
"""On every side, the smallest microbatch within this factor of the best is used: it needs less memory."""

SHORT_SECONDS = 1.0
LONG_SECONDS = 5.0
"""A warm-up step of this length suffices to judge whether its microbatch is far from the best."""


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """What to measure: every network with every B and every S."""

    models: tuple[str, ...] = tuple(BATCH_SIZES)
    """Networks: image encoders, CLIP models, masked auto-encoders and captioners."""
    group_sizes: tuple[int, ...] = GROUP_SIZES
    """Group sizes S up to B; always 1 for networks whose records are clipped separately."""
    expected_batch_sizes: tuple[int, ...] = ()
    """B, the exact number of records per step; the default depends on the network."""
    num_augmentations: int = 1
    """N_a, augmented copies of both sides of a pair; images always have one."""
    lora_rank: int = 16
    """Rank of a CLIP model's adapters; 0 trains all weights."""
    tie_embeddings: bool = False
    """Captioners share one embedding table between input and output tokens."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to measure on."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward and backward pass."""
    threads: int = dataclasses.field(default_factory=harness.default_threads)
    """CPU threads."""
    microbatches: tuple[int, ...] = ()
    """Views per microbatch that the search tries; the default range depends on the network."""
    repeats: int | None = None
    """Timed rounds of one step per side; by default 5, or 3 for large networks."""
    measure_memory: bool = True
    """Also measure memory, with two more steps of each side."""


def tasks(options: Options) -> list[Task]:
    """Return the tasks of the options, one per row.

    Raises:
      ConfigError: there is no such network.
    """
    all_tasks: list[Task] = []
    for model in options.models:
        kind = task_class(model)
        settings: dict[str, Any] = {}
        if kind is PairTask:
            settings = {"num_augmentations": options.num_augmentations, "lora_rank": options.lora_rank}
        if kind is RecordTask:
            settings = {"tie_embeddings": options.tie_embeddings and model.startswith("cap")}
        for batch in options.expected_batch_sizes or BATCH_SIZES.get(model, (64,)):
            sizes = (1,) if kind is RecordTask else options.group_sizes
            all_tasks += [
                kind(
                    model=model,
                    group_size=size,
                    expected_batch_size=batch,
                    threads=options.threads,
                    device=options.device,
                    precision=options.precision,
                    **settings,
                )
                for size in sizes
                if size <= batch or len(sizes) == 1
            ]
    return all_tasks


def measure(options: Options, task: Task) -> dict[str, Any]:
    """Return one row: times, memory and error of every side, and their ratios over non-private."""
    our_step, _ = fastest(OURS, options, task)
    assert isinstance(our_step, OurStep)
    check, num_parameters = our_step.check(), num_trainable(our_step.run.encoder)
    plain = fastest(NON_PRIVATE, options, task)
    if options.device == "cpu" and isinstance(task, ImageTask):
        plain = min(plain, fastest(NON_PRIVATE, options, task, channels_last=True), key=lambda p: p[1])
    steps: dict[str, Step] = {OURS: our_step, NON_PRIVATE: plain[0]}
    for side in task.sides[2:]:
        steps[side], _ = fastest(side, options, task)
    takes = {side: partial(seconds_of, step.take, task.device) for side, step in steps.items()}
    times = in_turn(takes, options.repeats or (3 if task.model in LARGE else 5))
    channels_last = bool(getattr(plain[0], "channels_last", False))
    at_once = {side: step.views_per_microbatch for side, step in steps.items()}
    del steps, takes, our_step, plain  # the measuring processes need the memory
    gc.collect()
    sides: dict[str, dict[str, Any]] = {}
    for side, views in at_once.items():
        memory_views = at_once[OURS] if side == NON_PRIVATE else views
        memory = _memory(options, side, task, memory_views, channels_last and side == NON_PRIVATE)
        sides[side] = harness.side_row(times[side], memory, views, memory_views=memory_views)
    sides[NON_PRIVATE]["channels_last"] = channels_last
    return {
        **dataclasses.asdict(task),
        "image_shape": task.image_shape,
        "views_per_record": task.num_views,
        "num_parameters": num_parameters,
        **_ratios(sides[OURS], sides[NON_PRIVATE]),
        "over": {side: _ratios(sides[OURS], row) for side, row in sides.items() if side != OURS},
        **dataclasses.asdict(check),
        "sides": sides,
    }


def _ratios(side: dict[str, Any], other_side: dict[str, Any]) -> dict[str, Any]:
    """Return ratios of one side to another: time (median and range over the rounds) and memory."""
    ratio, *ends = harness.ratio_of(side["all_seconds"], other_side["all_seconds"])
    memory = harness.memory_ratio(side, other_side)
    return {"time_ratio": ratio, "time_ratio_range": ends, "memory_ratio": memory}


def _memory(options: Options, side: str, task: Task, views: int, channels_last: bool) -> int | None:
    if not options.measure_memory:
        return None
    try:
        return peak_bytes(side, task, views, channels_last=channels_last)
    except harness.MeasurementError as error:
        harness.print_line(f"warning: {error}")
        return None


def fastest(side: str, options: Options, task: Task, *, channels_last: bool = False) -> tuple[Step, float]:
    """Return a side at its fastest microbatch, warmed up, and the seconds of its best step.

    Sizes are tried from small to large, until two in a row are clearly slower than the best so far. For short
    steps all sizes are tried a second time, so that a busy moment of the machine does not decide.
    """
    sizes = candidates(options, task)
    if side == WHOLE_BATCH:
        sizes = sizes[-1:]  # it has only one size
    seconds_by_size: dict[int, float] = {}
    for is_second in (False, True):
        num_worse = 0
        for size in sizes:
            gc.collect()  # hooks and modules form cycles, which keep the last candidate alive
            step = build_step(side, task, size, channels_last=channels_last)
            seconds = _best_of_few(step, task, min(seconds_by_size.values(), default=None))
            harness.print_line(
                f"  {side}: {size} views at once{', channels last' * channels_last}: {seconds:.3f} s"
            )
            seconds_by_size[size] = min(seconds, seconds_by_size.get(size, seconds))
            num_worse = num_worse + 1 if seconds > WORSE_BY * min(seconds_by_size.values()) else 0
            if num_worse == 2 and not is_second:
                break
        if len(sizes) == 1 or min(seconds_by_size.values()) > SHORT_SECONDS:
            break
    best = min(
        size
        for size, seconds in seconds_by_size.items()
        if seconds <= AS_FAST * min(seconds_by_size.values())
    )
    step = build_step(side, task, best, channels_last=channels_last)
    seconds_of(step.take, task.device)
    return step, seconds_by_size[best]


def _best_of_few(step: Step, task: Task, best: float | None) -> float:
    """Return the shortest of a few steps after a warm-up; long steps are taken fewer times."""
    warm_up = seconds_of(step.take, task.device)
    if best and warm_up > max(LONG_SECONDS, 1.5 * best):
        return warm_up
    times = [seconds_of(step.take, task.device)]
    while sum(times) < SHORT_SECONDS and len(times) < 4:
        times.append(seconds_of(step.take, task.device))
    return min(times)


def candidates(options: Options, task: Task) -> list[int]:
    """Return the microbatches to try, one for each number of groups."""
    sizes = options.microbatches or MICROBATCHES.get(task.model, ())
    if not sizes:
        return [task.usual_microbatch()]
    if not options.microbatches and task.device == "cuda":
        sizes = tuple(4 * size for size in sizes)
    most = task.expected_batch_size * task.num_views
    return list({task.groups_at_once(min(size, most)): min(size, most) for size in sorted(sizes)}.values())


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    has_pairs = any(WHOLE_BATCH in row["sides"] for row in rows)
    columns = ["network", "S", "B", "ours", "non-private", "time", "memory", "µs per record", "error"]
    lines = [
        [
            row["model"],
            row["group_size"],
            row["expected_batch_size"],
            side_text(row["sides"][OURS]),
            side_text(row["sides"][NON_PRIVATE]),
            harness.with_spread(row["time_ratio"], row["time_ratio_range"]),
            ratio_text(row["memory_ratio"]),
            f"{1e6 * row['sides'][OURS]['seconds'] / row['expected_batch_size']:.0f}",
            f"{row['relative_error']:.0e}",
            *([_text_over_whole_batch(row)] if has_pairs else []),
        ]
        for row in rows
    ]
    return harness.markdown_table([*columns, *(["relative to the whole batch"] if has_pairs else [])], lines)


def _text_over_whole_batch(row: dict[str, Any]) -> str:
    if WHOLE_BATCH not in row["over"]:
        return ""
    ratios = row["over"][WHOLE_BATCH]
    time = harness.with_spread(ratios["time_ratio"], ratios["time_ratio_range"])
    return f"{time}, memory {ratio_text(ratios['memory_ratio'])}"


def main() -> int:
    """Measure every row and write the table."""
    options = harness.read_options(Options, __doc__)
    all_tasks = tasks(options)
    name = "clipping" if options.models == Options.models else "clipping_" + "_".join(options.models)
    page = Page(name=name.replace("/", "-"), title="Private relative to non-private step", text=PAGE)
    facts = harness.about(device=options.device, threads=options.threads)
    rows: list[dict[str, Any]] = []
    for task in all_tasks:
        harness.print_line(f"{task.model}, S = {task.group_size}, B = {task.expected_batch_size}")
        rows.append(measure(options, task))
        harness.print_line(table(rows[-1:]))
        if not options.json:  # after every row, because a table takes hours
            harness.write(page, facts, {"rows": rows}, [table(rows)], options.output)
    return harness.publish(page, options, facts, {"rows": rows}, [table(rows)])


PAGE = """
Time and memory are ratios to the non-private step, which has the same network, records, views, loss and
optimizer, and one ordinary backward pass per microbatch. Each side runs at its own fastest microbatch ("at"
that many views; both sides of a pair count). Ratios are medians over rounds of the ratio within a round; the
sides were timed in turn in one process. `whole batch` is ordinary CLIP: symmetric InfoNCE among all pairs of
the step in one pass. `error` is the relative error of the clipped sum, compared with one exact backward pass
per group with norms and sum in float64. Memory is the peak resident memory of two steps in a fresh process,
minus the memory resident before the network was built (on a GPU: peak allocated memory). The non-private
step's memory is measured at the private step's microbatch. A training on a CPU may keep up to 256 MiB more of
freed memory. Weights are random, and records are synthetic.
"""


if __name__ == "__main__":
    exit_on_bad_input(main)
