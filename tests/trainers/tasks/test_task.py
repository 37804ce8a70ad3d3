"""A task without embeddings goes through the whole training: nothing outside tasks knows what it is about."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.objective import EmbeddingObjective, embedding_of
from dpgcl_core.mechanism import registry
from dpgcl_core.mechanism.registry import METHODS
from dpgcl_core.methods.in_groups import ClippedGroups
from dpgcl_core.workers import SingleWorker
from tests.trainers.conftest import add_clipped_sum, drawn_groups, make_config, make_data, make_records
from tests.trainers.training.test_pairs import config_of, pairs
from trainers.config.training import AnyNetworkConfig, NetworkConfig, TrainingConfig
from trainers.data.records import Records
from trainers.files.checkpoint import CheckpointFolder
from trainers.models.precision import pass_in, scale_gradient
from trainers.tasks import IMAGES, PAIRS
from trainers.tasks import task as tasks
from trainers.tasks.task import Task, task_named, task_of
from trainers.training.loop import train
from trainers.training.step import prepare

Inputs = tuple[Tensor, Tensor]
ANY_OBJECTIVE = ClippedGroups(
    name="test_any_objective",
    title="any objective",
    source="",
    clip_unit="group",
    min_group_size=1,
)


@dataclass(frozen=True, kw_only=True)
class MaskedNetwork(NetworkConfig):
    task: ClassVar[str] = "test_masked"


class Reconstruction(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, 16), nn.ReLU(), nn.Linear(16, size))

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.layers(pixels.flatten(0, 2))
        return found.reshape(pixels.shape)


class MaskedImages(Task[Reconstruction]):
    """Pixels behind a mask are reconstructed from the others; images and masks are two tensors."""

    name: ClassVar[str] = "test_masked"
    embeds: ClassVar[bool] = False

    def check_records(self, config: TrainingConfig, records: Any) -> None:
        pass

    def build(
        self,
        config: TrainingConfig,
        image_shape: tuple[int, int, int],
        start_tensors: Mapping[str, Tensor] | None,
    ) -> Reconstruction:
        with torch.random.fork_rng():
            torch.manual_seed(config.public_seed)
            return Reconstruction(math.prod(image_shape))

    def check_network(
        self, config: TrainingConfig, network: Reconstruction, image_shape: tuple[int, ...]
    ) -> None:
        pass

    def start_note(self, config: TrainingConfig) -> str:
        return ""

    def fresh_parts(self, config: TrainingConfig) -> str:
        return ""

    def num_views(self, config: TrainingConfig, num_augmentations: int) -> int:
        return 1

    def inputs(
        self,
        config: TrainingConfig,
        network: Reconstruction,
        records: Records,
        groups: NDArray[np.int64],
        *,
        step: int,
        num_augmentations: int,
    ) -> Inputs:
        pixels = torch.from_numpy(records.images[groups.reshape(-1)]).float().flatten(1) / 255
        views = pixels.reshape(*groups.shape, 1, 64)
        places = torch.arange(64) + step
        return views, (places % 2).float().expand(views.shape).contiguous()

    def blank_inputs(
        self, network: Reconstruction, image_shape: tuple[int, ...], shape: tuple[int, int, int]
    ) -> Inputs:
        blank = torch.zeros(*shape, 64)
        return blank, blank

    def synthetic_records(self, count: int, image_shape: tuple[int, ...]) -> Records:
        return make_records(count)

    def run(self, network: Reconstruction, inputs: Any) -> None:
        with torch.no_grad():
            network(inputs[0])

    def objective(
        self,
        config: TrainingConfig,
        network: Reconstruction,
        precision: AnyNetworkConfig | None = None,
        target: Reconstruction | None = None,
    ) -> Any:
        how = precision or NetworkConfig()

        def losses(inputs: Inputs) -> Tensor:
            pixels, hidden = inputs
            found = scale_gradient(how, pass_in(how, network, pixels * (1 - hidden)))
            return ((found - pixels).square() * hidden).flatten(1).mean(1)

        return losses

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        return {}


MASKED = MaskedImages()


@pytest.fixture(autouse=True)
def _registered_for_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks._tasks, MASKED.name, MASKED)
    monkeypatch.setitem(registry._registry._all(), ANY_OBJECTIVE.name, ANY_OBJECTIVE)


def _config(**changes: Any) -> TrainingConfig:
    usual = {"method": ANY_OBJECTIVE.name, "network": MaskedNetwork(), "num_augmentations": 0}
    return make_config(**(usual | {"seeded_non_private": True, "noise_multiplier": 0.0} | changes))


def _weights(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainable_parameters(network)])


def test_tasks_are_found_by_name() -> None:
    assert task_named("images") is task_of(make_config()) is IMAGES
    assert task_named("pairs") is task_of(config_of()) is PAIRS
    with pytest.raises(ConfigError, match=r"unknown task 'videos'.*images"):
        task_named("videos")


def test_name_of_a_task_is_taken_once() -> None:
    assert tasks.register_task(IMAGES) is IMAGES
    other = type("Other", (MaskedImages,), {"name": "images"})()
    with pytest.raises(ConfigError, match="already registered"):
        tasks.register_task(other)
    assert task_named("images") is IMAGES


def test_tasks_refuse_each_others_records() -> None:
    with pytest.raises(ConfigError, match="is an image encoder; got pairs"):
        IMAGES.check(make_config(), pairs())
    with pytest.raises(ConfigError, match="is a CLIP model; got images without captions"):
        PAIRS.check(config_of(), make_data().train)


def test_task_without_embeddings_trains(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, every_steps=2)
    config = _config(l2_clip_norm=1.0, num_steps=21, sampling_prob=1.0)
    result = train(config, make_data(), checkpoints=folder)
    first, last = (dict(result.series["train_loss"])[step] for step in (0, 20))  # the same pixels hidden
    assert last < 0.9 * first
    saved = folder.load()
    assert saved is not None
    assert saved.step == 21


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_sum_of_any_objective_is_that_of_its_clipped_gradients(precision: str) -> None:
    config = _config(
        network=MaskedNetwork(precision=precision),
        l2_clip_norm=0.02,
        noise_multiplier=1.0,
    )
    run = prepare(config, make_data(), SingleWorker())
    groups = drawn_groups(run)
    actual = torch.zeros(num_trainable(run.encoder))
    add_clipped_sum(run, groups, actual, 0)
    expected = torch.zeros_like(actual)
    for rows in groups.rows:
        pixels, hidden = MASKED.inputs(
            config, run.encoder, run.data.train, rows[None], step=0, num_augmentations=0
        )
        loss = MASKED.objective(config, run.encoder)((pixels, hidden)).sum()
        found = torch.autograd.grad(loss, trainable_parameters(run.encoder))
        flat = torch.cat([each.flatten() for each in found])
        expected += flat * min(1.0, 0.02 * (1 - 1e-4) / float(flat.norm()))
    assert float((actual - expected).norm() / expected.norm()) < (1e-4 if precision == "float32" else 0.05)
    assert config.network.gradient_scale == (1024 if precision == "float16" else 1)


def test_methods_that_compare_embeddings_refuse_a_task_without_them() -> None:
    for name in ("dp_gcl", "siglip_groups", "dp_sgd", "group_clip"):
        method = METHODS[name]
        changes = {"batch_cap": 60} if method.needs_cap else {}
        changes |= {} if method.takes_group_size else {"group_size": "batch"}
        config = _config(method=name, noise_multiplier=1.0, **changes)
        with pytest.raises(ConfigError, match=f"{name} compares unit embeddings, but the task test_masked"):
            train(config, make_data())


def test_contrastive_tasks_need_a_loss_of_embeddings() -> None:
    config = make_config(method=ANY_OBJECTIVE.name, num_augmentations=0)
    with pytest.raises(ConfigError, match="has no loss on embeddings, which the task images needs"):
        train(config, make_data())
    objective = IMAGES.objective(config, nn.Module())  # type: ignore[arg-type]
    assert isinstance(objective, EmbeddingObjective)
    with pytest.raises(ConfigError, match="a group has no loss of its own"):
        objective(torch.zeros(1))


def test_rules_of_whole_batches_need_an_embedding() -> None:
    rule = make_config(method="dp_sgd", group_size="batch", batch_cap=60).rule()
    inputs = torch.zeros(1, 4, 2, 1, 8, 8)
    with pytest.raises(ConfigError, match="needs an EmbeddingObjective"):
        rule.add_clipped_sum(torch.zeros(1), nn.Linear(1, 1), lambda x: x.sum(), inputs)
    embed = IMAGES.embed(nn.Module())  # type: ignore[arg-type]
    assert embedding_of(EmbeddingObjective(embed=embed, loss=None)) is embed


def test_average_of_any_network_is_kept() -> None:
    config = _config(l2_clip_norm=0.1)
    averaged = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, ema_decay=0.5))
    ends = [_weights(train(each, make_data()).encoder) for each in (config, averaged)]
    assert not torch.equal(*ends)
