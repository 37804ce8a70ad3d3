"""What the script of a question runs, loaded once its command line was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sweeps.service.options.sweep import SweepOptions
    from sweeps.service.planning.points import Candidate
    from sweeps.service.planning.trials import Point


def run_question(question: str, options: SweepOptions, points: Sequence[Point]) -> int:
    """Run a question's sweep from plan to figure and return the exit code, see `run_sweep`."""
    from dashboards.figures import draw  # here, with pandas, torch and Ray
    from sweeps.service.running.sweep import run_sweep

    return run_sweep(question, options, points, partial(draw, question))


def run_tuned_question(
    question: str, options: SweepOptions, candidates: Sequence[Candidate], grid: Sequence[Mapping[str, Any]]
) -> int:
    """Tune every candidate, run the best of each and return the exit code, see `run_tuned_sweep`."""
    from dashboards.figures import draw
    from sweeps.service.running.tuning import run_tuned_sweep

    return run_tuned_sweep(question, options, candidates, grid, partial(draw, question))
