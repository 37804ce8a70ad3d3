"""The folder of an exported model: its weights, their description, and their guarantee.

    model.safetensors          the weights of an encoder of images
    model.json                 a `ModelDescription`: network, input, training, ε, and the hash of the weights
    privacy_statement.json     the sweep's statement, with a first entry on this model
    privacy_statement.md       the same statement as a page
    README.md                  the model card: the statement on this model, and how to use the model

For a CLIP model, `model.safetensors` is replaced by files that open_clip and peft read directly
(`trainers.models.clip.clip_files`):

    open_clip_model.safetensors    both towers, the adapters merged into them
    open_clip_config.json          the configuration from which open_clip builds them
    merges.txt.gz, tokenizer*.json for a vocabulary smaller than CLIP's
    adapter/                       only the adapters, if the training had any

No content of such a folder is run as code. Weights are plain tensors. The user's own network is imported by
name, and the user who loads the model must give this name again.
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
"""A network that computes features from images alone."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A sweep's privacy statement as the sweep wrote it: its JSON values and its Markdown page."""

    values: Mapping[str, Any]
    page: str


def write_model(
    folder: Path, description: ModelDescription, state: Mapping[str, Tensor], statement: Statement
) -> ModelDescription:
    """Write the folder atomically, and return the description with the hash of the weights.

    Args:
      folder: a folder that does not exist yet.
      description: the model's description.
      state: the weights at the end of the training; for a CLIP model, with separate adapters.
      statement: the sweep's statement.

    Raises:
      StorageError: the folder exists, or cannot be written, or the weights belong to another model.
      ConfigError: the CLIP model cannot be built here.
    """
    if folder.exists():
        raise StorageError(f"an exported model is never overwritten; {folder} exists. Choose another --to.")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        # Every file states the source of its data, even after it is copied out of this folder.
        note = json.dumps({"data": description.data, "promise": description.promise}, ensure_ascii=False)
        description = KINDS[description.kind].write_weights(temporary, description, state, note)
        write_description(temporary, description)
        about = {name: getattr(description, name) for name in ("promise", "trial", "sha256")}
        usage = KINDS[description.kind].usage(Path("FOLDER"), description)
        texts = {
            f"{STATEMENT}.json": as_json({"model": about} | dict(statement.values)),
            f"{STATEMENT}.md": f"**{description.promise}**\n\n{statement.page}",
            CARD: model_card(description, usage),
        }
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        temporary.rename(folder)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return description


def load_encoder(
    folder: Path | str, *, own_network: str | None = None
) -> tuple[ImageNetwork, ModelDescription]:
    """Return an exported encoder of images on the CPU, in evaluation mode, and its description.

    Args:
      folder: folder written by `python -m trainers.export`.
      own_network: the `package.module:factory` that the folder may name; importing a module that only the
        file names would run code of the file's choice.

    Raises:
      StorageError: the folder holds no model, is damaged, or its weights do not fit its network.
      ConfigError: the folder holds a CLIP model, or names the user's own network, which `own_network` does
        not name or which cannot be built.
    """
    description = read_description(folder)
    if description.kind == CLIP_MODELS.name:
        raise ConfigError(
            f"the model in {folder} must be an image encoder; got a CLIP model. "
            "Load it with trainers.export.export_folder.load_clip."
        )
    return KINDS[description.kind].open(Path(folder), description, own_network=own_network), description


def load_clip(folder: Path | str) -> tuple[ImageTextEncoder, ModelDescription]:
    """Return an exported CLIP model on the CPU, in evaluation mode and frozen, and its description.

    Args:
      folder: folder written by `python -m trainers.export`.

    Raises:
      StorageError: the folder holds no model, is damaged, or its weights do not fit its model.
      ConfigError: the folder holds an encoder of images, or the model cannot be built.
    """
    return _load_kind(CLIP_MODELS, folder, "a CLIP model, which also embeds texts")


def load_captioner(folder: Path | str) -> tuple[Captioner, ModelDescription]:
    """Return an exported captioner on the CPU, in evaluation mode, and its description.

    Args:
      folder: folder written by `python -m trainers.export`.

    Raises:
      StorageError: the folder holds no model, is damaged, or its weights do not fit its network.
      ConfigError: the folder holds a model of another kind.
    """
    return _load_kind(CAPTIONERS, folder, "a captioner, trained by dp_cap")


def load_classifier(
    folder: Path | str, *, own_network: str | None = None
) -> tuple[Classifier, ModelDescription]:
    """Return an exported classifier on the CPU, in evaluation mode, and its description.

    Args:
      folder: folder written by `python -m trainers.export`.
      own_network: as in `load_encoder`.

    Raises:
      StorageError: the folder holds no model, is damaged, or its weights do not fit its network.
      ConfigError: the folder holds a model of another kind, or as in `load_encoder`.
    """
    return _load_kind(CLASSIFIERS, folder, "a classifier, trained by dp_classifier", own_network)


def _load_kind(
    kind: ModelKind[NetworkT], folder: Path | str, title: str, own_network: str | None = None
) -> tuple[NetworkT, ModelDescription]:
    description = read_description(folder)
    if description.kind != kind.name:
        raise ConfigError(f"the model in {folder} must be {title}; got kind {description.kind}")
    return kind.open(Path(folder), description, own_network=own_network), description
