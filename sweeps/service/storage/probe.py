"""A check whether the nodes of a Ray cluster share a folder, and whether its locks hold between nodes.

The driver writes a random token into a new folder and holds a lock there. A task on each node reads the token
and tries to take the lock, which must fail.
"""

from __future__ import annotations

import fcntl
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpgcl_core.durable_files import storage_errors
from dpgcl_core.errors import StorageError
from sweeps.service.storage.cluster_nodes import answers_of_nodes, living_nodes

_TOKEN, _LOCK = "token", "lock"
_NUM_READS, _SECONDS_BETWEEN_READS = 10, 0.5  # a network file system may show a new file late
_ANSWER_SECONDS = 60.0
SAME, OTHER, MISSING, UNWRITABLE = "same", "other", "missing", "unwritable"
HELD, TAKEN, UNSUPPORTED = "held", "taken", "unsupported"
TO_SHARE = (
    "mount one shared file system (NFS, EFS, Lustre) at this path on all nodes, or set --storage or "
    "$DPGCL_STORAGE to a folder that they share"
)
TO_LOCK = (
    "do not start sweeps from two nodes at once there, or mount it with cluster-wide locks (NFS 4, or Lustre "
    "with the option flock)"
)


@dataclass(frozen=True, kw_only=True)
class NodeStorage:
    """The folder as one node sees it.

    Attributes:
      node: its address, and the beginning of its id in Ray.
      folder: `same` as the driver's; `other`, without the driver's token; `missing`; or `unwritable`.
      lock: `held` by the driver, as required; `taken` by the node, too; `unsupported`; "" if not tried.
      error_text: the system's message if something failed.
    """

    node: str
    folder: str
    lock: str = ""
    error_text: str = ""


@dataclass(frozen=True, kw_only=True)
class StorageProbe:
    """The results of a probe.

    Attributes:
      folder: the probed folder.
      nodes: all nodes that answered.
      silent: the names of the nodes that did not answer.
    """

    folder: Path
    nodes: Sequence[NodeStorage]
    silent: Sequence[str] = ()

    def unshared_text(self) -> str:
        """Return a message on nodes that see another folder or none; "" if all see the driver's folder."""
        nodes = [node for node in self.nodes if node.folder != SAME]
        if not nodes:
            return ""
        places = ", ".join(f"{node.node} ({_SEEN[node.folder]}{_because(node)})" for node in nodes)
        return f"the storage folder {self.folder} must be the same folder on all nodes; it is not on {places}"

    def unlocked_text(self) -> str:
        """Return a message with the nodes where locks do not hold; "" if they hold everywhere."""
        nodes = [node for node in self.nodes if node.lock in (TAKEN, UNSUPPORTED)]
        names = ", ".join(f"{node.node}{_because(node)}" for node in nodes)
        return f"locks (flock) in {self.folder} do not hold between nodes ({names})" if nodes else ""


_SEEN = {OTHER: "another folder at that path", MISSING: "no such folder", UNWRITABLE: "not writable"}


def _because(node: NodeStorage) -> str:
    return f": {node.error_text}" if node.error_text else ""


def probe_storage(folder: Path, *, answer_seconds: float = _ANSWER_SECONDS) -> StorageProbe:
    """Check from all nodes of the connected Ray whether they share a folder and its locks.

    A temporary folder in it is created and removed.

    Args:
      folder: a folder that exists or can be created.
      answer_seconds: the time to wait for answers, because Ray may not yet know that a node is gone.

    Raises:
      StorageError: this machine cannot write the folder.
    """
    nodes, function = living_nodes(), probe_function()
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _hold_lock(folder) as (probe_path, token):
            arguments = probe_path, token, _NUM_READS, _SECONDS_BETWEEN_READS
            answers = answers_of_nodes(function, *arguments, nodes=nodes, seconds=answer_seconds)
    return StorageProbe(
        folder=folder,
        nodes=[NodeStorage(node=node.name, **answers[node.id]) for node in nodes if node.id in answers],
        silent=[node.name for node in nodes if node.id not in answers],
    )


def check_shared(folder: Path, print_line: Callable[[str], None]) -> None:
    """Check that the nodes of the connected Ray share a folder; print a line if locks do not hold.

    With one node this is a no-op.

    Raises:
      StorageError: a node sees another folder, or no folder.
    """
    if len(living_nodes()) < 2:
        return
    probe = probe_storage(folder)
    if unshared_text := probe.unshared_text():
        raise StorageError(f"{unshared_text}: {TO_SHARE}")
    if unlocked_text := probe.unlocked_text():
        print_line(f"storage: {unlocked_text}: {TO_LOCK}")
    if probe.silent:
        print_line(f"storage: these nodes did not say if they share {folder}: {', '.join(probe.silent)}")


@contextmanager
def _hold_lock(folder: Path) -> Iterator[tuple[str, str]]:
    """Create a temporary folder with a token, hold a lock there, and yield its path and the token."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix=".dpgcl-probe-", dir=folder, ignore_cleanup_errors=True) as name:
        probe_path = Path(name)
        (probe_path / _TOKEN).write_text(token)
        with (probe_path / _LOCK).open("w") as file:
            with suppress(OSError):  # the nodes report it if locks are unsupported
                fcntl.flock(file, fcntl.LOCK_EX)
            yield name, token


def probe_function() -> Callable[[str, str, int, float], dict[str, Any]]:
    """Return the function that checks the folder on the node that runs it, as fields of `NodeStorage`.

    It is local, so that Ray sends its code to nodes without this package.
    """

    def probe_folder(probe_path: str, token: str, num_reads: int, seconds_between: float) -> dict[str, Any]:
        import errno
        import fcntl
        import os
        import time
        from pathlib import Path

        folder = Path(probe_path)
        for _ in range(num_reads):
            try:
                if (folder / "token").read_text() == token:
                    break
                error_text = ""
            except OSError as error:
                error_text = "" if isinstance(error, FileNotFoundError) else os.strerror(error.errno or 0)
            time.sleep(seconds_between)
        else:
            return {"folder": "other" if folder.parent.is_dir() else "missing", "error_text": error_text}
        try:
            (folder / str(os.getpid())).write_bytes(bytes(4096))
        except OSError as error:
            return {"folder": "unwritable", "error_text": os.strerror(error.errno or 0)}
        try:
            with (folder / "lock").open("r+") as file_to_lock:
                fcntl.flock(file_to_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock, error_text = "taken", ""
        except OSError as error:
            held = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
            lock, error_text = ("held", "") if held else ("unsupported", os.strerror(error.errno or 0))
        return {"folder": "same", "lock": lock, "error_text": error_text}

    return probe_folder
