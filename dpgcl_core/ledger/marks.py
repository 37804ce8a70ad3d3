"""Marks: files that a ledger writes next to the data that it charges, outside the ledger.

A mark names the data set and its newest row in the ledger. `Ledger` moves the mark after every row and before
the row's steps may be drawn. So a ledger without that row (an older copy, a second ledger) is refused at its
next use; the module `dpgcl_core.ledger.ledger` has the proposition. A first mark is created exclusively:
if two ledgers begin on the same data at the same moment, one is refused.

A mark applies to the data next to it under every path to them: through links, from the folders above, and for
every folder that contains the marked data. A name with ranges, `train-{000..011}.tar`, stands for all its
files, each with its own mark.

If the folder of the data cannot be written, the mark is stored with the ledger instead (`trusted_marks`). It
is found by the data's path and by the content of their files, whatever the files' names.

Data in a bucket have their mark in the bucket, if the credentials allow it: one object also for a name with
ranges, in each folder. The service replaces a mark only if it is still the one that was read, so two writers
on two machines cannot both succeed; a service that ignores such conditions is refused. In the ledger's own
folder a mark of a bucket is found by the address and by its objects' tags.

Not recognised: a copy, a hard link, or data that were moved without their mark. A ledger could only compare
such data with the data that it knows: one changed pixel defeats that, and another ledger does not know them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import itertools
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpgcl_core.durable_files import sync_folder
from dpgcl_core.errors import DataError, LedgerError
from dpgcl_core.ledger.chain import Head
from dpgcl_core.object_store import (
    address_of,
    can_write,
    find_object,
    find_objects,
    folder_of,
    list_objects,
    read_object,
    write_object,
)

_UNREACHABLE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG))
_UNSUPPORTED = frozenset((errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL))
_WRITES_TRIED = 20
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")

MARK = ".dpgcl-ledger.json"
"""The name of a folder's mark, and the suffix of a file's mark."""


def expand_ranges(data: Path) -> list[Path]:
    """Return the files that a name with ranges stands for, in order; the path itself without ranges.

    An existing path stands for itself. Loading and marking data both use this function, so every file that is
    read is also checked for a mark.

    >>> [path.name for path in expand_ranges(Path("train-{08..10}.tar"))]
    ['train-08.tar', 'train-09.tar', 'train-10.tar']
    """
    parts = _RANGE.split(str(data))
    if len(parts) == 1 or os.path.exists(data):
        return [data]
    texts, lows, highs = parts[::3], parts[1::3], parts[2::3]
    ranges = [
        [f"{i:0{len(low)}d}" for i in range(int(low), int(high) + 1)]
        for low, high in zip(lows, highs, strict=True)
    ]
    return [
        Path(texts[0] + "".join(number + text for number, text in zip(numbers, texts[1:], strict=True)))
        for numbers in itertools.product(*ranges)
    ]


def mark_path(data: Path) -> Path:
    """Return the path of the mark of a data file or folder: next to the data, never next to a link to them.

    Raises:
      LedgerError: the path's links form a loop.
    """
    return _mark_beside(_resolve(data))


def read_mark(data: Path) -> tuple[str, Head] | None:
    """Return the data-set id and the head that the nearest mark on the data names; None without a mark.

    Raises:
      LedgerError: a mark cannot be read, or the path's links form a loop.
    """
    return next(_marks_on(data), None)


def read_mark_above(folder: Path) -> tuple[str, Head] | None:
    """Return the mark on a folder or on a folder above it, ignoring marks inside it; None without a mark.

    It serves for files that a list of images names one by one: other files in their folders do not matter.
    Such a name is private, as part of a record, so messages omit it. If the path does not exist or is not
    accessible, no data can be read there either, so no mark can be missed.

    Raises:
      LedgerError: there is a mark that cannot be read.
    """
    paths = dict.fromkeys((Path(os.path.realpath(folder)), folder.absolute()))
    mark_files = (ancestor / MARK for path in paths for ancestor in (path, *path.parents))
    return next((mark for mark in map(_read_unnamed, mark_files) if mark is not None), None)


def _read_unnamed(path: Path) -> tuple[str, Head] | None:
    """Read a mark, with no path in the message; None if the path does not exist or is not accessible."""
    try:
        os.lstat(path)
        return _read(path)
    except (OSError, LedgerError) as error:
        if isinstance(error, OSError) and error.errno in _UNREACHABLE:
            return None
    raise LedgerError("the mark on a folder of the images cannot be read; restore it")


def heads_of_marks(data: Path, dataset_id: str) -> list[Head]:
    """Return the heads that the marks on the data name, each once.

    Raises:
      LedgerError: a mark names another id, or cannot be read; or the path's links form a loop.
    """
    heads: dict[Head, None] = {}
    for mark in _marks_on(data):
        check_owner(data, mark, dataset_id)
        heads[mark[1]] = None
    return list(heads)


def check_unmarked(data: Path) -> None:
    """Raise LedgerError if a ledger charges the data; for uses that require public data.

    Raises:
      LedgerError: there is a mark on the data, a mark cannot be read, or the path's links form a loop.
    """
    _check_no_mark(data, read_mark(data))


def check_unmarked_above(folder: Path, *, named_in: Path) -> None:
    """Raise LedgerError if a ledger charges a folder, by a mark on it or above it; see `read_mark_above`.

    Args:
      folder: the folder.
      named_in: the file that names the folder; messages name this file instead of the folder.

    Raises:
      LedgerError: there is such a mark, or a mark cannot be read.
    """
    _check_no_mark(named_in, read_mark_above(folder))


def _check_no_mark(data: Path, mark: tuple[str, Head] | None) -> None:
    if mark is not None:
        raise LedgerError(
            f"the data in {data} are private, charged as data set {mark[0]!r} to ledger {mark[1].ledger_id}, "
            "and this use would not be charged. Use public data"
        )


def _marks_on(data: Path) -> Iterator[tuple[str, Head]]:
    """Yield the marks on the data, on the folders above and on everything in the data, maybe repeatedly."""
    yield from filter(None, map(_read, _mark_files_of(data)))


def _mark_files_of(data: Path) -> Iterator[Path]:
    """Yield the places of these marks, also of missing ones."""
    for file in _marked_files(data):
        if address := address_of(file):
            with _bucket_errors():
                yield from _places_in_bucket(address)
        else:
            yield from _places_of_one(file)


def _marked_files(data: Path) -> list[Path]:
    """Return the files and folders with a mark each; in a bucket a name with ranges counts as one file."""
    if not address_of(data):
        return expand_ranges(data)
    return [folder / data.name for folder in expand_ranges(data.parent)]


def _places_in_bucket(address: str) -> Iterator[Path]:
    """Yield the places on the folders above, on everything in a folder, and on files that share a name."""
    path = Path(address)
    names = {*expand_ranges(path)}
    inside, beside = list_objects(address), list_objects(folder_of(address), below=False)
    marks = [Path(file.address) for file in (*inside, *beside) if file.address.endswith(MARK)]
    shared = [mark for mark in marks if path in mark.parents or not names.isdisjoint(_marked_names(mark))]
    folders = [folder for folder in path.parents if address_of(folder)]
    yield from (*(folder / MARK for folder in folders), *shared)


def _marked_names(mark: Path) -> list[Path]:
    return expand_ranges(mark.with_name(mark.name.removesuffix(MARK))) if mark.name != MARK else []


def _places_of_one(data: Path) -> Iterator[Path]:
    real = _resolve(data)
    for path in dict.fromkeys((real, data.absolute())):  # both, as the folder with a link may be marked, too
        yield from _places_above(path)
    for root, folders, files in os.walk(real):
        for name in folders + files:
            path = Path(root, name)
            if name.endswith(MARK):
                yield path
            elif path.is_symlink():
                yield from _places_above(_resolve(path))


def _places_above(path: Path) -> Iterator[Path]:
    yield from (_mark_beside(path), *(parent / MARK for parent in path.parents))


def _read(path: Path) -> tuple[str, Head] | None:
    """Return the data-set id and the head in a mark's file; None if there is no file."""
    values = _read_values(path)
    return None if values is None else _parse_mark(path, values)


