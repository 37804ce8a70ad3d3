"""Sweeps: one script per question, and the same from Python.

    from sweeps import Between, SweepOptions, search

    found = search(SweepOptions(), {"learning_rate": Between(1e-3, 1e-1)}, "knn_accuracy", num_trials=10)
    print(found.best, found.epsilon, found.tuned_epsilon)

What is imported from here is the interface; everything else may change. A name is loaded when it is asked
for.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sweeps.service.options.sweep import PairSweepOptions, SweepOptions
    from sweeps.service.planning.space import Between
    from sweeps.service.planning.trials import Point
    from sweeps.service.running.from_python import SweepResult, run, search

__all__ = ["Between", "PairSweepOptions", "Point", "SweepOptions", "SweepResult", "run", "search"]

_FOUND_AT = {
    "Between": "planning.space",
    "PairSweepOptions": "options.sweep",
    "Point": "planning.trials",
    "SweepOptions": "options.sweep",
    "SweepResult": "running.from_python",
    "run": "running.from_python",
    "search": "running.from_python",
}


def __getattr__(name: str) -> Any:
    if name not in _FOUND_AT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.service.{_FOUND_AT[name]}"), name)


class _Package(ModuleType):
    """Keeps `search` the function: an import of the script of that name puts its module in the place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FOUND_AT or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
