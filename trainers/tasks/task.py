"""The kinds of training: the records a task takes, the inputs and losses it makes, and the scores it gives.

A task owns everything that depends on the kind of records. The loop, microbatches, precision, averages, warm
starts and estimates call the task and know nothing about images, captions or losses. Tasks are registered by
name; a network's configuration names its task (`TrainingConfig.task`).

The private part does not depend on the task: a task maps each group's inputs to one loss of only that group,
and its views are functions of their own record, the public seed and the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpgcl_core.clipping.types import GroupInputs, Objective
from dpgcl_core.errors import ConfigError, require_choice
from dpgcl_core.sampling.record_ids import Ids
from trainers.config.networks import AnyNetworkConfig
from trainers.config.training import TrainingConfig
from trainers.data.dataset import AnyRecords
from trainers.data.records import Records
from trainers.evaluation.scorer import Scoring
from trainers.models.encoder import ImageShape
from trainers.views.image_views import make_views

NetworkT = TypeVar("NetworkT", bound=nn.Module)


class Task(ABC, Generic[NetworkT]):
    """One kind of training.

    Attributes:
      name: the name by which networks' configurations request the task.
      embeds: whether its objective is made of unit embeddings, which contrastive methods need.
      fewest_views: the smallest number of views of a record that its network takes.
      learns_labels: whether the task requires records with labels.
      own_scores: the names of scores that are meaningful only on the task's own data set.
      cpu_views_at_once: number of views per pass that is worthwhile on a CPU even if their activations
        exceed the caches.
    """

    name: ClassVar[str]
    embeds: ClassVar[bool] = False
    fewest_views: ClassVar[int] = 1
    learns_labels: ClassVar[bool] = False
    own_scores: ClassVar[tuple[str, ...]] = ()
    cpu_views_at_once: ClassVar[int] = 1

    def check(self, config: TrainingConfig, records: AnyRecords) -> None:
        """Check that method, network and records fit the task, and that it has embeddings if they are needed.

        Raises:
          ConfigError: task and method, or network and records, do not fit; names both.
        """
        method = config.mechanism.rules
        if method.task and method.task != self.name:
            raise ConfigError(
                f"{method.name} needs a network for the task {method.task}; got {config.network.name}, which "
                f"is for the task {self.name}. Choose another --network."
            )
        if method.needs_embeddings and not self.embeds:
            raise ConfigError(
                f"{method.name} compares unit embeddings, but the task {self.name} has none. Use a method "
                "that clips groups with any objective."
            )
        self.check_records(config, records)

    @abstractmethod
    def check_records(self, config: TrainingConfig, records: AnyRecords) -> None:
        """Refuse records that the network does not take.

        Raises:
          ConfigError: the network does not take the records; names both.
        """

    @abstractmethod
    def build(
        self, config: TrainingConfig, image_shape: ImageShape, start_tensors: Mapping[str, Tensor] | None
    ) -> NetworkT:
        """Return the network before step 0, on the CPU.

        Args:
          config: the training's configuration.
          image_shape: (channels, height, width) of the records.
          start_tensors: the tensors of its warm start; None without a warm start.

        Raises:
          ConfigError: the network cannot be built, or the tensors do not fit or are not finite.
          StorageError: a file cannot be read.
        """

    @abstractmethod
    def check_network(self, config: TrainingConfig, network: NetworkT, image_shape: ImageShape) -> None:
        """Refuse a network that mixes records, that no step would train, or that takes other images.

        Raises:
          ConfigError: the network is refused; names the module, weight or size.
        """

    def start_note(self, config: TrainingConfig) -> str:
        """Return the privacy statement's note on weights loaded without a warm start; "" for none."""
        return ""

    def fresh_parts(self, config: TrainingConfig) -> str:
        """Return the parts that the warm start does not set, for the privacy statement; "" for none."""
        return ""

    def place(self, network: NetworkT, device: torch.device, image_shape: tuple[int, ...]) -> None:
        """Move the network to the device, in the memory layout that is fast there."""
        network.to(device)

    def num_views(self, config: TrainingConfig, num_augmentations: int) -> int:
        """Return the number of views of a record in one step."""
        return 1

    @abstractmethod
    def inputs(
        self,
        config: TrainingConfig,
        network: NetworkT,
        records: Any,
        groups: NDArray[np.int64],
        *,
        step: int,
        num_augmentations: int,
    ) -> GroupInputs:
        """Return the inputs of groups of records at a step, `[groups, group_size, views, ...]` each.

        The inputs of a record are a function of only the record, the public seed and the step.

        Args:
          config: the configuration with augmentations and seed.
          network: the network that takes the inputs; they are returned on its device.
          records: records of the kind that `check_records` takes.
          groups: `[groups, group_size]`, rows of the records.
          step: the training step.
          num_augmentations: N_a, the number of extra key copies of each record.
        """

    @abstractmethod
    def blank_inputs(
        self, network: NetworkT, image_shape: tuple[int, ...], shape: tuple[int, int, int]
    ) -> GroupInputs:
        """Return inputs without records, on the network's device; `shape` is (groups, group_size, views)."""

    def synthetic_records(self, count: int, image_shape: tuple[int, ...]) -> AnyRecords:
        """Return public, meaningless records for measuring speed: images of noise unless overridden."""
        images = np.random.default_rng(0).integers(0, 256, (count, *image_shape), dtype=np.uint8)
        return Records(images=images, ids=np.arange(count, dtype=np.uint64))

    def run(self, network: NetworkT, inputs: GroupInputs) -> None:
        """Pass inputs through the network once, so that its hooks run; called without gradients."""
        network(inputs)

    @abstractmethod
    def objective(
        self,
        config: TrainingConfig,
        network: NetworkT,
        precision: AnyNetworkConfig | None = None,
        target: NetworkT | None = None,
    ) -> Objective:
        """Return stages 5 and 6, the function from a step's inputs to one loss per group, `[groups]`.

        Args:
          config: the training's configuration.
          network: the network that is trained.
          precision: the configuration with the precision of its passes; None for float32. With float16, the
            gradient arrives multiplied by `precision.gradient_scale`: see
            `dpgcl_core.clipping.clipper`.
          target: a network whose output is appended, as a constant, to the output of `network`.
        """

    def after_step(self, network: NetworkT) -> None:
        """Clamp weights to their bounds after the optimizer's step; reads only released weights."""
        return

    def evaluate(self, network: NetworkT, scoring: Scoring) -> dict[str, float]:
        """Return the scores of the frozen network by metric name, each in [0, 1]; {} without scores.

        A `trainers.evaluation.outcomes.Score` among them has an outcome for each record, in the order in
        which `trainers.evaluation.features.first_records` selects the records of `queries`. A plain number
        has no outcomes.

        Args:
          network: the network, already on the device; its train/eval modes are restored.
          scoring: the records, and the settings of their scores.

        Raises:
          DataError: there is nothing to score, or a label has no name although other labels have one.
          ConfigError: the records are of a kind that the network cannot be scored on.
        """
        return {}


