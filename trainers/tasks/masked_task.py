"""Masked images: a network rebuilds the hidden patches of an image from the others (ViP, Yu et al. 2023).

The loss of a record is the mean squared error of its hidden patches, each normalised by its own mean and
variance (He et al. 2022, equation in section 3; ViP, equation 4). The loss depends on one image. The choice
of hidden patches is a keyed hash of (record, public seed, step, view, patch), like every other random
parameter of a view: it depends on no other record and on no place in the batch.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dpgcl_core.clipping.types import GroupInputs, Objective
from dpgcl_core.sampling.record_ids import Ids, keyed_uniform
from trainers.config.networks import AnyNetworkConfig, MaskedNetworkConfig
from trainers.config.training import TrainingConfig
from trainers.data.dataset import AnyRecords
from trainers.evaluation import features
from trainers.evaluation.scorer import Scoring
from trainers.models.encoder import ImageShape
from trainers.models.masked import MaskedAutoEncoder, build_masked
from trainers.models.precision import pass_in, scale_gradient
from trainers.tasks.record_task import NUM_PROBES, PerRecordTask, Rows
from trainers.tasks.task import image_views


class MaskedImages(PerRecordTask[MaskedAutoEncoder]):
    """An auto-encoder learns from each image separately; it does not see the texts of pairs."""

    name: ClassVar[str] = MaskedNetworkConfig.task

    def check_records(self, config: TrainingConfig, records: AnyRecords) -> None:
        """Accept all records, because all have images."""

    def fresh(self, config: TrainingConfig, image_shape: ImageShape) -> MaskedAutoEncoder:
        assert isinstance(config.encoder, MaskedNetworkConfig)
        return build_masked(config.encoder, image_shape, config.public_seed)

    def make_inputs(
        self, config: TrainingConfig, network: MaskedAutoEncoder, records: AnyRecords, rows: Rows, step: int
    ) -> tuple[Tensor, Tensor]:
        seed, ids = config.public_seed, records.ids[rows]
        pixels = records.images_at(rows, seed=seed, step=step)
        views = image_views(config, network, pixels, ids, step=step, num_views=1)
        return views, patch_orders(ids, network.num_patches, seed=seed, step=step)[:, None]

    def losses(self, network: MaskedAutoEncoder, precision: AnyNetworkConfig | None = None) -> Objective:
        config = precision or MaskedNetworkConfig()

        def losses(inputs: GroupInputs) -> Tensor:
            images, orders = (part.flatten(0, 2) for part in inputs)
            patches = pass_in(config, lambda part: network(part, orders), images)
            errors = scale_gradient(config, patches) - network.targets(images, orders)
            return errors.square().mean((1, 2)).reshape(len(inputs[0]), -1).mean(1)

        return losses

    def evaluate(self, network: MaskedAutoEncoder, scoring: Scoring) -> dict[str, float]:
        return features.evaluate(network, scoring)

    def draw_conditions(self, network: MaskedAutoEncoder, generator: torch.Generator) -> Tensor:
        """Return random orders of patches, `[NUM_PROBES, 1, 1, num_patches]`."""
        return torch.rand(NUM_PROBES, 1, 1, network.num_patches, generator=generator).argsort(-1)


MASKED_IMAGES = MaskedImages()


def patch_orders(ids: Ids, num_patches: int, *, seed: int, step: int) -> Tensor:
    """Return a uniformly random order of each image's patches, int64 `[n, num_patches]`.

    The order is a function of (id, public seed, step) and nothing else: a record that is sampled at another
    step gets another order.

    >>> ids = np.arange(3, dtype=np.uint64)
    >>> all_three = patch_orders(ids, 5, seed=0, step=1)
    >>> torch.equal(all_three[2:], patch_orders(ids[2:], 5, seed=0, step=1))
    True
    """
    draws = [keyed_uniform(ids, "mask", seed, step, 0, patch) for patch in range(num_patches)]
    return torch.from_numpy(np.stack(draws, axis=1).argsort(axis=-1, kind="stable"))
