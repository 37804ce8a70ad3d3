"""Every knob of a training in one flat, typed place, and how it becomes a `TrainingConfig`.

The command line starts from a named setting (`trainers.config.presets`) and replaces what the user gives. All
settings are public choices.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.numbers import check_delta, default_delta
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.methods.baselines.capped import default_cap
from dpgcl_core.release import noised_counts
from dpgcl_core.sampling.groups import BATCH, GroupSize, expected_dropped_share
from trainers.config.training import (
    ClipNetworkConfig,
    EvaluationConfig,
    NetworkConfig,
    OptimizerConfig,
    PerformanceConfig,
    TextViewConfig,
    TrainingConfig,
    ViewConfig,
)
from trainers.data.dataset import Modality
from trainers.training.warm_start import read_warm_start

DEFAULT_EPSILON = 10.0
SMALLEST_EPSILON = 0.001


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training's knobs."""

    method: str = "dp_gcl"
    """Method; `python -m dpgcl_core.methods` lists them with what each guarantees."""
    batch_cap: int | None = None
    """Public cap on the records of a step, for methods that need one; out of reach unless given."""
    epsilon: float | None = None
    """Target ε by PLD for adding or removing one record; 10 unless a noise multiplier is given."""
    noise_multiplier: float | None = None
    """σ = noise std / sensitivity, in place of a target ε."""
    delta: float | None = None
    """Target δ; 1/(n ln n) unless given."""
    num_records_public: int | None = None
    """Declared public number of records n; the data set's own size (then public) unless given."""
    expected_batch_size: float = 512
    """Expected records per step, q·n."""
    sampling_prob: float | None = None
    """q, in place of an expected batch size."""
    num_steps: int = 100
    """T, training steps."""
    group_size: GroupSize = 8
    """S, records per group; "batch" makes the whole realised batch one group."""
    num_augmentations: int = 1
    """N_a, extra augmented copies of every key."""
    num_view_draws: int = 1
    """K, draws of all of a record's views whose gradients are averaged before clipping, at no ε."""
    l2_clip_norm: float = 1.0
    """C, bound on one group's gradient norm."""
    clipping: str = "flat"
    """How gradients get norms below C: flat, or automatic (each times C/(norm + 0.01))."""
    temperature: float = 0.2
    """τ of the contrastive loss."""
    network: str = "small_cnn"
    """tiny_cnn, small_cnn, resnet18, or package.module:factory for your own; of pairs a CLIP model:
    clip-tiny, open_clip's name (ViT-B-32), or a file with open_clip's configuration."""
    embedding_dim: int = 64
    """Width of the unit embeddings that the loss sees."""
    warm_start: Path | None = None
    """Start from public weights: an exported model's folder, or a file with a state dict of the network."""
    pretrained: str = "random"
    """CLIP: random, or open_clip's name of published weights, such as laion2b_s34b_b79k."""
    lora_rank: int = 16
    """CLIP: rank of the adapters; 0 trains every weight."""
    lora_alpha: float = 16.0
    """CLIP: the adapters' scale times their rank."""
    lora_targets: tuple[str, ...] = ("q", "v")
    """CLIP: layers with adapters: q, k, v, out, mlp, or a layer's own name."""
    lora_towers: tuple[str, ...] = ("image", "text")
    """CLIP: towers with adapters."""
    learn_temperature: bool = False
    """CLIP: train the temperature, too, inside the group norm."""
    per_tower_clipping: bool = False
    """CLIP: clip each tower's part of a group's gradient to C/√2, at the same sensitivity."""
    gradient_checkpointing: bool = False
    """CLIP: recompute activations; groups are then taken one at a time, in less memory."""
    precision: str = "float32"
    """Of the network: float32, bfloat16 or float16; norms, clipping and noise are never less than float32."""
    loss_scale: float = 1024.0
    """Public constant of float16 gradients, a power of two; never adapted, for that would leak."""
    optimizer: str = "adam"
    """adam, adamw, sgd or lars."""
    learning_rate: float = 2e-3
    """Learning rate, the same for every trial unless a sweep varies it."""
    weight_decay: float = 0.0
    """Weight decay."""
    momentum: float = 0.9
    """Momentum of SGD and LARS."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises to its value."""
    learning_rate_decay: str = "none"
    """How the learning rate falls afterwards: none, cosine or linear, towards 0 at the last step."""
    ema_decay: float = 0.0
    """Decay of a moving average of the weights that is scored and returned, at no ε; 0 = the last ones."""
    min_crop_area: float = 0.3
    """Smallest share of the image's area that a random crop keeps."""
    max_crop_area: float = 1.0
    """Largest share of the image's area that a random crop keeps."""
    flip_prob: float = 0.5
    """Probability of a horizontal flip."""
    brightness: float = 0.4
    """Brightness jitter; 0 = off."""
    contrast: float = 0.4
    """Contrast jitter; 0 = off."""
    saturation: float = 0.0
    """Saturation jitter, colour images; 0 = off."""
    hue: float = 0.0
    """Hue jitter in turns, colour images; 0 = off."""
    blur_prob: float = 0.0
    """Probability of a Gaussian blur."""
    min_blur_sigma: float = 0.1
    """Smallest blur, in pixels."""
    max_blur_sigma: float = 1.5
    """Largest blur, in pixels."""
    sentence_swap_prob: float = 0.5
    """Probability that two sentences of a caption change places."""
    word_swap_prob: float = 0.0
    """Probability, per pair of adjacent words, that they change places."""
    word_delete_prob: float = 0.0
    """Probability, per word that carries little meaning, that it is dropped."""
    max_index_records: int = 10_000
    """Records in the k-NN index and the probe's training set."""
    max_query_records: int = 10_000
    """Test records that are scored."""
    num_neighbors: int = 3
    """k of k-NN."""
    also_untrained: bool = True
    """Score the network before training, too."""
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
    num_workers: int = 1
    """Data-parallel workers of one training."""
    threads_per_worker: int = 1
    """CPU threads of one worker."""
    max_views_per_microbatch: int | None = None
    """Images passed through the network at once; what is fast and fits into memory unless given."""
    prefetch: bool = False
    """Make the next images' views in a thread; helps where a core has nothing else to do."""
    checkpoint_every_steps: int = 10
    """Steps between checkpoints: the most that a stop makes repeat, and charge again."""
    device: str = "auto"
    """cpu, cuda, or auto: in a sweep, cuda where --gpus-per-worker sets one aside."""
    worker_processes: bool = False
    """Start a Ray Train worker group even for one worker: some ten seconds more per training."""
    seeded_non_private: bool = False
    """Reproducible sampling and noise from the seed. Such runs have NO guarantee and are labelled so."""
    secure_noise: bool | None = None
    """Draw sampling, permutations and noise from a cryptographic stream; private data always do."""

    def training_config(
        self,
        *,
        num_records: int,
        public_seed: int,
        modality: Modality = "image",
        calibration_folder: Path | None = None,
    ) -> TrainingConfig:
        """Returns the configuration of one training, its noise calibrated.

        Args:
          num_records: records trained on and held out; used, and then public, only if
            `num_records_public` is not given.
          public_seed: governs initialisation, views and evaluation subsets.
          modality: of the records: "image" or "image-text".
          calibration_folder: where calibrations are kept.

        Raises:
          ConfigError: a knob breaks a rule, or two contradict each other.
        """
        mechanism = self._mechanism(num_records, calibration_folder)
        _check_group_size(mechanism)
        return TrainingConfig(
            mechanism=mechanism,
            temperature=self.temperature,
            num_augmentations=self.num_augmentations,
            num_view_draws=self.num_view_draws,
            views=self._part(ViewConfig),
            network=self._network(mechanism, modality),
            optimizer=self._part(OptimizerConfig, name=self.optimizer),
            evaluation=self._part(EvaluationConfig),
            performance=self._part(PerformanceConfig),
            public_seed=public_seed,
            seeded_non_private=self.seeded_non_private,
            secure_noise=self.secure_noise,
            warm_start=None if self.warm_start is None else read_warm_start(self.warm_start),
            text_views=self._part(TextViewConfig) if modality == "image-text" else None,
            per_tower_clipping=self.per_tower_clipping,
        )

    def _network(self, mechanism: Mechanism, modality: Modality) -> NetworkConfig | ClipNetworkConfig:
        if modality == "image-text":
            network: ClipNetworkConfig = self._part(ClipNetworkConfig, name=self.network)
            return network
        default = Setting()
        for name in ("pretrained", "learn_temperature", "gradient_checkpointing"):
            if getattr(self, name) != getattr(default, name):
                raise ConfigError(f"{name} is for CLIP models, which pairs of images and texts train")
        return NetworkConfig(
            name=self.network,
            embedding_dim=self.embedding_dim,
            precision=self.precision,
            loss_scale=self.loss_scale,
            predictor=mechanism.rules.needs_target,
        )

    def target_epsilon(self) -> float | None:
        """Returns the ε to calibrate for: inf for methods without noise, None when σ is given instead."""
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
        """Returns inf, the ε of methods that add no noise, and refuses to be told otherwise."""
        if self.epsilon is not None and self.epsilon != math.inf:
            raise ConfigError(
                f"{self.method} adds no noise: leave epsilon out, or give inf; got {self.epsilon:g}"
            )
        if self.noise_multiplier is not None:
            raise ConfigError(
                f"{self.method} adds no noise: leave noise_multiplier out; got {self.noise_multiplier:g}"
            )
        return math.inf

    def _mechanism(self, num_records: int, calibration_folder: Path | None) -> Mechanism:
        target = self.target_epsilon()
        n = num_records if self.num_records_public is None else self.num_records_public
        evaluation = self._part(EvaluationConfig)
        trained, _ = noised_counts.split_public(n, evaluation.score_on_held_out)
        noise = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        if not noise > 0:
            raise ConfigError(
                f"noise_multiplier must be positive; got {noise} (for a non-private trial: epsilon = inf)"
            )
        method, sampling_prob = method_named(self.method), self._sampling_prob(trained)
        without_privacy = method.label == "none"
        cap = self.batch_cap
        if cap is None and method.needs_cap:
            cap = default_cap(sampling_prob * trained)
        mechanism = Mechanism(
            method=self.method,
            batch_cap=cap,
            temperature=self.temperature,
            num_records_public=trained,
            sampling_prob=sampling_prob,
            group_size=self.group_size if method.takes_group_size else BATCH,
            l2_clip_norm=math.inf if without_privacy else self.l2_clip_norm,
            clipping=self.clipping,
            noise_multiplier=0.0 if without_privacy else noise,
            num_steps=self.num_steps if method.trains else 0,
            target_delta=default_delta(n) if self.delta is None else self.delta,
        )
        check_delta(mechanism.target_delta, n)  # those held out are scored: the promise is to them, too
        if target is None or without_privacy:
            return mechanism
        return noised_counts.calibrated(
            mechanism,
            target,
            score_noise_multiplier=evaluation.score_noise_multiplier,
            num_scores=evaluation.num_noised_scores,
            snr_noise_multiplier=evaluation.snr_noise_multiplier,
            cache_folder=calibration_folder,
        )

    def _sampling_prob(self, num_records_public: int) -> float:
        if self.sampling_prob is not None:
            return self.sampling_prob
        if not 0 < self.expected_batch_size <= num_records_public:
            raise ConfigError(
                "expected_batch_size must be in (0, num_records_public], for sampling_prob to be in (0, 1]; "
                f"got {self.expected_batch_size:g} records a step, but num_records_public = "
                f"{num_records_public}: give --expected-batch-size, at most that"
            )
        return self.expected_batch_size / num_records_public

    def _part(self, kind: type, **given: Any) -> Any:
        names = [f.name for f in dataclasses.fields(kind) if f.name not in given]
        return kind(**{name: getattr(self, name) for name in names}, **given)


def _check_group_size(mechanism: Mechanism) -> None:
    size = mechanism.group_size
    if size == BATCH:
        return
    if size < mechanism.rules.min_group_size:
        raise ConfigError(
            f"group_size must be at least 2, for a record needs another to differ from; got {size}"
        )
    if size > mechanism.expected_batch_size / 4:
        share = expected_dropped_share(mechanism.num_records_public, mechanism.sampling_prob, size)
        raise ConfigError(
            f"group_size must be at most a quarter of the expected batch size, "
            f"{mechanism.expected_batch_size:g}; got {size}, whose incomplete groups would drop "
            f'{share:.0%} of the sampled records (for one group of everything use "batch")'
        )
