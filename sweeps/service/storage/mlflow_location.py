"""The place where MLflow stores the runs of sweeps."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dpgcl_core.errors import StorageError
from trainers.files.storage import in_throw_away_copy
from trainers.tracking.mlflow_server import database_address


def tracking_address(option: str | None, root: Path) -> str:
    """Return the URI of MLflow: `option`, else `$MLFLOW_TRACKING_URI`, else the database in `root`.

    The path of a SQLite file is made absolute, because the driver changes its working directory.

    Raises:
      StorageError: the file is in a job's temporary copy.
    """
    uri = option or os.environ.get("MLFLOW_TRACKING_URI") or database_address(root)
    file = re.fullmatch(r"(sqlite[^:]*:///)([^?]+)(.*)", uri, re.IGNORECASE)
    if file is None:
        return uri
    path = Path(file[2]).absolute()
    if in_throw_away_copy(path):
        raise StorageError(
            f"the MLflow database {path} is in the job's temporary copy of the code and would be lost. Set "
            "--tracking-uri (after --) to a path outside it, for example sqlite:////home/me/mlflow.db"
        )
    return f"{file[1]}{path}{file[3]}"
