"""What a plan is made of, and the sweep before it that chose its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.trials import ChargedSteps, Point, Trial
from trainers.data.dataset import TrainingData


@dataclass(frozen=True, kw_only=True)
class EarlierSweep:
    """A sweep on the same records whose results chose the settings of another one.

    Attributes:
      sweep: its name.
      sweep_id: random; a sweep that it chose the settings of belongs to it alone.
      trials: its trials.
      draws: what each of them may have drawn, by name.
      grid: the settings among which was chosen, in words.
    """

    sweep: str
    sweep_id: str
    trials: tuple[Trial, ...]
    draws: Mapping[str, ChargedSteps]
    grid: str


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What a plan is made of.

    Attributes:
      question: name of the sweep.
      options: the user's; a point replaces some of them.
      points: the settings to compare.
      data: the records, as `load_training_data` returns them.
      calibration_folder: of stored calibrations; None for none.
      notes: sentences about the data.
      earlier: the sweep that chose the points' settings; None without one.
    """

    question: str
    options: SweepOptions
    points: Sequence[Point]
    data: TrainingData
    calibration_folder: Path | None
    notes: Sequence[str] = ()
    earlier: EarlierSweep | None = None

    @property
    def num_records_public(self) -> int:
        """N: declared, or else the number of records, which is public then."""
        return self.options.mechanism.num_records_public or num_records(self.data)


def num_records(data: TrainingData) -> int:
    """The records that the guarantee is about: those trained on, and those held out."""
    return len(data.train) + (len(data.held_out_records) if data.held_out_records is not None else 0)
