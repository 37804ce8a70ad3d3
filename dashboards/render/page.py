"""A figure for a browser: one file that needs no network, with numbers on hovering, notes and tables."""

from __future__ import annotations

import html

from dashboards.compose.content import Content
from dashboards.render.document import DRAWINGS, document_of, drawing_of, header_of
from dashboards.render.tables import boxed


def page_of(content: Content, name: str) -> str:
    """Return a self-contained HTML page: the interactive figure, the notes and the tables.

    Args:
      content: of the figure.
      name: of the pictures that a reader saves.
    """
    drawing = drawing_of(content, name)
    tables = content.tables if content.rows else [("What was trained", content.facts), *content.tables]
    shown = "".join(f"<h2>{html.escape(heading)}</h2>{boxed(table, heading)}" for heading, table in tables)
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in content.notes)
    head = header_of(content.title, f'<p class="soft">{html.escape(content.subtitle)}</p>')
    body = f'{head}<main id="main">{drawing}{notes}{shown}</main>'
    return document_of(content.title, body, scripts=(DRAWINGS,) if content.rows else ())
