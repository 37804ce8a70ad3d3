"""Settings by name: starting points of a command line, none of them tuned on private data."""

from __future__ import annotations

import dataclasses
import math

from dpgcl_core.errors import ConfigError, unknown_choice
from trainers.config.settings import Setting
from trainers.data.dataset import Modality

# The paper's image-only setting (section 4): ResNet-18 with GroupNorm, τ = 1/√2, C = 1, Adam 1e-3,
# B = 2,048, T = 1,200, N_a = 1, crops of 80 %.
PAPER = Setting(
    expected_batch_size=2048,
    num_steps=1200,
    group_size=16,
    temperature=1 / math.sqrt(2),
    network="resnet18",
    embedding_dim=128,
    learning_rate=1e-3,
    min_crop_area=0.8,
    max_crop_area=0.8,
    brightness=0.0,
    contrast=0.0,
    record_every_steps=50,
    checkpoint_every_steps=25,
)
# Found on public data at S = 8 (Fashion-MNIST, one seed) and S = 4 (digits, two), not on the S axis.
_TINY_NETWORK = Setting(
    network="tiny_cnn",
    embedding_dim=16,
    temperature=0.5,
    learning_rate=1e-2,
    max_index_records=5_000,
    max_query_records=5_000,
)
DIGITS_CPU = dataclasses.replace(
    _TINY_NETWORK,
    expected_batch_size=512,
    num_steps=100,
    learning_rate=5e-3,
    min_crop_area=0.5,
    flip_prob=0.0,
)
FASHION_MNIST_CPU = dataclasses.replace(_TINY_NETWORK, expected_batch_size=1024, num_steps=100)
CPU = Setting()

# From random weights, on generated pairs; every weight trains, for there is nothing to adapt.
PAIRS_CPU = Setting(
    network="clip-tiny",
    lora_rank=0,
    expected_batch_size=1024,
    num_steps=100,
    group_size=16,
    temperature=0.1,
    learning_rate=2e-3,
    min_crop_area=0.8,
    flip_prob=0.0,
    brightness=0.0,
    contrast=0.0,
    max_index_records=5_000,
    max_query_records=2_000,
)
# The paper's image-text setting: ViT-B/32 with LoRA of rank 16 on queries and values, τ = 1/100, C = 0.01,
# Adam 1e-3, crops of 80 %, sentence swap.
PAPER_PAIRS = dataclasses.replace(
    PAPER,
    network="ViT-B-32",
    pretrained="laion2b_s34b_b79k",
    temperature=0.01,
    l2_clip_norm=0.01,
    flip_prob=0.0,
    max_index_records=10_000,
    max_query_records=10_000,
)

SETTINGS: dict[str, Setting] = {
    "cpu": CPU,
    "pairs-cpu": PAIRS_CPU,
    "digits-cpu": DIGITS_CPU,
    "fashion-mnist-cpu": FASHION_MNIST_CPU,
    "paper": PAPER,
    "paper-pairs": PAPER_PAIRS,
}


def named_setting(name: str, *, dataset: str, modality: Modality = "image") -> Setting:
    """Returns a setting by name; `auto` is the CPU-sized one of the data set, `paper` its modality's.

    Raises:
      ConfigError: there is no such setting.
    """
    if name == "auto":
        default = PAIRS_CPU if modality == "image-text" else CPU
        return SETTINGS.get(f"{dataset}-cpu", default)
    if name == "paper" and modality == "image-text":
        return PAPER_PAIRS
    if name not in SETTINGS:
        raise ConfigError(unknown_choice("setting", name, [*SETTINGS, "auto"]))
    return SETTINGS[name]
