"""A training in progress: its networks, its private step, and the state that a step reads and changes.

Stages 2 to 9 are in `dpgcl_core.private_step`. This module makes the inputs (stage 4) and applies the private
gradient. Everything that depends on the kind of records belongs to the task (`trainers.tasks.task`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpgcl_core.clipping.capture import CapturedPasses
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.isolation import refuse_changed_state, unwritten, whole_state
from dpgcl_core.clipping.types import GroupInputs, no_sum, trainable_parameters
from dpgcl_core.mechanism.passes import groups_of_a_pass
from dpgcl_core.private_step import PrivateStep
from dpgcl_core.sampling.groups import BATCH
from dpgcl_core.sampling.slots import ShardedGroups
from dpgcl_core.sampling.stage import DrawnGroups
from dpgcl_core.workers import Workers
from trainers.config.training import TrainingConfig
from trainers.data.dataset import TrainingData, image_shape_of
from trainers.models.encoder import device_named
from trainers.models.task_networks import AnyEncoder
from trainers.tasks.task import AnyTask, task_of
from trainers.training.allocation import keep_freed_memory
from trainers.training.averaging import WeightAverage, average_of
from trainers.training.foreign_network import refuse_mixing_network
from trainers.training.microbatch import max_views
from trainers.training.observation import ObservedStep, Observer
from trainers.training.optimizers import build_optimizer, learning_rate_at, take_step
from trainers.training.release import check_release
from trainers.training.warm_start import starting_encoder

_MIN_THREADS = 2
"""With a GPU, one thread draws noise and another makes views, and neither waits for the other."""


@dataclass(kw_only=True, eq=False, repr=False)
class Training:
    """The moving parts of one training.

    Attributes:
      config, data: the arguments of `trainers.train`.
      task: the task that the network is for.
      encoder: the network that is trained.
      average: the average of its iterates; None if none is kept.
      optimizer: the optimizer of the trained weights.
      observer: records the values that may leave the training before its end.
      private_step: the mechanism's private step on the network.
      threads: the thread pool for views and noise.
      networks: all networks that a step runs, with the state that no pass may change.
      num_steps_done: number of steps taken, including those before a resume.
      rows_of_shards: the rows of the training records in each shard; empty without shards.
    """

    config: TrainingConfig
    data: TrainingData
    task: AnyTask
    encoder: AnyEncoder
    average: WeightAverage | None
    optimizer: torch.optim.Optimizer
    observer: Observer
    private_step: PrivateStep
    threads: ThreadPoolExecutor
    networks: list[tuple[nn.Module, dict[str, Any]]]
    num_steps_done: int = 0
    rows_of_shards: Sequence[NDArray[np.int64]] = ()

    @property
    def released_network(self) -> AnyEncoder:
        """The network that is scored and returned."""
        return self.average.network if self.average and self.config.optimizer.ema_decay else self.encoder

    @property
    def is_first_worker(self) -> bool:
        """Whether this process draws groups, scores and saves for all workers."""
        return self.private_step.workers.rank == 0

    def take_step(self) -> None:
        """Take one private step; a step with an empty draw is treated like any other."""
        step, private_step = self.num_steps_done, self.private_step
        drawn = private_step.draw(step, len(self.data.train), self.rows_of_shards)
        groups = self.in_one_shape(drawn)
        observed = ObservedStep(
            observer=self.observer,
            step=step,
            workers=private_step.workers,
            randomness=private_step.randomness,
            norm_without_augmentation=self._norm_without_augmentation,
        )
        inputs_of = partial(self.inputs, groups, num_augmentations=self.config.num_augmentations)
        private_step.take(step, groups, inputs_of, self.update, observed)
        self.num_steps_done += 1

    def in_one_shape(self, groups: DrawnGroups) -> DrawnGroups:
        """Return groups padded to full passes, so that all inputs have one shape, whatever was drawn.

        Otherwise the rounding of a record's views could depend on how many views are made with them.
        """
        step = self.private_step
        return groups if step.rule.whole_batch else groups.filled_up(step.groups_at_once)

    def inputs(self, groups: DrawnGroups, part: slice, *, num_augmentations: int) -> GroupInputs:
        """Return the objective's inputs for the groups at `part`, each `[groups, group_size, views, ...]`."""
        return self.task.inputs(
            self.config,
            self.encoder,
            self.data.train,
            groups.rows[part],
            step=self.num_steps_done,
            num_augmentations=num_augmentations,
        )

    def update(self, gradient: Tensor) -> None:
        """Apply the private gradient `[num_parameters]`; this and all later stages are post-processing."""
        config, step = self.config, self.num_steps_done
        rate = learning_rate_at(config.optimizer, step, config.mechanism.num_steps)
        take_step(self.optimizer, trainable_parameters(self.encoder), gradient, learning_rate=rate)
        self.task.after_step(self.encoder)
        if self.average:
            self.average.update(self.encoder, step)

    def refuse_changed_networks(self) -> None:
        """Refuse networks in which a pass changed other state than trained weights, which would leak."""
        for network, before in self.networks:
            refuse_changed_state(network, before)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Refuse passes that write to networks; trained weights are compared only in a user's own network."""
        foreign = [network for network, _ in self.networks] if self.config.network.is_foreign else []
        with unwritten(*foreign):
            yield
        self.refuse_changed_networks()

    def _norm_without_augmentation(self, groups: DrawnGroups) -> float:
        """Return the norm in this worker's share of the clipped sum, without noise or augmentation."""
        bare = no_sum(self.encoder)
        inputs_of = partial(self.inputs, groups, num_augmentations=0)
        self.private_step.add_clipped_sum(bare, self.num_steps_done, groups, inputs_of)
        self.private_step.workers.sum_shares(bare)
        return float(torch.linalg.vector_norm(bare))


