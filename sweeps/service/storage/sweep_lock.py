"""The lock that prevents two drivers from running one sweep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from filelock import FileLock, Timeout

from dpgcl_core.durable_files import make_folder, storage_errors
from dpgcl_core.errors import StorageError
from sweeps.service.storage.sweep_folder import SweepFolder


@contextmanager
def hold_sweep(folder: SweepFolder, *, is_closed: bool = False) -> Iterator[None]:
    """Create and lock a sweep's folder within this context; the lock ends with the driver, even if killed.

    A folder that has no plan at the end is removed again.

    Args:
      folder: the sweep's folder.
      is_closed: whether to deny other users access to the folder, and so to everything created in it.

    Raises:
      StorageError: another driver holds the lock, or the folder cannot be written.
    """
    path = folder.path
    new_folders = [each for each in (path, *path.parents) if not each.exists()]
    lock = FileLock(path / "lock", mode=0o600, fallback_to_soft=False)
    with storage_errors(path):
        make_folder(path, mode=0o700 if is_closed else 0o777)
        if is_closed:
            path.chmod(0o700)  # an earlier version created it with another mode
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise _running_error(folder) from error
    try:
        yield
    finally:
        if not (path / "plan.json").exists():
            (path / "lock").unlink(missing_ok=True)
            with suppress(OSError):  # a folder with other content stays
                for each in new_folders:
                    each.rmdir()
        lock.release()


def check_not_running(folder: SweepFolder) -> None:
    """Check that no other driver runs this sweep; its folder need not exist.

    Raises:
      StorageError: another driver holds the lock.
    """
    path = folder.path / "lock"
    if not path.is_file():
        return
    try:
        with FileLock(path, timeout=0, mode=0o600, fallback_to_soft=False):
            return
    except Timeout:
        raise _running_error(folder) from None
    except OSError:  # it cannot be written: `hold_sweep` reports it
        return


def _running_error(folder: SweepFolder) -> StorageError:
    return StorageError(
        f"the sweep {folder.name!r} is running: wait for its end, stop it, or choose another --name"
    )
