"""What all tests share: a quiet environment, one thread each, no silent skips in CI, and times per marker."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests import selection
from tests.distributions import made_quickly

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_worker_niceness", "0")  # 15 unless told: beside other work its workers starve
# The user's own services must not be touched by tests.
for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "DPGCL_STORAGE"):
    os.environ.pop(name, None)
torch.set_num_threads(1)

WHEN = ("gpu", "long", "ci")
"""The markers that decide who runs a test; the others describe it. A test with none is run by `make test`."""
LONG_SECONDS = 3600
"""What a long test may take: some do in minutes what a processor without bfloat16 or float16 products does in
half an hour beside other jobs. All others have `--timeout`."""

SOURCE = ("dpgcl_core", "trainers", "sweeps", "dashboards", "benchmarks")
Definition = tuple[ModuleType | type, str, object]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--since-base",
        action="store_true",
        help="of the files with tests marked `ci`, run those of what changed since the commit in .ci/base",
    )
    parser.addoption(
        "--write-seconds",
        action="store_true",
        help="write to .ci/seconds.json what the tests marked `ci` of each file took",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers send their reports to the process in command
        config.pluginmanager.register(TimesPerMarker())
        config.pluginmanager.register(SelectionReport(), "selection_report")
        if config.getoption("--write-seconds"):
            config.pluginmanager.register(SecondsPerFile())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out `ci` tests that no change reaches; files that take long come first, for busy processes."""
    if config.getoption("--since-base"):
        _leave_out_unreached(config, items)
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
    heavy = {item.path for item in items if any(item.get_closest_marker(name) for name in ("ray", *WHEN))}
    items.sort(key=lambda item: item.path not in heavy)


def _leave_out_unreached(config: pytest.Config, items: list[pytest.Item]) -> None:
    candidates = [i for i in items if i.get_closest_marker("ci") and not i.get_closest_marker("long")]
    files = {_file(item.nodeid) for item in candidates}
    chosen = selection.select(
        files, selection.changed_paths(), selection.read_tree(), selection.read_seconds()
    )
    unchosen = {item for item in candidates if _file(item.nodeid) not in chosen.chosen}
    if unchosen:
        config.hook.pytest_deselected(items=[item for item in items if item in unchosen])
        items[:] = [item for item in items if item not in unchosen]
    if hasattr(config, "workeroutput"):
        config.workeroutput["selection"] = chosen.lines()
    else:
        config.pluginmanager.get_plugin("selection_report").lines = chosen.lines()


def _file(test: str) -> str:
    return test.split("::")[0]


class SelectionReport:
    """Prints which files with tests marked `ci` a run had no time for."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.lines = getattr(node, "workeroutput", {}).get("selection", self.lines)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.lines:
            terminalreporter.section("tests marked `ci` since .ci/base", sep="=")
            for line in self.lines:
                terminalreporter.write_line(line)


class SecondsPerFile:
    """Writes what the tests marked `ci` of each file took, of files whose tests passed."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        markers = getattr(report, "markers", ())
        if "ci" in markers and "long" not in markers:
            self._seconds[_file(report.nodeid)] += report.duration  # type: ignore[assignment]  # of floats
        if report.failed:
            self._failed.add(_file(report.nodeid))

    def measured(self) -> dict[str, float]:
        return {file: seconds for file, seconds in self._seconds.items() if file not in self._failed}

    def pytest_sessionfinish(self) -> None:
        selection.write_seconds(self.measured())


class TimesPerMarker:
    """Prints how many tests of each marker ran and how long they took, fixtures included."""

    def __init__(self) -> None:
        self._tests: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name in self._markers(report):
            self._tests[name] += report.when == "call" or report.skipped
            self._seconds[name] += report.duration  # type: ignore[assignment]  # a Counter of floats

    @staticmethod
    def _markers(report: Any) -> Iterator[str]:
        markers = getattr(report, "markers", ())  # none in the report of a test process that died
        yield next((name for name in WHEN if name in markers), "unmarked")
        yield from (name for name in ("ray", "server") if name in markers)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._tests:
            return
        terminalreporter.section("times per marker", sep="=")
        for name in ("unmarked", *reversed(WHEN), "ray", "server"):
            if self._tests[name]:
                kind = "  of all these, " if name in ("ray", "server") else ""
                line = f"{kind}{name}: {self._tests[name]} tests, {self._seconds[name]:.0f} s"
                terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that a command prints are whole, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(autouse=True, scope="session")
def quick_distributions() -> Iterator[None]:
    """What nearly all of a plan's time would go into."""
    with made_quickly():
        yield


@pytest.fixture(autouse=True, scope="module")
def nothing_stays_patched() -> Iterator[None]:
    """A file of tests leaves the source's functions and classes as it found them, for other files' sake."""
    before = definitions()
    yield
    assert patched(before) == [], "patched for good, so for later tests too"


def definitions() -> list[Definition]:
    """Returns functions, classes and modules that the loaded source holds: by whom, their names and they."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] in SOURCE]
    classes = [
        held
        for module in modules
        for held in vars(module).values()
        if isinstance(held, type) and held.__module__ == module.__name__
    ]
    return [
        (holder, name, value)
        for holder in (*modules, *classes)
        for name, value in vars(holder).items()
        if callable(value) or isinstance(value, (ModuleType, property, classmethod, staticmethod))
    ]


def patched(before: list[Definition]) -> list[str]:
    """Returns the places that hold something else than `before`."""
    return [
        f"{holder.__name__}.{name}" for holder, name, value in before if vars(holder).get(name) is not value
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """Note the test's markers; with `DPGCL_NO_SKIPS`, which .ci/run sets, a skipped test is a failed one."""
    report = yield
    # `report.keywords` has the names of folders, too, so that a clone in a folder "ci" would count as marked.
    report.markers = sorted({marker.name for marker in item.iter_markers()})
    if report.skipped and os.environ.get("DPGCL_NO_SKIPS") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which DPGCL_NO_SKIPS forbids: {report.longrepr}"
    return report
