r"""Values in Markdown: the one module that inserts a text into a page without turning it into markup.

Names, paths, notes and errors come from users, and readers render pages with different tools: a forge, a
notebook, MLflow's notes. So a value becomes one line, in which every character that could begin an element of
any common dialect is escaped.

*Why it is enough.* An element needs HTML (`<`, or `&` of an entity), an inline mark (a backtick, `*`, `_` at
the edge of a word, `~~`, `[`, `{`), a cell's end (`|`), a bare address (`://`, `www.`, `@`), a line of its
own, or a mark at the start of the line. Inline marks get a backslash. All other such characters become
entities, which CommonMark and Python-Markdown never treat as structure. A backslash in the value becomes an
entity, too, since it could undo an escape. Line breaks and invisible characters become spaces.
"""

from __future__ import annotations

import re

_ENTITIES = {character: f"&#{ord(character)};" for character in "\\|@"} | {
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
}
_MARKS = re.compile(r"[\\|@&<>]|([`*\[\]{}#])|(?<![^\W_])(_)|(_)(?![^\W_])|~(?=~)|(?<=~)~|:(?=//)|(?<=www)\.")
_START = re.compile(r"[-+=~](?=[-+=~\s]|$)|\d+(?=[.)](?:\s|$))")


def escaped(text: str) -> str:
    r"""Return one line of Markdown that shows only the given text.

    >>> print(escaped("a|b <img src=x onerror=alert(1)> `c` dp_gcl [d](https://e)"))
    a&#124;b &lt;img src=x onerror=alert(1)&gt; \`c\` dp_gcl \[d\](https&#58;//e)
    >>> escaped("# a\n- b"), escaped("1. a"), escaped("- 1 to 0.3"), escaped("0.3")
    ('\\# a - b', '1&#46; a', '&#45; 1 to 0.3', '0.3')
    """
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())

    def escape_mark(match: re.Match[str]) -> str:
        mark = match[0]
        if match[1] or match[2] or match[3]:
            return "\\" + mark
        return _ENTITIES.get(mark, f"&#{ord(mark)};")

    line = _MARKS.sub(escape_mark, line)
    start = _START.match(line)
    if start is None:
        return line
    position = start.end() if start[0].isdigit() else 0
    return f"{line[:position]}&#{ord(line[position])};{line[position + 1 :]}"
