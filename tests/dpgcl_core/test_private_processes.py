"""A private training in a loop of one's own, in several processes: one draw, one update, one end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpgcl_core.errors import ConfigError, DpgclError, ProcessFailed
from dpgcl_core.noise.randomness import SeededNonPrivateRandomness
from dpgcl_core.private_training import PrivateTraining
from dpgcl_core.sampling.slots import SampledGroups
from tests.dpgcl_core.test_private_training import (
    NUM_RECORDS,
    _flat,
    _loss,
    _make,
    _mechanism,
    _model,
    _Records,
    _training,
)
from tests.processes import spawn

pytestmark = pytest.mark.ci


class _Noting(_Records):
    """Notes the rows that are read."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __getitem__(self, row: int) -> Tensor:
        self.rows.append(row)
        return super().__getitem__(row)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def _train(group_size: int | str, num_workers: int, records: _Records) -> tuple[Tensor, list[int]]:
    """Return the weights, and the number of groups of every step."""
    model, num_groups = _model(), []
    training = _training(
        _mechanism(group_size=group_size, num_steps=4),
        model,
        _adam(model),
        DataLoader(records, batch_size=10, num_workers=num_workers),
    )
    for views in training:
        num_groups.append(len(views))
        training.step(views)
    return _flat(model), num_groups


def _train_and_save(rank: int, folder: Path, kinds: Iterable[tuple[int | str, int]]) -> None:
    for number, kind in enumerate(kinds):
        records = _Noting()
        weights, num_groups = _train(*kind, records)
        rows = records.rows[1 + 2 * 15 :]  # after those that the processes compare
        saved = {"weights": weights, "num_groups": num_groups, "rows": rows}
        torch.save(saved, folder / f"{number}-{rank}.pt")


def test_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    """With the same draws (seeded, labelled non-private), also with loaders that read ahead."""
    kinds = [(4, 0), (4, 2), ("batch", 0)]
    spawn(_train_and_save, 2, tmp_path, kinds)
    for number, kind in enumerate(kinds):
        one, num_groups = _train(*kind, _Records())
        first, second = (torch.load(tmp_path / f"{number}-{rank}.pt") for rank in range(2))
        torch.testing.assert_close(first["weights"], one, rtol=1e-5, atol=1e-6)
        assert torch.equal(first["weights"], second["weights"])
        shares = zip(first["num_groups"], second["num_groups"], strict=True)
        assert [sum(share) for share in shares] == num_groups
        assert max(second["num_groups"]) > 0 or kind[0] == "batch"
    read = [len(torch.load(tmp_path / f"0-{rank}.pt")["rows"]) for rank in range(2)]
    assert read == [4 * sum(torch.load(tmp_path / f"0-{rank}.pt")["num_groups"]) for rank in range(2)]


def _fail(*_: object, **__: object) -> Any:
    raise RuntimeError("broken")


_drawn = SeededNonPrivateRandomness.generator


def _fail_for_noise(self: SeededNonPrivateRandomness, step: int, purpose: str) -> Any:
    return _fail() if purpose == "noise" else _drawn(self, step, purpose)


class _FailingRecords(_Records):
    fails = False

    def __getitem__(self, row: int) -> Tensor:
        return _fail() if self.fails else super().__getitem__(row)


PLACES = ("draw", "loader", "pass", "noise", "update")


def _fail_in(rank: int, folder: Path) -> None:
    """In one process after the other, at one place after the other, in one group."""
    for place in PLACES:
        for failing in (0, 1) if place not in ("draw", "noise") else (0,):
            with pytest.MonkeyPatch.context() as patch:
                _fail_once(place, rank == failing, patch)


def _fail_once(place: str, fails: bool, patch: pytest.MonkeyPatch) -> None:
    model, records, is_due = _model(), _FailingRecords(), list[int]()
    optimizer, loader = _adam(model), DataLoader(records, batch_size=10)

    def losses(views: Tensor) -> Tensor:
        return _fail() if is_due else _loss(model)(views)

    training = _training(model=model, optimizer=optimizer, loader=loader, loss=losses)
    training.step(next(draws := iter(training)))
    before = _flat(model)
    if fails and place == "draw":
        patch.setattr(SampledGroups, "draw", _fail)
    if fails and place == "loader":
        records.fails = True
    if fails and place == "noise":
        patch.setattr(SeededNonPrivateRandomness, "generator", _fail_for_noise)
    if fails and place == "update":
        optimizer.register_step_pre_hook(_fail)

    def take_step() -> None:
        views = next(draws)
        is_due.extend([1] * (fails and place == "pass"))
        training.step(views)

    reason = "broken" if fails else "another process of this training has failed"
    with pytest.raises(RuntimeError if fails else ProcessFailed, match=reason):
        take_step()
    assert training.num_steps_taken == 2
    if fails or place != "update":
        assert torch.equal(_flat(model), before), place
    for call in (lambda: next(iter(training)), lambda: training.step(torch.zeros(1, 4, 2, 5))):
        with pytest.raises(ConfigError, match="has ended with an exception"):
            call()


def test_process_that_fails_ends_the_training_in_all_before_an_update(tmp_path: Path) -> None:
    spawn(_fail_in, 2, tmp_path)


def _refuse_once(rank: int, folder: Path) -> None:
    model = _model()
    training = _training(model=model)
    views = next(iter(training))
    before = _flat(model)
    with pytest.raises(ConfigError if rank else ProcessFailed):
        training.step(views[:0] if rank else views)  # type: ignore[index]
    assert torch.equal(_flat(model), before)
    training.step(views)
    torch.save(_flat(model), folder / f"{rank}.pt")


