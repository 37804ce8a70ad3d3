"""The sides of a measurement: our private step, and ordinary steps without privacy.

All share network, loss, views and optimizer, and take the same number of records in every step. The sampling
probability is 1 over exactly B records, so ratios have no Poisson variation. Initial weights are random for
every network, because they affect neither time nor memory.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpgcl_core.clipping import clipper as clipping
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.types import GroupInputs, Objective, no_sum, trainable_parameters
from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.numbers import default_delta
from dpgcl_core.private_training import PrivateTraining
from dpgcl_core.workers import SingleWorker, Workers
from trainers.config.networks import (
    AnyNetworkConfig,
    CaptionerConfig,
    ClipNetworkConfig,
    MaskedNetworkConfig,
    NetworkConfig,
    TextViewConfig,
    ViewConfig,
)
from trainers.config.nodes import EvaluationConfig, OptimizerConfig, PerformanceConfig
from trainers.config.training import TrainingConfig
from trainers.data.dataset import AnyRecords, TrainingData
from trainers.models import captioner, masked
from trainers.models.clip.published_models import CLIP_TINY, ClipConfig, find_clip
from trainers.models.encoder import NETWORKS
from trainers.tasks.task import task_named, task_of
from trainers.training.microbatch import max_views
from trainers.training.optimizers import build_optimizer
from trainers.training.step import prepare
from trainers.training.warm_start import starting_encoder

CLIP_NORM = 1.0
IMAGE_SHAPES = {
    "tiny_cnn": (1, 28, 28),
    "small_cnn": (1, 28, 28),
    "wide_cnn": (1, 28, 28),
    "resnet18": (3, 32, 32),
    "vit_b_32_lora": (3, 224, 224),
    "mae-toy": (1, 28, 28),
    "mae-base": (3, 224, 224),
    "cap-toy": (3, 32, 32),
    "cap-base": (3, 224, 224),
}
"""(channels, height, width) for each network; a CLIP model takes images of its own size."""

_SMALL = (48, 96, 192, 384, 768, 1536)
MICROBATCHES = {
    "tiny_cnn": _SMALL,
    "small_cnn": _SMALL,
    "wide_cnn": _SMALL,
    "resnet18": (24, 48, 96, 192, 384),
    "vit_b_32_lora": (12, 24, 48, 96, 192),
    "mae-toy": (64, 128, 256, 512),
    "cap-toy": (32, 64, 128, 256),
    "mae-base": (8, 16),
    "cap-base": (8, 16),
}
"""Views per microbatch that the search tries; larger ones do not fit into a workstation's memory. A CLIP
model uses the microbatch of a training."""

OURS, NON_PRIVATE, WHOLE_BATCH = "ours", "non_private", "whole_batch"


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """The work of one step, the same for all sides and independent of the kind of records.

    Attributes:
      model: the network.
      group_size: S.
      expected_batch_size: B, the exact number of records per step.
      threads: CPU threads.
      device: cpu or cuda.
      precision: precision of the forward and backward pass, as in `NetworkConfig`.
    """

    model: str
    group_size: int
    expected_batch_size: int
    threads: int
    device: str = "cpu"
    precision: str = "float32"

    def __post_init__(self) -> None:
        if not 1 <= self.group_size <= self.expected_batch_size:
            raise ConfigError(
                "group_size must be in [1, expected_batch_size]; got "
                f"{self.group_size} and {self.expected_batch_size}"
            )

    @property
    @abstractmethod
    def num_views(self) -> int:
        """The number of views of one record."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        return IMAGE_SHAPES[self.model]

    @property
    @abstractmethod
    def tiny(self) -> Task:
        """The same task with two small groups and the smallest network."""

    @abstractmethod
    def config(self, views_per_microbatch: int | None) -> TrainingConfig:
        """Return the training whose step is measured; None lets it choose the microbatch."""

    @property
    def sides(self) -> tuple[str, ...]:
        """The private step and the ordinary steps that it is compared with."""
        return OURS, NON_PRIVATE

    def records(self) -> AnyRecords:
        """Return B records, the same object for every side of a measurement."""
        return _synthetic_records(self.config(None).task, self.expected_batch_size, self.image_shape)

    def groups(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """Return the rows of one step, `[groups, group_size]`."""
        order = generator.permutation(self.expected_batch_size)
        num_groups = len(order) // self.group_size
        return order[: num_groups * self.group_size].reshape(num_groups, self.group_size)

    def groups_at_once(self, views_per_microbatch: int) -> int:
        """Return the number of whole groups in one microbatch, at least one."""
        return max(1, views_per_microbatch // (self.group_size * self.num_views))

    def usual_microbatch(self) -> int:
        """Return a training's views per microbatch on this machine; both sides of a pair count."""
        config = self.config(None)
        encoder = starting_encoder(config, self.image_shape).to(self.device)
        most = self.expected_batch_size * self.num_views
        return min(most, max_views(config, encoder, self.image_shape))

    def _mechanism(self, method: str = "dp_gcl", l2_clip_norm: float = CLIP_NORM) -> Mechanism:
        """Return the mechanism of a private step of exactly B records."""
        size = self.expected_batch_size
        return Mechanism(
            method=method,
            num_records_public=size,
            sampling_prob=1.0,
            group_size=self.group_size,
            l2_clip_norm=l2_clip_norm,
            noise_multiplier=1.0,
            num_steps=1_000_000,
            target_delta=default_delta(size),
        )

    def _config(
        self,
        views_per_microbatch: int | None,
        *,
        mechanism: Mechanism,
        views: ViewConfig,
        network: AnyNetworkConfig,
        **settings: object,
    ) -> TrainingConfig:
        """Return a training with this task's threads, device and microbatch, without scores."""
        performance = PerformanceConfig(
            threads_per_worker=self.threads,
            max_views_per_microbatch=views_per_microbatch,
            device=self.device,
        )
        unscored = EvaluationConfig(record_every_steps=0, also_untrained=False)
        return TrainingConfig(
            mechanism=mechanism,
            views=views,
            network=network,
            performance=performance,
            evaluation=unscored,
            **settings,  # type: ignore[arg-type]
        )


@dataclass(frozen=True, kw_only=True)
class ImageTask(Task):
    """A step on images, for a network of `trainers.models.encoder.NETWORKS`."""

    num_views: ClassVar[int] = 3  # query, key and one augmented key

    @property
    def tiny(self) -> Task:
        return replace(self, model="tiny_cnn", group_size=2, expected_batch_size=4)

    def config(self, views_per_microbatch: int | None) -> TrainingConfig:
        return self._config(
            views_per_microbatch,
            mechanism=self._mechanism(),
            views=ViewConfig(min_crop_area=0.3, max_crop_area=1.0, brightness=0.4, contrast=0.4),
            network=NetworkConfig(name=self.model, precision=self.precision),
            optimizer=OptimizerConfig(name="adam"),
        )


@dataclass(frozen=True, kw_only=True)
class PairTask(Task):
    """A step on pairs of images and texts, in the setting `paper-pairs`.

    Attributes:
      model: a CLIP model, as `trainers.models.clip.published_models.ClipConfig.model`.
      num_augmentations: N_a, further copies of both sides of a pair.
      lora_rank: rank of the adapters on queries and values of both towers; 0 trains all weights.
    """

    num_augmentations: int = 1
    lora_rank: int = 16

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (3, *find_clip(ClipConfig(model=self.model)).image_size)

    @property
    def num_views(self) -> int:
        """The number of views of one record: image, caption, and copies of both."""
        return 2 + 2 * self.num_augmentations

    @property
    def tiny(self) -> Task:
        return replace(self, model=CLIP_TINY, group_size=2, expected_batch_size=4)

    @property
    def sides(self) -> tuple[str, ...]:
        """Ordinary CLIP compares every pair with all others, in one pass."""
        return OURS, NON_PRIVATE, WHOLE_BATCH

    def config(self, views_per_microbatch: int | None) -> TrainingConfig:
        return self._config(
            views_per_microbatch,
            mechanism=self._mechanism(l2_clip_norm=0.01),
            temperature=0.01,
            num_augmentations=self.num_augmentations,
            views=ViewConfig(
                min_crop_area=0.8, max_crop_area=0.8, flip_prob=0.0, brightness=0.0, contrast=0.0
            ),
            text_views=TextViewConfig(),
            network=ClipNetworkConfig(name=self.model, lora_rank=self.lora_rank, precision=self.precision),
            optimizer=OptimizerConfig(name="adam"),
        )


@dataclass(frozen=True, kw_only=True)
class RecordTask(Task):
    """A step of a masked auto-encoder or of a captioner, which clip each record separately.

    Attributes:
      model: a network of `trainers.models.masked.SIZES` or of `trainers.models.captioner.SIZES`.
      tie_embeddings: whether a captioner shares one embedding table between input and output tokens.
    """

    group_size: int = 1
    tie_embeddings: bool = False
    num_views: ClassVar[int] = 1

    @property
    def tiny(self) -> Task:
        toy = "mae-toy" if self.model in masked.SIZES else "cap-toy"
        return replace(self, model=toy, expected_batch_size=4)

    def config(self, views_per_microbatch: int | None) -> TrainingConfig:
        network: MaskedNetworkConfig | CaptionerConfig
        if self.model in masked.SIZES:
            network = MaskedNetworkConfig(name=self.model, precision=self.precision)
        else:
            network = CaptionerConfig(
                name=self.model, precision=self.precision, tie_embeddings=self.tie_embeddings
            )
        return self._config(
            views_per_microbatch,
            mechanism=self._mechanism("dp_cap" if network.takes_pairs else "dp_mae"),
            num_augmentations=0,
            views=ViewConfig(flip_prob=0.0, brightness=0.0, contrast=0.0),
            text_views=TextViewConfig() if network.takes_pairs else None,
            network=network,
            optimizer=OptimizerConfig(name="adamw"),
        )


def task_class(model: str) -> type[Task]:
    """Return the kind of task that a network is measured on.

    Raises:
      ConfigError: there is no such network.
    """
    if model in NETWORKS:
        return ImageTask
    if model in masked.SIZES or model in captioner.SIZES:
        return RecordTask
    try:
        find_clip(ClipConfig(model=model))
    except ConfigError:
        known = [*NETWORKS, *masked.SIZES, *captioner.SIZES, CLIP_TINY, "ViT-B-32"]
        raise ConfigError(unknown_choice("network", model, known)) from None
    return PairTask


@lru_cache(maxsize=1)
def _synthetic_records(task: str, count: int, image_shape: tuple[int, int, int]) -> AnyRecords:
    return task_named(task).synthetic_records(count, image_shape)


def unscored_data(records: AnyRecords, *, are_public: bool = True) -> TrainingData:
    """Return data that are trained on, and not scored on."""
    return TrainingData(
        train=records, index=None, queries=None, train_is_public=are_public, evaluation_is_public=are_public
    )


class Step(Protocol):
    """One side of a measurement, ready to be timed."""

    views_per_microbatch: int

    def take(self) -> None:
        """Take one whole step."""


class OurStep:
    """The private step of the training loop."""

    def __init__(self, task: Task, views_per_microbatch: int, workers: Workers | None = None) -> None:
        self.task, self.views_per_microbatch = task, views_per_microbatch
        self.records = task.records()
        config, data = task.config(views_per_microbatch), unscored_data(self.records)
        self.run = prepare(config, data, workers or SingleWorker())
        self.run.num_steps_done = 1  # by-products are recorded only at the first step

    def take(self) -> None:
        self.run.take_step()

    def inputs(self, groups: NDArray[np.int64], step: int) -> GroupInputs:
        """Return the objective's inputs for `groups` at a step."""
        config = self.run.config
        return self.run.task.inputs(
            config,
            self.run.encoder,
            self.records,
            groups,
            step=step,
            num_augmentations=config.num_augmentations,
        )

    def check(self, max_groups: int = 32, draws: int = 5) -> Check:
        """Compare the clipped sums of a few microbatches with `exact_clipped_sum`, always in float32.

        The errors are medians over the draws. If the input of a ReLU is zero up to rounding, one sum may
        include the gradient behind it and the other may not. For this reason, torch's own gradients in
        float32 and float64 differ by 5e-5 to 8e-4 in about one of thirty draws (small_cnn, 32 groups of two).
        """
        config, encoder = self.run.config, self.run.encoder
        task = self.run.task
        objective, in_full = task.objective(config, encoder, config.network), task.objective(config, encoder)
        rule = config.rule()
        assert isinstance(rule, GroupClipper)
        size = min(max_groups, self.task.groups_at_once(self.views_per_microbatch))
        errors: list[tuple[float, float]] = []
        for draw in range(draws):
            inputs = self.inputs(self.task.groups(np.random.default_rng(draw))[:size], draw)
            actual = no_sum(encoder)
            report = rule.add_clipped_sum(actual, encoder, objective, inputs)
            exact = exact_clipped_sum(encoder, in_full, inputs, config.mechanism.l2_clip_norm)
            errors.append(relative_errors(encoder, actual, exact))
        whole, parameter = (statistics.median(each) for each in zip(*errors, strict=True))
        return Check(relative_error=whole, parameter_error=parameter, paths=dict(report.paths))


class OwnLoopStep:
    """The private step of a user's own loop, on random views.

    Args:
      task: the network and loss, and the number of records per step.
      views_per_microbatch: views passed at once, in whole groups.
    """

    def __init__(self, task: Task, views_per_microbatch: int) -> None:
        torch.set_num_threads(task.threads)
        self.views_per_microbatch, config = views_per_microbatch, task.config(views_per_microbatch)
        encoder = starting_encoder(config, task.image_shape)
        generator = torch.Generator().manual_seed(0)  # all processes must have the same records
        views = torch.rand(task.expected_batch_size, task.num_views, *task.image_shape, generator=generator)
        self._training = PrivateTraining(
            config.mechanism,
            encoder,
            build_optimizer(config.optimizer, trainable_parameters(encoder)),
            DataLoader(TensorDataset(views), batch_size=task.expected_batch_size),
            loss=task_of(config).objective(config, encoder, config.network),
            max_groups_at_once=task.groups_at_once(views_per_microbatch),
            mixes_no_records=True,
        )
        self._draws = iter(self._training)

    def take(self) -> None:
        self._training.step(next(self._draws))


@dataclass(frozen=True, kw_only=True)
class Check:
    """The distance of our clipped sums from exact ones.

    Attributes:
      relative_error: ‖actual − exact‖ / ‖exact‖ of a clipped sum, the median over a few draws.
      parameter_error: the same for the worst parameter tensor, where cancelling terms leave more rounding.
      paths: the path that computed each layer's norm, by layer name.
    """

    relative_error: float
    parameter_error: float
    paths: dict[str, str]


def exact_clipped_sum(
    encoder: nn.Module,
    group_losses: Objective,
    views: GroupInputs,
    l2_clip_norm: float,
    *,
    together: bool = False,
) -> Tensor:
    """Return Σ Clip_C(∇L_G) by one exact backward pass per group, with norms and sum in float64.

    With `together`, all groups share one forward pass, and each backward pass goes through all of them. A
    separate forward pass rounds a group's activations differently. If a ReLU's input is zero up to rounding,
    a different gradient is then correct.
    """
    parameters = trainable_parameters(encoder)
    leaves, is_one = ([views], True) if isinstance(views, Tensor) else (list(views), False)
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64, device=leaves[0].device)
    losses: Iterable[Tensor] = (
        group_losses(group[0][None] if is_one else tuple(leaf[None] for leaf in group)).sum()
        for group in zip(*leaves, strict=True)
    )
    if together:
        losses = group_losses(views)
    for loss in losses:
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=together)
        flat = torch.cat(
            [
                torch.zeros_like(p).double().flatten() if g is None else g.double().flatten()
                for g, p in zip(gradients, parameters, strict=True)
            ]
        )
        # The clipper scales to this margin below C, to allow for rounding.
        bound = l2_clip_norm * clipping._MARGIN
        total += flat * min(1.0, bound / max(float(flat.square().sum().sqrt()), 1e-300))
    return total


