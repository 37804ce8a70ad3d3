"""Which data an id stands for: keyed fingerprints, and marks beside the data that name their ledger.

A plain hash of a data set would let anybody confirm a guess of its records. These fingerprints are HMACs
under a key that stays on the trusted side, and no export or statement contains them. A fingerprint does not
depend on the order of the records. It recognises the same records, not similar ones: an edited copy must be
registered, by its owner, under the id of the original, and then shares every charge.

A mark applies to the data beside it under every path that leads there: through links, from the folders above,
and for every folder that contains the marked data. A name with ranges, `train-{000..011}.tar`, stands for all
its files, each with a mark of its own. A mark does not apply to a copy, nor to a hard link.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dpgcl_core.errors import LedgerError
from dpgcl_core.ledger.chain import Head

_KEY_BYTES = 32
_UNREACHABLE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG))
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")

MARK = ".dpgcl-ledger.json"
"""Name of a folder's mark, and suffix of a file's mark."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The record of a data set's content; for the trusted side only.

    Attributes:
      key_id: identifies the key, and reveals nothing about it.
      tag: HMAC of the records, hexadecimal.
    """

    key_id: str
    tag: str


def fingerprint_records(contents: Iterable[bytes], key: bytes) -> Fingerprint:
    """Return the fingerprint of records, in any order.

    Args:
      contents: each record's bytes: everything that is trained on.
      key: of `fingerprint_key`.

    Raises:
      LedgerError: the key is too short.

    >>> key = bytes(range(32))
    >>> fingerprint_records([b"x", b"y"], key) == fingerprint_records([b"y", b"x"], key)
    True
    >>> fingerprint_records([b"x", b"y"], key) == fingerprint_records([b"x", b"y", b"y"], key)
    False
    """
    if len(key) < _KEY_BYTES:
        raise LedgerError(f"a fingerprint key has at least {_KEY_BYTES} bytes; got {len(key)}")
    tags = sorted(hmac.digest(key, b"record\0" + content, "sha256") for content in contents)
    tag = hmac.new(key, b"data set\0", "sha256")
    for record_tag in tags:
        tag.update(record_tag)
    return Fingerprint(key_id=hmac.new(key, b"key\0", "sha256").hexdigest()[:16], tag=tag.hexdigest())


def fingerprint_key(path: Path) -> bytes:
    """Return the key in `path`; if there is none, create one that only its owner may read.

    Keep a copy apart from the ledger: without the key no data set can be recognised.

    Raises:
      LedgerError: the file cannot be read or written, or holds no key.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        if not path.exists():
            descriptor = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(_KEY_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was first: use its key
                os.link(temporary, path)
            temporary.unlink()
        key = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise LedgerError(
            f"the fingerprint key {path} cannot be used ({type(error).__name__}); restore it"
        ) from error
    if len(key) != _KEY_BYTES:
        raise LedgerError(f"{path} must hold {_KEY_BYTES} bytes in hexadecimal; got {len(key)}; restore it")
    return key


def expand_ranges(data: Path) -> list[Path]:
    """Return the files that a name with ranges stands for, in order; the path itself without ranges.

    A path that exists stands for itself. Loading and marking data both use this, so every file that is read
    is also checked for a mark.

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
    """Return the path of the mark of a data file or folder: beside the data themselves, never beside a link.

    Raises:
      LedgerError: the path leads in a circle.
    """
    return _mark_beside(_resolved(data))


def read_mark(data: Path) -> tuple[str, Head] | None:
    """Return the data-set id and the head that the nearest mark on the data names; None without a mark.

    Raises:
      LedgerError: a mark cannot be read, or the path leads in a circle.
    """
    return next(_marks_on(data), None)


def read_mark_above(place: Path) -> tuple[str, Head] | None:
    """Return the mark on a folder or on one above it, ignoring marks inside it; None without a mark.

    For files that are named one by one, as in a list of images: their neighbours do not matter. Such a name
    is the content of a record, so messages leave it out. It may lead nowhere, or to a place without
    permission: then no data can be read there either, and no mark can be missed.

    Raises:
      LedgerError: there is a mark that cannot be read.
    """
    ways = dict.fromkeys((Path(os.path.realpath(place)), place.absolute()))
    spots = (folder / MARK for way in ways for folder in (way, *way.parents))
    return next((mark for mark in map(_read_unnamed, spots) if mark is not None), None)


def _read_unnamed(path: Path) -> tuple[str, Head] | None:
    """Read a mark, with no path in the message; None where the path does not exist or is not accessible."""
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
      LedgerError: a mark names another id, or cannot be read; or the path leads in a circle.
    """
    heads: dict[Head, None] = {}
    for owner, head in _marks_on(data):
        if owner != dataset_id:
            raise LedgerError(f"{data} is charged as data set {owner!r}, not as {dataset_id!r}")
        heads[head] = None
    return list(heads)


def check_unmarked(data: Path) -> None:
    """Refuse data that a ledger charges where public data are wanted.

    Raises:
      LedgerError: as said; or a mark cannot be read, or the path leads in a circle.
    """
    _refuse(data, read_mark(data))


def check_unmarked_above(place: Path, *, named_in: Path) -> None:
    """Refuse a folder that a mark on it or above it declares private, see `read_mark_above`.

    Args:
      place: the folder.
      named_in: the file that names it; messages name this file instead.

    Raises:
      LedgerError: as said; or a mark cannot be read.
    """
    _refuse(named_in, read_mark_above(place))


def _refuse(data: Path, mark: tuple[str, Head] | None) -> None:
    if mark is not None:
        raise LedgerError(
            f"the data in {data} are private, charged as data set {mark[0]!r} to ledger {mark[1].ledger_id}; "
            "give public data, for nothing here would be charged"
        )


def _marks_on(data: Path) -> Iterator[tuple[str, Head]]:
    """Yield the marks on the data, on the folders above and on everything in them; some more than once."""
    for file in expand_ranges(data):
        yield from _marks_on_one(file)


def _marks_on_one(data: Path) -> Iterator[tuple[str, Head]]:
    real = _resolved(data)
    for path in dict.fromkeys((real, data.absolute())):  # a link may lie in a marked folder, too
        yield from _marks_above(path)
    for root, folders, files in os.walk(real):
        for name in folders + files:
            path = Path(root, name)
            if name.endswith(MARK):
                mark = _read(path)
                if mark is not None:
                    yield mark
            elif path.is_symlink():
                yield from _marks_above(_resolved(path))


def _marks_above(path: Path) -> Iterator[tuple[str, Head]]:
    for place in (_mark_beside(path), *(parent / MARK for parent in path.parents)):
        mark = _read(place)
        if mark is not None:
            yield mark


def _read(path: Path) -> tuple[str, Head] | None:
    try:
        values = json.loads(path.read_text())
        return str(values.pop("dataset_id")), Head(**values)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LedgerError(f"{path} cannot be read ({type(error).__name__}); restore it") from error


def _mark_beside(path: Path) -> Path:
    return path / MARK if path.is_dir() else path.with_name(path.name + MARK)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise LedgerError(f"{path} leads nowhere ({type(error).__name__}); give the data's path") from error


def write_mark(data: Path, dataset_id: str, head: Head) -> None:
    """Replace the mark atomically; for a name with ranges, the mark of each file.

    Raises:
      LedgerError: the folder of the data cannot be written.
    """
    for file in expand_ranges(data):
        _write_mark(mark_path(file), dataset_id, head)


def _write_mark(path: Path, dataset_id: str, head: Head) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w") as file:
            json.dump({"dataset_id": dataset_id, **asdict(head)}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise LedgerError(
            f"{path} cannot be written ({error.strerror}); give the folder write access"
        ) from error