def image_views(
    config: TrainingConfig,
    network: nn.Module,
    pixels: NDArray[np.uint8],
    ids: Ids,
    *,
    step: int,
    num_views: int,
) -> Tensor:
    """Return the views of images at a step, float32 `[n, num_views, C, H, W]`, on the network's device.

    Args:
      config: the configuration with augmentations and seed.
      network: the network that takes the views.
      pixels: `[n, C, H, W]`, the image of each record at the step.
      ids: `[n]`, the ids of the records.
      step: the training step.
      num_views: number of views of each image.
    """
    return make_views(
        torch.from_numpy(pixels).to(next(network.parameters()).device),
        ids,
        config=config.views,
        seed=config.public_seed,
        step=step,
        num_views=num_views,
    )


AnyTask: TypeAlias = Task[Any]

_tasks: dict[str, AnyTask] = {}


def register_task(task: AnyTask) -> AnyTask:
    """Register a task under its name and return it.

    Raises:
      ConfigError: another task has the name.
    """
    if _tasks.get(task.name, task) is not task:
        raise ConfigError(f"a task named {task.name!r} is already registered. Choose another name.")
    _tasks[task.name] = task
    return task


def task_named(name: str) -> AnyTask:
    """Return the task of this name.

    Raises:
      ConfigError: there is no such task; lists the known tasks.
    """
    require_choice("task", name, _tasks)
    return _tasks[name]


def task_of(config: TrainingConfig) -> AnyTask:
    """Return the task of a training.

    >>> import trainers.tasks
    >>> {"images", "pairs"} <= set(_tasks)
    True
    """
    return task_named(config.task)
