"""What a training of the options takes, before any record is read: weights, throughput, memory."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.sampling.groups import BATCH, GroupSize
from sweeps.service.options.planner import PlannerOptions
from trainers.config.optimizers import optimizer_named
from trainers.config.training import TrainingConfig
from trainers.config.tree import changed
from trainers.data.dataset import TrainingData
from trainers.data.registry import source_of
from trainers.models.encoder import ImageShape
from trainers.models.networks import AnyEncoder
from trainers.tasks.task import task_of
from trainers.training.loop import train
from trainers.training.microbatch import pass_bytes
from trainers.training.resolve import training_config
from trainers.training.warm_start import starting_encoder

_BATCH = 512
_TIMED_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one training takes.

    Attributes:
      num_weights: d, trained weights.
      records_per_second: of one core or GPU.
      is_measured: whether that was measured here; otherwise it was stated.
      seconds_per_step: besides its records: for sample, noise and optimizer; 0 where nothing was measured.
      memory_bytes: of one worker, by S: weights, the sum of the groups in float64, the gradients, what the
        optimizer keeps, and one pass (`trainers.training.microbatch.pass_bytes`). Libraries and the records,
        which all processes of a machine share, are not counted. Empty where the weights were stated.
    """

    num_weights: int
    records_per_second: float
    is_measured: bool
    seconds_per_step: float = 0.0
    memory_bytes: Mapping[GroupSize, float] = field(default_factory=dict)


def resources_of(options: PlannerOptions) -> Resources:
    """Return what a training takes; the network is built unless its weights and the throughput are stated.

    Raises:
      ConfigError: the shape of the images is not known, or an option breaks a rule.
    """
    stated = options.records_per_second
    if options.num_weights is not None and stated is not None:
        return Resources(num_weights=options.num_weights, records_per_second=stated, is_measured=False)
    sizes = _sizes(options)
    shape, config = image_shape_of(options), _config(options, sizes[len(sizes) // 2])
    torch.set_num_threads(config.performance.threads_per_worker)
    encoder = starting_encoder(config, shape)
    rate, fixed = stated, 0.0
    if rate is None:
        threads = config.performance.threads_per_worker
        seconds, fixed = (threads * each for each in _step_seconds(options, config, shape))
        rate = 1 / seconds
    num_weights, memory = options.num_weights, dict[GroupSize, float]()
    if num_weights is None:
        num_weights = num_trainable(encoder)
        memory = {size: _memory_bytes(_config(options, size), encoder, shape) for size in sizes}
    return Resources(
        num_weights=num_weights,
        records_per_second=rate,
        is_measured=stated is None,
        seconds_per_step=fixed,
        memory_bytes=memory,
    )


def _step_seconds(options: PlannerOptions, config: TrainingConfig, shape: ImageShape) -> tuple[float, float]:
    """Return the seconds of a record and those of a step besides, by real trainings on synthetic records.

    A straight line through the steps of a small and of a large batch.
    """
    task, size = task_of(config), config.mechanism.group_size
    large = round(config.mechanism.expected_batch_size)
    small = max(large // 8, 1 if size == BATCH else int(size))
    records = task.synthetic_records(2 * large, shape)
    data = TrainingData(
        train=records, index=None, queries=None, train_is_public=True, evaluation_is_public=True
    )
    times = []
    for batch in (small, large):
        mechanism = dataclasses.replace(
            config.mechanism,
            num_records_public=len(records),
            sampling_prob=batch / len(records),
            num_steps=_TIMED_STEPS,
        )
        secure = config.secure_noise or options.data.are_private
        timed = dataclasses.replace(config, mechanism=mechanism, secure_noise=secure)
        marks: list[float] = []

        def mark(step: int, marks: list[float] = marks) -> None:
            marks.append(time.perf_counter())

        train(timed, data, progress=mark)
        times.append(statistics.median(b - a for a, b in itertools.pairwise(marks)))
    each = max(times[1] - times[0], times[1] / 100) / max(large - small, 1)
    return each, max(0.0, times[1] - each * large)


def image_shape_of(options: PlannerOptions) -> ImageShape:
    """Return (channels, height, width) of the images to plan for.

    Raises:
      ConfigError: neither the options nor the data set's name tell.
    """
    if options.image_shape is not None:
        return options.image_shape
    source = source_of(options.data.dataset)
    known = None if source is None else source.image_shape
    if known is None:
        raise ConfigError(
            f"image_shape must be told for data of your own, which the planner does not read; got "
            f"{options.data.dataset}: give --image-shape CHANNELS HEIGHT WIDTH"
        )
    size = options.data.image_size
    return known if size is None else (known[0], size, size)


def num_records_of(options: PlannerOptions) -> int:
    """Return N, which must be told: the planner reads no records.

    Raises:
      ConfigError: it is not.
    """
    if options.mechanism.num_records_public is None:
        raise ConfigError("the planner reads no records: give their number, --num-records-public")
    return options.mechanism.num_records_public


def _sizes(options: PlannerOptions) -> tuple[GroupSize, ...]:
    takes = method_named(options.mechanism.method).takes_group_size
    return tuple(dict.fromkeys(options.group_sizes)) if takes else (BATCH,)


def _config(options: PlannerOptions, size: GroupSize) -> TrainingConfig:
    """A training of this group size, with a noise and a batch that stand in for those of the plan."""
    number = num_records_of(options)
    batch = min(number, max(_BATCH, 4 * int(size)) if size != BATCH else _BATCH)
    here = changed(
        options.training(),
        group_size=size if method_named(options.mechanism.method).takes_group_size else BATCH,
        expected_batch_size=batch,
        num_steps=max(options.num_steps_grid),
        epsilon=None,
        noise_multiplier=1.0,
        device="cpu",
    )
    return training_config(
        here,
        num_records=number,
        public_seed=options.service.seed,
        modality=options.data.modality,
        image_shape=image_shape_of(options),
    )


def _memory_bytes(config: TrainingConfig, encoder: AnyEncoder, shape: ImageShape) -> float:
    weights, trained = sum(each.numel() for each in encoder.parameters()), num_trainable(encoder)
    kept = optimizer_named(config.optimizer.name).num_states(config.optimizer.momentum)
    return 4 * weights + (8 + 4 * (1 + kept)) * trained + pass_bytes(config, encoder, shape)
