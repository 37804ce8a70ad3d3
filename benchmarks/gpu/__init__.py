"""What a GPU gives, in rows that add up over many calls: `python -m benchmarks.gpu`, see docs/performance.md.

Importing the package makes up for what the GPU machine has not: accounting, and libraries that a training
needs for its files and scores alone.
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
    """Stands for a package that this machine has not: it can be imported, and whatever is called raises."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        raise ImportError(f"{self.__name__} was called, and its package is not installed here")


class _AbsentFinder:
    """The last place where imports are looked for: accounting, and what is used beside trainings alone."""

    names = ("dp_accounting", "safetensors", "scipy")

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        is_absent = name.partition(".")[0] in self.names
        return ModuleSpec(name, self, is_package=True) if is_absent else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


def is_absent(package: str) -> bool:
    """Whether a package is not on this machine."""
    return isinstance(sys.modules.get(package), _Absent)


sys.meta_path.append(_AbsentFinder())


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is run, where and for how long: the options of the command line."""

    only: Sequence[str] = ()
    output: Path = Path("results/gpu")
    device: str = "cuda"
    tiny: bool = False
    should_retry: bool = False
    limit_minutes: float = math.inf
    threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)
    start_seconds: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        """When `time.monotonic` is as late as this nothing begins any more."""
        return self.start_seconds + 60 * self.limit_minutes
