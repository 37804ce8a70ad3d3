"""Warm starts: initial weights in place of a random draw, and why these weights must be public.

The guarantee of a training is about its own records. Whatever the first weights are, as long as they are
fixed beforehand and do not depend on those records, the steps after them are the same mechanism, and ε is
the same. The guarantee says nothing about the data that the first weights were made from. So:

- Weights made from **private** records carry their own ε into the training. They are rejected unless a ledger
  adds up both: a training may start from a model that was charged to a data set in a ledger if the training
  is charged to the same data set. A privacy filter holds for everything that is charged to it, even if each
  training is chosen after seeing the models of earlier trainings (docs/theory/ledger.md), so the ledger's
  (ε, δ) covers both. The ε of the second training is its own: it holds for every fixed start, and does not
  count the start.
- A model that was exported from public or synthetic data is accepted.
- A file that does not state its data is assumed to be public on the user's word, and the privacy statement
  says so.
- Weights that were made here from generated records (`trainers.training.public_start`) come from no record.

A file that `trainers.export.trial` wrote states whose data it comes from, even after it is copied elsewhere,
and so does a privacy statement next to it.

A warm start is identified by the hash of its file. The hash enters a trial's configuration, and every worker
checks it while loading. All machines must see the file at the same path.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from dpgcl_core.errors import ConfigError, LedgerError, StorageError
from dpgcl_core.ledger.chain import Head
from dpgcl_core.release.statement import RESEARCH
from trainers.config.networks import PrivateStart, WarmStart
from trainers.config.training import TrainingConfig
from trainers.export.description import DESCRIPTION, WEIGHTS, read_description, read_model_weights
from trainers.export.export_folder import STATEMENT
from trainers.files.weights import read_note, read_weights
from trainers.models.clip.published_models import WEIGHTS_FILE
from trainers.models.encoder import ImageShape
from trainers.models.initial_encoder import head_width, is_classifier
from trainers.models.task_networks import AnyEncoder
from trainers.tasks.task import task_of
from trainers.training.public_start import Recipe, public_start


def read_warm_start(path: Path, *, charged_to: str | None = None) -> WarmStart:
    """Return the warm start at a path, with the hash of its weights.

    Args:
      path: a folder that `python -m trainers.export` wrote, or a file with a state dictionary of the same
        network (or of only its backbone): `.safetensors`, or written by `torch.save`.
      charged_to: the data set's id in the ledger that the training is charged to; None without a ledger.

    Raises:
      ConfigError: nothing is at the path, or the weights come from private data that are charged elsewhere.
      StorageError: the folder or the file is damaged.
    """
    path = path.expanduser().absolute()
    if path.is_dir():
        path = next(
            (path / name for name in (WEIGHTS, WEIGHTS_FILE) if (path / name).exists()), path / WEIGHTS
        )
    elif not path.is_file():
        raise ConfigError(
            f"warm_start must be the folder of an exported model or a file of weights; {path} does not exist"
        )
    private = _private_start(path, charged_to)
    if path.name in (WEIGHTS, WEIGHTS_FILE) and (path.parent / DESCRIPTION).exists():
        description = read_description(path.parent)
        if path.name != description.weights_file:
            raise StorageError(
                f"the weights in {path.parent} must be {description.weights_file}; got {path.name}"
            )
        read_model_weights(path.parent, description)
        data = f"public {description.dataset}"
        if private is not None:
            data = f"private {description.dataset}, charged to the same data set of the same ledger"
        origin = f"the exported model of sweep {description.sweep}, trained on {data}"
    else:
        origin = "weights that are assumed to be public on the word of the user who supplied them"
    weights = read_weights(path)
    return WarmStart(
        path=str(path),
        sha256=weights.sha256,
        embedding_dim=head_width(weights.tensors),
        origin=origin,
        classifies=is_classifier(weights.tensors),
        private=private,
    )


def made_warm_start(recipe: Recipe) -> WarmStart:
    """Return the weights of a recipe as a warm start, from the cache or made now.

    Raises:
      ConfigError: the weights cannot be made for these images.
      StorageError: the cache cannot be written.
    """
    origin = f"{recipe.num_steps} steps without privacy on {recipe.made_of}"
    return dataclasses.replace(read_warm_start(public_start(recipe)), origin=origin, from_records=False)


def _private_start(path: Path, charged_to: str | None) -> PrivateStart | None:
    """Return the ledger charge of weights made from private data; None for public weights.

    The weights, or the files next to them, state whose data made them.

    Raises:
      ConfigError: the weights come from private data, and are not charged to the same data set.
    """
    place = path.resolve().parent
    beside = (place / DESCRIPTION, place / f"{STATEMENT}.json")
    data_labels = [_data_of(file.read_text(encoding="utf-8")) for file in beside if file.is_file()]
    note = read_note(path)  # by the given name: the target of a link may have no suffix
    data_labels += [] if note is None else [_data_of(note)]
    if all(data == RESEARCH for data in data_labels):
        return None
    start = None if charged_to is None else _charged_model(path, charged_to)
    if start is None:
        ledger_text = "no ledger" if charged_to is None else f"data set {charged_to!r} of a ledger"
        raise ConfigError(
            f"a training must start from public or synthetic weights, but {path} comes from private data. "
            "Its ε would have to be added to this training's ε. Train from scratch, use public weights, or "
            "charge both trainings to one data set of one ledger and pass the exported model's whole folder. "
            f"This training is charged to {ledger_text}."
        )
    return start


def _charged_model(path: Path, charged_to: str) -> PrivateStart | None:
    """Return the charge of an exported model to a data set; None if its statement does not state this charge.

    The statement is about the model's own file, whose hash is in the description: another file in the folder
    may hold a model that nobody charged.
    """
    try:
        description = read_description(path.parent)
        if path.name != description.weights_file:
            return None
        statement = json.loads((path.parent / f"{STATEMENT}.json").read_text(encoding="utf-8"))
        ledger = statement["ledger"]
        same = statement["model"]["sha256"] == description.sha256 and ledger["dataset_id"] == charged_to
        return PrivateStart(sweep=description.sweep, head=Head.from_facts(ledger["head"])) if same else None
    except (OSError, ValueError, KeyError, TypeError, StorageError, LedgerError):
        return None


def _data_of(text: str) -> str:
    """Return the data label of a description or a statement; "" counts as private."""
    try:
        values = json.loads(text)
    except ValueError:
        return ""
    return str(values.get("data")) if isinstance(values, dict) else ""


def starting_encoder(config: TrainingConfig, image_shape: ImageShape) -> AnyEncoder:
    """Return the encoder before step 0, on the CPU: a random draw from the public seed, or the warm start.

    The whole backbone of a warm start is taken, and also its projection head, if it has one with this
    training's `embedding_dim`. If the head is missing or has another width, the fresh head is kept. A
    method's predictor is a part of its loss, and always starts fresh. All weights of a CLIP model are taken,
    and adapters start fresh.

    Args:
      config: the training's configuration.
      image_shape: (channels, height, width).

    Raises:
      ConfigError: the weights do not fit, are not finite, or have changed since the training was planned;
        or as in `build_encoder`.
      StorageError: the file cannot be read on this machine.
    """
    start_tensors = None if config.warm_start is None else _read_planned(config.warm_start)
    encoder: AnyEncoder = task_of(config).build(config, image_shape, start_tensors)
    return encoder


def _read_planned(start: WarmStart) -> Mapping[str, Tensor]:
    """Return a warm start's tensors, from the same file that the training was planned with."""
    weights = read_weights(Path(start.path))
    if weights.sha256 != start.sha256:
        raise ConfigError(
            f"the warm start {start.path} must be the file that the training was planned with, sha256 "
            f"{start.sha256}; got {weights.sha256}. Restore the file where all machines see it."
        )
    return weights.tensors


def warm_start_note(config: TrainingConfig) -> str | None:
    """Return the privacy statement's note on a warm start; None without a warm start."""
    start, task = config.warm_start, task_of(config)
    if start is None:
        return task.start_note(config) or None
    fresh = task.fresh_parts(config)
    head = f"; {fresh} starts fresh" if fresh else ""
    return f"Warm start: from {start.origin} (sha256 {start.sha256}){head}. {_data_sentence(start)}"


def _data_sentence(start: WarmStart) -> str:
    if start.private is not None:
        return (
            f"The ε of this sweep does not include the ε of sweep {start.private.sweep}, which used the same "
            "records. The ledger's (ε, δ) covers both."
        )
    if start.from_records:
        return (
            "The guarantee covers this sweep's training data, and not the data that those weights were "
            "trained on."
        )
    return "Neither those images nor those weights come from any record, so they cost no ε."
