r"""Tables as LaTeX, with booktabs' rules; every cell is printed as text, whatever its content.

*Why no part of a cell is a command.* Each of the ten characters that LaTeX interprets becomes the command
that prints it. So do characters that have a meaning at the start of a row, after a line's end (`[`, `*`), or
side by side (`--`, quotes). A line break would end a comment or, if doubled, a paragraph, so it becomes a
space; so does every character that is not printable. Symbols that text fonts lack, such as ε and ±, become
mathematics.
"""

from __future__ import annotations

import re
import unicodedata

import pandas as pd

from dashboards.compose.content import Table

_CHARACTERS = {
    **{sign: f"\\{sign}" for sign in "{}$&#_%"},
    **{sign: f"{{{sign}}}" for sign in "[]*"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
    '"': r"{\ttfamily\char34}",
    "–": r"\textendash{}",
    "—": r"\textemdash{}",
    **{
        sign: f"${command}$"
        for sign, command in {
            **{"ε": r"\varepsilon", "δ": r"\delta", "σ": r"\sigma", "τ": r"\tau", "α": r"\alpha"},
            **{"±": r"\pm", "×": r"\times", "∞": r"\infty", "→": r"\rightarrow", "≤": r"\leq"},
            **{"≥": r"\geq", "∈": r"\in", "·": r"\cdot", "−": "-", "ₐ": "_a"},
        }.items()
    },
}
_DASHES = re.compile(r"-(?=-)")
_MINUS = re.compile(r"-(?=\.?\d)")


def latex_escaped(text: str) -> str:
    r"""Return a text as one line of LaTeX that prints exactly this text.

    >>> print(latex_escaped("50 % of a_b & \\input{c}"))
    50 \% of a\_b \& \textbackslash{}input\{c\}
    >>> print(latex_escaped("-0.4 ± 0.1 at ε = ∞"))
    $-$0.4 $\pm$ 0.1 at $\varepsilon$ = $\infty$
    """
    text = unicodedata.normalize("NFC", text)
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    sign, line = ("$-$", line[1:]) if _MINUS.match(line) else ("", line)
    return sign + _DASHES.sub("-{}", "".join(_CHARACTERS.get(character, character) for character in line))


def to_latex(table: Table, caption: str, label: str) -> str:
    r"""Return a table in its own environment, with names left-aligned and numbers right-aligned.

    >>> table = Table(heading=["S", "%"], rows=[["a_b", "0.12"], ["c", "–"]], bold={(0, 1)})
    >>> print(to_latex(table, "Scores", "one"))
    \begin{table}
    \centering
    \caption{Scores}
    \label{tab:one}
    \begin{tabular}{lr}
    \toprule
    S & \% \\
    \midrule
    a\_b & \textbf{0.12} \\
    c & \textendash{} \\
    \bottomrule
    \end{tabular}
    \end{table}
    """
    cells = [
        [
            rf"\textbf{{{latex_escaped(text)}}}" if (number, i) in table.bold else latex_escaped(text)
            for i, text in enumerate(row)
        ]
        for number, row in enumerate(table.rows)
    ]
    frame = pd.DataFrame(cells, columns=[latex_escaped(text) for text in table.heading])
    return (
        frame.style.hide(axis="index")
        .to_latex(
            column_format="".join("l" if table.holds_text(i) else "r" for i in range(len(table.heading))),
            position_float="centering",
            hrules=True,
            label=f"tab:{label}",
            caption=latex_escaped(caption),
        )
        .rstrip()
    )
