"""Names of a package that are loaded on first use, so that a command line does not wait for torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, which import a name's module on first use of the name.

    Args:
      package: the package's `__name__`.
      homes: the names, by the module of the package that defines them.
    """
    module_of = {name: f"{package}.{module}" for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return get, names
