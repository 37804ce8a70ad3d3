"""What the tests of the sweep service share: options, plans and sweeps as a user would start them."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sweeps import group_size
from sweeps.service.cluster.execution import OnResult
from sweeps.service.cluster.trial_failure import TrialFailure
from sweeps.service.cluster.trial_queue import TrialSource
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.options.sweep_options import SweepOptions, errors_in_flags
from sweeps.service.planning.inputs import EarlierSweep, PlanInputs
from sweeps.service.planning.plan import SweepPlan, build_plan
from sweeps.service.planning.sweep_data import load_training_data
from sweeps.service.planning.trials import Point, Trial
from sweeps.service.privacy.ledger_choice import check_ledger_options
from sweeps.service.running import driver
from sweeps.service.running.conclude import Figure
from sweeps.service.running.sweep import execute
from sweeps.service.storage.sweep_folder import SweepFolder
from trainers import ray_worker
from trainers.config.tree import replace_options
from trainers.data.dataset import TrainingData

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "sweeps" / "group_size.py"

# What decides a sweep's place and connection must come from the test alone.
_NOT_INHERITED = (
    "DPGCL_STORAGE",
    "DPGCL_LEDGER",
    "MLFLOW_TRACKING_URI",
    "RAY_ADDRESS",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_AUTH_TOKEN",  # a sweep that ran in this process may have left one, which hides a cluster's own
)


def options(*arguments: str) -> group_size.GroupSizeOptions:
    """The options of the group-size sweep for a command line."""
    return parse_options(group_size.GroupSizeOptions, description="", arguments=arguments)


def given(**values: Any) -> SweepOptions:
    """The options of a sweep, some of them given by name."""
    return replace_options(SweepOptions(), **values)


def loaded(chosen: SweepOptions) -> tuple[TrainingData, list[str]]:
    """The records of a sweep, and what must be said about them."""
    return load_training_data(
        chosen.data,
        score_on_held_out=chosen.evaluation.score_on_held_out,
        num_records_public=chosen.mechanism.num_records_public,
        has_shards=chosen.mechanism.shards > 1,
    )


def check_ledger(chosen: SweepOptions) -> None:
    """Refuses what a sweep refuses of its ledger before anything is read."""
    check_ledger_options(chosen.data, chosen.ledger, dry_run=chosen.service.dry_run)


def plan_of(
    question: str,
    chosen: SweepOptions,
    points: Sequence[Point],
    *,
    calibration_folder: Path | None = None,
    earlier: tuple[EarlierSweep, ...] = (),
) -> SweepPlan:
    """The plan of a sweep, its data loaded."""
    data, notes = loaded(chosen)
    return build_plan(
        PlanInputs(
            question=question,
            options=chosen,
            points=points,
            data=data,
            notes=notes,
            calibration_folder=calibration_folder,
            earlier=earlier,
        )
    )


def plan(*arguments: str, calibrations: Path | None = None) -> SweepPlan:
    """The plan of the group-size sweep for a command line."""
    chosen = options(*arguments)
    return plan_of("group-size", chosen, group_size.points(chosen), calibration_folder=calibrations)


def run_sweep(
    question: str, chosen: SweepOptions, points: Sequence[Point], figure: Figure, **more: Any
) -> int:
    """Runs a sweep as its script does, and returns the exit code."""
    with errors_in_flags(type(chosen)):
        return execute(question, chosen, points, figure, **more).code


def without_ray(monkeypatch: pytest.MonkeyPatch, run_trials: Callable[..., Any]) -> None:
    """Lets sweeps of this process run their trials by `run_trials`."""
    monkeypatch.setattr(driver, "ray_session", lambda *_: nullcontext())
    monkeypatch.setattr(driver, "run_trials", run_trials)


def train_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets sweeps of this process train in it, by what a worker on Ray calls."""
    monkeypatch.setattr(ray_worker, "ray", SimpleNamespace(get=lambda records: records))
    without_ray(monkeypatch, _train_here)