def _read_values(path: Path) -> dict[str, Any] | None:
    try:
        if address := address_of(path):
            with _bucket_errors():
                found = read_object(address)
            return None if found is None else _values_in(path, found[0])
        return _values_in(path, path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise LedgerError(f"{path} cannot be read ({type(error).__name__}); restore it") from error


def _values_in(path: Path, content: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError) as error:
        raise LedgerError(f"{path} cannot be read ({type(error).__name__}); restore it") from error


def _parse_mark(path: Path, values: dict[str, Any]) -> tuple[str, Head]:
    try:
        return str(values["dataset_id"]), Head.from_facts(values)
    except (KeyError, LedgerError) as error:
        raise LedgerError(f"{path} cannot be read ({type(error).__name__}); restore it") from error


def _mark_beside(path: Path) -> Path:
    is_folder = path.is_dir()
    if address := address_of(path):  # a folder may have an object's name
        is_file = bool(_RANGE.search(path.name) or find_object(address))
        is_folder = bool(list_objects(address, below=False)) or not is_file
    return path / MARK if is_folder else path.with_name(path.name + MARK)


@contextmanager
def _bucket_errors() -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise LedgerError(f"the marks in a bucket must be readable: {error}") from None


def _resolve(path: Path) -> Path:
    if address_of(path):
        return path
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise LedgerError(f"{path} has a broken link ({type(error).__name__}); pass the real path") from error


@dataclass(frozen=True)
class Place:
    """The location of the marks of some data.

    Attributes:
      data: path of the data, maybe with ranges.
      paths: paths of the data's marks.
      found_by: values, stored in a mark in a ledger's own folder, by which the mark is found again; empty
        for a mark next to the data.
    """

    data: Path
    paths: tuple[Path, ...]
    found_by: tuple[tuple[str, str], ...] = ()


def is_read_only(data: Path) -> bool:
    """Return whether any folder in which the data need a mark is not writable.

    In a bucket this is tried, by an object that is removed again.
    """
    with _bucket_errors():
        return not all(_can_write(mark_path(file).parent) for file in _marked_files(data))


def _can_write(folder: Path) -> bool:
    address = address_of(folder)
    return can_write(address) if address else os.access(folder, os.W_OK)


def place_of(data: Path, trusted: Path) -> Place:
    """Return the location of the marks of `data`: next to them, else in `trusted`, the ledger's own folder.

    Raises:
      LedgerError: no mark can be written next to the data, and the data cannot be read.
    """
    if not is_read_only(data):
        with _bucket_errors():
            return Place(data, tuple(map(mark_path, _marked_files(data))))
    real_path = _real_path(data)
    path = trusted / f"{hashlib.sha256(real_path.encode()).hexdigest()[:32]}{MARK}"
    known = _read_values(path)
    if known is None:
        salt = secrets.token_hex(32)
        known = {"path": real_path, "salt": salt, "content": _salted(salt, _digest(data))}
    return Place(data, (path,), tuple((name, str(known.get(name))) for name in ("path", "salt", "content")))


def trusted_marks(trusted: Path, data: Path, *, by_content: bool) -> list[tuple[str, Head]]:
    """Return the marks in a ledger's own folder that were made for this path.

    Args:
      trusted: the ledger's own folder.
      data: path of the data.
      by_content: whether to search, if there is none, for marks that were made for the same content at
        another path. This reads all of the data; for a list of images, only the list.

    Raises:
      LedgerError: a mark or the data cannot be read.
    """
    marks = [(path, values) for path in sorted(trusted.glob(f"*{MARK}")) if (values := _read_values(path))]
    found = [each for each in marks if each[1].get("path") == _real_path(data)]
    if marks and not found and by_content:
        digest = _digest(data)
        found = [
            each for each in marks if each[1].get("content") == _salted(str(each[1].get("salt")), digest)
        ]
    return [_parse_mark(*each) for each in found]


def _real_path(data: Path) -> str:
    return address_of(data) or os.path.realpath(data)


def _digest(data: Path) -> str:
    """Return a hash of the data's file contents that does not depend on the files' order and names."""
    if address := address_of(data):
        with _bucket_errors():
            listed = list_objects(address) or find_objects(expand_ranges(data))
        stamps = sorted(str(file.stamp) for file in listed if not file.address.endswith(MARK))
        return hashlib.sha256(" ".join(stamps).encode()).hexdigest()
    files: list[Path] = []
    for each in expand_ranges(data):
        if not each.is_dir():
            files.append(each)
        for root, _, names in os.walk(each):
            files += [Path(root, name) for name in names if not name.endswith(MARK)]
    try:
        hashes = []
        for file in files:
            with file.open("rb") as opened:
                hashes.append(hashlib.file_digest(opened, "sha256").hexdigest())
    except OSError as error:
        raise LedgerError(f"{data} cannot be read ({error.strerror})") from None
    return hashlib.sha256(" ".join(sorted(hashes)).encode()).hexdigest()


def _salted(salt: str, digest: str) -> str:
    return hmac.digest(salt.encode(), digest.encode(), "sha256").hex()


def advance_marks(place: Place, dataset_id: str, successor: Callable[[Head], Head | None], new: Head) -> int:
    """Create or update the marks of a place; return how many marks are new.

    The marks are on disk when this function returns. While a mark is read and changed, its folder is locked
    on this machine. A new mark is created exclusively, also among machines that share the folder.

    Args:
      place: the location of the marks.
      dataset_id: the id that the marks must name.
      successor: a function from the head that a mark names to its new head; None if the head is new enough.
        It raises LedgerError if the ledger does not have the head.
      new: the head that a new mark names.

    Raises:
      LedgerError: a mark names another data set, or cannot be read or written.
    """
    return sum(_advance(path, place, dataset_id, successor, new) for path in place.paths)


def _advance(
    path: Path, place: Place, dataset_id: str, successor: Callable[[Head], Head | None], new: Head
) -> bool:
    """Create or update one mark as `advance_marks` does; return whether it is new."""
    if address := address_of(path):
        with _bucket_errors():
            return _advance_in_bucket(address, place, dataset_id, successor, new)
    try:
        if place.found_by:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path.parent):
            if _read(path) is None and _write(path, dataset_id, new, place, exclusively=True):
                return True
            mark = _read(path)
            if mark is None:
                raise LedgerError(f"{path} was deleted by another process")
            check_owner(place.data, mark, dataset_id)
            later = successor(mark[1])
            if later is not None:
                _write(path, dataset_id, later, place)
    except OSError as error:
        raise LedgerError(
            f"the mark on {place.data} cannot be written ({error.strerror}); make its folder writable"
        ) from None
    return False


