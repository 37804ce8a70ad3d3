"""Benchmarks on a GPU, whose rows accumulate over many calls: `python -m benchmarks.gpu`.

See docs/performance.md. Importing the package replaces libraries that the GPU machine lacks: accounting, and
libraries that a training needs only for its files and scores.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class _Absent(ModuleType):
    """Stands in for a missing package: it can be imported, and every call raises ImportError."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        raise ImportError(f"{self.__name__} cannot be called: its package is not installed")


class _AbsentFinder:
    """The last finder on `sys.meta_path`: it finds stand-ins for accounting, and for files and scores."""

    names = ("dp_accounting", "safetensors", "scipy")

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        is_absent = name.partition(".")[0] in self.names
        return ModuleSpec(name, self, is_package=True) if is_absent else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """No-op: the stand-in is empty."""


def is_absent(package: str) -> bool:
    """Return whether a package is missing on this machine."""
    return isinstance(sys.modules.get(package), _Absent)


sys.meta_path.append(_AbsentFinder())


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line: which rows to make, where and for how long."""

    only: Sequence[str] = ()
    dataset: str = "fashion-mnist"
    output: Path = Path("results/gpu")
    device: str = "cuda"
    tiny: bool = False
    should_retry: bool = False
    limit_minutes: float = math.inf
    threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)
    start_seconds: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        """The value of `time.monotonic` from which on no row is started."""
        return self.start_seconds + 60 * self.limit_minutes
