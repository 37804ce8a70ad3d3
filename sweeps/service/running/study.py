"""The Optuna study of a search: a record for Optuna's own tools, which the search itself never reads.

It lies in the sweep's folder and holds what MLflow shows of each trial with a result: its settings, the
objectives, its ε and guarantee, which the release gate has let out. Trainings that stopped, failed or were
restarted are no rows: of private records they may tell. Of private records it has no durations, either.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study, StudyDirection
from optuna.trial import TrialState, create_trial

from dpgcl_core.errors import StorageError
from dpgcl_core.release.metrics import find_metric
from sweeps.service.planning.space import EPSILON, Axis

JOURNAL = "study.journal"
_TRIAL = "trial"


def direction(objective: str) -> StudyDirection:
    """Return which way an objective is better."""
    metric = find_metric(objective)
    is_lower_better = metric is not None and metric.higher_is_better is False
    return StudyDirection.MINIMIZE if is_lower_better else StudyDirection.MAXIMIZE


class SearchStudy:
    """The study of one search, which has its sweep's name.

    Args:
      folder: of the sweep.
      objectives: of the search.
      axes: of its space.
    """

    def __init__(self, folder: Path, objectives: Sequence[str], axes: Sequence[Axis]) -> None:
        self._folder, self._objectives = folder, list(objectives)
        self._distributions = {axis.option: _distribution(axis) for axis in axes}
        optuna.logging.set_verbosity(optuna.logging.ERROR)

    def add(
        self,
        trial: str,
        values: Mapping[str, Any],
        result: Mapping[str, Any],
        guarantee_label: str,
        times_ms: tuple[int, int] | None,
    ) -> None:
        """Add a trial with a result, unless it is there; without all objectives it counts as failed.

        Args:
          trial: its name.
          values: its settings, by option.
          result: its metrics, and what else was kept.
          guarantee_label: of the training.
          times_ms: when it began and ended; None where that is withheld.

        Raises:
          StorageError: it cannot be written; call again.
        """
        metrics = result["metrics"]
        scores = [each for name in self._objectives if math.isfinite(each := metrics.get(name, math.nan))]
        state = TrialState.COMPLETE if len(scores) == len(self._objectives) else TrialState.FAIL
        attributes = {_TRIAL: trial, "guarantee_label": guarantee_label}
        if EPSILON in metrics:
            attributes[EPSILON] = metrics[EPSILON]
        frozen_trial = create_trial(
            state=state,
            values=scores if state is TrialState.COMPLETE else None,
            params=dict(values),
            distributions=self._distributions,
            user_attrs=attributes,
        )
        if times_ms is not None:  # else it begins and ends now
            frozen_trial.datetime_start, frozen_trial.datetime_complete = (
                datetime.fromtimestamp(t / 1000) for t in times_ms
            )
        try:
            study = self._open_study()
            known_trials = study.get_trials(deepcopy=False)
            if all(each.user_attrs.get(_TRIAL) != trial for each in known_trials):
                study.add_trial(frozen_trial)
        except Exception as error:  # of the file system, or Optuna's of a damaged file
            raise StorageError(f"{self._folder / JOURNAL} does not take {trial}: {error}") from error

    def _open_study(self) -> Study:
        """The study, there already or new."""
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(self._folder / JOURNAL))),
            study_name=self._folder.name,
            directions=[direction(objective) for objective in self._objectives],
            load_if_exists=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(self._objectives)
        return study


def _distribution(axis: Axis) -> BaseDistribution:
    if axis.choices:
        return CategoricalDistribution(axis.choices)
    return FloatDistribution(axis.low, axis.high, log=True)
