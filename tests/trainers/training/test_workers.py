"""One worker, two and four: the same law. Parts of the noise are short, so that every worker has a share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dpgcl_core.noise import chunked_draw
from dpgcl_core.sampling.slots import SampledGroups
from dpgcl_core.sampling.stage import DrawnGroups
from dpgcl_core.workers import DistributedWorkers, SingleWorker, current_workers
from tests.processes import spawn
from tests.trainers.conftest import make_config, make_data
from tests.trainers.training.test_averaging import BYOL, _config, _weights
from trainers.config.training import EvaluationConfig, TrainingConfig
from trainers.training.loop import train
from trainers.training.step import prepare

PART = 500


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_draw, "PART", PART)


def _seeded(group_size: object) -> TrainingConfig:
    evaluation = EvaluationConfig(record_every_steps=1, also_untrained=False, snr_noise_multiplier=8.0)
    return make_config(
        seeded_non_private=True, group_size=group_size, sampling_prob=0.4, evaluation=evaluation
    )


def _train_and_save(rank: int, folder: Path, group_size: object) -> None:
    result = train(_seeded(group_size), make_data(), workers=current_workers())
    weights = _weights(result.encoder)
    torch.save(
        {"weights": weights, "series": result.series, "metrics": result.metrics}, folder / f"{rank}.pt"
    )


@pytest.mark.ci
@pytest.mark.parametrize(("count", "group_size"), [(2, 4), (4, 4), (2, "batch")])
def test_workers_have_the_law_of_one(count: int, group_size: object, tmp_path: Path) -> None:
    """With the same draws (seeded, labelled non-private) W workers end where one does: one sample, one
    permutation and one noise in total, and no group, negative or record counted twice or left out."""
    one = train(_seeded(group_size), make_data())
    expected = _weights(one.encoder)
    spawn(_train_and_save, count, tmp_path, group_size)
    saved = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(count)]
    for other in saved:
        assert float((other["weights"] - expected).norm() / expected.norm()) < 1e-5
        assert torch.equal(other["weights"], saved[0]["weights"])
    assert saved[0]["series"]["num_groups"] == one.series["num_groups"]
    for name in ("train_loss", "snr"):
        for actual, of_one in zip(saved[0]["series"][name], one.series[name], strict=True):
            assert actual == pytest.approx(of_one, rel=1e-4)
    for name in ("snr_first_step", "snr_first_step_no_augmentation", "noised_snr_first_step"):
        assert saved[0]["metrics"][name] == pytest.approx(one.metrics[name], rel=1e-4)
    assert saved[1]["metrics"] == {}


def _save_noise(rank: int, folder: Path) -> None:
    run = prepare(make_config(), make_data(private=True), current_workers())
    gradients = []
    run.optimizer.step = lambda: gradients.extend(p.grad.flatten().clone() for p in run.encoder.parameters())
    nothing = DrawnGroups.all_complete(np.empty((0, 4), dtype=np.int64))
    SampledGroups.draw = lambda *_, **__: nothing
    run.take_step()
    noise = torch.cat(gradients) * run.config.mechanism.divisor
    torch.save(noise, folder / f"{rank}.pt")


@pytest.mark.ci
@pytest.mark.parametrize("count", [2, 4])
def test_noise_is_drawn_once_for_all_workers(count: int, tmp_path: Path) -> None:
    spawn(_save_noise, count, tmp_path)
    noise, *others = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(count))
    assert all(torch.equal(noise, other) for other in others)
    expected = make_config().mechanism.noise_multiplier * 1.0  # σ·C; drawn twice it would be √2 larger
    parts = noise.split(PART)
    assert len(parts) > count
    assert all(abs(float(part.std()) - expected) < 5 * expected / np.sqrt(2 * len(part)) for part in parts)
    apart = np.corrcoef(torch.stack(parts[:-1])) - np.eye(len(parts) - 1)
    assert np.abs(apart).max() < 5 / PART**0.5  # that of parts with one key is 1


def _sum_and_gather(rank: int, folder: Path) -> None:
    workers = DistributedWorkers()
    for length in (1, PART, 2 * PART + 7, 5 * PART):
        values = torch.arange(length, dtype=torch.float64) + rank
        workers.sum_shares(values)
        own = torch.zeros(length, dtype=torch.bool)
        for part in chunked_draw.parts_of(length, rank=rank, count=4):
            own[part] = True
        expected = 4 * torch.arange(length, dtype=torch.float64) + 6
        assert torch.equal(values, torch.where(own, expected, 0.0))
        workers.gather_shares(values)
        assert torch.equal(values, expected)
    (folder / f"{rank}").touch()


def test_sums_are_in_one_share_each_and_gathered_by_all(tmp_path: Path) -> None:
    """Also of lengths that are no multiple of the number of workers, and below it."""
    spawn(_sum_and_gather, 4, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def _share(rank: int, folder: Path) -> None:
    workers = DistributedWorkers()
    rows, complete = np.arange(6).reshape(3, 2), np.array([True, False, True])
    drawn = DrawnGroups(rows=rows, complete=complete, batch_size=6)
    shared = workers.share_groups(drawn if rank == 0 else None)
    nothing = DrawnGroups.all_complete(np.empty((0, 4), dtype=np.int64))
    empty = workers.share_groups(nothing if rank == 0 else None)
    np.savez(folder / f"{rank}.npz", rows=shared.rows, complete=shared.complete)
    assert empty.rows.shape == (0, 4)
    assert len(empty.complete) == 0


def test_groups_are_shared_whole_with_their_mask(tmp_path: Path) -> None:
    spawn(_share, 2, tmp_path)
    for rank in range(2):
        shared = np.load(tmp_path / f"{rank}.npz")
        assert shared["rows"].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert shared["complete"].tolist() == [True, False, True]


def _average_and_save(rank: int, folder: Path, changes: dict[str, object]) -> None:
    run = prepare(_config(**changes), make_data(), current_workers())
    for _ in range(3):
        run.take_step()
    assert run.average is not None
    torch.save(_weights(run.average.network), folder / f"{rank}.pt")


@pytest.mark.ci
@pytest.mark.parametrize("changes", [{}, BYOL], ids=["averaged", "target"])
def test_every_worker_holds_the_average_of_one(changes: dict[str, object], tmp_path: Path) -> None:
    run = prepare(_config(**changes), make_data(), SingleWorker())
    for _ in range(3):
        run.take_step()
    assert run.average is not None
    expected = _weights(run.average.network)
    spawn(_average_and_save, 2, tmp_path, changes)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert torch.equal(first, second)
    assert float((first - expected).norm() / expected.norm()) < 1e-5
