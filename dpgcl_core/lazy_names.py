"""Names of a package that are loaded on first use, so that a command line does not wait for torch."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose names are imported on first use.

    The names and their modules are read from the package's own source: the imports under its
    `if TYPE_CHECKING`, which type checkers read, too. So a public name is declared once.

    Args:
      package: the package's `__name__`.
    """
    module = sys.modules[package]
    homes = {
        alias.asname or alias.name: (str(statement.module), alias.name)
        for block in ast.parse(inspect.getsource(module)).body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, original_name = homes[name]
        return getattr(importlib.import_module(home), original_name)

    def names() -> list[str]:
        return sorted({*vars(module), *homes})

    return get, names, sorted(homes)
