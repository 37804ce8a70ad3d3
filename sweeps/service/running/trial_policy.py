"""Which trials a sweep has: every point as often as asked, unless a policy of its own says something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.service.console.terminal import print_plan
from sweeps.service.options.sweep import SweepOptions
from sweeps.service.planning.plan import Earlier, SweepPlan, build_plan, planned_trials
from sweeps.service.planning.trials import Point, Trial
from sweeps.service.running.sweep_trials import SweepTrials
from sweeps.service.running.total import fixes_noise
from sweeps.service.storage.calibrations import CalibrationCache
from sweeps.service.storage.folder import SweepFolder
from trainers.data.dataset import TrainingData


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What a plan is made of.

    Attributes:
      question: name of the sweep.
      options, points: of the sweep.
      data: the records.
      notes: what must be said about the data.
      calibration_folder: where calibrations are kept.
      earlier: the sweep whose results chose these points; None without one.
    """

    question: str
    options: SweepOptions
    points: Sequence[Point]
    data: TrainingData
    notes: Sequence[str]
    calibration_folder: Path
    earlier: Earlier | None


@dataclass(frozen=True, kw_only=True)
class TrialPolicy:
    """Every point is trained as often as the options say, in the order of the points.

    Attributes:
      has_answer: whether the sweep ends in an answer to its question.
    """

    has_answer: bool = True

    def trials(
        self, options: SweepOptions, points: Sequence[Point], data: TrainingData, calibration_folder: Path
    ) -> Sequence[Trial]:
        """Return all trials that the sweep's cost is about."""
        return planned_trials(options, points, data, calibration_folder)

    def fixes_noise(self, options: SweepOptions, points: Sequence[Point]) -> bool:
        """Whether options or points give the noise of every private training."""
        return fixes_noise(options, points)

    def plan(self, inputs: PlanInputs) -> SweepPlan:
        """Return the plan. Raises as `build_plan`."""
        return build_plan(
            inputs.question,
            inputs.options,
            inputs.points,
            inputs.data,
            notes=inputs.notes,
            calibration_folder=inputs.calibration_folder,
            earlier=inputs.earlier,
        )

    def print_plan(self, plan: SweepPlan, *, in_full: bool) -> None:
        """Print the plan."""
        print_plan(plan, in_full=in_full)

    def resumed_name(self, name: str) -> str:
        """Return the name that the sweep is resumed by; of the first of two sweeps, that of the second."""
        return name

    def start(self, plan: SweepPlan, folder: SweepFolder, calibrations: CalibrationCache) -> SweepTrials:
        """Return the trials of a sweep whose folder this process holds."""
        return SweepTrials(plan, folder)


ALL_POINTS = TrialPolicy()
