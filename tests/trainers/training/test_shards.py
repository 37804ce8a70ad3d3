"""Shards: a worker has the records of its range of slots and draws from it; the law is that of one worker."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpgcl_core.errors import ConfigError
from dpgcl_core.noise import chunked_draw
from dpgcl_core.release.noised_counts import split_public
from dpgcl_core.sampling.slot_table import SlotTable
from dpgcl_core.sampling.slots import ShardedGroups
from dpgcl_core.workers import SingleWorker, current_workers
from tests.processes import spawn
from tests.trainers.conftest import make_config, make_data, make_held_out, make_records, make_slots
from tests.trainers.training.test_averaging import _weights
from trainers import ray_worker
from trainers.config.training import EvaluationConfig, PerformanceConfig, TrainingConfig
from trainers.data.dataset import TrainingData
from trainers.files.checkpoint import CheckpointFolder
from trainers.training.loop import train
from trainers.training.release import check_release
from trainers.training.step import Training, prepare

TWO = PerformanceConfig(num_workers=2, checkpoint_every_steps=2, max_views_per_microbatch=48, device="cpu")


def _config(**changes: object) -> TrainingConfig:
    seeded = {"seeded_non_private": True, "sampling_prob": 0.4, "num_shards": 2, "performance": TWO}
    return make_config(**(seeded | changes))


def _data() -> TrainingData:
    """60 records in 61 slots, so that the ranges differ."""
    data = make_data()
    slots = SlotTable.empty(61).holding(data.train.ids, np.random.default_rng(8))
    return dataclasses.replace(data, slots=slots)


def _stage(config: TrainingConfig) -> ShardedGroups:
    stage = config.mechanism.group_stage()
    assert isinstance(stage, ShardedGroups)
    return stage


def _train_and_save(rank: int, folder: Path, has_all: bool) -> None:
    config, data = _config(num_records_public=61), _data()
    part = list(data.parts(_stage(config)))[rank]
    assert len(part.train) < 60
    result = train(config, data if has_all else part, workers=current_workers())
    torch.save({"weights": _weights(result.encoder), "series": result.series}, folder / f"{rank}.pt")


@pytest.mark.ci
@pytest.mark.parametrize("has_all", [False, True])
def test_two_workers_with_a_shard_each_have_the_law_of_one_with_both(
    has_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same draws: no group is counted twice or left out, and there is one noise, in two shares."""
    monkeypatch.setattr(chunked_draw, "PART", 500)
    one = train(_config(num_records_public=61), _data())
    spawn(_train_and_save, 2, tmp_path, has_all)
    saved = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    expected = _weights(one.encoder)
    assert torch.equal(saved[0]["weights"], saved[1]["weights"])
    assert float((saved[0]["weights"] - expected).norm() / expected.norm()) < 1e-5
    for name in ("num_groups", "realised_batch_size"):
        assert saved[0]["series"][name] == one.series[name]
    assert saved[0]["series"]["snr"][0][1] == pytest.approx(one.series["snr"][0][1], rel=1e-4)


def _train_half(rank: int, folder: Path) -> None:
    config = _config(num_records_public=61)
    part = list(_data().parts(_stage(config)))[rank]
    step = Training.take_step

    def stop_after_two(run: Training) -> None:
        if run.num_steps_done == 2:
            raise KeyboardInterrupt
        step(run)

    Training.take_step = stop_after_two  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        train(config, part, workers=current_workers(), checkpoints=_checkpoints(folder))


def _checkpoints(folder: Path) -> CheckpointFolder:
    return CheckpointFolder(folder / "checkpoint", every_steps=2)


@pytest.mark.ci
def test_shards_resume_on_another_number_of_workers(tmp_path: Path) -> None:
    whole = train(_config(num_records_public=61), _data())
    spawn(_train_half, 2, tmp_path)
    resumed = train(_config(num_records_public=61), _data(), checkpoints=_checkpoints(tmp_path))
    assert resumed.metrics["num_steps_charged"] < 2 * 6
    expected = _weights(whole.encoder)
    assert float((_weights(resumed.encoder) - expected).norm() / expected.norm()) < 1e-5


def test_a_worker_draws_the_records_of_its_own_range_of_slots() -> None:
    config, data = _config(num_records_public=61), _data()
    assert data.slots is not None
    slots = data.slots.slots_of(data.train.ids)
    run = prepare(config, data, SingleWorker())
    drawn = run.private_step.draw(0, 60, run.rows_of_shards)
    assert 0 < int(drawn.complete.sum()) <= len(drawn)
    sides = (slots >= 30)[drawn.rows[drawn.complete]]
    assert all(len(set(group)) == 1 for group in sides.tolist()), "no group is of two ranges"
    assert len(set(sides[:, 0].tolist())) == 2


