"""Copies of what may be seen, at an address: `s3://bucket/folder`, or any other that fsspec knows.

Beside the copies lies `manifest.json`: whose they are, and the size and SHA-256 of each. It is read before
anything is copied and written last, so that copying again, after a kill too, sends what is missing and
nothing else, and never replaces what belongs to something else of the same name.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpgcl_core.addresses import has_secret, masked, text_of_error
from dpgcl_core.errors import ConfigError, DpgclError, StorageError

MANIFEST = "manifest.json"
Content = bytes | Path
"""What a copy is made of: the bytes themselves, or a file."""
_SCHEME = re.compile(r"[a-z][a-z0-9+-]*(?=://)")
_S3_SCHEMES = ("s3", "s3a")
# A server that is away is told within half a minute; what is sent later is tried again by whoever sends it.
_S3_OPTIONS: dict[str, Any] = {
    "skip_instance_cache": True,
    "use_listings_cache": False,
    "config_kwargs": {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 1}},
}
_S3_RETRIES = 2


@dataclass(frozen=True)
class Destination:
    """A folder at an address; build it with `Destination.open`.

    Attributes:
      address: without a slash at its end.
      filesystem: of fsspec.
      path: of the folder there.
    """

    address: str
    filesystem: Any = field(repr=False)
    path: str

    @classmethod
    def open(cls, address: str) -> Destination:
        """Return the folder at an address; nothing is asked of it yet.

        Raises:
          ConfigError: it is no address, holds credentials, or needs a package that is not installed.
        """
        import fsspec

        scheme = _checked_scheme(address)
        try:
            kind: Any = fsspec.get_filesystem_class(scheme)
        except ImportError as error:
            raise ConfigError(
                f"the address {masked(address)} needs a package: {_fix(scheme, error)}"
            ) from None
        except ValueError:
            raise ConfigError(
                "an address to publish to must be of a kind that fsspec knows, such as s3, gs, abfs or file; "
                f"got {masked(address)!r}"
            ) from None
        with _errors(address, "opening it"):
            filesystem: Any = kind(**(_S3_OPTIONS if scheme in _S3_SCHEMES else {}))
            if scheme in _S3_SCHEMES:
                filesystem.retries = _S3_RETRIES
            path = str(kind._strip_protocol(address)).rstrip("/")
        return cls(address.rstrip("/"), filesystem, path)

    @property
    def folder(self) -> Path | None:
        """The folder of this machine that it is; None where it is none."""
        is_local = self.address.startswith(("file://", "local://"))
        return Path(self.path).resolve() if is_local else None

    def at(self, *names: str) -> Destination:
        """Return a folder below."""
        below = "/".join(names)
        return Destination(f"{self.address}/{below}", self.filesystem, f"{self.path}/{below}")

    def check(self) -> None:
        """See that files can be written and removed: an empty one is.

        Raises:
          StorageError: they cannot.
        """
        name = f".writable-{secrets.token_hex(4)}"
        self.write(name, b"")
        self.remove(name)

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None where there is none. Raises as `check`."""
        with _errors(self.address, f"reading {name}"):
            try:
                return bytes(self.filesystem.cat_file(f"{self.path}/{name}"))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: Content) -> None:
        """Write a file in place of an earlier one. Raises as `check`."""
        place = f"{self.path}/{name}"
        with _errors(self.address, f"writing {name}"):
            if self.folder is not None or self.address.startswith("memory://"):  # others have no folders
                self.filesystem.makedirs(place.rpartition("/")[0], exist_ok=True)
            if isinstance(content, Path):
                self.filesystem.put_file(str(content), place)
            else:
                self.filesystem.pipe_file(place, content)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. Raises as `check`."""
        with _errors(self.address, f"removing {name}"):
            try:
                self.filesystem.rm_file(f"{self.path}/{name}")
            except FileNotFoundError:
                return

    def sizes(self) -> dict[str, int]:
        """Return the files there with their sizes in bytes, by name. Raises as `check`."""
        with _errors(self.address, "listing it"):
            try:
                found = self.filesystem.find(self.path, detail=True)
            except FileNotFoundError:
                return {}
            return {
                place.removeprefix(self.path).lstrip("/"): int(each["size"]) for place, each in found.items()
            }


class Copies:
    """What lies at a destination of one owner, and more of it.

    Args:
      place: where.
      owner: tells what they are copies of from anything else of the same name.

    Raises:
      StorageError: what lies there is of another owner, or the place does not answer.
    """

    def __init__(self, place: Destination, owner: str) -> None:
        self.place, self._owner = place, owner
        self._known = _manifest(place, owner)
        sizes = place.sizes() if self._known else {}
        self._files = {name: fact for name, fact in self._known.items() if sizes.get(name) == fact["bytes"]}

    @property
    def names(self) -> list[str]:
        """The copies that lie there, in order."""
        return sorted(self._files)

    def put(self, name: str, content: Content) -> None:
        """Copy a file, unless the same lies there. Raises as `Destination.check`."""
        fact = _fact(content)
        if self._files.get(name) != fact:
            self._files.pop(name, None)
            self.place.write(name, content)
            self._files[name] = fact

    def remove(self, name: str) -> None:
        """Take a copy away. Raises as `Destination.check`."""
        self.place.remove(name)
        self._files.pop(name, None)

    def write_manifest(self) -> None:
        """Note what lies there. Raises as `Destination.check`."""
        if self._known != self._files or not self._known:
            content = {"version": 1, "owner": self._owner, "files": dict(sorted(self._files.items()))}
            self.place.write(MANIFEST, json.dumps(content, indent=1).encode())
            self._known = dict(self._files)


def files_below(folder: Path) -> dict[str, Path]:
    """Return all files of a folder by their names in it, those that begin with a dot left out."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    return {
        name: path
        for name, path in found.items()
        if path.is_file() and not path.is_symlink() and not Path(name).name.startswith(".")
    }


