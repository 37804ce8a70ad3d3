"""Every sweep there is, as `python sweeps/NAME.py --tiny` runs it, but for Ray: `test_run` tests its part."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sweeps import noise_multiplier
from sweeps.group_size import GroupSizeOptions, points
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.planning.points import along, of_methods
from sweeps.service.script_runner import run_question
from tests.sweeps.screen import screen_of, shown_in_terminal
from tests.sweeps.support import ROOT, plan_of, run_script, train_here, write_npz
from trainers import ray_worker
from trainers.training.loop import TrainingData

SCRIPTS = sorted(
    path.stem for path in (ROOT / "sweeps").glob("*.py") if path.stem not in ("__init__", "plan")
)
"""All but the planner, which trains nothing: `test_planner`."""
OF_CI = {
    *("ablation", "architectures", "augmentations", "classify", "clip_norm", "convergence", "lora_layers"),
    "methods",
    *("noise_multiplier", "num_augmentations", "search", "tan", "temperature", "transfer", "tuning"),
}
"""All but three, for their tiny modes train or plan for seconds each."""

each_script = pytest.mark.parametrize("name", SCRIPTS)


@dataclass
class Ran:
    """What a sweep in tiny mode has said and left."""

    name: str
    code: int
    out: str
    err: str
    folder: Path


@pytest.fixture(scope="module")
def training_once() -> Iterator[None]:
    """Of all trainings in these sweeps one of each kind is done; the others are given its result."""
    known: dict[object, dict[str, Any]] = {}
    train = ray_worker._train

    def trained(trial: ray_worker.RayTrial, data: TrainingData) -> dict[str, Any]:
        config = trial.config
        mechanism, read = config.mechanism, (data.train.images.shape, len(data.probes))
        kind = (config.network, config.evaluation, mechanism.method, mechanism.is_private, *read)
        if kind not in known:
            known[kind] = train(trial, data)
        metrics = known[kind]["metrics"] | {"epsilon": config.epsilon()}
        return {"metrics": metrics, "series": known[kind]["series"]}

    with pytest.MonkeyPatch.context() as patch:
        train_here(patch)
        patch.setattr(ray_worker, "_train", trained)
        yield


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    folder = tmp_path_factory.mktemp("every")
    shutil.copy(empty_database, folder / "mlflow.db")
    return folder


def more_arguments(name: str, folder: Path) -> Sequence[str]:
    """What keeps a sweep from downloading data."""
    return ("--probe-datasets", write_npz(folder / "faces.npz", 60)) if name == "transfer" else ()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.ci] if name in OF_CI else []) for name in SCRIPTS],
)
def ran(request: pytest.FixtureRequest, training_once: None, storage: Path) -> Ran:
    name = str(request.param)
    where = ("--storage", str(storage), "--name", name)
    code, out, err = run_script(name, "--tiny", *where, *more_arguments(name, storage))
    return Ran(name, code, out, err, storage / "sweeps" / name)


@pytest.mark.ci
def test_tiny_sweep_ends_with_code_0(ran: Ran) -> None:
    assert (ran.code, ran.err) == (0, ""), ran.out


def test_tiny_sweep_writes_its_figure_and_tables(ran: Ran) -> None:
    for ending in (".png", ".svg", ".pdf", ".csv", ".md"):
        path = ran.folder / (ran.name + ending)
        assert path.stat().st_size > 100


def test_tiny_sweep_names_its_folder_once(ran: Ran) -> None:
    assert ran.out.splitlines()[-1] == f"files: {ran.folder}"
    assert sum(ran.out.count(f"{ran.folder}{end}") for end in ("/", "\n")) == 2  # and the report


@pytest.mark.ci
def test_tiny_sweep_draws_something_in_its_figure(ran: Ran) -> None:
    with Image.open(ran.folder / f"{ran.name}.png") as opened:
        picture = np.asarray(opened.convert("RGB")).astype(int)
    coloured = (picture.max(axis=2) - picture.min(axis=2)) > 75  # words and axes are grey
    assert coloured.sum() > 100


def test_tiny_sweep_states_what_it_promises(ran: Ran) -> None:
    assert "ε of the whole sweep" in (ran.folder / "privacy_statement.md").read_text()
    assert "privacy: " in ran.out


def test_tiny_sweep_ends_in_one_answer(ran: Ran) -> None:
    lines = ran.out.splitlines()
    (answer,) = (line for line in lines if line.startswith("answer: "))
    kept = json.loads((ran.folder / "answer.json").read_text())
    assert answer == f"answer: {kept['lines'][0]}"
    assert kept["choices"]
    assert not any(line.startswith("warning: the answer") for line in lines)


def test_sweep_leaves_25_lines_on_a_terminal_however_many_trainings_it_has(
    training_once: None, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "200"), ("LINES", "50")):
        monkeypatch.setenv(name, value)
    where = ("--storage", str(storage), "--name", "lines")
    several = ("--group-sizes", "2", "4", "8", "16", "batch", "--repeats", "2")
    options = parse_options(GroupSizeOptions, description=None, arguments=["--tiny", *where, *several])
    codes = list[int]()
    written = shown_in_terminal(lambda: codes.append(run_question("group-size", options, points(options))))
    lines = [line for line in screen_of(written) if line]
    assert codes == [0], "\n".join(lines)
    assert len(lines) + 1 <= 25, "with the line that a script prints before all:\n" + "\n".join(lines)
    first = next(number for number, line in enumerate(lines) if line.startswith("n = "))
    last = next(number for number, line in enumerate(lines) if line.startswith("Open release: "))
    assert last - first < 5, "a plan takes five lines"
    assert [line.partition(":")[0] for line in lines[-3:]] == ["runs", "report", "files"]


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
        arguments=("--tiny",),
    )
    assert options.noise_multipliers == (1.0, 2.0)
    plan = plan_of("noise-multiplier", options, along(options), calibration_folder=tmp_path)
    for trial in plan.trials:
        assert trial.params["target_epsilon"] == pytest.approx(trial.config.epsilon(), abs=1e-3)


def test_points_of_methods_give_each_method_what_it_takes() -> None:
    points = of_methods(
        GroupSizeOptions(),
        ("dp_gcl", "logit_dp", "byol_groups", "non_private"),
        group_sizes=(2, 4),
    )
    assert [point.label for point in points] == [
        *("dp_gcl-S2-private", "dp_gcl-S2-epsinf", "dp_gcl-S4-private", "dp_gcl-S4-epsinf"),
        *("logit_dp-private", "logit_dp-epsinf", "byol_groups-private", "byol_groups-epsinf"),
        "non_private-epsinf",
    ]
    changes = {point.label: point.changes for point in points}
    assert changes["logit_dp-private"] == {"method": "logit_dp", "num_augmentations": 0}
    assert changes["byol_groups-private"]["group_size"] == 1
