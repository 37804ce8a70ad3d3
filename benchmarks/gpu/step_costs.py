"""Time and peak memory of the private step over the non-private one: part b.

Both sides take the microbatch that a training takes on this device, B records in every step, the same views
and the same optimizer, and float32 products are computed in float32 on both, whatever the process allows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import engines, harness, pair_steps
from benchmarks.gpu.slices import OPEN_CLIP, PEFT, Slice
from benchmarks.harness import Row
from benchmarks.pair_steps import ORDINARY, PairTask, usual_microbatch
from benchmarks.steps import Step, Task
from dpgcl_core.clipping.full_precision import full_precision
from trainers.models.clip.published import CLIP_TINY

OURS, NON_PRIVATE = "ours", "non_private"
_LONG_SECONDS = 3.0
_PRECISIONS = ("float32", "bfloat16")
_GRID = {
    "resnet18": ((64, 1024, 8192, 65536), (2, 16, 256)),
    "vit_b_32_lora": ((64, 1024, 8192), (2, 16)),
}
"""B and S by network, the paper's and those of CLIP's image tower."""
_PAIR_GRID = ((64, 1024), (2, 16))
_MINUTES = {64: 1.0, 1024: 2.0, 8192: 4.0, 65536: 8.0}
"""That a row takes at most, by the largest B."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where steps are measured.

    Attributes:
      device: cuda or cpu.
      threads: CPU threads.
      toy: whether everything is as small as it can be.
    """

    device: str
    threads: int
    toy: bool


def step_costs(where: Where) -> list[Slice]:
    """Return part b, from small to large."""
    return [_slice(task) for task in sorted(_tasks(where), key=lambda each: each.expected_batch_size)]


def _tasks(where: Where) -> list[Task | PairTask]:
    shared: dict[str, Any] = {"threads": where.threads, "device": where.device}
    if where.toy:
        toy: dict[str, Any] = {"group_size": 2, "expected_batch_size": 8, **shared}
        pairs = PairTask(model=CLIP_TINY, lora_rank=2, **toy)
        return [*(Task(model="tiny_cnn", precision=each, **toy) for each in _PRECISIONS), pairs]
    images = [
        Task(model=model, group_size=size, expected_batch_size=batch, precision=precision, **shared)
        for model, (batches, sizes) in _GRID.items()
        for batch in batches
        for size in sizes
        for precision in _PRECISIONS
        if size <= batch
    ]
    batches, sizes = _PAIR_GRID
    return images + [
        PairTask(model="ViT-B-32", group_size=size, expected_batch_size=batch, **shared)
        for batch in batches
        for size in sizes
    ]


def _slice(task: Task | PairTask) -> Slice:
    libraries: tuple[str, ...] = ()
    if isinstance(task, PairTask) or task.model.startswith("vit"):
        libraries = (OPEN_CLIP, PEFT)
    name = f"{task.model}, {task.precision}, B = {task.expected_batch_size}, S = {task.group_size}"
    minutes = next(found for batch, found in _MINUTES.items() if task.expected_batch_size <= batch)
    return Slice(part="b", name=name, run=lambda _: measure(task), libraries=libraries, minutes=minutes)


def measure(task: Task | PairTask, rounds: int = 5) -> Row:
    """Return seconds and peak memory of every side of a step, and the private one's ratios over each other.

    Args:
      task: the step.
      rounds: timed ones, in which the sides take turns; fewer where a step takes long.
    """
    size = min(usual_microbatch(task), task.expected_batch_size * task.num_views)
    memory = {side: _peak(side, task, size) for side in sides_of(task)}
    takes = {side: _taking(task, _built(side, task, size)) for side in sides_of(task)}
    first = max(harness.seconds_of(take, task.device) for take in takes.values())
    if first < _LONG_SECONDS:  # a training's second pass may be captured, which takes long
        for take in takes.values():
            take()
    times = harness.in_turn(
        {side: partial(harness.seconds_of, take, task.device) for side, take in takes.items()},
        rounds if first < _LONG_SECONDS else 2,
    )
    rows = {side: harness.side_row(times[side], memory[side], size) for side in takes}
    return {**asdict(task), "views_per_microbatch": size, "sides": rows, "over": _ratios(rows)}


def sides_of(task: Task | PairTask) -> tuple[str, ...]:
    """Return the names of the sides, the private one first."""
    return (OURS, *ORDINARY) if isinstance(task, PairTask) else (OURS, NON_PRIVATE)


def _ratios(sides: Mapping[str, Row]) -> dict[str, Row]:
    ours = sides[OURS]
    found: dict[str, Row] = {}
    for name in list(sides)[1:]:
        time, *ends = harness.ratio_of(ours["all_seconds"], sides[name]["all_seconds"])
        memory = harness.memory_ratio(ours, sides[name])
        found[name] = {"time": time, "time_range": ends, "memory": memory}
    return found


def _built(side: str, task: Task | PairTask, size: int) -> Step:
    if isinstance(task, PairTask):
        return pair_steps.build_step(side, task, size)
    return engines.build_step(side, task, size)


def _taking(task: Task | PairTask, step: Step) -> Callable[[], None]:
    """Return how a step is taken, with its float32 products in float32."""

    def take() -> None:
        with full_precision(task.device):
            step.take()

    return take


def _peak(side: str, task: Task | PairTask, size: int) -> int | None:
    """The most memory that two steps of one side allocate on the GPU; None on a CPU."""
    if task.device != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    take = _taking(task, _built(side, task, size))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        take()
    return torch.cuda.max_memory_allocated()
