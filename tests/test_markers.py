"""The times per marker, and per file with tests marked `ci`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.conftest import SecondsPerFile, TimesPerMarker


def test_times_of_all_phases_of_a_test_are_added_to_its_marker() -> None:
    times, lines = TimesPerMarker(), list[str]()
    for markers in (["ci", "ray"], ["parametrize"], []):
        for when in ("setup", "call", "teardown"):
            report: Any = SimpleNamespace(when=when, markers=markers, duration=2.0, skipped=False)
            times.pytest_runtest_logreport(report)
    terminal: Any = SimpleNamespace(section=lambda *_, **__: None, write_line=lines.append)
    times.pytest_terminal_summary(terminal)
    assert lines == ["unmarked: 2 tests, 12 s", "ci: 1 tests, 6 s", "  of all these, ray: 1 tests, 6 s"]


def test_seconds_of_a_file_are_those_of_its_ci_tests_and_need_them_to_pass() -> None:
    seconds = SecondsPerFile()
    for file, markers, failed in (
        ("tests/test_a.py", ["ci"], False),
        ("tests/test_a.py", ["ci", "ray"], False),
        ("tests/test_a.py", [], False),
        ("tests/test_a.py", ["ci", "long"], False),
        ("tests/test_b.py", ["ci"], False),
        ("tests/test_b.py", ["ci"], True),
    ):
        report: Any = SimpleNamespace(nodeid=f"{file}::test", markers=markers, duration=2.0, failed=failed)
        seconds.pytest_runtest_logreport(report)
    assert seconds.measured() == {"tests/test_a.py": 4.0}
