"""Sweeps that can be continued: the record of how they were started, and the command line that resumes them.

The line is complete, for a shell. It names the script, the storage folder if it is not the default, and the
sweep. Its options are in the sweep's folder (`sweeps.service.options.resume_options`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainers.files.storage import default_root

CONFIG_FILE, LOG_FILE = "config.yaml", "log.jsonl"
BEGUN, ENDED = "begun", "ended"


@dataclass(frozen=True, kw_only=True)
class Command:
    """How a sweep was started, as recorded in its plan.

    Attributes:
      name: the sweep's name; if a script runs two sweeps, the name of both.
      words: the words that start the script, without options; none if the user's own program started it.
      options: name of the class of the script's options, by which a script recognises its own sweeps.
      addresses: options that config.yaml omits and that every run of this one sweep needs.
    """

    name: str
    words: tuple[str, ...] = ()
    options: str = ""
    addresses: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ResumableSweep:
    """One sweep in a storage folder.

    Attributes:
      folder: the folder of the sweep; of two that a script runs, the one most recently charged.
      command: how it was started; None if an earlier version started it.
    """

    folder: Path
    command: Command | None

    @property
    def name(self) -> str:
        """The name with which the sweep is continued."""
        return self.folder.name if self.command is None else self.command.name

    @property
    def is_finished(self) -> bool:
        """Whether it ended with all its results: by its release if sealed, or by its log if open."""
        folder = self.folder.parent / self.name
        if (folder / "trusted").is_dir():
            return (folder / "release" / "result.json").exists()
        events = logged_events(folder, ENDED)
        return bool(events) and events[-1].get("text") == "FINISHED"


def resume_line(folder: Path) -> str:
    """Return the command line that continues the sweep in a folder, or the call to make from Python."""
    command = _command_of(folder)
    if command is None:
        return f"--resume --name {shlex.quote(folder.name)}"
    if not command.words:
        return f"the same program, with StorageOptions(name={command.name!r}, resume=True)"
    root = folder.parents[1]
    place = [] if root == default_root() else ["--storage", str(root)]
    return shlex.join([*command.words, *place, "--resume", "--name", command.name])


def resumable_sweeps(root: Path) -> list[ResumableSweep]:
    """Return the sweeps of a storage folder, the most recently charged first."""
    files = [path for path in (root / "sweeps").glob("*/plan.json") if path.is_file()]
    sweeps: dict[str, ResumableSweep] = {}
    for file in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        sweep = ResumableSweep(folder=file.parent, command=_command_of(file.parent))
        sweeps.setdefault(sweep.name, sweep)
    return list(sweeps.values())


def last_status(folder: Path) -> str:
    """Return the status with which an open sweep ended, in MLflow's terms.

    It is "RUNNING" if the sweep was started again since, even if its driver was killed; "" without a log.
    """
    events = logged_events(folder, BEGUN, ENDED)
    if not events:
        return ""
    return "RUNNING" if events[-1]["event"] == BEGUN else str(events[-1].get("text"))


def logged_events(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Return a sweep's log events of these names; an incomplete line of a killed driver is ignored."""
    try:
        lines = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        if any(f'"{name}"' in line for name in names):
            with suppress(ValueError):
                events.append(json.loads(line))
    return [each for each in events if isinstance(each, dict) and each.get("event") in names]


def _command_of(folder: Path) -> Command | None:
    try:
        values = json.loads((folder / "plan.json").read_text())["command"]
        return Command(**{**values, "words": tuple(values["words"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
