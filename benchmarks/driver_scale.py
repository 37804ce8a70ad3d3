#!/usr/bin/env python
"""Measure the overhead of the service: its driver's time per trial, and a trial's time outside training.

    python benchmarks/driver_scale.py                              # 100, 500 and 2,000 trials, and 300 on Ray
    python benchmarks/driver_scale.py --trials 20 200 --ray-trials 0 --trainings 0 --json
    python benchmarks/driver_scale.py --trials --ray-trials --trainings 6    # only time outside training

Each of the driver's numbers is measured in a separate process, in CPU seconds, so other programs on the
machine do not count. Results are replayed to the driver's own code as at the end of a trial, or come from a
real private Ray whose trials report at once. Then the finished sweep is resumed as a user would resume it,
its trials are loaded, and its report is written.

Seconds outside training are wall-clock seconds. Small trainings go through the service one at a time. A trial
lasts from the moment when the driver has finished with the previous trial until it has finished with this
one, so nothing is omitted. The seconds of its training steps are subtracted. The first trial, which starts
the processes, is reported separately.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import harness
from benchmarks.harness import MeasurementError, Output, Page, print_line
from dpgcl_core.errors import ConfigError, exit_on_bad_input

MODULE = "benchmarks.driver_scale"
NUM_STEPS = 10
SIZES = ("2", "4", "8", "16", "32")
BARS = {
    "seconds_per_trial": 0.15,
    "ratio": 1.2,
    "memory_bytes": 1.5 * 2**30,
    "resume_seconds": 20.0,
    "dashboard_seconds": 5.0,
    "report_bytes": 2e6,
}
"""Limits of the driver at the larger number of trials; `ratio` compares the seconds per trial."""


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """What to measure."""

    trials: tuple[int, ...] = (100, 500, 2000)
    """Numbers of trials of replayed sweeps, multiples of ten; the last is compared with the first."""
    ray_trials: tuple[int, ...] = (100, 300)
    """Numbers of trials of sweeps on a real Ray."""
    trainings: int = 6
    """Number of trials of a sweep that trains, one at a time; the first one is reported separately."""
    training_options: str = "--dataset digits --group-sizes 4 --num-steps 100 --expected-batch-size 256"
    """Options of the sweep that trains, in one string."""

    def __post_init__(self) -> None:
        if self.trainings == 1:
            raise ConfigError("trainings must be 0 or at least 2; got 1. The first is reported separately")


# In a separate process


def _result() -> dict[str, Any]:
    """Return a result like that of an ordinary training with a hundred recorded steps."""
    final = ("epsilon", "knn_accuracy", "linear_probe_accuracy")
    metrics = {name: 1.0 for name in (*final, "snr_first_step", "untrained_knn_accuracy")}
    metrics |= dict.fromkeys(("num_steps_charged", "num_steps_done"), float(NUM_STEPS))
    return {
        "metrics": metrics,
        "series": {name: [(step, 0.5) for step in range(100)] for name in ("snr", "loss")},
    }


def report_at_once(*_: object, **__: object) -> None:
    """A trial that does nothing."""
    from ray import tune

    tune.report(_result())


def _replay(
    session: None, plan: Any, folder: Any, trials: Sequence[Any], on_result: Any, *_: Any
) -> dict[str, str]:
    for trial in trials:
        folder.mark_start(trial.name)
        on_result(trial.name, _result())
    return {}


@dataclass
class _Meter:
    """Measures the CPU seconds of the functions that are called through it."""

    seconds: float = 0.0

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def metered(*arguments: Any, **options: Any) -> Any:
            start_seconds = time.process_time()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds += time.process_time() - start_seconds

        return metered


def _arguments(storage: str, num_trials: int) -> list[str]:
    repeats = num_trials // (2 * len(SIZES))
    return [
        *("--tiny", "--noise-multiplier", "1", "--name", "scale", "--storage", storage, "--no-references"),
        *(f"--num-steps={NUM_STEPS}", f"--repeats={repeats}", "--group-sizes", *SIZES),
    ]


def _sweep(arguments: Sequence[str]) -> None:
    """Run a sweep over S in this process, which prints nothing to stdout."""
    from sweeps import group_size
    from sweeps.service.options.sweep_command_line import parse_options
    from sweeps.service.running import sweep as service

    options = parse_options(group_size.GroupSizeOptions, description="", arguments=arguments)
    with contextlib.redirect_stdout(sys.stderr):
        code = service.execute("group-size", options, group_size.points(options), lambda *_: []).code
    if code != 0:
        raise MeasurementError(f"the sweep {' '.join(arguments)} ended with exit code {code}")


def _run(storage: str, num_trials: int, *, on_ray: bool) -> dict[str, float]:
    """Run a sweep of trials that do nothing in this process; writes to MLflow outside the loop count, too."""
    from sweeps.service.cluster.trial_runner import run_trials
    from sweeps.service.running import driver
    from sweeps.service.running.outbox import Outbox
    from trainers import ray_worker

    meter = _Meter()
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(driver, "run_trials", meter(run_trials if on_ray else _replay)))
        patches.enter_context(patch.object(Outbox, "finish", meter(Outbox.finish)))
        if on_ray:
            patches.enter_context(patch.object(ray_worker, "run_trial", report_at_once))
        else:
            patches.enter_context(patch.object(driver, "ray_session", lambda *_: contextlib.nullcontext()))
        _sweep(_arguments(storage, num_trials))
    peak = harness.memory_status("VmHWM")
    return {"seconds_per_trial": meter.seconds / num_trials, "memory_bytes": peak}


def _train(storage: str, num_trials: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a sweep that trains, one trial at a time; return wall-clock seconds outside its trainings."""
    from sweeps.service.cluster.trial_runner import run_trials
    from sweeps.service.running import driver

    ends: list[float] = []
    metrics: list[Mapping[str, float]] = []

    def noting(session: Any, plan: Any, folder: Any, trials: Any, on_result: Any, *further: Any) -> Any:
        def note(name: str, result: Mapping[str, Any]) -> None:
            metrics.append(result["metrics"])
            on_result(name, result)
            ends.append(time.time())

        ends.append(time.time())
        return run_trials(session, plan, folder, trials, note, *further)

    fixed = ("--max-concurrent-trials", "1", "--no-non-private", "--repeats", str(num_trials))
    with patch.object(driver, "run_trials", noting):
        _sweep([*fixed, "--storage", storage, *arguments])
    return around_trainings(ends, metrics)


