#!/usr/bin/env python
"""Seconds of a trial that are not training, against a trial that does nothing at all.

    python benchmarks/sweep_overhead.py                        # both modes, with a dated file
    python benchmarks/sweep_overhead.py --modes local --trials 3 --json

A real small sweep runs through the sweep service in a private Ray, one trial at a time. In the same Ray,
just before, empty trials run: a Tune function that launches a TorchTrainer with one worker that does
nothing. A trial's seconds are those between the driver's last word on the trial before and its last word
on this one, so that nothing is left out; the first trial, which starts the processes, is told apart. Both
kinds run under the settings that the service gives Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import harness
from benchmarks.harness import Output, Page, say
from dpgcl_core.errors import ConfigError, DpgclError, exit_on_bad_input
from sweeps import group_size
from sweeps.service.options.command_line import parse_options
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.budget import SweepBudget
from sweeps.service.running import sweep as run
from sweeps.service.running import tune as execution
from sweeps.service.running.tune import OnResult, RaySession, TrialSource
from sweeps.service.storage.folder import SweepFolder

Mode = Literal["local", "worker-processes"]
PHASES = (
    "Tune: result to next trial function",
    "Ray Train: start of the worker",
    "imports",
    "data",
    "training steps",
    "checkpoints",
    "evaluation",
    "accounting",
    "preparation",
    "Ray Train: end of the worker",
    "Tune: result to the driver",
    "results on disk and MLflow",
)
"""What a trial's seconds consist of, in order; they add up to the whole."""


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """What to measure."""

    modes: tuple[Mode, ...] = ("local", "worker-processes")
    """In the trial's own process, or in a worker group of its own."""
    trials: int = 6
    """Trials of each kind, the first of which is told apart."""
    dataset: str = "digits"
    """The sweep's data set."""
    num_steps: int = 100
    """Training steps of a trial."""
    expected_batch_size: int = 256
    """Expected records per step."""
    sweep_options: str = ""
    """Further options of the sweep, in one string."""

    def __post_init__(self) -> None:
        if self.trials < 2:
            raise ConfigError(
                f"trials must be at least 2, for the first one is told apart; got {self.trials}"
            )


class _Heard:
    """What the driver noted while a sweep and its empty trials ran."""

    def __init__(self, num_empty: int) -> None:
        self.num_empty = num_empty
        self.empty: list[float] = []
        self.started = 0.0
        self.arrived: dict[str, float] = {}
        self.left: dict[str, float] = {}
        self.metrics: dict[str, dict[str, float]] = {}
        self.folder: SweepFolder | None = None


def measure(options: Options, mode: Mode) -> dict[str, Any]:
    """Return the seconds of the trials of a small sweep, by phase, and of empty trials."""
    heard = _Heard(options.trials)
    with tempfile.TemporaryDirectory(prefix="dpgcl-overhead-") as storage:
        arguments = [
            *("--dataset", options.dataset, "--group-sizes", "4", "--no-non-private"),
            *("--repeats", str(options.trials), "--num-steps", str(options.num_steps)),
            *("--expected-batch-size", str(options.expected_batch_size)),
            *("--max-concurrent-trials", "1", "--storage", storage),
            *("--tracking-uri", f"sqlite:///{storage}/mlflow.db"),
            *(["--worker-processes"] if mode == "worker-processes" else []),
            *options.sweep_options.split(),
        ]
        with _listening(heard), contextlib.redirect_stdout(sys.stderr):
            code = _run_sweep(arguments)
        if code or len(heard.left) < 2:
            raise DpgclError(f"the sweep ended with exit code {code} and {len(heard.left)} results")
        rows = _rows(heard)
    return {"mode": mode, "arguments": _shown(arguments, storage), **_summary(heard, rows), "trials": rows}


def _shown(arguments: Sequence[str], storage: str) -> str:
    return " ".join(arguments).replace(storage, "STORAGE")


def _run_sweep(arguments: Sequence[str]) -> int:
    options = parse_options(
        group_size.GroupSizeOptions,
        description="",
        arguments=arguments,
    )
    return run.run_sweep("group-size", options, group_size.points(options), lambda *_: [])


@contextlib.contextmanager
def _listening(heard: _Heard) -> Iterator[None]:
    """Put the empty trials before the sweep's own, and mark around the functions of each trial."""

    def run_trials(
        session: RaySession,
        plan: SweepPlan,
        folder: SweepFolder,
        trials: Sequence[Trial],
        on_result: OnResult,
        budget: SweepBudget | None = None,
        source: TrialSource | None = None,
    ) -> dict[str, str]:
        from benchmarks import trial_marks  # imports Ray, whose settings are made by now
        from trainers import ray_worker

        _run_empty(heard, session)
        heard.folder = folder
        heard.started = time.time()

        def noting(name: str, result: dict[str, Any]) -> None:
            heard.arrived[name] = time.time()
            heard.metrics[name] = result["metrics"]
            on_result(name, result)
            heard.left[name] = time.time()

        ray_worker.run_trial = trial_marks.marked_run_trial
        try:
            return execution.run_trials(session, plan, folder, trials, noting, budget, source)
        finally:
            ray_worker.run_trial = trial_marks.run_trial

    with patch.object(run, "run_trials", run_trials):
        yield


