"""The planner's request, with the weights, throughput and memory of a training; it reads no record."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time

import torch

from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.planning.feasible import PlanRequest
from dpgcl_core.sampling.groups import BATCH, GroupSize
from sweeps.service.options.planner_options import PlannerOptions
from trainers.config.optimizer_registry import optimizer_named
from trainers.config.settings import DEFAULT_EPSILON
from trainers.config.training import TrainingConfig
from trainers.config.tree import replace_options
from trainers.data.dataset import TrainingData
from trainers.data.dataset_registry import source_of
from trainers.models.encoder import ImageShape
from trainers.models.task_networks import AnyEncoder
from trainers.tasks.task import task_of
from trainers.training.loop import train
from trainers.training.microbatch import pass_bytes
from trainers.training.resolve import training_config
from trainers.training.warm_start import starting_encoder

_TIMED_BATCH_SIZE = 512
_NUM_TIMED_STEPS = 6


def request_of(options: PlannerOptions) -> PlanRequest:
    """Return the planner's request, with the weights, throughput and memory of a training.

    The network is built unless the options set the number of weights and the throughput. The fixed
    core-seconds of a step, for sampling, noise and optimizer, are 0 if not measured. A worker's memory is, by
    S, the sum of weights, the groups' sum in float64, the gradients, the optimizer's state, and one pass
    (`trainers.training.microbatch.pass_bytes`). Libraries and the records, which all processes of a machine
    share, are not counted. The memory is unknown if the options set the number of weights.

    Raises:
      ConfigError: the shape of the images is unknown, or an option breaks a rule.
    """
    num_records_public = num_records_of(options)  # raises before anything is measured
    num_weights, rate, seconds_per_step = options.num_weights, options.records_per_second, 0.0
    memory = dict[GroupSize, float]()
    if num_weights is None or rate is None:
        takes_size = method_named(options.mechanism.method).takes_group_size
        sizes = list(dict.fromkeys(options.group_sizes)) if takes_size else [BATCH]
        shape, config = image_shape_of(options), _config(options, sizes[len(sizes) // 2])
        threads = config.performance.threads_per_worker
        torch.set_num_threads(threads)
        encoder = starting_encoder(config, shape)
        if rate is None:
            seconds, seconds_per_step = (threads * time for time in _step_seconds(options, config, shape))
            rate = 1 / seconds
        if num_weights is None:
            num_weights = num_trainable(encoder)
            memory = {size: _memory_bytes(_config(options, size), encoder, shape) for size in sizes}
    mechanism = options.mechanism
    return PlanRequest(
        num_records_public=num_records_public,
        target_epsilon=mechanism.target_epsilon() or DEFAULT_EPSILON,
        target_delta=mechanism.delta,
        method=mechanism.method,
        sampling=mechanism.sampling,
        num_weights=num_weights,
        batch_sizes=options.batch_sizes,
        num_steps=options.num_steps_grid,
        group_sizes=options.group_sizes,
        records_per_second=rate,
        seconds_per_step=seconds_per_step,
        most_hours=options.hours,
        memory_bytes=memory,
        most_bytes=None if options.memory_gib is None else options.memory_gib * 2**30,
    )


def _step_seconds(options: PlannerOptions, config: TrainingConfig, shape: ImageShape) -> tuple[float, float]:
    """Return the seconds per record and the fixed seconds of a step, from trainings on synthetic records.

    They are the slope and the offset of a straight line through the steps of a small and a large batch.
    """
    task, size = task_of(config), config.mechanism.group_size
    large = round(config.mechanism.expected_batch_size)
    small = max(large // 8, 1 if size == BATCH else int(size))
    records = task.synthetic_records(2 * large, shape)
    data = TrainingData(
        train=records, index=None, queries=None, train_is_public=True, evaluation_is_public=True
    )
    step_seconds = []
    for batch in (small, large):
        mechanism = dataclasses.replace(
            config.mechanism,
            num_records_public=len(records),
            sampling_prob=batch / len(records),
            num_steps=_NUM_TIMED_STEPS,
        )
        secure = config.secure_noise or options.data.are_private
        timed = dataclasses.replace(config, mechanism=mechanism, secure_noise=secure)
        step_ends: list[float] = []

        def record_end(step: int, step_ends: list[float] = step_ends) -> None:
            step_ends.append(time.perf_counter())

        train(timed, data, progress=record_end)
        step_seconds.append(statistics.median(b - a for a, b in itertools.pairwise(step_ends)))
    record_seconds = max(step_seconds[1] - step_seconds[0], step_seconds[1] / 100) / max(large - small, 1)
    return record_seconds, max(0.0, step_seconds[1] - record_seconds * large)


def image_shape_of(options: PlannerOptions) -> ImageShape:
    """Return (channels, height, width) of the images to plan for.

    Raises:
      ConfigError: neither the options nor the data set's name determine it.
    """
    if options.image_shape is not None:
        return options.image_shape
    source = source_of(options.data.dataset)
    source_shape = None if source is None else source.image_shape
    if source_shape is None:
        raise ConfigError(
            f"image_shape must be set for data of your own, which the planner does not read; got "
            f"--dataset {options.data.dataset}. Set --image-shape CHANNELS HEIGHT WIDTH."
        )
    size = options.data.image_size
    return source_shape if size is None else (source_shape[0], size, size)


def num_records_of(options: PlannerOptions) -> int:
    """Return N from the options. Raises ConfigError if they lack it, because the planner reads no records."""
    if options.mechanism.num_records_public is None:
        raise ConfigError("the planner reads no records, so it needs their number. Set --num-records-public.")
    return options.mechanism.num_records_public


def _config(options: PlannerOptions, size: GroupSize) -> TrainingConfig:
    """Return a training of this group size, with placeholders for noise and batch, which a plan chooses."""
    num_records = num_records_of(options)
    batch = min(num_records, max(_TIMED_BATCH_SIZE, 4 * int(size)) if size != BATCH else _TIMED_BATCH_SIZE)
    training = replace_options(
        options.training(),
        group_size=size,
        expected_batch_size=batch,
        num_steps=max(options.num_steps_grid),
        epsilon=None,
        noise_multiplier=1.0,
        device="cpu",
    )
    return training_config(
        training,
        num_records=num_records,
        public_seed=options.service.seed,
        modality=options.data.modality,
        image_shape=image_shape_of(options),
    )


def _memory_bytes(config: TrainingConfig, encoder: AnyEncoder, shape: ImageShape) -> float:
    """Return the bytes of a worker; for a trained weight also float64 sum, gradient and optimizer states."""
    num_weights, num_trained = sum(p.numel() for p in encoder.parameters()), num_trainable(encoder)
    num_states = optimizer_named(config.optimizer.name).num_states(config.optimizer.momentum)
    return 4 * num_weights + (8 + 4 * (1 + num_states)) * num_trained + pass_bytes(config, encoder, shape)
