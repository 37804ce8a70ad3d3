#!/usr/bin/env python
"""What a sweep of many trials costs its driver, with trials that do nothing.

    python benchmarks/driver_scale.py                              # 100, 500 and 2,000 trials, and 300 on Ray
    python benchmarks/driver_scale.py --trials 20 200 --ray-trials 0 --json

Each number is of a process of its own, in seconds of its processor: other programs on the machine do not
count. Results are handed to the driver's own code as a trial's end does it, or come from a real private Ray
whose trials report at once; then the sweep that is finished is resumed as a user does it, and its dashboards'
data are loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import harness
from benchmarks.harness import ROOT, MeasurementError, Output, Page, say
from dpgcl_core.errors import exit_on_bad_input

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
"""What the driver may take, at the larger number of trials; the ratio is that of seconds per trial."""


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """What to measure."""

    trials: tuple[int, ...] = (100, 500, 2000)
    """Trials of sweeps whose results are replayed, multiples of ten; the last is compared with the first."""
    ray_trials: tuple[int, ...] = (100, 300)
    """Trials of the sweeps on a real Ray."""


# In a process of its own


def _result() -> dict[str, Any]:
    """As of an ordinary training of a hundred recorded steps."""
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
    """Processor seconds of what is called through it."""

    seconds: float = 0.0

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def metered(*given: Any, **named: Any) -> Any:
            started = time.process_time()
            try:
                return call(*given, **named)
            finally:
                self.seconds += time.process_time() - started

        return metered


def _arguments(storage: str, num_trials: int) -> list[str]:
    repeats = num_trials // (2 * len(SIZES))
    return [
        *("--tiny", "--noise-multiplier", "1", "--name", "scale", "--storage", storage, "--no-references"),
        *(f"--num-steps={NUM_STEPS}", f"--repeats={repeats}", "--group-sizes", *SIZES),
    ]


def _run(storage: str, num_trials: int, *, on_ray: bool) -> dict[str, float]:
    """Run a sweep of trials that do nothing in this process; what MLflow gets beside the loop counts, too."""
    from sweeps import group_size
    from sweeps.service.options.command_line import parse_options
    from sweeps.service.running import sweep as service
    from sweeps.service.running.outbox import Outbox
    from sweeps.service.running.tune import run_trials
    from trainers import ray_worker

    meter = _Meter()
    options = parse_options(
        group_size.GroupSizeOptions, description="", arguments=_arguments(storage, num_trials)
    )
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(service, "run_trials", meter(run_trials if on_ray else _replay)))
        patches.enter_context(patch.object(Outbox, "finish", meter(Outbox.finish)))
        if on_ray:
            patches.enter_context(patch.object(ray_worker, "run_trial", report_at_once))
        else:
            patches.enter_context(patch.object(service, "ray_session", lambda *_: contextlib.nullcontext()))
        patches.enter_context(contextlib.redirect_stdout(sys.stderr))
        code = service.run_sweep("group-size", options, group_size.points(options), lambda *_: [])
    if code != 0:
        raise MeasurementError(f"the sweep of {num_trials} trials ended with {code}")
    peak = harness.memory_status("VmHWM")
    return {"seconds_per_trial": meter.seconds / num_trials, "memory_bytes": peak}


def _load(storage: str) -> dict[str, float]:
    """Load what the figures of a sweep are drawn from, and write its report."""
    from dashboards.query.trials import load_trials
    from dashboards.report.write import write_report

    uri, started = f"sqlite:///{storage}/mlflow.db", time.process_time()
    found = load_trials(uri, "scale")
    loaded = time.process_time()
    report = write_report(uri, "scale", Path(storage))
    reported = time.process_time()
    return {
        "dashboard_seconds": loaded - started,
        "rows": len(found),
        "report_seconds": reported - loaded,
        "report_bytes": report.stat().st_size,
    }


def _in_this_process(order: Mapping[str, Any]) -> None:
    if order["kind"] == "load":
        found = _load(order["storage"])
    else:
        found = _run(order["storage"], order["num_trials"], on_ray=order["kind"] == "ray")
    print(json.dumps(found))


# From the outside


def _in_fresh_process(*command: str) -> tuple[str, float]:
    """Run Python; return what it printed, and its processor seconds, from its first import on."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdout=out,
            stderr=err,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise MeasurementError(f"{' '.join(command)[:200]} failed: {err.read()[-2000:]}")
        return out.read(), used.ru_utime + used.ru_stime


