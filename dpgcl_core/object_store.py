"""Objects in a bucket: listed, read by ranges, many at a time, and written on conditions.

An address is `s3://bucket/key`, for S3 and for every service with its interface (`$AWS_ENDPOINT_URL`).
`pathlib` writes it `s3:/bucket/key`; both spellings are accepted, so that a path may be an address. Failed
requests are repeated with growing pauses, at most `_MAX_RETRIES` times. Credentials come from the
environment, from boto3's profiles if boto3 is installed, or from the machine's role; no message has them.

What a service's log of requests discloses: `docs/limits.md`.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dpgcl_core.addresses import masked
from dpgcl_core.errors import ConfigError, DataError, require_extra

if TYPE_CHECKING:
    from obstore.store import ObjectStore

REQUESTS_IN_FLIGHT = 32
"""The most requests of one process for ranges of objects at any moment."""

_ADDRESS = re.compile(r"s3:/+([A-Za-z0-9][A-Za-z0-9._-]*)(?:/+(.*?))?/*", re.DOTALL)
_MAX_RETRIES = 6
_LARGEST_GAP = 4096
_LARGEST_RUN = 2**23


@dataclass(frozen=True)
class RemoteFile:
    """An object as it was when it was listed.

    Attributes:
      address: `s3://bucket/key`.
      num_bytes: its size.
      version: a digest of the tag that the service changes with the content.
    """

    address: str
    num_bytes: int
    version: int

    def __str__(self) -> str:
        return self.address

    @property
    def stamp(self) -> tuple[int, int]:
        """Size and version, by which a change is noticed."""
        return self.num_bytes, self.version


DataFile = Path | RemoteFile
"""A file of this machine, or an object in a bucket; its text is its path or address."""


def address_of(path: Path | str) -> str | None:
    """Return the address that a path stands for; None for a path of this machine.

    >>> address_of(Path("s3://team/scans/")), address_of("scans")
    ('s3://team/scans', None)
    """
    match = _ADDRESS.fullmatch(str(path))
    return f"s3://{match[1]}/{match[2] or ''}".rstrip("/") if match else None


def folder_of(address: str) -> str:
    """Return the address of the folder that an object or folder is in; of a bucket its own.

    >>> folder_of("s3://team/scans/a.tar"), folder_of("s3://team")
    ('s3://team/scans', 's3://team')
    """
    return address.rpartition("/")[0] if address.count("/") > 2 else address


def list_objects(address: str, *, below: bool = True) -> list[RemoteFile]:
    """Return the objects whose keys begin with the address and `/`, in order of their keys.

    Args:
      address: the address of a folder.
      below: whether those in sub-folders are included.

    Raises:
      DataError: the service does not list them.
    """
    store, key = _place(address)
    import obstore

    with _errors(address):
        chunks = obstore.list(store, key) if below else [obstore.list_with_delimiter(store, key)["objects"]]
        root = address.removesuffix(key)
        found = [_file(f"{root.rstrip('/')}/{meta['path']}", meta) for chunk in chunks for meta in chunk]
    return sorted(found, key=lambda file: file.address)


def find_object(address: str) -> RemoteFile | None:
    """Return the object at an address; None if there is none."""
    store, key = _place(address)
    import obstore

    try:
        with _errors(address):
            return _file(address, obstore.head(store, key)) if key else None
    except FileNotFoundError:
        return None


def find_objects(paths: Iterable[Path | str]) -> list[RemoteFile]:
    """Return the objects at paths that stand for addresses, in order; many requests at a time."""
    addresses = filter(None, map(address_of, paths))
    return [file for file in _threads().map(find_object, addresses) if file is not None]


def read_object(address: str) -> tuple[bytes, str] | None:
    """Return an object's content and its tag; None if there is none."""
    store, key = _place(address)
    import obstore

    try:
        with _errors(address):
            result = obstore.get(store, key)
            return bytes(result.bytes()), str(result.meta["e_tag"])
    except FileNotFoundError:
        return None


def write_object(address: str, content: bytes, *, tag: str | None) -> bool:
    """Write an object if the one that is there still has this tag, or if none is there and `tag` is None.

    The service decides, in one request, so two writers cannot both succeed.

    Returns:
      Whether it was written.
    """
    store, key = _place(address)
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    try:
        with _errors(address):
            mode: Any = "create" if tag is None else {"e_tag": tag}
            obstore.put(store, key, content, mode=mode)
    except (AlreadyExistsError, PreconditionError, FileExistsError):
        return False
    except FileNotFoundError:
        raise DataError(f"{masked(address)} must be in a bucket that exists; check its name") from None
    return True


@cache
def can_write(folder: str) -> bool:
    """Return whether objects can be written to a folder, by writing an empty one and removing it.

    Raises:
      DataError: the service does not answer, or it writes objects although the condition is not met.
    """
    probe = f"{folder}/.dpgcl-probe-{secrets.token_hex(8)}"
    store, key = _place(probe)
    import obstore

    try:
        outcomes = [write_object(probe, b"", tag=tag) for tag in (None, None, '"other"')]
    except _NotAllowed:
        return False
    with suppress(DataError, FileNotFoundError), _errors(probe):
        obstore.delete(store, key)
    if outcomes != [True, False, False]:
        raise DataError(
            f"a service must honour If-Match and If-None-Match, for a ledger's mark; {masked(folder)} does "
            "not. Copy the data to a disk, or to a service that does"
        )
    return True


