"""Kinds of exported models: how each is described, written, opened and used.

A model's kind depends on its network and not on its training: every task that trains an encoder of images
exports an `image_encoder`. `model.json` names the kind.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from dpgcl_core.errors import ConfigError, StorageError
from trainers.config.networks import (
    HEAD,
    CaptionerConfig,
    ClipNetworkConfig,
    MaskedNetworkConfig,
    NetworkConfig,
)
from trainers.export.description import (
    CAPTIONER,
    CLASSIFIER,
    CLIP,
    IMAGE_ENCODER,
    MASKED,
    CaptionerDescription,
    ClassifierDescription,
    ClipDescription,
    MaskedDescription,
    ModelDescription,
    read_model_weights,
)
from trainers.files.weights import misfits, write_weights
from trainers.models.captioner import build_captioner
from trainers.models.classifier import Classifier
from trainers.models.clip.adapters import make_trainable
from trainers.models.clip.clip_encoder import ImageTextEncoder
from trainers.models.clip.clip_files import (
    export_adapter,
    export_merged,
    trained_encoder,
    write_config,
)
from trainers.models.clip.published_models import ClipConfig, ClipSpec, build_clip, find_clip
from trainers.models.encoder import NETWORKS, Encoder, build_encoder
from trainers.models.masked import build_masked
from trainers.models.transformer import ImageShape, PatchEncoder
from trainers.torchvision_import import script_import

ADAPTER = "adapter"
"""Folder of a CLIP model's adapters, next to its weights."""

NetworkT = TypeVar("NetworkT", bound=nn.Module)
PatchNetworkT = TypeVar("PatchNetworkT", bound=PatchEncoder)

PROGRAMS = {"embed": "embed images", "caption": "write captions", "classify": "classify images"}
"""The programs of this package that run a model, and what each does, in words."""


