"""The folder of an exported model: weights, what they are, and what they promise.

    model.safetensors          the weights of an encoder of images
    model.json                 a `ModelDescription`: network, input, training, ε, and the hash of the weights
    privacy_statement.json     the sweep's statement, with a first entry on this model
    privacy_statement.md       the same as a page
    README.md                  the model card: what the statement says of this model, and how it is used

Of a CLIP model, in place of `model.safetensors`, what open_clip and peft read by themselves
(`trainers.models.clip.clip_files`):

    open_clip_model.safetensors    both towers, the adapters merged into them
    open_clip_config.json          what open_clip builds them from
    merges.txt.gz, tokenizer*.json of a vocabulary smaller than CLIP's
    adapter/                       the adapters alone, where the training had some

Nothing that lies in such a folder is run: weights are plain tensors, and a network of the user's own,
which is imported by name, must be named again by whoever loads it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from dpgcl_core.errors import ConfigError, StorageError
from trainers.export.card import model_card
from trainers.export.description import ModelDescription, as_json, read_description, write_description
from trainers.export.kinds import CAPTIONERS, CLASSIFIERS, CLIP_MODELS, KINDS, ModelKind, NetworkT
from trainers.models.captioner import Captioner
from trainers.models.classifier import Classifier
from trainers.models.clip.clip_encoder import ImageTextEncoder
from trainers.models.encoder import Encoder
from trainers.models.masked import MaskedAutoEncoder

STATEMENT, CARD = "privacy_statement", "README.md"

ImageNetwork: TypeAlias = Encoder | MaskedAutoEncoder | Captioner | Classifier
"""What makes features of images alone."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A sweep's privacy statement as it was written: JSON values and page."""

    values: Mapping[str, Any]
    page: str


def write_model(
    folder: Path, description: ModelDescription, state: Mapping[str, Tensor], statement: Statement
) -> ModelDescription:
    """Write the folder, whole or not at all, and return the description with the hash of the weights.

    Args:
      folder: a new one.
      description: of the model.
      state: its weights as the training left them; of a CLIP model with the adapters apart.
      statement: of its sweep.

    Raises:
      StorageError: the folder exists, or cannot be written, or the weights are of another model.
      ConfigError: the CLIP model cannot be built here.
    """
    if folder.exists():
        raise StorageError(f"an exported model is never overwritten, and {folder} exists: give another --to")
    building = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        building.mkdir(parents=True)
        # Every file keeps saying whose data it comes from, even when it is copied away from this folder.
        note = json.dumps({"data": description.data, "promise": description.promise}, ensure_ascii=False)
        description = KINDS[description.kind].write_weights(building, description, state, note)
        write_description(building, description)
        about = {name: getattr(description, name) for name in ("promise", "trial", "sha256")}
        usage = KINDS[description.kind].usage(Path("FOLDER"), description)
        texts = {
            f"{STATEMENT}.json": as_json({"model": about} | dict(statement.values)),
            f"{STATEMENT}.md": f"**{description.promise}**\n\n{statement.page}",
            CARD: model_card(description, usage),
        }
        for name, text in texts.items():
            (building / name).write_text(text, encoding="utf-8")
        building.rename(folder)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return description


def load_encoder(
    folder: Path | str, *, own_network: str | None = None
) -> tuple[ImageNetwork, ModelDescription]:
    """Return an exported encoder of images on the CPU, in evaluation mode, and what it is.

    Args:
      folder: as `python -m trainers.export` wrote it.
      own_network: the `package.module:factory` that the folder may name; to import what a file names,
        without being told to, would run code of the file's choice.

    Raises:
      StorageError: the folder is none, damaged, or its weights do not fit its network.
      ConfigError: it holds a CLIP model, or names a network of the user's own that was not given, or that
        cannot be built.
    """
    description = read_description(folder)
    if description.kind == CLIP_MODELS.name:
        raise ConfigError(
            f"the model in {folder} must be an encoder of images; got a CLIP model, which "
            "trainers.export.export_folder.load_clip loads"
        )
    return KINDS[description.kind].open(Path(folder), description, own_network=own_network), description


def load_clip(folder: Path | str) -> tuple[ImageTextEncoder, ModelDescription]:
    """Return an exported CLIP model on the CPU, in evaluation mode and frozen, and what it is.

    Args:
      folder: as `python -m trainers.export` wrote it.

    Raises:
      StorageError: the folder is none, damaged, or its weights do not fit its model.
      ConfigError: it holds an encoder of images, or the model cannot be built.
    """
    return _load_kind(CLIP_MODELS, folder, "a CLIP model, which embeds texts, too")


def load_captioner(folder: Path | str) -> tuple[Captioner, ModelDescription]:
    """Return an exported captioner on the CPU, in evaluation mode, and what it is.

    Args:
      folder: as `python -m trainers.export` wrote it.

    Raises:
      StorageError: the folder is none, damaged, or its weights do not fit its network.
      ConfigError: it holds a model of another kind.
    """
    return _load_kind(CAPTIONERS, folder, "a captioner, which dp_cap trains")


def load_classifier(
    folder: Path | str, *, own_network: str | None = None
) -> tuple[Classifier, ModelDescription]:
    """Return an exported classifier on the CPU, in evaluation mode, and what it is.

    Args:
      folder: as `python -m trainers.export` wrote it.
      own_network: as of `load_encoder`.

    Raises:
      StorageError: the folder is none, damaged, or its weights do not fit its network.
      ConfigError: it holds a model of another kind, or as `load_encoder`.
    """
    return _load_kind(CLASSIFIERS, folder, "a classifier, which dp_classifier trains", own_network)


def _load_kind(
    kind: ModelKind[NetworkT], folder: Path | str, title: str, own_network: str | None = None
) -> tuple[NetworkT, ModelDescription]:
    description = read_description(folder)
    if description.kind != kind.name:
        raise ConfigError(f"the model in {folder} must be {title}; got one of kind {description.kind}")
    return kind.open(Path(folder), description, own_network=own_network), description
