"""A sweep's results on disk, read for export: its trials, their weights, and the statement about them.

Only `release/` of a sealed sweep is read. The content of its `trusted/`, including other trials and their
number, is not covered by the published ε and must not leave.

An open sweep's statement exists only while it is true: the driver removes it before further draws.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dpgcl_core.errors import ConfigError, StorageError, require_choice
from trainers.export.export_folder import STATEMENT, Statement
from trainers.files.checkpoint import Checkpoint, CheckpointFolder, read_grant
from trainers.files.launch_record import resume_line
from trainers.files.weights import read_weights

PUBLISHED = "model.safetensors"
"""The weights that a sealed sweep publishes, in its folder `release/`."""
ANSWER = "answer.json"
"""File of a sweep's answer (the settings that it recommends, and why), next to its statement."""
_PREDICTOR = "predictor."  # in methods that regress onto a target: a part of the loss, not of the model


@dataclass(frozen=True, kw_only=True)
class FinishedTrial:
    """One trained model.

    Attributes:
      name: the trial's name; None in a sealed sweep, where it would disclose the trial's position.
      params: its settings, as MLflow shows them.
      metrics: its final metrics that may be released.
      attempts_lost: whether lost attempts at it may have drawn steps that its own ε does not include.
      doubt: a warning that the setting's gain over the network before training is not distinguishable; None
        if it is, or if the sweep has no answer.
      file: the checkpoint, or the published weights.
    """

    name: str | None
    params: Mapping[str, Any]
    metrics: Mapping[str, float]
    attempts_lost: bool
    file: Path
    doubt: str | None = None

    def state(self) -> Mapping[str, Tensor]:
        """Return the weights that were scored and released: the average, if the training keeps one.

        Raises:
          ConfigError: the model was never trained.
          StorageError: the weights are missing, damaged, or not the finished training's weights.
        """
        weights = read_weights(self.file).tensors if self.name is None else self._checkpointed_weights()
        return {name: value for name, value in weights.items() if not name.startswith(_PREDICTOR)}

    @property
    def is_averaged(self) -> bool:
        """Whether the weights are the average over the steps."""
        return bool(self.params.get("ema_decay"))

    def _checkpointed_weights(self) -> dict[str, Tensor]:
        if self.metrics["num_steps_done"] == 0:
            raise ConfigError(
                f"{self.name} is the untrained network, so there is nothing to export. Choose another trial."
            )
        remedy = "Restore it; otherwise the training must be repeated, and charged, in another sweep."
        if not self.file.is_file():
            raise StorageError(f"{self.file} is missing. {remedy}")
        checkpoint = CheckpointFolder(self.file.parent, every_steps=1).load()
        if checkpoint is None or checkpoint.step != self.metrics["num_steps_done"]:
            raise StorageError(
                f"{self.file} must hold the weights after step {self.metrics['num_steps_done']:g}; got step "
                f"{checkpoint.step if checkpoint else 'none'}. {remedy}"
            )
        return released_state(checkpoint, averaged=self.is_averaged)


def released_state(checkpoint: Checkpoint, *, averaged: bool) -> dict[str, Tensor]:
    """Return the weights that were scored: the moving average if `averaged` (`ema_decay` > 0), else the last.

    A method may keep an average as its regression target; that average is not released in place of the
    weights.

    Raises:
      StorageError: there should be an average, but there is none.
    """
    if not averaged:
        return checkpoint.model
    if checkpoint.average is None:
        raise StorageError(
            f"the checkpoint after step {checkpoint.step} must hold the average of the weights, which was "
            "scored; got none. Restore the checkpoint."
        )
    return checkpoint.model | checkpoint.average


@dataclass(frozen=True, kw_only=True)
class TakenSetting:
    """A setting that a sweep's answer recommends.

    Attributes:
      name: the name for readers, for example "S = 8".
      score: the metric that decides the answer.
      trials: names of its trainings, one per repeat.
    """

    name: str
    score: str
    trials: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FinishedSweep:
    """A sweep with a statement.

    Attributes:
      name: the sweep's name.
      is_sealed: whether only one model was published.
      statement: its privacy statement.
      trials: its exportable trainings, in the order of their names.
      choices: the settings that its answer recommends, one for each ε; empty without an answer.
    """

    name: str
    is_sealed: bool
    statement: Statement
    trials: tuple[FinishedTrial, ...]
    choices: tuple[TakenSetting, ...] = ()


