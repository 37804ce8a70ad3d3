"""Sobol points for a search: the point of a trial follows from its number."""

from __future__ import annotations

import warnings
from typing import Any

import optuna
from optuna.samplers import QMCSampler
from optuna.study import Study
from optuna.trial import FrozenTrial


class SobolSampler(QMCSampler):
    """Scrambled Sobol points from the first trial on: the space is known, and need not be found out.

    Args:
      distributions: of the whole space, by option.
      seed: public.
    """

    def __init__(self, distributions: dict[str, Any], seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            super().__init__(scramble=True, seed=seed)
        self._distributions = distributions
        self._points: list[dict[str, Any]] = []
        self._beside = optuna.create_study()  # Optuna counts points by study; here they go by trial

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        """Return the whole space."""
        return self._distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the point of the trial's number, whoever asked for the earlier ones."""
        while len(self._points) <= trial.number:
            self._points.append(super().sample_relative(self._beside, trial, search_space))
        return self._points[trial.number]
