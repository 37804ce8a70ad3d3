"""Tables as Markdown and as HTML."""

from __future__ import annotations

import html

from dashboards.compose.content import Table
from dpgcl_core.release.markdown import escaped


def to_markdown(table: Table) -> str:
    """Return a table as Markdown; names on the left, numbers on the right.

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
        shown = html.escape(text)
        return f"<{tag}{side}>{f'<b>{shown}</b>' if bold else shown}</{tag}>"

    head = "".join(cell("th", text, i) for i, text in enumerate(table.heading))
    body = "".join(
        "<tr>" + "".join(cell("td", text, i, (n, i) in table.bold) for i, text in enumerate(row)) + "</tr>"
        for n, row in enumerate(table.rows)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
