"""Measure the peak memory of one side's step in a separate process.

On a CPU, this is the peak resident memory (VmHWM) of two steps, minus the memory resident (VmRSS) before the
network is built. By then everything is imported, the records exist and the same side has taken a step of a
tiny network. So network, optimizer, gradients, activations and noise count; interpreter, libraries and data
set do not. The peak is reset (/proc/self/clear_refs) after the network has been built and checked, so that
building it does not count. On a GPU, it is `torch.cuda.max_memory_allocated` of the same two steps.

A measuring process runs with `harness.MALLOC`, which makes the peak independent of memory freed earlier.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys

import torch

from benchmarks import harness
from benchmarks.steps import ImageTask, PairTask, RecordTask, Task, build_step

NUM_STEPS = 2


def peak_bytes(side: str, task: Task, views_per_microbatch: int, *, channels_last: bool = False) -> int:
    """Return the peak memory of one side in bytes, from a fresh process.

    Raises:
      MeasurementError: the process failed, for example because it ran out of memory.
    """
    order = {
        "side": side,
        "views_per_microbatch": views_per_microbatch,
        "channels_last": channels_last,
        "kind": type(task).__name__,
        "task": dataclasses.asdict(task),
    }
    return int(harness.result_of_fresh_process("benchmarks.memory", order, of=f"the memory of {side}"))


def _measure(side: str, task: Task, views_per_microbatch: int, channels_last: bool) -> int:
    """Return this process's own peak, in bytes; see the module."""
    torch.set_num_threads(task.threads)
    _import_late_libraries(task.model)
    build_step(side, task.tiny, 12).take()  # libraries import the rest, and set up threads and buffers
    task.records()  # cached, so that the step reuses them
    before = harness.memory_status("VmRSS")
    step = build_step(side, task, views_per_microbatch, channels_last=channels_last)
    if task.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    cleared = harness.clear_peak()
    for _ in range(NUM_STEPS):
        step.take()
    if task.device == "cuda":
        return torch.cuda.max_memory_allocated()
    if not cleared:
        print("warning: the peak could not be reset, so it includes building the network", file=sys.stderr)
    return harness.memory_status("VmHWM") - before


def _import_late_libraries(model: str) -> None:
    """Import what a network would import while it is built."""
    if model.lower().startswith("vit"):
        from trainers.torchvision_import import ensure_torchvision_import

        ensure_torchvision_import()
        importlib.import_module("open_clip")
        importlib.import_module("peft")


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    kinds = {kind.__name__: kind for kind in (ImageTask, PairTask, RecordTask)}
    order["task"] = kinds[order.pop("kind")](**order["task"])
    print(_measure(**order))
