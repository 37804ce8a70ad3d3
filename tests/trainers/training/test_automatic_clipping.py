"""Automatic clipping through settings and low precision: the law of the library, its constant scaled."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from dpgcl_core.clipping.clipper import GAMMA, GroupClipper
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.losses.objective import EmbeddingObjective
from dpgcl_core.mechanism.method import LossSettings
from trainers.config.presets import DIGITS_CPU
from trainers.config.settings import TrainingOptions
from trainers.config.training import NetworkConfig
from trainers.config.tree import replace_options
from trainers.models.encoder import build_encoder
from trainers.tasks import IMAGES
from trainers.training.resolve import training_config


def _setting(**changes: object) -> TrainingOptions:
    return replace_options(
        TrainingOptions(), **({"noise_multiplier": 1.0, "expected_batch_size": 64} | changes)
    )  # type: ignore[arg-type]


def test_setting_reaches_the_mechanism() -> None:
    config = training_config(_setting(clipping="automatic"), num_records=1000, public_seed=0)
    assert config.mechanism.clipping == "automatic"
    rule = config.mechanism.rule(LossSettings(temperature=1.0))
    assert isinstance(rule, GroupClipper)
    assert rule.gamma == GAMMA
    assert DIGITS_CPU.mechanism.clipping == "flat"


def test_setting_of_an_unknown_law_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown clipping 'psac'.* Valid: automatic, flat"):
        training_config(_setting(clipping="psac"), num_records=1000, public_seed=0)


@pytest.mark.parametrize("gradients_times", [1.0, 1e-4])
def test_automatic_clipping_in_float16_keeps_its_bound_and_its_law(gradients_times: float) -> None:
    """One group at C = 1: a γ left unscaled would lengthen a short gradient by far too much."""
    network = NetworkConfig(name="small_cnn", embedding_dim=8, precision="float16")
    encoder = build_encoder(NetworkConfig(name="small_cnn", embedding_dim=8), (1, 8, 8), 0)
    views = 2 * torch.rand(1, 4, 3, 1, 8, 8, generator=torch.Generator().manual_seed(1)) - 1
    loss = partial(two_view_group_loss, temperature=0.2)
    rule = GroupClipper(l2_clip_norm=1.0, gamma=GAMMA, gradient_scale=network.gradient_scale)
    objective = EmbeddingObjective(
        embed=IMAGES.embed(encoder, network), loss=lambda z: gradients_times * loss(z)
    )
    total = torch.zeros(num_trainable(encoder))
    report = rule.add_clipped_sum(total, encoder, objective, views)
    norm = float(report.norms[0])
    assert math.isclose(float(total.double().norm()), norm / (norm + GAMMA), rel_tol=1e-3)
    assert float(total.double().norm()) < 1.0
