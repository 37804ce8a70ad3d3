"""`python -m dpgcl_core.methods`: every method, what it clips, what one record moves, its guarantee."""

from __future__ import annotations

from dpgcl_core.mechanism.registry import METHODS


def main() -> None:
    """Print the table."""
    head = ("method", "guarantee", "clips", "sensitivity", "neighbouring data sets", "sampling")
    rows = [head] + [
        (m.name, m.label, m.clip_unit, m.sensitivity_formula, m.neighboring_relation, m.sampling)
        for method in METHODS.values()
        for m in map(method.with_sampling, method.samplings)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
