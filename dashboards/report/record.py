"""MLflow → one sweep: its parent run, its trials, and the documents that were logged with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from dashboards.query.documents import ANSWER, CONFIG, STATEMENT, read_documents, read_json
from dashboards.query.trial_frames import find_runs, metrics_of, own_tags, trials_of, typed_params
from dpgcl_core.errors import ConfigError
from trainers.tracking.mlflow_server import is_database, run_link, runs_link
from trainers.tracking.runs import ROLE_TAG, STOPPED_TAG, SWEEP_TAG, TRIAL_ROLE, TRIAL_TAG


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """One sweep's data in MLflow.

    Attributes:
      name: the sweep's name.
      status: status of its parent run: "RUNNING", "FINISHED", "FAILED" or "KILLED".
      tags, params, metrics: tags, params and metrics of the parent run.
      trials: finished trials, as from `dashboards.query.trial_frames.load_trials`; empty if there are none.
      num_planned: total number of trials; None if it was not recorded.
      unfinished: numbers of the trials that have not finished, by status.
      early_stops: names of the trials that were ended early by their scores; none of them is in `trials`.
      answer, statement, config: documents of the sweep; None if they are missing or damaged.
      links: MLflow's page of each trial, by run id; empty for a database, which has no pages.
      sweep_link: MLflow's page of all runs of the sweep; empty without one.
    """

    name: str
    status: str
    tags: Mapping[str, str]
    params: Mapping[str, Any]
    metrics: Mapping[str, float]
    trials: pd.DataFrame
    num_planned: int | None = None
    unfinished: Mapping[str, int] = field(default_factory=dict)
    early_stops: Sequence[str] = ()
    answer: Mapping[str, Any] | None = None
    statement: Mapping[str, Any] | None = None
    config: str | None = None
    links: Mapping[str, str] = field(default_factory=dict)
    sweep_link: str = ""


def load_record(tracking_uri: str, sweep: str | None = None) -> SweepRecord:
    """Return the data of an open sweep, finished or not.

    Args:
      tracking_uri: as for `trainers.tracking.mlflow_server.connect`.
      sweep: the sweep's name; None for the sweep started last.

    Raises:
      TrackingError: the server does not answer or the database does not exist.
      DashboardError: there is no such sweep, or it is sealed.
    """
    client, parent, runs = find_runs(tracking_uri, sweep, doing="reading the sweep")
    experiment, name = parent.info.experiment_id, parent.data.tags[SWEEP_TAG]
    params, planned = typed_params(parent), typed_params(parent).get("num_trials")
    documents = read_documents(client, tracking_uri, parent.info.run_id, (ANSWER, STATEMENT, CONFIG))
    links, sweep_link, answer = {}, "", read_json(documents.get(ANSWER))
    if not is_database(tracking_uri):
        links = {r.info.run_id: run_link(tracking_uri, experiment, r.info.run_id) for r in runs}
        with suppress(ConfigError):  # MLflow cannot search for some names
            tags, score = {SWEEP_TAG: name, ROLE_TAG: TRIAL_ROLE}, (answer or {}).get("score")
            sweep_link = runs_link(tracking_uri, experiment, tags, score)
    return SweepRecord(
        name=name,
        status=str(parent.info.status),
        tags=own_tags(parent),
        params=params,
        metrics=metrics_of(parent),
        trials=trials_of(parent, runs),
        num_planned=planned if isinstance(planned, int) else None,
        unfinished=Counter(str(run.info.status) for run in runs if run.info.status != "FINISHED"),
        early_stops=sorted(run.data.tags.get(TRIAL_TAG, "") for run in runs if STOPPED_TAG in run.data.tags),
        answer=answer,
        statement=read_json(documents.get(STATEMENT)),
        config=documents.get(CONFIG),
        links=links,
        sweep_link=sweep_link,
    )
