"""Run checks, steps and whole trainings on a GPU; their rows of JSON accumulate over many calls.

    python -m benchmarks.gpu --calibrate                       # first, on a machine with dp-accounting
    python -m benchmarks.gpu --output results/gpu              # on the GPU machine: all missing rows
    python -m benchmarks.gpu --only trainings --limit-minutes 9         # one slice; the next call resumes
    python -m benchmarks.gpu --only "steps: resnet18, bfloat16"         # only rows with this name
    python -m benchmarks.gpu --device cpu --tiny               # try all slices on a CPU
    python -m benchmarks.gpu --table results/gpu               # print checks and steps as Markdown

The machine needs a copy of this source tree, torch with CUDA, and numpy. With scipy, trainings are also
scored by a linear probe. Ray, MLflow and dp-accounting are not needed there: σ and ε of the trainings are in
`benchmarks/results/gpu/calibration.json`, which `--calibrate` writes. See docs/performance.md.
`benchmarks/papers.py` shows the trainings beside published numbers.

Slices: *checks* compares passes, kernels, noise and resumes with the CPU (the tests marked `gpu`). *steps*
compares the private step with the ordinary step. *trainings* runs the DP-GCL paper's image setting, on
Fashion-MNIST or `--dataset cifar10`. Each row is saved before the next one starts. A training that runs out
of time resumes from its checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.gpu import Options, is_absent
from benchmarks.gpu.trainings import NUM_RECORDS, calibrate, trainings
from benchmarks.harness import ROOT, Row, markdown_table, print_line, ratio_text, side_text, with_spread
from benchmarks.steps import OURS, ImageTask, PairTask, Step, Task, build_step
from dpgcl_core.clipping.full_precision import full_precision
from dpgcl_core.errors import ConfigError, exit_on_bad_input
from trainers.files.oversight import TrainingStopped

_LONG_SECONDS = 3.0
_PRECISIONS = ("float32", "bfloat16")
_GRID = {
    "resnet18": ((64, 1024, 8192, 65536), (2, 16, 256)),
    "vit_b_32_lora": ((64, 1024, 8192), (2, 16)),
}
"""B and S for each network: the paper's settings, and settings for CLIP's image tower."""
Rows = Iterator[tuple[str, Callable[[], Row]]]
"""A slice: the names of its rows, each with the function that makes it."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One row to make: `run` returns its results, and `slice` and `name` identify it."""

    slice: str
    name: str
    run: Callable[[], Row]

    def __str__(self) -> str:
        return f"{self.slice}: {self.name}"


# Rows: existing rows are not made again


def read_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a folder, by slice and name.

    Raises:
      ConfigError: a line is damaged.
    """
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        try:
            for row in map(json.loads, path.read_text().splitlines()):
                rows[f"{path.stem}: {row['name']}"] = row
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"each line of {path} must be a JSON object. Delete the other lines") from None
    return rows


def keep_row(folder: Path, work: Work, row: Row) -> None:
    """Save a row, replacing an older row of its name; the file stays intact if the process is killed."""
    rows = {name: kept for name, kept in read_rows(folder).items() if name.startswith(f"{work.slice}: ")}
    rows[str(work)] = dict(row)
    path = folder / f"{work.slice}.jsonl"
    temporary = path.with_suffix(".part")
    temporary.write_text("".join(json.dumps(each) + "\n" for each in rows.values()))
    temporary.replace(path)


def run_works(works: Sequence[Work], options: Options) -> int:
    """Make the missing rows, in order, until the time is over; return 1 if a row has failed, else 0.

    A failure, for example for lack of GPU memory, is saved as a row. `--again` makes failed rows again.

    Raises:
      ConfigError: the folder holds rows of another device, or a damaged row.
    """
    facts = machine()
    require_same_device(options.output, facts)
    has_failed = False
    for work in works:
        record = read_rows(options.output).get(str(work), {})
        if "found" in record or ("failed" in record and not options.should_retry):
            has_failed |= "failed" in record
            continue
        if time.monotonic() >= options.deadline:
            print_line(f"time limit reached before {work}")
            break
        print_line(str(work))
        row, start_seconds = {"name": work.name, **facts}, time.perf_counter()
        try:
            row["found"] = work.run()
        except TrainingStopped as stopped:
            print_line(f"time limit reached after step {stopped.step}; the next call resumes there")
            break
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            row["failed"], has_failed = f"{type(error).__name__}: {first}", True
            print_line(f"  {row['failed']}")
        finally:
            gc.collect()  # modules and hooks form cycles
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        keep_row(options.output, work, row | {"seconds": time.perf_counter() - start_seconds})
    return int(has_failed)


def machine() -> dict[str, Any]:
    """Return the device and the version of the code, for every row."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "device_name": harness.device_name(device),
        "driver": _driver(),
        "torch": torch.__version__,
        "version": _version(),
    }


