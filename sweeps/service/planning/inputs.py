"""The inputs of a plan, and the earlier sweep that chose its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.trials import ChargedSteps, Point, Trial
from trainers.data.dataset import TrainingData


@dataclass(frozen=True, kw_only=True)
class EarlierSweep:
    """A sweep on the same records whose results chose the settings of another sweep.

    Attributes:
      sweep: the sweep's name.
      sweep_id: its random id, which is part of the other sweep's fingerprint.
      trials: its trials.
      draws: upper bounds on the draws of each trial, by the trial's name.
      choice: a sentence on how its results chose the settings.
    """

    sweep: str
    sweep_id: str
    trials: tuple[Trial, ...]
    draws: Mapping[str, ChargedSteps]
    choice: str


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The inputs of a plan.

    Attributes:
      question: the sweep's name in scripts and folders, for example `group-size`.
      options: the user's options; a point replaces some of them.
      points: the settings to compare.
      data: the records, as `load_training_data` returns them.
      calibration_folder: the folder of stored noise calibrations; None to store and reuse none.
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
        """N: the declared number, or else the number of records, which is then public."""
        return self.options.mechanism.num_records_public or num_records(self.data)


def num_records(data: TrainingData) -> int:
    """Return the number of records that the guarantee is about: records to train on and held-out records."""
    return len(data.train) + (len(data.held_out_records) if data.held_out_records is not None else 0)
