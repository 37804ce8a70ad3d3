"""The sides of the benchmark on pairs: the private step of a CLIP model, and ordinary steps of the same one.

As in `benchmarks.steps` all sides share network, views, records and optimizer, and take exactly B pairs in
every step. The first weights are random: what they are changes neither time nor memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.steps import GroupTask, OurStep, Step, Task
from dpgcl_core.clipping.types import trainable_parameters
from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.losses.info_nce import symmetric_group_info_nce
from trainers.config.training import (
    ClipNetworkConfig,
    EvaluationConfig,
    OptimizerConfig,
    TextViewConfig,
    TrainingConfig,
    ViewConfig,
)
from trainers.data.pairs import ImageTextRecords
from trainers.data.shapes import make_shape_pairs
from trainers.models.clip.encoder import ImageTextEncoder
from trainers.models.clip.published import CLIP_TINY, ClipConfig, find_clip
from trainers.tasks.pairs import pair_views
from trainers.training.microbatch import max_views
from trainers.training.optimizers import build_optimizer
from trainers.training.warm_start import starting_encoder

CLIP_NORM = 0.01
TEMPERATURE = 0.01
"""Those of the setting `paper-pairs`."""

WHOLE_BATCH, IN_GROUPS = "whole_batch", "in_groups"
ORDINARY = (WHOLE_BATCH, IN_GROUPS)
"""The ordinary steps: every pair against all others in one pass, or the private step's own groups."""


@dataclass(frozen=True, kw_only=True)
class PairTask(GroupTask):
    """A step on pairs of images and texts.

    Attributes:
      model: a CLIP model, as `trainers.models.clip.published.ClipConfig.model`.
      num_augmentations: N_a, further copies of both sides of a pair.
      lora_rank: of adapters on queries and values of both towers.
    """

    num_augmentations: int = 1
    lora_rank: int = 16

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width), those that the model reads."""
        return (3, *find_clip(ClipConfig(model=self.model)).image_size)

    @property
    def num_views(self) -> int:
        """Views of one record: image, caption, and copies of both."""
        return 2 + 2 * self.num_augmentations

    def config(self, views_per_microbatch: int | None) -> TrainingConfig:
        return TrainingConfig(
            mechanism=self.mechanism(CLIP_NORM),
            temperature=TEMPERATURE,
            num_augmentations=self.num_augmentations,
            views=ViewConfig(
                min_crop_area=0.8, max_crop_area=0.8, flip_prob=0.0, brightness=0.0, contrast=0.0
            ),
            text_views=TextViewConfig(),
            network=ClipNetworkConfig(name=self.model, lora_rank=self.lora_rank, precision=self.precision),
            optimizer=OptimizerConfig(name="adam"),
            performance=self.performance(views_per_microbatch),
            evaluation=EvaluationConfig(record_every_steps=0, also_untrained=False),
        )

    def records(self) -> ImageTextRecords:
        return _generated(self.expected_batch_size, self.image_shape[1])

    def tiny(self) -> PairTask:
        return replace(self, model=CLIP_TINY, group_size=2, expected_batch_size=4)


@lru_cache(maxsize=1)
def _generated(num_records: int, image_size: int) -> ImageTextRecords:
    return make_shape_pairs(num_records, seed=0, image_size=image_size)


def usual_microbatch(task: Task | PairTask) -> int:
    """Return the views that a training on this machine takes at once; of pairs those of both kinds."""
    config = task.config(None)
    encoder = starting_encoder(config, task.image_shape).to(task.device)
    return max_views(config, encoder, task.image_shape)


class OrdinaryPairStep:
    """Symmetric InfoNCE, ordinary backward passes and an optimizer step: no clipping, no noise.

    Written as a training without privacy would be: images and tokens go to their towers as they are.

    Args:
      whole_batch: compare every pair with all others, in one pass; else within the private step's groups, a
        microbatch of whole groups at a time.
    """

    def __init__(self, task: PairTask, views_per_microbatch: int, *, whole_batch: bool) -> None:
        torch.set_num_threads(task.threads)
        if task.precision != "float32":
            raise ConfigError(f"ordinary steps of pairs are in float32; got {task.precision}")
        self.task, self.views_per_microbatch, self.whole_batch = task, views_per_microbatch, whole_batch
        if whole_batch:
            self.views_per_microbatch = task.expected_batch_size * task.num_views
        self.records = task.records()
        self.config = task.config(views_per_microbatch)
        encoder = starting_encoder(self.config, task.image_shape).to(task.device)
        assert isinstance(encoder, ImageTextEncoder)
        self.encoder = encoder
        self.optimizer = build_optimizer(self.config.optimizer, trainable_parameters(encoder))
        self._generator = np.random.default_rng(0)
        self._step = 1

    def take(self) -> None:
        groups = self.task.groups(self._generator)
        if self.whole_batch:
            groups = groups.reshape(1, -1)
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulate(groups, step=self._step)
        self.optimizer.step()
        self._step += 1

    def accumulate(self, groups: NDArray[np.int64], *, step: int) -> None:
        """Add the gradient of the loss of `groups`, over the public divisor, to every parameter's `grad`."""
        at_once = self.task.groups_at_once(self.views_per_microbatch)
        for start in range(0, len(groups), at_once):
            images, tokens = self._views(groups[start : start + at_once], step)
            x, y = self.encoder(images, tokens)
            losses = symmetric_group_info_nce(
                x[:, :, 0], y[:, :, 0], x[:, :, 1:], y[:, :, 1:], temperature=self.config.temperature
            )
            (losses.sum() / self.config.mechanism.divisor).backward()

    def _views(self, groups: NDArray[np.int64], step: int) -> tuple[Tensor, Tensor]:
        """Images and tokens `[groups, group_size, 1 + num_augmentations, ...]`, those of the private step."""
        num_views = 1 + self.task.num_augmentations
        images, tokens = pair_views(
            self.config, self.encoder, self.records, groups.reshape(-1), step=step, num_views=num_views
        )
        return images.unflatten(0, groups.shape), tokens.unflatten(0, groups.shape)


def build_step(side: str, task: PairTask, views_per_microbatch: int) -> Step:
    """Return one side of a measurement: `ours`, or one of `ORDINARY`.

    Raises:
      ConfigError: there is no such side.
    """
    if side == "ours":
        return OurStep(task, views_per_microbatch)
    if side not in ORDINARY:
        raise ConfigError(unknown_choice("side", side, ("ours", *ORDINARY)))
    return OrdinaryPairStep(task, views_per_microbatch, whole_batch=side == WHOLE_BATCH)
