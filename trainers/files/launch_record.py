"""Sweeps that can be continued: what their folders keep of how they were started, and the line that goes on.

The line is whole, for a shell: it names the script, the storage folder where it is not the default, and the
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

CONFIG_FILE = "config.yaml"
_BEGUN, _ENDED = "begun", "ended"
_RUNNING, _WELL = "RUNNING", "FINISHED"


@dataclass(frozen=True, kw_only=True)
class Command:
    """How a sweep was started, as its plan keeps it.

    Attributes:
      name: of the sweep; where a script runs two, of both.
      words: what starts the script, without options; none where a program of the user's started it.
      options: the class of its options, by which a script knows its own sweeps.
      addresses: options that config.yaml leaves out, and that every run of this one sweep needs.
    """

    name: str
    words: tuple[str, ...] = ()
    options: str = ""
    addresses: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ResumableSweep:
    """One sweep in a storage folder.

    Attributes:
      folder: of the sweep, or of the first of two.
      command: how it was started; None of an earlier version.
      is_finished: whether it ended with all its results.
    """

    folder: Path
    command: Command | None
    is_finished: bool

    @property
    def name(self) -> str:
        """The name that it is continued by."""
        return self.folder.name if self.command is None else self.command.name


def resume_line(folder: Path) -> str:
    """Return the command that continues the sweep in a folder."""
    command = _command_of(folder)
    if command is None:
        return f"--resume --name {shlex.quote(folder.name)}"
    if not command.words:
        return f"the same program, with StorageOptions(name={command.name!r}, resume=True)"
    root = folder.parents[1]
    place = [] if root == default_root() else ["--storage", str(root)]
    return shlex.join([*command.words, *place, "--resume", "--name", command.name])


def resumable_sweeps(root: Path) -> list[ResumableSweep]:
    """Return the sweeps of a storage folder, the one that was charged last first."""
    files = [path for path in (root / "sweeps").glob("*/plan.json") if path.is_file()]
    sweeps: dict[str, ResumableSweep] = {}
    for file in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        folder, command = file.parent, _command_of(file.parent)
        name = folder.name if command is None else command.name
        is_finished = _has_finished(root / "sweeps" / name)
        sweeps.setdefault(name, ResumableSweep(folder=folder, command=command, is_finished=is_finished))
    return list(sweeps.values())


def last_status(folder: Path) -> str:
    """Return how an open sweep ended, in MLflow's words.

    "RUNNING" where it has begun since, also of a driver that was killed; "" without a log.
    """
    events = _events(folder, _BEGUN, _ENDED)
    if not events:
        return ""
    return _RUNNING if events[-1]["event"] == _BEGUN else str(events[-1].get("text"))


def _has_finished(folder: Path) -> bool:
    """Whether a sweep has ended well: a sealed one in its release, an open one by its log."""
    if (folder / "trusted").is_dir():
        return (folder / "release" / "result.json").exists()
    events = _events(folder, _ENDED)
    return bool(events) and events[-1].get("text") == _WELL


def _events(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Return the events of these names in a sweep's log; half a line, of a killed driver, is no event."""
    try:
        lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
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
