"""The storage folder, which contains the sweeps; all code that writes or reads them uses the same folder.

It is `--storage`, else `$DPGCL_STORAGE`, else `~/dpgcl-results`, both inside and outside a submitted Ray job.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpgcl_core.addresses import masked
from dpgcl_core.errors import DpgclError, StorageError, detail_lines

CODE_ROOT = Path(__file__).resolve().parents[2]
"""The folder of this copy of the code."""


def storage_root(option: Path | None) -> Path:
    """Return the absolute storage folder; nothing is created.

    Args:
      option: the value of `--storage`.

    Raises:
      StorageError: the folder is an address, or is in a job's temporary copy of the code.
    """
    environment = os.environ.get("DPGCL_STORAGE")
    path = option or (Path(environment) if environment else default_root())
    if "://" in str(path) or re.match(r"\w+:/", str(path)):
        raise StorageError(
            f"the storage folder must be a path on this machine, because checkpoints need locks; got "
            f"{masked(str(path))}. Use a local folder, and let MLflow's server keep artifacts at an address "
            "(mlflow server --artifacts-destination)."
        )
    path = Path.cwd() / path.expanduser()  # resolved now, before the process may change its folder
    if in_throw_away_copy(path):
        raise StorageError(
            f"the storage folder {path} is in the job's temporary copy of the code and would be lost. "
            "Set --storage (after --) or $DPGCL_STORAGE to a path outside it."
        )
    return path


def default_root() -> Path:
    """Return the default storage folder."""
    return Path.home() / "dpgcl-results"


def check_writable(root: Path) -> None:
    """Check that a storage folder is writable or, if it does not exist yet, its nearest existing parent.

    Raises:
      StorageError: the folder cannot be written.
    """
    existing = next(parent for parent in (root, *root.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:  # permission bits are not sufficient evidence
            file.write(b"a sweep")
            file.flush()
    except OSError as error:
        raise StorageError(
            f"the storage folder {root} cannot be written ({error.strerror}). Check {existing}."
        ) from error


@contextmanager
def details_kept(root: Path) -> Iterator[None]:
    """Write a raised error's details on records to a file that no job log includes; the error passes on.

    In a terminal the details are shown, and nothing is written. Elsewhere they are written to `trusted/` of
    the storage folder, for only this user (modes 0700 and 0600), under a name that discloses nothing.

    Args:
      root: the storage folder.
    """
    try:
        yield
    except DpgclError as error:
        if error.details and not sys.stderr.isatty():
            error.details_file = _write_details(root / "trusted", error)
        raise


def _write_details(folder: Path, error: DpgclError) -> Path | None:
    """Write an error and its details to a new file and return its path; None if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        number, name = tempfile.mkstemp(prefix="refused-", suffix=".txt", dir=folder)  # has mode 0600
        with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(f"{line}\n" for line in (str(error), *detail_lines(error.details)))
    except OSError:  # the error itself must still be reported
        return None
    return Path(name)


def inside_ray_job() -> bool:
    """Whether this process is the entrypoint of a submitted Ray job."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def runs_uploaded_copy() -> bool:
    """Whether this code was uploaded with a job; Ray copies it to every node, first on the import path."""
    return "_ray_pkg_" in str(CODE_ROOT)


def in_throw_away_copy(path: Path) -> bool:
    """Whether a path is in the copy of the code that a Ray job runs in, which is deleted afterwards."""
    if not inside_ray_job():
        return False
    resolved = path.resolve()
    return "_ray_pkg_" in str(resolved) or (runs_uploaded_copy() and resolved.is_relative_to(CODE_ROOT))
