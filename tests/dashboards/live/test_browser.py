"""The live page in a browser, beside a real sweep."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dpgcl_core.release.metrics import tracked_name
from tests.browser import THEMES, Heard, chromium, needs_chromium, page_in, serious
from trainers.tracking.runs import TRIAL_TAG
from trainers.tracking.server import connect, search_runs

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.ci, pytest.mark.ray, pytest.mark.server, needs_chromium]
FIGURES = "[...document.querySelectorAll('#figures figure')]"
BOTH_DRAWN = f"() => {FIGURES}.filter(each => each.dataset.drawn).length === 2"
BOTH_DARK = f"() => {FIGURES}.filter(each => each.dataset.drawn === 'dark').length === 2"
CELLS = "cells => cells.map(c => [c.parentElement.dataset.run, c.dataset.metric, Number(c.dataset.value)])"


@dataclass
class Seen:
    """A sweep that was watched from before its first trial to its end.

    Attributes:
      base: address of the live page's server.
      storage: the sweep's folder of results.
      rows: numbers of trials in the table, as the page showed them without being loaded again.
      progress: what stood beside the bar.
      heard: what the page did meanwhile.
      printed: by the sweep.
    """

    base: str
    storage: Path
    rows: list[int]
    progress: list[str]
    heard: Heard
    printed: str


def started(*words: str, storage: Path) -> subprocess.Popen[str]:
    own = ("DPGCL_STORAGE", "DPGCL_LEDGER", "MLFLOW_TRACKING_URI", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HOME": str(storage)}
    command = [sys.executable, *words, "--storage", str(storage)]
    out = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True
    )


def line_with(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"no line with {text!r}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def seen(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    storage = tmp_path_factory.mktemp("storage")
    server = started("-m", "dashboards.live", "--port", "0", storage=storage)
    base = line_with(server, "live page: ").split()[2].rstrip("/")
    grid = ("--num-steps", "150", "--repeats", "2", "--max-concurrent-trials", "1", "--name", "watched")
    sweep = started("sweeps/group_size.py", "--tiny", *grid, storage=storage)
    try:
        line_with(sweep, "sweep: watched")
        with page_in(browser) as (page, heard):
            page.goto(f"{base}/sweep?name=watched")
            rows, progress = [], []
            for number in range(5):
                # Asked of the page alone: whatever it shows comes of its own requests.
                page.wait_for_function(
                    f"() => document.querySelectorAll('#trials tbody tr').length >= {number}", timeout=300_000
                )
                rows.append(page.locator("#trials tbody tr").count())
                progress.append(page.locator(".bar span").inner_text())
            page.wait_for_function("() => document.querySelector('.state').textContent === 'finished'")
            page.wait_for_function(BOTH_DRAWN)
            progress.append(page.locator(".bar span").inner_text())
        printed = sweep.communicate(timeout=300)[0]
        yield Seen(base, storage, rows, progress, heard, printed)
    finally:
        for process in (sweep, server):
            process.terminate()
            process.wait(timeout=60)


def test_trials_appear_as_they_finish(seen: Seen) -> None:
    assert len(set(seen.rows)) > 2, "one after the other"
    assert seen.rows[-1] == 4
    assert seen.rows == sorted(seen.rows)
    assert seen.progress[-1] == "4 of 4 trials"
    assert any("running" in each for each in seen.progress)


def test_page_asks_its_own_server_alone_and_complains_of_nothing(seen: Seen) -> None:
    assert seen.heard.elsewhere(seen.base) == []
    assert seen.heard.complaints == []
    assert len([url for url in seen.heard.requests if "/sweep/state" in url]) > 1


def test_numbers_shown_are_mlflows(seen: Seen, browser: Any) -> None:
    with page_in(browser) as (page, _):
        page.goto(f"{seen.base}/sweep?name=watched")
        cells = page.eval_on_selector_all("#trials td[data-metric]", CELLS)
        names = page.locator("#trials tbody tr td:first-child").all_inner_texts()
    client = connect(f"sqlite:///{seen.storage / 'mlflow.db'}")
    ids = [each.experiment_id for each in client.search_experiments()]
    runs = {run.info.run_id: run for run in search_runs(client, ids, {"dpgcl.role": "trial"})}
    assert sorted(names) == sorted(run.data.tags[TRIAL_TAG] for run in runs.values())
    assert {run for run, _, _ in cells} == set(runs)
    assert len(cells) == 4 * 2 + 2 * 2, "two scores of each, and of the private ones SNR and ε"
    assert all(runs[run].data.metrics[tracked_name(metric)] == value for run, metric, value in cells)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("path", ["/", "/sweep?name=watched"])
def test_pages_are_accessible_and_fit(seen: Seen, browser: Any, path: str, width: int, theme: str) -> None:
    with page_in(browser, theme=theme, width=width) as (page, heard):
        page.goto(seen.base + path)
        if path != "/":
            page.wait_for_function(BOTH_DRAWN)
        assert serious(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert heard.complaints == []
        page.evaluate("document.querySelector('h1').insertAdjacentHTML('afterend', '<a href=\"/\"></a>')")
        assert [each.partition(":")[0] for each in serious(page)] == ["link-name"], "a planted one is found"


def test_theme_is_changed_by_its_button(seen: Seen, browser: Any) -> None:
    with page_in(browser) as (page, _):
        page.goto(f"{seen.base}/sweep?name=watched")
        page.wait_for_function(BOTH_DRAWN)
        page.get_by_role("button", name="Dark theme").click()
        page.wait_for_function(BOTH_DARK)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"


def test_focus_stays_where_it_is_while_the_page_changes(seen: Seen, browser: Any) -> None:
    with page_in(browser) as (page, _):
        page.goto(f"{seen.base}/sweep?name=watched")
        link = page.locator("#trials tbody tr a").nth(2)
        link.focus()
        before, name = page.evaluate_handle("document.activeElement"), link.inner_text()
        page.route("**/sweep/state*", without_tag)  # so that every part comes anew
        page.wait_for_function("before => !before.isConnected", arg=before)
        assert page.evaluate("document.activeElement.textContent") == name


def without_tag(route: Any) -> None:
    headers = {name: value for name, value in route.request.headers.items() if name != "if-none-match"}
    route.continue_(headers=headers)


def test_sweep_ends_as_ever(seen: Seen) -> None:
    assert "[4/4]" in seen.printed
    assert "answer: " in seen.printed
