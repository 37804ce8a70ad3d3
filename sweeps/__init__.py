"""Sweeps: one script per question, and the same from Python.

    from sweeps import Between, SweepOptions, search

    result = search(SweepOptions(), {"learning_rate": Between(1e-3, 1e-1)}, "knn_accuracy", num_trials=10)
    print(result.best, result.epsilon, result.tuned_epsilon)

The names that this package exports are the interface; everything else may change. A name is loaded at its
first use.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dpgcl_core.errors import require_extra
from dpgcl_core.lazy_names import lazy_names

require_extra("service", "ray", "mlflow", "optuna", needed_by=__name__)

if TYPE_CHECKING:
    from sweeps.service.options.sweep_options import PairSweepOptions, SweepOptions
    from sweeps.service.planning.space import Between
    from sweeps.service.planning.trials import Point
    from sweeps.service.running.from_python import SweepResult, run, search
    from sweeps.service.running.listeners import Listener, SweepBeginning, SweepEnd, TrialResult

__all__ = [
    "Between",
    "Listener",
    "PairSweepOptions",
    "Point",
    "SweepBeginning",
    "SweepEnd",
    "SweepOptions",
    "SweepResult",
    "TrialResult",
    "run",
    "search",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "service.options.sweep_options": ("PairSweepOptions", "SweepOptions"),
        "service.planning.space": ("Between",),
        "service.planning.trials": ("Point",),
        "service.running.from_python": ("SweepResult", "run", "search"),
        "service.running.listeners": ("Listener", "SweepBeginning", "SweepEnd", "TrialResult"),
    },
)


class _Package(ModuleType):
    """Keeps `sweeps.search` a function: importing the script `sweeps/search.py` would replace it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