class ObjectReader(io.RawIOBase):
    """An object as a file that is read by ranges, for readers that need parts of it.

    Reading raises OSError if the object has changed since it was listed.
    """

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.num_bytes}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        num_bytes = max(0, min(len(buffer), self._file.num_bytes - self._position))
        content = read_ranges([(self._file, self._position, num_bytes)])[0] if num_bytes else b""
        if content is None:
            raise OSError("the object has changed")
        buffer[:num_bytes] = content
        self._position += num_bytes
        return num_bytes


def read_ranges(ranges: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes | None]:
    """Return the bytes of ranges; None for a range of an object that has changed since, or is gone.

    Ranges of one object that overlap or are at most `_LARGEST_GAP` bytes apart take one request.

    Args:
      ranges: objects, first bytes and numbers of bytes.

    Raises:
      DataError: the service does not answer.
    """
    order = sorted(range(len(ranges)), key=lambda i: (ranges[i][0].address, ranges[i][1]))
    runs: list[list[int]] = []
    ends: list[int] = []
    for number in order:
        file, first, num_bytes = ranges[number]
        if (
            runs
            and file == (former := ranges[runs[-1][0]])[0]
            and (first - ends[-1] <= _LARGEST_GAP and first + num_bytes - former[1] <= _LARGEST_RUN)
        ):
            runs[-1].append(number)
            ends[-1] = max(ends[-1], first + num_bytes)
        else:
            runs.append([number])
            ends.append(first + num_bytes)
    contents: list[bytes | None] = [None] * len(ranges)

    def read(run: list[int], end: int) -> None:
        file, first, _ = ranges[run[0]]
        content = _range(file, first, end)
        if content is not None:
            for number in run:
                offset = ranges[number][1] - first
                contents[number] = content[offset : offset + ranges[number][2]]

    list(_threads().map(read, runs, ends))
    return contents


def download(file: RemoteFile) -> IO[bytes]:
    """Return a copy of an object: a file of this machine without a name, gone when it is closed.

    Raises:
      DataError: the object has changed since it was listed, or the service does not answer.
    """
    copy = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    at_once = _LARGEST_RUN * REQUESTS_IN_FLIGHT // 2
    for first in range(0, file.num_bytes, at_once):
        starts = range(first, min(first + at_once, file.num_bytes), _LARGEST_RUN)
        parts = read_ranges([(file, start, min(_LARGEST_RUN, file.num_bytes - start)) for start in starts])
        if None in parts:
            raise DataError(f"data must not change while they are read; {masked(file.address)} has changed")
        copy.writelines(part for part in parts if part is not None)
    copy.seek(0)
    return copy


def _range(file: RemoteFile, start: int, end: int) -> bytes | None:
    import obstore

    store, key = _place(file.address)
    failure: DataError | None = None
    try:
        with _errors(file.address):
            result = obstore.get(store, key, options={"range": (start, end)})
            is_same = _file(file.address, result.meta) == file
            return bytes(result.bytes()) if is_same else None
    except FileNotFoundError:
        return None
    except DataError as error:
        failure = error
    if find_object(file.address) == file:
        raise failure
    return None  # the object has become shorter, and the range does not exist


def _file(address: str, meta: Any) -> RemoteFile:
    tag = str(meta["e_tag"] or meta["last_modified"])
    version = int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=8).digest()) >> 1
    return RemoteFile(address, meta["size"], version)


def _place(address: str) -> tuple[ObjectStore, str]:
    """Return the bucket's store, and the key in it."""
    match = _ADDRESS.fullmatch(address)
    assert match is not None
    return _store(match[1]), match[2] or ""


@cache
def _store(bucket: str) -> ObjectStore:
    require_extra("s3", "obstore", needed_by=f"data at s3://{bucket}")
    from obstore.store import S3Store

    endpoint = os.environ.get("AWS_ENDPOINT_URL", "https://")
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"$AWS_ENDPOINT_URL must begin with http:// or https://; got {masked(endpoint)!r}")
    retries: Any = {"max_retries": _MAX_RETRIES, "retry_timeout": timedelta(minutes=3)}
    with _errors(f"s3://{bucket}"):
        return S3Store(
            bucket,
            client_options={"allow_http": endpoint.startswith("http://"), "timeout": "120s"},
            retry_config=retries,
            credential_provider=_profile(),
        )


def _profile() -> Any:
    """Return the credentials of a profile of boto3's; None without one, or with keys in the environment."""
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return None
    try:
        from boto3 import Session  # type: ignore[import-untyped]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    session = Session()
    return Boto3CredentialProvider(session) if session.get_credentials() else None


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(REQUESTS_IN_FLIGHT)


class _NotAllowed(DataError):  # noqa: N818 (the name describes the cause)
    """The credentials do not allow a request."""


@contextmanager
def _errors(address: str) -> Iterator[None]:
    """Raise the service's errors as DataError, without their text, which quotes requests."""
    from obstore.exceptions import (
        AlreadyExistsError,
        NotFoundError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )

    kind, error_class = "", DataError
    try:
        yield
    except (NotFoundError, FileNotFoundError):
        raise FileNotFoundError from None
    except (AlreadyExistsError, PreconditionError, FileExistsError):
        raise
    except Exception as error:  # boto3's, too
        kind = type(error).__name__
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            error_class = _NotAllowed
    if kind:
        raise error_class(
            f"{masked(address)} must be readable; the service answers {kind}. Check the address, "
            "$AWS_ENDPOINT_URL, the region and the credentials"
        ) from None
