"""Makes a training's configuration from options: noise calibration, warm start and choice of network."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from dpgcl_core.accounting.composition import MIN_NOISE_MULTIPLIER
from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import Method
from dpgcl_core.mechanism.numbers import GROUPS, RECORDS, check_delta, default_delta
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.methods.baselines.capped_batch import default_cap
from dpgcl_core.release import noised_counts
from dpgcl_core.sampling.groups import BATCH, GroupSize, expected_dropped_share
from trainers.config.networks import (
    AnyNetworkConfig,
    CaptionerConfig,
    ClassifierConfig,
    ClipNetworkConfig,
    EncoderConfig,
    MaskedNetworkConfig,
    NetworkConfig,
    NetworkOptions,
    WarmStart,
    synthetic_steps,
)
from trainers.config.settings import MechanismOptions, TrainingOptions
from trainers.config.training import TrainingConfig
from trainers.data.dataset import Modality
from trainers.models import captioner, masked
from trainers.models.clip.published_models import SMALL_MODELS, is_clip_name
from trainers.models.encoder import NETWORKS, ImageShape
from trainers.training.public_start import recipe_of
from trainers.training.warm_start import made_warm_start, read_warm_start


def training_config(
    options: TrainingOptions,
    *,
    num_records: int,
    public_seed: int,
    modality: Modality = "image",
    calibration_folder: Path | None = None,
    image_shape: ImageShape | None = None,
    num_classes: int | None = None,
    charged_to: str | None = None,
) -> TrainingConfig:
    """Return the configuration of one training; a `synthetic:STEPS` start is made if it is not cached.

    Args:
      options: the training's options.
      num_records: number of records trained on and held out; used, and then public, only if
        `num_records_public` is not set.
      public_seed: seed of initialisation, views and evaluation subsets.
      modality: the kind of the records: "image" or "image-text".
      calibration_folder: the folder where calibrations are kept.
      image_shape: (channels, height, width) of the records; required for a `synthetic:STEPS` warm start.
      num_classes: number of classes in public records; None for private records.
        `options.network.num_classes` takes precedence.
      charged_to: the data set's id in the ledger that the training is charged to. The training may start
        from a model that was charged to the same data set. The caller must check that it is the same ledger
        (`WarmStart.private`).

    Raises:
      ConfigError: an option breaks a rule, or two options contradict each other.
      StorageError: a warm start cannot be read or cached.
    """
    mechanism = _build_mechanism(options, num_records, calibration_folder)
    _check_group_size(mechanism)
    network = _network_config(options.network, mechanism, modality, num_classes)
    start = _warm_start(options.network.warm_start, network, image_shape, public_seed, charged_to)
    return TrainingConfig(
        mechanism=mechanism,
        **vars(options.objective),
        **vars(options.randomness),
        views=options.views,
        text_views=options.text_views if network.takes_pairs else None,
        network=network,
        optimizer=options.optimizer,
        evaluation=options.evaluation,
        performance=options.performance,
        public_seed=public_seed,
        warm_start=start,
    )


def _warm_start(
    path: Path | None,
    network: AnyNetworkConfig,
    image_shape: ImageShape | None,
    public_seed: int,
    charged_to: str | None,
) -> WarmStart | None:
    if path is None:
        return None
    num_steps = synthetic_steps(path)
    if num_steps is None:
        return read_warm_start(path, charged_to=charged_to)
    if image_shape is None:
        raise ConfigError(
            f"{path} is made for one image shape; got none. Pass the image_shape (channels, height, width) "
            "of the records to training_config."
        )
    encoder = network.encoder if isinstance(network, ClassifierConfig) else network
    recipe = recipe_of(encoder, image_shape, num_steps=num_steps, seed=public_seed)
    return made_warm_start(recipe)


def _network_config(
    options: NetworkOptions, mechanism: Mechanism, modality: Modality, num_classes: int | None
) -> AnyNetworkConfig:
    task = mechanism.rules.task
    if task == ClassifierConfig.task:
        return _classifier_config(options, mechanism.method, num_classes)
    _check_unset(options, "the classifiers of dp_classifier", "num_classes", "trained_layers")
    if modality == "image-text" and not task:
        return ClipNetworkConfig(**_fields_of(ClipNetworkConfig, options))
    clip_models = "the CLIP models of contrastive methods on pairs"
    _check_unset(options, clip_models, "pretrained", "learn_temperature")
    if task == MaskedNetworkConfig.task:
        return MaskedNetworkConfig(**_fields_of(MaskedNetworkConfig, options))
    if modality == "image-text":
        return CaptionerConfig(**_fields_of(CaptionerConfig, options))
    _check_unset(options, "CLIP models and the networks of dp_mae and dp_cap", "gradient_checkpointing")
    shared = _fields_of(NetworkConfig, options)
    return NetworkConfig(**shared, predictor=mechanism.rules.needs_target)


def _classifier_config(options: NetworkOptions, method: str, num_classes: int | None) -> ClassifierConfig:
    num_outputs = options.num_classes or num_classes
    if num_outputs is None:
        raise ConfigError(
            f"{method} needs a public number of classes, which must not be read from private labels; got "
            "none. Set --num-classes to a public upper bound."
        )
    _check_unset(options, "the CLIP models of contrastive methods on pairs", "learn_temperature")
    settings = _fields_of(ClassifierConfig, options) | {"num_classes": num_outputs}
    return ClassifierConfig(**settings, encoder=_encoder_config(options, method))


def _encoder_config(options: NetworkOptions, method: str) -> EncoderConfig:
    """Return the configuration of a classifier's encoder; a CLIP model gets no adapters."""
    name = options.name
    if name in masked.SIZES:
        return MaskedNetworkConfig(**_fields_of(MaskedNetworkConfig, options))
    if name in captioner.SIZES:
        return CaptionerConfig(**_fields_of(CaptionerConfig, options))
    if name not in NETWORKS and ":" not in name:
        if not is_clip_name(name):
            known = [*NETWORKS, *masked.SIZES, *captioner.SIZES, *SMALL_MODELS, "package.module:factory"]
            raise ConfigError(unknown_choice(f"network of {method}", name, known))
        return ClipNetworkConfig(**_fields_of(ClipNetworkConfig, options) | {"lora_rank": 0})
    _check_unset(options, "CLIP models", "pretrained")
    _check_unset(options, "transformers", "gradient_checkpointing")
    return NetworkConfig(**_fields_of(NetworkConfig, options))


