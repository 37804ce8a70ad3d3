"""Values in Markdown: whatever they hold, the rendered page has the elements that were meant."""

from __future__ import annotations

import html
from dataclasses import replace
from html.parser import HTMLParser

import markdown
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dashboards.compose.content import Table
from dashboards.render.table_markup import to_markdown
from dpgcl_core.release.markdown import escaped
from tests.dpgcl_core.release.test_statement import STATEMENT
from trainers.tracking.runs import _describe_sweep

NASTY = [
    "<img src=x onerror=alert(1)>",
    "a|b | c |",
    "`code` ``x``",
    "x\n\n# heading\n\n- item\n1. one\n\n    code",
    "[link](javascript:alert(1)) ![i](http://e/x.png)",
    "https://evil.example www.evil.example me@evil.example",
    "**bold** _it_ __x__ ~~gone~~ *a*",
    "\\`x` \\<b> \\|",
    "&lt;b&gt; &#60;b> &copy;",
    "<!-- c --> <script>x</script> </td></table>",
    "{: onclick=alert(1)} [^1] [x][y]",
    "# h",
    "> quote",
    "- [ ] x",
    "1. a",
    "```\nx\n```",
    "|---|",
    "a\u2028b\x1b[31m\u202ec",
]
_PYTHON = markdown.Markdown(
    extensions=["tables", "attr_list", "fenced_code", "footnotes", "def_list", "admonition"]
)
_COMMON = MarkdownIt("commonmark").enable(["table", "strikethrough"])


class _Skeleton(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[object] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.elements.append(data)


def skeletons(page: str) -> list[list[object]]:
    return [_Skeleton(render(page)).elements for render in (_PYTHON.reset().convert, _COMMON.render)]


def _pages(text: str) -> list[str]:
    statement = replace(STATEMENT, sweep=f"a {text}", dataset=text, scores=text, notes=(text, "b"))
    table = Table(heading=["S", "mean"], rows=[["a", "0.12"], [f"a {text}", "x"]], bold={(0, 1)})
    return [
        statement.to_markdown(),
        to_markdown(table),
        _describe_sweep(
            f"a {text}", {"target_delta": text, "delta": 1}, {"tuning_cost": f"c {text}"}, f"d {text}"
        ),
    ]


PLAIN = [skeletons(page) for page in _pages("plain")]


@pytest.mark.parametrize("text", NASTY)
def test_nasty_value_adds_no_element(text: str) -> None:
    assert [skeletons(page) for page in _pages(text)] == PLAIN


@given(st.text(st.sampled_from("<>&|`*_[](){}#!-+.=~:/\\\"'@^$ \n\tab1;x"), min_size=1, max_size=25))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_escaped_value_is_shown_as_it_is_and_adds_no_element(text: str) -> None:
    text = f"a {text} b"
    for page in (f"- x {escaped(text)}", f"| x | {escaped(text)} |\n| --- | --- |\n| {escaped(text)} | y |"):
        plain = page.replace(escaped(text), "plain")
        assert skeletons(page) == skeletons(plain)
        for render in (_PYTHON.reset().convert, _COMMON.render):
            assert " ".join(text.split()) in " ".join(html.unescape(_Skeleton(render(page)).text).split())
