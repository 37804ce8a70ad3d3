"""The settings of an answer as a table."""

from __future__ import annotations

from dashboards.compose.answer import Answer
from dashboards.compose.content import Table
from dashboards.compose.decision import Comparison


def settings_table(answer: Answer) -> Table:
    """Return one row per setting of an answer: its mean, its differences, and what the answer says of it.

    The best is bold where it is distinguishable from all others.
    """
    has_starts = any(each.over_start for each in answer.settings)
    has_best = any(len(choice.settings) > 1 for choice in answer.choices)
    heading = ["Setting", f"Mean {answer.title} (%)"]
    heading += ["Over the start (points)"] * has_starts + ["Below the highest (points)"] * has_best
    rows, bold = list[list[str]](), set[tuple[int, int]]()
    for choice in answer.choices:
        for each in choice.settings:
            if each.name == choice.best and len(choice.contenders) == 1 < len(choice.settings):
                bold.add((len(rows), 1))
            name = f"{choice.at}: {each.name}" if choice.at else each.name
            row = [name, f"{100 * each.mean:.2f}"]
            row += [_difference_text(each.over_start)] * has_starts
            row += ["highest" if each.over_best is None else _difference_text(each.over_best)] * has_best
            rows.append([*row, "take" * (each.name == choice.take)])
    return Table(heading=[*heading, "Answer"], rows=rows, bold=frozenset(bold))


def _difference_text(comparison: Comparison | None) -> str:
    if comparison is None:
        return "–"
    error = comparison.standard_error
    number = f"{100 * comparison.mean:+.2f}" + ("" if error is None else f" ± {100 * error:.2f}")
    return number if error is None else f"{number}, {comparison.verdict}"
