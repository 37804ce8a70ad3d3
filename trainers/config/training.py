"""The settings of one training: frozen, keyword-only, validated at construction.

The settings that decide the guarantee are in `dpgcl_core.mechanism.mechanism.Mechanism`. The other settings
that decide the result are in `trainers.config.networks` and `trainers.config.nodes`, whose classes are also
nodes of the options (`trainers.config.settings`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.parts import ClippingParts
from dpgcl_core.errors import ConfigError, require
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import GradientRule, GroupLoss, LossSettings
from dpgcl_core.mechanism.registry import METHODS
from dpgcl_core.noise.chacha20 import choose_randomness
from dpgcl_core.noise.randomness import DrawSource
from dpgcl_core.release import noised_counts
from trainers.config.networks import (
    AnyNetworkConfig,
    ClassifierConfig,
    ClipNetworkConfig,
    EncoderConfig,
    NetworkConfig,
    TextViewConfig,
    ViewConfig,
    WarmStart,
)
from trainers.config.nodes import (
    EvaluationConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PerformanceConfig,
    RandomnessConfig,
)

TOWERS = ClippingParts(prefixes=("clip.visual.",))
"""Parts of a gradient: the image tower, and the rest, which is the text tower and the temperature."""


TARGET_DECAY = 0.99
"""Decay of the averaged weights of a target network, for methods that need one, if `ema_decay` is 0."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(ObjectiveConfig, RandomnessConfig):
    """The complete configuration of one training, built by `trainers.training.resolve.training_config`.

    Attributes:
      mechanism: the private step and its accounting.
      public_seed: seed of initialisation, augmentation and the evaluation subsets, which are all public. With
        `seeded_non_private` it also determines sampling, permutation and noise.
      warm_start: weights to start from, public or charged to the same ledger; None for random weights, or
        for a CLIP model's `pretrained` weights.
      text_views: augmentation of captions; None without captions.
    """

    mechanism: Mechanism
    views: ViewConfig = field(default_factory=ViewConfig)
    network: AnyNetworkConfig = field(default_factory=NetworkConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    performance: PerformanceConfig = field(default_factory=PerformanceConfig)
    public_seed: int = 0
    warm_start: WarmStart | None = None
    text_views: TextViewConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_pairs()
        self._check_method()
        warmup, num_steps = self.optimizer.warmup_steps, self.mechanism.num_steps
        require(
            not warmup or not num_steps or warmup < num_steps,
            "warmup_steps must be less than num_steps, so that the learning rate reaches its value; got "
            f"{warmup} and {num_steps}",
        )

    def _check_method(self) -> None:
        method, rule = self.mechanism.rules, self.rule()
        if self.num_augmentations and not method.takes_augmented_keys:
            raise ConfigError(
                f"num_augmentations must be 0: {method.name} augments no keys; got {self.num_augmentations}"
            )
        if rule.whole_batch and self.performance.num_workers > 1:
            raise ConfigError(
                f"{method.name} compares all records of a step, so one worker must hold them: set "
                f"num_workers = 1; got {self.performance.num_workers}"
            )
        num_shards, num_workers = self.mechanism.num_shards, self.performance.num_workers
        require(
            num_shards in (1, num_workers),
            "shards must be the number of workers, each of which has the records of one shard; got shards = "
            f"{num_shards} and num_workers = {num_workers}. Set num_workers = {num_shards}",
        )
        if rule.whole_batch and self.mechanism.group_stage().yields_incomplete:
            raise ConfigError(
                f"{method.name} compares all groups of a step, so none may be incomplete, but its group "
                "stage yields incomplete groups. Use a method that clips each group separately"
            )
        isolates = isinstance(rule, GroupClipper) and rule.isolated
        if self.isolates_groups and self.mechanism.is_private and method.trains and not isolates:
            raise ConfigError(
                f"{method.name} passes the records of several units through the network at once, which "
                f"{self.network.name} might mix. If it mixes no records and keeps no state, pass "
                "--mixes-no-records. Otherwise, use a method that clips groups: it passes one group at a time"
            )
        if self.network.precision == "float16" and not isinstance(rule, GroupClipper):
            raise ConfigError(
                f"float16 needs a method that clips groups; got {method.name}. Use float32 or bfloat16"
            )
        if self.network.predictor != method.needs_target:
            raise ConfigError(
                f"predictor must be {method.needs_target} for {method.name}, which "
                f"{'regresses' if method.needs_target else 'does not regress'} onto a target network"
            )

    def _check_pairs(self) -> None:
        method, learns_temperature = self.mechanism.rules, self.network.learn_temperature
        require(
            (self.text_views is not None) == self.network.takes_pairs,
            "text_views must be set if the network takes pairs, as a CLIP model does, and only then",
        )
        if self.network.takes_pairs and not method.takes_pairs:
            raise ConfigError(
                f"{method.name} has no loss for pairs of images and texts. Use one of "
                f"{', '.join(each.name for each in METHODS.values() if each.takes_pairs)}"
            )
        if not self.network.takes_pairs and not method.takes_images:
            raise ConfigError(
                f"{method.name} learns from captions, and the data are images without captions. Use pairs of "
                "images and texts, such as --dataset shapes"
            )
        clips_groups = isinstance(self.rule(), GroupClipper)
        has_towers = isinstance(self.network, ClipNetworkConfig)
        if self.per_tower_clipping and not (has_towers and clips_groups):
            raise ConfigError(
                "per_tower_clipping needs a CLIP model, for its two towers, and a method that clips groups; "
                f"got {self.network.name} and {method.name}"
            )
        if learns_temperature and not clips_groups:
            raise ConfigError(
                f"learn_temperature needs a method that clips groups: {method.name} does not clip the "
                "temperature's gradient"
            )
        if learns_temperature and not 0.01 <= self.temperature <= 1:
            raise ConfigError(
                f"temperature must be in [0.01, 1] if learn_temperature is set; got {self.temperature}"
            )

    @property
    def loss_settings(self) -> LossSettings:
        """The settings of losses and gradient rules, apart from the mechanism's numbers."""
        return LossSettings(
            temperature=1.0 if self.network.learn_temperature else self.temperature,
            pairs=self.network.takes_pairs,
            parts=TOWERS if self.per_tower_clipping else None,
            isolated=self.isolates_groups,
            gradient_scale=self.network.gradient_scale,
        )

    def rule(self, groups_at_once: int | None = None) -> GradientRule:
        """Return the rule that sums one step's clipped gradients, in passes of `groups_at_once` groups."""
        return self.mechanism.rule(replace(self.loss_settings, groups_at_once=groups_at_once))

    @property
    def isolates_groups(self) -> bool:
        """Whether the network gets one group at a time and keeps no state, for lack of `mixes_no_records`."""
        return self.network.is_foreign and not self.network.mixes_no_records

    @property
    def starts_at_random(self) -> bool:
        """Whether the first weights are only a random draw, and not weights that were trained before."""
        published = isinstance(self.encoder, ClipNetworkConfig) and self.encoder.pretrained != "random"
        return self.warm_start is None and not published

    @property
    def encoder(self) -> EncoderConfig:
        """The encoder of images: the network itself, or the encoder of a classifier."""
        return self.network.encoder if isinstance(self.network, ClassifierConfig) else self.network

    def group_loss(self) -> GroupLoss | None:
        """Return the loss of one group's embeddings; None if the method's loss is of the whole batch."""
        return self.mechanism.loss(self.loss_settings)

    @property
    def task(self) -> str:
        """The name of the network's task, see `trainers.tasks.task`."""
        return self.network.task

    @property
    def warm_start_sha256(self) -> str | None:
        """The sha256 of the warm start's file, whatever its path; None without a warm start."""
        return self.warm_start.sha256 if self.warm_start is not None else None

    @property
    def guarantee_label(self) -> str:
        """The label `proven` or `none`; a seeded run is never private."""
        return "none" if self.seeded_non_private else self.mechanism.guarantee_label

    def randomness(self, *, data_are_private: bool) -> DrawSource:
        """Return the source of sampling, permutations and noise.

        Raises:
          ConfigError: private data would be used without the cryptographic stream, or a seeded run with it.
        """
        return choose_randomness(
            secure_noise=self.secure_noise,
            data_are_private=data_are_private,
            public_seed=self.public_seed if self.seeded_non_private else None,
        )

    def epsilon(self, num_steps: int | None = None, *, num_restarts: int = 0, num_scorings: int = 1) -> float:
        """Return ε of everything that one training releases: model, noised scores and noised SNR.

        Any of the R steps charged in advance may repeat the first step, so R further SNRs are charged.

        Args:
          num_steps: number of charged steps; by default all planned steps, T + R.
          num_restarts: number of restarts. Each may have repeated the first step, whose SNR is then charged
            once more.
          num_scorings: number of times that the noised scores may have been drawn.
        """
        num_restarts = max(num_restarts, self.mechanism.num_restart_steps or 0)
        return noised_counts.trial_epsilon(
            self.mechanism,
            self.evaluation.score_noise_multiplier,
            self.evaluation.num_noised_scores * max(1, num_scorings),
            num_steps=num_steps,
            snr_noise_multiplier=self.evaluation.snr_noise_multiplier,
            num_snr_steps=1 + num_restarts,
        )

    @property
    def num_scored_public(self) -> int:
        """The public divisor of noised counts: the expected number of held-out records for N trained ones."""
        share = self.evaluation.score_on_held_out
        return max(1, round(self.mechanism.num_records_public * share / (1 - share)))

    def as_params(self) -> dict[str, Any]:
        """Return all settings in one flat dictionary, by the names of the dataclass fields, for MLflow."""
        nodes: list[tuple[str, tuple[Any, ...]]] = [
            ("", (self, self.mechanism, self.views)),
            ("network_", (self.encoder, self.network)),
            ("optimizer_", (self.optimizer,)),
            ("", (self.evaluation, self.performance, self.text_views)),
        ]
        params = {
            prefix + item.name if item.name == "name" else item.name: getattr(part, item.name)
            for prefix, parts in nodes
            for part in parts
            for item in (() if part is None else fields(part))
            if not is_dataclass(getattr(part, item.name))
        }
        return params | {
            "guarantee_label": self.guarantee_label,
            "warm_start": self.warm_start_sha256,
            "warm_start_origin": self.warm_start.origin if self.warm_start is not None else None,
        }
