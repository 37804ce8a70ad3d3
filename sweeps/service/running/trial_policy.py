"""The choice of a sweep's trials: by default every point with its repeats; other policies may differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.service.console.terminal import print_plan
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.inputs import EarlierSweep, PlanInputs
from sweeps.service.planning.plan import SweepPlan, build_plan, planned_trials
from sweeps.service.planning.trials import Trial
from sweeps.service.running.sweep_trials import SweepTrials
from sweeps.service.running.total_epsilon import fixes_noise
from sweeps.service.storage.calibrations import CalibrationCache
from sweeps.service.storage.sweep_folder import SweepFolder


@dataclass(frozen=True, kw_only=True)
class TrialPolicy:
    """A policy that trains every point with all repeats, in the order of the points.

    Attributes:
      has_answer: whether the sweep ends in an answer to its question.
      earlier: the sweeps whose results chose the points' settings; their privacy cost is added.
    """

    has_answer: bool = True
    earlier: tuple[EarlierSweep, ...] = ()

    def read_earlier(
        self, options: SweepOptions, root: Path, facts: Mapping[str, Any]
    ) -> tuple[EarlierSweep, ...]:
        """Return the sweeps whose results decide on the trials.

        Args:
          options: the user's options.
          root: the storage folder.
          facts: the facts of `ChargedTrials`.

        Raises:
          DpgclError: an earlier sweep cannot be used; see `read_earlier_sweeps`.
        """
        return self.earlier

    def trials(self, inputs: PlanInputs) -> Sequence[Trial]:
        """Return all trials whose cost counts for the sweep."""
        return planned_trials(inputs)

    def fixes_noise(self, inputs: PlanInputs) -> bool:
        """Whether options or points set ε or the noise multiplier of every private training."""
        return fixes_noise(inputs.options, inputs.points)

    def plan(self, inputs: PlanInputs) -> SweepPlan:
        """Return the plan. Raises as in `build_plan`."""
        return build_plan(inputs)

    def print_plan(self, plan: SweepPlan, *, in_full: bool) -> None:
        """Print the plan."""
        print_plan(plan, in_full=in_full)

    def resumed_name(self, name: str) -> str:
        """Return the name to resume the sweep by; the first of two sweeps is resumed by the second's name."""
        return name

    def start(self, plan: SweepPlan, folder: SweepFolder, calibrations: CalibrationCache) -> SweepTrials:
        """Return the trials and their stored results; this process must hold the sweep's folder."""
        return SweepTrials(plan, folder)


ALL_POINTS = TrialPolicy()
