"""The Optuna study of a search: a record for Optuna's own tools, which the search itself never reads.

It holds what MLflow shows of each trial with a result: its settings, the objectives, its ε and guarantee,
which the release gate has let out. Trainings that stopped, failed or were restarted are no rows: of private
records they may tell. Of private records it has no durations, either.
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
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study, StudyDirection
from optuna.trial import TrialState, create_trial

from dpgcl_core.addresses import has_secret, masked, text_of_error
from dpgcl_core.errors import ConfigError, StorageError
from dpgcl_core.release.metrics import find_metric
from sweeps.service.planning.space import EPSILON, Searched

JOURNAL = "study.journal"
_TRIAL, _SWEEP_ID = "trial", "sweep_id"


def direction(objective: str) -> StudyDirection:
    """Return which way an objective is better."""
    metric = find_metric(objective)
    is_lower_better = metric is not None and metric.higher_is_better is False
    return StudyDirection.MINIMIZE if is_lower_better else StudyDirection.MAXIMIZE


class SearchStudy:
    """The study of one search.

    Args:
      address: path of a journal file, or an SQLAlchemy URL of a database.
      objectives: of the search.
      searched: what it varies.

    Raises:
      ConfigError: the address is of no storage that can be opened.
    """

    def __init__(self, address: str, objectives: Sequence[str], searched: Sequence[Searched]) -> None:
        self._address, self._objectives = address, list(objectives)
        self._distributions = {each.option: _distribution(each) for each in searched}
        self._study: Study | None = None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._names: tuple[tuple[str, ...], str] = (), ""
        try:
            self._storage = _storage(address)
        except Exception as error:  # whatever a driver of somebody's database raises
            raise ConfigError(
                "study_storage must be the path of a file, or the address of a database that can be reached, "
                f"as sqlite:////path/study.db; {masked(address)} failed: {self._reason(error)}"
            ) from (None if has_secret(address) else error)

    def name_after(self, sweep: str, sweep_id: str) -> None:
        """Name the study after its sweep, with the id behind it where another sweep has the name.

        Nothing is written before the first `add`.
        """
        self._names = (sweep, f"{sweep}-{sweep_id}"), sweep_id

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
          StorageError: the storage does not take it; call again.
        """
        metrics = result["metrics"]
        scores = [each for name in self._objectives if math.isfinite(each := metrics.get(name, math.nan))]
        state = TrialState.COMPLETE if len(scores) == len(self._objectives) else TrialState.FAIL
        attributes = {_TRIAL: trial, "guarantee_label": guarantee_label}
        if EPSILON in metrics:
            attributes[EPSILON] = metrics[EPSILON]
        ended = create_trial(
            state=state,
            values=scores if state is TrialState.COMPLETE else None,
            params=dict(values),
            distributions=self._distributions,
            user_attrs=attributes,
        )
        if times_ms is not None:  # else it begins and ends now
            ended.datetime_start, ended.datetime_complete = (
                datetime.fromtimestamp(t / 1000) for t in times_ms
            )
        try:
            study = self._study = self._study or self._opened()
            known = study.get_trials(deepcopy=False)
            if all(each.user_attrs.get(_TRIAL) != trial for each in known):
                study.add_trial(ended)
        except Exception as error:
            raise StorageError(
                f"the study at {masked(self._address)} does not take {trial}: {self._reason(error)}"
            ) from (None if has_secret(self._address) else error)

    def _opened(self) -> Study:
        """The study of this sweep, there already or new."""
        names, sweep_id = self._names
        there = set(optuna.get_all_study_names(self._storage))
        for name in names:
            study = optuna.create_study(
                storage=self._storage,
                study_name=name,
                directions=[direction(objective) for objective in self._objectives],
                load_if_exists=True,
            )
            if name not in there or study.user_attrs.get(_SWEEP_ID) == sweep_id:
                break
        study.set_user_attr(_SWEEP_ID, sweep_id)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(self._objectives)
        return study

    def _reason(self, error: Exception) -> str:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return text_of_error(error, self._address, first)[:300]


def _storage(address: str) -> BaseStorage:
    if "://" not in address and has_secret(address):
        raise ConfigError("a connection string is no address: write it as a URL")
    if "://" in address:
        return RDBStorage(address)
    path = Path(address).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(path)))


def _distribution(each: Searched) -> BaseDistribution:
    if each.choices:
        return CategoricalDistribution(each.choices)
    return FloatDistribution(each.low, each.high, log=True)
