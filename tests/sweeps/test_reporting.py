"""When a sweep writes its report, by a clock of the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dpgcl_core.errors import TrackingError
from sweeps.service.running import reporting
from sweeps.service.running.reporting import Reporter


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


@pytest.fixture
def refreshed(written: Written, tmp_path: Path) -> Callable[[float], None]:
    """A refresh at some second, waited for."""
    reporter = Reporter("sqlite:///x", tmp_path, now=lambda: written.now)

    def at(seconds: float) -> None:
        written.now = seconds
        reporter.refresh()
        if reporter._thread is not None:
            reporter._thread.join()

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


def test_refresh_waits_for_nothing_and_one_report_is_written_at_a_time(
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
    reporter = Reporter("sqlite:///x", tmp_path, now=lambda: next(seconds))
    reporter.refresh()
    assert begun.wait(60)
    reporter.refresh()
    assert len(count) == 1
    may_end.set()
    reporter.finish()
    assert len(count) == 2


def test_end_does_not_wait_for_ever_for_a_server_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(reporting, "write_report", lambda *_: may_end.wait(60))
    monkeypatch.setattr(reporting, "_PATIENCE_SECONDS", 0.01)
    seconds = iter([0.0, *[100.0] * 9])
    reporter = Reporter("sqlite:///x", tmp_path, now=lambda: next(seconds))
    reporter.refresh()
    with pytest.raises(TrackingError, match="python -m dashboards report"):
        reporter.finish()
    may_end.set()


def test_last_report_tells_what_is_wrong(written: Written, tmp_path: Path) -> None:
    written.fails = True
    with pytest.raises(TrackingError):
        Reporter("sqlite:///x", tmp_path, now=lambda: written.now).finish()
