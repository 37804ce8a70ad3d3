"""The registry of methods by name: this package's, installed packages' and those a program registers.

An installed package offers a method through the entry point group `dpgcl.methods`. A program calls
`register`. Each name belongs to one method: registering another method under it raises, so that no
other `dp_gcl` can replace this package's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from dpgcl_core.errors import ConfigError, unknown_choice

if TYPE_CHECKING:
    from dpgcl_core.mechanism.method import Method

ENTRY_POINTS = "dpgcl.methods"
_OWN = "dpgcl_core.methods"
"""The module that registers this package's methods. It is imported by name because it loads torch, and it
belongs to a layer above this module."""


class _Registry(Mapping[str, "Method"]):
    """The methods by name; this package's and installed packages' methods are loaded at the first lookup."""

    def __init__(self) -> None:
        self._methods: dict[str, Method] = {}
        self._searched = False
        self.installed: set[str] = set()

    def add(self, method: Method) -> None:
        """Add a method; raise ConfigError if it is invalid, or if another method has its name."""
        from dpgcl_core.mechanism.method import Method

        if not isinstance(method, Method):
            raise ConfigError(f"a method must be a dpgcl_core.Method; got a {type(method).__name__}")
        if self._methods.get(method.name, method) != method:
            raise ConfigError(
                f"a method named {method.name!r} is registered already "
                f"({self._methods[method.name].title}): choose another name"
            )
        kind = type(method)
        if kind.group_stage is not Method.group_stage and kind.sampling is Method.sampling:
            raise ConfigError(
                f"{method.name} overrides `group_stage`, so it must also override the property `sampling`. "
                "Check that its accounting event matches"
            )
        self._methods[method.name] = method

    def _all(self) -> dict[str, Method]:
        """Return all methods; load this package's and installed packages' methods first, once."""
        if not self._searched:
            self._searched = True  # set first, because a module loaded here may look up a method
            try:
                importlib.import_module(_OWN)
                for entry in entry_points(group=ENTRY_POINTS):
                    method = entry.load()
                    self.add(method)
                    self.installed.add(method.name)
            except BaseException:
                self._searched = False  # so that every lookup raises the error, not only the first
                raise
        return self._methods

    def __getitem__(self, name: str) -> Method:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


_registry = _Registry()
METHODS: Mapping[str, Method] = _registry
"""All registered methods by name, in the order of their registration."""


def register(method: Method) -> Method:
    """Register a method under its name and return it.

    Registering an equal method again changes nothing, so that a module may be imported twice.

    Raises:
      ConfigError: `method` is no `Method`, or another method has the name.
    """
    importlib.import_module(_OWN)  # first, so that this package's names are taken
    _registry.add(method)
    return method


def register_installed(method: Method) -> None:
    """Register a method of this package, which every process finds without a call of `register`."""
    _registry.add(method)
    _registry.installed.add(method.name)


def is_installed(name: str) -> bool:
    """Return whether a method belongs to this or an installed package; False if a program registered it.

    >>> is_installed("dp_gcl")
    True
    """
    return name in METHODS and name in _registry.installed


def method_named(name: str) -> Method:
    """Return the method of this name.

    Raises:
      ConfigError: no method has this name; the message lists the names.

    >>> method_named("dp_gcl").sensitivity_formula
    'C'
    >>> method_named("dp_gcl").with_sampling("records").sensitivity_formula
    '2C (C for groups of one)'
    """
    if name not in METHODS:
        raise ConfigError(unknown_choice("method", name, METHODS))
    return METHODS[name]
