#!/usr/bin/env python
"""What a private step costs over the same non-private step, in time and memory, side by side in one run.

    python benchmarks/clipping.py --model small_cnn --group-size 2 --expected-batch-size 512 --json
    python benchmarks/clipping.py --model resnet18 --group-size 4 --expected-batch-size 64 --others loop vmap
    python benchmarks/clipping.py            # the whole table, with a dated file in benchmarks/results/

"Non-private" is the same network, views and group loss, one ordinary backward pass per microbatch and an
optimizer step, written as a plain loop, with images in the faster of two memory layouts. Every side takes
exactly B records in a step and runs at its own fastest microbatch, found by a search. The sides are then
timed in turn in one process, and their medians divided: a ratio of one run survives a noisy machine,
seconds do not. Memory is the peak of a fresh process per side (see `benchmarks/memory.py`), of the
non-private step at the private one's microbatch: either could take a smaller one.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import harness
from benchmarks.engines import ENGINES, PER_VIEW, EngineStep, build_step, gradient_bytes
from benchmarks.harness import Output, Page, in_turn, or_warning, ratio_text, say, seconds_of, side_text
from benchmarks.memory import peak_bytes
from benchmarks.steps import MICROBATCHES, Check, OurStep, Step, Task
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError, exit_on_bad_input

Engine = Literal["loop", "vmap", "opacus", "opacus_ghost"]
Model = Literal["small_cnn", "tiny_cnn", "wide_cnn", "resnet18", "vit_b_32_lora"]
GROUP_SIZES = (2, 4, 8, 16, 64)
BATCH_SIZES: dict[str, tuple[int, ...]] = {
    "tiny_cnn": (96, 1024),
    "small_cnn": (96, 1024),
    "wide_cnn": (96, 1024),
    "resnet18": (64, 128),
    "vit_b_32_lora": (16, 64),
}
"""The whole table: every model with each of its B and every S that fits into it."""

FEWER_REPEATS = {"resnet18": 3, "vit_b_32_lora": 3}
"""Timed rounds of networks whose step takes many seconds."""

WORSE_BY = 1.1
"""The search stops at two microbatches in a row that are slower than the best so far by this factor."""

AS_FAST = 1.03
"""Of microbatches this close to the best the smallest is taken, for every side: it needs less memory."""

SHORT_SECONDS = 1.0
LONG_SECONDS = 5.0
"""A warm-up step as long as this already tells whether its microbatch is far from the best."""


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """One measurement, or the whole table."""

    model: Model | None = None
    """The network; every network of the table unless given."""
    group_size: int | None = None
    """S; every S of the table unless given."""
    expected_batch_size: int | None = None
    """B, records per step, exactly; every B of the table unless given."""
    others: tuple[Engine, ...] = ()
    """Other engines to add to a row; the table of all networks has them all."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the forward and backward pass of ours and of non-private; the others stay in float32."""
    threads: int = dataclasses.field(default_factory=harness.default_threads)
    """CPU threads."""
    image_size: int | None = None
    """Pixels of the square images; 28 for the small networks, 32 for resnet18, 224 for the transformer."""
    microbatches: tuple[int, ...] = ()
    """Views passed at once that the search tries; a range by model unless given."""
    repeats: int | None = None
    """Timed rounds, one step of each side; 5, or 3 for the large networks."""
    max_seconds: float = 120.0
    """Another engine whose step would take longer is not run."""
    max_gigabytes: float = 6.0
    """Another engine whose separate gradients would take more memory is not run."""


def measure(options: Options, task: Task, others: Sequence[str]) -> dict[str, Any]:
    """Return one row: times, memory and error of every side, and their ratios over non-private."""
    ours, _ = fastest("ours", options, task)
    assert isinstance(ours, OurStep)
    check = ours.check()
    num_parameters = num_trainable(ours.run.encoder)
    plain = fastest("non_private", options, task)
    if options.device == "cpu":
        plain = min(plain, fastest("non_private", options, task, channels_last=True), key=lambda p: p[1])
    steps: dict[str, Step] = {"ours": ours, "non_private": plain[0]}
    not_run: dict[str, str] = {}
    for name in others:
        reason = infeasible(name, options, task, num_parameters)
        if reason:
            not_run[name] = reason
        else:
            steps[name], _ = fastest(name, options, task, num_parameters=num_parameters)
    takes = {name: partial(seconds_of, step.take, task.device) for name, step in steps.items()}
    times = in_turn(takes, options.repeats or FEWER_REPEATS.get(task.model, 5))
    layouts = {"non_private": bool(getattr(plain[0], "channels_last", False))}
    sizes = {name: step.views_per_microbatch for name, step in steps.items()}
    del steps, takes, ours, plain  # the measuring processes need the memory
    sides: dict[str, dict[str, Any]] = {}
    for name, size in sizes.items():
        views = sizes["ours"] if name == "non_private" else size
        memory = _memory(name, task, views, layouts.get(name, False))
        sides[name] = harness.side_row(times[name], memory, size, memory_views=views)
    sides["non_private"]["channels_last"] = layouts["non_private"]
    for name, side in sides.items():
        if name != "non_private":
            side |= _ratios(side, sides["non_private"])
    if "opacus_ghost" in sides:
        sides["opacus_ghost"]["note"] = PER_VIEW
    sides |= {name: {"not_run": reason} for name, reason in not_run.items()}
    return _row(task, num_parameters, sides, check)


