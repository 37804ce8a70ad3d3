"""`python -m dpgcl_core.methods`: print every method with its guarantee, clip unit and sensitivity."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence

from dpgcl_core.command_line import table_width
from dpgcl_core.mechanism.registry import METHODS


def main() -> None:
    """Print the table."""
    head = ("method", "guarantee", "clips", "sensitivity", "neighbouring data sets", "sampling")
    rows = [head] + [
        (m.name, m.label, m.clip_unit, m.sensitivity_formula, m.neighboring_relation, m.sampling)
        for method in METHODS.values()
        for m in map(method.with_sampling, method.samplings)
    ]
    for line in table_lines(rows, table_width()):
        print(line)


def table_lines(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield the lines of a table; the widest columns are wrapped until it fits `width`, if words allow.

    >>> list(table_lines([("a", "one two"), ("b", "three")], 8))
    ['a  one', '   two', 'b  three']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    least = [max(len(word) for cell in column for word in cell.split()) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > max(width, sum(least) + 2 * (len(least) - 1)):
        spare = [wide - narrow for wide, narrow in zip(widths, least, strict=True)]
        widest = max((i for i, more in enumerate(spare) if more > 0), key=widths.__getitem__)
        widths[widest] -= 1
    for row in rows:
        cells = [textwrap.wrap(cell, wide) or [""] for cell, wide in zip(row, widths, strict=True)]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            yield "  ".join(part.ljust(wide) for part, wide in zip(parts, widths, strict=True)).rstrip()


if __name__ == "__main__":
    main()