def around_trainings(ends: Sequence[float], metrics: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the seconds of trials outside their training steps, and outside steps and scores.

    Args:
      ends: the time at which the first trial began, and the times at which the driver finished with each.
      metrics: the metrics of each trial.

    >>> one = {"train_seconds": 3.0, "evaluation_seconds": 0.5}
    >>> around_trainings([0.0, 9.0, 13.0, 17.5], [one, one, one])["not_training_seconds"]
    1.25
    """
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    around = [whole - each["train_seconds"] for whole, each in zip(seconds, metrics, strict=True)]
    bare = [rest - each["evaluation_seconds"] for rest, each in zip(around, metrics, strict=True)]
    return {
        "trial_seconds": statistics.median(seconds[1:]),
        "not_training_seconds": statistics.median(around[1:]),
        "not_training_or_evaluation_seconds": statistics.median(bare[1:]),
        "first_not_training_seconds": around[0],
        "all_not_training_seconds": around,
    }


def _load(storage: str) -> dict[str, float]:
    """Load the trials from which a sweep's figures are drawn, and write its report."""
    from dashboards.query.trial_frames import load_trials
    from dashboards.report.write import write_report

    uri, start_seconds = f"sqlite:///{storage}/mlflow.db", time.process_time()
    trials = load_trials(uri, "scale")
    loaded_seconds = time.process_time()
    report = write_report(uri, "scale", Path(storage))
    return {
        "dashboard_seconds": loaded_seconds - start_seconds,
        "rows": len(trials),
        "report_seconds": time.process_time() - loaded_seconds,
        "report_bytes": report.stat().st_size,
    }


def _in_this_process(order: Mapping[str, Any]) -> None:
    kind, storage, num_trials = order["kind"], order["storage"], order.get("num_trials", 0)
    if kind == "load":
        result = _load(storage)
    elif kind == "train":
        result = _train(storage, num_trials, order["arguments"])
    else:
        result = _run(storage, num_trials, on_ray=kind == "ray")
    print(json.dumps(result))


# In the measuring process


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(kind: str, num_trials: int, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Return the cost of a sweep.

    Args:
      kind: `replay`, whose sweep is then resumed and loaded, `ray` or `train`.
      num_trials: number of trials of the sweep.
      arguments: options of a sweep that trains.
    """
    print_line(f"{kind}: {num_trials} trials")
    with tempfile.TemporaryDirectory() as storage:
        row: dict[str, Any] = {"kind": kind, "trials": num_trials}
        order = {"kind": kind, "num_trials": num_trials, "storage": storage, "arguments": arguments}
        row |= harness.result_of_fresh_process(MODULE, order, of=kind, env={})
        if kind == "replay":
            command = ("sweeps/group_size.py", *_arguments(storage, num_trials), "--resume")
            resume = partial(harness.run_fresh_process, *command, of="resuming", env={})
            row["resume_seconds"] = harness.timed(resume, _child_seconds).processor
            order = {"kind": "load", "storage": storage}
            row |= harness.result_of_fresh_process(MODULE, order, of="loading", env={})
    return row


def misses(smaller: Mapping[str, Any], larger: Mapping[str, Any]) -> list[str]:
    """Return the limits that are exceeded, in words.

    >>> one = {"seconds_per_trial": 0.05} | dict.fromkeys(list(BARS)[2:], 1)
    >>> misses(one, one | {"seconds_per_trial": 0.07})
    ['ratio must be at most 1.2; got 1.4']
    """
    numbers = dict(larger) | {"ratio": larger["seconds_per_trial"] / smaller["seconds_per_trial"]}
    return [
        f"{name} must be at most {bar:.3g}; got {numbers[name]:.3g}"
        for name, bar in BARS.items()
        if numbers[name] > bar
    ]


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the driver's rows and the trainings' rows as Markdown tables."""

    def seconds(row: Mapping[str, Any], name: str) -> str:
        return f"{row[name]:.2f} s" if name in row else "–"

    driver = [row for row in rows if row["kind"] != "train"]
    trainings = [row for row in rows if row["kind"] == "train"]
    columns = ["results", "trials", "CPU per trial", "peak memory", "resume", "dashboards' data", "report"]
    lines = [
        [
            "replayed" if row["kind"] == "replay" else "on Ray",
            row["trials"],
            f"{1000 * row['seconds_per_trial']:.1f} ms",
            f"{row['memory_bytes'] / 2**20:.0f} MiB",
            seconds(row, "resume_seconds"),
            seconds(row, "dashboard_seconds"),
            seconds(row, "report_seconds")
            + (f", {row['report_bytes'] / 1e6:.2f} MB" if "report_bytes" in row else ""),
        ]
        for row in driver
    ]
    around = ("trial", "not_training", "not_training_or_evaluation", "first_not_training")
    titles = ["trainings", "trial", "without steps", "without steps and scores", "first, without steps"]
    both = [(columns, lines)] if driver else []
    if trainings:
        both.append(
            (
                titles,
                [[row["trials"], *(seconds(row, f"{name}_seconds") for name in around)] for row in trainings],
            )
        )
    return [harness.markdown_table(*each) for each in both]


def main() -> int:
    """Measure each number in a separate process."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        _in_this_process(json.loads(sys.argv[1]))
        return 0
    options = harness.read_options(Options, __doc__)
    facts = harness.about(device="cpu", threads=1)
    rows = [measure("replay", number) for number in options.trials]
    faults = misses(rows[0], rows[-1]) if rows else []
    rows += [measure("ray", number) for number in options.ray_trials if number]
    if options.trainings:
        rows.append(measure("train", options.trainings, options.training_options.split()))
    for each in faults:
        print_line(f"missed: {each}")
    page = Page(name="driver_scale", title="Overhead of the service", text=PAGE)
    return harness.publish(page, options, facts, {"rows": rows, "bars": BARS, "missed": faults}, tables(rows))


PAGE = """
The first table has CPU seconds: of the driver for each trial that ends, with MLflow on SQLite; of resuming
the finished sweep, from the start of the interpreter to the figure; of loading its trials from MLflow; and of
writing its report, with the size of its HTML. Replayed results are passed to the driver's own code as at the
end of a trial. Results on Ray come from trials that report at once. The second table has wall-clock seconds
of small trainings, which go through the service one at a time: medians without the first trial. A trial lasts
from the moment when the driver has finished with the previous trial until it has finished with this one.
"""


if __name__ == "__main__":
    exit_on_bad_input(main)
