"""Named settings: starting points of a command line, none of them tuned on private data."""

from __future__ import annotations

import math
from typing import Literal

from dpgcl_core.errors import require_choice
from trainers.config.networks import CaptionerConfig, MaskedNetworkConfig, NetworkOptions, ViewConfig
from trainers.config.nodes import EvaluationConfig, ObjectiveConfig, OptimizerConfig, PerformanceConfig
from trainers.config.settings import MechanismOptions, TrainingOptions
from trainers.config.tree import replace_options

# The paper's image-only setting (section 4): ResNet-18 with GroupNorm, τ = 1/√2, C = 1, Adam 1e-3,
# B = 2,048, T = 1,200, N_a = 1, crops of 80 %.
PAPER = TrainingOptions(
    mechanism=MechanismOptions(expected_batch_size=2048, num_steps=1200, group_size=16),
    objective=ObjectiveConfig(temperature=1 / math.sqrt(2)),
    views=ViewConfig(min_crop_area=0.8, max_crop_area=0.8, brightness=0.0, contrast=0.0),
    network=NetworkOptions(name="resnet18", embedding_dim=128),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    evaluation=EvaluationConfig(record_every_steps=50),
    performance=PerformanceConfig(checkpoint_every_steps=25),
)
# Tuned on public data at one group size S each: 8 for Fashion-MNIST (one seed), 4 for digits (two seeds).
_TINY_NETWORK = TrainingOptions(
    objective=ObjectiveConfig(temperature=0.5),
    network=NetworkOptions(name="tiny_cnn", embedding_dim=16),
    optimizer=OptimizerConfig(learning_rate=1e-2),
)
DIGITS_CPU = replace_options(_TINY_NETWORK, learning_rate=5e-3, min_crop_area=0.5, flip_prob=0.0)
CPU = TrainingOptions()

# From random weights, on generated pairs; every weight trains, because none is pretrained.
PAIRS_CPU = TrainingOptions(
    mechanism=MechanismOptions(expected_batch_size=1024, group_size=16),
    objective=ObjectiveConfig(temperature=0.1),
    views=ViewConfig(min_crop_area=0.8, flip_prob=0.0, brightness=0.0, contrast=0.0),
    network=NetworkOptions(name="clip-tiny", lora_rank=0),
    evaluation=EvaluationConfig(max_query_records=2_000),  # also the number of candidates of a recall score
)
# For short captions, from public weights trained on half of the words (`benchmarks/common_words.py`).
SHORT_PAIRS_CPU = replace_options(
    PAIRS_CPU,
    num_augmentations=0,
    network="clip-nano",
    pretrained="common-words",
    expected_batch_size=256,
    num_steps=40,
    learning_rate=1e-3,
)
# The paper's image-text setting: ViT-B/32 with LoRA of rank 16 on queries and values, τ = 1/100, C = 0.01,
# Adam 1e-3, crops of 80 %, sentence swap.
PAPER_PAIRS = replace_options(
    PAPER,
    network="ViT-B-32",
    pretrained="laion2b_s34b_b79k",
    temperature=0.01,
    l2_clip_norm=0.01,
    flip_prob=0.0,
)

OWN_NETWORKS = {config.task: config().name for config in (MaskedNetworkConfig, CaptionerConfig)}
"""Default networks by task, for tasks that cannot use the networks of `SETTINGS`. A classifier has no
default, because it can use any encoder."""

SETTINGS: dict[str, TrainingOptions] = {
    "cpu": CPU,
    "pairs-cpu": PAIRS_CPU,
    "short-pairs-cpu": SHORT_PAIRS_CPU,
    "digits-cpu": DIGITS_CPU,
    "fashion-mnist-cpu": replace_options(_TINY_NETWORK, expected_batch_size=1024),
    "paper": PAPER,
    "paper-pairs": PAPER_PAIRS,
}


def named_setting(
    name: str, *, dataset: str, modality: Literal["image", "image-text"] = "image"
) -> TrainingOptions:
    """Return the options of a named setting.

    `auto` is the CPU-sized setting for `dataset`, and `paper` the paper's setting for `modality`. Every other
    name is a key of `SETTINGS`.

    Raises:
      ConfigError: there is no such setting.
    """
    if name == "auto":
        pairs_setting = SHORT_PAIRS_CPU if dataset.endswith(":short") else PAIRS_CPU
        return pairs_setting if modality == "image-text" else SETTINGS.get(f"{dataset}-cpu", CPU)
    if name == "paper" and modality == "image-text":
        return PAPER_PAIRS
    require_choice("setting", name, [*SETTINGS, "auto"])
    return SETTINGS[name]
