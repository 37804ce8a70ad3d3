"""Sweeps that are resumed by their name: the line that is printed is the whole command. No Ray is started."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dpgcl_core.errors import ConfigError, StorageError
from sweeps.service.cluster.interruption import StopRequest
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps.support import ROOT, options, run_script, without_ray, write_npz
from trainers.files.launch_record import resume_line

pytestmark = pytest.mark.ci  # each plans a sweep or two

QUICK = ("--tiny", "--noise-multiplier", "1", "--no-non-private", "--no-references", "--num-steps", "3")
RESULT = {"metrics": {"epsilon": 1.0, "num_steps_charged": 3, "knn_accuracy": 0.5}, "series": {}}


class Ray:
    """Stands in for Ray: trainings end at once, but for the one that Ctrl-C comes in."""

    def __init__(self) -> None:
        self.num_left = 1
        self.trained: list[tuple[str, str]] = []
        self.steps: set[int] = set()

    def __call__(
        self,
        session: Any,
        plan: SweepPlan,
        folder: SweepFolder,
        trials: Sequence[Trial],
        on_result: Callable[[str, dict[str, Any]], None],
        budget: Any,
        source: Any,
    ) -> dict[str, str]:
        for _ in trials:
            trial = source.next_trial()
            folder.mark_start(trial.name)
            if self.num_left == 0:
                raise StopRequest(signal.SIGINT, is_saved=True)
            self.num_left -= 1
            on_result(trial.name, dict(RESULT))
            self.trained.append((folder.name, trial.name))
            self.steps.add(trial.config.mechanism.num_steps)
            source.note_end(trial.name)
        return {}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ray:
    found = Ray()
    without_ray(monkeypatch, found)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("DPGCL_STORAGE", "DPGCL_LEDGER", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return found


def pasted(said: str) -> tuple[str, list[str]]:
    """The script and the arguments of the command that was printed, as a shell would split it."""
    (line,) = [line for line in said.splitlines() if "continue with " in line]
    python, script, *arguments = shlex.split(line.partition("continue with ")[2])
    assert python == "python"
    assert Path(script).parent == ROOT / "sweeps"
    return Path(script).stem, arguments


@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("group_size", ("--repeats", "3")),
        ("search", ("--num-trials", "3", "--learning-rate-range", "0.01", "0.1")),
        ("methods", ("--methods", "dp_gcl", "--learning-rate-grid", "0.1", "0.2", "0.3")),
    ],
)
@pytest.mark.parametrize("name", ["my sweep", None])
def test_line_after_ctrl_c_continues_the_sweep_as_it_was_started(
    script: str, more: tuple[str, ...], name: str | None, ray: Ray, tmp_path: Path
) -> None:
    root = tmp_path / "results #1 of mine"
    chosen = () if name is None else ("--name", name.replace(" ", "-"))
    quick = tuple(word for word in QUICK if script == "group_size" or word != "--no-non-private")
    code, said, _ = run_script(script, *quick, *more, *chosen, "--storage", str(root))
    assert code == 130, said
    assert "a training that has saved its step repeats none" in said
    again, arguments = pasted(said)
    ray.num_left = 100
    code, said, errors = run_script(again, *arguments)
    assert code == 0, said + errors
    assert (again, set(arguments)) >= (script, {"--resume", "--name", str(root)})
    assert len(ray.trained) == len(set(ray.trained)) >= 3, "what was finished is not trained again"
    assert ray.steps == {3}
    assert {path.parent for path in root.glob("sweeps/*/plan.json")} == {
        root / "sweeps" / folder for folder, _ in ray.trained
    }


def test_bare_resume_continues_the_last_unfinished_sweep_of_the_script(ray: Ray, tmp_path: Path) -> None:
    place = ("--storage", str(tmp_path))
    for name in ("first", "second"):
        ray.num_left = 1
        assert run_script("group_size", *QUICK, "--repeats", "2", "--name", name, *place)[0] == 130
    ray.num_left = 100
    assert run_script("group_size", *QUICK, "--name", "finished", *place)[0] == 0
    ray.num_left = 0
    assert run_script("temperature", *QUICK, "--name", "another", *place)[0] == 130
    ray.num_left = 100
    for name in ("second", "first"):
        code, said, errors = run_script("group_size", "--resume", *place)
        assert code == 0, said + errors
        assert f"resuming {name}" in said
    code, _, errors = run_script("group_size", "--resume", *place)
    assert code == 2
    assert "no sweep of this script" in errors


@pytest.fixture
def stopped(ray: Ray, tmp_path: Path) -> Path:
    arguments = (*QUICK, "--repeats", "2", "--name", "one", "--storage", str(tmp_path))
    assert run_script("group_size", *arguments, "--time-budget", "7")[0] == 130
    ray.num_left = 100
    return tmp_path


def test_options_that_differ_from_the_recorded_ones_are_named_a_line_each(stopped: Path) -> None:
    place = ("--resume", "--name", "one", "--storage", str(stopped))
    more = ("--num-steps", "5", "--repeats", "2", "--group-sizes", "4", "8", "--checkpoint-every-steps", "9")
    code, _, errors = run_script("group_size", *place, *more)
    assert code == 2
    assert errors.splitlines()[1:] == [
        "  --num-steps 5: the sweep was started with 3",
        "  --group-sizes 4 8: the sweep was started with 4",
    ]


def test_what_a_preset_says_must_agree_too(stopped: Path) -> None:
    with pytest.raises(ConfigError, match="these differ") as error:
        options("--resume", "--name", "one", "--storage", str(stopped), "--full")
    assert any(line.startswith("--dataset fashion-mnist") for line in error.value.lines)


def test_what_no_result_depends_on_may_differ_and_is_not_recorded(stopped: Path) -> None:
    place = ("--resume", "--name", "one", "--storage", str(stopped))
    found = options(*place)
    assert (found.mechanism.num_steps, found.service.repeats, found.service.time_budget) == (3, 2, None)
    found = options(*place, "--time-budget", "3", "--quiet", "--threads-per-worker", "2")
    assert (found.service.time_budget, found.performance.threads_per_worker) == (3, 2)
    assert found.service.quiet


def test_whole_command_with_resume_continues_too(stopped: Path) -> None:
    code, said, errors = run_script(
        *("group_size", *QUICK, "--repeats", "2", "--name", "one", "--storage", str(stopped), "--resume")
    )
    assert code == 0, said + errors


def test_sweep_of_another_script_names_its_own_command(stopped: Path) -> None:
    code, _, errors = run_script("temperature", "--resume", "--name", "one", "--storage", str(stopped))
    assert code == 2
    assert f"{ROOT}/sweeps/group_size.py --storage {stopped} --resume --name one" in errors


def test_private_sweep_goes_on_without_a_ledger_as_it_was_begun(ray: Ray, tmp_path: Path) -> None:
    own = ("--dataset", write_npz(tmp_path / "own.npz", 128), "--num-records-public", "128", "--no-ledger")
    place = ("--name", "one", "--storage", str(tmp_path / "results"))
    small = ("--expected-batch-size", "32", "--repeats", "2")
    assert run_script("group_size", *QUICK, *own, *small, *place)[0] == 130
    ray.num_left = 100
    code, said, errors = run_script("group_size", "--resume", *place)
    assert code == 0, said + errors


def test_password_is_kept_nowhere(ray: Ray, tmp_path: Path) -> None:
    ray.num_left = 100
    secret = "sqlite:///" + str(tmp_path / "own.db") + "?password=swordfish"
    arguments = (*QUICK, "--name", "one", "--storage", str(tmp_path / "results"))
    run_script("group_size", *arguments, "--tracking-uri", secret)
    folder = tmp_path / "results" / "sweeps" / "one"
    command = json.loads((folder / "plan.json").read_text())["command"]
    assert (command["name"], command["addresses"]) == ("one", {})
    assert not [path for path in folder.glob("*.*") if b"swordfish" in path.read_bytes()]


def test_name_that_is_gone_is_nothing_to_resume(ray: Ray, tmp_path: Path) -> None:
    code, _, errors = run_script("group_size", "--resume", "--name", "gone", "--storage", str(tmp_path))
    assert code == 2
    assert "there is no sweep 'gone'" in errors


def test_line_of_a_sweep_from_python_names_its_program(tmp_path: Path) -> None:
    folder = tmp_path / "sweeps" / "one"
    folder.mkdir(parents=True)
    command = {"name": "one", "words": [], "options": "SweepOptions", "addresses": {}}
    (folder / "plan.json").write_text(json.dumps({"command": command}))
    assert resume_line(folder) == "the same program, with StorageOptions(name='one', resume=True)"


def test_bare_resume_where_nothing_was_begun_is_refused(ray: Ray, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no sweep of this script"):
        options("--resume", "--storage", str(tmp_path))
