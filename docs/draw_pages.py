"""Pictures of the report of a sweep that has run, at 1400 and 400 pixels in both themes.

    python docs/draw_pages.py --report REPORT.html

writes `docs/report-1400-light.png` and three more. It needs the packages of the tests, and Chromium.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import tyro
from PIL import Image
from playwright.sync_api import sync_playwright

HEIGHTS = {1400: 1600, 400: 1560}
THEMES = ("light", "dark")
DRAWN = "[data-drawn={theme}]"
NUM_COLOURS = 128


def picture(browser: Any, address: str, width: int, theme: str) -> Image.Image:
    """Return the first screen of a page once its figures are drawn."""
    context = browser.new_context(
        color_scheme=theme, viewport={"width": width, "height": HEIGHTS[width]}, reduced_motion="reduce"
    )
    try:
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector(DRAWN.format(theme=theme), timeout=60_000)
        return Image.open(io.BytesIO(page.screenshot()))
    finally:
        context.close()


def main(report: Path, output: Path = Path(__file__).parent) -> None:
    """Draw the pictures.

    Args:
      report: of a finished sweep.
      output: folder to write.
    """
    chromium = shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in HEIGHTS:
            for theme in THEMES:
                path = output / f"report-{width}-{theme}.png"
                drawn = picture(browser, report.resolve().as_uri(), width, theme).convert("RGB")
                drawn.quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
                print(path)
        browser.close()


if __name__ == "__main__":
    tyro.cli(main)
