"""What all tests share: a quiet environment, one thread each, no silent skips in CI, and times per marker."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

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
        "--long-slice",
        type=int,
        metavar="N",
        help="of the tests marked `long`, run N that the commit chooses, from as many files as possible",
    )
    parser.addoption(
        "--ci-share",
        type=int,
        metavar="N",
        help="of the files with tests marked `ci`, run those of one in N, which the commit chooses",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers send their reports to the process in command
        config.pluginmanager.register(TimesPerMarker())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses what a commit runs of `ci` and `long`; files that take long come first, for busy processes."""
    num_long, share = config.getoption("--long-slice"), config.getoption("--ci-share")
    left_out = set[pytest.Item]()
    if num_long is not None:
        long = [item for item in items if item.get_closest_marker("long")]
        fit = [item.nodeid for item in long if not item.get_closest_marker("whole")]
        chosen = set(long_slice(fit, num_long, commit()))
        left_out |= {item for item in long if item.nodeid not in chosen}
    if share is not None:
        shared = [i for i in items if i.get_closest_marker("ci") and not i.get_closest_marker("long")]
        files = set(share_of({_file(item.nodeid) for item in shared}, share, commit()))
        left_out |= {item for item in shared if _file(item.nodeid) not in files}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
    heavy = {item.path for item in items if any(item.get_closest_marker(name) for name in ("ray", *WHEN))}
    items.sort(key=lambda item: item.path not in heavy)


def long_slice(tests: Sequence[str], num_tests: int, seed: str) -> list[str]:
    """Returns the tests that `seed` chooses: one of each file, files in its order, then another of each."""
    files: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda test: _drawn(seed, test)):
        files.setdefault(_file(test), []).append(test)
    turns = [(turn, _drawn(seed, file), test) for file, own in files.items() for turn, test in enumerate(own)]
    return [test for _, _, test in sorted(turns)[:num_tests]]


def share_of(files: Iterable[str], share: int, seed: str) -> list[str]:
    """Returns one in `share` of the files, rounded up, which `seed` chooses."""
    ordered = sorted(files, key=lambda file: _drawn(seed, file))
    return ordered[: -(-len(ordered) // share)]


def _file(test: str) -> str:
    return test.split("::")[0]


def _drawn(seed: str, name: str) -> bytes:
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


def commit() -> str:
    """Returns the hash of the commit that is tested; empty where there is none."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


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
