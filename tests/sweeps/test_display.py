"""What a sweep shows while it works: lines, a region in a terminal, and no more than must be with --quiet."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from sweeps.service.cluster.training_progress import SweepWatch
from sweeps.service.console import display as displays
from sweeps.service.console.display import LATER_SECONDS, SILENCE_SECONDS, Display
from sweeps.service.console.terminal import print_line, print_link, warn
from tests.sweeps.screen import screen_of, shown_in_terminal


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def tell(path: Path, step: int, num_steps: int = 100) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"step": step, "num_steps": num_steps}))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [tmp_path / name / "progress.json" for name in "ab"]


def drawn(watch: SweepWatch, now: float) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(watch.table(now))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


# How far trainings are


def test_watch_tells_step_and_time_left(files: list[Path]) -> None:
    watch = SweepWatch(4, 1, shows_times=True)
    for name, file in zip(("a", "b"), files, strict=True):
        watch.note_start(name, 100, file)
    assert watch.line(0.0) == "1 of 4 trials done; a: starting; b: starting"
    tell(files[0], 10)
    watch.line(10.0)
    tell(files[0], 30)
    # Of three trainings left 0.3 was done in 10 s, counted from 0.1: 2.7 more take 135 s.
    told = "a: step 30 of 100; b: starting; about 2 min 15 s left"
    assert watch.line(20.0) == f"1 of 4 trials done; {told}"
    assert "a         30 of 100" in drawn(watch, 20.0)
    assert watch.summary(20.0) == "1 of 4 trials done; about 2 min 15 s left"


def test_watch_of_private_data_tells_tenths_and_no_time_where_a_log_may_keep_it(files: list[Path]) -> None:
    """What is left is elapsed time over steps done: with both in a line, the time of a step would be, too."""
    watch = SweepWatch(1, 0)
    watch.note_start("a", 100, files[0])
    for step in (10, 39):
        tell(files[0], step)
        line = watch.line(float(step))
    assert line == "0 of 1 trial done; a: step 30 of 100"
    assert "39 of 100" in drawn(watch, 39.0), "in a terminal, to its operator"
    assert watch.summary(39.0) == "0 of 1 trial done; about 1 min 01 s left"


def test_watch_counts_each_end_once(files: list[Path]) -> None:
    watch = SweepWatch(2, 0)
    watch.note_start("a", 100, files[0])
    watch.note_end("a")
    watch.note_end("a")
    assert watch.line(1.0) == "1 of 2 trials done; waiting for the first Ray process"


def test_watch_takes_no_steps_of_an_earlier_attempt_for_this_one(files: list[Path]) -> None:
    tell(files[0], 60)
    watch = SweepWatch(1, 0)
    watch.note_start("a", 100, files[0])
    assert "a: starting" in watch.line(0.0)


def test_watch_shows_scoring_and_no_more_rows_than_fit(tmp_path: Path) -> None:
    watch = SweepWatch(20, 0)
    for number in range(20):
        file = tmp_path / str(number) / "progress.json"
        watch.note_start(f"t{number}", 100, file)
        tell(file, 100)
    assert "t0: scoring" in watch.line(0.0)
    assert "17 more running" in watch.line(0.0)
    assert "and 8 more" in drawn(watch, 0.0)


# Lines


def test_silence_ends_after_ten_seconds_in_the_first_minute(
    clock: Clock, capsys: pytest.CaptureFixture[str], files: list[Path]
) -> None:
    display = Display(clock=clock)
    display.doing("starting Ray")
    for clock.now in range(1, 26):
        display.print_if_silent()
    assert capsys.readouterr().out.splitlines() == [
        "starting Ray …",
        "… starting Ray, 10 s",
        "… starting Ray, 20 s",
    ]
    watch = SweepWatch(2, 0)
    watch.note_start("a", 100, files[0])
    with display.watching(watch):
        clock.now = 20 + SILENCE_SECONDS
        display.print_if_silent()
        assert capsys.readouterr().out == "… 0 of 2 trials done; a: starting\n"
        watch.note_end("a")
        clock.now += LATER_SECONDS
        display.print_if_silent()
        assert capsys.readouterr().out.startswith("… 1 of 2 trials done")
        clock.now += LATER_SECONDS - 1
        display.print_if_silent()
        assert capsys.readouterr().out == ""


def test_line_that_was_said_puts_the_next_one_off(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(clock=clock)
    display.doing("starting Ray")
    clock.now = 9
    display.put("note: one")
    clock.now = 18
    display.print_if_silent()
    assert capsys.readouterr().out == "starting Ray …\nnote: one\n"


def test_quiet_leaves_what_must_be_seen(capsys: pytest.CaptureFixture[str]) -> None:
    with displays.show_progress(quiet=True):
        print_line("storage: /data")
        displays.doing("starting Ray")
        warn("warning: no gain")
        with displays.show_progress(quiet=False):  # of a second sweep in the same command
            print_line("storage: /data")
    print_line("after it")
    assert capsys.readouterr().out == "warning: no gain\nafter it\n"


def test_lines_are_whole_without_a_display(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("no answer from https://me:secret@host")
    displays.doing("starting Ray")
    assert capsys.readouterr().out == "no answer from https://***@host\nstarting Ray …\n"


# In a terminal


@pytest.fixture
def in_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], str]:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return shown_in_terminal


def test_result_of_a_training_stands_in_the_region_alone(
    in_terminal: Callable[[Callable[[], object]], str], files: list[Path]
) -> None:
    """A sweep of a hundred trainings leaves no hundred lines behind."""

    def act() -> None:
        with displays.show_progress(quiet=False):
            watch = SweepWatch(3, 0, shows_times=True)
            watch.note_start("trial-a", 100, files[0])
            with displays.watching(watch):
                live = displays._DISPLAYS[-1]._live
                assert live is not None
                displays.put_result("[1/3] trial-b: knn_accuracy 0.5")
                live.refresh()
            print_line("report: /data/report.html")

    written = in_terminal(act)
    assert "[1/3] trial-b: knn_accuracy 0.5" in written
    assert [line for line in screen_of(written) if line] == ["report: /data/report.html"]


def test_result_of_a_training_is_a_line_where_there_is_no_region(capsys: pytest.CaptureFixture[str]) -> None:
    with displays.show_progress(quiet=False):
        displays.put_result("[1/3] trial-b: knn_accuracy 0.5")
    assert capsys.readouterr().out == "[1/3] trial-b: knn_accuracy 0.5\n"


LONG = "http://127.0.0.1:5000/#/experiments/1/runs?" + "x" * 120


def test_region_is_below_the_lines(
    in_terminal: Callable[[Callable[[], object]], str], files: list[Path]
) -> None:
    def act() -> None:
        with displays.show_progress(quiet=False):
            print_line("storage: /data")
            watch = SweepWatch(3, 0, shows_times=True)
            watch.note_start("trial-a", 100, files[0])
            tell(files[0], 40)
            with displays.watching(watch):
                live = displays._DISPLAYS[-1]._live
                assert live is not None
                for number in range(5):
                    live.refresh()
                    print_line(f"said {number}")
                print("by Python", file=sys.stderr)
                live.refresh()
            print_link("runs: ", LONG)

    written = in_terminal(act)
    screen = screen_of(written)
    assert "40 of 100" in written
    wanted = {"storage: /data", "by Python", "runs: " + LONG}
    wanted |= {f"said {n}" for n in range(5)}
    assert {line for line in screen if line} == wanted, "whole lines, and the region is gone"


def test_terminal_that_only_takes_lines_gets_lines(
    monkeypatch: pytest.MonkeyPatch, in_terminal: Callable[[Callable[[], object]], str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")

    def act() -> None:
        with displays.show_progress(quiet=False):
            displays.doing("starting Ray")

    assert in_terminal(act) == "starting Ray …\r\n"
