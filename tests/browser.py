"""Pages in headless Chromium: what they send and complain of, and what axe-core finds in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path, a package of Debian's")
THEMES = ("light", "dark")


@dataclass
class Heard:
    """What a page did besides being shown.

    Attributes:
      requests: addresses that it asked for.
      complaints: errors and warnings on the console, and exceptions.
    """

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def elsewhere(self, base: str) -> list[str]:
        """Return the requests that went to another server."""
        return [url for url in self.requests if not url.startswith((f"{base}/", "data:", "blob:"))]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of its own, with nothing kept."""
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def page_in(browser: Any, *, theme: str = "light", width: int = 1400) -> Iterator[tuple[Any, Heard]]:
    """An empty page, and what it does."""
    heard = Heard()
    context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 900})
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("request", lambda request: heard.requests.append(request.url))
    page.on("pageerror", lambda error: heard.complaints.append(str(error)))

    def note(message: Any) -> None:
        if message.type in ("error", "warning"):
            heard.complaints.append(message.text)

    page.on("console", note)
    try:
        yield page, heard
    finally:
        context.close()


def serious(page: Any) -> list[str]:
    """Return what axe-core finds that is serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:200]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
