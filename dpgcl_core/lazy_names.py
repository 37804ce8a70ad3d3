"""Names of a package that are loaded on first use, so that a command line does not wait for torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    Args:
      package: the package's `__name__`.
      homes: the names, by the module of the package that defines them.
    """
    found_at = {name: f"{package}.{module}" for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in found_at:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(found_at[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *found_at})

    return get, names
