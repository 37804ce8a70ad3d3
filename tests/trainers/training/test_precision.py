"""Mixed precision: whatever the encoder rounds, every group contributes at most C, and the law is kept."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.types import GroupReport, num_trainable
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.losses.objective import EmbeddingObjective
from dpgcl_core.workers import SingleWorker
from tests.trainers.conftest import make_config, make_data
from trainers.config.training import NetworkConfig
from trainers.models import precision as network_precision
from trainers.models.encoder import Encoder, build_encoder
from trainers.tasks.image_task import IMAGES
from trainers.training.loop import train
from trainers.training.step import prepare

LOW = ("bfloat16", "float16")


def network(precision_name: str) -> NetworkConfig:
    return NetworkConfig(name="small_cnn", embedding_dim=8, precision=precision_name)


def make_encoder() -> Encoder:
    return build_encoder(network("float32"), (1, 8, 8), 0)


def make_views(num_groups: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 2 * torch.rand(num_groups, 4, 3, 1, 8, 8, generator=generator) - 1


def make_objective(
    encoder: Encoder, config: NetworkConfig, loss: Callable[..., Tensor] = two_view_group_loss
) -> EmbeddingObjective:
    return EmbeddingObjective(embed=IMAGES.embed(encoder, config), loss=partial(loss, temperature=0.2))


def clipped_sum(
    encoder: Encoder, views: Tensor, config: NetworkConfig, l2_clip_norm: float = 1.0
) -> tuple[Tensor, GroupReport]:
    total = torch.zeros(num_trainable(encoder))
    clipper = GroupClipper(l2_clip_norm=l2_clip_norm, gradient_scale=config.gradient_scale)
    return total, clipper.add_clipped_sum(total, encoder, make_objective(encoder, config), views)


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("l2_clip_norm", [1e-3, 0.01, 1.0, 7.0])
def test_low_precision_group_contributes_at_most_c(name: str, l2_clip_norm: float) -> None:
    encoder = make_encoder()
    for group in torch.split(make_views(), 1):
        pair = torch.cat(
            [group, torch.full_like(group, torch.nan)]
        )  # two groups: the engine may take both at once
        total, report = clipped_sum(encoder, pair, network(name), l2_clip_norm)
        assert float(report.norms[0]) > l2_clip_norm
        assert 0.99 * l2_clip_norm < float(total.double().norm()) <= l2_clip_norm


@pytest.mark.parametrize("name", LOW)
def test_low_precision_group_that_is_not_finite_leaves_the_others_bit_equal(name: str) -> None:
    encoder, views, sums = make_encoder(), make_views(3), []
    for bad in (torch.nan, torch.inf):
        views[1] = bad
        total, report = clipped_sum(encoder, views, network(name))
        assert report.non_finite.tolist() == [False, True, False]
        sums.append(total)
    assert torch.equal(*sums)
    good, _ = clipped_sum(encoder, views[[0, 2]], network(name))
    assert float((sums[0] - good).norm()) < 1e-5 * float(good.norm())


@pytest.mark.parametrize("l2_clip_norm", [0.01, 1.0, 1e6, torch.inf])
def test_gradient_scale_changes_no_bit_of_the_clipped_sum(
    l2_clip_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The scale alone.
    monkeypatch.setattr(network_precision, "_autocast", lambda *_: contextlib.nullcontext())
    encoder, views = make_encoder(), make_views()
    plain, plain_report = clipped_sum(encoder, views, network("float32"), l2_clip_norm)
    scaled, scaled_report = clipped_sum(encoder, views, network("float16"), l2_clip_norm)
    assert torch.equal(scaled, plain)
    assert torch.equal(scaled_report.norms.nan_to_num(), plain_report.norms.nan_to_num())


def test_gradient_scale_reaches_the_encoder() -> None:
    encoder, views, norms = make_encoder(), make_views(1), []
    for scale in (1.0, 4096.0):
        config = NetworkConfig(precision="float16", loss_scale=scale)
        loss = make_objective(encoder, config)(views).sum()
        gradients = torch.autograd.grad(loss, list(encoder.parameters()))
        norms.append(torch.cat([g.flatten() for g in gradients]).norm())
    assert float(norms[1] / norms[0]) == pytest.approx(4096, rel=0.1)


@pytest.mark.parametrize("name", LOW)
def test_low_precision_ends_before_the_loss(name: str) -> None:
    seen: list[torch.dtype] = []

    def spy(embeddings: Tensor, *, temperature: float) -> Tensor:
        seen.append(embeddings.dtype)
        seen.append((embeddings @ embeddings.mT).dtype)  # not under autocast any more
        return two_view_group_loss(embeddings, temperature=temperature)

    encoder = make_encoder()
    inside: list[torch.dtype] = []
    handle = next(m for m in encoder.modules() if isinstance(m, torch.nn.Conv2d)).register_forward_hook(
        lambda module, args, output: inside.append(output.dtype)
    )
    losses = make_objective(encoder, network(name), spy)(make_views(2))
    handle.remove()
    assert {*seen, losses.dtype} == {torch.float32}
    assert inside == [getattr(torch, name)]


@pytest.mark.parametrize("name", LOW)
def test_low_precision_keeps_the_fast_way_of_clipping(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(network=network(name))
    encoder = make_encoder()
    with caplog.at_level(logging.WARNING):
        clipped_sum(encoder, make_views(), config.network)
    assert "one group at a time" not in caplog.text


def test_low_precision_training_keeps_the_fast_way_of_clipping(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = prepare(make_config(network=network("bfloat16")), make_data(), SingleWorker())
        run.take_step()
    assert "one group at a time" not in caplog.text


def test_looking_at_the_engine_changes_no_weight() -> None:
    encoder = make_encoder()
    before = torch.cat([p.detach().flatten().clone() for p in encoder.parameters()])
    clipped_sum(encoder, make_views(), network("bfloat16"))
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in encoder.parameters()]))


@pytest.mark.parametrize("name", LOW)
def test_low_precision_is_near_full_precision(name: str) -> None:
    encoder, views = make_encoder(), make_views()
    full, _ = clipped_sum(encoder, views, network("float32"))
    low, _ = clipped_sum(encoder, views, network(name))
    assert 0 < float((low - full).norm() / full.norm()) < 0.3


@pytest.mark.parametrize("name", LOW)
def test_low_precision_training_keeps_weights_in_float32_and_the_sum_in_float64(name: str) -> None:
    run = prepare(make_config(network=network(name)), make_data(), SingleWorker())
    run.take_step()
    assert {p.dtype for p in run.encoder.parameters()} == {torch.float32}
    assert run.private_step.total.dtype == torch.float64
    assert train(make_config(network=network(name)), make_data()).metrics["num_steps_done"] == 6


@pytest.mark.parametrize("scale", [0.0, 3.0, -2.0, 1000.0, torch.inf, torch.nan])
def test_loss_scale_must_be_a_power_of_two(scale: float) -> None:
    with pytest.raises(ConfigError, match="loss_scale must be a power of two"):
        NetworkConfig(loss_scale=scale)


def test_unknown_precision_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"unknown precision 'bf16'.*bfloat16, float16, float32"):
        NetworkConfig(precision="bf16")


def test_precision_is_part_of_the_params() -> None:
    assert make_config(network=network("bfloat16")).as_params()["precision"] == "bfloat16"
