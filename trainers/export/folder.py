"""The folder of an exported model: weights, what they are, and what they promise.

    model.safetensors          the weights of an encoder of images
    model.json                 a `ModelDescription`: network, input, training, ε, and the hash of the weights
    privacy_statement.json     the sweep's statement, with a first entry on this model
    privacy_statement.md       the same as a page

Of a CLIP model, in place of `model.safetensors`, what open_clip and peft read by themselves
(`trainers.models.clip.files`):

    open_clip_model.safetensors    both towers, the adapters merged into them
    open_clip_config.json          what open_clip builds them from
    merges.txt.gz                  of a vocabulary smaller than CLIP's
    adapter/                       the adapters alone, where the training had some

Nothing that lies in such a folder is run: weights are plain tensors, and a network of the user's own,
which is imported by name, must be named again by whoever loads it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dpgcl_core.errors import ConfigError, StorageError, unknown_choice
from dpgcl_core.release.statement import RESEARCH
from trainers.config.training import NetworkConfig
from trainers.files.weights import misfits, read_weights, write_weights
from trainers.models.clip.adapters import ClipLora
from trainers.models.clip.encoder import ImageTextEncoder
from trainers.models.clip.files import export_adapter, export_merged, trained_encoder
from trainers.models.clip.published import WEIGHTS_FILE, ClipSpec, Colours, build_clip
from trainers.models.encoder import NETWORKS, Encoder, ImageShape, build_encoder
from trainers.views.images import PIXEL_MEAN, PIXEL_STD

IMAGE_ENCODER, CLIP = "image_encoder", "clip"
KINDS = (IMAGE_ENCODER, CLIP)
FORMAT = 1
DESCRIPTION, WEIGHTS, STATEMENT = "model.json", "model.safetensors", "privacy_statement"
ADAPTER = "adapter"


@dataclass(frozen=True, kw_only=True)
class ClipDescription:
    """What `model.json` says of a CLIP model besides; what loads it is this, not a file beside it.

    Attributes:
      architecture: open_clip's configuration of the model, as in `open_clip_config.json`.
      mean, std: pixels in [0, 1] are normalised by (pixel − mean) / std, per colour.
      context_length: tokens per caption; what is longer is cut.
      pretrained: what the training started from where it has no warm start: "random", or open_clip's name.
      lora_rank: of the adapters; 0 where every weight was trained.
      lora_alpha, lora_targets, lora_towers: of the adapters, as in `ClipNetworkConfig`.
      adapter_sha256: of the adapters' file; None without.
    """

    architecture: Mapping[str, Any]
    mean: Colours
    std: Colours
    context_length: int
    pretrained: str
    lora_rank: int
    lora_alpha: float
    lora_targets: tuple[str, ...]
    lora_towers: tuple[str, ...]
    adapter_sha256: str | None = None

    @property
    def lora(self) -> ClipLora | None:
        """The adapters; None without."""
        if not self.lora_rank:
            return None
        return ClipLora(
            rank=self.lora_rank, alpha=self.lora_alpha, targets=self.lora_targets, towers=self.lora_towers
        )


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What `model.json` says.

    Attributes:
      promise: the guarantee in words, for people.
      kind: what the model is; decides how it is loaded and what it can embed.
      network, embedding_dim: as in `NetworkConfig`.
      image_shape: (channels, height, width) of its input.
      pixel_mean, pixel_std: pixels in [0, 1] are normalised by (pixel − mean) / std; None of a CLIP model,
        whose are per colour.
      clip: of a CLIP model; None of others.
      sha256: of the weights' file.
      sweep, trial: where it comes from; a sealed sweep's model has no trial.
      chosen: how it was chosen, in words.
      method: of the training.
      dataset: trained on.
      data: `private`, or `research: public data`.
      guarantee_label: of this training.
      neighboring_relation: what ε and δ are about.
      epsilon, delta: of this one training; None without a guarantee.
      sweep_epsilon, sweep_delta: of all trainings with a guarantee of the sweep, the choice included; None
        where it is not accounted.
      num_steps: of the training.
      averaged: whether the weights are the average over the steps.
      scores: of the trained network, those that may be seen.
      warm_start: sha256 of the weights that the training started from, or None.
      versions: of the software that exported it.
      format: of this file.
    """

    promise: str
    kind: str = IMAGE_ENCODER
    network: str
    embedding_dim: int
    image_shape: ImageShape
    pixel_mean: float | None = PIXEL_MEAN
    pixel_std: float | None = PIXEL_STD
    clip: ClipDescription | None = None
    sha256: str = ""
    sweep: str
    trial: str | None
    chosen: str
    method: str
    dataset: str
    data: str
    guarantee_label: str
    neighboring_relation: str
    epsilon: float | None
    delta: float | None
    sweep_epsilon: float | None
    sweep_delta: float | None
    num_steps: int
    averaged: bool = False
    scores: Mapping[str, float] = field(default_factory=dict)
    warm_start: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def data_are_private(self) -> bool:
        """Whether it was trained on private data; what is not called public is."""
        return self.data != RESEARCH

    @property
    def weights_file(self) -> str:
        """The name of the weights' file in the folder."""
        return WEIGHTS if self.clip is None else WEIGHTS_FILE


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A sweep's privacy statement as it was written: JSON values and page."""

    values: Mapping[str, Any]
    page: str


