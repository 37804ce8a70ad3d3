"""The settings of an answer as a table."""

from __future__ import annotations

from dashboards.compose.answer import Answer
from dashboards.compose.content import Table
from dashboards.compose.decision import Comparison


def settings_table(answer: Answer) -> Table:
    """Return one row per setting of an answer: its mean, its differences, and the answer's verdict.

    The best setting is bold if it is distinguishable from all others.
    """
    has_starts = any(setting.over_start for setting in answer.settings)
    has_best = any(len(choice.settings) > 1 for choice in answer.choices)
    heading = ["Setting", f"Mean {answer.title} (%)"]
    heading += ["Gain over the start (points)"] * has_starts + ["Versus the highest (points)"] * has_best
    rows, bold = list[list[str]](), set[tuple[int, int]]()
    for choice in answer.choices:
        for setting in choice.settings:
            if setting.name == choice.best and len(choice.contenders) == 1 < len(choice.settings):
                bold.add((len(rows), 1))
            name = f"{choice.at}: {setting.name}" if choice.at else setting.name
            row = [name, f"{100 * setting.mean:.2f}"]
            lead = "highest" if setting.over_best is None else _difference_text(setting.over_best)
            row += [_difference_text(setting.over_start)] * has_starts + [lead] * has_best
            rows.append([*row, "take" * (setting.name == choice.take)])
    return Table(heading=[*heading, "Answer"], rows=rows, bold=frozenset(bold))


def _difference_text(comparison: Comparison | None) -> str:
    if comparison is None:
        return "–"
    error = comparison.standard_error
    number = f"{100 * comparison.mean:+.2f}" + ("" if error is None else f" ± {100 * error:.2f}")
    return number if error is None else f"{number}, {comparison.verdict}"
