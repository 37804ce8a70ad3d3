"""Small trainings for the tests of loop, checkpoints and workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpgcl_core.clipping.types import GroupInputs, GroupReport, num_trainable
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.sampling.record_ids import ids_from_names
from dpgcl_core.sampling.slot_table import SlotTable
from dpgcl_core.sampling.stage import DrawnGroups
from trainers.config.training import EvaluationConfig, NetworkConfig, PerformanceConfig, TrainingConfig
from trainers.data.dataset import AnyRecords, TrainingData
from trainers.data.loading import split_held_out
from trainers.data.records import Records
from trainers.training.step import Training


def make_records(num_records: int, *, prefix: str = "record", labels: bool = True) -> Records:
    """Random 8 × 8 images whose class shows in their brightness."""
    generator = np.random.default_rng(5)
    classes = np.arange(num_records) % 3
    images = generator.integers(0, 80, (num_records, 1, 8, 8)) + 80 * classes[:, None, None, None]
    return Records(
        images=images.astype(np.uint8),
        ids=ids_from_names(f"{prefix} {i}" for i in range(num_records)),
        labels=classes.astype(np.int64) if labels else None,
    )


def make_slots(records: AnyRecords) -> SlotTable:
    """Slots for these records, as many as there are records."""
    return SlotTable.empty(len(records)).holding(records.ids, np.random.default_rng(8))


def make_held_out(share: float, *, num_records: int = 60) -> dict[str, Any]:
    """Records to train on and records held out with their slots, by the names of `TrainingData`.

    `split_public` of their number tells how many slots the training is to be accounted for.
    """
    records = make_records(num_records)
    slots = make_slots(records)
    train, scored = split_held_out(records, share, slots)
    return {"train": train, "held_out_records": scored, "slots": slots}


def make_data(*, private: bool = False, evaluation_is_public: bool | None = None) -> TrainingData:
    """60 training and 30 test records; private ones are scored on public ones or not at all."""
    train = make_records(60)
    scored = not private if evaluation_is_public is None else evaluation_is_public
    return TrainingData(
        train=train,
        index=train if scored else None,
        queries=make_records(30, prefix="test") if scored else None,
        train_is_public=not private,
        evaluation_is_public=scored,
    )


def make_config(**changes: object) -> TrainingConfig:
    """A training of 6 steps; `changes` go to the mechanism or the configuration by name."""
    mechanism = Mechanism(
        num_records_public=60,
        sampling_prob=0.5,
        group_size=4,
        l2_clip_norm=1.0,
        noise_multiplier=4.0,  # with less noise every ε takes longer: at 1 four times as long
        num_steps=6,
        target_delta=1e-3,
    )
    own = {f.name for f in dataclasses.fields(Mechanism)} & set(changes)
    others: dict[str, object] = {"sampling": None}  # the method's own way
    mechanism = dataclasses.replace(mechanism, **(others | {name: changes.pop(name) for name in own}))
    usual = {
        "mechanism": mechanism,
        "network": NetworkConfig(name="small_cnn", embedding_dim=8),
        "evaluation": EvaluationConfig(record_every_steps=1, also_untrained=False),
        "performance": PerformanceConfig(checkpoint_every_steps=2, max_views_per_microbatch=48, device="cpu"),
    }
    return TrainingConfig(**(usual | changes))  # type: ignore[arg-type]


@pytest.fixture
def config() -> Callable[..., TrainingConfig]:
    """`make_config`."""
    return make_config


@pytest.fixture
def data() -> Callable[..., TrainingData]:
    """`make_data`."""
    return make_data


def drawn_groups(training: Training) -> DrawnGroups:
    """The groups of the training's next step."""
    return training.private_step.draw(training.num_steps_done, len(training.data.train))


def add_clipped_sum(
    training: Training, groups: DrawnGroups, total: Tensor, num_augmentations: int
) -> list[GroupReport]:
    """Add the clipped sum of these groups as the training's next step would."""
    groups = training.in_one_shape(groups)
    inputs_of = partial(training.inputs, groups, num_augmentations=num_augmentations)
    return training.private_step.add_clipped_sum(total, training.num_steps_done, groups, inputs_of)


def inputs_of_rows(training: Training, rows: NDArray[np.int64], num_augmentations: int) -> GroupInputs:
    """The inputs of groups of records, given by their rows, at the training's next step."""
    groups = DrawnGroups.all_complete(rows)
    return training.inputs(groups, slice(None), num_augmentations=num_augmentations)


class Elsewhere:
    """A sum of the training's length on a device that may not be there."""

    def __init__(self, device: str, run: Training) -> None:
        self.device, self._length = torch.device(device), num_trainable(run.encoder)

    def __len__(self) -> int:
        return self._length
