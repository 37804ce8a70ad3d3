"""The report of an open sweep: rewritten while its trials run, and once more at the end.

A separate thread writes it from MLflow's data, so that no trial waits for it. The pause between two reports
is at least a minute, and at least twenty times the time that the last report took.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dashboards.report.write import REPORT, write_report
from dpgcl_core.errors import DpgclError, TrackingError
from sweeps.service.console.terminal import print_line, warn
from sweeps.service.running.listeners import SweepBeginning, SweepEnd, TrialResult
from sweeps.service.running.mlflow_listener import MlflowListener

_MIN_PAUSE_SECONDS = 60.0
_PAUSE_FACTOR = 20
_PATIENCE_SECONDS = 120.0
"""How long the end of a sweep waits for a report that the thread is still writing."""


class ReportListener:
    """Writes the report of one sweep into its folder.

    Args:
      uri: the address of the MLflow server or database.
      folder: the sweep's folder, which has the sweep's name.
      mlflow: sends the sweep's results to MLflow.
      now: returns the seconds of a monotonic clock.
    """

    def __init__(
        self, uri: str, folder: Path, mlflow: MlflowListener, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._uri, self._folder, self._mlflow, self._now = uri, folder, mlflow, now
        self._next_time = now() + _MIN_PAUSE_SECONDS
        self._thread: threading.Thread | None = None

    def withdraw(self) -> None:
        """Remove the report of an earlier process, because the ε that it states will be too low."""
        (self._folder / REPORT).unlink(missing_ok=True)

    def on_begin(self, sweep: SweepBeginning) -> None:
        """No-op: there is nothing to report yet."""

    def on_result(self, result: TrialResult) -> None:
        """Rewrite the report in a thread, unless it was written recently or is being written."""
        if self._now() < self._next_time or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._refresh, name="report", daemon=True)
        self._thread.start()

    def on_end(self, end: SweepEnd) -> None:
        """Write and log the final report, and print its path.

        Nothing is written if the sweep was interrupted, or MLflow lacks results.
        """
        if not end.is_concluded or self._mlflow.untracked:
            return
        try:
            if self._thread is not None:
                self._thread.join(_PATIENCE_SECONDS)
                if self._thread.is_alive():
                    raise TrackingError(
                        "MLflow is slow; write the report later with python -m dashboards report"
                    )
            path = write_report(self._uri, self._folder.name, self._folder)
            print_line(f"report: {path}")
            self._mlflow.log_artifact(path)
        except (DpgclError, OSError) as error:
            warn(f"warning: the report: {error}")

    def _refresh(self) -> None:
        start_seconds = self._now()
        with suppress(Exception):  # the error occurs again in the final report, which prints it
            write_report(self._uri, self._folder.name, self._folder)
        self._next_time = self._now() + max(_MIN_PAUSE_SECONDS, _PAUSE_FACTOR * (self._now() - start_seconds))
