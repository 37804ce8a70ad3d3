"""The device that is measured: what it is, and whether the smallest step fits into its memory."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import harness
from benchmarks.steps import Task
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError
from trainers.training.microbatch import free_memory, pass_bytes
from trainers.training.warm_start import starting_encoder

_QUERIES = {
    "driver": "driver_version",
    "max_sm_clock_mhz": "clocks.max.sm",
    "max_memory_clock_mhz": "clocks.max.memory",
    "power_limit_watts": "power.limit",
    "default_power_limit_watts": "power.default_limit",
    "max_power_limit_watts": "power.max_limit",
}
"""What nvidia-smi is asked, by the name under which it is kept."""

_BYTES_PER_WEIGHT = 32
"""Weight, gradient and two moments in float32; the clipped sum in float64, and the noise that is added."""


def require_device(device: str, *, toy: bool) -> None:
    """Raise ConfigError unless the device can be measured: a GPU, or at toy size a CPU."""
    if device == "cpu" and not toy:
        raise ConfigError("--device cpu is for trying the parts out: give --toy with it")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "a GPU is needed that torch sees; got none. --device cpu --toy runs every part at toy size"
        )


def facts(device: str) -> dict[str, Any]:
    """Return what is known of a device: name, driver, limits of clocks and power, and versions."""
    found: dict[str, Any] = {
        "device": device,
        "device_name": harness.device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    if device != "cuda":
        return found
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return found | {"memory_bytes": memory} | _of_nvidia_smi(_asked())


def _asked() -> str:
    """The answer of nvidia-smi for the current device; empty where it cannot be asked."""
    number = torch.cuda._parse_visible_devices()[torch.cuda.current_device()]  # its own numbers, or names
    query = f"--query-gpu={','.join(_QUERIES.values())}"
    command = ["nvidia-smi", f"--id={number}", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _of_nvidia_smi(answer: str) -> dict[str, Any]:
    """Return what an answer says, by name; None for what it does not say.

    >>> found = _of_nvidia_smi("580.159.03, 1980, 3201, 700.00, 700.00, [N/A]")
    >>> found["driver"], found["power_limit_watts"], found["max_power_limit_watts"]
    ('580.159.03', 700.0, None)
    """
    values: Sequence[str | None] = [each.strip() for each in answer.strip().split(",")]
    if len(values) != len(_QUERIES):
        values = [None] * len(_QUERIES)
    found = dict(zip(_QUERIES, values, strict=True))
    return {name: value if name == "driver" else _number(value) for name, value in found.items()}


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def require_memory(task: Task) -> None:
    """Refuse a device whose free memory does not hold a step of the smallest microbatch, one group.

    Args:
      task: the smallest of the steps that are measured.

    Raises:
      ConfigError: says what is needed, and what is free.
    """
    config = task.config(views_per_microbatch=1)
    encoder = starting_encoder(config, task.image_shape)
    needed = pass_bytes(config, encoder, task.image_shape) + _BYTES_PER_WEIGHT * num_trainable(encoder)
    free = free_memory(torch.device(task.device))
    if needed > free:
        raise ConfigError(
            f"the smallest microbatch, one group of {task.group_size} of {task.model}, needs "
            f"{needed / 2**20:.0f} MiB, and {task.device} has {free / 2**20:.0f} MiB free: end what else "
            "runs on it, or take a larger one"
        )
