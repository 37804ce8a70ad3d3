"""Listeners of an open sweep: called when it begins, with each result, and when it ends.

A listener gets only the values that the release gate passes: params and visible metrics of finished trials.
Failures, restarts and times of private trainings are only in the trusted log. A sealed sweep calls its
listeners once, after the moment of publication, with the published run.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dashboards.compose.answer import Answer
from dpgcl_core.errors import ConfigError
from dpgcl_core.release.statement import PrivacyStatement
from sweeps.service.console.terminal import warn


@dataclass(frozen=True, kw_only=True)
class SweepBeginning:
    """A sweep that is about to train.

    Attributes:
      name: the sweep's name.
      question: its script's name, for example `group-size`.
      params: the params that all trials share, by name.
      num_trials: the sweep's number of trials.
      num_done: how many of these trials earlier processes have finished.
    """

    name: str
    question: str
    params: Mapping[str, Any]
    num_trials: int
    num_done: int


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """A trial that has finished.

    Attributes:
      name: the trial's name, unique in the sweep.
      params: its params, as MLflow shows them.
      metrics: its metrics that may be released, by the names in `dpgcl_core.release.metrics`.
      num_done: the number of trials that have finished so far.
    """

    name: str
    params: Mapping[str, Any]
    metrics: Mapping[str, float]
    num_done: int


@dataclass(frozen=True, kw_only=True)
class SweepEnd:
    """The end of a sweep.

    Attributes:
      status: `FINISHED`, `FAILED` or `KILLED`, as in MLflow.
      folder: the folder of its results; for a sealed sweep, of the released results.
      is_concluded: whether it ran to its end, and was not ended by a signal or a full disk.
      statement: the privacy statement; None if none was written.
      answer: the sweep's answer (the recommended setting and why); None without scores.
    """

    status: str
    folder: Path
    is_concluded: bool = False
    statement: PrivacyStatement | None = None
    answer: Answer | None = None


class Listener(Protocol):
    """Handles the events of a sweep; sealed sweeps call only `on_end`."""

    def on_begin(self, sweep: SweepBeginning) -> None:
        """Handle the beginning of a sweep, before its first training and after its charge."""

    def on_result(self, result: TrialResult) -> None:
        """Handle a finished trial, whose result is already on disk."""

    def on_end(self, end: SweepEnd) -> None:
        """Handle the end of the sweep, also after a signal or a full disk."""


class Listeners:
    """Calls several listeners, one after the other.

    Args:
      listeners: the listeners, in the order of their calls.
    """

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def on_begin(self, sweep: SweepBeginning) -> None:
        """Call all listeners at the beginning of a sweep."""
        self._call("on_begin", sweep)

    def on_result(self, result: TrialResult) -> None:
        """Call all listeners with a finished trial."""
        self._call("on_result", result)

    def on_end(self, end: SweepEnd) -> None:
        """Call all listeners at the end of the sweep."""
        self._call("on_end", end)

    def _call(self, method: str, event: object) -> None:
        for listener in self._listeners:
            getattr(listener, method)(event)


def own_listener(name: str) -> Listener:
    """Return the user's own listener, guarded so that its exceptions do not end the sweep.

    Args:
      name: `package.module:Class` of a class that has the methods of `Listener` and needs no arguments.

    Raises:
      ConfigError: there is no such class, or it lacks a method.
    """
    try:
        listener = pkgutil.resolve_name(name)()
    except Exception as error:  # the user's module or class may raise anything
        raise ConfigError(
            f"listener {name!r} must name an importable `package.module:Class` that needs no arguments; "
            f"{type(error).__name__}: {error}. Put its folder on PYTHONPATH or install it"
        ) from error
    for method in ("on_begin", "on_result", "on_end"):
        if not callable(getattr(listener, method, None)):
            raise ConfigError(f"listener {name!r} must have the method {method!r}; it has none")
    return GuardedListener(listener)


class GuardedListener(Listeners):
    """The user's own listener: its exceptions become warnings, and the sweep continues."""

    def _call(self, method: str, event: object) -> None:
        try:
            super()._call(method, event)
        except Exception as error:
            name = type(self._listeners[0]).__name__
            warn(f"warning: the listener {name} raised {type(error).__name__}: {error}")
