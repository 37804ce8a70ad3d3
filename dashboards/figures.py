"""Station 13, plots: the figure and the tables of every question, written from MLflow alone.

    python -m dashboards figure --question batch-size --sweep NAME --output FOLDER

draws them again.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from dashboards.asking import PAIRED, content_of, load_for, numbers_of
from dashboards.interactive import page_of
from dashboards.printed import DOTS_PER_INCH, printed_figure
from dashboards.questions import Question, find_question
from dashboards.tables import to_markdown


def draw(question: Question | str, tracking_uri: str, sweep: str | None, folder: Path) -> list[Path]:
    """Loads a sweep, writes its figure and its tables, and returns their paths.

    Raises:
      TrackingError: the server does not answer.
      DashboardError: the sweep does not make this figure.
      OSError: the folder cannot be written.
    """
    trials = load_for(question, tracking_uri, sweep)
    return [*write_figure(trials, folder, question), *write_table(trials, folder, question)]


def write_figure(trials: pd.DataFrame, folder: Path, question: Question | str) -> tuple[Path, Path]:
    """Writes a picture (`group_size.png`) and a self-contained page (`.html`); returns their paths.

    Args:
      trials: from `dashboards.asking.load_for`.
      folder: created if missing.
      question: or its name, which names the files.

    Raises:
      DashboardError: as `dashboards.asking.content_of`.
      OSError: the folder cannot be written.
    """
    asked = find_question(question)
    content = content_of(trials, asked)
    figure, page = printed_figure(content), page_of(content, asked.name)
    folder.mkdir(parents=True, exist_ok=True)
    png_path, html_path = folder / f"{asked.stem}.png", folder / f"{asked.stem}.html"
    figure.savefig(png_path, dpi=DOTS_PER_INCH)
    html_path.write_text(page, encoding="utf-8")
    return png_path, html_path


def write_table(trials: pd.DataFrame, folder: Path, question: Question | str) -> tuple[Path, Path]:
    """Writes the numbers at full precision (`.csv`) and the tables with the notes (`.md`).

    Raises as `write_figure`.
    """
    asked = find_question(question)
    content, numbers = content_of(trials, asked), numbers_of(trials, asked)
    folder.mkdir(parents=True, exist_ok=True)
    csv_path, text_path = folder / f"{asked.stem}.csv", folder / f"{asked.stem}.md"
    numbers.to_csv(csv_path, index=False)
    notes = "\n".join(f"- {note}" for note in content.notes)
    (_, first), *others = content.tables
    text = f"# {content.title}\n\n{content.subtitle}\n\n{to_markdown(first)}\n\n{notes}\n"
    for heading, table in others:
        text += f"\n## {heading}\n\n{to_markdown(table)}\n"
        text += f"\n{PAIRED}\n" if heading.startswith("Differences") else ""
    text_path.write_text(text, encoding="utf-8")
    return csv_path, text_path


def write_group_size_figure(trials: pd.DataFrame, folder: Path) -> tuple[Path, Path]:
    """Writes the figure of the group size. Raises as `write_figure`."""
    return write_figure(trials, folder, "group-size")


def write_summary_table(trials: pd.DataFrame, folder: Path) -> tuple[Path, Path]:
    """Writes the tables of the group size. Raises as `write_figure`."""
    return write_table(trials, folder, "group-size")
