"""A figure for a browser: one file that needs no network, with numbers on hovering, notes and tables."""

from __future__ import annotations

import functools
import html
import json

import vl_convert

from dashboards.compose.content import Content
from dashboards.render.specification import VEGA_LITE, page_specification
from dashboards.render.tables import to_html

_OPTIONS = {
    "renderer": "svg",
    "actions": {"export": True, "source": False, "compiled": False, "editor": False},
}


def page_of(content: Content, name: str) -> str:
    """Return a self-contained HTML page: the interactive figure, the notes and the tables.

    Args:
      content: of the figure.
      name: id of the drawing in the page, and name of the pictures that a reader saves.
    """
    drawing = _drawing(content, name) if content.rows else ""
    tables = content.tables if content.rows else [("What was trained", content.facts), *content.tables]
    shown = "".join(
        f'<h2>{html.escape(heading)}</h2><div class="table">{to_html(table)}</div>'
        for heading, table in tables
    )
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in content.notes)
    title, subtitle = html.escape(content.title), html.escape(content.subtitle)
    return _PAGE.format(title=title, subtitle=subtitle, drawing=drawing, notes=notes, tables=shown)


def _drawing(content: Content, name: str) -> str:
    arguments = (f"#{name}", page_specification(content), _OPTIONS | {"downloadFileName": name})
    call = ", ".join(json.dumps(argument, ensure_ascii=False) for argument in arguments)
    call = call.replace("<", "\\u003c")  # no text of the figure may end the script
    return (
        f'<div class="drawing" id="{html.escape(name)}"></div>'
        f"<script>{_library()}</script><script>vegaEmbed({call});</script>"
    )


@functools.cache
def _library() -> str:
    """Return Vega, Vega-Lite and their loader as one script; bundling takes seconds, so do it once."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed", VEGA_LITE).replace(
        "</script", "<\\/script"
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 Helvetica, Arial, sans-serif; color: #222; margin: 1.5rem; }}
h1 {{ font-size: 1.25rem; margin: 0; }}
h2 {{ font-size: 1.05rem; margin: 1.6rem 0 .4rem; }}
p {{ margin: .2rem 0; max-width: 60rem; }}
.drawing, .table {{ overflow-x: auto; }}
.drawing {{ margin: 1rem 0; }}
.drawing svg {{ zoom: 1.3; }}
table {{ border-collapse: collapse; font-size: 13px; }}
th, td {{ padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }}
th {{ white-space: normal; vertical-align: bottom; max-width: 11rem; }}
.name {{ text-align: left; }}
</style></head>
<body><h1>{title}</h1><p>{subtitle}</p>{drawing}{notes}{tables}</body></html>
"""
