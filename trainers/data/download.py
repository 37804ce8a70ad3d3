"""Finds a published file on this machine, or downloads it once and checks it against its checksum.

The places are searched in this order:
  1. `$DPGCL_DATA`: a folder the user keeps; never written to. `fashion-mnist/`, `fashion_mnist/` and
     `FashionMNIST/raw/` are all found.
  2. The cache: `$DPGCL_CACHE`, else `$XDG_CACHE_HOME/dpgcl`, else `~/.cache/dpgcl`.
  3. The publisher's addresses, or `$DPGCL_MIRROR/<name>` if the machine cannot reach the internet.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from dpgcl_core.addresses import masked, text_of_error
from dpgcl_core.errors import ConfigError, DataError

TIMEOUT_SECONDS = 30.0
"""Longest wait for a connection and for each piece of the response."""


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A published file: where to download it, and its checksum.

    Attributes:
      name: file name without a folder.
      urls: addresses, tried in order.
      checksum: the published checksum: `md5:` or `sha256:` and hexadecimal digits, in lower case.
    """

    name: str
    urls: tuple[str, ...]
    checksum: str

    def matches(self, path: Path) -> bool:
        """Return whether the file at `path` has the published checksum."""
        import pooch

        algorithm, _, digits = self.checksum.partition(":")
        return bool(pooch.file_hash(path, alg=algorithm) == digits)


def find_or_download(file: RemoteFile, folder_name: str) -> Path:
    """Return the path of `file`, downloading it into the cache if it is not on this machine.

    The file at the returned path has the published checksum, wherever it was found, so a data set that is
    treated as a public benchmark is that benchmark. An interrupted download leaves no file, and processes
    that download at the same time do not interfere with each other.

    Args:
      file: the file to find.
      folder_name: sub-folder of `$DPGCL_DATA` and of the cache.

    Raises:
      DataError: the file found is damaged, no address has the file, or the cache cannot be written.
      ConfigError: `$DPGCL_MIRROR` is not an http or https address.
    """
    path = _find_in_data_folder(file.name, folder_name)
    if path is not None:
        if not file.matches(path):
            raise DataError(
                f"{file.name} must have its published checksum {file.checksum}; {path} does not. "
                "Replace or remove it. To read your own data, use npz:PATH, parquet:PATH or folder:PATH"
            )
        return path
    target = cache_folder() / folder_name / file.name
    _download(file, folder_name, target)
    return target


def find_file(name: str, folder_name: str) -> Path | None:
    """Return the path of `name` under `$DPGCL_DATA` or in the cache, or None.

    Raises:
      DataError: `$DPGCL_DATA` is set to something that is not a folder.
    """
    cached = cache_folder() / folder_name / name
    return _find_in_data_folder(name, folder_name) or (cached if cached.is_file() else None)


def cache_folder() -> Path:
    """Return the user's cache folder, which need not exist yet."""
    cache = os.environ.get("DPGCL_CACHE")
    if cache:
        return Path(cache).expanduser()
    xdg_cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg_cache) if xdg_cache else Path.home() / ".cache") / "dpgcl"


def _find_in_data_folder(name: str, folder_name: str) -> Path | None:
    """Return the file's path in `$DPGCL_DATA`, in any spelling of the sub-folder; None if it is not there."""
    root = os.environ.get("DPGCL_DATA")
    if not root:
        return None
    base = Path(root).expanduser()
    if not base.is_dir():
        raise DataError(f"DPGCL_DATA must be an existing folder; got {root!r}. Correct it or unset it")
    matching_folders = [
        f for f in sorted(base.iterdir()) if f.is_dir() and _normalised(f.name) == _normalised(folder_name)
    ]
    for folder in [*matching_folders, base]:
        for candidate in (folder / name, folder / "raw" / name):
            if candidate.is_file():
                return candidate
    return None


def _normalised(folder_name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", folder_name.lower())


def _addresses(file: RemoteFile) -> tuple[str, ...]:
    mirror = os.environ.get("DPGCL_MIRROR")
    if not mirror:
        return file.urls
    if not mirror.startswith(("http://", "https://")):
        raise ConfigError(f"DPGCL_MIRROR must be an http:// or https:// address; got {masked(mirror)!r}")
    return (f"{mirror.rstrip('/')}/{file.name}",)


def _download(file: RemoteFile, folder_name: str, target: Path) -> None:
    """Download the file to `target`; pooch moves a temporary file there after checking its checksum."""
    import pooch  # imported here: only a download needs it
    import requests

    pooch.get_logger().setLevel(logging.CRITICAL)  # it would print addresses, which may hold a password
    # An archive is checked as published: no proxy or client on the way may unpack a .gz.
    headers = {"User-Agent": "dpgcl", "Accept-Encoding": "identity"}
    fetch = pooch.HTTPDownloader(chunk_size=1 << 20, timeout=TIMEOUT_SECONDS, headers=headers)
    failures = []
    for url in _addresses(file):
        try:
            pooch.retrieve(url, file.checksum, target.name, target.parent, downloader=fetch)
        except (requests.RequestException, ValueError) as error:
            failures.append(f"{masked(url)} ({type(error).__name__}: {text_of_error(error, url)})")
        except OSError as error:
            raise DataError(
                f"the cache folder must be writable; {target.parent} is not ({error.strerror or error}). "
                "Set DPGCL_CACHE to a writable folder"
            ) from error
        else:
            return
    raise DataError(
        f"{file.name} is not on this machine and could not be downloaded: {', '.join(failures)}. "
        f"Put the file at $DPGCL_DATA/{folder_name}/{file.name}, or set DPGCL_MIRROR to an address with it"
    )
