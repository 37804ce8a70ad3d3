"""The two sides of the benchmark: our private step, and the ordinary step that knows nothing of privacy.

Both use the same network, group loss, views and optimizer, and take the same number of records in every
step: the sampling probability is 1 over exactly B records, so that no Poisson variation is in a ratio.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpgcl_core.clipping import clipper as clipping
from dpgcl_core.clipping.types import GroupInputs, Objective, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import GroupRule
from dpgcl_core.mechanism.numbers import default_delta
from trainers.config.training import (
    EvaluationConfig,
    NetworkConfig,
    OptimizerConfig,
    PerformanceConfig,
    TrainingConfig,
    ViewConfig,
)
from trainers.data.dataset import AnyRecords, TrainingData
from trainers.data.records import Records
from trainers.models.encoder import build_encoder
from trainers.models.precision import gradient_scale
from trainers.tasks.images import IMAGES
from trainers.training import loop
from trainers.training.optimizers import build_optimizer
from trainers.training.precision import add_clipped_sum
from trainers.training.workers import SingleWorker, Workers
from trainers.views.images import make_views

CLIP_NORM = 1.0
IMAGE_SHAPES = {
    "tiny_cnn": (1, 28, 28),
    "small_cnn": (1, 28, 28),
    "wide_cnn": (1, 28, 28),
    "resnet18": (3, 32, 32),
    "vit_b_32_lora": (3, 224, 224),
}
"""(channels, height, width) on which each network is measured unless told otherwise."""

MICROBATCHES = {
    "tiny_cnn": (48, 96, 192, 384, 768, 1536),
    "small_cnn": (48, 96, 192, 384, 768, 1536),
    "wide_cnn": (48, 96, 192, 384, 768, 1536),
    "resnet18": (24, 48, 96, 192, 384),
    "vit_b_32_lora": (12, 24, 48, 96, 192),
}
"""Views passed at once that the search tries; larger ones do not fit into a workstation's memory."""


