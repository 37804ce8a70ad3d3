"""The free memory of this machine and container."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def free_memory() -> int:
    """Return the free bytes of this machine and container."""
    limits = [_available_on_machine()]
    limits += [free for free in (_free_in_cgroup(*files) for files in _CGROUP_FILES) if free is not None]
    return max(0, min(limits))


def _available_on_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    except (OSError, StopIteration, ValueError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_in_cgroup(limit: Path, usage: Path) -> int | None:
    """Return the free bytes of a control group; None without a control group or a limit."""
    try:
        return int(limit.read_text()) - int(usage.read_text())
    except (OSError, ValueError):  # "max" is no number
        return None