def _train_here(
    session: None,
    plan: SweepPlan,
    folder: SweepFolder,
    trials: Sequence[Trial],
    on_result: OnResult,
    budget: object = None,
    source: TrialSource | None = None,
) -> dict[str, TrialFailure]:
    """As `sweeps.service.cluster.trial_runner.run_trials`."""
    failed = {}
    for planned in trials:
        trial = planned if source is None else source.next_trial()
        folder.mark_start(trial.name)
        given = ray_worker.RayTrial(
            name=trial.name,
            config=trial.config,
            checkpoint_folder=folder.checkpoint_folder(trial.name),
            count_file=folder.count_file(trial.name),
            storage_root=folder.root,
            ray_folder=folder.path / "ray",
            code_root=ROOT,
            gpus_per_worker=0,
            memory_share=0.5,
            is_paid=budget is not None,
            data_are_public=plan.data.train_is_public,
        )
        result = ray_worker.train_worker({"trial": given, "records": [plan.data]})
        if "error" in result:
            failed[trial.name] = TrialFailure.of_worker(result["error"])
        else:
            on_result(trial.name, result)
        if source is not None:
            source.note_end(trial.name)
    return failed


def run_script(name: str, *arguments: str) -> tuple[int, str, str]:
    """Runs `python sweeps/NAME.py ARGUMENTS` in this process: exit code, stdout and stderr."""
    script = ROOT / "sweeps" / f"{name}.py"
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *arguments])
        patch.setattr(sys, "path", [str(script.parent), *sys.path])
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as end,
        ):
            runpy.run_path(str(script), run_name="__main__")
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


def write_npz(
    path: Path, num_records: int, *, size: int = 8, classes: int = 3, drop: int | None = None
) -> str:
    """Writes random images with labels and returns the data set's name; `drop` leaves one record out."""
    generator = np.random.default_rng(7)
    kept = np.arange(num_records) != (-1 if drop is None else drop)
    images = generator.integers(0, 256, (num_records, size, size), dtype=np.uint8)
    np.savez(path, images=images[kept], labels=(np.arange(num_records) % classes)[kept])
    return f"npz:{path}"


def tracked_runs(client: Any, query: str = "") -> list[Any]:
    """The runs of all experiments in MLflow."""
    experiments = [each.experiment_id for each in client.search_experiments()]
    return list(client.search_runs(experiments, query))


def contents(folder: Path) -> list[str]:
    """Every path below `folder`, which need not exist."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a user with an empty home folder."""
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    # Matplotlib's font cache is the one thing that may lie in a home folder; here it is shared.
    own = {"HOME": str(home), "MPLCONFIGDIR": str(home.parent / "matplotlib"), "RAY_USAGE_STATS_ENABLED": "0"}
    return inherited | own | more


class Driver:
    """A sweep in a process of its own, as a user starts it."""

    def __init__(
        self,
        *arguments: str,
        home: Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        script: Path = SCRIPT,
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._log = home.parent / f"driver-{time.monotonic_ns()}.log"
        with self._log.open("w") as out, self._log.with_suffix(".err").open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, str(script), *arguments],
                stdout=out,
                stderr=err,
                cwd=cwd or home,
                env=environment(home, **(env or {})),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout(self) -> str:
        return self._log.read_text()

    @property
    def stderr(self) -> str:
        return self._log.with_suffix(".err").read_text()

    def kill(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, seconds: float = 400) -> int:
        """The exit code; a sweep that hangs is killed and fails the test."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"no end after {seconds} s:\n{self.stdout}\n{self.stderr}") from None

    def wait_for(self, condition: Callable[[], Any], seconds: float = 240) -> Any:
        """The first true value of `condition`, while the sweep runs."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.ended():
            if value := condition():
                return value
            time.sleep(0.05)
        self.kill(signal.SIGKILL)
        raise AssertionError(f"it never came:\n{self.stdout}\n{self.stderr}")


def run(*arguments: str, home: Path, seconds: float = 400, **more: Any) -> tuple[int, Driver]:
    """Runs a sweep to its end; returns its exit code and what it said."""
    driver = Driver(*arguments, home=home, **more)
    return driver.wait(seconds), driver
