"""What a plan is made of, and the sweep before it that chose its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.trials import Charged, Point, Trial
from trainers.data.dataset import TrainingData


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """A sweep on the same records whose results chose the settings of another one.

    Attributes:
      sweep: its name.
      sweep_id: random; a sweep that it chose the settings of belongs to it alone.
      trials: its trials.
      drawn: what each of them may have drawn, by name.
      grid: the settings among which was chosen, in words.
    """

    sweep: str
    sweep_id: str
    trials: tuple[Trial, ...]
    drawn: Mapping[str, Charged]
    grid: str


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What a plan is made of.

    Attributes:
      question: name of the sweep.
      options: the user's; a point replaces some of them.
      points: what is compared.
      data: the records, as `load_training_data` gives them.
      calibration_folder: where calibrations are kept; None for nowhere.
      notes: what must be said about the data.
      earlier: the sweep that chose the points' settings; None without one.
    """

    question: str
    options: SweepOptions
    points: Sequence[Point]
    data: TrainingData
    calibration_folder: Path | None
    notes: Sequence[str] = ()
    earlier: Earlier | None = None

    @property
    def num_records_public(self) -> int:
        """N: declared, or else the number of records, which is public then."""
        return self.options.mechanism.num_records_public or num_records(self.data)


def num_records(data: TrainingData) -> int:
    """The records that the guarantee is about: those trained on, and those held out."""
    return len(data.train) + (len(data.held_out_records) if data.held_out_records is not None else 0)