def write_model(
    folder: Path, description: ModelDescription, state: Mapping[str, Tensor], statement: Statement
) -> ModelDescription:
    """Writes the folder, whole or not at all, and returns the description with the hash of the weights.

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
        description = _write_weights(building, description, state)
        _write_text(building / DESCRIPTION, _as_json(dataclasses.asdict(description)))
        about = {"promise": description.promise, "trial": description.trial}
        about |= {"sha256": description.sha256}
        _write_text(building / f"{STATEMENT}.json", _as_json({"model": about} | dict(statement.values)))
        _write_text(building / f"{STATEMENT}.md", f"**{description.promise}**\n\n{statement.page}")
        building.rename(folder)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return description


def _write_weights(
    folder: Path, description: ModelDescription, state: Mapping[str, Tensor]
) -> ModelDescription:
    # Every file keeps saying whose data it comes from, even when it is copied away from this folder.
    note = json.dumps({"data": description.data, "promise": description.promise}, ensure_ascii=False)
    clip = description.clip
    if clip is None:
        return dataclasses.replace(description, sha256=write_weights(folder / WEIGHTS, state, note=note))
    encoder = trained_encoder(_spec(description.network, clip), clip.lora, state)
    sha256 = export_merged(encoder, folder, note=note)
    if clip.lora is not None:
        (folder / ADAPTER).mkdir()
        adapter_sha256 = export_adapter(encoder, folder / ADAPTER, note=note)
        clip = dataclasses.replace(clip, adapter_sha256=adapter_sha256)
    return dataclasses.replace(description, sha256=sha256, clip=clip)


def _spec(name: str, clip: ClipDescription) -> ClipSpec:
    return ClipSpec(name=name, architecture=clip.architecture, mean=clip.mean, std=clip.std)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def read_description(folder: Path) -> ModelDescription:
    """Returns what an exported folder says of its model.

    Raises:
      StorageError: there is no exported model, or it is of a format or kind that this version cannot read.
    """
    path = folder / DESCRIPTION
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{folder} is no exported model: {DESCRIPTION} is missing or damaged; "
            "python -m trainers.export writes one"
        ) from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else None
        raise StorageError(f"{path} must be of format {FORMAT}; got {found}: export the model again")
    if values.get("kind") not in KINDS:
        raise StorageError(unknown_choice(f"kind of model in {path}", str(values.get("kind")), KINDS))
    try:
        clip = _clip_description(values["clip"]) if values["kind"] == CLIP else None
        found = ModelDescription(**values | {"image_shape": tuple(values["image_shape"]), "clip": clip})
    except (TypeError, KeyError, ValueError) as error:
        raise StorageError(f"{path} is damaged; export the model again") from error
    if clip is None and (found.pixel_mean, found.pixel_std) != (PIXEL_MEAN, PIXEL_STD):
        raise StorageError(
            f"{path} normalises pixels by mean {found.pixel_mean} and std {found.pixel_std}, this version by "
            f"{PIXEL_MEAN} and {PIXEL_STD}; embed with the version that exported it"
        )
    return found


def _clip_description(values: Mapping[str, Any]) -> ClipDescription:
    """Lists back to tuples.

    Raises:
      TypeError, KeyError, ValueError: something is missing, or of no such kind.
    """
    red, green, blue = (float(each) for each in values["mean"])
    reds, greens, blues = (float(each) for each in values["std"])
    names = {name: tuple(values[name]) for name in ("lora_targets", "lora_towers")}
    colours = {"mean": (red, green, blue), "std": (reds, greens, blues)}
    return ClipDescription(**{**values, **colours, **names})


def read_model_weights(folder: Path, description: ModelDescription) -> Mapping[str, Tensor]:
    """Returns the weights of an exported folder.

    Raises:
      StorageError: they are missing, damaged, or not those that were exported.
    """
    file = folder / description.weights_file
    weights = read_weights(file)
    if weights.sha256 != description.sha256:
        raise StorageError(
            f"{file} is not what was exported: its sha256 is {weights.sha256}, and {DESCRIPTION} "
            f"says {description.sha256}; export the model again"
        )
    return weights.tensors


def load_encoder(folder: Path, *, own_network: str | None = None) -> tuple[Encoder, ModelDescription]:
    """Returns an exported image encoder on the CPU, in evaluation mode, and what it is.

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
    if description.clip is not None:
        raise ConfigError(
            f"the model in {folder} must be an encoder of images; got a CLIP model, which "
            "trainers.export.folder.load_clip loads"
        )
    if description.network not in NETWORKS and description.network != own_network:
        raise ConfigError(
            f"the model in {folder} is of a network of your own, {description.network}: give --network "
            f"{description.network}, and have it on PYTHONPATH, if you trust it; got {own_network}"
        )
    network = NetworkConfig(name=description.network, embedding_dim=description.embedding_dim)
    encoder = build_encoder(network, description.image_shape, 0)
    _load(encoder, folder, description)
    return encoder.eval(), description


def load_clip(folder: Path) -> tuple[ImageTextEncoder, ModelDescription]:
    """Returns an exported CLIP model on the CPU, in evaluation mode and frozen, and what it is.

    Args:
      folder: as `python -m trainers.export` wrote it.

    Raises:
      StorageError: the folder is none, damaged, or its weights do not fit its model.
      ConfigError: it holds an encoder of images, or the model cannot be built.
    """
    description = read_description(folder)
    if description.clip is None:
        raise ConfigError(f"the model in {folder} must be a CLIP model; got an encoder of images")
    spec = _spec(description.network, description.clip)
    clip = build_clip(spec, seed=0)
    _load(clip, folder, description)
    return ImageTextEncoder(clip.requires_grad_(False), spec).eval(), description


def _load(network: nn.Module, folder: Path, description: ModelDescription) -> None:
    tensors = read_model_weights(folder, description)
    difference = misfits(tensors, network.state_dict())
    if difference is not None:
        raise StorageError(
            f"the weights in {folder} do not fit the network {description.network}: {difference}; use the "
            "version of the network that was trained"
        )
    network.load_state_dict(dict(tensors))