def _run_empty(heard: _Heard, session: RaySession) -> None:
    """Run the empty trials, one at a time, and note the seconds of each."""
    from ray import tune

    from benchmarks.trial_marks import empty_trial

    ended: list[float] = [time.time()]

    class Hear(tune.Callback):
        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            ended.append(time.time())

    function = tune.with_parameters(empty_trial, storage=str(session.scratch / "empty-train"))
    tune.Tuner(
        tune.with_resources(function, {"memory": 200 * 2**20}),
        param_space={"index": tune.grid_search(list(range(heard.num_empty)))},
        tune_config=tune.TuneConfig(max_concurrent_trials=1, reuse_actors=True),
        run_config=tune.RunConfig(
            name="empty", storage_path=str(session.scratch), callbacks=[Hear()], verbose=0
        ),
    ).fit()
    heard.empty = [after - before for before, after in itertools.pairwise(ended)]


def _rows(heard: _Heard) -> list[dict[str, Any]]:
    """Return one row per trial in the order they ended: its seconds, in all and by phase."""
    from benchmarks.trial_marks import marks_file

    assert heard.folder is not None
    rows, before = [], heard.started
    for name, left in sorted(heard.left.items(), key=lambda item: item[1]):
        lines = marks_file(heard.folder.checkpoint_folder(name), name).read_text().splitlines()
        marks = {found["phase"]: found for found in map(json.loads, lines)}
        at = {phase: found["time"] for phase, found in marks.items()}
        metrics = heard.metrics[name]
        # A worker's process of its own imports when it is given its function; one that stays has done so.
        worker, trained = marks["worker"], marks["trained"]
        imports = worker["import_seconds"] if worker["import_started"] > at["function"] else 0.0
        saves, scores = trained["checkpoint_seconds"], trained["all_evaluation_seconds"]
        epsilons = trained["accounting_seconds"]
        steps = metrics["train_seconds"] - saves  # all but the last checkpoint are saved between steps
        seconds = (
            at["function"] - before,
            at["worker"] - at["function"] - imports,
            at["imported"] - at["worker"] + imports,
            at["data"] - at["imported"],
            steps,
            saves,
            scores,
            epsilons,
            at["trained"] - at["data"] - steps - saves - scores - epsilons,
            at["fitted"] - at["trained"],
            heard.arrived[name] - at["fitted"],
            left - heard.arrived[name],
        )
        phases = dict(zip(PHASES, seconds, strict=True))
        rows.append({"seconds": left - before, "not_training_seconds": left - before - steps} | phases)
        before = left
    return rows


def _summary(heard: _Heard, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians after the first trial, and the first trial by itself."""
    later = rows[1:]
    medians = {name: statistics.median(row[name] for row in later) for name in rows[0]}
    empty = statistics.median(heard.empty[1:])
    scores = medians["evaluation"]
    return {
        "empty_seconds": empty,
        "all_empty_seconds": heard.empty,
        "first_empty_seconds": heard.empty[0],
        "seconds": medians["seconds"],
        "not_training_seconds": medians["not_training_seconds"],
        "not_training_or_evaluation_seconds": medians["not_training_seconds"] - scores,
        "ratio_to_empty": medians["not_training_seconds"] / empty,
        "ratio_to_empty_without_evaluation": (medians["not_training_seconds"] - scores) / empty,
        "first_not_training_seconds": rows[0]["not_training_seconds"],
        "phases": {name: medians[name] for name in PHASES},
    }


def tables(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the summary and the phases as Markdown tables."""
    summary = harness.markdown_table(
        ["mode", "empty trial", "ours, not training", "ratio", "without evaluation", "first trial"],
        [
            [
                result["mode"],
                f"{result['empty_seconds']:.2f} s",
                f"{result['not_training_seconds']:.2f} s",
                f"**{result['ratio_to_empty']:.2f}**",
                f"{result['not_training_or_evaluation_seconds']:.2f} s",
                f"{result['first_not_training_seconds']:.2f} s",
            ]
            for result in results
        ],
    )
    phases = harness.markdown_table(
        ["median seconds of a trial", *(result["mode"] for result in results)],
        [[name, *(f"{result['phases'][name]:.3f}" for result in results)] for name in PHASES],
    )
    return [summary, phases]


def main() -> int:
    """Measure every mode."""
    options = harness.read_options(Options, __doc__)
    facts = harness.about(device="cpu", threads=1)
    results = []
    for mode in options.modes:
        say(f"{mode}: {options.trials} empty trials, then {options.trials} of a sweep")
        results.append(measure(options, mode))
    result = {"settings": execution._QUIET, "modes": results}
    page = Page(name="sweep_overhead", title="Seconds of a trial that are not training", text=PAGE)
    return harness.publish(page, options, facts, result, tables(results))


PAGE = """
A small sweep through the sweep service and empty trials (a Tune function that launches a TorchTrainer with
one worker that does nothing), one trial at a time in the same Ray. Seconds from the driver's last word on
one trial to its last word on the next; medians without the first trial. The phases add up to the trial.
"""


if __name__ == "__main__":
    exit_on_bad_input(main)
