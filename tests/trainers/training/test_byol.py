"""BYOL in the training loop: what its target is at every step, and what one record can move."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch

from dpgcl_core.clipping.cross_record import refuse_cross_record
from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.private_step import PrivateStep
from dpgcl_core.sampling.stage import DrawnGroups
from dpgcl_core.workers import SingleWorker
from tests.trainers.conftest import add_clipped_sum, make_config, make_data
from trainers.config.training import TARGET_DECAY, NetworkConfig, OptimizerConfig
from trainers.models.encoder import build_encoder
from trainers.tasks import IMAGES
from trainers.training.loop import train
from trainers.training.step import Training, prepare


def _network(precision: str = "float32") -> NetworkConfig:
    return NetworkConfig(name="small_cnn", embedding_dim=8, predictor=True, precision=precision)


def _run(precision: str = "float32", **changes: object) -> Training:
    usual = {"method": "byol_groups", "num_augmentations": 0, "group_size": 1, "seeded_non_private": True}
    config = make_config(**(usual | {"network": _network(precision)} | changes))
    return prepare(config, make_data(), SingleWorker())


def _weights(network: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainable_parameters(network)])


def _sum(run: Training, records: list[int]) -> torch.Tensor:
    total = torch.zeros(num_trainable(run.encoder))
    size = int(run.config.mechanism.group_size)
    groups = DrawnGroups.all_complete(np.array(records).reshape(-1, size))
    add_clipped_sum(run, groups, total, 0)
    return total


def test_predictor_mixes_no_records() -> None:
    refuse_cross_record(build_encoder(_network(), (1, 8, 8), 0), (1, 8, 8))


def test_predictor_leaves_the_rest_of_the_network_at_its_initial_weights() -> None:
    plain = NetworkConfig(name="small_cnn", embedding_dim=8)
    without, with_predictor = (build_encoder(each, (1, 8, 8), 0) for each in (plain, _network()))
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(without(images), with_predictor.without_predictor(images))
    assert not torch.equal(without(images), with_predictor(images))


def test_targets_stand_beside_the_predictions_and_take_no_gradient() -> None:
    run = _run()
    views = torch.rand(2, 1, 2, 1, 8, 8)
    assert run.average is not None
    found = IMAGES.embed(run.encoder, run.config.network, run.average.network)(views)
    predictions, targets = found.chunk(2, dim=-1)
    expected = run.average.network.without_predictor(views.flatten(0, 2)).view_as(targets)
    assert torch.allclose(targets, expected)
    assert torch.allclose(predictions, IMAGES.embed(run.encoder)(views))
    gradients = torch.autograd.grad(found.sum(), trainable_parameters(run.average.network), allow_unused=True)
    assert all(gradient is None for gradient in gradients)


def test_target_is_the_average_of_earlier_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's own iterate enters after its gradient was taken: at the first step it is the initial one."""
    run, used = _run(), []
    initial = _weights(run.encoder)
    original = PrivateStep.add_clipped_sum

    def spy(step, *rest):  # type: ignore[no-untyped-def]
        used.append(_weights(run.average.network))
        return original(step, *rest)

    monkeypatch.setattr(PrivateStep, "add_clipped_sum", spy)
    monkeypatch.setattr(Training, "_norm_without_augmentation", lambda *_: 0.0)
    iterates = []
    for _ in range(2):
        run.take_step()
        iterates.append(_weights(run.encoder))
    assert torch.equal(used[0], initial)
    expected = TARGET_DECAY * initial + (1 - TARGET_DECAY) * iterates[0]
    assert torch.allclose(used[1], expected, atol=1e-7)


def test_record_that_joins_moves_the_sum_by_c_at_most() -> None:
    """Groups of one record, in the loop's own way from records to the clipped sum."""
    run = _run(l2_clip_norm=0.01)
    for _ in range(2):  # so that the target is not the network itself
        run.take_step()
    shift = float((_sum(run, [3, 7, 11, 20]) - _sum(run, [3, 7, 11])).norm())
    assert 0.99 * 0.01 < shift <= run.config.mechanism.sensitivity == 0.01


def test_group_that_is_switched_on_moves_the_sum_by_c_at_most() -> None:
    """A record more fills the slot that its group lacked."""
    run = _run(l2_clip_norm=0.01, group_size=2)
    shift = float((_sum(run, [3, 7, 11, 20]) - _sum(run, [3, 7])).norm())
    assert 0.99 * 0.01 < shift <= run.config.mechanism.sensitivity == 0.01


def test_exchanged_record_moves_the_sum_by_2c_at_most() -> None:
    run = _run(l2_clip_norm=0.01, group_size=2, sampling="records")
    shift = float((_sum(run, [3, 7, 11, 20]) - _sum(run, [3, 7, 11, 40])).norm())
    assert 0 < shift <= run.config.mechanism.sensitivity == 0.02


def test_training_lowers_the_loss_without_noise() -> None:
    config = make_config(
        method="byol_groups",
        num_augmentations=0,
        network=_network(),
        noise_multiplier=0.0,
        l2_clip_norm=math.inf,
        num_steps=20,
        sampling_prob=1.0,
    )
    losses = [loss for _, loss in train(config, make_data()).series["train_loss"]]
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_keeps_the_fast_way(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = _run(precision, group_size=4)
        run.take_step()
    assert "one group at a time" not in caplog.text
    full = _sum(_run(group_size=4), list(range(24)))
    low = _sum(_run(precision, group_size=4), list(range(24)))
    assert 0 < float((low - full).norm() / full.norm()) < 0.3


def test_decay_of_the_average_is_that_of_the_target_where_given() -> None:
    run = _run(optimizer=OptimizerConfig(ema_decay=0.5))
    initial = _weights(run.encoder)
    run.take_step()
    assert run.average is not None
    expected = 0.5 * initial + 0.5 * _weights(run.encoder)
    assert torch.allclose(_weights(run.average.network), expected, atol=1e-7)
    assert run.released_network is run.average.network
