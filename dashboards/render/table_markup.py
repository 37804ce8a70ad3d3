"""Tables as Markdown and as HTML."""

from __future__ import annotations

import html

from dashboards.compose.content import Cell, SortableTable, Table
from dpgcl_core.release.markdown import escaped


def to_markdown(table: Table) -> str:
    """Return a table as Markdown, with names left-aligned and numbers right-aligned.

    >>> print(to_markdown(Table(heading=["S", "mean"], rows=[["a|b", "0.12"], ["c", "–"]], bold={(0, 1)})))
    | S | mean |
    | :--- | ---: |
    | a&#124;b | **0.12** |
    | c | – |
    """
    lines = [list(map(escaped, table.heading))]
    lines.append([":---" if table.holds_text(i) else "---:" for i in range(len(table.heading))])
    for number, row in enumerate(table.rows):
        cells = list(map(escaped, row))
        lines.append([f"**{cell}**" if (number, i) in table.bold else cell for i, cell in enumerate(cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_html(table: Table) -> str:
    """Return a table as HTML, every text escaped."""

    def cell(tag: str, text: str, column: int, bold: bool = False) -> str:
        side = ' class="name"' if table.holds_text(column) else ""
        text = html.escape(text)
        return f"<{tag}{side}>{f'<b>{text}</b>' if bold else text}</{tag.split()[0]}>"

    head = "".join(cell('th scope="col"', text, i) for i, text in enumerate(table.heading))
    body = "".join(
        "<tr>" + "".join(cell("td", text, i, (n, i) in table.bold) for i, text in enumerate(row)) + "</tr>"
        for n, row in enumerate(table.rows)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def boxed(table: Table, name: str) -> str:
    """Return a table as HTML in its own box, which scrolls if the page is too narrow.

    Args:
      table: the table to show.
      name: the table's name, for screen readers.
    """
    label = html.escape(name)
    return f'<div class="table" role="region" tabindex="0" aria-label="{label}">{to_html(table)}</div>'


def to_sortable_html(table: SortableTable, name: str) -> str:
    """Return a table that its reader can sort and filter, every text escaped; needs the script `TABLES`.

    Args:
      table: the table to show.
      name: the table's name, for screen readers.
    """
    sides = ["" if table.holds_numbers(column) else ' class="name"' for column in range(len(table.heading))]
    head = "".join(
        f'<th scope="col"{side}><button type="button">{html.escape(text)}</button></th>'
        for side, text in zip(sides, table.heading, strict=True)
    )
    body = "".join("<tr>" + "".join(map(_sortable_cell, row, sides)) + "</tr>" for row in table.rows)
    label = html.escape(name)
    return (
        '<div class="sortable"><div class="filter"><label>Filter '
        f'<input type="search" aria-label="Filter: {label}"></label>'
        '<output class="soft" aria-live="polite"></output></div>'
        f'<div class="table" role="region" tabindex="0" aria-label="{label}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></div>"
    )


def _sortable_cell(cell: Cell, side: str) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    value = value.replace('"inf"', '"Infinity"').replace('"-inf"', '"-Infinity"')
    name = f' data-name="{html.escape(cell.name)}"' if cell.name else ""
    text = html.escape(cell.text)
    if cell.link:
        text = f'<a href="{html.escape(cell.link)}" rel="noreferrer" target="_blank">{text}</a>'
    return f"<td{side}{name}{value}>{text}</td>"