# What a worker gets

HELD_OUT = EvaluationConfig(also_untrained=False, score_on_held_out=0.3, score_noise_multiplier=5.0)
TRAINED, _ = split_public(60, 0.3)


def _held_out_data() -> TrainingData:
    return TrainingData(
        **make_held_out(0.3),
        index=make_records(40, prefix="public"),
        queries=make_records(20, prefix="public query"),
        train_is_public=False,
        evaluation_is_public=True,
    )


def _private_config() -> TrainingConfig:
    return _config(seeded_non_private=False, evaluation=HELD_OUT, num_records_public=TRAINED, num_steps=2)


def test_workers_get_their_own_records_and_the_first_all_that_is_scored() -> None:
    data, stage = _held_out_data(), _stage(_private_config())
    parts = list(data.parts(stage))
    assert data.slots is not None
    for part, slots in zip(parts, stage.ranges, strict=True):
        assert set(data.slots.slots_of(part.train.ids)) <= set(slots)
        assert part.slots is not None
        assert set(part.slots.ids) == set(part.train.ids)
    assert sorted(np.concatenate([part.train.ids for part in parts])) == sorted(data.train.ids)
    assert (parts[0].held_out_records, parts[0].index) == (data.held_out_records, data.index)
    assert [getattr(parts[1], name) for name in ("held_out_records", "index", "queries")] == [None] * 3


def test_worker_without_a_record_draws_only_groups_that_contribute_nothing() -> None:
    data = make_data(private=True)
    data = dataclasses.replace(data, train=data.train.take(np.arange(20)))
    high = SlotTable(capacity=60, ids=data.train.ids, slots=np.arange(40, 60))
    config = _config(seeded_non_private=False, sampling_prob=1.0)
    part, _ = dataclasses.replace(data, slots=high).parts(_stage(config))
    assert len(part.train) == 1
    run = prepare(config, part, SingleWorker())
    drawn = run.private_step.draw(0, 1, run.rows_of_shards)
    assert not drawn.complete.any()
    assert len(drawn) == 14
    run.take_step()


@pytest.mark.parametrize(("num_parts", "rank", "fetched"), [(1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 1)])
def test_process_fetches_only_its_part(
    num_parts: int, rank: int, fetched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_worker, "ray", SimpleNamespace(get=lambda reference: reference))
    monkeypatch.setattr(ray_worker, "current_workers", lambda: SimpleNamespace(rank=rank, count=2))
    monkeypatch.setattr(ray_worker, "_prepare", lambda trial: None)
    monkeypatch.setattr(ray_worker, "_train", lambda trial, data: {"data": data})
    loop_config = {"trial": SimpleNamespace(data_are_public=True), "records": list(range(num_parts))}
    assert ray_worker.train_worker(loop_config) == {"data": fetched}


@pytest.mark.ci
def test_held_out_records_are_scored_with_noise_beside_shards() -> None:
    config, data = _private_config(), _held_out_data()
    whole = train(config, data)
    first = train(config, next(data.parts(_stage(config))))
    assert "noised_knn_accuracy" in whole.metrics.keys() & first.metrics.keys()
    assert whole.metrics["epsilon"] == config.epsilon()


# What is refused


@pytest.mark.parametrize(
    ("slots", "reason"),
    [(None, "shards = 2 and no table"), (61, r"61 training slots \(of 61\).* accounted for 60 records")],
)
def test_shards_need_a_table_of_the_slots_that_are_accounted_for(slots: int | None, reason: str) -> None:
    data = make_data()
    if slots is not None:
        table = SlotTable.empty(slots).holding(data.train.ids, np.random.default_rng(8))
        data = dataclasses.replace(data, slots=table)
    with pytest.raises(ConfigError, match=reason):
        check_release(_config(), data)


def test_number_of_records_is_that_of_all_shards() -> None:
    """Too many empty slots of all are an error, and never those of one shard, whose number is random."""
    config, data = _config(num_records_public=60), make_data()
    few = dataclasses.replace(data, train=data.train.take(np.arange(40)), slots=make_slots(data.train))
    with pytest.raises(ConfigError, match="too many of the 60 slots are empty"):
        check_release(config, few)
    for part in few.parts(_stage(config)):
        check_release(config, part)


def test_shards_are_as_many_as_workers() -> None:
    with pytest.raises(ConfigError, match=r"shards = 2 and num_workers = 3\. Set num_workers = 2"):
        _config(performance=dataclasses.replace(TWO, num_workers=3))
