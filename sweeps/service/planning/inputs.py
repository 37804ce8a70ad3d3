"""The inputs of a plan, and the earlier sweeps whose results decide on its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.trials import ChargedSteps, Point, Trial
from trainers.config.training import TrainingConfig
from trainers.data.dataset import TrainingData


@dataclass(frozen=True, kw_only=True)
class EarlierSweep:
    """A sweep on the same records whose results decide on the settings of another sweep.

    Attributes:
      sweep: the sweep's name.
      sweep_id: its random id, which is part of the other sweep's fingerprint.
      configs: the configurations of all trials that it planned, by the trial's name; no other sweep has a
        trial of the same name.
      draws: upper bounds on the draws of each trial, by the trial's name.
      note: a sentence on how the other sweep uses its results.
      results: its finished trials' results, by the trial's name, for a search to learn from.
    """

    sweep: str
    sweep_id: str
    configs: Mapping[str, TrainingConfig]
    draws: Mapping[str, ChargedSteps]
    note: str
    results: Mapping[str, Mapping[str, Any]]


def earlier_trials(sweeps: Sequence[EarlierSweep]) -> list[Trial]:
    """Return all trials of these sweeps."""
    pairs = [pair for sweep in sweeps for pair in sweep.configs.items()]
    return [Trial(name=name, config=config, params={}) for name, config in pairs]


def earlier_draws(sweeps: Sequence[EarlierSweep]) -> dict[str, ChargedSteps]:
    """Return upper bounds on the draws of these sweeps' trials, by the trial's name."""
    return {name: draws for sweep in sweeps for name, draws in sweep.draws.items()}


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
      earlier: the sweeps whose results decide on the settings.
    """

    question: str
    options: SweepOptions
    points: Sequence[Point]
    data: TrainingData
    calibration_folder: Path | None
    notes: Sequence[str] = ()
    earlier: tuple[EarlierSweep, ...] = ()

    @property
    def num_records_public(self) -> int:
        """N: the declared number, or else the number of records, which is then public."""
        return self.options.mechanism.num_records_public or num_records(self.data)


def num_records(data: TrainingData) -> int:
    """Return the number of records that the guarantee is about: records to train on and held-out records."""
    return len(data.train) + (len(data.held_out_records) if data.held_out_records is not None else 0)