@cache
def _driver() -> str:
    """Return driver, highest clock and power limit of the GPUs from nvidia-smi; "" without it."""
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


@cache
def _version() -> str:
    """Return a hash that identifies the source files, 12 hexadecimal digits."""
    content = hashlib.sha256()
    for path in sorted(path for name in ("dpgcl_core", "trainers") for path in (ROOT / name).rglob("*.py")):
        content.update(path.read_bytes())
    return content.hexdigest()[:12]


def require_same_device(folder: Path, facts: Row) -> None:
    """Raise ConfigError if a folder holds rows of another device."""
    folder.mkdir(parents=True, exist_ok=True)
    others = {row["device_name"] for row in read_rows(folder).values()} - {facts["device_name"]}
    if others:
        raise ConfigError(
            f"a folder must hold rows of one device; {folder} has rows of {', '.join(sorted(others))}, and "
            f"this is {facts['device_name']}. Use another folder"
        )


# Slices


def checks(options: Options) -> Rows:
    """Yield checks that must hold on a GPU as on a CPU, for each network."""
    from tests.benchmarks.gpu_checks import CHECKS, passes_of_pairs_are_replayed

    for model in ("tiny_cnn",) if options.tiny else ("small_cnn", "resnet18"):
        task = ImageTask(
            model=model,
            group_size=4,
            expected_batch_size=32,
            threads=options.threads,
            device=options.device,
        )
        for name, check in CHECKS.items():
            yield f"{name}, {model}", partial(check, task)
    if not options.tiny:
        yield "passes of pairs are replayed, clip-tiny", partial(passes_of_pairs_are_replayed, task)


def steps(options: Options) -> Rows:
    """Yield comparisons of private with ordinary steps, from small to large."""
    shared: dict[str, Any] = {"threads": options.threads, "device": options.device}
    tasks: list[Task]
    if options.tiny:
        shared |= {"group_size": 2, "expected_batch_size": 8}
        tasks = [ImageTask(model="tiny_cnn", precision=precision, **shared) for precision in _PRECISIONS]
    else:
        tasks = [
            ImageTask(model=model, group_size=size, expected_batch_size=batch, precision=precision, **shared)
            for model, (batches, sizes) in _GRID.items()
            for batch in batches
            for size in sizes
            for precision in _PRECISIONS
            if size <= batch
        ]
        tasks += [
            PairTask(model="ViT-B-32", group_size=size, expected_batch_size=batch, **shared)
            for batch in (64, 1024)
            for size in (2, 16)
        ]
    for task in sorted(tasks, key=lambda task: task.expected_batch_size):
        name = f"{task.model}, {task.precision}, B = {task.expected_batch_size}, S = {task.group_size}"
        yield name, partial(measure_step, task)


def measure_step(task: Task, rounds: int = 5) -> Row:
    """Return seconds and peak memory of every side of a step, and the private step's ratios to the others.

    All sides use the microbatch that a training uses on this device. All compute float32 products in float32,
    whatever the process allows.

    Args:
      task: the step.
      rounds: number of timed rounds, in which the sides take turns; long steps get fewer.
    """
    size = task.usual_microbatch()
    memory = {side: _peak(side, task, size) for side in task.sides}
    takes = {side: _taking(task, build_step(side, task, size)) for side in task.sides}
    first = max(harness.seconds_of(take, task.device) for take in takes.values())
    times = harness.in_turn(
        {side: partial(harness.seconds_of, take, task.device) for side, take in takes.items()},
        rounds if first < _LONG_SECONDS else 2,
    )
    sides = {side: harness.side_row(times[side], memory[side], size) for side in takes}
    ratios_by_side = {}
    for side in task.sides[1:]:
        ratio, *ends = harness.ratio_of(times[OURS], times[side])
        ratios = {"time": ratio, "time_range": ends, "memory": harness.memory_ratio(sides[OURS], sides[side])}
        ratios_by_side[side] = ratios
    return {**dataclasses.asdict(task), "views_per_microbatch": size, "sides": sides, "over": ratios_by_side}