def _advance_in_bucket(
    address: str, place: Place, dataset_id: str, successor: Callable[[Head], Head | None], new: Head
) -> bool:
    is_new = False
    for _ in range(_WRITES_TRIED):
        content_and_tag = read_object(address)
        if content_and_tag is None:
            is_new = True  # also if the answer to a write is lost and its repetition is refused
            if write_object(address, _content(dataset_id, new, place).encode(), tag=None):
                return True
            continue
        content, tag = content_and_tag
        mark = _parse_mark(Path(address), _values_in(Path(address), content))
        check_owner(place.data, mark, dataset_id)
        later = successor(mark[1])
        if later is None or write_object(address, _content(dataset_id, later, place).encode(), tag=tag):
            return is_new
    raise LedgerError(f"the mark {address} is changed by others all the time; let one sweep charge the data")


def check_owner(data: Path, mark: tuple[str, Head], dataset_id: str) -> None:
    """Raise LedgerError unless a mark on the data names the data set that will be charged."""
    owner, head = mark
    if owner != dataset_id:
        raise LedgerError(
            f"{data} is charged as data set {owner!r}, not as {dataset_id!r}, to ledger {head.ledger_id}. "
            f"Pass that ledger and --dataset-id {owner}"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes of this machine, if its file system has such locks.

    Without such locks, two copies of one ledger that diverge at the same moment are detected only at their
    next use; a new mark is still exclusive.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, dataset_id: str, head: Head, place: Place, *, exclusively: bool = False) -> bool:
    """Write a mark atomically and durably; with `exclusively`, return False if there is a mark already."""
    content = _content(dataset_id, head, place)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        _write_new(temporary, content)
        if not exclusively:
            temporary.replace(path)
        else:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                try:  # a file system without hard links
                    _write_new(path, content)
                except FileExistsError:
                    return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def _content(dataset_id: str, head: Head, place: Place) -> str:
    return json.dumps({"dataset_id": dataset_id, **asdict(head), **dict(place.found_by)})


def _write_new(path: Path, content: str) -> None:
    with path.open("x") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