@dataclass(frozen=True, kw_only=True)
class GroupTask(ABC):
    """What every side has to do in one step, whatever the records are.

    Attributes:
      model: the network.
      group_size: S.
      expected_batch_size: B, records per step, exactly.
      threads: CPU threads.
      device: cpu or cuda.
      precision: of the forward and backward pass, as in `NetworkConfig`.
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
        """Views of one record."""

    @abstractmethod
    def config(self, views_per_microbatch: int | None) -> TrainingConfig:
        """Return the training of which one step is measured; None leaves the microbatch to it."""

    @abstractmethod
    def records(self) -> AnyRecords:
        """Return B records, the same object for every side of a measurement."""

    @abstractmethod
    def tiny(self) -> GroupTask:
        """Return the same task of two small groups and the smallest network."""

    def mechanism(self, l2_clip_norm: float) -> Mechanism:
        """Return a private step of exactly B records."""
        size = self.expected_batch_size
        return Mechanism(
            num_records_public=size,
            sampling_prob=1.0,
            group_size=self.group_size,
            l2_clip_norm=l2_clip_norm,
            noise_multiplier=1.0,
            num_steps=1_000_000,
            target_delta=default_delta(size),
        )

    def performance(self, views_per_microbatch: int | None) -> PerformanceConfig:
        """Return threads, device and microbatch."""
        return PerformanceConfig(
            threads_per_worker=self.threads,
            max_views_per_microbatch=views_per_microbatch,
            device=self.device,
        )

    def groups(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """Return the rows of one step, `[groups, group_size]`."""
        order = generator.permutation(self.expected_batch_size)
        num_groups = len(order) // self.group_size
        return order[: num_groups * self.group_size].reshape(num_groups, self.group_size)

    def groups_at_once(self, views_per_microbatch: int) -> int:
        """Return the whole groups of one microbatch, at least one."""
        return max(1, views_per_microbatch // (self.group_size * self.num_views))


@dataclass(frozen=True, kw_only=True)
class Task(GroupTask):
    """A step on images.

    Attributes:
      model: a network of `trainers.models.encoder.NETWORKS`.
      image_size: pixels of the square images; None for the model's in `IMAGE_SHAPES`.
    """

    image_size: int | None = None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        channels, height, width = IMAGE_SHAPES[self.model]
        return channels, self.image_size or height, self.image_size or width

    @property
    def num_views(self) -> int:
        """Views of one record: query, key and one augmented key."""
        return 3

    def config(self, views_per_microbatch: int | None) -> TrainingConfig:
        return TrainingConfig(
            mechanism=self.mechanism(CLIP_NORM),
            views=ViewConfig(min_crop_area=0.3, max_crop_area=1.0, brightness=0.4, contrast=0.4),
            network=NetworkConfig(name=self.model, precision=self.precision),
            optimizer=OptimizerConfig(name="adam"),
            performance=self.performance(views_per_microbatch),
            evaluation=EvaluationConfig(record_every_steps=0, also_untrained=False),
        )

    def records(self) -> Records:
        return _random_records((self.expected_batch_size, *self.image_shape))

    def tiny(self) -> Task:
        return replace(self, model="tiny_cnn", group_size=2, expected_batch_size=4, image_size=8)


@lru_cache(maxsize=1)
def _random_records(shape: tuple[int, int, int, int]) -> Records:
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return Records(images=images, ids=np.arange(len(images), dtype=np.uint64))


def views_of(
    records: Records, groups: NDArray[np.int64], config: TrainingConfig, *, step: int, device: str
) -> Tensor:
    """Return the views of `groups`, `[groups, group_size, views, C, H, W]`, as the training makes them."""
    rows = groups.reshape(-1)
    views = make_views(
        torch.from_numpy(records.images[rows]).to(device),
        records.ids[rows],
        config=config.views,
        seed=config.public_seed,
        step=step,
        num_views=IMAGES.num_views(config, config.num_augmentations),
    )
    return views.view(*groups.shape, *views.shape[1:])


class Step(Protocol):
    """One side of a measurement, ready to be timed."""

    views_per_microbatch: int

    def take(self) -> None:
        """Take one whole step."""


class OurStep:
    """The private step of the training loop, as trainings take it."""

    def __init__(self, task: GroupTask, views_per_microbatch: int, workers: Workers | None = None) -> None:
        self.task, self.views_per_microbatch = task, views_per_microbatch
        self.records = task.records()
        data = TrainingData(
            train=self.records, index=None, queries=None, train_is_public=True, evaluation_is_public=True
        )
        self.run = loop._prepare(task.config(views_per_microbatch), data, workers or SingleWorker())
        self.run.step = 1  # by-products are recorded at the first step alone

    def take(self) -> None:
        loop._step(self.run)
        self.run.step += 1

    def check(self, max_groups: int = 32, draws: int = 5) -> Check:
        """Compare the clipped sums of a few microbatches with `exact_clipped_sum`, always in float32.

        The median of the draws counts: where the input of a ReLU is zero but for rounding, one sum has the
        gradient behind it and the other has not. For that reason torch's own gradients in float32 and in
        float64 differ by 5e-5 to 8e-4 in about one draw of thirty (small_cnn, 32 groups of two).
        """
        config, encoder = self.run.config, self.run.encoder
        task = self.run.task
        objective, in_full = task.objective(config, encoder, config.network), task.objective(config, encoder)
        rule, scale = config.rule(), gradient_scale(config.network)
        assert isinstance(rule, GroupRule)
        size = min(max_groups, self.task.groups_at_once(self.views_per_microbatch))
        found: list[tuple[float, float]] = []
        for draw in range(draws):
            groups = self.task.groups(np.random.default_rng(draw))[:size]
            views = task.inputs(
                config, encoder, self.records, groups, step=draw, num_augmentations=config.num_augmentations
            )
            actual = torch.zeros_like(self.run.total)
            report = add_clipped_sum(rule, actual, encoder, objective, views, scale, None)
            exact = exact_clipped_sum(encoder, in_full, views, config.mechanism.l2_clip_norm)
            found.append(relative_errors(encoder, actual, exact))
        whole, parameter = (statistics.median(errors) for errors in zip(*found, strict=True))
        return Check(relative_error=whole, parameter_error=parameter, paths=dict(report.paths))


@dataclass(frozen=True, kw_only=True)
class Check:
    """How far our clipped sums are from exact ones.

    Attributes:
      relative_error: ‖actual − exact‖ / ‖exact‖ of a clipped sum, the median of a few draws.
      parameter_error: the same of the worst parameter tensor's part of it, where terms that cancel leave
        more rounding.
      paths: how each layer's norm was taken, by layer name.
    """

    relative_error: float
    parameter_error: float
    paths: dict[str, str]

    def num_layers_by_path(self) -> dict[str, int]:
        """Return the number of layers by how their norm was taken."""
        ways = list(self.paths.values())
        return {way: ways.count(way) for way in sorted(set(ways))}


def exact_clipped_sum(
    encoder: nn.Module,
    group_losses: Objective,
    views: GroupInputs,
    l2_clip_norm: float,
    *,
    together: bool = False,
) -> Tensor:
    """Σ Clip_C(∇L_G) with one exact backward pass per group; norms and the sum in float64.

    `together` makes the forward pass one of all groups, at the price of a backward pass through all of them
    for each: alone, a group's activations are rounded otherwise, and where a ReLU's input is zero but for
    rounding another gradient is correct.
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
        # The clipper's factor keeps this margin below C for rounding; it is part of what it computes.
        bound = l2_clip_norm * clipping._MARGIN
        total += flat * min(1.0, bound / max(float(flat.square().sum().sqrt()), 1e-300))
    return total