def _check_unset(options: NetworkOptions, networks: str, *names: str) -> None:
    default = NetworkOptions()
    for name in names:
        if getattr(options, name) != getattr(default, name):
            raise ConfigError(
                f"{name} applies only to {networks}; got {getattr(options, name)}. Leave it out."
            )


def _fields_of(kind: type[AnyNetworkConfig], options: NetworkOptions) -> dict[str, Any]:
    return {f.name: getattr(options, f.name) for f in dataclasses.fields(kind) if hasattr(options, f.name)}


def _build_mechanism(
    options: TrainingOptions, num_records: int, calibration_folder: Path | None
) -> Mechanism:
    request, evaluation = options.mechanism, options.evaluation
    target = request.target_epsilon()
    n = num_records if request.num_records_public is None else request.num_records_public
    num_trained, _ = noised_counts.split_public(n, evaluation.score_on_held_out)
    noise = 1.0 if request.noise_multiplier is None else request.noise_multiplier
    if not noise > 0:
        raise ConfigError(
            f"noise_multiplier must be positive; got {noise}. For a non-private trial, set epsilon = inf."
        )
    method = method_named(request.method)
    sampling_prob = _sampling_prob(request.sampling_prob, request.expected_batch_size, num_trained)
    without_privacy = method.label == "none"
    cap = request.batch_cap
    if cap is None and method.needs_cap:
        cap = default_cap(sampling_prob * num_trained)
    group_size = _group_size(request, method, sampling_prob * num_trained)
    mechanism = Mechanism(
        method=request.method,
        batch_cap=cap,
        temperature=options.objective.temperature,
        num_records_public=num_trained,
        num_records_from_data=request.num_records_public is None,
        sampling_prob=sampling_prob,
        sampling=None if group_size == BATCH else request.sampling,
        group_size=group_size,
        l2_clip_norm=math.inf if without_privacy else request.l2_clip_norm,
        clipping=request.clipping,
        noise_multiplier=0.0 if without_privacy else noise,
        num_steps=request.num_steps if method.trains else 0,
        num_restart_steps=request.restart_steps if method.trains else None,
        num_shards=request.shards,
        target_delta=default_delta(n) if request.delta is None else request.delta,
    )
    check_delta(mechanism.target_delta, n)  # held-out records are scored, so the promise covers them, too
    if target is not None and not without_privacy:
        mechanism = noised_counts.calibrated(
            mechanism,
            target,
            score_noise_multiplier=evaluation.score_noise_multiplier,
            num_scores=evaluation.num_noised_scores,
            snr_noise_multiplier=evaluation.snr_noise_multiplier,
            cache_folder=calibration_folder,
        )
    return scaled_down(mechanism, request.tan_factor)


