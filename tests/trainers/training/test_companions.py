"""No built-in network lets a group's companions or their number reach what it contributes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.types import no_sum
from dpgcl_core.errors import ConfigError
from dpgcl_core.sampling.stage import DrawnGroups
from dpgcl_core.workers import SingleWorker
from tests.trainers.conftest import add_clipped_sum, inputs_of_rows, make_config
from trainers.config.training import (
    ClipNetworkConfig,
    EvaluationConfig,
    NetworkConfig,
    PerformanceConfig,
    TextViewConfig,
)
from trainers.data.dataset import TrainingData
from trainers.models.encoder import NETWORKS
from trainers.tasks import IMAGES, PAIRS
from trainers.training.foreign_network import foreign_note
from trainers.training.step import prepare

SIZE, AT_ONCE = 2, 3
MARGIN = {"float32": 4e-6, "bfloat16": 2e-2, "float16": 2e-2}
"""Of C: what another place in a pass may move a contribution by, as the clipper's docstring says."""
SHAPES = {"vit_b_32_lora": (3, 224, 224), "resnet18": (3, 16, 16)}
_SLOW = {("vit_b_32_lora", "float32")}
_FAST = {("tiny_cnn", "float32"), ("tiny_cnn", "bfloat16"), ("clip-tiny", "float32")}


def _marks(name: str, precision: str) -> list[pytest.MarkDecorator]:
    """A large network in low precision takes a processor without such products minutes."""
    if (name, precision) in _FAST:
        return []
    is_slow = (name, precision) in _SLOW or (name in SHAPES and precision != "float32")
    return [pytest.mark.long if is_slow else pytest.mark.ci]


CASES = [
    pytest.param(name, precision, marks=_marks(name, precision))
    for name in [*NETWORKS, "clip-tiny"]
    for precision in MARGIN
]


def _prepared(name: str, precision: str):  # type: ignore[no-untyped-def]
    num_records, pairs = 24, name == "clip-tiny"
    shape = (3, 32, 32) if pairs else SHAPES.get(name, (1, 8, 8))
    network = (
        ClipNetworkConfig(lora_rank=2, lora_alpha=4, precision=precision)
        if pairs
        else NetworkConfig(name=name, embedding_dim=8, precision=precision)
    )
    config = make_config(
        network=network,
        text_views=TextViewConfig() if pairs else None,
        num_records_public=num_records,
        sampling_prob=0.9,
        group_size=SIZE,
        l2_clip_norm=0.1,
        evaluation=EvaluationConfig(record_every_steps=0, also_untrained=False),
        performance=PerformanceConfig(max_views_per_microbatch=2 * SIZE * AT_ONCE, device="cpu"),
    )
    records = (PAIRS if pairs else IMAGES).synthetic_records(num_records, shape)
    data = TrainingData(
        train=records, index=None, queries=None, train_is_public=True, evaluation_is_public=True
    )
    return prepare(config, data, SingleWorker())


def _contribution(run, rows: list[int], place: int) -> Tensor:  # type: ignore[no-untyped-def]
    """What the group in a place adds to the clipped sum of groups of these records, in order."""
    groups = np.array(rows).reshape(-1, SIZE)
    drawn = DrawnGroups(rows=groups, complete=np.arange(len(groups)) == place, batch_size=len(rows))
    total = no_sum(run.encoder)
    add_clipped_sum(run, drawn, total, run.config.num_augmentations)
    return total


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_companions_and_counts_change_no_bit_and_places_stay_within_the_margin(
    name: str, precision: str
) -> None:
    run = _prepared(name, precision)
    alone = _contribution(run, [0, 1], 0)
    assert 0 < float(alone.norm()) <= 0.1
    for others in ([5, 9], [8, 11, 13, 14, 15, 16]):
        assert torch.equal(_contribution(run, [0, 1, *others], 0), alone)
    moved = _contribution(run, [8, 9, 3, 2, 0, 1], 2)
    assert float((moved - alone).norm()) <= MARGIN[precision] * 0.1


def test_every_pass_of_a_training_has_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    run, shapes = _prepared("tiny_cnn", "float32"), set()
    original = GroupClipper.add_clipped_sum

    def noted(*given, **named):  # type: ignore[no-untyped-def]
        shapes.add(given[4].shape)
        return original(*given, **named)

    monkeypatch.setattr(GroupClipper, "add_clipped_sum", noted)
    for count in (1, 2, 5, 7, 12):
        _contribution(run, list(range(SIZE * count)), 0)
    assert len(shapes) == 1


