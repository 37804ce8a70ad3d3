"""Finds a published file on this machine, or downloads it once and checks it against its checksum.

Searched in this order:
  1. `$DPGCL_DATA`: a folder the user keeps; never written to. `fashion-mnist/`, `fashion_mnist/` and
     `FashionMNIST/raw/` are all found.
  2. The cache: `$DPGCL_CACHE`, else `$XDG_CACHE_HOME/dpgcl`, else `~/.cache/dpgcl`.
  3. The publisher's addresses, or `$DPGCL_MIRROR/<name>` on a closed network.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dpgcl_core.addresses import masked, text_of_error
from dpgcl_core.errors import ConfigError, DataError

TIMEOUT_SECONDS = 30.0
"""Longest wait for a connection and for each piece of the answer."""

_CHUNK_BYTES = 1 << 20
_CHECKSUM = re.compile(r"md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}")
_log = logging.getLogger(__name__)


class _RefusedError(Exception):
    """One address did not give the file; the next one may."""


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file as its publisher describes it.

    Attributes:
      name: bare file name.
      urls: addresses, tried in order.
      checksum: as published: `md5:<32 hex digits>` or `sha256:<64 hex digits>`.
    """

    name: str
    urls: tuple[str, ...]
    checksum: str

    def __post_init__(self) -> None:
        if not self.name or Path(self.name).name != self.name:
            raise ConfigError(f"name must be a bare file name; got {self.name!r}")
        if not self.urls:
            raise ConfigError(f"urls must hold at least one address; got none for {self.name!r}")
        if not _CHECKSUM.fullmatch(self.checksum):
            raise ConfigError(
                "checksum must be md5:<32 hex digits> or sha256:<64 hex digits>, in lower case; "
                f"got {self.checksum!r}"
            )

    def matches(self, path: Path) -> bool:
        """Return whether the file at `path` has the published checksum."""
        return self._checksum_of(path) == self.checksum

    def _checksum_of(self, path: Path) -> str:
        algorithm = self.checksum.partition(":")[0]
        with path.open("rb") as stored:
            # The checksum tells a damaged file, not a forged one: MD5 must work in FIPS mode too.
            digest = hashlib.file_digest(stored, lambda: hashlib.new(algorithm, usedforsecurity=False))
        return f"{algorithm}:{digest.hexdigest()}"


def find_or_download(file: RemoteFile, folder_name: str) -> Path:
    """Return the path of `file`, downloaded into the cache if it is nowhere on this machine.

    The file at the returned path has the published checksum, wherever it was found: what passes for a
    public benchmark must be that benchmark. An interrupted download leaves nothing, and processes that
    download at the same time do not disturb each other.

    Args:
      file: what to find.
      folder_name: sub-folder of `$DPGCL_DATA` and of the cache.

    Raises:
      DataError: a found file is damaged, no address gives the file, or the cache cannot be written.
      ConfigError: `$DPGCL_MIRROR` is not an http or https address.
    """
    kept = _find_in_data_folder(file.name, folder_name)
    if kept is not None:
        if not file.matches(kept):
            raise DataError(
                f"{file.name} must have its published checksum {file.checksum}; {kept} has not. "
                "Replace or remove it; data of your own are read with npz:PATH, parquet:PATH or folder:PATH"
            )
        return kept
    target = cache_folder() / folder_name / file.name
    if not (target.is_file() and file.matches(target)):
        _download(file, folder_name, target)
    return target


def find_file(name: str, folder_name: str) -> Path | None:
    """Return where `name` lies under `$DPGCL_DATA` or in the cache, or None.

    Raises:
      DataError: `$DPGCL_DATA` is set to something that is not a folder.
    """
    cached = cache_folder() / folder_name / name
    return _find_in_data_folder(name, folder_name) or (cached if cached.is_file() else None)


def cache_folder() -> Path:
    """Return the user's cache folder, which need not exist yet."""
    own = os.environ.get("DPGCL_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "dpgcl"


@contextmanager
def write_atomically(target: Path) -> Iterator[BinaryIO]:
    """Give a stream whose bytes appear at `target` all at once, or not at all.

    Raises:
      DataError: the folder cannot be written.
    """
    # The name is unique, not only per process, so that two writers never share a temporary file.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(6)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(target)
        _sync_folder(target.parent)
    except OSError as error:
        raise DataError(
            f"the cache folder must be writable; {target.parent} is not ({error.strerror or error}). "
            "Set DPGCL_CACHE to a folder that is"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _find_in_data_folder(name: str, folder_name: str) -> Path | None:
    root = os.environ.get("DPGCL_DATA")
    if not root:
        return None
    base = Path(root).expanduser()
    if not base.is_dir():
        raise DataError(f"DPGCL_DATA must be an existing folder; got {root!r}. Correct it or unset it")
    spelled = [
        f for f in sorted(base.iterdir()) if f.is_dir() and _spelling(f.name) == _spelling(folder_name)
    ]
    for folder in [*spelled, base]:
        for candidate in (folder / name, folder / "raw" / name):
            if candidate.is_file():
                return candidate
    return None


def _spelling(folder_name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", folder_name.lower())


def _addresses(file: RemoteFile) -> tuple[str, ...]:
    mirror = os.environ.get("DPGCL_MIRROR")
    if not mirror:
        return file.urls
    if not mirror.startswith(("http://", "https://")):
        raise ConfigError(f"DPGCL_MIRROR must be an http:// or https:// address; got {masked(mirror)!r}")
    return (f"{mirror.rstrip('/')}/{file.name}",)


def _download(file: RemoteFile, folder_name: str, target: Path) -> None:
    failures = []
    for url in _addresses(file):
        _log.info("downloading %s", masked(url))
        try:
            _download_from(url, file, target)
        except _RefusedError as refusal:
            failures.append(f"{masked(url)} ({refusal})")
        else:
            return
    raise DataError(
        f"{file.name} is not on this machine and no address gave it: {', '.join(failures)}. "
        f"Put the file at $DPGCL_DATA/{folder_name}/{file.name}, or set DPGCL_MIRROR to where it is"
    )


def _download_from(url: str, file: RemoteFile, target: Path) -> None:
    with write_atomically(target) as out:
        _fetch(url, out)
        out.flush()
        found = file._checksum_of(Path(out.name))
        if found != file.checksum:
            raise _RefusedError(f"checksum {found}, published {file.checksum}")


def _fetch(url: str, out: BinaryIO) -> None:
    """Write what `url` answers to `out`; whatever goes wrong with the network becomes `_RefusedError`."""
    import pooch  # here: only a download needs them
    import requests

    # An archive is checked as it is published: nothing on the way may unpack a .gz.
    headers = {"User-Agent": "dpgcl", "Accept-Encoding": "identity"}
    download = pooch.HTTPDownloader(chunk_size=_CHUNK_BYTES, timeout=TIMEOUT_SECONDS, headers=headers)
    try:
        download(url, out, None)
    except (requests.RequestException, UnicodeError) as error:
        said = f"{type(error).__name__}: {text_of_error(error, url)}"
    else:
        return
    raise _RefusedError(said)
