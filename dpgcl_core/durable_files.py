"""Files that are replaced atomically, survive a power failure, and are no more accessible than their folder.

Only its owner can access the folder of a sweep on private data, and everything created in it, at any umask.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from dpgcl_core.errors import StorageError


def make_folder(folder: Path, *, mode: int = 0o777) -> None:
    """Make a folder and its missing parents, accessible to nobody who cannot access the existing parent.

    Args:
      folder: the folder; an existing one is not changed.
      mode: the folder's own mode, as in `os.mkdir`.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=mode & _mode_in(folder), exist_ok=True)


def new_file(path: str | Path, flags: int, *, mode: int = 0o666) -> int:
    """Open a file as `os.open` does; a new file is readable only by those who can access its folder."""
    return os.open(path, flags, mode & _mode_in(Path(path)))


def _mode_in(path: Path) -> int:
    """Return a mode with all rights for the owner, and the parent folder's rights for group and others."""
    return 0o700 | path.parent.stat().st_mode


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, temporary_folder: Path | None = None) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `path` at the end, durably and atomically.

    If that fails, on a full disk for example, the old file stays, and no temporary file remains. Only a kill
    leaves one.

    Args:
      path: the file; it is readable only by those who can access its folder.
      mode: the file's mode, as in `os.open`.
      temporary_folder: the temporary file's folder, on the same file system; None: the folder of `path`.
    """
    # Two nodes' processes may share an id.
    temporary = (temporary_folder or path.parent) / f"{path.stem}.{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=mode & _mode_in(path))) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Within this context, turn an OSError into the StorageError that `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