def relative_errors(encoder: nn.Module, actual: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return ‖actual − exact‖ / ‖exact‖ of the whole vector, and the largest one of a parameter tensor.

    A tensor whose exact sum is zero up to rounding is measured relative to the whole vector.
    """
    actual, length = actual.double(), float(exact.norm())
    sizes = [parameter.numel() for parameter in trainable_parameters(encoder)]
    errors = [
        float((a - e).norm()) / max(float(e.norm()), 1e-6 * length)
        for a, e in zip(actual.split(sizes), exact.split(sizes), strict=True)
    ]
    return float((actual - exact).norm()) / length, max(errors)


class OrdinaryStep:
    """One ordinary backward pass per microbatch and an optimizer step: no clipping, no noise.

    Args:
      task: the records, network and loss.
      views_per_microbatch: views passed at once, in whole groups.
      whole_batch: whether all B records form one group, passed at once, instead of the private step's groups.
      channels_last: whether weights and activations have the channels as the last axis in memory.
    """

    def __init__(
        self,
        task: Task,
        views_per_microbatch: int,
        *,
        whole_batch: bool = False,
        channels_last: bool = False,
    ) -> None:
        if task.precision == "float16":
            raise ConfigError("precision of ordinary steps must be float32 or bfloat16; got float16")
        torch.set_num_threads(task.threads)
        if whole_batch:
            size = task.expected_batch_size
            task, views_per_microbatch = replace(task, group_size=size), size * task.num_views
        self.task, self.views_per_microbatch = task, views_per_microbatch
        self.channels_last = channels_last
        self.records, self.config = task.records(), task.config(views_per_microbatch)
        layout = torch.channels_last if channels_last else torch.preserve_format
        self.encoder = starting_encoder(self.config, task.image_shape).to(task.device)
        self.encoder.to(memory_format=layout)  # type: ignore[call-overload]
        self.losses = task_of(self.config).objective(self.config, self.encoder, self.config.network)
        self.optimizer = build_optimizer(self.config.optimizer, trainable_parameters(self.encoder))
        self._generator = np.random.default_rng(0)
        self._step = 1

    def take(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulate(self.task.groups(self._generator), step=self._step)
        self.optimizer.step()
        self._step += 1

    def accumulate(self, groups: NDArray[np.int64], *, step: int) -> None:
        """Add the gradient of the groups' loss, divided by the public divisor, to each parameter's `grad`."""
        at_once = self.task.groups_at_once(self.views_per_microbatch)
        for start in range(0, len(groups), at_once):
            inputs = task_of(self.config).inputs(
                self.config,
                self.encoder,
                self.records,
                groups[start : start + at_once],
                step=step,
                num_augmentations=self.config.num_augmentations,
            )
            (self.losses(inputs).sum() / self.config.mechanism.divisor).backward()


def build_step(side: str, task: Task, views_per_microbatch: int, *, channels_last: bool = False) -> Step:
    """Return one side of a measurement, ready to be timed.

    Args:
      side: `ours`, `non_private` or `whole_batch`.
      task: the work of one step.
      views_per_microbatch: views passed at once.
      channels_last: the memory layout of ordinary steps.

    Raises:
      ConfigError: there is no such side.
    """
    if side not in (OURS, NON_PRIVATE, WHOLE_BATCH):
        raise ConfigError(unknown_choice("side", side, (OURS, NON_PRIVATE, WHOLE_BATCH)))
    if side == OURS:
        return OurStep(task, views_per_microbatch)
    return OrdinaryStep(
        task, views_per_microbatch, whole_batch=side == WHOLE_BATCH, channels_last=channels_last
    )
