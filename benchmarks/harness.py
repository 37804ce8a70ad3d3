"""Shared parts of the benchmarks: options, alternating measurements, ratios, memory, results.

Ratios within one run survive a noisy machine, seconds do not. So all sides take turns in one process, in an
order that is reversed every round, and each ratio is reported with its range over the rounds. A benchmark
ends with `publish`, which prints one JSON object, or prints its tables and writes them to dated files.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from dpgcl_core.command_line import run_command
from dpgcl_core.errors import DpgclError

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).resolve().parents[1]
Row = Mapping[str, Any]
_T = TypeVar("_T")
_Name = TypeVar("_Name", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the results go: the options that all benchmarks share."""

    json: bool = False
    """Print one JSON object, and write no files."""
    output: Path = RESULTS
    """Folder for the dated result files."""


def read_options(options: type[_T], description: str | None) -> _T:
    """Read this process's command line.

    Args:
      options: a dataclass whose fields are the options.
      description: the description in `--help`.

    Raises:
      ConfigError: an option is unknown or breaks a rule.
    """
    found: _T = run_command(
        options, prog=f"python benchmarks/{Path(sys.argv[0]).name}", description=description
    )
    return found


# Alternating measurements


class Seconds(NamedTuple):
    """CPU seconds and wall-clock seconds of one measurement."""

    processor: float
    clock: float


def timed(take: Callable[[], object], processor: Callable[[], float] = time.process_time) -> Seconds:
    """Return the seconds of one call.

    Args:
      take: the function to call.
      processor: the CPU clock: `time.process_time`, or `time.thread_time`.
    """
    clock, used = time.perf_counter(), processor()
    take()
    return Seconds(processor() - used, time.perf_counter() - clock)


def seconds_of(take: Callable[[], object], device: str = "cpu") -> float:
    """Return the wall-clock seconds of one call, including its work on the GPU."""

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    synchronize()
    started = time.perf_counter()
    take()
    synchronize()
    return time.perf_counter() - started


def in_turn(sides: Mapping[_Name, Callable[[], _T]], rounds: int) -> dict[_Name, list[_T]]:
    """Return each side's measurement in each round; the order is reversed every round.

    >>> order = []
    >>> measured = in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    >>> "".join(order), list(measured)
    ('abba', ['a', 'b'])
    """
    measurements: dict[_Name, list[_T]] = {name: [] for name in sides}
    for index in range(rounds):
        for name in list(sides)[:: -1 if index % 2 else 1]:
            measurements[name].append(sides[name]())
    return measurements


class Ratio(NamedTuple):
    """Median and range, over the rounds, of the ratio within a round."""

    median: float
    lowest: float
    highest: float


def ratio_of(side: Sequence[float], other_side: Sequence[float]) -> Ratio:
    """Return the ratio of two sides that were measured in turn.

    >>> ratio_of([1.0, 12.0, 2.0], [1.0, 10.0, 2.5])
    Ratio(median=1.0, lowest=0.8, highest=1.2)
    """
    rounds = [a / b for a, b in zip(side, other_side, strict=True)]
    return Ratio(statistics.median(rounds), min(rounds), max(rounds))


# Memory, each side in a separate process

MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc keeps freed memory, so a peak would depend on history. With these settings there is one arena, blocks
of 64 KiB and more are mapped separately, and freed memory is unmapped at once. This slows a step down, so it
is not used for timing."""


class MeasurementError(DpgclError):
    """A measuring process ended without a number."""


def result_of_fresh_process(module: str, order: Row, *, of: str, env: Mapping[str, str] = MALLOC) -> Any:
    """Return what `python -m MODULE ORDER` prints last, as JSON.

    Args:
      module: a module of this repository.
      order: the measurement to make, passed as JSON.
      of: the name of the measured side, for messages.
      env: environment variables to set.

    Raises:
      MeasurementError: as for `run_fresh_process`.
    """
    printed = run_fresh_process("-m", module, json.dumps(order), of=of, env=env)
    return json.loads(printed.strip().splitlines()[-1])


def run_fresh_process(*command: str, of: str, env: Mapping[str, str]) -> str:
    """Run Python on this copy of the code, and return what it prints.

    Raises:
      MeasurementError: the process failed, for example because it ran out of memory.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **env}
    # Files, because Ray's processes may keep a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.run(
            [sys.executable, *command], env=environment, cwd=ROOT, stdout=out, stderr=err
        )
        out.seek(0)
        err.seek(0)
        if process.returncode:
            reason = err.read().strip()[-2000:] or f"signal {-process.returncode}"
            raise MeasurementError(f"measuring {of} failed: {reason}")
        return out.read()


def memory_status(field: str) -> int:
    """Return a field of /proc/self/status, such as VmHWM, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise MeasurementError(f"/proc/self/status has no {field}")


def clear_peak() -> bool:
    """Reset VmHWM to VmRSS; return whether this is permitted."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