class ModelKind(ABC, Generic[NetworkT]):
    """One kind of model.

    Attributes:
      name: the kind's name in `model.json`.
      programs: the programs of `PROGRAMS` that accept this kind.
    """

    name: str
    programs: tuple[str, ...] = ("embed",)

    @abstractmethod
    def describe(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of `ModelDescription` on the network, from a trial's params.

        Raises:
          ConfigError: the model is unknown to this version.
        """

    def write_weights(
        self, folder: Path, description: ModelDescription, state: Mapping[str, Tensor], note: str
    ) -> ModelDescription:
        """Write all weights unchanged, and return the description with their hashes.

        Args:
          folder: the model's folder.
          description: the model's description.
          state: the weights at the end of the training.
          note: JSON text on the model's data and guarantee, stored in every file.

        Raises:
          StorageError: the weights belong to another model.
          ConfigError: the model cannot be built here.
        """
        sha256 = write_weights(folder / description.weights_file, state, note=note)
        return dataclasses.replace(description, sha256=sha256)

    @abstractmethod
    def build(self, description: ModelDescription) -> NetworkT:
        """Return the described network on the CPU, with arbitrary weights.

        Raises:
          ConfigError: the network cannot be built.
        """

    def open(
        self, folder: Path, description: ModelDescription, *, own_network: str | None = None
    ) -> NetworkT:
        """Return the network of a folder on the CPU, in evaluation mode.

        Args:
          folder: the model's folder.
          description: the result of `read_description`, for a model of this kind.
          own_network: the `package.module:factory` that the folder may name.

        Raises:
          StorageError: the folder is damaged, or its weights do not fit its network.
          ConfigError: the network cannot be built, or is the user's own and `own_network` does not name it.
        """
        is_own = description.encoder_kind == IMAGE_ENCODER and description.network not in NETWORKS
        if is_own and description.network != own_network:
            raise ConfigError(
                f"the model in {folder} uses a network of your own, so --network must be "
                f"{description.network}; got {own_network}. If you trust this network, put it on PYTHONPATH "
                "and pass the option."
            )
        network = self.build(description)
        tensors, part = read_model_weights(folder, description), self.stored_part(network)
        difference = misfits(tensors, part.state_dict())
        if difference is not None:
            raise StorageError(
                f"the weights in {folder} do not fit the network {description.network}: {difference}. Use "
                "the version of the network that was trained."
            )
        part.load_state_dict(dict(tensors))
        return network.eval()

    def stored_part(self, network: NetworkT) -> nn.Module:
        """Return the part of a network whose weights the folder holds."""
        return network

    def usage(self, folder: Path, description: ModelDescription) -> list[str]:
        """Return lines on how to use the folder."""
        return [f"{PROGRAMS[program]} with it: {_command(program, folder)}" for program in self.programs]


class ImageEncoderKind(ModelKind[Encoder]):
    """A backbone with a projection head."""

    name = IMAGE_ENCODER

    def describe(self, params: Mapping[str, Any]) -> dict[str, Any]:
        channels, height, width = params["image_shape"]
        return {"embedding_dim": params["embedding_dim"], "image_shape": (channels, height, width)}

    def build(self, description: ModelDescription) -> Encoder:
        network = NetworkConfig(name=description.network, embedding_dim=description.embedding_dim)
        return build_encoder(network, description.image_shape, 0)


class ClipKind(ModelKind[ImageTextEncoder]):
    """Both towers of a CLIP model, as open_clip and peft read them."""

    name = CLIP

    def describe(self, params: Mapping[str, Any]) -> dict[str, Any]:
        clip = _clip_config(params)
        spec = find_clip(ClipConfig(model=clip.name, weights=clip.pretrained), with_weights=False)
        names = ("pretrained", "lora_rank", "lora_alpha", "lora_targets", "lora_towers")
        about = ClipDescription(
            architecture=spec.architecture,
            mean=spec.mean,
            std=spec.std,
            context_length=spec.context_length,
            **{name: getattr(clip, name) for name in names},
        )
        # Grey images were converted to three colours, so the input shape is the model's and not the data's.
        return {
            "embedding_dim": int(spec.architecture["embed_dim"]),
            "image_shape": (3, *spec.image_size),
            "pixel_mean": None,
            "pixel_std": None,
            "clip": about,
        }

    def write_weights(
        self, folder: Path, description: ModelDescription, state: Mapping[str, Tensor], note: str
    ) -> ModelDescription:
        clip = description.clip
        assert clip is not None  # true for every model of this kind
        encoder = trained_encoder(_clip_spec(description), clip.lora, state)
        sha256 = export_merged(encoder, folder, note=note)
        if clip.lora is not None:
            (folder / ADAPTER).mkdir()
            adapter_sha256 = export_adapter(encoder, folder / ADAPTER, note=note)
            clip = dataclasses.replace(clip, adapter_sha256=adapter_sha256)
        return dataclasses.replace(description, sha256=sha256, clip=clip)

    def build(self, description: ModelDescription) -> ImageTextEncoder:
        spec = _clip_spec(description)
        return ImageTextEncoder(build_clip(spec, seed=0).requires_grad_(False), spec)

    def stored_part(self, network: ImageTextEncoder) -> nn.Module:
        return network.clip

    def usage(self, folder: Path, description: ModelDescription) -> list[str]:
        import_line = script_import("open_clip") if folder.is_dir() else "import open_clip"  # in a card
        local_dir = json.dumps(f"local-dir:{folder}", ensure_ascii=False)
        return [
            f"embed with it: {_command('embed', folder)} --texts FILE",
            f"open_clip reads it: {import_line}; model = open_clip.create_model({local_dir})",
            f"its tokenizer: open_clip.get_tokenizer({local_dir})",
        ]


@dataclass(frozen=True, kw_only=True)
class PatchKind(ModelKind[PatchNetworkT]):
    """A transformer of patches with its decoder, so that another training can start from it.

    Attributes:
      config: class of the network's configuration.
      description: class of the additional fields of `model.json`, in the field `field_name`.
      build_network: function that builds the network from its configuration.
    """

    name: str
    field_name: str
    config: type[MaskedNetworkConfig | CaptionerConfig]
    description: type[MaskedDescription | CaptionerDescription]
    build_network: Callable[[Any, ImageShape, int], PatchNetworkT]
    programs: tuple[str, ...] = ("embed",)

    def describe(self, params: Mapping[str, Any]) -> dict[str, Any]:
        channels, height, width = params["image_shape"]
        settings = {item.name: params[item.name] for item in dataclasses.fields(self.description)}
        config = self.config(name=params["network_name"], **settings)
        network = self.build_network(config, (channels, height, width), 0)
        about = self.description(**settings | {"patch_size": network.patch_size})
        return {
            "embedding_dim": network.feature_dim,
            "image_shape": network.image_shape,
            self.field_name: about,
        }

    def build(self, description: ModelDescription) -> PatchNetworkT:
        settings = dataclasses.asdict(getattr(description, self.field_name))
        config = self.config(name=description.network, **settings)
        return self.build_network(config, description.image_shape, 0)


class ClassifierKind(ModelKind[Classifier]):
    """A classifier: an encoder of another kind, with a linear layer that predicts the class."""

    name = CLASSIFIER
    programs = ("embed", "classify")

    def describe(self, params: Mapping[str, Any]) -> dict[str, Any]:
        encoder_kind = encoder_kind_of(params)
        fields = encoder_kind.describe(params)
        about = ClassifierDescription(
            encoder=encoder_kind.name,
            num_classes=params["num_classes"],
            trained_layers=params["trained_layers"],
        )
        return fields | {"classifier": about}

    def write_weights(
        self, folder: Path, description: ModelDescription, state: Mapping[str, Tensor], note: str
    ) -> ModelDescription:
        if description.clip is not None:  # a training with this warm start compares it with its own model's
            write_config(_clip_spec(description), folder)
        return super().write_weights(folder, description, state, note)

    def build(self, description: ModelDescription) -> Classifier:
        about = description.classifier
        assert about is not None  # ensured by `read_description`
        encoder = KINDS[about.encoder].build(description)
        if isinstance(encoder, ImageTextEncoder):  # as it is trained: see `trained_encoder`
            make_trainable(encoder.clip, None, seed=0, train_logit_scale=False)
        return Classifier(
            encoder, description.image_shape, num_classes=about.num_classes, trained_layers=HEAD
        )


AnyKind = ModelKind[Any]
IMAGE_ENCODERS, CLIP_MODELS, CLASSIFIERS = ImageEncoderKind(), ClipKind(), ClassifierKind()
MASKED_ENCODERS = PatchKind(
    name=MASKED,
    field_name="masked",
    config=MaskedNetworkConfig,
    description=MaskedDescription,
    build_network=build_masked,
)
CAPTIONERS = PatchKind(
    name=CAPTIONER,
    field_name="captioner",
    config=CaptionerConfig,
    description=CaptionerDescription,
    build_network=build_captioner,
    programs=("embed", "caption"),
)
KINDS: Mapping[str, AnyKind] = {
    kind.name: kind for kind in (IMAGE_ENCODERS, CLIP_MODELS, MASKED_ENCODERS, CAPTIONERS, CLASSIFIERS)
}
"""All kinds by name."""


def kind_of(params: Mapping[str, Any]) -> AnyKind:
    """Return the kind of model that a trial with these params has trained."""
    return CLASSIFIERS if "num_classes" in params else encoder_kind_of(params)


def encoder_kind_of(params: Mapping[str, Any]) -> AnyKind:
    """Return the kind of the network with these params, or of its encoder if it is a classifier."""
    if "mask_ratio" in params:
        return MASKED_ENCODERS
    if "tie_embeddings" in params:
        return CAPTIONERS
    return CLIP_MODELS if "lora_rank" in params else IMAGE_ENCODERS


def _command(program: str, folder: Path) -> str:
    return f"python -m trainers.{program} --model {shlex.quote(str(folder))} --images folder:PATH"


def _clip_config(params: Mapping[str, Any]) -> ClipNetworkConfig:
    names = {item.name for item in dataclasses.fields(ClipNetworkConfig)} - {"name"}
    settings = {name: params[name] for name in names & params.keys()}
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    return ClipNetworkConfig(name=params["network_name"], **settings)


def _clip_spec(description: ModelDescription) -> ClipSpec:
    clip = description.clip
    assert clip is not None  # ensured by `read_description`
    return ClipSpec(name=description.network, architecture=clip.architecture, mean=clip.mean, std=clip.std)
