"""Files that are replaced as a whole, stay after a power failure, and are no more open than their folder.

The folder of a sweep on private data lets in its owner alone. So does all that is made in it, at any umask.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO


def make_folder(folder: Path, *, mode: int = 0o777) -> None:
    """Make a folder, and what is missing above it, that lets in nobody whom the one above keeps out.

    Args:
      folder: left as it is where it stands.
      mode: of the folder itself, as of `os.mkdir`.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=mode & _mode_in(folder), exist_ok=True)


def new_file(path: str | Path, flags: int, *, mode: int = 0o666) -> int:
    """Open a file as `os.open` does; where that makes it, only those whom its folder lets in may read it."""
    return os.open(path, flags, mode & _mode_in(Path(path)))


def _mode_in(path: Path) -> int:
    """Return what the folder of a path leaves to group and others, and all to the owner."""
    return 0o700 | path.parent.stat().st_mode


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `path` at the end, durably and at once; `mode` is as of `os.open`.

    Where that fails, on a full disk for example, the old one stays, and nothing lies beside it.
    """
    temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")  # of two nodes, processes may share a number
    try:
        with open(temporary, "xb", opener=partial(new_file, mode=mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a renaming in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
