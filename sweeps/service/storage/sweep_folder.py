"""The folder with a sweep's durable files.

Everything is under one absolute storage folder:

    mlflow.db, mlartifacts/      the embedded tracking store
    calibration/                 calibrated noise multipliers (verified again when used)
    sweeps/NAME/config.yaml      the options that repeat the sweep, for --config
    sweeps/NAME/plan.json        the configuration this folder belongs to, whether its data are public, its
                                 id, its account in a ledger, the head of that ledger after the last charge,
                                 and the command that started it
    sweeps/NAME/charged.json     what an open sweep's cost depends on: the configurations of its planned
                                 trials, and the sweeps that a search started from, as they were then
    sweeps/NAME/trials/*.json    one file per finished trial: the results that a resume relies on
    sweeps/NAME/checkpoints/     one folder per trial; in an open sweep its progress.json has the steps done.
                                 outcomes.npz has each public record's contribution to the scores
    sweeps/NAME/drawn/*.json     the steps of each trial, counted before they are drawn; separate from the
                                 checkpoints, so that restoring old checkpoints does not restore an old count
    sweeps/NAME/started/*.json   the number of starts of each trial, to notice a missing count of steps
    sweeps/NAME/log.jsonl        the events of an open sweep's trials, for its operator
    sweeps/NAME/*.png *.csv …    the figure and its table; report.html, the report
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from dpgcl_core.attempts import DrawCounts
from dpgcl_core.durable_files import make_folder, replacing, storage_errors, sync_folder
from dpgcl_core.errors import StorageError
from trainers.config.nodes import PerformanceConfig
from trainers.config.training import TrainingConfig
from trainers.files.checkpoint import CheckpointFolder, read_drawn, write_drawn
from trainers.files.launch_record import CONFIG_FILE, Command
from trainers.files.outcome_file import Outcomes, read_outcomes
from trainers.files.progress import PROGRESS_FILE

LAYOUT = 5
"""The layout version of a sweep's folder; a folder of another layout is not continued."""
_TRACES = ("trials", "checkpoints", "drawn", "started", "trusted", "release", "suggested")

_FIGURE_SUFFIXES = (".png", ".svg", ".pdf", ".html", ".csv", ".md", ".tex")


def is_drawn(name: str) -> bool:
    """Return whether a file at the top of a sweep's folder is a figure, a page or a table.

    >>> is_drawn("group_size.png"), is_drawn("trials/S4-r0.csv"), is_drawn(".group_size.png.part")
    (True, False, False)
    """
    return Path(name).suffix in _FIGURE_SUFFIXES and "/" not in name and not name.startswith(".")


@dataclass(frozen=True, kw_only=True)
class Starts:
    """A trial's number of starts, as the driver counts them.

    Attributes:
      num_starts: the number of processes that were permitted to train.
      num_lost: the number of starts without a count of steps; each may have drawn all steps.
    """

    num_starts: int = 0
    num_lost: int = 0


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """The options that repeat a sweep, and the command that continues it.

    Attributes:
      options: the content of `config.yaml`.
      command: how the sweep was started, which gives the command that continues it.
    """

    options: str
    command: Command


