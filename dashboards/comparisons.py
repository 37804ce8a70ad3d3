"""Figures beside those of questions, from MLflow alone: sweeps overlaid, utility against ε."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dashboards.compose.comparison import comparison_of, overlaid, question_of
from dashboards.compose.pareto import pareto_of
from dashboards.figures import load_for, write_drawing
from dashboards.query.trials import load_trials


def draw_comparison(
    runs: Sequence[str],
    tracking_uri: str,
    folder: Path,
    *,
    question: str | None = None,
    axis: str | None = None,
) -> list[Path]:
    """Overlay sweeps in the figure of their question, write its files (`comparison.png`, …) and return them.

    Args:
      runs: names of sweeps, or ids of their runs; the first is what the others are compared with.
      tracking_uri: as for `trainers.tracking.server.connect`.
      folder: created if missing.
      question: in place of the one that all sweeps recorded.
      axis: param to draw against, in place of the question's own.

    Raises:
      TrackingError: the server does not answer.
      DashboardError: as `dashboards.compose.comparison.overlaid` and `question_of`.
      OSError: the folder cannot be written.
    """
    asked = question_of([load_trials(tracking_uri, run) for run in runs], question)
    asked = asked if axis is None else asked.along(axis)
    trials = overlaid([load_for(asked, tracking_uri, run) for run in runs])
    return write_drawing(*comparison_of(trials, asked), folder, "comparison")


def draw_pareto(
    runs: Sequence[str], tracking_uri: str, folder: Path, *, score: str | None = None
) -> list[Path]:
    """Draw the trials of sweeps by score and ε, write the files (`pareto.png`, …) and return them.

    Args:
      runs, tracking_uri, folder: as of `draw_comparison`; one sweep is enough.
      score: drawn; the first one that all trials have unless given.

    Raises: as `draw_comparison`.
    """
    content, numbers = pareto_of([load_trials(tracking_uri, run) for run in runs], score)
    return write_drawing(content, numbers, folder, "pareto")
