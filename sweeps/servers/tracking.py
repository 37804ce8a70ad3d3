"""An MLflow server in the background, on a database, with its artifacts in a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import psutil

from dpgcl_core.errors import TrackingError

_START_SECONDS = 180.0
# `/health` answers before the store is open, and the first request to that takes seconds.
_FIRST_REQUEST = "/api/2.0/mlflow/experiments/search?max_results=1"
_NO_PROXY = build_opener(ProxyHandler({}))


@dataclass(frozen=True, kw_only=True)
class MlflowServer:
    """One server.

    Attributes:
      folder: of its artifacts, its log and the number of its process.
      host, port: where it listens.
    """

    folder: Path
    host: str
    port: int

    @property
    def uri(self) -> str:
        """Return its address."""
        return f"http://{self.host}:{self.port}"

    @property
    def process(self) -> psutil.Process | None:
        """Return its process; None where it does not run."""
        try:
            number, created = (self.folder / "pid").read_text().split()
            found = psutil.Process(int(number))
            return found if abs(found.create_time() - float(created)) < 1 and found.is_running() else None
        except (OSError, ValueError, psutil.Error):
            return None

    def start(self, store: str) -> None:
        """Start it, and return when it answers; nothing where it runs.

        Args:
          store: address of the database, with a password; it goes in the environment, which others of the
            machine cannot read.

        Raises:
          TrackingError: it does not start.
        """
        if self.process is not None:
            return
        (self.folder / "artifacts").mkdir(parents=True, exist_ok=True)
        words = ["-m", "mlflow", "server", "--host", self.host, "--port", str(self.port), "--workers", "1"]
        words += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = os.environ | {"MLFLOW_BACKEND_STORE_URI": store, "MLFLOW_DISABLE_TELEMETRY": "true"}
        environment.pop("MLFLOW_TRACKING_URI", None)
        with (self.folder / "log").open("a") as log:
            started = subprocess.Popen(
                [sys.executable, *words],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        created = psutil.Process(started.pid).create_time()
        (self.folder / "pid").write_text(f"{started.pid} {created}")
        self._wait_for(started)

    def _wait_for(self, started: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + _START_SECONDS
        while started.poll() is None and time.monotonic() < end:
            try:
                with _NO_PROXY.open(f"{self.uri}{_FIRST_REQUEST}", timeout=_START_SECONDS):
                    return
            except (URLError, OSError):
                time.sleep(0.2)
        self.stop()
        raise TrackingError(
            f"the MLflow server did not start at {self.uri}; its log is {self.folder / 'log'}"
        )

    def stop(self) -> None:
        """Stop it with its workers, and return when all have ended; nothing where it does not run."""
        if (found := self.process) is not None:
            family = [found, *found.children(recursive=True)]
            found.send_signal(signal.SIGTERM)
            _, left = psutil.wait_procs(family, timeout=20)
            for process in left:
                process.kill()
            psutil.wait_procs(left, timeout=10)
        (self.folder / "pid").unlink(missing_ok=True)
