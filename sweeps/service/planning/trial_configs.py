"""The training at each point of a sweep: resolved, checked, and its network tried on synthetic inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from dpgcl_core.errors import ConfigError, DpgclError
from dpgcl_core.mechanism.registry import method_named
from sweeps.service.options.restarts import num_restart_steps
from sweeps.service.options.score_options import default_score, visible_scores
from sweeps.service.options.service import ledger_url
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.inputs import PlanInputs, num_records
from sweeps.service.planning.trials import Point
from trainers.config.optimizer_registry import optimizer_named
from trainers.config.training import TrainingConfig
from trainers.config.tree import replace_options
from trainers.data.dataset import TrainingData, image_shape_of, modality_of, num_public_classes
from trainers.data.own_images import label_place
from trainers.data.records import Records
from trainers.tasks.task import task_of
from trainers.training.foreign_network import refuse_mixing_network
from trainers.training.microbatch import max_views
from trainers.training.release import check_release
from trainers.training.resolve import training_config
from trainers.training.warm_start import starting_encoder


def trial_configs(inputs: PlanInputs) -> list[tuple[Point, TrainingConfig]]:
    """Return each point with its checked training configuration.

    Points at ε = ∞ are left out if the data are private or the sweep is sealed.

    Raises:
      ConfigError: an option or a point breaks a rule.
    """
    options, data = inputs.options, inputs.data
    configs: list[tuple[Point, TrainingConfig]] = []
    device, held_out = _device(options), options.evaluation.score_on_held_out
    declared = options.mechanism.num_records_public
    shared_options = (
        ("score_on_held_out", held_out, "so that a record is trained on by all or scored by all"),
        ("num_records_public", declared, "so that one guarantee covers all of them"),
        ("shards", options.mechanism.shards, "so that a record is at the same worker in all of them"),
    )
    private, is_open = options.data.are_private, options.release.is_open
    restart_steps = num_restart_steps(options)
    has_ledger = ledger_url(options.data, options.ledger) is not None
    for point in inputs.points:
        for name, sweep_value, why in shared_options:
            if point.changes.get(name, sweep_value) != sweep_value:
                raise ConfigError(
                    f"{name} must be the same in all trials of a sweep, {why}; got {sweep_value}, and "
                    f"{point.changes[name]} at the point {point.label}"
                )
        restarts = {"restart_steps": restart_steps}  # one number for all trials
        training = replace_options(options.training(), **{**point.changes, **restarts, "device": device})
        method = method_named(training.mechanism.method)
        if training.mechanism.epsilon == math.inf or method.label == "none":
            if private or not is_open:
                continue
            training = replace_options(training, noise_multiplier=None, restart_steps=None)
        if private and method.label == "as-published":
            raise ConfigError(
                f"private data need a proven method; {method.name} is as-published: its guarantee does not "
                "hold. `python -m dpgcl_core.methods` lists the proven methods."
            )
        if private and training.mechanism.tan_factor > 1 and not has_ledger:
            raise ConfigError(
                "tan_factor trains at a separate ε, far above the target, and on private data this ε must be "
                "charged. Set --ledger, which reserves it, or search on public data."
            )
        config = training_config(
            training,
            num_records=num_records(data),
            public_seed=options.service.seed,
            modality=modality_of(data.train),
            calibration_folder=inputs.calibration_folder,
            image_shape=image_shape_of(data.train),
            num_classes=num_public_classes(data),
            charged_to=options.ledger.dataset_id if private and has_ledger else None,
        )
        check_release(config, data)
        if task_of(config).learns_labels and isinstance(data.train, Records) and data.train.labels is None:
            place = label_place(options.data.dataset)
            raise ConfigError(f"{method.name} needs labels, and the data have none. Add {place}.")
        task_of(config).check(config, data.train)
        configs.append((point, _with_early_scores(config, options, data)))
    return configs


def _with_early_scores(config: TrainingConfig, options: SweepOptions, data: TrainingData) -> TrainingConfig:
    """Return a training that is scored while it runs, so that it can be stopped early; by default ten times.

    Raises:
      ConfigError: none of its scores during training is visible.
    """
    if options.service.early_stopping == "none":
        return config
    method = config.mechanism.method
    score = default_score(modality_of(data.train), method)
    if score not in visible_scores(data, method):
        raise ConfigError(
            f"early_stopping compares trainings by their {score} during training, which must be scored on "
            "public records. Set --evaluate-on to a public data set, or leave --early-stopping out."
        )
    tenth = max(1, config.mechanism.num_steps // 10)
    every = config.evaluation.score_every_steps or tenth
    return dataclasses.replace(
        config, evaluation=dataclasses.replace(config.evaluation, score_every_steps=every)
    )


def check_networks(configs: Sequence[TrainingConfig], data: TrainingData) -> None:
    """Build each network once; raise ConfigError for a network that must not be trained."""
    for config in _first_of_each(configs, lambda c: (c.network, c.optimizer, c.per_tower_clipping)):
        _check_network(config, data)
    _check_declared_networks([config for config in configs if config.network.mixes_no_records], data)


def _first_of_each(
    configs: Sequence[TrainingConfig], key: Callable[[TrainingConfig], tuple[object, ...]]
) -> list[TrainingConfig]:
    """Return the first training with each value of the key."""
    first_configs: dict[tuple[object, ...], TrainingConfig] = {}
    for config in configs:
        first_configs.setdefault(key(config), config)
    return list(first_configs.values())


def _device(options: SweepOptions) -> str:
    """Return the device of every training: a GPU only if Ray reserves one."""
    device, gpus = options.performance.device, options.service.gpus_per_worker
    if device == "cuda" and not gpus:
        raise ConfigError("device cuda needs gpus_per_worker, so that Ray reserves a GPU; got 0")
    return ("cuda" if gpus else "cpu") if device == "auto" else device


def _check_network(config: TrainingConfig, data: TrainingData) -> None:
    """Build the network once, so that unknown or record-mixing networks fail before any worker starts."""
    torch.set_num_threads(config.performance.threads_per_worker)  # threads on every core would block others
    shape = image_shape_of(data.train)
    encoder = starting_encoder(config, shape)
    task_of(config).check_network(config, encoder, shape)
    optimizer_named(config.optimizer.name)  # not built: building loads torch's compiler for a second


def _check_declared_networks(configs: Sequence[TrainingConfig], data: TrainingData) -> None:
    """Try networks that are declared to mix no records on as many synthetic inputs as a step passes at once.

    Every worker makes this test, too, with its own memory and device. But a worker's error comes after the
    charge, and is withheld if the data are private. At this point the networks have seen only synthetic
    inputs, and nothing has been reserved.

    Raises:
      ConfigError: as in `refuse_mixing_network`, or a network fails.
    """

    def pass_key(config: TrainingConfig) -> tuple[object, ...]:
        mechanism = config.mechanism
        sizes = (mechanism.group_size, mechanism.sampling_prob, mechanism.batch_cap)
        return config.network, mechanism.method, sizes, config.num_augmentations

    for config in _first_of_each(configs, pass_key):
        shape = image_shape_of(data.train)
        encoder = starting_encoder(config, shape)
        try:
            refuse_mixing_network(config, encoder, shape, max_views(config, encoder, shape))
        except (DpgclError, MemoryError):
            raise
        except Exception as error:  # a user's network may fail in any way
            raise ConfigError(
                f"the network {config.network.name} fails on as many synthetic images as a step passes at "
                f"once: {type(error).__name__}: {error}"
            ) from error
