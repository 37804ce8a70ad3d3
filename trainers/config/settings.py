"""The options of a training as one typed tree; `trainers.training.resolve` makes a `TrainingConfig` from it.

All values are public choices. The command line of a sweep starts from a named setting
(`trainers.config.presets`) and replaces the options that the user sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.sampling.groups import GroupSize
from trainers.config.networks import NetworkOptions, TextViewConfig, ViewConfig
from trainers.config.nodes import (
    EvaluationConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PerformanceConfig,
    RandomnessConfig,
)

DEFAULT_EPSILON = 10.0
SMALLEST_EPSILON = 0.001


@dataclass(frozen=True, kw_only=True)
class MechanismOptions:
    """The private step and its privacy budget."""

    method: str = "dp_gcl"
    """Method; `python -m dpgcl_core.methods` lists the methods with their guarantees."""
    epsilon: float | None = None
    """Target ε for one record, by PLD accounting; by default 10, unless noise_multiplier is set."""
    noise_multiplier: float | None = None
    """σ = noise std / sensitivity, instead of a target ε."""
    delta: float | None = None
    """Target δ; 1/(n ln n) by default."""
    num_records_public: int | None = None
    """Declared public number of records N, which the data may not exceed; by default the ledger's number, or
    the data set's own number (which is then public)."""
    sampling: str | None = None
    """What a step samples: groups (sensitivity C) or records (2C, as published); by default groups if the
    method allows it."""
    expected_batch_size: float = 512
    """Expected number of records per step, q·n."""
    sampling_prob: float | None = None
    """Sampling probability q, instead of an expected batch size."""
    num_steps: int = 100
    """Number of training steps T."""
    tan_factor: float = 1.0
    """k of TAN: calibrate σ for B, then train with B/k and σ/k, in 1/k of the time and at a larger ε."""
    restart_steps: int | None = None
    """Number of steps R that restarts may repeat, charged in ε in advance; by default one checkpoint interval
    for private data without a ledger, otherwise 0."""
    group_size: GroupSize = 8
    """Records per group S; "batch" makes the whole realised batch one group."""
    l2_clip_norm: float = 1.0
    """Bound C on one group's gradient norm."""
    clipping: str = "flat"
    """How gradients are clipped to norm C: flat, or automatic (each gradient times C/(norm + 0.01))."""
    shards: int = 1
    """W: cut the slots into W ranges, one for each of W workers, which gets and samples only its records."""
    batch_cap: int | None = None
    """Public cap on the records per step, for methods that need one; the default is rarely reached."""

    def target_epsilon(self) -> float | None:
        """Return the ε to calibrate for: inf for methods without noise, None if σ is set instead.

        Raises:
          ConfigError: ε and σ contradict each other or the method.
        """
        if method_named(self.method).label == "none":
            return self._epsilon_without_noise()
        if self.noise_multiplier is not None:
            if self.epsilon is not None:
                raise ConfigError(
                    "set either a target epsilon or a noise_multiplier, not both; "
                    f"got epsilon = {self.epsilon} and noise_multiplier = {self.noise_multiplier}"
                )
            return None
        epsilon = DEFAULT_EPSILON if self.epsilon is None else self.epsilon
        if not epsilon > 0:
            raise ConfigError(f"epsilon must be positive; got {epsilon}")
        if epsilon < SMALLEST_EPSILON:
            raise ConfigError(
                f"epsilon must be at least {SMALLEST_EPSILON:g}, the accountant's resolution; got {epsilon:g}"
            )
        return epsilon

    def _epsilon_without_noise(self) -> float:
        """Return inf, the ε of methods that add no noise, and reject any other ε and any σ."""
        if self.epsilon is not None and self.epsilon != math.inf:
            raise ConfigError(
                f"epsilon must be left out or inf: {self.method} adds no noise; got {self.epsilon:g}"
            )
        if self.noise_multiplier is not None:
            raise ConfigError(
                f"leave noise_multiplier out: {self.method} adds no noise; got {self.noise_multiplier:g}"
            )
        return math.inf


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options of one training; `trainers.config.tree.replace_options` replaces options by name."""

    mechanism: MechanismOptions = field(default_factory=MechanismOptions)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    views: ViewConfig = field(default_factory=ViewConfig)
    text_views: TextViewConfig = field(default_factory=TextViewConfig)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    randomness: RandomnessConfig = field(default_factory=RandomnessConfig)
    performance: PerformanceConfig = field(default_factory=PerformanceConfig)
