"""MLflow databases for tests: the schema, which takes seconds, is made once per process and copied."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

from trainers.tracking.runs import Tracker


@functools.cache
def _template() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="dpgcl-mlflow-")
    Tracker.open(None, Path(folder.name), "elsewhere")
    return folder


def copy_empty_database(folder: Path) -> str:
    """Put a database without runs into `folder` and return its address."""
    shutil.copy(Path(_template().name) / "mlflow.db", folder / "mlflow.db")
    return f"sqlite:///{folder / 'mlflow.db'}"


def open_tracker(folder: Path, experiment: str = "experiment") -> Tracker:
    """Open the tracker of a new database in `folder`."""
    copy_empty_database(folder)
    return Tracker.open(None, folder, experiment)