def _ordered(**order: Any) -> dict[str, float]:
    printed, _ = _in_fresh_process("-m", MODULE, json.dumps(order))
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return found


def measure(kind: str, num_trials: int) -> dict[str, Any]:
    """Return what a sweep of so many trials took: run by `kind`, resumed when it is finished, and loaded."""
    say(f"{kind}: {num_trials} trials")
    with tempfile.TemporaryDirectory() as storage:
        found: dict[str, Any] = {"kind": kind, "trials": num_trials}
        found |= _ordered(kind=kind, num_trials=num_trials, storage=storage)
        if kind == "replay":
            _, found["resume_seconds"] = _in_fresh_process(
                "sweeps/group_size.py", *_arguments(storage, num_trials), "--resume"
            )
            found |= _ordered(kind="load", storage=storage)
    return found


def misses(smaller: Mapping[str, Any], larger: Mapping[str, Any]) -> list[str]:
    """Return the bars that are missed, in words.

    >>> one = {"seconds_per_trial": 0.05} | dict.fromkeys(list(BARS)[2:], 1)
    >>> misses(one, one | {"seconds_per_trial": 0.07})
    ['ratio is 1.4 and may be 1.2']
    """
    found = dict(larger) | {"ratio": larger["seconds_per_trial"] / smaller["seconds_per_trial"]}
    return [
        f"{name} is {found[name]:.3g} and may be {bar:.3g}" for name, bar in BARS.items() if found[name] > bar
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    columns = [
        "results",
        "trials",
        "CPU per trial",
        "peak memory",
        "resume",
        "dashboards' data",
        "report",
    ]

    def shown(row: Mapping[str, Any], name: str) -> str:
        return f"{row[name]:.2f} s" if name in row else "–"

    def page(row: Mapping[str, Any], name: str) -> str:
        size = f"{name}_bytes"
        return shown(row, f"{name}_seconds") + (f", {row[size] / 1e6:.2f} MB" if size in row else "")

    return harness.markdown_table(
        columns,
        [
            [
                "replayed" if row["kind"] == "replay" else "on Ray",
                row["trials"],
                f"{1000 * row['seconds_per_trial']:.1f} ms",
                f"{row['memory_bytes'] / 2**20:.0f} MiB",
                shown(row, "resume_seconds"),
                shown(row, "dashboard_seconds"),
                page(row, "report"),
            ]
            for row in rows
        ],
    )


def main() -> int:
    """Measure, in a process for each number."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        _in_this_process(json.loads(sys.argv[1]))
        return 0
    options = harness.read_options(Options, __doc__)
    facts = harness.about(device="cpu", threads=1)
    rows = [measure("replay", number) for number in options.trials]
    missed = misses(rows[0], rows[-1])
    rows += [measure("ray", number) for number in options.ray_trials]
    for each in missed:
        say(f"missed: {each}")
    page = Page(name="driver_scale", title="What a sweep of many trials costs its driver", text=PAGE)
    return harness.publish(
        page, options, facts, {"rows": rows, "bars": BARS, "missed": missed}, [table(rows)]
    )


PAGE = """
Processor seconds of the driver for each trial that ends, with MLflow on SQLite; of a resume of the finished
sweep, from the interpreter's start to the figure; of loading its trials from MLflow; and of writing its
report, with the size of its HTML. Replayed results are handed to the driver's own code as a trial's end does
it; those on Ray come from trials that report at once.
"""


if __name__ == "__main__":
    exit_on_bad_input(main)