def _taking(task: Task, step: Step) -> Callable[[], None]:
    """Return a function that takes a step, with its float32 products in float32."""

    def take() -> None:
        with full_precision(task.device):
            step.take()

    return take


def _peak(side: str, task: Task, size: int) -> int | None:
    """Return the peak memory that two steps of one side allocate on the GPU; None on a CPU."""
    if task.device != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    take = _taking(task, build_step(side, task, size))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        take()
    return torch.cuda.max_memory_allocated()


SLICES: dict[str, Callable[[Options], Rows]] = {"checks": checks, "steps": steps, "trainings": trainings}


def all_works(options: Options) -> list[Work]:
    """Return the rows of all slices, in order."""
    return [
        Work(slice=name, name=row, run=run) for name, rows in SLICES.items() for row, run in rows(options)
    ]


# The rows as tables


def tables(rows: Sequence[Row]) -> str:
    """Return checks, steps and failures as Markdown tables; `benchmarks/papers.py` shows trainings."""
    found = [row for row in rows if "found" in row]
    of_steps = [row["found"] for row in found if "sides" in row["found"]]
    others = [row for row in found if not {"candidate", "sides"} & row["found"].keys()]
    parts = []
    if others:
        lines = [
            [
                row["name"],
                ", ".join(f"{name}: {value:.4g}" for name, value in row["found"].items()) or "holds",
            ]
            for row in others
        ]
        parts.append(markdown_table(["check", "measured"], lines))
    if of_steps:
        columns = ["network", "precision", "B", "S", "private", "other side", "", "time", "memory"]
        parts.append(markdown_table(columns, [line for each in of_steps for line in _step_lines(each)]))
    parts += [f"- {row['name']}: failed, {row['failed']}" for row in rows if "failed" in row]
    return "\n\n".join(parts)


def _step_lines(row: Row) -> Iterator[list[object]]:
    for side, ratio in row["over"].items():
        yield [
            *(row[name] for name in ("model", "precision", "expected_batch_size", "group_size")),
            side_text(row["sides"]["ours"]),
            side.replace("_", " "),
            side_text(row["sides"][side]),
            with_spread(ratio["time"], ratio["time_range"]),
            ratio_text(ratio["memory"]),
        ]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line with argparse, because the GPU machine may lack tyro."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        help='only rows whose name contains one of these, such as "steps: resnet18"',
    )
    parser.add_argument(
        "--output", type=Path, default=Options.output, help="folder for the rows of one device"
    )
    parser.add_argument("--dataset", choices=NUM_RECORDS, default=Options.dataset, help="data of trainings")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu needs --tiny")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, to try everything out")
    parser.add_argument("--again", dest="should_retry", action="store_true", help="make failed rows again")
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="stop after this many minutes")
    parser.add_argument("--threads", type=int, default=harness.default_threads(), help="CPU threads")
    parser.add_argument("--calibrate", action="store_true", help="write σ of the trainings, and exit")
    parser.add_argument(
        "--table", type=Path, metavar="FOLDER", help="print a folder's checks and steps, and exit"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the slices, calibrate, or print the rows."""
    settings = vars(parse_arguments(arguments))
    folder, is_calibration = settings.pop("table"), settings.pop("calibrate")
    if folder is not None:
        print(tables(list(read_rows(folder).values())))
        return 0
    if is_calibration:
        if is_absent("dp_accounting"):
            raise ConfigError("--calibrate needs dp-accounting, which is not installed")
        return calibrate()
    options = Options(**settings)
    if options.device == "cpu" and not options.tiny:
        raise ConfigError("--device cpu works only with --tiny. Add --tiny")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch must find a GPU; it finds none. To run on a CPU, use --device cpu --tiny")
    torch.set_num_threads(options.threads)
    works = all_works(options)
    if options.only:
        works = [work for work in works if any(words in str(work) for words in options.only)]
        if not works:
            raise ConfigError(f"--only must match a row; no name contains {' or '.join(options.only)}")
    code = run_works(works, options)
    rows = read_rows(options.output)
    print(f"{sum('found' in rows.get(str(work), {}) for work in works)} of {len(works)} rows are done")
    return code


if __name__ == "__main__":
    exit_on_bad_input(main)
