"""What scores read of a network: pooled features, or a feature map on a grid, where there is one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError
from tests.sweeps import support
from tests.trainers.clip_models import tiny_encoder
from tests.trainers.conftest import make_config, make_data
from tests.trainers.exporting import SMALL
from trainers.config.training import (
    ClipNetworkConfig,
    EvaluationConfig,
    NetworkConfig,
    TextViewConfig,
    ViewConfig,
)
from trainers.evaluation.features import embed_features, evaluate
from trainers.evaluation.readout import read_out
from trainers.evaluation.scorer import Scoring
from trainers.models.encoder import Encoder, build_encoder
from trainers.tasks import PAIRS
from trainers.training.release import correct_counts

SHAPE = (1, 28, 28)
CNNS = {"tiny_cnn": 32, "small_cnn": 64, "wide_cnn": 128, "resnet18": 512}
GRID = EvaluationConfig(readout="grid4", max_index_records=40, max_query_records=20)


def _encoder(name: str = "tiny_cnn", shape: tuple[int, int, int] = SHAPE) -> Encoder:
    return build_encoder(NetworkConfig(name=name, embedding_dim=8), shape, seed=0)


@pytest.mark.parametrize(("network", "channels"), CNNS.items())
@torch.no_grad()
def test_grid_is_the_feature_map_of_the_network_itself(network: str, channels: int) -> None:
    encoder, images = _encoder(network), torch.randn(3, *SHAPE)
    read = read_out(encoder, images, "grid4")
    assert read.shape == (3, 16 * channels)
    cells = read.unflatten(1, (channels, 4, 4))
    pooled = encoder.features(images)
    side = round((pooled.shape[1] / channels) ** 0.5)
    assert torch.allclose(F.adaptive_avg_pool2d(cells, side).flatten(1), pooled, atol=1e-5)
    assert torch.equal(read_out(encoder, images), pooled)


@torch.no_grad()
def test_grid_keeps_the_places_that_pooling_loses() -> None:
    encoder, image = _encoder(), torch.full((1, *SHAPE), -1.0)
    image[..., 2:6, 2:6] = 1.0
    moved = image.roll(7, dims=3)
    gap = F.cosine_similarity(read_out(encoder, image, "grid4"), read_out(encoder, moved, "grid4"))
    assert gap < F.cosine_similarity(read_out(encoder, image), read_out(encoder, moved)) - 0.01


@pytest.fixture
def readouts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was read, in order."""
    seen: list[str] = []

    def noted(encoder: Encoder, images: Tensor, readout: str = "pooled") -> Tensor:
        seen.append(readout)
        return read_out(encoder, images, readout)

    monkeypatch.setattr("trainers.evaluation.features.read_out", noted)
    return seen


@pytest.mark.parametrize("readout", ["pooled", "grid4"])
def test_scores_read_what_they_are_told_to(readout: str, readouts: list[str]) -> None:
    data, config = make_data(), dataclasses.replace(GRID, readout=readout)
    assert data.queries is not None
    scoring = Scoring(
        index=data.index,
        queries=data.queries,
        config=config,
        view_config=ViewConfig(),
        seed=0,
        device="cpu",
    )
    evaluate(_encoder(shape=data.train.images.shape[1:]), scoring)
    assert readouts == [readout] * 2  # index and queries


def test_noised_scores_read_what_they_are_told_to(readouts: list[str]) -> None:
    data = make_data()
    config = make_config(evaluation=GRID, network=NetworkConfig(name="tiny_cnn", embedding_dim=8))
    encoder = _encoder(shape=data.train.images.shape[1:])
    assert data.queries is not None
    correct_counts(encoder, data.train, data.queries.take(np.arange(3)), config, torch.device("cpu"))
    assert set(readouts) == {"grid4"}


def test_no_images_have_no_features() -> None:
    assert embed_features(_encoder(), np.zeros((0, *SHAPE), dtype=np.uint8)).shape == (0, 128)


def test_unknown_readout_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"unknown readout 'grid'.* Valid: grid4, pooled"):
        EvaluationConfig(readout="grid")


class Flat(nn.Module):
    """A network of one's own without a feature map."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layer(images.flatten(1))
        return found


def flat(image_shape: tuple[int, int, int]) -> Flat:
    return Flat()


def test_plan_refuses_to_read_the_feature_map_of_a_network_that_has_none() -> None:
    with pytest.raises(ConfigError, match=r"got a network without one.*Set the readout to pooled"):
        support.plan(*SMALL, "--network", f"{__name__}:flat", "--readout", "grid4")
    assert support.plan(*SMALL, "--readout", "grid4").params()["readout"] == "grid4"


def test_clip_models_are_refused() -> None:
    network = ClipNetworkConfig(lora_rank=2)
    config = make_config(network=network, text_views=TextViewConfig(), evaluation=GRID)
    with pytest.raises(ConfigError, match=r"got a network without one.*Set the readout to pooled"):
        PAIRS.check_network(config, tiny_encoder(), (3, 32, 32))
