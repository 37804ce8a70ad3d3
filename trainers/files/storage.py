"""The storage folder: where sweeps lie, the same for everything that writes and reads them.

`--storage`, else `$DPGCL_STORAGE`, else `~/dpgcl-results`, inside a submitted Ray job as outside.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dpgcl_core.addresses import masked
from dpgcl_core.errors import ConfigError, StorageError

CODE_ROOT = Path(__file__).resolve().parents[2]
"""The folder of this copy of the code."""
_FORMER = "results"


def storage_root(option: Path | None) -> Path:
    """Return the absolute storage folder; nothing is created.

    Args:
      option: what `--storage` gives.

    Raises:
      ConfigError: none is given, and both the default and the former default, `results/` beside this code,
        hold sweeps.
      StorageError: the path is relative, or lies in a job's throw-away copy of the code.
    """
    environment = os.environ.get("DPGCL_STORAGE")
    path = option or (Path(environment) if environment else _default())
    if not path.is_absolute():
        raise StorageError(f"the storage folder must be an absolute path; got {masked(str(path))}")
    if in_throw_away_copy(path):
        raise StorageError(
            f"the storage folder {path} lies in the job's throw-away copy of the code and would be lost; "
            "give --storage (after --) or $DPGCL_STORAGE a path outside it"
        )
    return path


def _default() -> Path:
    default, former = Path.home() / "dpgcl-results", CODE_ROOT / _FORMER
    if former != default and _holds_sweeps(former):
        if _holds_sweeps(default):
            raise ConfigError(
                f"two folders hold sweeps, {default} and {former}: choose one with --storage "
                "(or $DPGCL_STORAGE), "
                "or move one away"
            )
        print(f"note: the sweeps in {former} are not looked at; --storage {former} does", file=sys.stderr)
    return default


def _holds_sweeps(folder: Path) -> bool:
    return any((folder / "sweeps").glob("*/plan.json"))


def check_writable(root: Path) -> None:
    """Refuse a storage folder that cannot be written; what is missing of its path would be created.

    Raises:
      StorageError: as said.
    """
    existing = next(parent for parent in (root, *root.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise StorageError(f"the storage folder {root} cannot be written: check {existing}")


def inside_ray_job() -> bool:
    """Whether this process is the entrypoint of a submitted Ray job."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def runs_uploaded_copy() -> bool:
    """Whether this code was uploaded with a job: Ray puts it on every node and first on every path."""
    return "_ray_pkg_" in str(CODE_ROOT)


def in_throw_away_copy(path: Path) -> bool:
    """Whether a path lies in the copy of the code that a Ray job runs in, which is deleted afterwards."""
    if not inside_ray_job():
        return False
    resolved = path.resolve()
    return "_ray_pkg_" in str(resolved) or (runs_uploaded_copy() and resolved.is_relative_to(CODE_ROOT))
