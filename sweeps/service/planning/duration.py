"""Estimates of a plan's duration, timed on synthetic images of the data's shape before anything is spent."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from dpgcl_core.clipping.types import no_sum
from dpgcl_core.mechanism.passes import groups_of_a_pass
from dpgcl_core.noise.randomness import SecretRandomness
from dpgcl_core.sampling.groups import BATCH
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from trainers.config.training import TrainingConfig
from trainers.data.dataset import image_shape_of
from trainers.models.encoder import ImageShape
from trainers.tasks.task import task_of
from trainers.training.averaging import target_of
from trainers.training.microbatch import max_views
from trainers.training.warm_start import starting_encoder
from trainers.views.image_views import normalise


def estimate_seconds(plan: SweepPlan) -> float:
    """Return the seconds for all steps and for embedding the scored records, with one worker at a time.

    One microbatch per distinct kind of step is timed, on synthetic images.
    """
    return sum(seconds_of_trials(plan))


def seconds_of_trials(plan: SweepPlan) -> list[float]:
    """Return the seconds of every trial, measured as in `estimate_seconds`."""
    shape = image_shape_of(plan.data.train)
    seconds_by_kind: dict[Any, float] = {}
    trial_seconds = []
    for trial in (*plan.trials, *plan.later):
        mechanism = trial.config.mechanism
        kind = (
            mechanism.method,
            mechanism.rules.small_batches and mechanism.expected_batch_size,
            mechanism.group_size,
            mechanism.is_private,
            _num_views(trial.config),
            trial.config.network,
        )
        if mechanism.num_steps and kind not in seconds_by_kind:
            seconds_by_kind[kind] = seconds_per_record(trial, shape)
        training = seconds_by_kind.get(kind, 0.0) * mechanism.expected_batch_size * mechanism.num_steps
        embedding = _num_embedded(plan, trial) * _seconds_per_embedding(trial, shape, seconds_by_kind)
        trial_seconds.append(training + embedding)
    return trial_seconds


def _num_embedded(plan: SweepPlan, trial: Trial) -> int:
    """Return the number of records to embed for a trial's scores: before, during and after training."""
    evaluation = trial.config.evaluation
    parts = (
        (plan.data.index, evaluation.max_index_records),
        (plan.data.queries, evaluation.max_query_records),
    )
    num_records = sum(min(len(part), limit or len(part)) for part, limit in parts if part is not None)
    every, num_steps = evaluation.score_every_steps, trial.config.mechanism.num_steps
    num_during_training = 1 + num_steps // every if every else 0
    return num_records * (1 + evaluation.also_untrained + num_during_training)


def seconds_per_record(trial: Trial, shape: ImageShape) -> float:
    """Return the seconds per record of a step, timed on the second of two microbatches of whole groups."""
    config = trial.config
    torch.set_num_threads(config.performance.threads_per_worker)
    task, num_views = task_of(config), _num_views(config)
    encoder = starting_encoder(config, shape)
    records = max(2, max_views(config, encoder, shape) // num_views)
    rule, size = config.rule(), config.mechanism.group_size
    if rule.whole_batch:  # the rule cannot clip a microbatch alone
        records = round(config.mechanism.expected_batch_size)
    group_size = records if size == BATCH else int(size)
    groups = max(1, records // group_size)
    if not rule.whole_batch:
        groups = groups_of_a_pass(config.mechanism, limit=groups, num_workers=config.performance.num_workers)
        rule = config.rule(groups)
    total = no_sum(encoder)
    synthetic = task.synthetic_records(groups * group_size, shape)
    rows = np.arange(len(synthetic)).reshape(groups, group_size)
    objective = task.objective(config, encoder, config.network, target_of(config, encoder))
    draws = SecretRandomness().generator(0, "statistics") if rule.needs_draws else None
    for _ in range(2):
        start_seconds = time.perf_counter()
        inputs = task.inputs(
            config, encoder, synthetic, rows, step=0, num_augmentations=config.num_augmentations
        )
        rule.add_clipped_sum(total, encoder, objective, inputs, draws=draws)
        seconds = time.perf_counter() - start_seconds
    return seconds / len(synthetic)


def _num_views(config: TrainingConfig) -> int:
    return task_of(config).num_views(config, config.num_augmentations)


def _seconds_per_embedding(trial: Trial, shape: ImageShape, seconds_by_kind: dict[Any, float]) -> float:
    """Return the seconds to embed one image, measured once per network."""
    kind = ("embedding", trial.config.network)
    if kind not in seconds_by_kind:
        encoder = starting_encoder(trial.config, shape)
        images = normalise(torch.randint(0, 256, (256, *shape), dtype=torch.uint8))
        start_seconds = time.perf_counter()
        with torch.no_grad():
            encoder.features(images)
        seconds_by_kind[kind] = (time.perf_counter() - start_seconds) / len(images)
    return seconds_by_kind[kind]