# Results


def side_row(
    seconds: Sequence[float],
    memory_bytes: int | None,
    views_per_microbatch: int,
    *,
    memory_views: int | None = None,
) -> dict[str, Any]:
    """Return the results of one side of a step; memory may be measured at another number of views."""
    return {
        "seconds": statistics.median(seconds),
        "all_seconds": list(seconds),
        "memory_bytes": memory_bytes,
        "views_per_microbatch": views_per_microbatch,
        "memory_views": memory_views or views_per_microbatch,
    }


def memory_ratio(side: Row, other_side: Row) -> float | None:
    """Return the ratio of two sides' memory; None if either is unknown."""
    is_known = side["memory_bytes"] and other_side["memory_bytes"]
    return side["memory_bytes"] / other_side["memory_bytes"] if is_known else None


def side_text(side: Row) -> str:
    """Return a side of a step for a table."""
    memory = f"{side['memory_bytes'] / 2**20:.0f} MiB" if side["memory_bytes"] else "?"
    at = f" at {side['views_per_microbatch']}"
    memory_views = side.get("memory_views", side["views_per_microbatch"])  # not in earlier results
    between = "" if memory_views == side["views_per_microbatch"] else at
    return f"{seconds_text(side['seconds'])} s{between}, {memory} at {memory_views}"


def ratio_text(ratio: float | None) -> str:
    """Return a ratio for a table.

    >>> ratio_text(1.234), ratio_text(None)
    ('1.23', '?')
    """
    return "?" if ratio is None else f"{ratio:.2f}"


def with_spread(ratio: float, ends: Sequence[float]) -> str:
    """Return a ratio with the lowest and highest of the rounds, for a table.

    >>> with_spread(1.234, (1.2, 1.31))
    '**1.23** (1.20 to 1.31)'
    """
    return f"**{ratio:.2f}** ({ends[0]:.2f} to {ends[1]:.2f})"


def default_threads() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: str) -> str:
    """Return the model name of the processor or of the GPU.

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
    """Return where and how a benchmark ran: device, versions, threads, load and the command.

    On a busy machine, several threads can be much slower than one, because they wait for each other. So this
    prints a warning if the machine is busy.
    """
    load = os.getloadavg()[0]
    if load > 0.5:
        print_line(f"warning: the machine is busy (load {load:.1f}); multi-threaded timings are unreliable")
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


def print_line(text: str) -> None:
    """Print a line of progress immediately, to stderr, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def seconds_text(value: float) -> str:
    """Return seconds with three digits.

    >>> seconds_text(0.012345), seconds_text(12.345)
    ('0.0123', '12.3')
    """
    return f"{value:.3g}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table.

    >>> print(markdown_table(["a", "b"], [[1, "x"]]))
    | a | b |
    |---|---|
    | 1 | x |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    bars = ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]
    return "\n".join([bars[0], bars[1].replace(" ", ""), *bars[2:]])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a text table, with columns of one width.

    >>> aligned([("side", "S"), ("ours", "16")])
    ['side   S', 'ours   16']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


@dataclass(frozen=True, kw_only=True)
class Page:
    """The name of a benchmark's result files, and the text that accompanies the numbers.

    Attributes:
      name: the name of the files, without date and suffix.
      title, text: the title and introduction of the readable file.
    """

    name: str
    title: str
    text: str


def write(page: Page, facts: Row, result: Row, tables: Sequence[str], folder: Path) -> list[Path]:
    """Write `NAME-DATE.json` and a readable `NAME-DATE.md`, and return their paths.

    Args:
      page: name, title and text.
      facts: the result of `about`.
      result: all measurements.
      tables: the tables in Markdown.
      folder: the folder to write to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{page.name}-{facts['date']}"
    machine = (
        f"{facts['device_name']} ({facts['device']}), {facts['threads']} of {facts['cpus']} CPU threads, "
        f"torch {facts['torch']}, {facts['date']}."
    )
    text = [f"# {page.title}", f"```sh\n{facts['command']}\n```", machine, page.text.strip(), *tables]
    files = [path.with_name(f"{path.name}.json"), path.with_name(f"{path.name}.md")]
    files[0].write_text(json.dumps({**facts, **result}, indent=1) + "\n")
    files[1].write_text("\n\n".join(text) + "\n")
    return files


def publish(page: Page, options: Output, facts: Row, result: Row, tables: Sequence[str]) -> int:
    """Print the result as one JSON object, or print its tables and write them to files; return 0."""
    if options.json:
        print(json.dumps({**facts, **result}))
        return 0
    print("\n\n".join(tables))
    print("written: " + ", ".join(map(str, write(page, facts, result, tables, options.output))))
    return 0