def _row(task: Task, num_parameters: int, sides: dict[str, dict[str, Any]], check: Check) -> dict[str, Any]:
    ours, plain = sides["ours"], sides["non_private"]
    return {
        **dataclasses.asdict(task),
        "image_shape": task.image_shape,
        "views_per_record": task.num_views,
        "num_parameters": num_parameters,
        "time_ratio": ours["time_ratio"],
        "time_ratio_range": ours["time_ratio_range"],
        "memory_ratio": ours["memory_ratio"],
        **dataclasses.asdict(check),
        "ours_seconds": ours["seconds"],
        "non_private_seconds": plain["seconds"],
        "ours_memory_bytes": ours["memory_bytes"],
        "non_private_memory_bytes": plain["memory_bytes"],
        "ours_views_per_microbatch": ours["views_per_microbatch"],
        "non_private_views_per_microbatch": plain["views_per_microbatch"],
        "sides": sides,
    }


def _ratios(side: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    return {
        "time_ratio": side["seconds"] / plain["seconds"],
        "time_ratio_range": harness.ratio_of(side["all_seconds"], plain["all_seconds"])[1:],
        "memory_ratio": harness.memory_ratio(side, plain),
    }


def _memory(engine: str, task: Task, size: int, channels_last: bool) -> int | None:
    return or_warning(lambda: peak_bytes(engine, task, size, channels_last=channels_last))


def fastest(
    engine: str, options: Options, task: Task, *, channels_last: bool = False, num_parameters: int = 0
) -> tuple[Step, float]:
    """Return a side at its fastest microbatch, warmed up, and the seconds of its best step.

    Sizes are tried from small to large, until two in a row are clearly slower than the best so far. Short
    steps are searched once more, all sizes, lest a busy moment of the machine decide.
    """
    sizes = candidates(engine, options, task, num_parameters)
    seen: dict[int, float] = {}
    for is_second in (False, True):
        num_worse = 0
        for size in sizes:
            gc.collect()  # hooks and modules refer to each other: the last candidate is still there
            step = build_step(engine, task, size, channels_last=channels_last)
            seconds = _best_of_few(step, task, min(seen.values(), default=None))
            say(f"  {engine}: {size} views at once{', channels last' * channels_last}: {seconds:.3f} s")
            seen[size] = min(seconds, seen.get(size, seconds))
            num_worse = num_worse + 1 if seconds > WORSE_BY * min(seen.values()) else 0
            if num_worse == 2 and not is_second:
                break
        if len(sizes) == 1 or min(seen.values()) > SHORT_SECONDS:
            break
    best = min(size for size, seconds in seen.items() if seconds <= AS_FAST * min(seen.values()))
    step = build_step(engine, task, best, channels_last=channels_last)
    seconds_of(step.take, task.device)
    return step, seen[best]


def _best_of_few(step: Step, task: Task, best: float | None) -> float:
    """Return the shortest of a few steps after a warm-up, fewer where one takes long."""
    warm_up = seconds_of(step.take, task.device)
    if best and warm_up > max(LONG_SECONDS, 1.5 * best):
        return warm_up
    times = [seconds_of(step.take, task.device)]
    while sum(times) < SHORT_SECONDS and len(times) < 4:
        times.append(seconds_of(step.take, task.device))
    return min(times)


def candidates(engine: str, options: Options, task: Task, num_parameters: int = 0) -> list[int]:
    """Return the microbatches to try, without those that hold the same groups or too much memory."""
    sizes = options.microbatches or MICROBATCHES[task.model]
    if not options.microbatches and task.device == "cuda":
        sizes = tuple(4 * size for size in sizes)
    most = task.expected_batch_size * task.num_views
    by_groups = {task.groups_at_once(min(size, most)): min(size, most) for size in sorted(sizes)}
    found = [
        size
        for size in by_groups.values()
        if gradient_bytes(engine, task, num_parameters, size) <= options.max_gigabytes * 1e9
    ]
    return found or list(by_groups.values())[:1]


def infeasible(engine: str, options: Options, task: Task, num_parameters: int) -> str:
    """Return why an engine is not run: its predicted memory or time, or its own refusal; empty if it is."""
    size = candidates(engine, options, task, num_parameters)[0]
    gigabytes = gradient_bytes(engine, task, num_parameters, size) / 1e9
    if gigabytes > options.max_gigabytes:
        return f"its gradients would take {gigabytes:.1f} GB"
    try:
        step = EngineStep(engine, task, size)
        step.take_one_microbatch()
        groups: list[int] = []
        seconds = seconds_of(lambda: groups.append(step.take_one_microbatch()), task.device)
    except Exception as error:  # the engine's own limits are a result
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    seconds *= task.expected_batch_size / task.group_size / groups[0]
    return f"a step would take {seconds:.0f} s" if seconds > options.max_seconds else ""


def tasks(options: Options) -> list[Task]:
    """Return what the options ask for: one row, or all rows of the table that they leave open."""
    found = []
    for model in (options.model,) if options.model else tuple(BATCH_SIZES):
        batches = (options.expected_batch_size,) if options.expected_batch_size else BATCH_SIZES.get(model)
        for batch in batches or (256,):
            for size in (options.group_size,) if options.group_size else GROUP_SIZES:
                if size <= batch or options.group_size:
                    found.append(
                        Task(
                            model=model,
                            group_size=size,
                            expected_batch_size=batch,
                            threads=options.threads,
                            image_size=options.image_size,
                            device=options.device,
                            precision=options.precision,
                        )
                    )
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    columns = ["network", "S", "B", "ours", "non-private", "time", "memory", "error"]
    others = [name for name in ENGINES if any(name in row["sides"] for row in rows)]
    lines = [
        [
            row["model"],
            row["group_size"],
            row["expected_batch_size"],
            side_text(row["sides"]["ours"]),
            side_text(row["sides"]["non_private"]),
            harness.with_spread(row["time_ratio"], row["time_ratio_range"]),
            ratio_text(row["memory_ratio"]),
            f"{row['relative_error']:.0e}",
            *(_other_text(row["sides"].get(name)) for name in others),
        ]
        for row in rows
    ]
    return harness.markdown_table([*columns, *others], lines)


def _other_text(side: dict[str, Any] | None) -> str:
    if side is None:
        return ""
    if "not_run" in side:
        return f"not run: {side['not_run']}"
    return f"{side['time_ratio']:.2f}, memory {ratio_text(side['memory_ratio'])}"


def main() -> int:
    """Run one measurement or the table."""
    options = harness.read_options(Options, __doc__)
    chosen = tasks(options)
    whole = not (options.model and options.group_size and options.expected_batch_size)
    if options.json and whole:
        raise ConfigError("--json prints one row: give model, group_size and expected_batch_size with it")
    others = options.others or (() if options.model else get_args(Engine))
    name = f"clipping_{options.model}" if options.model else "clipping"
    page = Page(name=name, title="Private over non-private step", text=PAGE)
    facts = harness.about(device=options.device, threads=options.threads)
    rows: list[dict[str, Any]] = []
    for task in chosen:
        say(f"{task.model}, S = {task.group_size}, B = {task.expected_batch_size}")
        rows.append(measure(options, task, others))
        say(table(rows[-1:]))
        if whole:  # after every row, for a table takes hours
            harness.write(page, facts, {"rows": rows}, [table(rows)], options.output)
    result = {"rows": rows} if whole else rows[0]
    return harness.publish(page, options, facts, result, [table(rows)], to_files=whole)


PAGE = f"""
Time and memory are ratios over the non-private step: the same network, views and group loss, one ordinary
backward pass per microbatch and an optimizer step. Each side runs at its own fastest microbatch ("at",
in views); 3 views per record; medians of sides timed in turn. `error`: relative error of the clipped sum
against one exact backward pass per group, with norms and sum in float64. Memory: peak resident memory of
two steps in a fresh process less what was resident before the network was built (on a GPU: peak
allocated), of the non-private step at the private one's microbatch. A training on a CPU keeps up to 256 MiB
of what it has freed besides. `opacus`: per-view gradients by hooks, summed per group. `opacus_ghost`
{PER_VIEW}, for ghost norms of Opacus cannot express groups: another mechanism, shown for its cost.
"""


if __name__ == "__main__":
    exit_on_bad_input(main)
