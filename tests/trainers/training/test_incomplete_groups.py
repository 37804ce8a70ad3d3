"""A method whose stage yields incomplete groups trains like any other; the loop knows nothing of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism import registry
from dpgcl_core.mechanism.numbers import PublicNumbers
from dpgcl_core.methods.baselines.dp_sgd import DP_SGD, PathMethod
from dpgcl_core.methods.in_groups import DP_GCL, InGroups
from dpgcl_core.noise.randomness import Draws
from dpgcl_core.sampling.stage import DrawnGroups, GroupStage
from dpgcl_core.workers import SingleWorker, current_workers
from tests.processes import spawn
from tests.trainers.conftest import add_clipped_sum, drawn_groups, make_config, make_data
from trainers.training.loop import train
from trainers.training.step import prepare


@dataclass(frozen=True)
class _Slots:
    """Keeps groups of slots, of which every fourth is empty: a group without that record is not complete."""

    sampling_prob: float
    group_size: int
    yields_incomplete: bool = True

    def draw(self, num_records: int, *, sampling: Draws, permutation: Draws) -> DrawnGroups:
        num_slots = num_records + num_records // 3
        slots = permutation.permutation(np.arange(num_slots, dtype=np.int64))
        blocks = slots[: num_slots // self.group_size * self.group_size].reshape(-1, self.group_size)
        kept = blocks[sampling.random(len(blocks)) < self.sampling_prob]
        return DrawnGroups(
            rows=np.where(kept < num_records, kept, 0),
            complete=(kept < num_records).all(axis=1),
            batch_size=kept.size,
        )


@dataclass(frozen=True, kw_only=True)
class _OfSlots(InGroups):
    @property
    def sampling(self) -> str:
        return "groups of slots, for this test"

    def group_stage(self, numbers: PublicNumbers) -> GroupStage:
        return _Slots(numbers.sampling_prob, int(numbers.group_size))


@dataclass(frozen=True, kw_only=True)
class _WholeBatchOfSlots(PathMethod):
    def group_stage(self, numbers: PublicNumbers) -> GroupStage:
        return _Slots(numbers.sampling_prob, 4)


def _own(method: object) -> dict[str, object]:
    given = [field.name for field in dataclasses.fields(method) if field.init]  # type: ignore[arg-type]
    return {name: getattr(method, name) for name in given}


OF_SLOTS = _OfSlots(**_own(DP_GCL) | {"name": "test_groups_of_slots"})  # type: ignore[arg-type]
WHOLE = _WholeBatchOfSlots(**_own(DP_SGD) | {"name": "test_whole_batch_of_slots"})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _registered_for_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in (OF_SLOTS, WHOLE):
        monkeypatch.setitem(registry._registry._all(), method.name, method)


def _config(**changes: object):  # type: ignore[no-untyped-def]
    usual = {"method": OF_SLOTS.name, "group_size": 3, "sampling_prob": 0.8, "seeded_non_private": True}
    return make_config(**(usual | changes))


def test_stage_of_incomplete_groups_trains() -> None:
    run = prepare(_config(), make_data(), SingleWorker())
    drawn = drawn_groups(run)
    assert 0 < int(drawn.complete.sum()) < len(drawn)
    result = train(_config(), make_data())
    assert result.metrics["num_steps_charged"] == 6
    assert dict(result.series["num_groups"])[0] == int(drawn.complete.sum())
    assert dict(result.series["realised_batch_size"])[0] == drawn.batch_size == drawn.rows.size


def test_incomplete_groups_add_nothing_to_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare(_config(), make_data(), SingleWorker())
    drawn, sums = drawn_groups(run), []
    only = DrawnGroups.all_complete(drawn.rows[drawn.complete])
    for groups in (drawn, only):
        total = torch.zeros(num_trainable(run.encoder))
        add_clipped_sum(run, groups, total, 1)
        sums.append(total)
    assert float((sums[0] - sums[1]).norm() / sums[1].norm()) < 1e-6
    unmasked = torch.zeros_like(sums[0])
    add_clipped_sum(run, DrawnGroups.all_complete(drawn.rows), unmasked, 1)
    assert float((unmasked - sums[1]).norm() / sums[1].norm()) > 0.01


def test_first_steps_loss_is_that_of_the_complete_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare(_config(), make_data(), SingleWorker())
    drawn = drawn_groups(run)
    of_all = dict(train(_config(), make_data()).series["train_loss"])[0]
    only = DrawnGroups.all_complete(drawn.rows[drawn.complete])
    monkeypatch.setattr(_Slots, "draw", lambda *_, **__: only)
    of_complete = dict(train(_config(), make_data()).series["train_loss"])[0]
    assert of_all == pytest.approx(of_complete, rel=1e-6)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_masks_alike(precision: str) -> None:
    network = dataclasses.replace(make_config().network, precision=precision)
    run = prepare(_config(network=network), make_data(), SingleWorker())
    drawn = drawn_groups(run)
    nothing = dataclasses.replace(drawn, complete=np.zeros(len(drawn), dtype=np.bool_))
    total = torch.zeros(num_trainable(run.encoder))
    reports = add_clipped_sum(run, nothing, total, 1)
    assert not total.any()
    assert sum(len(report.losses) for report in reports) == len(drawn)


def test_rules_of_whole_batches_refuse_incomplete_groups() -> None:
    with pytest.raises(ConfigError, match="none may be incomplete"):
        _config(method=WHOLE.name, group_size="batch", batch_cap=60)


def _train_and_save(rank: int, folder: Path) -> None:
    registry.register(OF_SLOTS)  # in a process of its own
    result = train(_config(), make_data(), workers=current_workers())
    weights = torch.cat([p.detach().flatten() for p in trainable_parameters(result.encoder)])
    torch.save({"weights": weights, "series": result.series}, folder / f"{rank}.pt")


@pytest.mark.ci
def test_two_workers_have_the_law_of_one_with_incomplete_groups(tmp_path: Path) -> None:
    one = train(_config(), make_data())
    expected = torch.cat([p.detach().flatten() for p in trainable_parameters(one.encoder)])
    spawn(_train_and_save, 2, tmp_path)
    saved = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for other in saved:
        assert float((other["weights"] - expected).norm() / expected.norm()) < 1e-5
    assert saved[0]["series"]["num_groups"] == one.series["num_groups"]
    for actual, wanted in zip(saved[0]["series"]["train_loss"], one.series["train_loss"], strict=True):
        assert actual == pytest.approx(wanted, rel=1e-4)
