"""Sweeps in MLflow: list them, and find one by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from dashboards.dashboard_error import DashboardError
from dpgcl_core.addresses import masked
from dpgcl_core.errors import unknown_choice
from trainers.tracking.mlflow_server import connect, search_runs, server_errors
from trainers.tracking.runs import PARENT_TAG, ROLE_TAG, SEALED_ROLE, SWEEP_ROLE, SWEEP_TAG

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient
    from pandas.api.typing import NaTType

_MOST_EXPERIMENTS = 50_000
"""The most experiments that MLflow returns at once; a question has one for each data set."""


def list_sweeps(tracking_uri: str) -> pd.DataFrame:
    """Return one row per sweep, newest first; sealed sweeps, which hide their times, come last.

    The columns are `sweep`, `release_mode`, `status`, `started`, `num_finished_trials`, `tuned_epsilon` (of
    the whole sweep, as recorded; of only its proven trials if others finished), and `experiment`. For a
    sealed sweep, `started` and the number of trials are missing.

    Raises:
      TrackingError: the server does not answer or the database does not exist.
      DashboardError: there is no sweep.
    """
    client = connect(tracking_uri)
    address = masked(tracking_uri)
    with server_errors(tracking_uri, "listing the sweeps"):
        experiments = _experiments(client)
        rows = []
        for run in _find_parents(client, list(experiments), address):
            start_time: pd.Timestamp | NaTType = pd.NaT
            num_finished, finished_trials = None, []
            if run.data.tags[ROLE_TAG] == SWEEP_ROLE:
                runs = search_runs(client, [run.info.experiment_id], {PARENT_TAG: run.info.run_id})
                finished_trials = [trial for trial in runs if trial.info.status == "FINISHED"]
                start_time = pd.Timestamp(run.info.start_time, unit="ms", tz="UTC").floor("s")
                num_finished = len(finished_trials)
            rows.append(
                {
                    "sweep": run.data.tags[SWEEP_TAG],
                    "release_mode": run.data.tags.get("release_mode", "open"),
                    "status": run.info.status,
                    "started": start_time,
                    "num_finished_trials": num_finished,
                    "tuned_epsilon": _tuned_epsilon(run, finished_trials),
                    "experiment": experiments[run.info.experiment_id],
                }
            )
    return pd.DataFrame(rows).astype({"num_finished_trials": "Int64"})


def _tuned_epsilon(sweep: Run, finished_trials: list[Run]) -> str:
    """Return the recorded ε of the whole sweep, with a remark if it is only planned or not of all trials."""
    epsilon = str(sweep.data.tags.get("tuned_epsilon", "none"))
    if epsilon == "none" or sweep.data.tags[ROLE_TAG] == SEALED_ROLE:
        return epsilon
    if not finished_trials:
        return f"{epsilon} planned"
    if any(trial.data.tags.get("guarantee_label", "none") != "proven" for trial in finished_trials):
        return f"{epsilon}, proven trials only"
    return epsilon


def _experiments(client: MlflowClient) -> dict[str, str]:
    """Return the names of all experiments by id."""
    experiments = client.search_experiments(max_results=_MOST_EXPERIMENTS)
    return {experiment.experiment_id: experiment.name for experiment in experiments}


def _find_parents(client: MlflowClient, experiment_ids: list[str], address: str) -> list[Run]:
    """Return the parent runs of open sweeps, then of sealed sweeps; at least one, else DashboardError."""
    parents = [
        run
        for role in (SWEEP_ROLE, SEALED_ROLE)
        for run in search_runs(client, experiment_ids, {ROLE_TAG: role})
        if role == SWEEP_ROLE or run.info.status == "FINISHED"
    ]
    if not parents:
        raise DashboardError(f"no sweep in MLflow at {address}; run a sweep first, or pass another address")
    return parents


def find_parent(client: MlflowClient, address: str, sweep: str | None) -> Run:
    """Return a sweep's parent run, by name (the newest of it) or run id; None for the sweep started last.

    Raises:
      DashboardError: there is no such sweep, or it is sealed.
    """
    parents = _find_parents(client, list(_experiments(client)), address)
    by_name: dict[str, Run] = {}
    for run in parents:
        by_name.setdefault(run.data.tags[SWEEP_TAG], run)
    runs_by_key = {run.info.run_id: run for run in parents} | by_name
    if sweep is not None and sweep not in runs_by_key:
        raise DashboardError(unknown_choice("sweep", sweep, by_name))
    parent = parents[0] if sweep is None else runs_by_key[sweep]
    if parent.data.tags[ROLE_TAG] == SEALED_ROLE:
        raise DashboardError(
            f"the sweep {parent.data.tags[SWEEP_TAG]!r} is sealed: it published one run with its privacy "
            "statement, and has no trials to draw"
        )
    return parent
