"""The page around the content: one HTML file that works offline, in a light and a dark theme.

Every page has a Content-Security-Policy that allows only the scripts written here, by their hashes. So no
text of a user can run, load or send anything, even if escaping missed something. The figures' library is
included once per page, compressed, and is unpacked by the browser.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import vl_convert

from dashboards.compose.content import Content
from dashboards.render.specification import DARK_COLOURS, VEGA_LITE, page_specification

THEME, DRAWINGS, TABLES, RELOAD = "theme.js", "drawings.js", "tables.js", "reload.js"


def document_of(title: str, body: str, *, scripts: Sequence[str] = ()) -> str:
    """Return a whole page.

    Args:
      title: the window's title, as plain text.
      body: HTML, in which every text is escaped.
      scripts: names of the scripts that the body needs: `DRAWINGS` for figures, `TABLES` for `sortable`
        tables, `RELOAD` for a page that is loaded anew every `data-reload-seconds` of its main part.
    """
    policy = html.escape(policy_of(scripts))
    script_tags = "".join(f"<script>{asset(name)}</script>" for name in scripts)
    library = _packed_library() if DRAWINGS in scripts else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{asset('page.css')}</style>"
        f"<script>{asset(THEME)}</script></head>\n<body>{body}{library}{script_tags}</body></html>\n"
    )


def policy_of(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy of a page with these scripts, as in `document_of`."""
    sources = [asset(THEME), *map(asset, scripts), *([_library()] if DRAWINGS in scripts else [])]
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in sources)
    # Vega writes its styles into elements; no style can load anything, because nothing may be loaded.
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


def header_of(title: str, below: str) -> str:
    """Return the head of a body: a link that skips it, the title, and the button that changes the theme.

    Args:
      title: plain text, which is escaped here.
      below: HTML under the title.
    """
    return (
        '<a class="skip" href="#main">Skip to the content</a>'
        f"<header><div><h1>{html.escape(title)}</h1>{below}</div>"
        '<button type="button" id="theme" hidden>Dark theme</button></header>'
    )


def drawing_of(content: Content, name: str) -> str:
    """Return a figure as HTML, drawn when the page opens; empty for a figure without a panel.

    Args:
      content: the figure's content.
      name: file name, without suffix, of the pictures that a reader saves.
    """
    if not content.rows:
        return ""
    specification, description = page_specification(content), html.escape(_description_of(content))
    return (
        f'<figure class="drawing" data-name="{html.escape(name)}" data-description="{description}">'
        '<div class="canvas" role="region" tabindex="0" aria-label="Figure"><div></div></div>'
        f'<script type="application/json">{script_json(specification)}</script></figure>'
    )


def _description_of(content: Content) -> str:
    """Return a text description of a figure, for screen readers; the numbers are in the tables below."""
    panels = "; ".join(
        f"{panel.y_label} against {panel.axis.label}"
        if not panel.axis.categorical
        else f"{panel.y_label} of each {panel.axis.label.lower()}"
        for panel in content.panels
    )
    return f"{content.title}. Panels: {panels}. The numbers are in the tables below."


@functools.cache
def _packed_library() -> str:
    """Return Vega, Vega-Lite and their loader, compressed without a time, and the dark theme's colours."""
    packed = base64.b64encode(gzip.compress(_library().encode(), 9, mtime=0)).decode()
    return (
        f'<script type="text/plain" id="library">{packed}</script>'
        f'<script type="application/json" id="dark-colours">{script_json(DARK_COLOURS)}</script>'
    )


def script_json(value: Any) -> str:
    """Return JSON in which no text can end the surrounding script.

    >>> script_json({"name": "</script><b>"})
    '{"name": "\\\\u003c/script>\\\\u003cb>"}'
    """
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


@functools.cache
def asset(name: str) -> str:
    """Return a style sheet or script of `dashboards/render/assets`."""
    return (files("dashboards.render") / "assets" / name).read_text(encoding="utf-8")


@functools.cache
def _library() -> str:
    """Return Vega-Lite with Vega as one script, bundled only once because bundling takes seconds."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed", VEGA_LITE)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
