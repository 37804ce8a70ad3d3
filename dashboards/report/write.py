"""MLflow → the file of a sweep's report."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pandas as pd

from dashboards.dashboard_error import DashboardError
from dashboards.figures import load_for
from dashboards.report.page import report_page
from dashboards.report.record import SweepRecord, load_record
from dashboards.report.report_content import question_of, report_of

REPORT = "report.html"


def write_report(tracking_uri: str, sweep: str | None, folder: Path) -> Path:
    """Write `report.html` of a sweep, finished or not, atomically replacing an earlier one; return its path.

    The same runs give the same file.

    Args:
      tracking_uri: as for `trainers.tracking.mlflow_server.connect`.
      sweep: the sweep's name; None for the sweep started last.
      folder: output folder, created if missing.

    Raises:
      TrackingError: the server does not answer or the database does not exist.
      DashboardError: there is no such sweep, or it is sealed.
      OSError: the folder cannot be written.
    """
    record = load_record(tracking_uri, sweep)
    page = report_page(report_of(record, _series(tracking_uri, record)))
    folder.mkdir(parents=True, exist_ok=True)
    temporary_path, path = folder / f".{REPORT}.part", folder / REPORT
    temporary_path.write_text(page, encoding="utf-8")
    temporary_path.replace(path)
    return path


def _series(tracking_uri: str, record: SweepRecord) -> pd.DataFrame | None:
    """Return the trials' histories for a figure over training steps; None if there are none."""
    question = question_of(record)
    if question.kind != "convergence" or record.trials.empty:
        return None
    with suppress(DashboardError):
        return load_for(question, tracking_uri, record.name)
    return None
