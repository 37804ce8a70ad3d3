"""What every benchmark says about its run, and the dated files it writes."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).resolve().parents[1]
Row = Mapping[str, Any]


def default_threads() -> int:
    """Returns the CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: str) -> str:
    """Returns the model name of the processor or of the GPU.

    >>> bool(device_name("cpu"))
    True
    """
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def about(*, device: str, threads: int) -> dict[str, Any]:
    """Returns where and how a benchmark ran: device, versions, threads, load and the command.

    Two threads of which one must wait for another program's turn are slower than one, by far: a busy
    machine is told of.
    """
    load = os.getloadavg()[0]
    if load > 0.5:
        say(f"warning: the machine is busy (load {load:.1f}); several threads then wait for each other")
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    return {
        "date": f"{date.today():%Y-%m-%d}",
        "command": shlex.join(["python", str(shown), *sys.argv[1:]]),
        "device": device,
        "device_name": device_name(device),
        "cpus": os.cpu_count(),
        "load_average": round(load, 2),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def say(text: str) -> None:
    """Prints a line of progress at once, away from the result."""
    print(text, file=sys.stderr, flush=True)


def seconds_text(value: float) -> str:
    """Returns seconds with three digits.

    >>> seconds_text(0.012345), seconds_text(12.345)
    ('0.0123', '12.3')
    """
    return f"{value:.3g}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table.

    >>> print(markdown_table(["a", "b"], [[1, "x"]]))
    | a | b |
    |---|---|
    | 1 | x |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    bars = ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]
    return "\n".join([bars[0], bars[1].replace(" ", ""), *bars[2:]])


def write(
    name: str, title: str, description: str, facts: Row, result: Row, tables: Sequence[str], folder: Path
) -> list[Path]:
    """Writes `NAME-DATE.json` and a readable `NAME-DATE.md`, and returns their paths.

    Args:
      name: of the benchmark.
      title, description: heading and text of the page.
      facts: what `about` returned.
      result: everything measured.
      tables: in Markdown.
      folder: where to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{facts['date']}"
    machine = (
        f"{facts['device_name']} ({facts['device']}), {facts['threads']} of {facts['cpus']} CPU threads, "
        f"torch {facts['torch']}, {facts['date']}."
    )
    page = [f"# {title}", f"```sh\n{facts['command']}\n```", machine, description.strip(), *tables]
    files = [path.with_name(f"{path.name}.json"), path.with_name(f"{path.name}.md")]
    files[0].write_text(json.dumps({**facts, **result}, indent=1) + "\n")
    files[1].write_text("\n\n".join(page) + "\n")
    return files
