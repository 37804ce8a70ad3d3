"""The Optuna study of a search: a record for Optuna's own tools, which the search itself never reads.

It is in the sweep's folder and holds the values that MLflow shows for each trial with a result: settings,
objectives, ε and guarantee, which have passed the release gate. It has no rows for trainings that stopped,
failed or were restarted, because they may reveal private records. For private records it has no durations.
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
from sweeps.service.running.mlflow_listener import times_ms

JOURNAL = "study.journal"
_TRIAL = "trial"


def direction(objective: str) -> StudyDirection:
    """Return whether Optuna minimizes an objective; it maximizes any other metric."""
    metric = find_metric(objective)
    is_lower_better = metric is not None and metric.higher_is_better is False
    return StudyDirection.MINIMIZE if is_lower_better else StudyDirection.MAXIMIZE


class SearchStudy:
    """The stored Optuna study of one search, named after its sweep.

    Args:
      folder: the sweep's folder.
      objectives: the names of the metrics that the search optimizes.
      axes: the options that the search varies, each with its list or range of values.
    """

    def __init__(self, folder: Path, objectives: Sequence[str], axes: Sequence[Axis]) -> None:
        self._folder, self._objectives = folder, list(objectives)
        self._distributions = {axis.option: _distribution(axis) for axis in axes}
        optuna.logging.set_verbosity(optuna.logging.ERROR)

    def add(self, trial: str, values: Mapping[str, Any], result: Mapping[str, Any], label: str) -> None:
        """Add a finished trial once; it counts as failed if an objective is missing or not finite.

        Args:
          trial: the trial's name.
          values: the searched options' values in this trial, by option.
          result: its stored result, whose `metrics` contain the objectives.
          label: `proven`, `as-published` or `none`.

        Raises:
          StorageError: the study cannot be read or written; a later call may succeed.
        """
        metrics = result["metrics"]
        scores = [each for name in self._objectives if math.isfinite(each := metrics.get(name, math.nan))]
        state = TrialState.COMPLETE if len(scores) == len(self._objectives) else TrialState.FAIL
        attributes = {_TRIAL: trial, "guarantee_label": label}
        if EPSILON in metrics:
            attributes[EPSILON] = metrics[EPSILON]
        frozen_trial = create_trial(
            state=state,
            values=scores if state is TrialState.COMPLETE else None,
            params=dict(values),
            distributions=self._distributions,
            user_attrs=attributes,
        )
        if (times := times_ms(result)) is not None:  # otherwise Optuna has set both to the current time
            frozen_trial.datetime_start, frozen_trial.datetime_complete = (
                datetime.fromtimestamp(t / 1000) for t in times
            )
        try:
            study = self._open_study()
            known_trials = study.get_trials(deepcopy=False)
            if all(each.user_attrs.get(_TRIAL) != trial for each in known_trials):
                study.add_trial(frozen_trial)
        except Exception as error:  # the file system's error, or Optuna's for a damaged file
            raise StorageError(f"{trial} cannot be added to {self._folder / JOURNAL}: {error}") from error

    def _open_study(self) -> Study:
        """Return the study in the sweep's folder, created if it does not exist."""
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(self._folder / JOURNAL))),
            study_name=self._folder.name,
            directions=[direction(objective) for objective in self._objectives],
            load_if_exists=True,
        )
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
            study.set_metric_names(self._objectives)
        return study


def _distribution(axis: Axis) -> BaseDistribution:
    if axis.choices:
        return CategoricalDistribution(axis.choices)
    return FloatDistribution(axis.low, axis.high, log=True)
