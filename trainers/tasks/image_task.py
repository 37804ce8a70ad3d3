"""Contrastive images: an image's views are pulled together, and the group's other images are pushed apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpgcl_core.clipping.cross_record import refuse_cross_record
from dpgcl_core.clipping.types import Embed
from dpgcl_core.errors import ConfigError
from trainers.config.networks import AnyNetworkConfig, NetworkConfig
from trainers.config.training import TrainingConfig
from trainers.data.dataset import AnyRecords
from trainers.data.pairs import ImageTextRecords
from trainers.data.records import Records
from trainers.evaluation import features
from trainers.evaluation.readout import check_readout
from trainers.evaluation.scorer import Scoring
from trainers.models.encoder import Encoder, ImageShape, build_encoder, to_fast_layout
from trainers.models.initial_encoder import load_warm_start
from trainers.models.precision import pass_in, scale_gradient
from trainers.tasks.contrastive import ContrastiveTask
from trainers.tasks.task import image_views


class ContrastiveImages(ContrastiveTask[Encoder]):
    """An encoder of images learns from images only."""

    name: ClassVar[str] = "images"

    def check_records(self, config: TrainingConfig, records: AnyRecords) -> None:
        if isinstance(records, ImageTextRecords):
            raise ConfigError(
                f"{config.network.name} is an image encoder; got pairs of images and texts. "
                "Choose another --network."
            )

    def build(
        self, config: TrainingConfig, image_shape: ImageShape, start_tensors: Mapping[str, Tensor] | None
    ) -> Encoder:
        assert isinstance(config.encoder, NetworkConfig)
        encoder = build_encoder(config.encoder, image_shape, config.public_seed)
        if config.warm_start is not None and start_tensors is not None:
            load_warm_start(encoder, config.warm_start, start_tensors)
        return encoder

    def check_network(self, config: TrainingConfig, network: Encoder, image_shape: ImageShape) -> None:
        refuse_cross_record(network, image_shape)
        check_readout(network, config.evaluation.readout)

    def fresh_parts(self, config: TrainingConfig) -> str:
        assert isinstance(config.network, NetworkConfig)
        start = config.warm_start
        whole = start is None or start.embedding_dim == config.network.embedding_dim
        return "" if whole else "the projection head"

    def place(self, network: Encoder, device: torch.device, image_shape: tuple[int, ...]) -> None:
        to_fast_layout(network, device, image_shape)

    def num_views(self, config: TrainingConfig, num_augmentations: int) -> int:
        return 2 + num_augmentations

    def inputs(
        self,
        config: TrainingConfig,
        network: Encoder,
        records: Records,
        groups: NDArray[np.int64],
        *,
        step: int,
        num_augmentations: int,
    ) -> Tensor:
        rows = groups.reshape(-1)
        pixels = records.images_at(rows, seed=config.public_seed, step=step)
        num_views = self.num_views(config, num_augmentations)
        views = image_views(config, network, pixels, records.ids[rows], step=step, num_views=num_views)
        return views.reshape(*groups.shape, *views.shape[1:])

    def blank_inputs(
        self, network: Encoder, image_shape: tuple[int, ...], shape: tuple[int, int, int]
    ) -> Tensor:
        return torch.zeros(*shape, *image_shape, device=next(network.parameters()).device)

    def embed(
        self, network: Encoder, precision: AnyNetworkConfig | None = None, target: Encoder | None = None
    ) -> Embed:
        config = precision or NetworkConfig()

        def embed(views: Tensor) -> Tensor:
            embeddings = scale_gradient(config, pass_in(config, network.embed_views, views))
            return embeddings if target is None else torch.cat([embeddings, targets(target, views)], dim=-1)

        def targets(target: Encoder, views: Tensor) -> Tensor:
            with torch.no_grad():
                rows = pass_in(config, target.without_predictor, views.flatten(0, 2))
            return rows.reshape(*views.shape[:3], rows.shape[-1])

        return embed

    def evaluate(self, network: Encoder, scoring: Scoring) -> dict[str, float]:
        if isinstance(scoring.queries, ImageTextRecords):
            raise ConfigError(
                "scoring image-text records needs an image tower and a text tower; got "
                f"{type(network).__name__}. Use a CLIP network."
            )
        if scoring.index is None:
            return {}
        return features.evaluate(network, scoring)


IMAGES = ContrastiveImages()
