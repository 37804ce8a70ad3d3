"""The content of an exported model's `model.json`, and the weights next to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dpgcl_core.errors import StorageError, unknown_choice
from trainers.config.networks import TRAINED_LAYERS
from trainers.files.weights import read_weights
from trainers.models.clip.adapters import ClipLora, lora_of
from trainers.models.clip.published_models import WEIGHTS_FILE, Colours, colours_of
from trainers.models.encoder import ImageShape
from trainers.views.image_views import PIXEL_MEAN, PIXEL_STD

IMAGE_ENCODER, CLIP, MASKED, CAPTIONER = "image_encoder", "clip", "masked_auto_encoder", "captioner"
CLASSIFIER = "classifier"
"""Kinds of models: see `trainers.export.kinds`."""
KINDS_OF_MODELS = (IMAGE_ENCODER, CLIP, MASKED, CAPTIONER, CLASSIFIER)
FORMAT = 1
DESCRIPTION, WEIGHTS = "model.json", "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ClipDescription:
    """The additional fields of `model.json` for a CLIP model; loading needs no other configuration file.

    Attributes:
      architecture: open_clip's configuration of the model, as in `open_clip_config.json`.
      mean, std: pixels in [0, 1] are normalised by (pixel − mean) / std, per colour.
      context_length: number of tokens per caption; longer captions are cut.
      pretrained: the starting weights if the training has no warm start: "random", or open_clip's name.
      lora_rank: rank of the adapters; 0 if every weight was trained.
      lora_alpha, lora_targets, lora_towers: settings of the adapters, as in `ClipNetworkConfig`.
      adapter_sha256: hash of the adapters' file; None without adapters.
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
        """The adapters' settings; None without adapters."""
        return lora_of(self)


@dataclass(frozen=True, kw_only=True)
class MaskedDescription:
    """The additional fields of `model.json` for a masked auto-encoder.

    Attributes:
      patch_size: side of a patch in pixels.
      mask_ratio: the share of an image's patches that was masked.
    """

    patch_size: int
    mask_ratio: float

    def __post_init__(self) -> None:
        if type(self.patch_size) is not int or type(self.mask_ratio) is not float:
            raise ValueError("patch_size must be an integer, and mask_ratio a float")


@dataclass(frozen=True, kw_only=True)
class CaptionerDescription:
    """The additional fields of `model.json` for a captioner; its size determines its tokeniser.

    Attributes:
      patch_size: side of a patch in pixels.
      tie_embeddings: whether input tokens and predicted tokens share one embedding table.
    """

    patch_size: int
    tie_embeddings: bool

    def __post_init__(self) -> None:
        if type(self.patch_size) is not int or type(self.tie_embeddings) is not bool:
            raise ValueError("patch_size must be an integer, and tie_embeddings true or false")


@dataclass(frozen=True, kw_only=True)
class ClassifierDescription:
    """The additional fields of `model.json` for a classifier.

    Attributes:
      encoder: the kind of its encoder, whose additional fields `model.json` also holds.
      num_classes: K; predicted classes are 0 to K − 1.
      trained_layers: the layers that were trained, `head` or `all`.
    """

    encoder: str
    num_classes: int
    trained_layers: str

    def __post_init__(self) -> None:
        if self.encoder not in KINDS_OF_MODELS or self.encoder == CLASSIFIER:
            raise ValueError("encoder must be a kind of model other than a classifier")
        if type(self.num_classes) is not int or self.num_classes < 2:
            raise ValueError("num_classes must be an integer of at least 2")
        if self.trained_layers not in TRAINED_LAYERS:
            raise ValueError("trained_layers must be head or all")


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The content of `model.json`.

    Attributes:
      promise: the guarantee in words, for people.
      kind: the kind of model; decides how it is loaded and what it can embed.
      network, embedding_dim: as in `NetworkConfig`.
      image_shape: (channels, height, width) of its input.
      pixel_mean, pixel_std: pixels in [0, 1] are normalised by (pixel − mean) / std; None for a CLIP model,
        which has a mean and a std per colour.
      clip: the fields of a CLIP model; None for other models.
      masked: the fields of a masked auto-encoder; None for other models.
      captioner: the fields of a captioner; None for other models.
      classifier: the fields of a classifier, in addition to its encoder's fields; None for other models.
      sha256: hash of the weights' file.
      sweep, trial: the names of the sweep and trial that trained it; a sealed sweep's model has no trial.
      choice: how it was chosen among the trials, in words; named `chosen` in the file.
      method: the training's method.
      dataset: the data set that it was trained on.
      data: `private`, or `research: public data`.
      guarantee_label: the label of this training's guarantee.
      neighboring_relation: the neighbouring relation of ε and δ.
      epsilon, delta: ε and δ of this one training; None without a guarantee.
      sweep_epsilon, sweep_delta: ε and δ of all trainings of the sweep that have a guarantee, the choice
        included; None if they are not accounted.
      num_steps: the training's number of steps.
      averaged: whether the weights are the moving average over the steps.
      scores: the trained network's scores that may be released.
      warm_start: sha256 of the weights that the training started from, or None.
      versions: versions of the software that exported the model.
      format: version of this file's format.
    """

    promise: str
    kind: str = IMAGE_ENCODER
    network: str
    embedding_dim: int
    image_shape: ImageShape
    pixel_mean: float | None = PIXEL_MEAN
    pixel_std: float | None = PIXEL_STD
    clip: ClipDescription | None = None
    masked: MaskedDescription | None = None
    captioner: CaptionerDescription | None = None
    classifier: ClassifierDescription | None = None
    sha256: str = ""
    sweep: str
    trial: str | None
    choice: str
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
    def encoder_kind(self) -> str:
        """The kind of the model or, for a classifier, the kind of its encoder."""
        return self.kind if self.classifier is None else self.classifier.encoder

    @property
    def weights_file(self) -> str:
        """The name of the weights' file in the folder."""
        return WEIGHTS_FILE if self.kind == CLIP else WEIGHTS