def _checked_scheme(address: str) -> str:
    """The scheme of an address.

    Raises:
      ConfigError: it has none, or holds credentials.
    """
    found = _SCHEME.match(address)
    if found is None or not address[found.end() + 3 :].strip("/"):
        raise ConfigError(
            "an address to publish to must be one as s3://bucket/folder or file:///folder; "
            f"got {masked(address)!r}"
        )
    if has_secret(address) or any(sign in address for sign in "@?#"):
        raise ConfigError(
            f"an address to publish to must hold no credentials and no parameters; got {masked(address)!r}: "
            "leave them to the environment ($AWS_ACCESS_KEY_ID, $AWS_ENDPOINT_URL), to ~/.aws, or to the "
            "machine's role"
        )
    return found[0]


def _fix(scheme: str, error: ImportError) -> str:
    if scheme in _S3_SCHEMES:
        return "pip install 'dpgcl[s3]'"
    return " ".join(str(error).split())


@contextmanager
def _errors(address: str, action: str) -> Iterator[None]:
    """Turn what a file system raises into one line: each has classes of its own."""
    try:
        yield
    except DpgclError:
        raise
    except Exception as error:
        said = text_of_error(error, address)[:300]
        raise StorageError(f"{masked(address)} failed while {action}: {said}") from error


def _fact(content: Content) -> dict[str, Any]:
    if isinstance(content, bytes):
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    with content.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": content.stat().st_size, "sha256": digest}


def _manifest(place: Destination, owner: str) -> dict[str, dict[str, Any]]:
    text = place.read(MANIFEST)
    if text is None:
        return {}
    try:
        found = json.loads(text)
        if found["owner"] == owner:
            return dict(found["files"])
    except (ValueError, KeyError, TypeError):
        pass
    raise StorageError(
        f"{masked(place.address)} holds what is of something else of the same name: give another --name, or "
        "another address"
    )
