"""Folders of open sweeps and the progress of their trainings; folders of sealed sweeps are skipped."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dashboards.report.write import REPORT
from trainers.files.launch_record import last_status
from trainers.files.progress import PROGRESS_FILE, Progress, read_progress

RUNNING = "running"
_STATUS = {"RUNNING": RUNNING, "FINISHED": "finished", "FAILED": "incomplete", "KILLED": "stopped"}
_SEALED_SWEEP_FOLDERS = ("trusted", "release")


@dataclass(frozen=True)
class OpenFolder:
    """The folder of one open sweep.

    Attributes:
      path: path of the folder.
      plan: content of its `plan.json`.
    """

    path: Path
    plan: dict[str, Any]

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.path.name

    @property
    def identity(self) -> str:
        """A value that distinguishes the sweep from a later sweep of the same name."""
        return str(self.plan.get("sweep_id", self.name))

    @cached_property
    def status(self) -> str:
        """The sweep's status: running, finished, incomplete or stopped; unknown without a log."""
        return _STATUS.get(last_status(self.path), "unknown")

    @property
    def subject(self) -> str:
        """The sweep's question and data set."""
        params = self.plan["params"]
        return " on ".join(str(params[name]) for name in ("question", "dataset") if name in params)

    @property
    def num_trials(self) -> int | None:
        """The number of the sweep's trials; None if it is not in the plan."""
        number = self.plan["params"]["num_trials"]
        return number if isinstance(number, int) and number > 0 else None

    @property
    def data_are_public(self) -> bool:
        """Whether the plan marks the data as public; plans of earlier versions have no such mark."""
        return self.plan.get("data_is") == "public"

    @property
    def start_seconds(self) -> float:
        """When the sweep's `config.yaml` was written, in seconds since the epoch; 0 without one."""
        file = self.path / "config.yaml"
        return file.stat().st_mtime if file.exists() else 0.0

    @property
    def report(self) -> Path | None:
        """The sweep's report; None without a report."""
        path = self.path / REPORT
        return path if path.is_file() and not path.is_symlink() else None

    def find_finished_trials(self) -> set[str]:
        """Return the names of the trials with a result."""
        return {file.stem for file in (self.path / "trials").glob("*.json")}

    def progress(self, finished_trials: Collection[str]) -> dict[str, Progress]:
        """Return the progress of each trial that has begun, except the finished ones, by trial name."""
        files = [file for file in self._files() if file.parent.name not in finished_trials]
        progress_by_trial = {file.parent.name: read_progress(file) for file in files}
        return {name: progress for name, progress in progress_by_trial.items() if progress is not None}

    @property
    def last_sign(self) -> float:
        """When a training last recorded a step or ended, in seconds since the epoch; 0 before the first."""
        times = [path.stat().st_mtime for path in (*self._files(), self.path / "trials") if path.exists()]
        return max(times, default=0.0)

    def _files(self) -> list[Path]:
        return list((self.path / "checkpoints").glob(f"*/{PROGRESS_FILE}"))


def open_folders(root: Path) -> list[OpenFolder]:
    """Return the folders of all open sweeps in a storage folder."""
    files = sorted((root / "sweeps").glob("*/plan.json"))
    folders = [OpenFolder(file.parent, _read_plan(file)) for file in files]
    return [folder for folder in folders if not _is_sealed(folder)]


def _is_sealed(folder: OpenFolder) -> bool:
    """Whether a folder belongs or might belong to a sealed sweep, by its plan or by its content."""
    params, publication = folder.plan["params"], folder.plan.get("publication")
    is_open = "num_trials" in params and "num_candidates" not in params and publication is None
    return not is_open or any((folder.path / name).exists() for name in _SEALED_SWEEP_FOLDERS)


def _read_plan(file: Path) -> dict[str, Any]:
    """Return a plan with its params; an empty plan if the file is damaged."""
    try:
        plan = json.loads(file.read_text())
    except (OSError, ValueError):
        plan = {}
    is_whole = isinstance(plan, dict) and isinstance(plan.get("params"), dict)
    return plan if is_whole else {"params": {}}