def write_description(folder: Path, description: ModelDescription) -> None:
    """Write `model.json` in the form that `read_description` reads."""
    values = asdict(description)
    values = {"chosen" if name == "choice" else name: value for name, value in values.items()}
    (folder / DESCRIPTION).write_text(as_json(values), encoding="utf-8")


def as_json(values: Mapping[str, Any]) -> str:
    """Return values as JSON text, in the layout of an exported model's files."""
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def read_description(folder: Path | str) -> ModelDescription:
    """Return an exported folder's description of its model.

    Raises:
      StorageError: there is no exported model, or this version cannot read its format or kind.
    """
    path = Path(folder) / DESCRIPTION
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{folder} is not an exported model: {DESCRIPTION} is missing or damaged. "
            "Export a model with python -m trainers.export."
        ) from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        number = values.get("format") if isinstance(values, dict) else None
        raise StorageError(f"{path} must have format {FORMAT}; got {number}. Export the model again.")
    if values.get("kind") not in KINDS_OF_MODELS:
        raise StorageError(
            unknown_choice(f"kind of model in {path}", str(values.get("kind")), KINDS_OF_MODELS)
        )
    try:
        is_classifier = values["kind"] == CLASSIFIER
        classifier = ClassifierDescription(**values["classifier"]) if is_classifier else None
        kind = classifier.encoder if classifier is not None else values["kind"]
        clip = _clip_description(values["clip"]) if kind == CLIP else None
        masked = MaskedDescription(**values["masked"]) if kind == MASKED else None
        captioner = CaptionerDescription(**values["captioner"]) if kind == CAPTIONER else None
        kind_fields = {"clip": clip, "masked": masked, "captioner": captioner, "classifier": classifier}
        values |= {"image_shape": tuple(values["image_shape"]), "choice": values.pop("chosen")}
        description = ModelDescription(**values | kind_fields)
    except (TypeError, KeyError, ValueError) as error:
        raise StorageError(f"{path} is damaged. Export the model again.") from error
    if clip is None and (description.pixel_mean, description.pixel_std) != (PIXEL_MEAN, PIXEL_STD):
        raise StorageError(
            f"{path} normalises pixels by mean {description.pixel_mean} and std {description.pixel_std}, "
            f"but this version uses {PIXEL_MEAN} and {PIXEL_STD}. Embed with the version that exported it."
        )
    return description


def _clip_description(values: Mapping[str, Any]) -> ClipDescription:
    """Convert JSON values to a description, with lists as tuples.

    Raises:
      TypeError, KeyError, ValueError: a value is missing or has the wrong type.
    """
    names = {name: tuple(values[name]) for name in ("lora_targets", "lora_towers")}
    colours = {name: colours_of(values[name]) for name in ("mean", "std")}
    return ClipDescription(**{**values, **colours, **names})


def read_model_weights(folder: Path, description: ModelDescription) -> Mapping[str, Tensor]:
    """Return the weights of an exported folder.

    Raises:
      StorageError: the weights are missing, damaged, or differ from the exported ones.
    """
    file = folder / description.weights_file
    weights = read_weights(file)
    if weights.sha256 != description.sha256:
        raise StorageError(
            f"{file} is not the exported file: {DESCRIPTION} states sha256 {description.sha256}; "
            f"got {weights.sha256}. Export the model again."
        )
    return weights.tensors
