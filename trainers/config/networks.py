"""Options of views, of the network that embeds them, and of its initial weights (stages 4 and 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeAlias

from dpgcl_core.errors import ConfigError, require, require_choice, require_each, require_least
from dpgcl_core.ledger.chain import Head
from trainers.config.tree import option

HEAD, ALL_LAYERS = "head", "all"
TRAINED_LAYERS = (HEAD, ALL_LAYERS)

SYNTHETIC = "synthetic:"
"""Prefix of a `warm_start` that first trains on generated records; the number of steps follows it."""


def require_shares(node: object, *names: str) -> None:
    """Raise ConfigError unless each named field of `node` is None or in [0, 1]."""
    require_each(node, names, "be in [0, 1]", lambda value: 0 <= value <= 1)


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """The augmentation that makes views of an image (stage 4)."""

    min_crop_area: float = 0.3
    """Smallest share of the image's area that a random crop keeps; the area is fixed if both are equal."""
    max_crop_area: float = 1.0
    """Largest share of the image's area that a random crop keeps."""
    flip_prob: float = 0.5
    """Probability of a horizontal flip."""
    brightness: float = 0.4
    """Brightness jitter: a factor is drawn from [1 − x, 1 + x]; 0 = off."""
    contrast: float = 0.4
    """Contrast jitter, drawn like brightness; 0 = off."""
    saturation: float = 0.0
    """Saturation jitter of colour images, drawn like brightness; 0 = off."""
    hue: float = 0.0
    """Hue jitter of colour images: a rotation is drawn from [−x, x] turns, with x at most 0.5; 0 = off."""
    blur_prob: float = 0.0
    """Probability of a Gaussian blur."""
    min_blur_sigma: float = 0.1
    """Smallest standard deviation of the blur, in pixels."""
    max_blur_sigma: float = 1.5
    """Largest standard deviation of the blur, in pixels."""

    def __post_init__(self) -> None:
        require(
            0 < self.min_crop_area <= self.max_crop_area <= 1,
            "crop areas must satisfy 0 < min_crop_area <= max_crop_area <= 1; "
            f"got {self.min_crop_area} and {self.max_crop_area}",
        )
        require_shares(self, "flip_prob", "blur_prob", "brightness", "contrast", "saturation")
        require(0 <= self.hue <= 0.5, f"hue must be in [0, 0.5] turns; got {self.hue}")
        require(
            0 < self.min_blur_sigma <= self.max_blur_sigma,
            "blur sigmas must satisfy 0 < min_blur_sigma <= max_blur_sigma; "
            f"got {self.min_blur_sigma} and {self.max_blur_sigma}",
        )


@dataclass(frozen=True, kw_only=True)
class TextViewConfig:
    """The augmentation that makes views of a caption (stage 4), see `trainers.views.caption_views`."""

    sentence_swap_prob: float = 0.5
    """Probability that two sentences of a caption change places."""
    word_swap_prob: float = 0.0
    """Probability, per pair of adjacent words, that they change places."""
    word_delete_prob: float = 0.0
    """Probability, per word that carries little meaning, that the word is dropped."""

    def __post_init__(self) -> None:
        require_shares(self, "sentence_swap_prob", "word_swap_prob", "word_delete_prob")


@dataclass(frozen=True, kw_only=True)
class AnyNetwork:
    """The options that all networks share.

    Attributes:
      takes_pairs: whether its records are pairs of an image and a text.
    """

    name: str = field(default="small_cnn", metadata=option("network"))
    """Images: tiny_cnn, small_cnn, wide_cnn, resnet18, or package.module:factory for your own. Pairs:
    clip-tiny, an open_clip model (ViT-B-32), or its configuration file. dp_mae: mae-nano, -toy, -tiny,
    -small, -base or -large. dp_cap: cap-toy, -tiny, -small, -base or -large. dp_classifier: any of these."""
    precision: str = "float32"
    """Network precision: float32, bfloat16 or float16; norms, clipping and noise are never below float32."""
    loss_scale: float = 1024.0
    """Public scale of float16 gradients, a power of two. It is fixed, because adapting it would leak."""

    takes_pairs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_choice("precision", self.precision, ("float32", "bfloat16", "float16"))
        require(
            0 < self.loss_scale < math.inf and math.frexp(self.loss_scale)[0] == 0.5,
            f"loss_scale must be a power of two, so that dividing by it is exact; got {self.loss_scale}",
        )

    @property
    def gradient_scale(self) -> float:
        """The public constant that multiplies gradients inside the network: 1 except for float16."""
        return self.loss_scale if self.precision == "float16" else 1.0


