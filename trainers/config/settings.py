"""The options of a training as one typed tree; `trainers.training.resolve` makes a `TrainingConfig` of it.

All values are public choices. The command line of a sweep starts from a named setting
(`trainers.config.presets`) and replaces the options that the user gives.
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
    """Target ε by PLD for one record; by default 10, unless a noise multiplier is given."""
    noise_multiplier: float | None = None
    """σ = noise std / sensitivity, in place of a target ε."""
    delta: float | None = None
    """Target δ; 1/(n ln n) by default."""
    num_records_public: int | None = None
    """Declared public number of records N, the most that the data may hold; by default the ledger's, or the
    data set's own number (which is then public)."""
    sampling: str | None = None
    """What a step samples: groups (sensitivity C) or records (2C, as published); by default groups if the
    method allows it."""
    expected_batch_size: float = 512
    """Expected records per step, q·n."""
    sampling_prob: float | None = None
    """q, in place of an expected batch size."""
    num_steps: int = 100
    """T, training steps."""
    tan_factor: float = 1.0
    """k of TAN: once σ is found for B, train at B/k and σ/k, in 1/k of the time and at a larger ε."""
    restart_steps: int | None = None
    """R, steps that restarts may repeat, charged in ε in advance; by default one checkpoint interval for
    private data without a ledger, otherwise 0."""
    group_size: GroupSize = 8
    """S, records per group; "batch" makes the whole realised batch one group."""
    l2_clip_norm: float = 1.0
    """C, bound on one group's gradient norm."""
    clipping: str = "flat"
    """How gradients get norms below C: flat, or automatic (each gradient times C/(norm + 0.01))."""
    batch_cap: int | None = None
    """Public cap on the records of a step, for methods that need a cap; by default out of reach."""

    def target_epsilon(self) -> float | None:
        """Return the ε to calibrate for: inf for methods without noise, None if σ is given instead.

        Raises:
          ConfigError: ε and σ contradict each other or the method.
        """
        if method_named(self.method).label == "none":
            return self._no_noise()
        if self.noise_multiplier is not None:
            if self.epsilon is not None:
                raise ConfigError(
                    "give a target epsilon or a noise_multiplier, not both; "
                    f"got epsilon = {self.epsilon} and noise_multiplier = {self.noise_multiplier}"
                )
            return None
        epsilon = DEFAULT_EPSILON if self.epsilon is None else self.epsilon
        if not epsilon > 0:
            raise ConfigError(f"epsilon must be positive; got {epsilon}")
        if epsilon < SMALLEST_EPSILON:
            raise ConfigError(
                f"epsilon must be at least {SMALLEST_EPSILON:g}, for the accountant resolves no less; got "
                f"{epsilon:g}"
            )
        return epsilon

    def _no_noise(self) -> float:
        """Return inf, the ε of methods that add no noise, and refuse any other ε and any σ."""
        if self.epsilon is not None and self.epsilon != math.inf:
            raise ConfigError(
                f"{self.method} adds no noise: leave epsilon out, or give inf; got {self.epsilon:g}"
            )
        if self.noise_multiplier is not None:
            raise ConfigError(
                f"{self.method} adds no noise: leave noise_multiplier out; got {self.noise_multiplier:g}"
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