@dataclass(frozen=True)
class SweepFolder:
    """The folder of one sweep."""

    path: Path

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.path.name

    @property
    def root(self) -> Path:
        """The storage folder that contains it."""
        return self.path.parents[1]

    def create(self, plan: Mapping[str, Any], repetition: Repetition | None = None) -> None:
        """Create the folder with its plan.

        Args:
          plan: the content of `plan.json`; its `fingerprint`, of the configuration, must match on a resume.
          repetition: options and command that repeat and continue the sweep.
        """
        facts = dict(plan)
        with storage_errors(self.path):
            make_folder(self.path)
            if repetition is not None:
                replace_text(self.path / CONFIG_FILE, repetition.options)
                facts["command"] = asdict(repetition.command)
            write_json(self.path / "plan.json", {**facts, "layout": LAYOUT})

    def read_plan(self) -> dict[str, Any] | None:
        """Return the plan, or None if there is no plan.

        Raises:
          StorageError: the plan is damaged.
        """
        path = self.path / "plan.json"
        try:
            plan = json.loads(path.read_text()) if path.is_file() else None
        except ValueError:
            plan = "damaged"
        if plan is not None and not isinstance(plan, dict):
            raise StorageError(f"{path} is damaged; choose another sweep name")
        return plan

    def keep_head(self, head: Mapping[str, Any]) -> None:
        """Store the head of the ledger's hash chain in the plan, durably, unless the plan has it already."""
        plan = self.read_plan() or {}
        if plan.get("head") != head:
            with storage_errors(self.path):
                write_json(self.path / "plan.json", {**plan, "head": dict(head)})

    def checkpoint_folder(self, trial: str) -> Path:
        """Return the folder of a trial's checkpoints."""
        return self.path / "checkpoints" / trial

    def progress_file(self, trial: str) -> Path:
        """Return the file where a training of an open sweep reports its steps."""
        return self.checkpoint_folder(trial) / PROGRESS_FILE

    def count_file(self, trial: str) -> Path:
        """Return the file where a trial's steps are counted before they are drawn."""
        return self.path / f"drawn/{trial}.json"

    def read_counts(self, trial: str) -> DrawCounts | None:
        """Return the counts of a trial's draws; None if no attempt has begun, or the count is missing.

        Raises:
          StorageError: the count is damaged.
        """
        counts = read_drawn(self.count_file(trial))
        return counts if counts is not None and counts.num_attempts else None

    def checkpoints(self, trial: str, *, every_steps: int, is_paid: bool = False) -> CheckpointFolder:
        """Return a trial's checkpoints, with the file that counts its steps."""
        return CheckpointFolder(
            self.checkpoint_folder(trial),
            every_steps=every_steps,
            is_paid=is_paid,
            count_file=self.count_file(trial),
        )

    def starts(self, trial: str) -> Starts:
        """Return a trial's number of starts, all of them lost if neither count nor result exists.

        Raises:
          StorageError: the count is damaged.
        """
        path = self._starts_file(trial)
        try:
            starts = Starts(**json.loads(path.read_text())) if path.is_file() else Starts()
        except (ValueError, TypeError) as error:
            raise StorageError(f"{path} is damaged; restore it, or choose another --name") from error
        traces = self.count_file(trial).is_file() or self._result_file(trial).exists()
        return starts if traces else replace(starts, num_lost=starts.num_starts)

    def has_begun(self, trial: str) -> bool:
        """Return whether a trial has started, by either of its counts. Raises as in `starts`."""
        return self.starts(trial).num_starts > 0 or self.read_counts(trial) is not None

    def mark_start(self, trial: str) -> None:
        """Count one more start of a trial, durably, before it can draw a step.

        The file that counts steps is created first. So a process that dies before its first step has drawn
        no step by that file, and if the file is missing later, it was removed.
        """
        starts, path = self.starts(trial), self._starts_file(trial)
        with storage_errors(path):
            if starts.num_starts == 0 and not self.count_file(trial).is_file():
                write_drawn(self.count_file(trial), DrawCounts())
            make_folder(path.parent)
            sync_folder(self.path)
            write_json(path, vars(replace(starts, num_starts=starts.num_starts + 1)))

    def read_results(self, hashes: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
        """Return the results of the finished trials, by name.

        Args:
          hashes: `config_hash` of every trial, by name; None to accept any result.

        Raises:
          StorageError: a result is damaged, or is of another configuration. It is not ignored, because
            running its trial again would hide what the trial has cost.
        """
        names = sorted(file.stem for file in (self.path / "trials").glob("*.json"))
        expected = {name: None if hashes is None else hashes.get(name, "") for name in names}
        results = {name: self.result(name, expected[name]) for name in names}
        return {name: result for name, result in results.items() if result is not None}

    def result(self, trial: str, config_hash: str | None = None) -> dict[str, Any] | None:
        """Return the result of one trial; None if it has none. Raises as in `read_results`."""
        file = self._result_file(trial)
        if not file.is_file():
            return None
        try:
            result: dict[str, Any] = json.loads(file.read_text())
        except ValueError as error:
            raise StorageError(
                f"{file} is damaged; restore it, or delete it to finish that training again"
            ) from error
        if config_hash is not None and result.get("config_hash") != config_hash:
            raise StorageError(
                f"{file} is the result of another configuration; move the folder {self.path} away, or "
                "choose another --name"
            )
        return result

    def keep(self, trial: str, result: dict[str, Any]) -> None:
        """Store a finished trial's result, durably and atomically."""
        with storage_errors(self._result_file(trial)):
            make_folder(self._result_file(trial).parent)
            write_json(self._result_file(trial), result)

    def outcomes(self) -> dict[str, Outcomes]:
        """Return each finished trial's per-record contributions to its scores, by name, if they are stored.

        Raises:
          StorageError: a file of outcomes is damaged.
        """
        names = sorted(file.stem for file in (self.path / "trials").glob("*.json"))
        outcomes_by_name = {name: read_outcomes(self.checkpoint_folder(name)) for name in names}
        return {name: outcomes for name, outcomes in outcomes_by_name.items() if outcomes is not None}

    def _result_file(self, trial: str) -> Path:
        return self.path / f"trials/{trial}.json"

    def _starts_file(self, trial: str) -> Path:
        return self.path / f"started/{trial}.json"


def find_folder(
    root: Path,
    *,
    name: str | None,
    fingerprint: str,
    resume: bool,
    prefix: str,
    params: Mapping[str, Any] | None = None,
) -> SweepFolder:
    """Return the folder for a new sweep, or of the sweep to resume; write nothing.

    Args:
      root: the storage folder.
      name: the sweep's name; None for a new name.
      fingerprint: the configuration's fingerprint.
      resume: whether to continue the sweep of that name.
      prefix: the name of a new sweep without `name`; a number is appended if it is taken.
      params: the configuration's params, whose differences from the folder's params an error reports.

    Raises:
      StorageError: the name is invalid, or there is nothing to resume; or the folder belongs to another
        configuration, has lost its plan, or exists already without `resume`.
    """
    sweeps = root / "sweeps"
    if name is None:
        if resume:
            raise StorageError(f"nothing to resume: set --name to the name of a sweep in {sweeps}")
        return SweepFolder(sweeps / unused_name(sweeps, prefix))
    folder = named_folder(root, name)
    plan = folder.read_plan()
    if plan is None:
        _check_no_traces(folder)
        if resume:
            raise StorageError(f"nothing to resume: there is no sweep {name!r} in {sweeps}")
        return folder
    if plan.get("layout") != LAYOUT:
        raise StorageError(
            f"the sweep folder {folder.path} has layout {plan.get('layout')}, and this version continues "
            f"only layout {LAYOUT}. Choose another --name. To close its reservations in a ledger, run "
            f"{shlex.join(['python', '-m', 'sweeps.settle', '--name', name, '--storage', str(root)])}"
        )
    if plan.get("fingerprint") != fingerprint:
        raise StorageError(
            f"the sweep folder {folder.path} belongs to another configuration"
            f"{differences_text(plan.get('params'), params)}; "
            "choose another --name, or the options it was started with"
        )
    if not resume:
        raise StorageError(
            f"the sweep {name!r} exists already in {sweeps}; "
            "add --resume to continue it, or choose another --name"
        )
    return folder


def named_folder(root: Path, name: str) -> SweepFolder:
    """Return the folder of the sweep of this name; the folder need not exist.

    Raises:
      StorageError: the name is invalid.
    """
    if not _NAME.fullmatch(name):
        raise StorageError(
            "the name of a sweep names a folder: it must have at most 100 letters, digits and . _ + = -, and "
            f"start with a letter or a digit; got {name!r}"
        )
    return SweepFolder(root / "sweeps" / name)


def _check_no_traces(folder: SweepFolder) -> None:
    """Raise StorageError if a folder without a plan has files of trials, whose settings are unknown."""
    traces = [name for name in _TRACES if (found := folder.path / name).is_dir() and any(found.iterdir())]
    if traces:
        raise StorageError(
            f"the sweep folder {folder.path} has no plan.json, but {' and '.join(traces)} of an earlier "
            "sweep: move it away, or choose another --name"
        )


def config_hash(config: TrainingConfig) -> str:
    """Return a hash of a trial's configuration, without its performance options, for its stored result."""
    values = asdict(config) | {"warm_start": config.warm_start_sha256}
    del values["performance"], values["secure_noise"]  # for private data True and None are the same
    return content_hash(values)


def content_hash(content: Any) -> str:
    """Return a hash of values that JSON holds."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def differences_text(before: Any, now: Mapping[str, Any] | None) -> str:
    """Return the params that differ between two configurations as text, without performance options.

    >>> differences_text({"num_steps": 5, "device": "cpu"}, {"num_steps": 7, "device": "cuda"})
    ' (num_steps was 5, is 7)'
    """
    if not isinstance(before, dict) or now is None:
        return ""
    performance_names = {field.name for field in fields(PerformanceConfig)}
    names = sorted((before.keys() | now.keys()) - performance_names)
    new_params = json.loads(json.dumps(dict(now)))
    pairs = [(name, before.get(name, "varied"), new_params.get(name, "varied")) for name in names]
    changes = [f"{name} was {old}, is {new}" for name, old, new in pairs if old != new]
    return f" ({'; '.join(changes)})" if changes else " (another grid)"


_NAME = re.compile(r"[^\W_][\w.+=-]{0,99}")


def unused_name(sweeps: Path, prefix: str, ends: Sequence[str] = ("",)) -> str:
    """Return a name, `prefix` or with a number, that is free in `sweeps` with each of `ends` appended."""
    name, number = prefix, 2
    while any((sweeps / f"{name}{end}").exists() for end in ends):
        name, number = f"{prefix}-{number}", number + 1
    return name


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file durably and atomically."""
    replace_text(path, json.dumps(content, indent=1, sort_keys=True))


def replace_text(path: Path, text: str) -> None:
    """Replace a file durably and atomically; on failure the old file stays."""
    with replacing(path) as file:
        file.write(text.encode())
