"""Every sweep there is, as `python sweeps/NAME.py --tiny` runs it, on one Ray that all of them share."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpgcl_core.accounting.tuning import cost as selection
from sweeps import noise_multiplier
from sweeps.service import run as service
from sweeps.service import searching
from sweeps.service.execution import OnResult, RaySession, TrialSource, ray_session
from sweeps.service.options import SweepOptions, parse_options
from sweeps.service.plan import SweepPlan, Trial, build_plan
from sweeps.service.points import along, of_methods
from sweeps.service.storage import SweepFolder
from tests.sweeps.support import ROOT, write_npz
from trainers.ray_worker import RayTrial, train_worker

SCRIPTS = sorted(path.stem for path in (ROOT / "sweeps").glob("*.py") if path.stem != "__init__")
each_script = pytest.mark.parametrize("name", SCRIPTS)

pytestmark = [pytest.mark.ray, pytest.mark.slow]


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


@dataclass
class Ran:
    """What a sweep in tiny mode has said and left."""

    name: str
    code: int
    out: str
    err: str
    folder: Path


class Trainer:
    """One process on Ray for the trainings of all sweeps: Tune would start one for each sweep anew.

    What a trial is travels there and back as with Tune, whose part other tests run.
    """

    def __init__(self) -> None:
        import ray

        self._process = ray.remote(num_cpus=1)(_Trains).remote()
        self._put, self._get = ray.put, ray.get

    def run_trials(
        self,
        session: RaySession,
        plan: SweepPlan,
        folder: SweepFolder,
        trials: Sequence[Trial],
        on_result: OnResult,
        budget: object = None,
        source: TrialSource | None = None,
    ) -> dict[str, str]:
        """As `sweeps.service.execution.run_trials`."""
        records, failed = [self._put(plan.data)], {}
        for planned in trials:
            trial = planned if source is None else source.next_trial()
            folder.mark_start(trial.name)
            given = RayTrial(
                name=trial.name,
                config=trial.config,
                checkpoint_folder=folder.checkpoint_folder(trial.name),
                ray_folder=session.scratch / "train",
                code_root=ROOT,
                gpus_per_worker=0,
                memory_share=0.5,
            )
            result = self._get(self._process.train.remote({"trial": given, "records": records}))
            if "error" in result:
                failed[trial.name] = result["error"]
            else:
                on_result(trial.name, result)
            if source is not None:
                source.ended(trial.name)
        return failed


class _Trains:
    def train(self, loop_config: dict[str, Any]) -> dict[str, Any]:
        return train_worker(loop_config)


@pytest.fixture(scope="module")
def shared_ray() -> Iterator[None]:
    before = dict(os.environ)
    with ray_session(SweepOptions()) as session, pytest.MonkeyPatch.context() as patch:
        trainer = Trainer()
        patch.setattr(service, "ray_session", lambda options: contextlib.nullcontext(session))
        for module in (service, searching):
            patch.setattr(module, "run_trials", trainer.run_trials)
        yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def shared_costs() -> Iterator[None]:
    """All tiny sweeps have nearly the same trials: what they cost together is computed once."""
    known: dict[str, float] = {}
    compute = selection.epsilon_pld

    def remembered(event: Any, delta: float) -> float:
        key = f"{event} at {delta}"
        if key not in known:
            known[key] = compute(event, delta)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "epsilon_pld", remembered)
        yield


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    folder = tmp_path_factory.mktemp("every")
    shutil.copy(empty_database, folder / "mlflow.db")
    return folder


def more_arguments(name: str, folder: Path) -> Sequence[str]:
    """What keeps a sweep from downloading data."""
    return ("--probe-datasets", write_npz(folder / "faces.npz", 60)) if name == "transfer" else ()


@pytest.fixture(scope="module", params=SCRIPTS)
def ran(request: pytest.FixtureRequest, shared_ray: None, shared_costs: None, storage: Path) -> Ran:
    name = str(request.param)
    where = ("--storage", str(storage), "--name", name)
    code, out, err = run_script(name, "--tiny", *where, *more_arguments(name, storage))
    return Ran(name, code, out, err, storage / "sweeps" / name)


def test_tiny_sweep_ends_with_code_0(ran: Ran) -> None:
    assert (ran.code, ran.err) == (0, ""), ran.out


def test_tiny_sweep_writes_its_figure_and_tables(ran: Ran) -> None:
    for ending in (".png", ".svg", ".pdf", ".html", ".csv", ".md"):
        path = ran.folder / (ran.name + ending)
        assert f"written: {path}" in ran.out
        assert path.stat().st_size > 100


def test_tiny_sweep_draws_something_in_its_figure(ran: Ran) -> None:
    with Image.open(ran.folder / f"{ran.name}.png") as opened:
        picture = np.asarray(opened.convert("RGB")).astype(int)
    coloured = (picture.max(axis=2) - picture.min(axis=2)) > 75  # words and axes are grey
    assert coloured.sum() > 100


def test_tiny_sweep_states_what_it_promises(ran: Ran) -> None:
    assert "ε of the whole sweep" in (ran.folder / "privacy_statement.md").read_text()
    assert "privacy: " in ran.out


@each_script
def test_help_tells_the_question_and_the_options(name: str) -> None:
    code, out, _ = run_script(name, "--help")
    docstring = runpy.run_path(str(ROOT / "sweeps" / f"{name}.py"))["__doc__"]
    assert code == 0
    assert docstring.splitlines()[0].split("?")[0][:40] in " ".join(out.replace("│", " ").split())
    assert "--expected-batch-size" in out


@each_script
def test_unknown_option_is_refused_with_code_2(name: str) -> None:
    code, _, err = run_script(name, "--group-sise", "4")
    assert code == 2
    assert "unknown option" in err


def test_every_noise_multiplier_has_the_epsilon_that_it_spends_as_its_target(tmp_path: Path) -> None:
    """The figure's title names the target; a default of 10 would be no trial's ε."""
    options = parse_options(
        noise_multiplier.NoiseMultiplierOptions,
        description="",
        tiny=noise_multiplier.TINY,
        full={},
        by_dataset={},
        arguments=("--tiny",),
    )
    points = along(options, "noise_multiplier", (1.0, 2.0), "sigma")
    plan = build_plan("noise-multiplier", options, points, calibration_folder=tmp_path)
    for trial in plan.trials:
        assert trial.params["target_epsilon"] == pytest.approx(trial.config.epsilon(), abs=1e-3)


def test_points_of_methods_give_each_method_what_it_takes() -> None:
    points = of_methods(
        SweepOptions(),
        ("dp_gcl", "logit_dp", "byol_groups", "non_private"),
        group_sizes=(2, 4),
        non_private=True,
    )
    assert [point.label for point in points] == [
        *("dp_gcl-S2-private", "dp_gcl-S2-epsinf", "dp_gcl-S4-private", "dp_gcl-S4-epsinf"),
        *("logit_dp-private", "logit_dp-epsinf", "byol_groups-private", "byol_groups-epsinf"),
        "non_private-epsinf",
    ]
    changes = {point.label: point.changes for point in points}
    assert changes["logit_dp-private"] == {"method": "logit_dp", "num_augmentations": 0}
    assert changes["byol_groups-private"]["group_size"] == 1
