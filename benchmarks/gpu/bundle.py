"""Fills the folder that is copied to a GPU machine: `make gpu-bundle`.

The packages are those of this environment, or for another Python those that pip finds for it, at the same
versions. They are packed without their tests and without what is never imported here, for the folder is to
stay small enough for any way of copying it.
"""

from __future__ import annotations

import importlib.metadata
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from benchmarks.gpu.packages import ARCHIVE, PACKAGES, ROOT, Target, describe, source_files
from benchmarks.harness import say
from dpgcl_core.errors import ConfigError, StorageError

MOST_BYTES = 25 * 2**20
"""Of the folder as it is copied, without data."""

CARRIED = (
    "absl-py",
    "attrs",
    "docstring_parser",
    "dp-accounting",
    "filelock",
    "ftfy",
    "open_clip_torch",
    "safetensors",
    "scipy",
    "SQLAlchemy",
    "typeguard",
    "tyro",
    "typing_extensions",
    "wcwidth",
)
"""Distributions beyond torch, numpy and what those need. open_clip works where torchvision is, too;
what private data alone need, as the cryptographic stream, stays behind."""

_LEFT_OUT = re.compile(
    r"(^|/)(tests?|__pycache__|include|[^/]*\.dist-info)/|\.(pyi|pxd|pyx|h|c|hpp|cpp)$"
    r"|^scipy/(cluster|datasets|differentiate|fftpack|io/(matlab|arff|_fortran)|misc|odr)/"
    r"|^sqlalchemy/(testing/|.*\.so$)"  # whose compiled modules stand beside the same in Python
)
_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6}]
_PLATFORMS = tuple(f"manylinux{each}_x86_64" for each in ("_2_28", "_2_27", "_2_17", "2014", "_2_5", "1"))


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Fill the folder that is copied to a GPU machine."""

    output: Path = Path("build/gpu-bundle")
    """The folder; what is in it is replaced."""
    python_version: str | None = None
    """The GPU machine's Python, such as 3.12; this one's unless given; for another pip fetches packages."""

    def __post_init__(self) -> None:
        if self.python_version is not None and not re.fullmatch(r"3\.\d+", self.python_version):
            raise ConfigError(f"python_version must be like 3.12; got {self.python_version!r}")


def fill(options: Bundle) -> int:
    """Fill the folder, say how large it is, and return 0.

    Raises:
      ConfigError: the folder holds something else.
      StorageError: a package is missing or cannot be fetched, or the folder would be too large.
    """
    here, folder = Target.here(), options.output
    python = options.python_version or here.python
    target = here if python == here.python else Target(python=python, platform="linux-x86_64")
    _empty(folder)
    for path in source_files(ROOT):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    with tempfile.TemporaryDirectory() as temporary:
        fetched = None if target == here else _fetched(target, Path(temporary))
        say("packing the packages: a minute")
        _pack(folder / ARCHIVE, _installed() if fetched is None else _files_under(fetched))
    describe(folder, target)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise StorageError(f"the bundle must be at most {MOST_BYTES} bytes; {folder} has {size}")
    print(f"{folder}: {size / 2**20:.1f} MiB, for {target}")
    return 0


def _empty(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()) and not (folder / ARCHIVE).exists():
        raise ConfigError(f"output must be a new folder or an older bundle; {folder} holds something else")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _installed() -> Iterable[tuple[PurePosixPath, Path]]:
    """Yield the files of this environment's own packages, by their place in it."""
    for name in CARRIED:
        try:
            files = importlib.metadata.files(name)
        except importlib.metadata.PackageNotFoundError:
            raise StorageError(f"{name} is not installed here: run make first") from None
        for file in files or ():
            yield PurePosixPath(file.as_posix()), Path(str(file.locate()))


def _files_under(folder: Path) -> Iterable[tuple[PurePosixPath, Path]]:
    for path in sorted(folder.rglob("*")):
        yield PurePosixPath(path.relative_to(folder).as_posix()), path


def _fetched(target: Target, folder: Path) -> Path:
    """Have pip put the packages for another Python into a folder, which is returned."""
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in CARRIED]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", target.python, *(f"--platform={each}" for each in _PLATFORMS)]
    command += ["--platform=any", "--implementation=cp", "--target", str(folder), *pinned]
    if subprocess.run(command, check=False).returncode:
        raise StorageError(f"pip has no packages for {target}; what it says stands above")
    return folder


def _pack(archive: Path, files: Iterable[tuple[PurePosixPath, Path]]) -> None:
    """Pack what is imported of some files, without owners and times: the same files are the same bytes."""
    with (
        lzma.open(archive, "wb", filters=_FILTERS) as stream,
        tarfile.open(fileobj=stream, mode="w") as packed,
    ):
        for place, path in sorted(files):
            if path.is_file() and place.parts[0] != ".." and not _LEFT_OUT.search(place.as_posix()):
                info = tarfile.TarInfo(f"{PACKAGES}/{place}")
                info.size, info.mode = path.stat().st_size, 0o644
                with path.open("rb") as content:
                    packed.addfile(info, content)
