"""An exported model in the form that MLflow loads: images in, embeddings out.

MLflow imports this module by its name, from the code that is registered with the model, and passes it the
exported folder. Nothing is unpickled: weights are plain tensors, as everywhere in this package
(`trainers.export.export_folder`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from trainers.embed.embed_images import BACKBONE, embed_images
from trainers.embed.embed_pairs import embed_with_image_tower
from trainers.export.description import CLIP, ModelDescription, read_description
from trainers.export.export_folder import load_clip, load_encoder

FEATURES = "features"
"""Key in `params` of `predict`, with the value `backbone` or `projection`; a CLIP model ignores it."""


def _load_pyfunc(data_path: str) -> EmbeddingModel:
    """Return the model in an exported folder; MLflow calls this function by its name."""
    return EmbeddingModel(Path(data_path))


class EmbeddingModel:
    """Embeds images with an exported model.

    Args:
      folder: the folder that `python -m trainers.export` wrote.
    """

    def __init__(self, folder: Path | str) -> None:
        self.description: ModelDescription = read_description(folder)
        is_clip = self.description.kind == CLIP
        self._network: Any = (load_clip(folder) if is_clip else load_encoder(folder))[0]

    def predict(self, inputs: Any, params: Mapping[str, Any] | None = None) -> NDArray[np.float32]:
        """Return the embeddings of images, float32 `[num_images, dim]`.

        Args:
          inputs: uint8 images `[num_images, channels, height, width]` of the model's image shape, not
            normalised, as an array or as a mapping that holds only this array.
          params: `features`, see `FEATURES`.

        Raises:
          DataError: the images have another shape or type.
          ConfigError: the model has no features of the kind that `params` requests.
        """
        images = _checked_images(inputs, self.description.image_shape)
        if self.description.kind == CLIP:
            return embed_with_image_tower(self._network, images)
        features = str((params or {}).get(FEATURES, BACKBONE))
        return embed_images(self._network, images, features=features, batch_size=256)


def _checked_images(inputs: Any, image_shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    values = next(iter(inputs.values())) if isinstance(inputs, Mapping) and len(inputs) == 1 else inputs
    images = np.asarray(values)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != image_shape:
        raise DataError(
            f"the model reads images as uint8 [num_images, {', '.join(map(str, image_shape))}]; got "
            f"{images.dtype} {list(images.shape)}"
        )
    return images
