"""Real sweeps on private data without a ledger: their trainings die, and ε is what was charged in advance.

The true number of draws is in the journals of `tests.sweeps.faulty`, apart from all that a sweep keeps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dpgcl_core.accounting.composition import epsilon_pld, poisson_gaussian_event
from dpgcl_core.errors import ConfigError, StorageError
from sweeps.group_size import points
from sweeps.service.options.restarts import num_restart_steps
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.running import mlflow_listener
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps.support import Driver, given, options, run_sweep, without_ray, write_npz
from trainers.config.training import TrainingConfig

NUM_STEPS, EVERY_STEPS = 8, 4
FAULTY = (
    *("--tiny", "--noise-multiplier=1", "--repeats=2", "--name=one", "--network=tests.sweeps.faulty:network"),
    *(f"--num-steps={NUM_STEPS}", f"--checkpoint-every-steps={EVERY_STEPS}", "--max-concurrent-trials=1"),
    *("--expected-batch-size=32", "--num-records-public=128", "--no-ledger", "--max-restarts=3"),
)


PRIVATE = ("--tiny", "--expected-batch-size", "32", "--num-records-public", "128", "--no-non-private")
OWN = {"data_is": "private", "dataset": "npz:own.npz"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (OWN | {"no_ledger": True}, 10),
        (OWN | {"no_ledger": True, "checkpoint_every_steps": 3}, 3),
        (OWN | {"no_ledger": True, "checkpoint_every_steps": 500}, 100),
        (OWN | {"no_ledger": True, "restart_steps": 0}, 0),
        (OWN | {"no_ledger": True, "restart_steps": 25}, 25),
        (OWN, 10),  # a dry run
        (OWN | {"ledger": "ledger.db", "dataset_id": "own"}, None),
        (OWN | {"release": "sealed", "no_ledger": True}, 0),
        ({}, None),
        ({"restart_steps": 7}, 7),
    ],
)
def test_private_data_have_steps_for_restarts_unless_a_ledger_has(
    values: dict[str, Any], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DPGCL_LEDGER", raising=False)
    assert num_restart_steps(given(**values)) == expected


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (OWN | {"ledger": "ledger.db", "restart_steps": 5}, "only without a budget ledger.*got 5"),
        (OWN | {"release": "sealed", "restart_steps": 5}, "must be 0 with --release sealed.*got 5"),
        ({"restart_steps": -1}, "must not be negative"),
    ],
)
def test_steps_for_restarts_of_no_use_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        num_restart_steps(given(**values))


def test_all_that_is_stated_is_of_the_steps_for_restarts_too(
    make_plan: Callable[..., SweepPlan], tmp_path: Path
) -> None:
    more = ("--dataset", write_npz(tmp_path / "own.npz", 128), "--repeats", "2", "--restart-steps", "5")
    plan = make_plan(*PRIVATE, *more, "--noise-multiplier", "1", "--no-ledger")
    config, cost = plan.trials[0].config, plan.cost
    assert cost is not None
    assert config.epsilon() == pytest.approx(cost.training_epsilon, abs=1e-6)
    for num_steps, stated in ((15, cost.training_epsilon), (30, cost.tuned_epsilon)):
        event = poisson_gaussian_event(
            sampling_prob=config.mechanism.sampling_prob, noise_multiplier=1.0, num_steps=num_steps
        )
        assert stated == pytest.approx(epsilon_pld(event, cost.delta), abs=2e-3)
    assert plan.params()["num_restart_steps"] == 5


def test_count_that_was_taken_away_is_missed(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "one")
    folder.mark_start("a")
    assert folder.checkpoints("a", every_steps=4).refusal(10, 4) is None
    folder.checkpoints("a", every_steps=4).begin_attempt(0, 10, 4)
    shutil.rmtree(tmp_path / "one/drawn")
    folder.mark_start("a")
    with pytest.raises(StorageError, match=r"count of drawn steps .* is missing"):
        folder.checkpoints("a", every_steps=4).begin_attempt(0, 10, 4)


def _die_in(num_attempts: dict[str, int], used: list[str]) -> Callable[..., dict[str, str]]:
    """Stands in for Ray: trainings that end, or die so often after their first interval."""

    def run_trials(
        session: Any,
        plan: SweepPlan,
        folder: SweepFolder,
        trials: Sequence[Trial],
        on_result: Any,
        *more: Any,
    ) -> dict[str, str]:
        failed = {}
        for trial in trials:
            used.append(trial.name)
            for _ in range(num_attempts.get(trial.name, 0)):
                folder.mark_start(trial.name)
                _begin(folder, trial)
                failed[trial.name] = "its process died"
            if trial.name not in failed:
                on_result(trial.name, {"metrics": _metrics(trial.config), "series": {}})
        return failed

    return run_trials


def _begin(folder: SweepFolder, trial: Trial) -> None:
    mechanism = trial.config.mechanism
    folder.checkpoints(trial.name, every_steps=4).begin_attempt(
        0, mechanism.num_steps, mechanism.num_restart_steps
    )


def _metrics(config: TrainingConfig) -> dict[str, float]:
    num_charged = config.mechanism.num_steps_charged
    return {"epsilon": config.epsilon(), "num_steps_done": 10.0, "num_steps_charged": float(num_charged)}


@pytest.mark.ci
def test_training_that_may_not_go_on_is_left_out_and_the_sweep_ends(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    empty_database: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    monkeypatch.setattr(mlflow_listener, "cross_checks", lambda *_: {})
    arguments = (*PRIVATE, "--dataset", write_npz(tmp_path / "own.npz", 128), "--no-ledger", "--name", "one")
    arguments += ("--repeats", "3", "--restart-steps", "4", "--noise-multiplier", "1")
    first, second, third = (f"S4-Na1-private-r{repeat}" for repeat in range(3))
    found = []
    for number, more in enumerate([(), ("--resume",), ("--resume",)]):
        used: list[str] = []
        without_ray(monkeypatch, _die_in([{second: 1, third: 2}, {}, {}][number], used))
        chosen = options(*arguments, "--storage", str(tmp_path), *more)
        code = run_sweep("group-size", chosen, points(chosen), lambda *_: [])
        statement = json.loads((tmp_path / "sweeps/one/privacy_statement.json").read_text())
        found.append((code, used, statement["cost"]["tuned_epsilon"], capsys.readouterr().out))
    assert [code for code, *_ in found] == [1, 0, 0]
    assert [used for _, used, *_ in found] == [[first, second, third], [second], []]
    assert len({epsilon for *_, epsilon, _ in found}) == 1
    assert f"{third}: left out: its restarts could repeat 8 steps, but only R = 4" in found[1][-1]
    page = (tmp_path / "sweeps/one/privacy_statement.md").read_text()
    assert "up to R = 4 steps of each training may be drawn again" in page
    assert "42 steps in total, including steps for restarts" in page


def test_sweep_whose_every_training_is_left_out_has_failed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    empty_database: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    arguments = (*PRIVATE, "--dataset", write_npz(tmp_path / "own.npz", 128), "--no-ledger", "--name", "one")
    arguments += ("--restart-steps", "4", "--noise-multiplier", "1", "--storage", str(tmp_path))
    trial, found = "S4-Na1-private-r0", []
    for num_attempts, more in [(1, ()), (1, ("--resume",)), (0, ("--resume",))]:
        without_ray(monkeypatch, _die_in({trial: num_attempts}, []))
        chosen = options(*arguments, *more)
        code = run_sweep("group-size", chosen, points(chosen), lambda *_: [])
        found.append((code, capsys.readouterr().out))
    assert [code for code, _ in found] == [1, 1, 1]
    assert "continues from" not in found[0][1]
    assert f"{trial}: continues from step 0; 0 of R = 4 restart steps remain" in found[1][1]
    assert "Start a new sweep with a larger --restart-steps, or with --ledger; neither can be" in found[2][1]
    assert "\nno training was finished\n" in found[2][1]
    assert "--resume --name" not in found[2][1]


class Sweep:
    """A sweep of two trainings that die where a test says so."""

    def __init__(self, top: Path, num_workers: int) -> None:
        self.top, self.folder = top, top / "storage/sweeps/one"
        self._arguments = (*FAULTY, f"--num-workers={num_workers}", f"--storage={top / 'storage'}")
        self._data = write_npz(top / "own.npz", 128)

    def run(self, *more: str) -> tuple[int, str]:
        env = {"DPGCL_TEST_FOLDER": str(self.top)}
        driver = Driver(*self._arguments, f"--dataset={self._data}", *more, home=self.top / "home", env=env)
        return driver.wait(), driver.stdout + driver.stderr

    def die_at(self, repeat: int, num_drawn: int) -> None:
        (self.top / f"die-{repeat}").write_text(str(num_drawn))

    def drawn(self, repeat: int) -> int:
        return (self.top / f"journal-{repeat}").stat().st_size

    def counted(self, repeat: int) -> int:
        count = json.loads((self.folder / f"drawn/S4-Na1-private-r{repeat}.json").read_text())
        return int(count["num_steps"])

    def statement(self) -> dict[str, Any]:
        return json.loads((self.folder / "privacy_statement.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize("num_workers", [1, 2])
def test_real_sweep_whose_trainings_die_states_what_was_charged_in_advance(
    num_workers: int, tmp_path: Path
) -> None:
    sweep = Sweep(tmp_path, num_workers)
    sweep.die_at(0, 6)  # once, amid the second interval: R pays for it
    sweep.die_at(1, 3)
    code, said = sweep.run()
    assert code == 0, said
    assert [sweep.drawn(0), sweep.drawn(1)] == [6 + 4, 3 + 8]
    assert [sweep.counted(0), sweep.counted(1)] == [NUM_STEPS + EVERY_STEPS] * 2
    statement = sweep.statement()
    assert statement["promises"]
    assert statement["cost"] == statement["budget"]
    assert {each["num_restart_steps"] for each in statement["mechanisms"]} == {EVERY_STEPS}
    result = json.loads((sweep.folder / "trials/S4-Na1-private-r0.json").read_text())["metrics"]
    assert result["num_steps_charged"] == NUM_STEPS + EVERY_STEPS
    assert "num_restarts" not in result