@dataclass(frozen=True, kw_only=True)
class ImageNetwork(AnyNetwork):
    """The additional options of a network of images."""

    embedding_dim: int = 64
    """Width of the unit embeddings that the loss compares."""
    mixes_no_records: bool = False
    """Declare that your own network mixes no records, so that many groups can share a forward pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, 2, "embedding_dim")


@dataclass(frozen=True, kw_only=True)
class TransformerNetwork(AnyNetwork):
    """The additional options of this package's transformers."""

    gradient_checkpointing: bool = False
    """Transformers: recompute activations to save memory; groups are then processed one at a time."""


@dataclass(frozen=True, kw_only=True)
class PatchNetwork(TransformerNetwork):
    """The additional options of transformers of an image's patches."""

    patch_size: int | None = None
    """Auto-encoder and captioner: side of a patch in pixels, a divisor of the image's side; by default 16
    (mae-toy: 4, cap-toy: 8)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, 1, "patch_size")


@dataclass(frozen=True, kw_only=True)
class MaskedNetwork(PatchNetwork):
    """The additional options of a masked auto-encoder."""

    mask_ratio: float = 0.75
    """Auto-encoder: share of an image's patches to hide and to reconstruct from the other patches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.mask_ratio < 1, f"mask_ratio must be in (0, 1); got {self.mask_ratio}")


@dataclass(frozen=True, kw_only=True)
class CaptioningNetwork(PatchNetwork):
    """The additional options of a captioner."""

    tie_embeddings: bool = False
    """Captioner: share one table between the input tokens and the predicted tokens."""


@dataclass(frozen=True, kw_only=True)
class ClassifyingNetwork(AnyNetwork):
    """The additional options of a classifier."""

    num_classes: int | None = None
    """Classifier: public number of classes; by default the number of classes in the public data."""
    trained_layers: str = HEAD
    """Classifier: layers to train: head (a linear layer on frozen features), or all (also the encoder)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, 2, "num_classes")
        require_choice("trained_layers", self.trained_layers, TRAINED_LAYERS)


@dataclass(frozen=True, kw_only=True)
class ClipNetwork(TransformerNetwork):
    """The additional options of a CLIP model, and which of its weights train."""

    pretrained: str = "random"
    """CLIP: random, or open_clip's name for published weights, such as laion2b_s34b_b79k."""
    lora_rank: int = 16
    """CLIP: rank of the adapters; 0 trains every weight."""
    lora_alpha: float = 16.0
    """CLIP: the adapters' scale times their rank."""
    lora_targets: tuple[str, ...] = ("q", "v")
    """CLIP: layers with adapters: q, k, v, out, mlp, or a layer's own name."""
    lora_towers: tuple[str, ...] = ("image", "text")
    """CLIP: towers with adapters: image, text."""
    learn_temperature: bool = False
    """CLIP: also train the temperature; its gradient counts in the group norm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.lora_rank >= 0, f"lora_rank must be 0 (no adapters) or more; got {self.lora_rank}")


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(ImageNetwork, MaskedNetwork, CaptioningNetwork, ClassifyingNetwork, ClipNetwork):
    """The network and its initial weights."""

    warm_start: Path | None = None
    """Start from public weights: an exported model's folder, a file with the network's state dict, or
    synthetic:STEPS to train STEPS steps without privacy on generated records first. Or start from an
    exported model that was trained on the same private data and charged to the same ledger."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warm_start is not None:
            synthetic_steps(self.warm_start)


