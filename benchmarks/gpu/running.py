"""Runs the parts that are asked for, as far as the time of one call goes."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks import harness
from benchmarks.gpu.checks import checks
from benchmarks.gpu.device import facts, require_device, require_memory
from benchmarks.gpu.packages import ROOT, version_of
from benchmarks.gpu.slices import PARTS, Budget, Results, Slice, run_slices
from benchmarks.gpu.step_costs import Where, step_costs
from benchmarks.gpu.trainings import training_slices
from benchmarks.steps import Task
from dpgcl_core.errors import ConfigError

MOST_MINUTES = 8.0
"""Of one slice."""
_MARGIN_MINUTES = 1.0


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What is run, and for how long."""

    part: Literal["a", "b", "c", "d", "e"] | None = None
    """One part; all of them, in order, unless given."""
    only: tuple[str, ...] = ()
    """Only slices whose name has one of these words in it: "B = 1024,", say."""
    limit_minutes: float | None = None
    """Begin no slice that might not end in so many minutes; the next call goes on."""
    output: Path = Path("results/gpu")
    """Folder of the results, of one device and one version."""
    device: Literal["cuda", "cpu"] = "cuda"
    """The GPU, or with --toy a CPU."""
    toy: bool = False
    """Run everything at toy size: to try it out, not to measure."""
    again: bool = False
    """Run failed slices once more."""
    threads: int = dataclasses.field(default_factory=harness.default_threads)
    """CPU threads."""

    def __post_init__(self) -> None:
        if self.limit_minutes is not None and not self.limit_minutes > _MARGIN_MINUTES:
            raise ConfigError(
                f"limit_minutes must be more than {_MARGIN_MINUTES:g}; got {self.limit_minutes:g}"
            )
        if self.threads < 1:
            raise ConfigError(f"threads must be at least 1; got {self.threads}")

    @property
    def slice_minutes(self) -> float:
        """The most that one slice may take, so that one fits into the call."""
        if self.limit_minutes is None:
            return MOST_MINUTES
        return min(MOST_MINUTES, self.limit_minutes - _MARGIN_MINUTES)


def run(options: RunOptions) -> int:
    """Run slices that are not finished; return 0, or 1 where one has failed.

    Raises:
      ConfigError: the device is not there or too small, or the folder holds results of something else.
    """
    require_device(options.device, toy=options.toy)
    budget = Budget(minutes=options.limit_minutes, started=time.monotonic())
    torch.set_num_threads(options.threads)
    require_memory(_smallest(options))
    heading = {"version": version_of(ROOT), "toy": options.toy, **facts(options.device)}
    results = Results(options.output, heading)
    slices = [each for each in all_slices(options) if options.part in (None, each.part)]
    if options.only:
        slices = [each for each in slices if any(word in each.name for word in options.only)]
    is_whole = run_slices(slices, results, budget, again=options.again)
    for part in PARTS:
        rows = results.rows(part).values()
        if rows:
            print(
                f"part {part}: {sum('found' in row for row in rows)} of {_num(options, part)} slices finished"
            )
    return 0 if is_whole else 1


def all_slices(options: RunOptions) -> list[Slice]:
    """Return the slices of all parts, in order, none of which takes longer than the call allows."""
    where = Where(device=options.device, threads=options.threads, toy=options.toy)
    found = [
        *checks(_tasks(options)),
        *step_costs(where),
        *training_slices(where, options.slice_minutes),
    ]
    return [dataclasses.replace(each, minutes=min(each.minutes, options.slice_minutes)) for each in found]


def _num(options: RunOptions, part: str) -> int:
    return sum(each.part == part for each in all_slices(options))


def _tasks(options: RunOptions) -> list[Task]:
    models = ("tiny_cnn",) if options.toy else ("small_cnn", "resnet18")
    return [
        Task(
            model=model,
            group_size=4,
            expected_batch_size=32,
            threads=options.threads,
            device=options.device,
        )
        for model in models
    ]


def _smallest(options: RunOptions) -> Task:
    return dataclasses.replace(_tasks(options)[-1], group_size=2)