def test_call_that_one_process_refuses_is_repeated_by_all(tmp_path: Path) -> None:
    spawn(_refuse_once, 2, tmp_path)
    model = _model()
    training = _training(model=model)
    training.step(next(iter(training)))
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), _flat(model))


class _Fewer(_Records):
    def __len__(self) -> int:
        return NUM_RECORDS - 1


class _Wider(_Records):
    def __getitem__(self, row: int) -> Tensor:
        return super().__getitem__(row).repeat(2, 1)


class _Reversed(_Records):
    def __getitem__(self, row: int) -> Tensor:
        return super().__getitem__(NUM_RECORDS - 1 - row)


class _Random(_Records):
    def __getitem__(self, row: int) -> Tensor:
        return torch.rand(2, 5, generator=self._generator)

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)


def _disagree(rank: int, folder: Path) -> None:
    def model_of(weight: float) -> nn.Sequential:
        model = _model()
        with torch.no_grad():
            model[0].bias[0] += weight
        return model

    changes: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
        "initial model": lambda model: {"model": model_of(1e-6)},
        "numbers": lambda model: {"num_steps": 11},
        "records": lambda model: {"loader": DataLoader(_Fewer(), batch_size=12), "num_records_public": 60},
        "records ": lambda model: {"loader": DataLoader(_Wider(), batch_size=12)},
        "records  ": lambda model: {"loader": DataLoader(_Reversed(), batch_size=12)},
        "number of loader workers": lambda model: {
            "loader": DataLoader(_Records(), batch_size=12, num_workers=1)
        },
    }
    for name, change in changes.items():
        given = {"num_records_public": 60} if name == "records" else {}
        with pytest.raises(ConfigError, match=f"all 2 processes must have the same {name.strip()};"):
            _make(**given | (change(_model()) if rank else {}))
    model = _model()
    with pytest.raises(ConfigError, match="the same optimizer;"):
        _training(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank)))
    for bad in ({"model": _model(nn.BatchNorm1d(4))}, {"group_size": 0}):  # refused in one process
        with pytest.raises(DpgclError) as raised:
            _make(**bad if rank else {})
        assert type(raised.value) is (ConfigError if rank else ProcessFailed)
    for loader in (DataLoader(_Records(), batch_size=12), DataLoader(_Random(rank), batch_size=12)):
        assert _make(loader=loader).mechanism.num_steps == 10  # random views are not compared


def _exchange(rank: int, folder: Path) -> None:
    model = _model()

    def loss(views: Tensor) -> Tensor:
        sums = model(views).sum((1, 2))
        dist.all_reduce(others := sums.detach().clone())
        return (sums - others).square().sum(1)

    with pytest.raises(
        ConfigError, match=r"may not exchange data between processes; it calls c10d\.allreduce"
    ):
        _training(model=model, loss=loss)


def test_loss_that_mixes_groups_of_several_processes_is_refused(tmp_path: Path) -> None:
    spawn(_exchange, 2, tmp_path)


def test_processes_that_disagree_are_refused_in_all(tmp_path: Path) -> None:
    spawn(_disagree, 2, tmp_path)


def _die(rank: int, folder: Path) -> None:
    model = _model()
    training = _training(model=model, loss=lambda views: _loss(model)(views))
    views, before = next(iter(training)), _flat(model)
    if rank:
        os._exit(0)
    with pytest.raises(ProcessFailed):
        training.step(views)
    assert torch.equal(_flat(model), before)
    (folder / "ended").touch()
    os._exit(0)  # the group cannot be left in order


def test_process_that_dies_ends_the_training_in_the_others(tmp_path: Path) -> None:
    spawn(_die, 2, tmp_path)
    assert (tmp_path / "ended").exists()


def _restarted(folder: Path, rank: int, state: dict[str, Any] | None) -> tuple[PrivateTraining, nn.Module]:
    model = _model()
    training = PrivateTraining(
        _mechanism(num_steps=4, num_restart_steps=2),
        model,
        _adam(model),
        DataLoader(_Records(), batch_size=10),
        loss=_loss(model),
        folder=folder / str(rank),
        randomness=SeededNonPrivateRandomness(1),
    )
    if state is not None:
        training.load_state_dict(state)
    return training, model


def _resume(rank: int, folder: Path) -> None:
    training, model = _restarted(folder, rank, None)
    training.step(next(draws := iter(training)))
    state = training.state_dict()
    torch.save(state, folder / f"state-{rank}.pt")
    training.step(next(draws))
    training, model = _restarted(folder, rank, torch.load(folder / f"state-{rank}.pt"))
    for views in training:
        training.step(views)
    torch.save(_flat(model), folder / f"{rank}.pt")
    training, model = _restarted(folder, rank, None)
    with pytest.raises(DpgclError) as raised:  # five of six draws are made
        next(iter(training))
    assert isinstance(raised.value, ProcessFailed) == bool(rank)
    state = torch.load(folder / f"state-{rank}.pt")
    training, model = _restarted(folder, rank, None)
    with pytest.raises(ConfigError, match="must have the same state"):  # one process missed it
        training.load_state_dict(state) if rank else next(iter(training))
    if rank:
        state["num_steps_taken"] = 0
    with pytest.raises(ConfigError, match="must have the same state"):
        _restarted(folder, rank, state)


def test_first_process_counts_the_draws_of_all_and_resumes(tmp_path: Path) -> None:
    spawn(_resume, 2, tmp_path)
    assert (tmp_path / "0/attempts").exists()
    assert not (tmp_path / "1").exists()
    one, _ = _train(4, 0, _Records())
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), one, rtol=1e-5, atol=1e-6)
