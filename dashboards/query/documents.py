"""MLflow → the documents of a sweep: its answer, its privacy statement, its configuration."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from dashboards.compose.answer import Answer
from dashboards.dashboard_error import DashboardError
from dpgcl_core.errors import TrackingError
from trainers.tracking.mlflow_server import connect, server_errors

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

ANSWER, STATEMENT, CONFIG = "answer.json", "privacy_statement.json", "config.yaml"
_MOST_BYTES = 1_000_000
"""The largest size of a document; sweeps log only smaller ones."""


def load_answer(tracking_uri: str, trials: pd.DataFrame) -> Answer | None:
    """Return the answer that the trials' sweep recorded; None if there is none, or if it cannot be read.

    Args:
      tracking_uri: as for `trainers.tracking.mlflow_server.connect`.
      trials: trials of one sweep, from `dashboards.query.trial_frames.load_trials`.

    Raises:
      TrackingError: the server does not answer or the database does not exist.
    """
    run_id = str(trials["sweep_run_id"].iloc[0])
    values = read_json(read_documents(connect(tracking_uri), tracking_uri, run_id, (ANSWER,)).get(ANSWER))
    with suppress(DashboardError):
        return None if values is None else Answer.read(values)
    return None


def read_documents(
    client: MlflowClient, tracking_uri: str, run_id: str, names: Sequence[str]
) -> dict[str, str]:
    """Return the texts of a run's named documents by name; a missing or unreadable document is left out."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # it would break printed lines
    documents, available_names = {}, set[str]()
    with suppress(TrackingError), server_errors(tracking_uri, "listing the documents of the sweep"):
        available_names = {file.path for file in client.list_artifacts(run_id)}
    with tempfile.TemporaryDirectory(prefix="dpgcl-report-") as folder:
        for name in available_names.intersection(names):
            with suppress(TrackingError, UnicodeDecodeError):
                with server_errors(tracking_uri, f"reading {name}"):
                    path = Path(client.download_artifacts(run_id, name, folder))
                if path.is_file() and path.stat().st_size <= _MOST_BYTES:
                    documents[name] = path.read_text(encoding="utf-8")
    return documents


def read_json(text: str | None) -> dict[str, Any] | None:
    """Return the JSON object in a document; None if the document is missing or holds none."""
    try:
        content = json.loads(text or "null")
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
