"""The settings of a training besides its mechanism and network: the nodes of the options, and their rules.

The settings that decide the result are separate from `PerformanceConfig`, which must not change it. The
docstring under a field is its description on the command line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dpgcl_core.errors import require, require_choice, require_each, require_least, require_positive
from trainers.config.removed_options import check_removed_choice
from trainers.config.tree import option

POOLED, GRID4 = "pooled", "grid4"


def _require_not_negative(node: object, *names: str) -> None:
    require_each(node, names, "not be negative", lambda value: value >= 0)


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The loss of a group, and the parts of its gradient that are clipped separately (stages 4, 6 and 7)."""

    temperature: float = 0.2
    """τ of the contrastive loss."""
    num_augmentations: int = 1
    """N_a, extra augmented copies of every key."""
    per_tower_clipping: bool = False
    """CLIP: clip each tower's part of a group's gradient to C/√2, at the same sensitivity."""

    def __post_init__(self) -> None:
        require_positive(self, "temperature")
        _require_not_negative(self, "num_augmentations")


@dataclass(frozen=True, kw_only=True)
class RandomnessConfig:
    """Sources of sampling, permutations and noise."""

    seeded_non_private: bool = False
    """Reproducible sampling and noise from the seed. Such runs have NO guarantee; their label says so."""
    secure_noise: bool | None = None
    """Draw sampling, permutations and noise from a cryptographic stream; always on for private data."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer (stage 9)."""

    name: str = field(default="adam", metadata=option("optimizer"))
    """adam, adamw or sgd."""
    learning_rate: float = 2e-3
    """Learning rate, the same for every trial unless a sweep varies it."""
    weight_decay: float = 0.0
    """Weight decay; decoupled for AdamW, added to the gradient otherwise."""
    momentum: float = 0.9
    """Momentum of SGD."""
    warmup_steps: int = 0
    """Steps during which the learning rate rises to its value."""
    learning_rate_decay: str = "none"
    """How the learning rate falls afterwards: none, cosine or linear, towards 0 at the last step."""
    ema_decay: float = 0.0
    """Decay of a moving average of the weights, scored and returned at no cost in ε; 0 = last weights."""

    def __post_init__(self) -> None:
        require_positive(self, "learning_rate")
        require_each(
            self, ("weight_decay",), "be finite and not negative", lambda value: 0 <= value < math.inf
        )
        require_each(self, ("momentum", "ema_decay"), "be in [0, 1)", lambda value: 0 <= value < 1)
        _require_not_negative(self, "warmup_steps")
        require_choice("learning_rate_decay", self.learning_rate_decay, ("none", "cosine", "linear"))
        check_removed_choice("optimizer", self.name)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Scores of frozen features, and metrics during the training."""

    max_index_records: int | None = None
    """Number of training records to fit k-NN and the probe on, chosen by a keyed hash of their ids; all by
    default."""
    max_query_records: int | None = None
    """Number of test records to score, chosen in the same way; all by default."""
    num_neighbors: int = 3
    """k of k-NN."""
    readout: str = POOLED
    """Input of k-NN and probe: pooled (the features), or grid4 (a CNN's feature map averaged to 4×4)."""
    also_untrained: bool = True
    """Also score the untrained network: with random weights and, if any, its public initial weights."""
    record_every_steps: int = 10
    """Steps between recorded SNR and loss values (public data only); 0 = first step only."""
    score_every_steps: int = 0
    """Steps between scores during training, where the final scores may be seen; 0 = none."""
    score_on_held_out: float = 0.0
    """Share of the records to hold out and to score with noise against the public --evaluate-on."""
    score_noise_multiplier: float | None = None
    """Standard deviation of the noise on each count of correct held-out records; charged in ε."""
    snr_noise_multiplier: float | None = None
    """Release the first step's SNR with this noise std / sensitivity, charged in ε; off by default."""

    def __post_init__(self) -> None:
        require_least(self, 1, "max_index_records", "max_query_records", "num_neighbors")
        require_choice("readout", self.readout, (POOLED, GRID4))
        _require_not_negative(self, "record_every_steps", "score_every_steps")
        share = self.score_on_held_out
        require(0 <= share < 1, f"score_on_held_out must be a share in [0, 1); got {share}")
        require(
            (share > 0) == (self.score_noise_multiplier is not None),
            "set both score_on_held_out and score_noise_multiplier, or neither; "
            f"got {share} and {self.score_noise_multiplier}",
        )
        for name in ("score_noise_multiplier", "snr_noise_multiplier"):
            if getattr(self, name) is not None:
                from dpgcl_core.release import noised_counts  # imported here, as it loads the accountants

                noised_counts.check_noise_multiplier(name, getattr(self, name))

    @property
    def num_noised_scores(self) -> int:
        """Number of noised scores of one trial: k-NN and linear probe, or none without held-out records."""
        return 2 if self.score_on_held_out else 0


@dataclass(frozen=True, kw_only=True)
class PerformanceConfig:
    """Time and memory; the distribution of the result stays the same."""

    num_workers: int = 1
    """Data-parallel workers of one training."""
    threads_per_worker: int = 1
    """CPU threads of one worker."""
    max_views_per_microbatch: int | None = None
    """Images passed through the network at once; by default a number that is fast and fits into memory."""
    prefetch: bool = False
    """Make the next step's views in a background thread; helps if a core is otherwise idle."""
    checkpoint_every_steps: int = 10
    """Steps between checkpoints; a resumed training repeats at most this many steps."""
    device: str = "auto"
    """cpu, cuda, or auto: in a sweep, cuda if --gpus-per-worker reserves a GPU."""
    worker_processes: bool = False
    """Start a Ray Train worker group even for one worker, which takes about ten seconds more per training."""

    def __post_init__(self) -> None:
        require_least(self, 1, "num_workers", "threads_per_worker", "max_views_per_microbatch")
        require_least(self, 1, "checkpoint_every_steps")
        require_choice("device", self.device, ("auto", "cpu", "cuda"))
