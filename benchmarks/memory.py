#!/usr/bin/env python
"""Peak memory of one engine's step, in a process of its own.

    python -m benchmarks.memory '{"engine": "ours", "views_per_microbatch": 192, "kind": "Task", "task": {…}}'

On a CPU: the peak resident memory (VmHWM) of two whole steps, less the memory resident (VmRSS) once
everything is imported, the images exist and the same engine has taken a step of a tiny network. So
network, optimizer, gradients, activations and noise count; interpreter, libraries and data set do not. The
peak is reset (/proc/self/clear_refs) when the network has been built and checked, so that building it does
not count. On a GPU: `torch.cuda.max_memory_allocated` of the same two steps.

A measuring process runs with `harness.MALLOC`, which makes a peak independent of what was freed before.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys

import torch

from benchmarks import engines, harness, pair_steps, record_steps
from benchmarks.pair_steps import PairTask
from benchmarks.record_steps import RecordTask
from benchmarks.steps import GroupTask, Step, Task

NUM_STEPS = 2


def peak_bytes(
    engine: str, task: GroupTask, views_per_microbatch: int, *, channels_last: bool = False
) -> int:
    """Return the peak memory of `engine` in bytes, from a fresh process.

    Raises:
      MeasurementError: the process failed, for instance for want of memory.
    """
    order = {
        "engine": engine,
        "views_per_microbatch": views_per_microbatch,
        "channels_last": channels_last,
        "kind": type(task).__name__,
        "task": dataclasses.asdict(task),
    }
    return harness.number_of_fresh_process("benchmarks.memory", order, of=engine)


def _measure(engine: str, task: GroupTask, views_per_microbatch: int, channels_last: bool) -> int:
    """Return this process's own peak, in bytes; see the module."""
    torch.set_num_threads(task.threads)
    _import_first(engine, task.model)
    _take_tiny_step(engine, task)
    task.records()  # kept, so that the step finds the images there
    before = harness.memory_status("VmRSS")
    step = _build(engine, task, views_per_microbatch, channels_last)
    if task.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    cleared = harness.clear_peak()
    for _ in range(NUM_STEPS):
        step.take()
    if task.device == "cuda":
        return torch.cuda.max_memory_allocated()
    if not cleared:
        print("the peak could not be reset: building the network counts", file=sys.stderr)
    return harness.memory_status("VmHWM") - before


def _build(engine: str, task: GroupTask, views_per_microbatch: int, channels_last: bool) -> Step:
    if isinstance(task, PairTask):
        return pair_steps.build_step(engine, task, views_per_microbatch)
    if isinstance(task, RecordTask):
        return record_steps.build_step(engine, task, views_per_microbatch)
    assert isinstance(task, Task)
    return engines.build_step(engine, task, views_per_microbatch, channels_last=channels_last)


def _import_first(engine: str, model: str) -> None:
    """Import what a network or an engine would import while it is built."""
    if model.lower().startswith("vit"):
        from trainers.torchvision_import import ensure_torchvision_import

        ensure_torchvision_import()
        importlib.import_module("open_clip")
        importlib.import_module("peft")
    if engine.startswith("opacus"):
        importlib.import_module("opacus.grad_sample")
    if engine == "vmap":
        importlib.import_module("torch._functorch.vmap")


def _take_tiny_step(engine: str, task: GroupTask) -> None:
    """Have the libraries import what they import late, and set up their threads and buffers."""
    _build(engine, task.tiny(), 12, False).take()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    kinds = {kind.__name__: kind for kind in (Task, PairTask, RecordTask)}
    given["task"] = kinds[given.pop("kind")](**given["task"])
    print(_measure(**given))