def test_groups_that_fill_a_pass_up_are_zeros_and_no_record() -> None:
    """Row 0, which their slots stand for, would decide how the last pass goes."""
    run, seen = _prepared("tiny_cnn", "float32"), []
    _contribution(run, [5, 9], 0)  # with the self-check's passes
    run.encoder.backbone.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    _contribution(run, [5, 9], 0)
    assert seen
    for rows in seen:
        shown = rows.flatten(1).any(1)
        assert shown[0]
        assert not shown[len(shown) // 2 :].any()


class MixesLargeBatches(torch.nn.Module):
    """Normalises over the batch when more than 40 rows come."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 8)

    def forward(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.layer(images.flatten(1))
        return hidden - hidden.mean(0) if len(hidden) > 40 else hidden


def mixes_large_batches(image_shape: tuple[int, int, int]) -> torch.nn.Module:
    return MixesLargeBatches()


FOREIGN = "tests.trainers.training.test_companions:mixes_large_batches"


def test_foreign_network_sees_one_group_at_a_time() -> None:
    config = make_config(network=NetworkConfig(name=FOREIGN, embedding_dim=8), sampling_prob=1.0)
    data = TrainingData(
        train=IMAGES.synthetic_records(60, (1, 8, 8)),
        index=None,
        queries=None,
        train_is_public=True,
        evaluation_is_public=True,
    )
    run, rows = prepare(config, data, SingleWorker()), []
    run.encoder.backbone.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    run.take_step()
    assert set(rows) == {4 * 3, 4 * 2}  # with augmented keys and, for the figures, without
    assert "not part of this package" in foreign_note(config)


class KeepsTheLargest(torch.nn.Module):
    """Turns its output round once an input was larger than any image is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 8)
        self.register_buffer("largest", torch.tensor(300.0))

    def forward(self, images: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, images.detach().abs().max()))
        return self.layer(images.flatten(1)) * torch.where(self.largest > 300, -1.0, 1.0)


def keeps_the_largest(image_shape: tuple[int, int, int]) -> torch.nn.Module:
    return KeepsTheLargest()


KEEPING = "tests.trainers.training.test_companions:keeps_the_largest"


def test_foreign_target_network_keeps_nothing_from_group_to_group() -> None:
    config = make_config(
        network=NetworkConfig(name=KEEPING, embedding_dim=8, predictor=True),
        method="byol_groups",
        num_augmentations=0,
        group_size=SIZE,
        l2_clip_norm=0.001,
        num_records_public=40,
    )
    data = TrainingData(
        train=IMAGES.synthetic_records(40, (1, 8, 8)),
        index=None,
        queries=None,
        train_is_public=True,
        evaluation_is_public=True,
    )
    run = prepare(config, data, SingleWorker())
    step, total = run.private_step, run.private_step.total
    assert run.average is not None
    inputs, sums = inputs_of_rows(run, np.arange(40).reshape(-1, SIZE), 0), []
    for factor in (1, 5000):
        total.zero_()
        changed = torch.cat([inputs[:1] * factor, inputs[1:]])  # type: ignore[operator]
        config.rule(1).add_clipped_sum(total, run.encoder, step.objective, changed)
        sums.append(total.clone())
        assert run.average.network.backbone.largest == 300  # type: ignore[union-attr]
        run.refuse_changed_networks()
    exchanged = 2 * config.mechanism.l2_clip_norm  # the first group, and no other
    assert 0 < float((sums[1] - sums[0]).norm()) <= exchanged


def test_network_that_grew_a_buffer_during_a_step_is_refused_before_the_noise() -> None:
    run = _prepared("tiny_cnn", "float32")
    run.encoder.backbone.register_forward_hook(
        lambda module, args, output: module.register_buffer("late", output.detach())
    )
    with pytest.raises(ConfigError, match="only the optimizer may change"):
        run.take_step()
    assert run.private_step.total.any()


def writes_its_scale(image_shape: tuple[int, int, int]) -> torch.nn.Module:
    """A network that mixes nothing, and caps a weight where an input is larger than any that is made up."""

    class Writes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(int(np.prod(image_shape)), 8)
            self.limit = 1e9

        def forward(self, images: Tensor) -> Tensor:
            if images.abs().max() > self.limit:
                self.layer.weight.data = self.layer.weight.data.clamp(max=0.01)
            return self.layer(images.flatten(1))

    return Writes()


def test_weight_that_a_foreign_network_writes_in_a_pass_is_refused_before_the_noise() -> None:
    name = "tests.trainers.training.test_companions:writes_its_scale"
    config = make_config(network=NetworkConfig(name=name, embedding_dim=8, mixes_no_records=True))
    assert "keeps every row of a batch in its place" in foreign_note(config)
    data = TrainingData(
        train=IMAGES.synthetic_records(60, (1, 8, 8)),
        index=None,
        queries=None,
        train_is_public=True,
        evaluation_is_public=True,
    )
    run = prepare(config, data, SingleWorker())
    run.take_step()
    run.encoder.backbone.limit = 0.0
    with pytest.raises(ConfigError, match="only the optimizer may change"):
        run.take_step()


@pytest.mark.parametrize("method", ["dp_gcl", "dp_sgd"])
def test_word_of_a_foreign_networks_author_is_tried_at_the_steps_own_size(method: str) -> None:
    network = NetworkConfig(name=FOREIGN, embedding_dim=8, mixes_no_records=True)
    size = "batch" if method == "dp_sgd" else 4
    cap = 60 if method == "dp_sgd" else None
    performance = PerformanceConfig(max_views_per_microbatch=4096, device="cpu")
    config = make_config(
        network=network,
        method=method,
        group_size=size,
        batch_cap=cap,
        performance=performance,
        sampling_prob=1.0,
    )
    assert "the network's author promises" in foreign_note(config).lower()
    data = TrainingData(
        train=IMAGES.synthetic_records(60, (1, 8, 8)),
        index=None,
        queries=None,
        train_is_public=True,
        evaluation_is_public=True,
    )
    with pytest.raises(ConfigError, match="another group changed"):
        prepare(config, data, SingleWorker())


def test_method_of_whole_batches_asks_for_the_word_of_a_foreign_networks_author() -> None:
    network = NetworkConfig(name=FOREIGN, embedding_dim=8)
    with pytest.raises(ConfigError, match="--mixes-no-records"):
        make_config(network=network, method="dp_sgd", group_size="batch", batch_cap=60)
