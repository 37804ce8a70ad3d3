"""A training in a loop of one's own, killed and resumed: never more than T + R draws, and the same steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpgcl_core import attempts as attempts_module
from dpgcl_core.attempts import Attempts
from dpgcl_core.errors import ConfigError, StorageError
from dpgcl_core.noise.randomness import SeededNonPrivateRandomness
from dpgcl_core.private_training import PrivateTraining
from dpgcl_core.sampling.slots import SampledGroups
from tests.dpgcl_core.test_private_training import _flat, _loss, _make, _mechanism, _model, _Records
from tests.processes import FORK_SERVER

T, R = 3, 2
REFUSED = 3


def _training(
    folder: Path, model: nn.Module | None = None, **changes: Any
) -> tuple[PrivateTraining, nn.Module, torch.optim.Optimizer]:
    model = _model() if model is None else model
    optimizer = changes.pop("optimizer", torch.optim.Adam)(model.parameters(), lr=0.1)
    training = PrivateTraining(
        _mechanism(num_steps=T, num_restart_steps=changes.pop("num_restart_steps", R), **changes),
        model,
        optimizer,
        DataLoader(_Records(), batch_size=10),
        loss=_loss(model),
        folder=folder,
        mixes_no_records=True,
        randomness=SeededNonPrivateRandomness(1),
    )
    return training, model, optimizer


def _count(folder: Path) -> int:
    return Attempts(folder / "attempts").total().num_steps


def _states(folder: Path, num_steps: int = T) -> list[dict[str, Any]]:
    """Return the states of an attempt before its first step and after each step, as they are saved."""
    training, _, _ = _training(folder)
    draws, states = iter(training), list[dict[str, Any]]()
    for step in range(num_steps + 1):
        if step:
            training.step(next(draws))
        torch.save(training.state_dict(), folder.with_suffix(".pt"))
        states.append(torch.load(folder.with_suffix(".pt"), weights_only=True))
    return states


def test_resumed_training_takes_the_steps_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """With the same draws (seeded, labelled non-private), optimizer state and schedule."""
    weights, saved = [], dict[str, Any]()
    for num_steps in (T, 1, T):
        training, model, optimizer = _training(tmp_path / str(len(weights) > 0))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if saved and num_steps == T:
            training.load_state_dict(saved["training"])
            schedule.load_state_dict(saved["schedule"])
        draws = iter(training)
        while training.num_steps_taken < num_steps:
            training.step(next(draws))
            schedule.step()
        saved = {} if not weights else {"training": training.state_dict(), "schedule": schedule.state_dict()}
        weights.append(_flat(model))
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**num_steps
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])


def test_state_holds_weights_and_numbers_but_no_generator_and_no_count(tmp_path: Path) -> None:
    def leaves(value: Any) -> Iterator[Any]:
        parts = value.values() if isinstance(value, dict) else value
        for part in parts if isinstance(value, dict | list | tuple) else ():
            yield from leaves(part)
        if not isinstance(value, dict | list | tuple):
            yield value

    state = _states(tmp_path / "one")[2]
    assert state.keys() == {"mechanism", "num_steps_taken", "model", "optimizer_class", "optimizer"}
    assert {type(leaf) for leaf in leaves(state)} <= {Tensor, int, float, bool, str, type(None)}
    assert not [leaf for leaf in leaves(state) if isinstance(leaf, Tensor) and leaf.dtype == torch.uint8]
    repeated, _, _ = _training(tmp_path / "one")
    repeated.load_state_dict(state)
    next(iter(repeated))  # counted, and lost
    again, _, _ = _training(tmp_path / "one")
    again.load_state_dict(state)
    assert again.state_dict().keys() == state.keys()
    assert again.state_dict()["num_steps_taken"] == 2


def test_older_state_lowers_no_count_and_repeats_at_most_r_steps(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    states, num_drawn = _states(folder), T
    for _ in range(R):
        training, _, _ = _training(folder)
        training.load_state_dict(states[T - 1])
        assert _count(folder) == num_drawn
        training.step(next(iter(training)))
        num_drawn += 1
        assert _count(folder) == num_drawn
    for step in (0, 1, 2):
        training, model, _ = _training(folder)
        training.load_state_dict(states[step])
        before = _flat(model)
        with pytest.raises(StorageError, match=r"at most num_restart_steps = 2 steps, .* repeat \d"):
            next(iter(training))
        assert torch.equal(_flat(model), before)
    assert _count(folder) == T + R


def _attempt(folder: Path, saved: Path, journal: Path, kill_at: int) -> None:
    """One attempt, which is killed at an event: before a draw, or before or after a durable write."""
    events = iter(range(1, 10**6))

    def pass_event() -> None:
        if next(events) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    draw, write = SampledGroups.draw, attempts_module.replacing

    def journaled(*given: Any, **named: Any) -> Any:
        pass_event()
        with journal.open("ab", buffering=0) as file:
            file.write(b".")
        return draw(*given, **named)

    class Written:
        def __init__(self, *given: Any) -> None:
            self._file = write(*given)

        def __enter__(self) -> Any:
            pass_event()
            return self._file.__enter__()

        def __exit__(self, *error: Any) -> Any:
            result = self._file.__exit__(*error)
            pass_event()
            return result

    SampledGroups.draw, attempts_module.replacing = journaled, Written  # type: ignore[assignment,method-assign]
    torch.set_num_threads(1)
    training, _, _ = _training(folder)
    if saved.exists():
        training.load_state_dict(torch.load(saved))
    with suppress(StorageError):
        for views in training:
            training.step(views)
            pass_event()
            torch.save(training.state_dict(), saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
        os._exit(0)
    os._exit(REFUSED)


@pytest.mark.ci
@pytest.mark.parametrize("kill_at", [2, 4, 5, 6, 8, 13])  # around the writes and draws of two steps
def test_killed_attempts_draw_no_more_than_counted_and_charged(kill_at: int, tmp_path: Path) -> None:
    """Every attempt is killed at the same event, and starts from the last state or from none."""
    folder, journal, saved = (tmp_path / name for name in ("one", "journal", "saved.pt"))
    journal.touch()
    for attempt in range(6):
        if attempt % 3 == 2:
            saved.unlink(missing_ok=True)
        process = FORK_SERVER.Process(target=_attempt, args=(folder, saved, journal, kill_at))
        process.start()
        process.join(120)
        num_drawn = journal.stat().st_size
        assert num_drawn <= _count(folder) <= T + R
        assert process.exitcode in (0, REFUSED, -signal.SIGKILL)
    assert process.exitcode == REFUSED or num_drawn == 0  # in the end, or killed before every draw


def test_epsilon_and_noise_are_those_of_all_steps_that_restarts_may_take(tmp_path: Path) -> None:
    training = _make(num_restart_steps=5, folder=tmp_path)
    assert training.mechanism.num_steps_charged == 15
    assert 2.9 < training.epsilon() == training.mechanism.epsilon(15) <= 3.0
    assert training.mechanism.noise_multiplier > _make().mechanism.noise_multiplier
    training.step(next(iter(training)))
    assert training.epsilon() == training.mechanism.epsilon(15)
    assert "after 1 of 10 steps and 5 repeated steps" in training.statement()


@pytest.mark.parametrize("given", [{"folder": "one"}, {"num_restart_steps": 5}])
def test_folder_and_restart_steps_are_set_together(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"needs both folder, .* and num_restart_steps, .* got"):
        _make(**given)


def test_training_without_a_folder_has_no_state() -> None:
    training = _make()
    for call in (training.state_dict, lambda: training.load_state_dict({})):
        with pytest.raises(ConfigError, match="only a training with folder and num_restart_steps"):
            call()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"noise_multiplier": 2.0}, r"another mechanism \(noise_multiplier: 1.5 there, 2.0 here\)"),
        ({"num_restart_steps": 4}, r"another mechanism \(num_restart_steps: 2 there, 4 here\)"),
        (
            {"optimizer": torch.optim.SGD},
            r"another optimizer, torch.optim.adam.Adam; got .*sgd.SGD",
        ),
        ({"model": nn.Sequential(nn.Linear(5, 3))}, "another model; '0.weight' differs"),
    ],
)
def test_state_of_another_training_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    state = _states(tmp_path / "one")[1]
    training, model, _ = _training(tmp_path / "other", **changes)
    before = _flat(model)
    with pytest.raises(ConfigError, match=named):
        training.load_state_dict(state)
    assert torch.equal(_flat(model), before)
    assert training.num_steps_taken == 0


@pytest.mark.parametrize("num_steps_taken", [-1, T + 1, 1.5, "1"])
def test_state_of_no_number_of_steps_is_refused(num_steps_taken: Any, tmp_path: Path) -> None:
    state = _states(tmp_path / "one", 0)[0] | {"num_steps_taken": num_steps_taken}
    training, _, _ = _training(tmp_path / "one")
    with pytest.raises(ConfigError, match="num_steps_taken"):
        training.load_state_dict(state)


def test_model_state_is_no_state_of_a_training(tmp_path: Path) -> None:
    training, model, _ = _training(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"must be a result of PrivateTraining.state_dict\(\)"):
        training.load_state_dict(model.state_dict())


def test_state_is_taken_between_steps_and_loaded_before_them(tmp_path: Path) -> None:
    training, _, _ = _training(tmp_path / "one")
    state, views = training.state_dict(), next(iter(training))
    with pytest.raises(ConfigError, match="followed by exactly one step"):
        training.state_dict()
    training.step(views)
    with pytest.raises(ConfigError, match=r"before the first draw; got 1 steps taken"):
        training.load_state_dict(state)


def test_folder_of_another_training_is_refused(tmp_path: Path) -> None:
    """An R that is raised after results were seen is not charged in advance."""
    folder = tmp_path / "one"
    _states(folder, 1)
    training, _, _ = _training(folder, num_restart_steps=R + 1)
    with pytest.raises(ConfigError, match=r"another num_restart_steps: 2 there, 3 here"):
        next(iter(training))
    assert _count(folder) == 1


@pytest.mark.parametrize("lost", ["attempts", "mechanism.json"])
def test_folder_without_its_count_or_numbers_is_refused(lost: str, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    state = _states(folder, 1)[1]
    shutil.rmtree(folder / lost) if lost == "attempts" else (folder / lost).unlink()
    training, _, _ = _training(folder)
    training.load_state_dict(state)
    with pytest.raises(StorageError, match=r"counts 0 draws, but|missing or damaged"):
        next(iter(training))


def test_newer_attempt_ends_the_earlier_one(tmp_path: Path) -> None:
    first, _, _ = _training(tmp_path / "one")
    first.step(next(draws := iter(first)))
    second, _, _ = _training(tmp_path / "one")
    second.step(next(iter(second)))
    with pytest.raises(StorageError, match="outdated by attempt 2"):
        next(draws)
    assert _count(tmp_path / "one") == 2
    assert json.loads((tmp_path / "one/mechanism.json").read_text())["num_restart_steps"] == R


def test_fork_of_an_attempt_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, _, _ = _training(tmp_path)
    training.step(next(draws := iter(training)))
    monkeypatch.setattr(attempts_module.os, "getpid", lambda: -1)
    with pytest.raises(StorageError, match="got a fork"):
        next(draws)
    assert _count(tmp_path) == 1
