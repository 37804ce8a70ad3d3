"""Counts lines of code by package, without blank lines, comments and docstrings.

Launch: python .ci/count_code_lines.py

Prints, too, which share of all lines that are not blank are docstrings and comments.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("dpgcl_core", "trainers", "sweeps", "dashboards")
_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
)


def lines_of(source: str) -> tuple[int, int]:
    """Return the lines that hold code, and those that hold a docstring or nothing but a comment.

    >>> lines_of('"Says what."\\n# why\\nx = (\\n    1\\n)\\n')
    (3, 2)
    """
    docstrings = set[int]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code, comments = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    return len(code), len((docstrings | comments) - code)


def main() -> None:
    """Print a line for each package, for the product, and for benchmarks."""
    totals = {}
    for package in (*PRODUCT, "benchmarks"):
        counts = [lines_of(path.read_text(encoding="utf-8")) for path in (ROOT / package).rglob("*.py")]
        totals[package] = sum(code for code, _ in counts), sum(words for _, words in counts)
    totals["product"] = (
        sum(totals[package][0] for package in PRODUCT),
        sum(totals[package][1] for package in PRODUCT),
    )
    for name, (code, words) in totals.items():
        print(f"{name}: {code} ({words / (code + words):.1%} docstrings and comments)")


if __name__ == "__main__":
    main()