def relative_errors(encoder: nn.Module, actual: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return ‖actual − exact‖ / ‖exact‖ of the whole vector, and its largest value of a parameter tensor.

    A tensor whose exact sum is zero but for rounding is measured against the whole vector's scale.
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
      channels_last: keep images and weights with the channels as the last axis in memory.
    """

    def __init__(self, task: Task, views_per_microbatch: int, *, channels_last: bool = False) -> None:
        torch.set_num_threads(task.threads)
        self.task, self.views_per_microbatch = task, views_per_microbatch
        self.channels_last = channels_last
        self.records = task.records()
        self.config = task.config(views_per_microbatch)
        assert isinstance(self.config.network, NetworkConfig)
        self.encoder = build_encoder(self.config.network, task.image_shape, self.config.public_seed)
        layout = torch.channels_last if channels_last else torch.preserve_format
        self.encoder.to(device=task.device).to(memory_format=layout)  # type: ignore[call-overload]
        self.optimizer = build_optimizer(self.config.optimizer, trainable_parameters(self.encoder))
        # Float16 gradients underflow without a scale that follows them, which needs no privacy here.
        self.scaler = torch.amp.GradScaler(task.device, enabled=task.precision == "float16")
        self.divisor = self.config.mechanism.divisor
        self._generator = np.random.default_rng(0)
        self._step = 1

    def take(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulate(self.task.groups(self._generator), step=self._step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._step += 1

    def accumulate(self, groups: NDArray[np.int64], *, step: int) -> None:
        """Add the (scaled) gradient of the mean loss of `groups` to every parameter's `grad`."""
        at_once = self.task.groups_at_once(self.views_per_microbatch)
        for start in range(0, len(groups), at_once):
            chosen = groups[start : start + at_once]
            views = views_of(self.records, chosen, self.config, step=step, device=self.task.device)
            embeddings = self._embed(views.flatten(0, 2)).unflatten(0, views.shape[:3])
            losses = two_view_group_loss(embeddings, temperature=self.config.temperature)
            loss = losses.sum() / self.divisor
            self.scaler.scale(loss).backward()

    def _embed(self, images: Tensor) -> Tensor:
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with self._cast():
            embeddings: Tensor = self.encoder(images)
        return embeddings.float()

    def _cast(self) -> AbstractContextManager[object]:
        if self.task.precision == "float32":
            return nullcontext()
        return torch.autocast(self.task.device, dtype=getattr(torch, self.task.precision))
