"""The settings of stations 4 and 5: how records become views, and which network embeds them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from dpgcl_core.errors import ConfigError, unknown_choice

PRECISIONS = ("float32", "bfloat16", "float16")


def require(condition: bool, message: str) -> None:
    """Raises ConfigError unless the condition holds."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """How a record becomes views (station 4).

    Attributes:
      min_crop_area, max_crop_area: share of the image's area a random crop keeps; equal = fixed.
      flip_prob: probability of a horizontal flip.
      brightness, contrast, saturation: a factor is drawn from [1 − x, 1 + x]; 0 = off.
      hue: a rotation is drawn from [−x, x] turns; 0 = off, at most 0.5; colour images only.
      blur_prob: probability of a Gaussian blur.
      min_blur_sigma, max_blur_sigma: range of its standard deviation, in pixels.
    """

    min_crop_area: float = 0.8
    max_crop_area: float = 0.8
    flip_prob: float = 0.5
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    blur_prob: float = 0.0
    min_blur_sigma: float = 0.1
    max_blur_sigma: float = 1.5

    def __post_init__(self) -> None:
        require(
            0 < self.min_crop_area <= self.max_crop_area <= 1,
            "crop areas must satisfy 0 < min_crop_area <= max_crop_area <= 1; "
            f"got {self.min_crop_area} and {self.max_crop_area}",
        )
        for name in ("flip_prob", "blur_prob"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name} must be in [0, 1]; got {value}")
        for name in ("brightness", "contrast", "saturation"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name} must be in [0, 1]; got {value}")
        require(0 <= self.hue <= 0.5, f"hue must be in [0, 0.5] turns; got {self.hue}")
        require(
            0 < self.min_blur_sigma <= self.max_blur_sigma,
            "blur sigmas must satisfy 0 < min_blur_sigma <= max_blur_sigma; "
            f"got {self.min_blur_sigma} and {self.max_blur_sigma}",
        )


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The encoder (station 5).

    Attributes:
      name: a name in `trainers.models.encoder.NETWORKS`, or `package.module:factory` for your own.
      embedding_dim: width of the unit embeddings the loss sees, after the projection head.
      precision: of its forward and backward pass: "float32", "bfloat16" or "float16". Loss, norms,
        clipping, sums and noise stay float32 or wider.
      loss_scale: public constant, a power of two, that float16 gradients are multiplied by inside the
        encoder and divided by before they are summed; unused otherwise.
      predictor: put a predictor behind the projection head, for methods that regress onto a target network.
    """

    name: str = "small_cnn"
    embedding_dim: int = 64
    precision: str = "float32"
    loss_scale: float = 1024.0
    predictor: bool = False
    task: ClassVar[str] = "images"
    learn_temperature: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.embedding_dim >= 2, f"embedding_dim must be at least 2; got {self.embedding_dim}")
        _check_precision(self.precision, self.loss_scale)


def _check_precision(precision: str, loss_scale: float) -> None:
    if precision not in PRECISIONS:
        raise ConfigError(unknown_choice("precision", precision, PRECISIONS))
    require(
        0 < loss_scale < math.inf and math.frexp(loss_scale)[0] == 0.5,
        f"loss_scale must be a power of two, for dividing by it to be exact; got {loss_scale}",
    )


@dataclass(frozen=True, kw_only=True)
class ClipNetworkConfig:
    """Both towers of a CLIP model, and what of it trains (station 5), for pairs of images and texts.

    Attributes:
      name: as `trainers.models.clip.published.ClipConfig.model`: open_clip's name, "clip-tiny", or a file.
      pretrained: "random", or open_clip's name of published weights; a file of one's own is a warm start.
      lora_rank: of the adapters; 0 trains every weight.
      lora_alpha: the adapters' scale times `lora_rank`.
      lora_targets: layers to adapt in every block: q, k, v, out, mlp, or a layer's own name.
      lora_towers: towers with adapters: image, text.
      learn_temperature: train log 1/τ, from the training's temperature on, inside the group norm.
      gradient_checkpointing: recompute activations; groups are then taken one at a time.
      precision, loss_scale: as in `NetworkConfig`.
    """

    name: str = "clip-tiny"
    pretrained: str = "random"
    lora_rank: int = 16
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = ("q", "v")
    lora_towers: tuple[str, ...] = ("image", "text")
    learn_temperature: bool = False
    gradient_checkpointing: bool = False
    precision: str = "float32"
    loss_scale: float = 1024.0
    predictor: ClassVar[bool] = False
    task: ClassVar[str] = "pairs"

    def __post_init__(self) -> None:
        require(self.lora_rank >= 0, f"lora_rank must be at least 1, or 0 for none; got {self.lora_rank}")
        _check_precision(self.precision, self.loss_scale)


@dataclass(frozen=True, kw_only=True)
class TextViewConfig:
    """How a caption becomes views (station 4); `trainers.views.captions` says what each augmentation does.

    Attributes:
      sentence_swap_prob: per view of a caption with several sentences; the default of the paper.
      word_swap_prob: per pair of adjacent words.
      word_delete_prob: per word that carries little meaning.
    """

    sentence_swap_prob: float = 0.5
    word_swap_prob: float = 0.0
    word_delete_prob: float = 0.0

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            require(0 <= value <= 1, f"{item.name} must be in [0, 1]; got {value}")
