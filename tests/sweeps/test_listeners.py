"""A listener of a team's own: what it is told, when, and that it can stop nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dpgcl_core.errors import ConfigError
from sweeps import SweepBeginning, SweepEnd, TrialResult
from sweeps.service.running.listeners import Listeners, own_listener
from tests.sweeps.support import run_script, train_here, write_npz

PRIVATE_ONLY = {"num_restarts", "train_seconds", "step_seconds", "evaluation_seconds", "train_loss"}
SMALL = ("--tiny", "--no-references", "--no-non-private", "--group-sizes", "4")


RESULT = TrialResult(name="one", params={}, metrics={}, num_done=1)
END = SweepEnd(status="FINISHED", folder=Path("one"))


class Noting:
    """Notes what it is told."""

    events: list[Any]

    def on_begin(self, sweep: SweepBeginning) -> None:
        self.events.append(sweep)

    def on_result(self, result: TrialResult) -> None:
        self.events.append(result)

    def on_end(self, end: SweepEnd) -> None:
        self.events.append(end)


class Failing(Noting):
    """Fails at every result."""

    def on_result(self, result: TrialResult) -> None:
        raise RuntimeError("the chat is away")


class Changing(Noting):
    """Changes what it is told."""

    def on_result(self, result: TrialResult) -> None:
        for values in (result.params, result.metrics):
            assert isinstance(values, dict)
            values.clear()


class Half:
    """Lacks two methods."""

    def on_begin(self, sweep: SweepBeginning) -> None:
        """Hear nothing."""


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is told, by a module that the command line can name."""
    module: Any = ModuleType("team_chat")
    module.Noting, module.Failing, module.Half, module.Changing = Noting, Failing, Half, Changing
    monkeypatch.setitem(sys.modules, "team_chat", module)
    Noting.events = []
    yield Noting.events
    del Noting.events


@pytest.fixture
def start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_database: Path
) -> Callable[..., tuple[int, str, str]]:
    train_here(monkeypatch)
    monkeypatch.setenv("DPGCL_STORAGE", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    (tmp_path / "mlflow.db").write_bytes(empty_database.read_bytes())
    return lambda *more: run_script("group_size", *SMALL, "--name", "one", *more)


@pytest.mark.ci
def test_listener_is_told_of_the_beginning_each_result_and_the_end(
    events: list[Any], start: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    assert start("--listener", "team_chat:Noting")[0] == 0
    begun, *results, end = events
    assert (begun.name, begun.question, begun.num_trials, begun.num_done) == ("one", "group-size", 1, 0)
    assert [(each.name, each.num_done) for each in results] == [(results[0].name, 1)]
    assert results[0].params["group_size"] == 4
    assert "knn_accuracy" in results[0].metrics
    assert (end.status, end.folder, end.is_concluded) == ("FINISHED", tmp_path / "sweeps" / "one", True)
    assert end.statement is not None
    assert end.answer is not None


@pytest.mark.ci
def test_listener_that_changes_what_it_is_told_changes_no_result(
    events: list[Any], start: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, _ = start("--listener", "team_chat:Changing")
    assert code == 0, out
    assert "S = 4 is the only setting" in out
    assert (tmp_path / "sweeps" / "one" / "privacy_statement.json").is_file()


@pytest.mark.ci
def test_listener_of_private_data_gets_no_time_and_no_restart(
    events: list[Any], start: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    dataset = write_npz(tmp_path / "own.npz", 400)
    more = ("--dataset", dataset, "--evaluate-on", "digits", "--no-ledger", "--restart-steps", "4")
    code, out, err = start(*more, "--listener", "team_chat:Noting")
    assert code == 0, (out, err)
    (result,) = [each for each in events if isinstance(each, TrialResult)]
    assert not PRIVATE_ONLY & result.metrics.keys()
    assert "epsilon" in result.metrics


def test_listener_that_fails_stops_nothing(
    events: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beginning = SweepBeginning(name="one", question="group-size", params={}, num_trials=1, num_done=0)
    listeners = Listeners(own_listener("team_chat:Failing"), own_listener("team_chat:Noting"))
    listeners.on_begin(beginning)
    listeners.on_result(RESULT)
    listeners.on_end(END)
    assert events == [beginning, beginning, RESULT, END, END]
    warning = "warning: the listener Failing raised RuntimeError: the chat is away"
    assert capsys.readouterr().out.splitlines() == [warning]


@pytest.mark.parametrize("name", ["team_chat:Noone", "nowhere.at.all:Noting", "team_chat:Half", "team_chat"])
def test_listener_that_is_none_is_refused_before_anything_starts(name: str, events: list[Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        own_listener(name)
    assert name in str(refusal.value)