def read_sweep(root: Path, name: str) -> FinishedSweep:
    """Return the results of sweep `name` in the storage folder `root`.

    Raises:
      StorageError: there is no sweep of this name, it is unfinished, or it published nothing.
    """
    names = sorted(plan.parent.name for plan in (root / "sweeps").glob("*/plan.json"))
    if not names:
        raise StorageError(f"there are no sweeps in {root}. Set --storage to the folder they were run in.")
    require_choice(f"sweep in {root}", name, names, error=StorageError)
    folder = root / "sweeps" / name
    is_sealed = (folder / "trusted").is_dir()
    results_folder = folder / "release" if is_sealed else folder
    statement, (doubts, choices) = _read_statement(results_folder, folder), _read_answer(results_folder)
    trials = (_published_trial(results_folder, doubts),) if is_sealed else _open_trials(folder, doubts)
    choices = () if is_sealed else choices
    return FinishedSweep(name=name, is_sealed=is_sealed, statement=statement, trials=trials, choices=choices)


def _read_statement(results_folder: Path, folder: Path) -> Statement:
    page, values = results_folder / f"{STATEMENT}.md", results_folder / f"{STATEMENT}.json"
    try:
        return Statement(values=json.loads(values.read_text(encoding="utf-8")), page=page.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(
            f"a model is exported only with its sweep's privacy statement; {values} is missing or damaged. "
            f"The sweep is unfinished or was stopped. Finish it: {resume_line(folder)}"
        ) from error


def _open_trials(folder: Path, doubts: Mapping[str, str]) -> tuple[FinishedTrial, ...]:
    """Return an open sweep's finished trials, in the order of their names."""
    trials = []
    for file in sorted((folder / "trials").glob("*.json")):
        result = _read_result(file)
        checkpoints = folder / "checkpoints" / file.stem
        grant = read_grant(checkpoints)
        started = folder / "started" / file.name
        num_lost = _read_result(started).get("num_lost", 0) if started.is_file() else 0
        trials.append(
            FinishedTrial(
                name=file.stem,
                params=_params(result, file),
                metrics=result["metrics"],
                attempts_lost=num_lost > 0 or (grant is not None and grant.num_steps_lost > 0),
                file=checkpoints / "checkpoint.pt",
                doubt=doubts.get(file.stem),
            )
        )
    if not trials:
        raise StorageError(
            f"no training of {folder.name} has finished. Continue the sweep: {resume_line(folder)}"
        )
    return tuple(trials)


def _published_trial(release: Path, doubts: Mapping[str, str]) -> FinishedTrial:
    """Return the one model that a sealed sweep published."""
    file, weights = release / "result.json", release / PUBLISHED
    result = _read_result(file)
    if result.get("outcome") != "one model" or not weights.is_file():
        raise StorageError(f"the sealed sweep published no model, so {release} has nothing to export")
    return FinishedTrial(
        name=None,
        params=_params(result, file),
        metrics=result["metrics"],
        attempts_lost=False,
        file=weights,
        doubt=next(iter(doubts.values()), None),
    )


def _read_answer(results_folder: Path) -> tuple[Mapping[str, str], tuple[TakenSetting, ...]]:
    """Return the doubts of the sweep's answer by trial name, and the settings that the answer recommends.

    A sealed sweep's model has the name "". Both results are empty if the answer is missing, damaged or of
    another version.
    """
    doubts, choices = dict[str, str](), list[TakenSetting]()
    try:
        answer = json.loads((results_folder / ANSWER).read_text(encoding="utf-8"))
        for choice in answer["choices"]:
            for setting in choice["settings"]:
                name, comparison = setting["name"], setting["over_start"]
                trials = tuple(map(str, setting["trials"]))
                if comparison is not None and comparison["verdict"] != "higher":
                    doubt = (
                        f"{name} is not distinguishable above {comparison['minus']} "
                        f"({100 * comparison['mean']:+.2f} points in the sweep's answer): it may have "
                        "learned nothing from the data"
                    )
                    doubts |= dict.fromkeys(trials or [""], doubt)
                if name == choice["take"]:
                    choices.append(TakenSetting(name=name, score=str(answer["score"]), trials=trials))
    except (OSError, ValueError, KeyError, TypeError):
        return {}, ()
    return doubts, tuple(choices)


def _read_result(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        result = None
    if not isinstance(result, dict):
        raise StorageError(f"{file} is missing or damaged; restore it")
    return result


def _params(result: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    params = result.get("params")
    if not isinstance(params, Mapping) or "image_shape" not in params:
        raise StorageError(
            f"{file} does not record the network and its input, because an earlier version wrote it. "
            "To export models of this sweep, run it again under another --name."
        )
    return params
