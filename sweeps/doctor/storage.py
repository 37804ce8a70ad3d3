"""Whether the storage folder can hold a sweep's results and checkpoints: written, locked, and shared."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

from dpgcl_core.errors import DpgclError
from sweeps.doctor.findings import Finding, note, ok, wrong
from sweeps.service.storage.probe import TO_LOCK, TO_SHARE, StorageProbe, probe_storage
from trainers.files.storage import check_writable


def check_storage(root: Path, num_nodes: int) -> list[Finding]:
    """Refuse a folder that cannot be written or locked here; on several nodes it must be shared.

    Args:
      root: the storage folder; what is missing of its path would be created.
      num_nodes: of the connected Ray, that must share it.
    """
    try:
        check_writable(root)
        if why := _lock_failure(root):
            fix = "give a POSIX folder with flock: NFS 4 with local_lock=none, or Lustre mounted with flock"
            return [wrong("storage", f"{root} cannot be locked ({why})", fix)]
        found = [ok("storage", f"{root} can be written and locked here")]
        return [*found, *findings_of(probe_storage(_existing(root)))] if num_nodes > 1 else found
    except DpgclError as error:
        return [wrong("storage", str(error), "give --storage a folder that you can write")]


def findings_of(probe: StorageProbe) -> list[Finding]:
    """What the nodes see of the folder, or of the one that it would be created in."""
    if apart := probe.apart():
        return [wrong("storage", apart, TO_SHARE)]
    locks = [note("storage", text, TO_LOCK)] if (text := probe.unlocked()) else []
    return [*locks, ok("storage", probe.speed())]


def _existing(root: Path) -> Path:
    return next(parent for parent in (root, *root.parents) if parent.exists())


def _lock_failure(root: Path) -> str:
    """Why a file below the folder cannot be locked; "" where it can."""
    with tempfile.TemporaryFile(dir=_existing(root)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return str(error.strerror)
    return ""
