#!/usr/bin/env python
"""Compare several workers with one worker that has all threads.

    python benchmarks/workers.py                          # small_cnn and resnet18, with a dated file
    python benchmarks/workers.py --models small_cnn --expected-batch-size 256 --json
    python benchmarks/workers.py --models resnet18 --own-loop --one-worker-threads 1    # make_private's loop

Workers are processes of a `torch.distributed` gloo group, as Ray Train starts them. Every step shares the
groups. Each worker gets the sum of the clipped gradients in its share of the weights, adds noise there and
sends it to all. Both arrangements run in turn, for several rounds of several steps. Starting the processes is
not timed.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks import harness
from benchmarks.harness import Output, Page, in_turn, print_line
from benchmarks.steps import ImageTask, OurStep, OwnLoopStep, Step
from dpgcl_core.errors import exit_on_bad_input
from dpgcl_core.workers import current_workers

BATCH_SIZES = {"tiny_cnn": 1024, "small_cnn": 1024, "resnet18": 64}
MICROBATCH = {"tiny_cnn": 384, "small_cnn": 384, "resnet18": 96}
_SECONDS = "seconds.json"


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """What to measure."""

    models: tuple[str, ...] = ("small_cnn", "resnet18")
    """The networks."""
    group_size: int = 8
    """S, the number of records per group."""
    expected_batch_size: int | None = None
    """B, records per step of all workers together; by default 1,024, or 64 for resnet18."""
    threads: int = dataclasses.field(default_factory=harness.default_threads)
    """Total number of threads, divided among the workers."""
    one_worker_threads: int | None = None
    """Threads of the single worker; by default all."""
    num_workers: int = 2
    """W, workers of the second arrangement."""
    own_loop: bool = False
    """Measure the steps of a user's own loop (`make_private`) instead of those of the training loop."""
    rounds: int = 3
    """Rounds of each arrangement, taken in turn."""
    steps: int = 3
    """Timed steps per round, after one untimed step."""
    views_per_microbatch: int | None = None
    """Views per microbatch of a worker; the default depends on the network."""


def measure(options: Options, model: str) -> dict[str, Any]:
    """Return the median seconds per step of both arrangements, and their ratio."""
    one_worker_threads = options.one_worker_threads or options.threads
    arrangements = {
        1: one_worker_threads,
        options.num_workers: max(1, options.threads // options.num_workers),
    }
    size = options.views_per_microbatch or MICROBATCH[model]

    def seconds(count: int) -> list[float]:
        task = _task(options, model, arrangements[count])
        step_seconds = _seconds(task, size, count, options.steps, options.own_loop)
        print_line(f"  {model}: {count} × {task.threads} threads: {statistics.median(step_seconds):.3f} s")
        return step_seconds

    rounds = in_turn({count: partial(seconds, count) for count in arrangements}, options.rounds)
    times = {count: [value for found in every for value in found] for count, every in rounds.items()}
    one_worker, many_workers = (statistics.median(times[count]) for count in (1, options.num_workers))
    return {
        **dataclasses.asdict(_task(options, model, arrangements[options.num_workers])),
        "views_per_microbatch": size,
        "own_loop": options.own_loop,
        "num_workers": options.num_workers,
        "threads_of_one_worker": arrangements[1],
        "threads_per_worker": arrangements[options.num_workers],
        "one_worker_seconds": one_worker,
        "many_workers_seconds": many_workers,
        "all_seconds": {str(count): values for count, values in times.items()},
        "time_ratio": many_workers / one_worker,
        "time_ratio_range": harness.ratio_of(times[options.num_workers], times[1])[1:],
    }


def _task(options: Options, model: str, threads: int) -> ImageTask:
    return ImageTask(
        model=model,
        group_size=options.group_size,
        expected_batch_size=options.expected_batch_size or BATCH_SIZES[model],
        threads=threads,
    )


def _seconds(
    task: ImageTask, views_per_microbatch: int, count: int, steps: int, is_own_loop: bool
) -> list[float]:
    """Return the seconds of each timed step of `count` worker processes."""
    with tempfile.TemporaryDirectory(prefix="dpgcl-") as folder:
        spawn(_work, args=(count, folder, task, views_per_microbatch, steps, is_own_loop), nprocs=count)
        found: list[float] = json.loads(Path(folder, _SECONDS).read_text())
    return found


def _work(
    rank: int,
    count: int,
    folder: str,
    task: ImageTask,
    views_per_microbatch: int,
    steps: int,
    is_own_loop: bool,
) -> None:
    """Run one worker; the first writes the times. As in trainings, a single worker has no process group."""
    if count > 1:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=count)
    step: Step
    if is_own_loop:
        step = OwnLoopStep(task, views_per_microbatch)
    else:
        step = OurStep(task, views_per_microbatch, current_workers())
    step.take()
    times = []
    for _ in range(steps):
        if count > 1:
            dist.barrier()
        started = time.perf_counter()
        step.take()
        times.append(time.perf_counter() - started)
    if rank == 0:
        Path(folder, _SECONDS).write_text(json.dumps(times))
    if count > 1:
        dist.barrier()
        dist.destroy_process_group()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    first = rows[0]
    one = f"1 worker × {first['threads_of_one_worker']} threads"
    many = f"{first['num_workers']} workers × {first['threads_per_worker']} threads"
    columns = ["network", "S", "B", one, many, "ratio (second / first)"]
    lines = [
        [
            row["model"],
            row["group_size"],
            row["expected_batch_size"],
            f"{row['one_worker_seconds']:.3f} s",
            f"{row['many_workers_seconds']:.3f} s",
            harness.with_spread(row["time_ratio"], row["time_ratio_range"]),
        ]
        for row in rows
    ]
    return harness.markdown_table(columns, lines)


def main() -> int:
    """Measure every model."""
    options = harness.read_options(Options, __doc__)
    facts = harness.about(device="cpu", threads=options.threads)
    rows = [measure(options, model) for model in options.models]
    page = Page(name="workers", title="Workers compared with threads", text=PAGE)
    if options.own_loop:
        page = Page(name="workers_own_loop", title="Processes of make_private", text=PAGE)
    return harness.publish(page, options, facts, {"rows": rows}, [table(rows)])


PAGE = """
Seconds of one private step, from the draw of the groups to the optimizer. Medians over rounds; both
arrangements take turns. Several workers are processes of a gloo group on one machine.
"""


if __name__ == "__main__":
    exit_on_bad_input(main)
