"""Trainings on pairs of images and texts: views, sums of every method, checkpoints, refusals."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpgcl_core.clipping.types import GroupReport, num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.image_text import MAX_LOGIT_SCALE, image_text_group_loss
from dpgcl_core.mechanism.registry import METHODS
from dpgcl_core.workers import SingleWorker
from tests import oracles
from tests.trainers.conftest import make_config, make_data
from trainers.config.training import ClipNetworkConfig, TextViewConfig, TrainingConfig
from trainers.data.dataset import TrainingData
from trainers.data.pairs import ImageTextRecords
from trainers.data.shapes import make_shape_pairs
from trainers.files.checkpoint import CheckpointFolder
from trainers.tasks import IMAGES, PAIRS
from trainers.training.callbacks import Checkpointing
from trainers.training.loop import train
from trainers.training.microbatch import activation_bytes
from trainers.training.step import prepare
from trainers.training.warm_start import starting_encoder

pytestmark = pytest.mark.ci

LORA = ClipNetworkConfig(lora_rank=2, lora_alpha=4)
WHOLE = ClipNetworkConfig(lora_rank=0)
OF_PAIRS = ("dp_gcl", "dp_clip", "siglip_groups", "dp_sgd", "non_private")


def pairs(count: int = 24, **options: Any) -> ImageTextRecords:
    return make_shape_pairs(count, seed=0, captions_per_image=2, **options)


def config_of(**changes: Any) -> TrainingConfig:
    usual = {"num_records_public": 24, "network": LORA, "num_augmentations": 1, "num_steps": 3}
    return make_config(**(usual | {"text_views": TextViewConfig(word_swap_prob=0.3)} | changes))


def data_of(records: ImageTextRecords, queries: ImageTextRecords | None = None) -> TrainingData:
    return TrainingData(
        train=records, index=None, queries=queries, train_is_public=True, evaluation_is_public=True
    )


# --- views ---


def test_views_of_a_pair_are_the_same_whoever_is_sampled_with_it() -> None:
    config, records = config_of(), pairs()
    encoder = starting_encoder(config, (3, 32, 32))
    of = partial(PAIRS.inputs, config, encoder, step=3, num_augmentations=1)
    together = of(records, np.array([[0, 5], [7, 9]]))
    smaller = records.take(np.array([3, 7, 9]))
    alone = of(smaller, np.array([[2, 1]]))
    assert together.shape == (2, 2, 2 * (1 + 1), encoder.view_size)
    assert torch.equal(together[1], alone[0].flip(0))


def test_pairs_do_not_depend_on_the_number_of_copies() -> None:
    config, records = config_of(), pairs()
    encoder = starting_encoder(config, (3, 32, 32))
    some = [
        PAIRS.inputs(config, encoder, records, np.array([[0, 5]]), step=0, num_augmentations=copies)
        for copies in (0, 2)
    ]
    assert torch.equal(some[0], some[1][:, :, :2])


def test_views_hold_the_images_and_captions_of_their_records() -> None:
    config = config_of(text_views=TextViewConfig(sentence_swap_prob=0.0), num_augmentations=0)
    encoder, records = starting_encoder(config, (3, 32, 32)), pairs()
    rows = np.array([[4, 2]])
    _, captions = records.pairs_at(rows[0], seed=config.public_seed, step=1)
    views = PAIRS.inputs(config, encoder, records, rows, step=1, num_augmentations=0)
    seen: list[Tensor] = []
    encoder.register_forward_pre_hook(lambda _, given: seen.extend(given))
    encoder.embed_views(views)
    assert torch.equal(seen[1].flatten(0, 2), encoder.tokenizer(captions).tokens)


# --- sums ---


def clipped_sum(config: TrainingConfig, views: Tensor) -> tuple[Tensor, GroupReport]:
    encoder = _moved(config)
    total = torch.zeros(num_trainable(encoder))
    rule = config.rule()
    objective = PAIRS.objective(config, encoder, config.network)
    report = rule.add_clipped_sum(total, encoder, objective, views)
    return total, report


def _moved(config: TrainingConfig) -> Any:
    encoder = starting_encoder(config, (3, 32, 32))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trainable_parameters(encoder):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return encoder


def _views(config: TrainingConfig, groups: list[list[int]]) -> Tensor:
    return PAIRS.inputs(
        config,
        starting_encoder(config, (3, 32, 32)),
        pairs(),
        np.array(groups),
        step=0,
        num_augmentations=config.num_augmentations,
    )


@pytest.mark.parametrize("network", [LORA, WHOLE, dataclasses.replace(WHOLE, learn_temperature=True)])
def test_clipped_sum_of_groups_of_pairs_equals_the_slow_one(network: ClipNetworkConfig) -> None:
    config = config_of(network=network, l2_clip_norm=0.5)
    views = _views(config, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])
    total, report = clipped_sum(config, views)
    encoder = _moved(config)

    def losses(some: Tensor) -> Tensor:
        """Image and text views picked by hand."""
        z = encoder.embed_views(some)
        tau = (-encoder.clip.logit_scale).exp() if network.learn_temperature else config.temperature
        x, y = z[0, :, 0], z[0, :, 1]
        towards = oracles.group_info_nce(x, y, z[0, :, 3:], tau)
        back = oracles.group_info_nce(y, x, z[0, :, 2:3], tau)
        return (towards + back).reshape(1)

    expected = oracles.clipped_sum(encoder, losses, views, 0.5 * (1 - 1e-4))
    assert float((total.double() - expected).norm() / expected.norm()) < 1e-4
    assert "one group at a time" not in " ".join(report.paths.values())


def test_one_record_path_of_pairs_is_the_gradient_through_its_own_towers() -> None:
    """Unclipped, the paths of all records sum to the gradient of the loss of the whole batch."""
    config = config_of(method="dp_sgd", batch_cap=32, l2_clip_norm=1e6)
    views = _views(config, [[0, 1, 2, 3, 4, 5]])
    total, _ = clipped_sum(config, views)
    encoder = _moved(config)
    loss = image_text_group_loss(encoder.embed_views(views), temperature=config.temperature).sum()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trainable_parameters(encoder))])
    assert float((total - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize(("method", "clipping"), [("dp_gcl", "by tower"), ("siglip_groups", "whole")])
def test_one_exchanged_record_moves_the_sum_by_at_most_the_sensitivity(method: str, clipping: str) -> None:
    network = dataclasses.replace(WHOLE, learn_temperature=True)
    config = config_of(
        method=method,
        network=network,
        per_tower_clipping=clipping == "by tower",
        l2_clip_norm=0.1,
        sampling="records",
    )
    one = _views(config, [[0, 1, 2, 3], [4, 5, 6, 7]])
    other = one.clone()
    other[0, 1] = -other[0, 1]
    moved = float((clipped_sum(config, one)[0] - clipped_sum(config, other)[0]).norm())
    assert 0 < moved <= config.mechanism.sensitivity * (1 + 1e-5)


@pytest.mark.parametrize(("method", "clipping"), [("dp_gcl", "by tower"), ("siglip_groups", "whole")])
def test_one_more_record_switches_one_group_of_pairs_on(method: str, clipping: str) -> None:
    network = dataclasses.replace(WHOLE, learn_temperature=True)
    config = config_of(
        method=method, network=network, per_tower_clipping=clipping == "by tower", l2_clip_norm=0.1
    )
    with_it = _views(config, [[0, 1, 2, 3], [4, 5, 6, 7]])
    moved = float((clipped_sum(config, with_it)[0] - clipped_sum(config, with_it[:1])[0]).norm())
    assert 0 < moved <= config.mechanism.sensitivity * (1 + 1e-5)
    assert config.mechanism.sensitivity == 0.1


@pytest.mark.parametrize("per_tower", [False, True])
def test_per_tower_clipping_gives_each_tower_its_share(per_tower: bool) -> None:
    config = config_of(network=WHOLE, per_tower_clipping=per_tower, l2_clip_norm=0.1)
    total, _ = clipped_sum(config, _views(config, [[0, 1, 2, 3]]))
    assert float(total.norm()) <= 0.1 * (1 + 1e-5)  # of both towers together
    encoder = _moved(config)
    of_image = [
        torch.full((p.numel(),), "visual" in name)
        for name, p in encoder.named_parameters()
        if p.requires_grad
    ]
    share = total[torch.cat(of_image)].norm() / total.norm()
    if per_tower:
        assert float(share) == pytest.approx(math.sqrt(0.5), rel=1e-3)
    else:
        assert abs(float(share) - math.sqrt(0.5)) > 0.01


# --- trainings ---


@pytest.mark.ci
@pytest.mark.parametrize("method", OF_PAIRS)
def test_every_method_for_pairs_trains(method: str) -> None:
    changes: dict[str, Any] = {"method": method}
    if not METHODS[method].takes_group_size:
        changes["group_size"] = "batch"
    if METHODS[method].needs_cap:
        changes["batch_cap"] = 60
    if METHODS[method].label == "none":
        changes |= {"noise_multiplier": 0.0, "l2_clip_norm": math.inf}
    queries = pairs(12, first=60_000)
    result = train(config_of(**changes), data_of(pairs(), queries))
    assert 0 <= result.metrics["image_to_text_recall_at_5"] <= 1
    assert 0 <= result.metrics["text_to_image_recall_at_5"] <= 1


def test_methods_for_pairs_are_those_that_say_so() -> None:
    found = {name for name, method in METHODS.items() if method.takes_pairs}
    assert found == {*OF_PAIRS, "dp_cap", "dp_mae", "base"}


def test_learned_temperature_moves_and_stays_within_its_public_bounds() -> None:
    network = dataclasses.replace(LORA, learn_temperature=True)
    config = config_of(network=network, noise_multiplier=200.0)  # noise alone would carry it far
    result = train(config, data_of(pairs()))
    scale = float(result.encoder.clip.logit_scale.detach())  # type: ignore[union-attr]
    assert 0 <= scale <= MAX_LOGIT_SCALE
    assert scale != pytest.approx(-math.log(config.temperature), abs=1e-6)


@pytest.mark.ci
def test_resumed_training_of_pairs_is_the_uninterrupted_one(tmp_path: Path) -> None:
    config = config_of(seeded_non_private=True)
    whole = train(config, data_of(pairs())).encoder.state_dict()
    folder = CheckpointFolder(tmp_path, every_steps=1)
    run = prepare(config, data_of(pairs()), SingleWorker())
    checkpointing = Checkpointing(run, folder)
    checkpointing.on_begin()
    for _ in range(2):
        run.take_step()
    checkpointing.save()
    again = train(config, data_of(pairs()), checkpoints=folder).encoder.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


def test_activations_of_a_pair_count_both_towers() -> None:
    encoder = starting_encoder(config_of(), (3, 32, 32))
    blocks = [0, 0]
    for place, tower in enumerate((encoder.clip.visual.transformer, encoder.clip.transformer)):  # type: ignore[union-attr]
        tower.register_forward_hook(lambda *given, at=place: blocks.__setitem__(at, given[-1].numel()))
    found = activation_bytes(PAIRS, encoder, (3, 32, 32))
    assert all(blocks)
    assert found > 4 * sum(blocks) / 2


def test_network_of_the_other_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a CLIP model; got images without captions"):
        PAIRS.check(config_of(), make_data().train)
    with pytest.raises(ConfigError, match="is an image encoder; got pairs"):
        IMAGES.check(make_config(), pairs())


def test_grey_images_of_the_models_size_are_read() -> None:
    records = pairs()
    grey = dataclasses.replace(records, images=np.asarray(records.images)[:, :1])
    train(config_of(num_steps=1), data_of(grey))