def synthetic_steps(warm_start: Path) -> int | None:
    """Return STEPS of `synthetic:STEPS`, a warm start on generated records; None for a path of weights.

    Raises:
      ConfigError: the number of steps is not a positive whole number.

    >>> synthetic_steps(Path("synthetic:300")), synthetic_steps(Path("weights.pt"))
    (300, None)
    """
    text = str(warm_start)
    if not text.startswith(SYNTHETIC):
        return None
    steps = text.removeprefix(SYNTHETIC)
    if not (steps.isascii() and steps.isdigit() and int(steps) > 0):
        raise ConfigError(
            f"STEPS in warm_start {SYNTHETIC}STEPS must be a positive integer, such as {SYNTHETIC}300; "
            f"got {steps!r}"
        )
    return int(steps)


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(ImageNetwork):
    """The network of one training on images (stage 5).

    Attributes:
      predictor: whether a predictor follows the projection head, for methods that regress onto a target
        network.
    """

    predictor: bool = False

    @property
    def is_foreign(self) -> bool:
        """Whether the network is the user's own, named `package.module:factory`."""
        return ":" in self.name

    task: ClassVar[str] = "images"
    learn_temperature: ClassVar[bool] = False


class _OfThisPackage:
    """A network of this package, which needs no author's promise and no predictor."""

    mixes_no_records: ClassVar[bool] = False
    is_foreign: ClassVar[bool] = False
    predictor: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ClipNetworkConfig(ClipNetwork, _OfThisPackage):
    """Both towers of a CLIP model and their trained weights (stage 5), for pairs of images and texts.

    Attributes:
      name: the model, as in `trainers.models.clip.published_models.ClipConfig.model`: open_clip's name,
        "clip-tiny", or a file.
      pretrained: "random", or open_clip's name for published weights; pass your own file as a warm start.
    """

    name: str = "clip-tiny"
    takes_pairs: ClassVar[bool] = True
    task: ClassVar[str] = "pairs"


@dataclass(frozen=True, kw_only=True)
class MaskedNetworkConfig(MaskedNetwork, _OfThisPackage):
    """A masked auto-encoder: one transformer reads visible patches, another rebuilds the rest (stage 5)."""

    name: str = "mae-toy"
    learn_temperature: ClassVar[bool] = False
    task: ClassVar[str] = "masked-images"


@dataclass(frozen=True, kw_only=True)
class CaptionerConfig(CaptioningNetwork, _OfThisPackage):
    """A captioner: one transformer reads an image's patches, another predicts its caption (stage 5)."""

    name: str = "cap-toy"
    learn_temperature: ClassVar[bool] = False
    takes_pairs: ClassVar[bool] = True
    task: ClassVar[str] = "captions"


EncoderConfig: TypeAlias = NetworkConfig | ClipNetworkConfig | MaskedNetworkConfig | CaptionerConfig
"""A network with an encoder of images."""


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(ClassifyingNetwork):
    """An encoder of images with a linear layer for the classes (stage 5).

    Attributes:
      encoder: the network whose features are classified; its own precision is not used.
      num_classes: K; labels are 0 to K − 1.
    """

    encoder: EncoderConfig = field(default_factory=lambda: NetworkConfig())
    num_classes: int = field()
    predictor: ClassVar[bool] = False
    learn_temperature: ClassVar[bool] = False
    task: ClassVar[str] = "classes"

    @property
    def is_foreign(self) -> bool:
        """Whether the encoder is the user's own, named `package.module:factory`."""
        return self.encoder.is_foreign

    @property
    def mixes_no_records(self) -> bool:
        """Whether the encoder's author promises that it mixes no records."""
        return self.encoder.mixes_no_records


AnyNetworkConfig: TypeAlias = EncoderConfig | ClassifierConfig
"""The network of one training."""


@dataclass(frozen=True, kw_only=True)
class PrivateStart:
    """An earlier sweep whose model a training starts from, on the same records and the same ledger.

    Attributes:
      sweep: the sweep that trained the model.
      head: the head of the ledger's hash chain after the sweep was charged.
    """

    sweep: str
    head: Head


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Weights that a training starts from, public or charged to the same ledger.

    Made by `trainers.training.warm_start.read_warm_start`.

    Attributes:
      path: the path of the file, from which every worker reads it.
      sha256: the hash of the file, which decides the result.
      embedding_dim: width of the projection head in the file; None without a head.
      origin: the origin of the weights, in words.
      from_records: whether the weights were trained on data; False for generated records.
      classifies: whether the file holds a classifier with its head.
      private: the sweep that trained the weights on the same private records; None for public weights.
    """

    path: str
    sha256: str
    embedding_dim: int | None
    origin: str
    from_records: bool = True
    classifies: bool = False
    private: PrivateStart | None = None
