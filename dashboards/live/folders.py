"""Folders of open sweeps, read for what their trainings tell; those of sealed sweeps are left alone."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainers.files.progress import PROGRESS_FILE, Progress, read_progress

REPORT = "report.html"
_OF_SEALED = ("trusted", "release")


@dataclass(frozen=True)
class Folder:
    """The folder of one open sweep.

    Attributes:
      path: of the folder.
    """

    path: Path

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.path.name

    @cached_property
    def params(self) -> Mapping[str, Any]:
        """The settings in its plan."""
        return _plan(self.path).get("params") or {}

    @property
    def report(self) -> Path | None:
        """Its report; None without one."""
        path = self.path / REPORT
        return path if path.is_file() and not path.is_symlink() else None

    def finished(self) -> set[str]:
        """Return the names of the trials with a result."""
        return {file.stem for file in (self.path / "trials").glob("*.json")}

    def begun(self, finished: Collection[str]) -> dict[str, Progress]:
        """Return how far each trial without a result is, of those that have begun, by name."""
        files = sorted(self._files())
        found = {file.parent.name: read_progress(file) for file in files if file.parent.name not in finished}
        return {name: progress for name, progress in found.items() if progress is not None}

    @property
    def last_sign(self) -> float:
        """When a training last told a step or ended, in seconds since the epoch; 0 where none has."""
        times = [path.stat().st_mtime for path in (*self._files(), self.path / "trials") if path.exists()]
        return max(times, default=0.0)

    def _files(self) -> list[Path]:
        return list((self.path / "checkpoints").glob(f"*/{PROGRESS_FILE}"))


def open_folders(root: Path) -> list[Folder]:
    """Return the folders of all open sweeps in a storage folder."""
    paths = sorted(path.parent for path in (root / "sweeps").glob("*/plan.json"))
    return [Folder(path) for path in paths if not _is_sealed(path)]


def folder_of(root: Path, name: str) -> Folder | None:
    """Return the folder of an open sweep; None where there is none of this name."""
    return next((folder for folder in open_folders(root) if folder.name == name), None)


def _is_sealed(path: Path) -> bool:
    """Whether a folder is of a sealed sweep, or might be: its plan says so, or what lies in it."""
    plan = _plan(path)
    params = plan.get("params") or {}
    is_open = "num_trials" in params and "num_candidates" not in params and plan.get("publication") is None
    return not is_open or any((path / name).exists() for name in _OF_SEALED)


def _plan(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads((path / "plan.json").read_text())
    except (OSError, ValueError):
        return {}
    return plan if isinstance(plan, dict) and isinstance(plan.get("params", {}), dict) else {}
