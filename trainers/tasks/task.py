"""What a training is about: which records it takes, what it makes of them, and what the result is good for.

A task owns everything that depends on what a record is. The loop, microbatches, precision, averages, warm
starts and estimates ask it and learn nothing of images, captions or losses. Tasks are registered by name; a
network's configuration says which one it is for (`TrainingConfig.task`).

The private part does not depend on it: a task maps each group's inputs to one loss of that group alone, and
its views are functions of their own record, the public seed and the step.
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
from dpgcl_core.errors import ConfigError, unknown_choice
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
      name: that networks' configurations ask for it by.
      embeds: whether its objective is made of unit embeddings, which contrastive methods need.
      fewest_views: of a record, that its network takes.
      learns_labels: whether records without labels are of no use to it.
      own_scores: those that mean nothing on other data sets than its own.
      cpu_views_at_once: that are worth a CPU's while, even where their activations leave the caches.
    """

    name: ClassVar[str]
    embeds: ClassVar[bool]
    fewest_views: ClassVar[int] = 1
    learns_labels: ClassVar[bool] = False
    own_scores: ClassVar[tuple[str, ...]] = ()
    cpu_views_at_once: ClassVar[int] = 1

    def check(self, config: TrainingConfig, records: AnyRecords) -> None:
        """Refuse records of another kind, and a method that needs what this task's objective has not.

        Raises:
          ConfigError: names both.
        """
        method = config.mechanism.rules
        if method.task and method.task != self.name:
            raise ConfigError(
                f"{method.name} has the objective of the task {method.task}, and {config.network.name} is a "
                f"network for the task {self.name}: give --network one of its own"
            )
        if method.needs_embeddings and not self.embeds:
            raise ConfigError(
                f"{method.name} compares unit embeddings, and the task {self.name} has none: use a method "
                "that clips groups, whatever their objective"
            )
        self.check_records(config, records)

    @abstractmethod
    def check_records(self, config: TrainingConfig, records: AnyRecords) -> None:
        """Refuse records that the network does not take.

        Raises:
          ConfigError: names both.
        """

    @abstractmethod
    def build(
        self, config: TrainingConfig, image_shape: ImageShape, start_tensors: Mapping[str, Tensor] | None
    ) -> NetworkT:
        """Return the network before step 0, on the CPU.

        Args:
          config: of the training.
          image_shape: (channels, height, width) of the records.
          start_tensors: the tensors of its warm start; None without.

        Raises:
          ConfigError: the network cannot be built, or the tensors do not fit or are not finite.
          StorageError: a file cannot be read.
        """

    @abstractmethod
    def check_network(self, config: TrainingConfig, network: NetworkT, image_shape: tuple[int, ...]) -> None:
        """Refuse a network that mixes records, that no step would train, or that reads other images.

        Raises:
          ConfigError: says which module, weight or size.
        """

    def start_note(self, config: TrainingConfig) -> str:
        """Return what the privacy statement says of weights that the network starts from by itself, or ""."""
        return ""

    def fresh_parts(self, config: TrainingConfig) -> str:
        """Return which parts do not come from the warm start, for the privacy statement; "" for none."""
        return ""

    def place(self, network: NetworkT, device: torch.device, image_shape: tuple[int, ...]) -> None:
        """Move the network to the device, in the memory layout that is fast there."""
        network.to(device)

    def num_views(self, config: TrainingConfig, num_augmentations: int) -> int:
        """Return the views of a record in one step."""
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

        Those of a record are a function of the record, the public seed and the step alone.

        Args:
          config: augmentations and seed.
          network: that will see them; they come on its device.
          records: of the kind that `check_records` takes.
          groups: `[groups, group_size]`, rows of the records.
          step: of the training.
          num_augmentations: N_a.
        """

    @abstractmethod
    def blank_inputs(
        self, network: NetworkT, image_shape: tuple[int, ...], shape: tuple[int, int, int]
    ) -> GroupInputs:
        """Return inputs of no content, on the network's device; `shape` is (groups, group_size, views)."""

    def synthetic_records(self, count: int, image_shape: tuple[int, ...]) -> AnyRecords:
        """Return public records without meaning, to measure speed on: images of noise unless overridden."""
        images = np.random.default_rng(0).integers(0, 256, (count, *image_shape), dtype=np.uint8)
        return Records(images=images, ids=np.arange(count, dtype=np.uint64))

    def run(self, network: NetworkT, inputs: GroupInputs) -> None:
        """Pass inputs through the network once, for what its hooks see."""
        network(inputs)

    @abstractmethod
    def objective(
        self,
        config: TrainingConfig,
        network: NetworkT,
        precision: AnyNetworkConfig | None = None,
        target: NetworkT | None = None,
    ) -> Objective:
        """Return stages 5 and 6: a step's inputs to one loss per group.

        Args:
          config: of the training.
          network: that is trained.
          precision: of its passes, see `trainers.models.precision`; float32 unless given. With float16 the
            gradient arrives times `precision.gradient_scale`: see `dpgcl_core.clipping.clipper`.
          target: a network whose output, as a constant, stands beside that of `network`.
        """

    def after_step(self, network: NetworkT) -> None:
        """Put weights back into their bounds, after the optimizer's step: a function of released weights."""
        return

    def evaluate(self, network: NetworkT, scoring: Scoring) -> dict[str, float]:
        """Return the scores of the frozen network by metric name, each in [0, 1]; {} where there are none.

        A `trainers.evaluation.outcomes.Score` among them has an outcome for each record, in the order in
        which `trainers.evaluation.features.first_records` takes them of `queries`; a plain number has none.

        Args:
          network: already on the device; its train/eval modes are restored.
          scoring: the records, and how they are scored.

        Raises:
          DataError: there is nothing to score, or a label has no name though others have.
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
    """Return the views of records' images at a step, float32 `[n, num_views, C, H, W]`, where the network is.

    Args:
      config: augmentations and seed.
      network: that will see them.
      pixels: `[n, C, H, W]`, the image of each record at the step.
      ids: `[n]`, of the records.
      step: of the training.
      num_views: of each image.
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
        raise ConfigError(f"a task named {task.name!r} is registered already: give yours another name")
    _tasks[task.name] = task
    return task


def task_named(name: str) -> AnyTask:
    """Return the task of this name.

    Raises:
      ConfigError: there is none; lists them.
    """
    if name not in _tasks:
        raise ConfigError(unknown_choice("task", name, _tasks))
    return _tasks[name]


def task_of(config: TrainingConfig) -> AnyTask:
    """Return the task of a training.

    >>> import trainers.tasks
    >>> {"images", "pairs"} <= set(_tasks)
    True
    """
    return task_named(config.task)
