"""The sides of the benchmark on single records: masked auto-encoders and captioners, private and ordinary.

As in `benchmarks.steps` both sides share network, views and records, and take exactly B of them in every
step. The ordinary step minimises the mean loss of the same records, as a training without privacy would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.steps import CLIP_NORM, GroupTask, OurStep, Step
from dpgcl_core.clipping.types import trainable_parameters
from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.mechanism.mechanism import Mechanism
from trainers.config.training import (
    CaptionerConfig,
    EvaluationConfig,
    MaskedNetworkConfig,
    OptimizerConfig,
    TextViewConfig,
    TrainingConfig,
    ViewConfig,
)
from trainers.data.dataset import AnyRecords
from trainers.models import captioner, masked
from trainers.tasks.task import task_of
from trainers.training.optimizers import build_optimizer

ORDINARY = "non_private"
_METHODS = {MaskedNetworkConfig.task: "dp_mae", CaptionerConfig.task: "dp_cap"}


@dataclass(frozen=True, kw_only=True)
class RecordTask(GroupTask):
    """A step on single records, each clipped by itself.

    Attributes:
      model: a network of `trainers.models.masked.SIZES` or of `trainers.models.captioner.SIZES`.
      image_size: pixels of the square images; None for 28 and 32 of the toys, 224 of the others.
      tie_embeddings: of a captioner.
    """

    group_size: int = 1
    image_size: int | None = None
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in {**masked.SIZES, **captioner.SIZES}:
            raise ConfigError(unknown_choice("model", self.model, [*masked.SIZES, *captioner.SIZES]))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        usual = {"mae-toy": 28, "cap-toy": 32}.get(self.model, 224)
        side = self.image_size or usual
        return (1 if self.model == "mae-toy" else 3), side, side

    @property
    def num_views(self) -> int:
        """Views of one record."""
        return 1

    @property
    def network(self) -> MaskedNetworkConfig | CaptionerConfig:
        """The network's configuration."""
        if self.model in masked.SIZES:
            return MaskedNetworkConfig(name=self.model, precision=self.precision)
        return CaptionerConfig(name=self.model, precision=self.precision, tie_embeddings=self.tie_embeddings)

    def mechanism(self, l2_clip_norm: float) -> Mechanism:
        return replace(super().mechanism(l2_clip_norm), method=_METHODS[self.network.task])

    def config(self, views_per_microbatch: int | None) -> TrainingConfig:
        return TrainingConfig(
            mechanism=self.mechanism(CLIP_NORM),
            num_augmentations=0,
            views=ViewConfig(flip_prob=0.0, brightness=0.0, contrast=0.0),
            text_views=TextViewConfig() if self.network.takes_pairs else None,
            network=self.network,
            optimizer=OptimizerConfig(name="adamw"),
            performance=self.performance(views_per_microbatch),
            evaluation=EvaluationConfig(record_every_steps=0, also_untrained=False),
        )

    def records(self) -> AnyRecords:
        return task_of(self.config(None)).synthetic_records(self.expected_batch_size, self.image_shape)

    def tiny(self) -> RecordTask:
        toy = "mae-toy" if self.model in masked.SIZES else "cap-toy"
        return replace(self, model=toy, expected_batch_size=4, image_size=None)


class OrdinaryRecordStep:
    """One ordinary backward pass per microbatch and an optimizer step: no clipping, no noise."""

    def __init__(self, task: RecordTask, views_per_microbatch: int) -> None:
        torch.set_num_threads(task.threads)
        if task.precision == "float16":
            raise ConfigError("ordinary steps of records are in float32 or bfloat16; got float16")
        self.task, self.views_per_microbatch = task, views_per_microbatch
        self.records, self.config = task.records(), task.config(views_per_microbatch)
        self._of_records = task_of(self.config)
        self.network = self._of_records.build(self.config, task.image_shape, None).to(task.device)
        self.losses = self._of_records.objective(self.config, self.network, self.config.network)
        self.optimizer = build_optimizer(self.config.optimizer, trainable_parameters(self.network))
        self._generator = np.random.default_rng(0)
        self._step = 1

    def take(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulate(self.task.groups(self._generator), step=self._step)
        self.optimizer.step()
        self._step += 1

    def accumulate(self, groups: NDArray[np.int64], *, step: int) -> None:
        """Add the gradient of the mean loss of `groups` to every parameter's `grad`."""
        at_once = self.task.groups_at_once(self.views_per_microbatch)
        for start in range(0, len(groups), at_once):
            inputs = self._of_records.inputs(
                self.config,
                self.network,
                self.records,
                groups[start : start + at_once],
                step=step,
                num_augmentations=0,
            )
            (self.losses(inputs).sum() / self.config.mechanism.divisor).backward()


def build_step(side: str, task: RecordTask, views_per_microbatch: int) -> Step:
    """Return one side of a measurement, `ours` or `ORDINARY`."""
    if side == "ours":
        return OurStep(task, views_per_microbatch)
    return OrdinaryRecordStep(task, views_per_microbatch)
