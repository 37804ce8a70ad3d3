"""The dashboard in a browser: list and report follow a sweep without being asked for again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboards.report import page
from dashboards.report.page import report_page
from dashboards.report.report_content import Report
from tests.browser import THEMES, chromium, needs_chromium, page_in, serious
from tests.dashboards.serve.storage import Storage

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.ci, pytest.mark.server, needs_chromium]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """A sweep that runs, beside a finished one."""
    storage = Storage(tmp_path)
    storage.sweep("watched")
    storage.tell("watched", "a", 41)
    (storage.sweep("over", status="FINISHED") / "report.html").write_text("<p>")
    return storage


@pytest.fixture
def base(storage: Storage) -> Iterator[str]:
    """The address of a server of the storage folder."""
    own = ("DPGCL_STORAGE", "DPGCL_LEDGER")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"PYTHONPATH": str(ROOT), "HOME": str(storage.root)}
    command = [sys.executable, "-m", "dashboards", "serve", "--port", "0", "--storage", str(storage.root)]
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        (line,) = (line for line in (next(server.stdout), next(server.stdout)) if "dashboard: " in line)
        yield line.split()[1].rstrip("/")
    finally:
        server.terminate()
        server.wait(timeout=60)


def test_list_follows_a_sweep_and_asks_its_own_server_alone(
    browser: Any, base: str, storage: Storage
) -> None:
    with page_in(browser) as (opened, heard):
        opened.goto(base)
        assert opened.locator("li").all_inner_texts() == ["a: step 41 of 100"]
        storage.tell("watched", "a", 77)
        opened.wait_for_function("() => document.body.innerText.includes('a: step 77 of 100')")
        storage.finish("watched", "a")
        storage.log("watched", "ended", "FINISHED")
        opened.wait_for_function("() => document.body.innerText.includes('1 of 4 trials')")
        assert opened.locator(".state").all_inner_texts() == ["finished", "finished"]
        assert heard.elsewhere(base) == []
        assert heard.complaints == []


def test_report_loads_itself_again_until_the_sweep_has_ended(
    browser: Any, base: str, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_RELOAD_SECONDS", 1)
    file = storage.root / "sweeps" / "watched" / "report.html"
    first = Report(name="watched", title="One", status="1 of 4", is_running=True)
    file.write_text(report_page(first))
    with page_in(browser) as (opened, heard):
        opened.goto(base)
        opened.get_by_role("link", name="watched").click()
        opened.wait_for_function("() => document.querySelector('h1').textContent === 'One'")
        file.write_text(report_page(Report(name="watched", title="Two", status="4 of 4")))
        opened.wait_for_function("() => document.querySelector('h1').textContent === 'Two'")
        asked = len(heard.requests)
        opened.wait_for_timeout(3000)
        assert len(heard.requests) == asked
        assert heard.elsewhere(base) == []
        assert heard.complaints == []


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("path", ["/", "/ledgers"])
def test_pages_are_accessible_and_fit(browser: Any, base: str, path: str, width: int, theme: str) -> None:
    with page_in(browser, theme=theme, width=width) as (opened, heard):
        opened.goto(base + path)
        assert serious(opened) == []
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        assert heard.complaints == []