def scaled_down(mechanism: Mechanism, factor: float) -> Mechanism:
    """Return the mechanism at batch size B/k and noise multiplier σ/k, for the same T steps.

    This is TAN (Sander, Stock and Sablayrolles 2023). With Δ, the sensitivity, the noise of the mean gradient
    is σΔ/B as before (nearly, if records are sampled and the remainder is
    dropped), so the training is expected to behave like the large training, in 1/k of the time. Its own ε is
    much larger, and it has no guarantee at the ε of the large training.

    Args:
      mechanism: the mechanism of the large training.
      factor: k; 1 returns the mechanism unchanged.

    Raises:
      ConfigError: k is below 1, or the method's sensitivity or group would depend on the batch.

    >>> large = Mechanism(num_records_public=60_000, sampling_prob=0.016, group_size=8, l2_clip_norm=1.0,
    ...     noise_multiplier=1.2, num_steps=100, target_delta=1e-6)
    >>> small = scaled_down(large, 4)
    >>> small.expected_batch_size, small.noise_multiplier, small.num_steps
    (240.0, 0.3, 100)
    >>> round(large.noise().std / large.divisor, 9) == round(small.noise().std / small.divisor, 9)
    True
    """
    if factor == 1:
        return mechanism
    if not 1 <= factor < math.inf:
        raise ConfigError(f"tan_factor must be at least 1; got {factor:g}")
    method = mechanism.rules
    is_whole = not (method.takes_group_size or method.one_record_groups)
    if method.needs_cap or not method.plain_event or mechanism.group_size == BATCH or is_whole:
        raise ConfigError(
            f"tan_factor scales the noise with the batch size, but the noise of {method.name} with "
            f"group_size = {mechanism.group_size} depends on the batch size already. Use a method that clips "
            "groups of a fixed size, or records."
        )
    noise = mechanism.noise_multiplier / factor
    if mechanism.is_private and noise < MIN_NOISE_MULTIPLIER:
        raise ConfigError(
            f"tan_factor must leave a noise_multiplier of at least {MIN_NOISE_MULTIPLIER:g}; got {factor:g}, "
            f"which leaves {noise:.3g}. Set it to at most "
            f"{mechanism.noise_multiplier / MIN_NOISE_MULTIPLIER:.3g}, or choose a smaller epsilon."
        )
    return dataclasses.replace(
        mechanism, sampling_prob=mechanism.sampling_prob / factor, noise_multiplier=noise
    )


def _sampling_prob(sampling_prob: float | None, expected_batch_size: float, num_records_public: int) -> float:
    if sampling_prob is not None:
        return sampling_prob
    if not 0 < expected_batch_size <= num_records_public:
        raise ConfigError(
            "expected_batch_size must be in (0, num_records_public], so that sampling_prob is in (0, 1]; "
            f"got {expected_batch_size:g} with num_records_public = {num_records_public}. "
            f"Set --expected-batch-size to at most {num_records_public}."
        )
    return expected_batch_size / num_records_public


def _group_size(request: MechanismOptions, method: Method, expected_batch_size: float) -> GroupSize:
    """Return the group size; for methods with one group it is "batch", or B if groups are sampled."""
    if request.sampling is not None:
        method.with_sampling(request.sampling)  # checked here, because a whole batch has no sampling
    if method.one_record_groups:
        return 1
    if method.takes_group_size:
        return request.group_size
    return max(1, round(expected_batch_size)) if request.sampling == GROUPS else BATCH


def _check_group_size(mechanism: Mechanism) -> None:
    size = mechanism.group_size
    if size == BATCH:
        return
    if size < mechanism.rules.min_group_size:
        raise ConfigError(
            f"group_size must be at least 2, since a record is compared with others in its group; got {size}"
        )
    if mechanism.sampling == RECORDS and size > mechanism.expected_batch_size / 4:
        share = expected_dropped_share(mechanism.num_records_public, mechanism.sampling_prob, size)
        raise ConfigError(
            f"group_size must be at most a quarter of the expected batch size, "
            f"{mechanism.expected_batch_size:g}; got {size}, whose incomplete groups would drop "
            f'{share:.0%} of the sampled records. For one group of the whole batch, use "batch". For large '
            "groups, use --sampling groups."
        )
