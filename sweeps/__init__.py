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
    from sweeps.service.options.sweep_options import PairSweepOptions as PairSweepOptions
    from sweeps.service.options.sweep_options import SweepOptions as SweepOptions
    from sweeps.service.planning.space import Between as Between
    from sweeps.service.planning.trials import Point as Point
    from sweeps.service.running.from_python import SweepResult as SweepResult
    from sweeps.service.running.from_python import run as run
    from sweeps.service.running.from_python import search as search
    from sweeps.service.running.listeners import Listener as Listener
    from sweeps.service.running.listeners import SweepBeginning as SweepBeginning
    from sweeps.service.running.listeners import SweepEnd as SweepEnd
    from sweeps.service.running.listeners import TrialResult as TrialResult

__getattr__, __dir__, __all__ = lazy_names(__name__)


class _Package(ModuleType):
    """Keeps `sweeps.search` a function: importing the script `sweeps/search.py` would replace it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
