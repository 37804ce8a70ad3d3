"""What each commit runs of the tests marked `ci` and `long`, and the times per marker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.conftest import TimesPerMarker, long_slice, share_of

LONG = [f"tests/{file}.py::test_{number}" for file in "abcd" for number in range(5)]


def test_slice_takes_one_test_of_each_file_before_a_second() -> None:
    for seed in map(str, range(20)):
        assert len({test.split("::")[0] for test in long_slice(LONG, 4, seed)}) == 4


def test_every_long_test_is_in_the_slice_of_some_commit() -> None:
    assert {test for seed in range(200) for test in long_slice(LONG, 3, str(seed))} == set(LONG)


def test_slice_depends_on_the_commit_alone() -> None:
    assert long_slice(LONG, 3, "a") == long_slice(LONG[::-1], 3, "a") != long_slice(LONG, 3, "b")


def test_share_of_the_files_follows_the_commit_and_covers_all_in_time() -> None:
    files = [f"tests/{number}.py" for number in range(10)]
    assert share_of(files, 4, "a") == share_of(files[::-1], 4, "a") != share_of(files, 4, "b")
    assert {len(share_of(files, 4, str(seed))) for seed in range(50)} == {3}
    assert {file for seed in range(50) for file in share_of(files, 4, str(seed))} == set(files)
    assert set(share_of(files, 1, "a")) == set(files)


def test_times_of_all_phases_of_a_test_are_added_to_its_marker() -> None:
    times, lines = TimesPerMarker(), list[str]()
    for markers in (["ci", "ray"], ["parametrize"], []):
        for when in ("setup", "call", "teardown"):
            report: Any = SimpleNamespace(when=when, markers=markers, duration=2.0, skipped=False)
            times.pytest_runtest_logreport(report)
    terminal: Any = SimpleNamespace(section=lambda *_, **__: None, write_line=lines.append)
    times.pytest_terminal_summary(terminal)
    assert lines == ["unmarked: 2 tests, 12 s", "ci: 1 tests, 6 s", "  of all these, ray: 1 tests, 6 s"]
