"""Stage 13, plots: load a sweep from MLflow, compose its figure and tables, render and write them.

    python -m dashboards figure --question batch-size --sweep NAME --output FOLDER

draws them again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from dashboards.compose.answer import Answer
from dashboards.compose.content import Content
from dashboards.compose.figure import content_of, numbers_of
from dashboards.compose.planning import curves_content, numbers_of_curves
from dashboards.compose.questions import Question, find_question
from dashboards.dashboard_error import DashboardError
from dashboards.query.documents import load_answer
from dashboards.query.trial_frames import load_trials, series_of
from dashboards.render.latex import to_latex
from dashboards.render.pictures import pictures_of
from dashboards.render.table_markup import to_markdown
from dpgcl_core.planning.tradeoff_curves import Point
from dpgcl_core.release.markdown import escaped

# Characters that start a formula in spreadsheets, unless the cell is a number.
_FORMULA = re.compile(r"\s*(?![+-](?:\d|inf))[=+\-@|%]|[\t\r\n]")


def draw(question: Question | str, tracking_uri: str, sweep: str | None, folder: Path) -> list[Path]:
    """Load a sweep, write its figure and its tables, and return their paths.

    Args:
      question: the question or its name, which names the files.
      tracking_uri: as for `trainers.tracking.mlflow_server.connect`.
      sweep: the sweep's name, or the id of its run; None for the sweep started last.
      folder: output folder, created if missing.

    Raises:
      TrackingError: the server does not answer or the database does not exist.
      DashboardError: there is no such sweep, or its trials do not form this figure.
      OSError: the folder cannot be written.
    """
    trials = load_for(question, tracking_uri, sweep)
    return write_all(trials, folder, question, load_answer(tracking_uri, trials))


def write_all(
    trials: pd.DataFrame, folder: Path, question: Question | str, answer: Answer | None = None
) -> list[Path]:
    """Write the figure and the tables of a question, and return their paths, the PNG first.

    Args:
      trials: trials from `load_for`.
      folder: output folder, created if missing.
      question: the question or its name, which names the files.
      answer: the answer that the sweep has recorded; computed from the trials by default.

    Raises:
      DashboardError: as in `dashboards.compose.figure.content_of`.
      OSError: the folder cannot be written.
    """
    question = find_question(question)
    content = content_of(trials, question, answer)
    return write_drawing(content, numbers_of(trials, question), folder, question.stem)


def write_drawing(content: Content, numbers: pd.DataFrame, folder: Path, stem: str) -> list[Path]:
    """Write a figure's pictures (`.png`, `.svg`, `.pdf`), numbers (`.csv`) and any tables (`.md`, `.tex`).

    Args:
      content: the figure's content.
      numbers: the figure's numbers at full precision.
      folder: output folder, created if missing.
      stem: stem of the files' names.

    Returns:
      The paths, in this order.

    Raises:
      OSError: the folder cannot be written.
    """
    files = pictures_of(content) | {".csv": _without_formulas(numbers).to_csv(index=False).encode()}
    if content.tables:
        files |= {".md": as_markdown(content).encode(), ".tex": _as_latex(content, stem).encode()}
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}{ending}" for ending in files]
    for path, file in zip(paths, files.values(), strict=True):
        path.write_bytes(file)
    return paths


def write_curves(points: Sequence[Point], folder: Path, *, title: str, subtitle: str) -> list[Path]:
    """Write the curves of a plan (`planning.png`, `.svg`, `.pdf`) and their numbers (`.csv`).

    Args:
      points: points from `dpgcl_core.planning.tradeoff_curves`; they do not come from a sweep.
      folder: output folder, created if missing.
      title, subtitle: title and subtitle of the figure.

    Raises:
      OSError: the folder cannot be written.
    """
    content = curves_content(points, title=title, subtitle=subtitle)
    return write_drawing(content, numbers_of_curves(points), folder, "planning")


def as_markdown(content: Content) -> str:
    """Return a figure's title, settings, tables and notes as Markdown."""
    notes = "\n".join(f"- {escaped(note)}" for note in content.notes)
    (_, first), *others = content.tables
    text = f"# {escaped(content.title)}\n\n{escaped(content.subtitle)}\n\n{to_markdown(first)}\n\n{notes}\n"
    for heading, table in others:
        text += f"\n## {escaped(heading)}\n\n{to_markdown(table)}\n"
    return text


def _as_latex(content: Content, stem: str) -> str:
    """Return all tables, each with a caption that names its subject."""
    parts = ["% Needs \\usepackage{booktabs}; names in other scripts need XeLaTeX or LuaLaTeX."]
    for number, (heading, table) in enumerate(content.tables, start=1):
        caption = ". ".join(part for part in (heading, content.title, content.subtitle) if part)
        parts.append(to_latex(table, caption, stem.replace("_", "-") + f"-{number}" * (number > 1)))
    return "\n\n".join(parts) + "\n"


def _without_formulas(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the table with an apostrophe before each text that a spreadsheet would evaluate as a formula.

    >>> _without_formulas(pd.DataFrame({"name": ["=1+1", "a=b", -1.0]}))["name"].tolist()
    ["'=1+1", 'a=b', -1.0]
    """

    def escape_formula(value: object) -> object:
        return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value

    return numbers.map(escape_formula).rename(columns=escape_formula)


def load_for(question: Question | str, tracking_uri: str, sweep: str | None = None) -> pd.DataFrame:
    """Load the trials of a sweep; for the question "convergence", one row per trial and recorded step.

    Args:
      question: the question or its name.
      tracking_uri, sweep: as for `dashboards.query.trial_frames.load_trials`.

    Raises:
      TrackingError: the server does not answer or the database does not exist.
      DashboardError: as in `dashboards.query.trial_frames.load_trials`, or no series was recorded.
    """
    question = find_question(question)
    trials = load_trials(tracking_uri, sweep)
    if question.kind != "convergence":
        return trials
    name = sweep or str(trials["sweep"].iloc[0])
    metrics = [metric for metric in question.series if metric in trials]
    frames = [series_of(tracking_uri, trials, metric) for metric in metrics]
    # Each frame still has the other metrics' last values, which do not belong to its steps.
    frames = [
        frame.drop(columns=[name for name in metrics if name != metric and name in frame])
        for metric, frame in zip(metrics, frames, strict=True)
        if len(frame)
    ]
    if not frames:
        raise DashboardError(
            f"no trial of the sweep {name!r} recorded any of {', '.join(question.series)} during training; "
            "train on public data with record_every_steps above 0"
        )
    return pd.concat(frames, ignore_index=True)
