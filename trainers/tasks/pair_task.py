"""Contrastive pairs: images and their captions are pulled together, and other pairs of the group apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpgcl_core.clipping.types import Embed
from dpgcl_core.errors import ConfigError
from trainers.config.networks import AnyNetworkConfig, ClipNetworkConfig, NetworkConfig
from trainers.config.training import TOWERS, TrainingConfig
from trainers.data.dataset import AnyRecords
from trainers.data.pairs import ImageTextRecords
from trainers.data.shapes import make_shape_pairs
from trainers.evaluation import pair_scores
from trainers.evaluation.readout import check_readout
from trainers.evaluation.scorer import Scoring
from trainers.models.captioner import Captioner
from trainers.models.clip.clip_encoder import (
    ImageTextEncoder,
    pack_views,
    prove_towers_train,
    refuse_mixed_pairs,
    refuse_other_size,
)
from trainers.models.clip.initial_clip import published_note, starting_clip
from trainers.models.encoder import ImageShape
from trainers.models.precision import pass_in, scale_gradient
from trainers.tasks.contrastive import ContrastiveTask
from trainers.tasks.task import image_views
from trainers.views.caption_views import make_text_views


class ContrastivePairs(ContrastiveTask[ImageTextEncoder]):
    """Both towers of a CLIP model learn from images with captions."""

    name: ClassVar[str] = "pairs"
    fewest_views: ClassVar[int] = 2
    cpu_views_at_once: ClassVar[int] = 32
    """A view of a ViT-B/32 takes some 40 MB, but few views make small matrices. A step with 6 views at once
    took 1.3 times as long as a step with 32."""

    def check_records(self, config: TrainingConfig, records: AnyRecords) -> None:
        if not isinstance(records, ImageTextRecords):
            raise ConfigError(
                f"{config.network.name} is a CLIP model; got images without captions. Choose "
                "another --network."
            )

    def build(
        self, config: TrainingConfig, image_shape: ImageShape, start_tensors: Mapping[str, Tensor] | None
    ) -> ImageTextEncoder:
        return starting_clip(config, None if start_tensors is None else config.warm_start)

    def check_network(
        self, config: TrainingConfig, network: ImageTextEncoder, image_shape: ImageShape
    ) -> None:
        check_readout(network, config.evaluation.readout)
        refuse_other_size(network.spec, image_shape)
        refuse_mixed_pairs(network)
        prove_towers_train(network)
        if config.per_tower_clipping:
            TOWERS.owners(network)

    def start_note(self, config: TrainingConfig) -> str:
        assert isinstance(config.encoder, ClipNetworkConfig)
        return published_note(config.encoder)

    def num_views(self, config: TrainingConfig, num_augmentations: int) -> int:
        return 2 * (1 + num_augmentations)

    def inputs(
        self,
        config: TrainingConfig,
        network: ImageTextEncoder,
        records: ImageTextRecords,
        groups: NDArray[np.int64],
        *,
        step: int,
        num_augmentations: int,
    ) -> Tensor:
        num_views = self.num_views(config, num_augmentations) // 2
        both = pair_views(config, network, records, groups.reshape(-1), step=step, num_views=num_views)
        views = pack_views(*both, network)
        return views.reshape(*groups.shape, *views.shape[1:])

    def blank_inputs(
        self, network: ImageTextEncoder, image_shape: tuple[int, ...], shape: tuple[int, int, int]
    ) -> Tensor:
        return torch.zeros(*shape, network.view_size, device=next(network.parameters()).device)

    def synthetic_records(self, count: int, image_shape: tuple[int, ...]) -> ImageTextRecords:
        return make_shape_pairs(count, seed=0, image_size=image_shape[1])

    def embed(
        self,
        network: ImageTextEncoder,
        precision: AnyNetworkConfig | None = None,
        target: ImageTextEncoder | None = None,
    ) -> Embed:
        """Return stage 5 as every contrastive task; a learned temperature τ multiplies embeddings by 1/√τ."""
        config = precision or NetworkConfig()
        assert target is None  # `TrainingConfig` refuses methods that regress onto a target

        def embed(views: Tensor) -> Tensor:
            embeddings = pass_in(config, network.embed_views, views)
            return scale_gradient(config, network.with_temperature(embeddings))

        return embed

    def after_step(self, network: ImageTextEncoder) -> None:
        network.limit_logit_scale_()

    def evaluate(self, network: ImageTextEncoder, scoring: Scoring) -> dict[str, float]:
        if scoring.index is None and not isinstance(scoring.queries, ImageTextRecords):
            return {}
        return pair_scores.evaluate(network, scoring)


PAIRS = ContrastivePairs()


def pair_views(
    config: TrainingConfig,
    encoder: ImageTextEncoder | Captioner,
    records: ImageTextRecords,
    rows: NDArray[np.int64],
    *,
    step: int,
    num_views: int,
) -> tuple[Tensor, Tensor]:
    """Return the image views and text views of pairs at a step, on the encoder's device.

    Args:
      config: the configuration with augmentations and seed.
      encoder: the network that takes the views; its tokenizer makes the tokens.
      records: the pairs.
      rows: `[n]`, rows of the records.
      step: the training step.
      num_views: number of views of each image, and of each text.

    Returns:
      images, float32 `[n, num_views, channels, height, width]`, and tokens, `[n, num_views, context]`.
    """
    assert config.text_views is not None
    seed, ids = config.public_seed, records.ids[rows]
    pixels, captions = records.pairs_at(rows, seed=seed, step=step)
    texts = make_text_views(
        captions, ids, config=config.text_views, seed=seed, step=step, num_views=num_views
    )
    images = image_views(config, encoder, pixels, ids, step=step, num_views=num_views)
    tokens = encoder.tokenizer([text for views in texts for text in views]).tokens
    return images, tokens.reshape(len(rows), num_views, tokens.shape[-1]).to(images.device)
