"""Tables as LaTeX: no text of a cell becomes a command, and the rows keep their cells."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboards.compose.content import Table
from dashboards.render.latex import latex_escaped, to_latex

SPECIAL = r"\{}$&#_%^~[]*-'\"`<>|" + "\n\r\t\0"
# What an escaped text is made of: commands, groups of one sign and mathematics of ours, plain characters.
OURS = re.compile(
    r"\\text(?:backslash|asciicircum|asciitilde|less|greater|bar|asciigrave|quotesingle|endash|emdash)\{\}"
    r"|\\[{}$&#_%]|\{[\[\]*]\}|\{\\ttfamily\\char34\}|-\{\}|-(?!-)"
    r"|\$(?:\\(?:varepsilon|delta|sigma|tau|alpha|pm|times|infty|rightarrow|leq|geq|in|cdot)|-|_a)\$"
    r"|[^\\{}$&#_%^~\[\]*\"'`<>|\n\r\t\0-]"
)


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.one_of(st.sampled_from(SPECIAL), st.characters()), max_size=40))
def test_any_text_is_escaped_to_signs_and_commands_of_ours(text):
    assert OURS.sub("", latex_escaped(text)) == ""


@pytest.mark.parametrize("hostile", ["[1ex]", "*", "a & b", r"c \\ d", r"\input{x}", "100 % \n e"])
def test_hostile_cell_leaves_the_table_its_shape(hostile):
    table = Table(heading=[hostile, "b"], rows=[[hostile, "1"], ["d", hostile]], bold={(1, 1)})
    text = to_latex(table, hostile, "one")
    rows = [line for line in text.splitlines() if line.endswith(r" \\")]
    assert len(rows) == 3
    for row in rows:
        assert len(re.findall(r"(?<!\\)&", row)) == 1
        assert len(re.findall(r"\\\\", row)) == 1
        assert not row.strip().startswith(("[", "*"))
        assert not re.search(r"(?<!\\)%", row)


def test_bold_cells_are_bold_and_rules_are_those_of_booktabs():
    text = to_latex(Table(heading=["a"], rows=[["1 ± 2"]], bold={(0, 0)}), "c", "one")
    assert r"\textbf{1 $\pm$ 2}" in text
    assert [name for name in re.findall(r"\\(\w+rule)", text)] == ["toprule", "midrule", "bottomrule"]