def prepare(
    config: TrainingConfig, data: TrainingData, workers: Workers, memory_share: float = 1.0
) -> Training:
    """Build a training before its first step.

    Args:
      config, data, workers, memory_share: the arguments of `trainers.train`.

    Raises:
      ConfigError: as in `trainers.train`.
    """
    check_release(config, data)
    randomness = config.randomness(data_are_private=not data.train_is_public)
    torch.set_num_threads(config.performance.threads_per_worker)
    keep_freed_memory()
    device = device_named(config.performance.device)
    task, shape = task_of(config), image_shape_of(data.train)
    task.check(config, data.train)
    encoder = starting_encoder(config, shape)
    task.check_network(config, encoder, shape)
    task.place(encoder, device, shape)
    views_that_fit = max_views(config, encoder, shape, memory_share=memory_share)
    refuse_mixing_network(config, encoder, shape, views_that_fit)
    average = average_of(config, encoder)
    target = average.network if average and config.mechanism.rules.needs_target else None
    at_once = choose_groups_at_once(config, task, views_that_fit, workers.count)
    passes = CapturedPasses() if repeats_passes(config, device) else None
    rule = config.rule(at_once)
    if isinstance(rule, GroupClipper):
        rule = replace(rule, passes=passes)
    stage = config.mechanism.group_stage()
    num_threads = max(_MIN_THREADS, config.performance.threads_per_worker)
    threads = ThreadPoolExecutor(num_threads)
    networks: list[nn.Module] = [encoder, *([average.network] if average else [])]
    private_step = PrivateStep(
        mechanism=config.mechanism,
        model=encoder,
        objective=task.objective(config, encoder, config.network, target),
        rule=rule,
        groups_at_once=at_once,
        randomness=randomness,
        workers=workers,
        watch=lambda: training.watch(),
        threads=threads,
        num_noise_threads=num_threads - 1,  # the remaining thread makes views
        makes_inputs_ahead=config.performance.prefetch,
        total=no_sum(encoder),
    )
    training = Training(
        config=config,
        data=data,
        task=task,
        encoder=encoder,
        average=average,
        optimizer=build_optimizer(config.optimizer, trainable_parameters(encoder)),
        observer=Observer(
            config, train_is_public=data.train_is_public, evaluation_is_public=data.evaluation_is_public
        ),
        private_step=private_step,
        threads=threads,
        networks=[(network, whole_state(network)) for network in networks],
        rows_of_shards=data.rows_of_shards(stage) if isinstance(stage, ShardedGroups) else (),
    )
    if passes is not None:
        _capture_pass(training, passes, shape)
    return training


def choose_groups_at_once(
    config: TrainingConfig, task: AnyTask, views_that_fit: int, num_workers: int
) -> int:
    """Return how many groups pass through the network together: a public number; `batch` is one group."""
    size = config.mechanism.group_size
    if size == BATCH:
        return 1
    most = max(1, views_that_fit // (int(size) * task.num_views(config, config.num_augmentations)))
    return groups_of_a_pass(config.mechanism, limit=most, num_workers=num_workers)


def repeats_passes(config: TrainingConfig, device: torch.device) -> bool:
    """Whether a GPU may replay passes: network and loss are this package's, and the same at every step."""
    return not (device.type != "cuda" or config.network.is_foreign or config.mechanism.rules.needs_target)


def _capture_pass(training: Training, passes: CapturedPasses, image_shape: tuple[int, ...]) -> None:
    """Capture the training's pass on the GPU, on blank groups that contribute nothing."""
    config, step = training.config, training.private_step
    size = config.mechanism.group_size
    if size == BATCH or step.rule.whole_batch or step.rule.needs_draws:
        return
    num_views = training.task.num_views(config, config.num_augmentations)
    shape = (step.groups_at_once, int(size), num_views)
    inputs = training.task.blank_inputs(training.encoder, image_shape, shape)
    assert step.total is not None
    with passes.capturing():
        nothing = torch.zeros(step.groups_at_once, dtype=torch.bool)
        step.rule.add_clipped_sum(step.total, training.encoder, step.objective, inputs, complete=nothing)
