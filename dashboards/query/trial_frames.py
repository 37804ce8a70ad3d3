"""MLflow → tables of trials: one row per finished trial, or per trial and recorded step."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pandas as pd

from dashboards.dashboard_error import DashboardError
from dashboards.query.sweeps import find_parent
from dpgcl_core.addresses import masked
from dpgcl_core.release.metrics import declared_name, is_reference, tracked_name
from trainers.tracking.mlflow_server import connect, search_runs, server_errors
from trainers.tracking.runs import AXIS_PREFIX, PARENT_TAG, STOPPED_TAG, SWEEP_TAG

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

# MLflow's databases hold ±inf as the largest double.
_STORED_INFINITY = 1.79e308


def load_trials(tracking_uri: str, sweep: str | None = None) -> pd.DataFrame:
    """Return one row per finished trial of a sweep, without trials that were ended early by their scores.

    The columns are `run_id`, `run_name`, every tag that is not MLflow's own (`dpgcl.` removed), every param,
    as int, float, bool, None or str, and every metric's last value. If a trial lacks a param or tag, the
    value of the sweep's parent run, `sweep_run_id`, is used. The parent run's scores of raw pixels and of HOG
    are used likewise. `group_size_order` sorts sizes, "batch" last. Rows are sorted by group size, ε,
    num_augmentations and repeat, as far as these exist.

    Args:
      tracking_uri: as for `trainers.tracking.mlflow_server.connect`.
      sweep: the sweep's name, or the id of its run; None for the sweep started last.

    Raises:
      TrackingError: the server does not answer or the database does not exist.
      DashboardError: there is no such sweep, it is sealed, or none of its trials has finished.
    """
    _, parent, runs = find_runs(tracking_uri, sweep, doing="reading the runs")
    trials = trials_of(parent, runs)
    if trials.empty:
        where = f"{parent.data.tags[SWEEP_TAG]!r} at {masked(tracking_uri)}"
        raise DashboardError(f"the sweep {where} has no finished trial yet ({len(runs)} begun)")
    return trials


def find_runs(tracking_uri: str, sweep: str | None, *, doing: str) -> tuple[MlflowClient, Run, list[Run]]:
    """Return MLflow's client, the parent run of a sweep and the runs of all its trials, finished or not.

    Args:
      tracking_uri, sweep: as in `load_trials`, with the same errors.
      doing: the current action for error messages, such as "reading the runs".
    """
    client = connect(tracking_uri)
    with server_errors(tracking_uri, doing):
        parent = find_parent(client, masked(tracking_uri), sweep)
        runs = search_runs(client, [parent.info.experiment_id], {PARENT_TAG: parent.info.run_id})
    return client, parent, runs


def trials_of(parent: Run, runs: list[Run]) -> pd.DataFrame:
    """Return one row per finished trial among a sweep's runs, like `load_trials`; empty if none finished."""
    runs = [run for run in runs if run.info.status == "FINISHED" and STOPPED_TAG not in run.data.tags]
    if not runs:
        return pd.DataFrame()
    references = {name: value for name, value in metrics_of(parent).items() if is_reference(name)}
    sweep_values = {**own_tags(parent), **typed_params(parent), **references}
    sweep_values["sweep_run_id"] = parent.info.run_id
    trials = pd.DataFrame([{**sweep_values, **_row(run)} for run in runs])
    if "group_size" in trials:
        # The dtype object keeps 8 and "batch" unchanged, whatever pandas would infer.
        trials["group_size"] = trials["group_size"].astype(object)
        trials["group_size_order"] = [group_size_order(size) for size in trials["group_size"]]
    sort_columns = ("group_size_order", "target_epsilon", "num_augmentations", "repeat", "run_name")
    return trials.sort_values([key for key in sort_columns if key in trials], ignore_index=True)


def series_of(tracking_uri: str, trials: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return one row per trial and recorded step of a metric; empty if nothing was recorded.

    The columns are those of `load_trials` and `step`. The metric's own column has its value at that step.

    Args:
      tracking_uri: as for `trainers.tracking.mlflow_server.connect`.
      trials: trials from `load_trials`.
      metric: name of a series, for example `train_loss`.

    Raises:
      TrackingError: the server does not answer.
    """
    if metric not in trials:
        return trials[:0].assign(step=pd.Series(dtype=float), **{metric: pd.Series(dtype=float)})
    client = connect(tracking_uri)
    points = []
    with server_errors(tracking_uri, f"reading the history of {metric}"):
        for run_id in trials.loc[trials[metric].notna(), "run_id"]:
            get_history = client.get_metric_history
            for point in get_history(run_id, tracked_name(metric)) or get_history(run_id, metric):
                points.append({"run_id": run_id, "step": point.step, metric: _restore_infinity(point.value)})
    history = pd.DataFrame(points).sort_values(["run_id", "step"], kind="stable")
    return trials.drop(columns=metric).merge(history, on="run_id")


def group_size_order(group_size: int | str) -> float:
    """Return a number that sorts group sizes with "batch" last.

    >>> sorted(["batch", 16, 2], key=group_size_order)
    [2, 16, 'batch']
    """
    return math.inf if isinstance(group_size, str) else float(group_size)


def typed(text: str) -> int | float | bool | str | None:
    """Return the value that MLflow stored as `text`.

    >>> [typed(text) for text in ("8", "inf", "1.5e-06", "True", "None", "batch")]
    [8, inf, 1.5e-06, True, None, 'batch']
    """
    words: dict[str, bool | None] = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def own_tags(run: Run) -> dict[str, str]:
    """Return a run's tags, without MLflow's own and without the prefix `dpgcl.`."""
    return {
        name.removeprefix("dpgcl."): value
        for name, value in run.data.tags.items()
        if not name.startswith("mlflow.")
    }


def typed_params(run: Run) -> dict[str, Any]:
    """Return a run's params with their original types, without the copies named `AXIS_PREFIX`."""
    params = {name: value for name, value in run.data.params.items() if not name.startswith(AXIS_PREFIX)}
    return {name: typed(value) for name, value in params.items()}


def _row(run: Run) -> dict[str, Any]:
    names = {"run_id": run.info.run_id, "run_name": run.info.run_name}
    return {**own_tags(run), **typed_params(run), **metrics_of(run), **names}


def metrics_of(run: Run) -> dict[str, float]:
    """Return the last values of a run's metrics, by their names in `dpgcl_core.release.metrics`."""
    return {declared_name(name): _restore_infinity(value) for name, value in run.data.metrics.items()}


def _restore_infinity(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) > _STORED_INFINITY else value
