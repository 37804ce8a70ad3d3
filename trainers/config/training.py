"""The settings of one training: frozen, keyword-only, validated at construction.

What decides the guarantee is in `dpgcl_core.mechanism.mechanism.Mechanism`; what decides the result besides
it is in `trainers.config.networks` and in the other classes here; what must not change the result stands
apart in `PerformanceConfig`. Each is a node of the options, too (`trainers.config.settings`): the docstring
under a field describes it on the command line.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpgcl_core.clipping.parts import ClippingParts
from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import GradientRule, GroupLoss, GroupRule, LossSettings
from dpgcl_core.mechanism.registry import METHODS
from dpgcl_core.methods.view_draws import over_view_draws
from dpgcl_core.noise.chacha20 import choose_randomness
from dpgcl_core.noise.sources import DrawSource
from dpgcl_core.release import noised_counts
from dpgcl_core.release.metrics import FEW_SHOTS
from dpgcl_core.sampling.groups import BATCH
from trainers.config.networks import (
    PRECISIONS,
    AnyNetworkConfig,
    CaptionerConfig,
    ClassifierConfig,
    ClipNetworkConfig,
    EncoderConfig,
    MaskedNetworkConfig,
    NetworkConfig,
    NetworkOptions,
    TextViewConfig,
    ViewConfig,
    WarmStart,
    require,
)
from trainers.config.tree import option

TOWERS = ClippingParts(prefixes=("clip.visual.",))
"""The image tower; the text tower and the temperature are the rest."""

__all__ = [
    "PRECISIONS",
    "AnyNetworkConfig",
    "CaptionerConfig",
    "ClassifierConfig",
    "ClipNetworkConfig",
    "EncoderConfig",
    "EvaluationConfig",
    "MaskedNetworkConfig",
    "NetworkConfig",
    "NetworkOptions",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PerformanceConfig",
    "PublicRecordsConfig",
    "RandomnessConfig",
    "TextViewConfig",
    "TrainingConfig",
    "ViewConfig",
    "WarmStart",
]

POOLED, GRID4 = "pooled", "grid4"
READOUTS = (POOLED, GRID4)
DECAYS = ("none", "cosine", "linear")
NOISE_SGD = "noise_sgd"
"""The optimizer whose gradient comes in units of its noise."""
TARGET_DECAY = 0.99
"""Of the average that a method regresses onto, where no `ema_decay` is given."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What the loss of a group compares, and in which parts its gradient is clipped (stages 4, 6 and 7)."""

    temperature: float = 0.2
    """τ of the contrastive loss."""
    num_augmentations: int = 1
    """N_a, extra augmented copies of every key."""
    num_view_draws: int = 1
    """K, draws of all of a record's views whose gradients are averaged before clipping, at no ε."""
    per_tower_clipping: bool = False
    """CLIP: clip each tower's part of a group's gradient to C/√2, at the same sensitivity."""

    def __post_init__(self) -> None:
        require(
            0 < self.temperature < math.inf,
            f"temperature must be positive and finite; got {self.temperature}",
        )
        require(
            self.num_augmentations >= 0,
            f"num_augmentations must not be negative; got {self.num_augmentations}",
        )
        require(self.num_view_draws >= 1, f"num_view_draws must be at least 1; got {self.num_view_draws}")


@dataclass(frozen=True, kw_only=True)
class RandomnessConfig:
    """Where sampling, permutations and noise come from."""

    seeded_non_private: bool = False
    """Reproducible sampling and noise from the seed. Such runs have NO guarantee and are labelled so."""
    secure_noise: bool | None = None
    """Draw sampling, permutations and noise from a cryptographic stream; private data always do."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer (stage 9)."""

    name: str = field(default="adam", metadata=option("optimizer"))
    """adam, adamw, sgd, lars, or noise_sgd: SGD on the gradient over the standard deviation of its noise."""
    learning_rate: float = 2e-3
    """Learning rate, the same for every trial unless a sweep varies it."""
    weight_decay: float = 0.0
    """Weight decay; decoupled for AdamW, added to the gradient, of noise_sgd the divided one, otherwise."""
    momentum: float = 0.9
    """Momentum of SGD, LARS and noise_sgd."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises to its value."""
    learning_rate_decay: str = "none"
    """How the learning rate falls afterwards: none, cosine or linear, towards 0 at the last step."""
    ema_decay: float = 0.0
    """Decay of a moving average of the weights that is scored and returned, at no ε; 0 = the last ones."""

    def __post_init__(self) -> None:
        require(
            0 < self.learning_rate < math.inf,
            f"learning_rate must be positive and finite; got {self.learning_rate}",
        )
        require(
            0 <= self.weight_decay < math.inf,
            f"weight_decay must be finite and not negative; got {self.weight_decay}",
        )
        require(0 <= self.momentum < 1, f"momentum must be in [0, 1); got {self.momentum}")
        require(self.warmup_steps >= 0, f"warmup_steps must not be negative; got {self.warmup_steps}")
        if self.learning_rate_decay not in DECAYS:
            raise ConfigError(unknown_choice("learning_rate_decay", self.learning_rate_decay, DECAYS))
        require(0 <= self.ema_decay < 1, f"ema_decay must be in [0, 1); got {self.ema_decay}")

    @property
    def in_units_of_noise(self) -> bool:
        """Whether the gradient is divided by the known standard deviation of its noise."""
        return self.name == NOISE_SGD


