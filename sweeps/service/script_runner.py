"""The functions that run a question's script; heavy libraries are loaded after its command line is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dpgcl_core.errors import ConfigError
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.options.sweep_options import SweepOptions, errors_in_flags

if TYPE_CHECKING:
    from sweeps.service.planning.trials import Point
    from sweeps.service.running.trial_policy import TrialPolicy


Options = TypeVar("Options", bound=SweepOptions)


def run_script(
    question: str,
    kind: type[Options],
    points_of: Callable[[Options], Sequence[Point]],
    *,
    description: str | None,
) -> int:
    """Run a question's sweep with the options on its script's command line, and return the exit code.

    Args:
      question: the question's name, for example `group-size`.
      kind: the class of the script's options.
      points_of: returns the points to compare, from the options.
      description: the text for `--help`.
    """
    options = parse_options(kind, description=description)
    return run_question(question, options, points_of(options))


def run_question(
    question: str, options: SweepOptions, points: Sequence[Point], policy: TrialPolicy | None = None
) -> int:
    """Run a question's sweep from plan to figure and return the exit code.

    Args:
      question: the question's name.
      options: the user's options.
      points: the settings to compare.
      policy: decides the sweep's trials; every point by default.
    """
    from dashboards.figures import draw  # imported late: these load pandas, torch and Ray
    from sweeps.service.running.strategies import run_with_strategy
    from sweeps.service.running.trial_policy import ALL_POINTS

    with errors_in_flags(type(options)):
        return run_with_strategy(
            question, options, points, partial(draw, question), policy or ALL_POINTS
        ).code


def run_tuned_question(
    question: str, options: SweepOptions, candidates: Sequence[Point], grid: Sequence[Mapping[str, Any]]
) -> int:
    """Tune every candidate, run the best setting of each and return the exit code; see `run_tuned_sweep`."""
    from dashboards.figures import draw
    from sweeps.service.console.display import show_progress
    from sweeps.service.running.two_stage_policy import run_tuned_sweep

    if options.tuning.strategy is not None:
        raise ConfigError(
            "--tuning finds one model, and this sweep compares tuned methods; got "
            f"{options.tuning.strategy}. Leave it out, or use it with another sweep"
        )
    with errors_in_flags(type(options)), show_progress(quiet=options.service.is_quiet):
        return run_tuned_sweep(question, options, candidates, grid, partial(draw, question))
