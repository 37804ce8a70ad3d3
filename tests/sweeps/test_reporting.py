"""When a sweep writes its report, by a clock of the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dpgcl_core.errors import TrackingError
from sweeps.service.running import reporting
from sweeps.service.running.listeners import SweepEnd, TrialResult
from sweeps.service.running.reporting import ReportListener


@dataclass
class Written:
    """What a reporter does, at which seconds.

    Attributes:
      at: when a report was written.
      now: the clock.
      takes: seconds of one report.
      fails: whether MLflow does not answer.
    """

    at: list[float] = field(default_factory=list)
    now: float = 0.0
    takes: float = 1.0
    fails: bool = False

    def write(self, uri: str, name: str, folder: Path) -> Path:
        self.at.append(self.now)
        self.now += self.takes
        if self.fails:
            raise TrackingError("MLflow does not answer")
        return folder / reporting.REPORT


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    found = Written()
    monkeypatch.setattr(reporting, "write_report", found.write)
    return found


RESULT = TrialResult(name="one", params={}, metrics={}, num_done=1)


class Mlflow:
    """Takes all."""

    untracked = ()

    def __init__(self) -> None:
        self.logged: list[Path] = []

    def log_artifact(self, path: Path) -> None:
        self.logged.append(path)


def listener(folder: Path, now: Callable[[], float], mlflow: Any = None) -> ReportListener:
    return ReportListener("sqlite:///x", folder, mlflow or Mlflow(), now=now)


def ended(folder: Path, *, is_concluded: bool = True) -> SweepEnd:
    return SweepEnd(status="FINISHED", folder=folder, is_concluded=is_concluded)


@pytest.fixture
def refreshed(written: Written, tmp_path: Path) -> Callable[[float], None]:
    """A trial that ends at some second; its report is waited for."""
    report = listener(tmp_path, lambda: written.now)

    def at(seconds: float) -> None:
        written.now = seconds
        report.on_result(RESULT)
        if report._thread is not None:
            report._thread.join()

    return at


def test_report_is_written_at_most_once_a_minute(
    written: Written, refreshed: Callable[[float], None]
) -> None:
    for seconds in (1, 59, 61, 62, 100, 121, 123):
        refreshed(seconds)
    assert written.at == [61, 123]


def test_report_that_takes_long_comes_seldom(written: Written, refreshed: Callable[[float], None]) -> None:
    written.takes = 10
    for seconds in (61, 140, 260, 280):
        refreshed(seconds)
    assert written.at == [61, 280]


def test_report_that_fails_ends_nothing_and_is_tried_again(
    written: Written, refreshed: Callable[[float], None]
) -> None:
    written.fails = True
    refreshed(61)
    refreshed(130)
    assert written.at == [61, 130]


def test_result_waits_for_nothing_and_one_report_is_written_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, may_end, count = threading.Event(), threading.Event(), list[int]()

    def write(uri: str, name: str, folder: Path) -> Path:
        count.append(1)
        begun.set()
        may_end.wait(60)
        return folder

    monkeypatch.setattr(reporting, "write_report", write)
    seconds = iter([0.0, 100.0, 101.0, 500.0, *[600.0] * 9])
    report = listener(tmp_path, lambda: next(seconds))
    report.on_result(RESULT)
    assert begun.wait(60)
    report.on_result(RESULT)
    assert len(count) == 1
    may_end.set()
    report.on_end(ended(tmp_path))
    assert len(count) == 2


def test_end_does_not_wait_for_ever_for_a_server_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(reporting, "write_report", lambda *_: may_end.wait(60))
    monkeypatch.setattr(reporting, "_PATIENCE_SECONDS", 0.01)
    seconds = iter([0.0, *[100.0] * 9])
    report = listener(tmp_path, lambda: next(seconds))
    report.on_result(RESULT)
    report.on_end(ended(tmp_path))
    assert "python -m dashboards report" in capsys.readouterr().out
    may_end.set()


def test_last_report_is_logged_or_says_what_is_wrong(
    written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow = Mlflow()
    report = listener(tmp_path, lambda: written.now, mlflow)
    report.on_end(ended(tmp_path))
    assert mlflow.logged == [tmp_path / reporting.REPORT]
    written.fails = True
    report.on_end(ended(tmp_path))
    assert "warning: the report: MLflow does not answer" in capsys.readouterr().out
    assert len(mlflow.logged) == 1


def test_no_report_is_written_of_a_sweep_that_was_stopped_or_of_results_that_mlflow_lacks(
    written: Written, tmp_path: Path
) -> None:
    mlflow: Any = Mlflow()
    listener(tmp_path, lambda: written.now, mlflow).on_end(ended(tmp_path, is_concluded=False))
    mlflow.untracked = ("one",)
    listener(tmp_path, lambda: written.now, mlflow).on_end(ended(tmp_path))
    assert written.at == []
