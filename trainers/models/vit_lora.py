"""open_clip's ViT-B-32 image tower with LoRA on query and value: the image encoder of CLIP fine-tuning.

Its 87.8 million weights are frozen, and 589,824 weights train (Hu et al. 2022, rank 16). The weights are
random: nothing is downloaded. open_clip and peft are imported when a tower is built, not with this file, so
that trainings of other networks need not import them.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from dpgcl_core.errors import ConfigError
from trainers.models.attention import separate_attention
from trainers.models.lora import with_lora
from trainers.torchvision_import import open_clip

_COLOURS = 3


class ImageTower(nn.Module):
    """An open_clip image tower as a backbone: grey images are repeated to three channels.

    Args:
      tower: module from RGB images `[n, 3, H, W]` to features, with `image_size` (height, width) and
        `output_dim`.
      image_shape: (channels, height, width) of the images.

    Attributes:
      feature_dim: width of the features.

    Raises:
      ConfigError: the images have another size than the tower's, or neither 1 nor 3 channels.
    """

    def __init__(self, tower: nn.Module, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, *size = image_shape
        height, width = cast(tuple[int, int], tower.image_size)
        if size != [height, width]:
            raise ConfigError(
                f"this image tower reads images of {height}×{width} pixels; got {size[0]}×{size[1]}. "
                f"Load the images with --image-size {height}, or choose another network."
            )
        if channels not in (1, _COLOURS):
            raise ConfigError(f"this image tower reads images of 1 or 3 channels; got {channels}")
        self.feature_dim = cast(int, tower.output_dim)
        self.tower = tower

    def forward(self, images: Tensor) -> Tensor:
        """Return features `[n, feature_dim]` of images `[n, 1 or 3, H, W]`."""
        features: Tensor = self.tower(images.expand(-1, _COLOURS, -1, -1))
        return features


def vit_b_32_lora(image_shape: tuple[int, int, int]) -> ImageTower:
    """Return ViT-B-32 with random weights and adapters on query and value: 589,824 weights train.

    Args:
      image_shape: (1 or 3, 224, 224).

    Raises:
      ConfigError: the images have another shape.
    """
    # Uses the class itself rather than open_clip.create_model, which warns through the root logger.
    tower = open_clip().CLIP(**open_clip().get_model_config("ViT-B-32")).visual
    backbone = ImageTower(tower, image_shape)
    separate_attention(backbone)
    with_lora(backbone, rank=16, alpha=16, targets=("q_proj", "v_proj"))
    return backbone