@dataclass(frozen=True, kw_only=True)
class PublicRecordsConfig:
    """What public records (--public-records) do for the training, at no ε."""

    num_public_negatives: int = 0
    """M, public records whose embeddings all groups share as further keys; 0 = none."""
    subspace_dim: int = 0
    """k, public directions that groups' gradients are projected on ahead of the clip; 0 = all weights."""
    subspace_groups: int | None = None
    """m, groups of public records whose gradients span the subspace; twice subspace_dim unless given."""
    subspace_every_steps: int = 1
    """Steps between two computations of the subspace."""

    def __post_init__(self) -> None:
        for name in ("num_public_negatives", "subspace_dim"):
            require(getattr(self, name) >= 0, f"{name} must not be negative; got {getattr(self, name)}")
        every, given = self.subspace_every_steps, self.subspace_groups
        require(every >= 1, f"subspace_every_steps must be at least 1; got {every}")
        if not self.subspace_dim and (given is not None or every != 1):
            raise ConfigError(
                "subspace_groups and subspace_every_steps are of a subspace, and there is none: give "
                "--subspace-dim, or leave them out"
            )
        require(
            given is None or given >= self.subspace_dim,
            f"subspace_groups must be at least subspace_dim = {self.subspace_dim}, for so many directions to "
            f"be spanned; got {given}",
        )

    @property
    def num_subspace_groups(self) -> int:
        """m; 0 without a subspace."""
        return 2 * self.subspace_dim if self.subspace_groups is None else self.subspace_groups

    @property
    def asks_for_records(self) -> bool:
        """Whether a training needs public records at all."""
        return self.num_public_negatives > 0 or self.subspace_dim > 0


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How frozen features are scored, and what is recorded on the way."""

    max_index_records: int | None = None
    """Fit k-NN and probe on so many training records, the first by a keyed hash of their id; else on all."""
    max_query_records: int | None = None
    """Score so many test records, likewise; else all."""
    num_neighbors: int = 3
    """k of k-NN."""
    few_shot: tuple[int, ...] = ()
    """Score probes of so few labelled records per class, too: 1, 2, 5 or 10; each the mean of five draws."""
    readout: str = POOLED
    """What k-NN and probe read: pooled (the features), or grid4 (a CNN's feature map averaged to 4×4)."""
    also_untrained: bool = True
    """Score the network before training, too: at random weights, and at its public start if it has one."""
    record_every_steps: int = 10
    """Steps between recorded SNR and loss values (public data only); 0 = first step only."""
    score_every_steps: int = 0
    """Steps between scores on the way, where final scores are seen; 0 = none."""
    score_on_held_out: float = 0.0
    """Share of the records held out of training and scored with noise against the public --evaluate-on."""
    score_noise_multiplier: float | None = None
    """Standard deviation of the noise on each count of correct held-out records; charged in ε."""
    snr_noise_multiplier: float | None = None
    """Release the first step's SNR with this noise (over its sensitivity), charged in ε; else not."""

    def __post_init__(self) -> None:
        for name in ("max_index_records", "max_query_records", "num_neighbors"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1; got {value}")
        for count in self.few_shot:
            if count not in FEW_SHOTS:
                raise ConfigError(f"few_shot takes {', '.join(map(str, FEW_SHOTS))} per class; got {count}")
        if self.readout not in READOUTS:
            raise ConfigError(unknown_choice("readout", self.readout, READOUTS))
        for name in ("record_every_steps", "score_every_steps"):
            require(getattr(self, name) >= 0, f"{name} must not be negative; got {getattr(self, name)}")
        share = self.score_on_held_out
        require(0 <= share < 1, f"score_on_held_out must be a share in [0, 1); got {share}")
        require(
            (share > 0) == (self.score_noise_multiplier is not None),
            "score_on_held_out and score_noise_multiplier belong together: give both or neither; "
            f"got {share} and {self.score_noise_multiplier}",
        )
        for name in ("score_noise_multiplier", "snr_noise_multiplier"):
            if getattr(self, name) is not None:
                noised_counts.check_noise_multiplier(name, getattr(self, name))

    @property
    def num_noised_scores(self) -> int:
        """Noised counts of one trial: k-NN and linear probe, of the trained network alone."""
        return 2 if self.score_on_held_out else 0


@dataclass(frozen=True, kw_only=True)
class PerformanceConfig:
    """What changes time and memory, never the law of the result."""

    num_workers: int = 1
    """Data-parallel workers of one training."""
    threads_per_worker: int = 1
    """CPU threads of one worker."""
    max_views_per_microbatch: int | None = None
    """Images passed through the network at once; what is fast and fits into memory unless given."""
    prefetch: bool = False
    """Make the next images' views in a thread; helps where a core has nothing else to do."""
    checkpoint_every_steps: int = 10
    """Steps between checkpoints: the most that a stop makes repeat."""
    device: str = "auto"
    """cpu, cuda, or auto: in a sweep, cuda where --gpus-per-worker sets one aside."""
    worker_processes: bool = False
    """Start a Ray Train worker group even for one worker: some ten seconds more per training."""

    def __post_init__(self) -> None:
        for name in (
            "num_workers",
            "threads_per_worker",
            "max_views_per_microbatch",
            "checkpoint_every_steps",
        ):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1; got {value}")
        require(
            self.device in ("auto", "cpu", "cuda"), f"device must be auto, cpu or cuda; got {self.device!r}"
        )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(ObjectiveConfig, RandomnessConfig):
    """One training, complete: what `trainers.training.resolve.training_config` makes of options.

    Attributes:
      mechanism: the private step and its accounting.
      public_seed: governs initialisation, augmentation and the evaluation subsets: public things only. With
        `seeded_non_private` it governs sampling, permutation and noise, too.
      warm_start: public weights to start from; None for a random draw, or what a CLIP model starts from.
      text_views: of captions; None where there are none.
    """

    mechanism: Mechanism
    views: ViewConfig = field(default_factory=ViewConfig)
    network: AnyNetworkConfig = field(default_factory=NetworkConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    public: PublicRecordsConfig = field(default_factory=PublicRecordsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    performance: PerformanceConfig = field(default_factory=PerformanceConfig)
    public_seed: int = 0
    warm_start: WarmStart | None = None
    text_views: TextViewConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_pairs()
        self._check_method()
        self._check_public()
        self._check_schedule()

    def _check_method(self) -> None:
        method, rule = self.mechanism.rules, self.rule()
        if self.num_augmentations and not method.takes_augmented_keys:
            raise ConfigError(
                f"{method.name} has no place for augmented keys: give num_augmentations = 0; got "
                f"{self.num_augmentations}"
            )
        if rule.whole_batch and self.performance.num_workers > 1:
            raise ConfigError(
                f"{method.name} compares all records of a step, so one worker must hold them: give "
                f"num_workers = 1; got {self.performance.num_workers}"
            )
        if rule.whole_batch and self.mechanism.group_stage().yields_incomplete:
            raise ConfigError(
                f"{method.name} compares all groups of a step, so none may be incomplete; its group stage "
                "yields incomplete ones: use a method that clips groups by themselves"
            )
        private = self.mechanism.is_private and method.trains
        if self.isolates_groups and private and not _isolates(rule):
            raise ConfigError(
                f"{method.name} passes the records of several units through the network at once, and "
                f"{self.network.name} is not this package's: if it mixes no records and keeps nothing, say "
                "so with --mixes-no-records; or use a method that clips groups, which then go one by one"
            )
        if self.network.precision == "float16" and not isinstance(rule, GroupRule):
            raise ConfigError(
                f"float16 is for methods that clip groups; {method.name} does not: give float32 or bfloat16"
            )
        if self.network.predictor != method.needs_target:
            raise ConfigError(
                "a network has a predictor exactly where its method regresses onto a target, and "
                f"{method.name} {'does' if method.needs_target else 'does not'}: give predictor = "
                f"{method.needs_target}"
            )

    def _check_pairs(self) -> None:
        method, learns = self.mechanism.rules, self.learns_temperature
        require(
            (self.text_views is not None) == self.trains_pairs,
            "text_views belong to a network of pairs, such as a CLIP model: give both or neither",
        )
        if self.trains_pairs and not method.takes_pairs:
            raise ConfigError(
                f"{method.name} has no loss for pairs of images and texts; "
                f"{', '.join(each.name for each in METHODS.values() if each.takes_pairs)} have"
            )
        if not self.trains_pairs and not method.takes_images:
            raise ConfigError(
                f"{method.name} learns from captions, and the data are images without any: give pairs of "
                "images and texts, such as --dataset shapes"
            )
        if self.trains_pairs and self.evaluation.readout != POOLED:
            kind = "a CLIP model" if self.network.has_towers else "a transformer"
            raise ConfigError(
                f"readout {self.evaluation.readout} is for CNNs of images, and {self.network.name} is "
                f"{kind}: give readout {POOLED}"
            )
        if self.per_tower_clipping and not (self.network.has_towers and isinstance(self.rule(), GroupRule)):
            raise ConfigError(
                "per_tower_clipping is for the two towers of a CLIP model and methods that clip groups; "
                f"got {method.name} of {self.network.name}"
            )
        if learns and not isinstance(self.rule(), GroupRule):
            raise ConfigError(
                f"learn_temperature is for methods that clip groups; with {method.name} it has no record's "
                "path"
            )
        if learns and not 0.01 <= self.temperature <= 1:
            raise ConfigError(
                f"a learned temperature starts between 0.01 and 1, its bounds; got {self.temperature}"
            )

    def _check_public(self) -> None:
        method, number = self.mechanism.rules, self.public.num_public_negatives
        if number and not method.takes_public_keys:
            raise ConfigError(
                f"{method.name} has no place for public keys; "
                f"{', '.join(each.name for each in METHODS.values() if each.takes_public_keys)} have: give "
                f"num_public_negatives = 0; got {number}"
            )
        if number and self.learns_temperature:
            raise ConfigError(
                "public keys are constants, and with learn_temperature half of the temperature's gradient "
                f"would be missing: give one of both; got num_public_negatives = {number}"
            )
        if self.public.subspace_dim:
            self._check_subspace()

    def _check_subspace(self) -> None:
        method, dim = self.mechanism.rules, self.public.subspace_dim
        if not isinstance(self.rule(), GroupRule) or self.mechanism.group_size == BATCH:
            raise ConfigError(
                "a subspace is for methods that clip groups of a fixed size, for public groups of that size "
                f"span it; {method.name} with group_size = {self.mechanism.group_size} does not: give "
                f"subspace_dim = 0; got {dim}"
            )
        if self.per_tower_clipping:
            raise ConfigError(
                "coordinates on a subspace belong to no tower: give subspace_dim or per_tower_clipping, not "
                f"both; got subspace_dim = {dim}"
            )

    def _check_schedule(self) -> None:
        warmup, num_steps = self.optimizer.warmup_steps, self.mechanism.num_steps
        require(
            not warmup or not num_steps or warmup < num_steps,
            "warmup_steps must be below num_steps, for the learning rate to be reached; got "
            f"{warmup} of {num_steps}",
        )
        if self.optimizer.in_units_of_noise and num_steps and not self.mechanism.is_private:
            raise ConfigError(
                f"{NOISE_SGD} divides by the standard deviation of the noise, and this training has none "
                f"(method {self.mechanism.method}, noise_multiplier = 0): give sgd or another optimizer"
            )

    def loss_settings(self, public_keys: Tensor | None = None) -> LossSettings:
        """Return what losses and rules need besides the mechanism's numbers, with a step's public keys."""
        return LossSettings(
            temperature=1.0 if self.learns_temperature else self.temperature,
            pairs=self.trains_pairs,
            parts=TOWERS if self.per_tower_clipping else None,
            isolated=self.isolates_groups,
            public_keys=public_keys,
        )

    def rule(self, groups_at_once: int | None = None) -> GradientRule:
        """Return how one step's clipped sum is made, in passes of so many groups."""
        settings = dataclasses.replace(self.loss_settings(), groups_at_once=groups_at_once)
        return over_view_draws(self.mechanism.rule(settings), self.num_view_draws)

    @property
    def isolates_groups(self) -> bool:
        """Whether the network sees one group at a time and keeps nothing: nobody vouches for it."""
        return self.network.is_foreign and not self.network.mixes_no_records

    @property
    def starts_at_random(self) -> bool:
        """Whether the first weights are a random draw alone, and not public weights that something made."""
        published = isinstance(self.encoder, ClipNetworkConfig) and self.encoder.pretrained != "random"
        return self.warm_start is None and not published

    @property
    def encoder(self) -> EncoderConfig:
        """The encoder of images: the network itself, or what a classifier stands on."""
        return self.network.encoder if isinstance(self.network, ClassifierConfig) else self.network

    def group_loss(self, public_keys: Tensor | None = None) -> GroupLoss | None:
        """Return the loss of a group's embeddings; None where the rule has one of the whole batch."""
        return self.mechanism.loss(self.loss_settings(public_keys))

    @property
    def trains_pairs(self) -> bool:
        """Whether records are pairs of images and texts."""
        return self.network.takes_pairs

    @property
    def task(self) -> str:
        """The name of what is trained, see `trainers.tasks.task`: that which the network is for."""
        return self.network.task

    @property
    def learns_temperature(self) -> bool:
        """Whether the temperature is a weight of the network."""
        return self.network.learn_temperature

    @property
    def average_decay(self) -> float:
        """Decay of the average of the iterates that is kept; 0 where none is."""
        return self.optimizer.ema_decay or (TARGET_DECAY if self.mechanism.rules.needs_target else 0.0)

    @property
    def warm_start_sha256(self) -> str | None:
        """What identifies the weights that the training starts from, wherever they lie."""
        return self.warm_start.sha256 if self.warm_start is not None else None

    @property
    def guarantee_label(self) -> str:
        """`proven` or `none`; a seeded run is never private."""
        return "none" if self.seeded_non_private else self.mechanism.guarantee_label

    def randomness(self, *, data_are_private: bool) -> DrawSource:
        """Return where sampling, permutations and noise come from.

        Raises:
          ConfigError: private data without the cryptographic stream, or a seeded run with it.
        """
        return choose_randomness(
            secure_noise=self.secure_noise,
            data_are_private=data_are_private,
            public_seed=self.public_seed if self.seeded_non_private else None,
        )

    def epsilon(self, num_steps: int | None = None, *, num_restarts: int = 0, num_scorings: int = 1) -> float:
        """Return ε of all that one training releases: model, noised scores and noised SNR.

        Of R steps for restarts that are charged in advance each may be a first one again.

        Args:
          num_steps: charged steps; all planned ones, T + R, unless given.
          num_restarts: each may have repeated the first step, whose SNR is then charged once more.
          num_scorings: times that the noised scores may have been drawn.
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
        """The public divisor of noised counts: the held-out records to expect beside those trained on."""
        share = self.evaluation.score_on_held_out
        return max(1, round(self.mechanism.num_records_public * share / (1 - share)))

    def as_params(self) -> dict[str, Any]:
        """Return every setting flat, by the names of the dataclass fields, for MLflow."""
        parts: list[tuple[str, Any]] = [
            ("", self),
            ("", self.mechanism),
            ("", self.views),
            ("network_", self.encoder),
            ("network_", self.network),
            ("optimizer_", self.optimizer),
            ("", self.public),
            ("", self.evaluation),
            ("", self.performance),
        ]
        if self.text_views is not None:
            parts.append(("", self.text_views))
        params = {
            prefix + item.name if item.name == "name" else item.name: getattr(part, item.name)
            for prefix, part in parts
            for item in dataclasses.fields(part)
            if not dataclasses.is_dataclass(getattr(part, item.name))
        }
        return params | {
            "guarantee_label": self.guarantee_label,
            "warm_start": self.warm_start_sha256,
            "warm_start_origin": self.warm_start.origin if self.warm_start is not None else None,
        }


def _isolates(rule: GradientRule) -> bool:
    return isinstance(rule, GroupRule) and rule.clipper.isolated
