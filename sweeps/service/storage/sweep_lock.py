"""The lock that keeps two drivers of one sweep apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from filelock import FileLock, Timeout

from dpgcl_core.errors import StorageError
from sweeps.service.storage.sweep_folder import SweepFolder, storage_errors
from trainers.files.durable_files import make_folder


@contextmanager
def hold_sweep(folder: SweepFolder, *, is_closed: bool = False) -> Iterator[None]:
    """Hold a sweep's folder for one driver; the system lets go even when the driver is killed.

    A folder that got no plan meanwhile is removed again.

    Args:
      folder: of the sweep.
      is_closed: keep other users out of the folder, and so out of all that is made in it.

    Raises:
      StorageError: another driver holds it, or it cannot be written.
    """
    path = folder.path
    missing = [each for each in (path, *path.parents) if not each.exists()]
    lock = FileLock(path / "lock", mode=0o600, fallback_to_soft=False)
    with storage_errors(path):
        make_folder(path, mode=0o700 if is_closed else 0o777)
        if is_closed:
            path.chmod(0o700)  # an earlier version made it
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise _running_error(folder) from error
    try:
        yield
    finally:
        if not (path / "plan.json").exists():
            (path / "lock").unlink(missing_ok=True)
            with suppress(OSError):  # something else lies there
                for each in missing:
                    each.rmdir()
        lock.release()


def check_not_running(folder: SweepFolder) -> None:
    """Refuse a sweep that another driver holds, before anything is read or planned.

    Raises:
      StorageError: as said.
    """
    path = folder.path / "lock"
    if not path.is_file():
        return
    try:
        with FileLock(path, timeout=0, mode=0o600, fallback_to_soft=False):
            return
    except Timeout:
        raise _running_error(folder) from None
    except OSError:  # it cannot be written: `hold_sweep` says so
        return


def _running_error(folder: SweepFolder) -> StorageError:
    return StorageError(
        f"the sweep {folder.name!r} is running: wait for its end, stop it, or choose another --name"
    )
