"""The folder that is copied to a GPU machine: what it says of itself, and the packages in it.

This module imports nothing beyond Python's own library: it finds the packages for all others.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ("dpgcl_core", "trainers", "benchmarks")
"""The packages of this repository that are copied."""

DESCRIPTION, ARCHIVE, PACKAGES = "bundle.json", "packages.tar.xz", "packages"


class BundleError(Exception):
    """The folder is not one that runs here; the message says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The Python that the packages are for: compiled ones fit no other."""

    python: str
    platform: str

    @classmethod
    def here(cls) -> Target:
        """Return this process's own."""
        return cls(python="{}.{}".format(*sys.version_info), platform=f"{sys.platform}-{platform.machine()}")

    def __str__(self) -> str:
        return f"Python {self.python} on {self.platform}"


def source_files(root: Path) -> list[Path]:
    """Return the files that are copied, in a fixed order."""
    return sorted(
        path for name in SOURCE for path in (root / name).rglob("*.py") if "__pycache__" not in path.parts
    )


def version_of(root: Path) -> str:
    """Return what identifies the source of a folder: a hash of its files, 12 hexadecimal digits."""
    found = hashlib.sha256()
    for path in source_files(root):
        content = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()[:12]


def describe(root: Path, target: Target) -> None:
    """Write what a folder holds into it, when all of it is there."""
    content = {"version": version_of(root), **asdict(target)}
    (root / DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n")


def add_packages(root: Path = ROOT) -> None:
    """Put the packages of a bundle behind those of the machine, unpacked at the first call.

    In a checkout, which is no bundle, nothing is done.

    Raises:
      BundleError: the bundle is damaged, of another version than its source, or for another Python.
    """
    if not (root / DESCRIPTION).exists():
        return
    check(root)
    if not (root / PACKAGES).exists():
        _unpack(root)
    sys.path.append(str(root / PACKAGES))


def check(root: Path) -> None:
    """Refuse a bundle that does not run here.

    Raises:
      BundleError: see `add_packages`.
    """
    try:
        content = json.loads((root / DESCRIPTION).read_text())
        target = Target(python=content["python"], platform=content["platform"])
        version = content["version"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BundleError(f"{root / DESCRIPTION} cannot be read: fill the folder again") from None
    if version != version_of(root):
        raise BundleError(
            f"the bundle in {root} is of another version: its source is {version_of(root)} and its packages "
            f"are of {version}. Copy the whole folder again"
        )
    if target != Target.here():
        raise BundleError(
            f"the bundle in {root} is for {target}, and this is {Target.here()}: fill one with make "
            f"gpu-bundle PYTHON_VERSION={Target.here().python}"
        )


def _unpack(root: Path) -> None:
    """Unpack the archive beside itself: all of it, or nothing where that fails."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        try:
            with tarfile.open(root / ARCHIVE) as archive:
                archive.extractall(folder, filter="data")
        except (OSError, EOFError, tarfile.TarError) as error:
            raise BundleError(f"{root / ARCHIVE} cannot be unpacked ({error}): copy it again") from None
        Path(folder, PACKAGES).rename(root / PACKAGES)
