"""A private training in a loop of one's own: what a step adds, and what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dpgcl_core.clipping.full_precision import is_low_precision_off
from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.numbers import ADD_OR_REMOVE_ONE, ZERO_OUT_ONE
from dpgcl_core.noise.randomness import SeededNonPrivateRandomness
from dpgcl_core.private_training import PrivateTraining, make_private

NUM_RECORDS, VIEWS, DIM = 60, 2, 5


class _Records(Dataset[Tensor]):
    """Row i is filled with views that only i decides."""

    def __len__(self) -> int:
        return NUM_RECORDS

    def __getitem__(self, row: int) -> Tensor:
        return torch.rand(VIEWS, DIM, generator=torch.Generator().manual_seed(row))


def _model(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(DIM, 4), *layers, nn.Linear(4, 3))


def _loss(model: nn.Module) -> Callable[[Any], Tensor]:
    def losses(views: Tensor) -> Tensor:
        embeddings = model(views.flatten(0, 2)).unflatten(0, views.shape[:3])
        return two_view_group_loss(normalize(embeddings, dim=-1), temperature=0.5)

    return losses


def _mechanism(**changes: Any) -> Mechanism:
    numbers: dict[str, Any] = {
        "num_records_public": NUM_RECORDS,
        "sampling_prob": 0.4,
        "group_size": 4,
        "l2_clip_norm": 0.7,
        "noise_multiplier": 1.5,
        "num_steps": 3,
        "target_delta": 1e-3,
    }
    return Mechanism(**numbers | changes)


def _training(
    mechanism: Mechanism | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loader: DataLoader[Any] | None = None,
    **options: Any,
) -> PrivateTraining:
    model = _model() if model is None else model
    return PrivateTraining(
        mechanism or _mechanism(),
        model,
        optimizer or torch.optim.SGD(model.parameters(), lr=1.0),
        DataLoader(_Records(), batch_size=10) if loader is None else loader,
        **{"loss": _loss(model), "randomness": SeededNonPrivateRandomness(1)} | options,
    )


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in trainable_parameters(model)]).clone()


def _expected_step(mechanism: Mechanism, model: nn.Module, step: int) -> Tensor:
    """What the optimizer must be handed: clipped sum plus noise, over the divisor, group by group."""
    source = SeededNonPrivateRandomness(1)
    drawn = mechanism.group_stage().draw(
        NUM_RECORDS,
        sampling=source.generator(step, "sampling"),
        permutation=source.generator(step, "permutation"),
    )
    total = torch.zeros(num_trainable(model))
    for rows in drawn.rows[drawn.complete]:
        views = torch.stack([_Records()[int(row)] for row in rows])[None]
        gradients = torch.autograd.grad(_loss(model)(views).sum(), trainable_parameters(model))
        flat = torch.cat([each.flatten() for each in gradients])
        total += flat * min(1.0, mechanism.l2_clip_norm * (1 - 1e-4) / float(flat.norm()))
    noise = source.generator(step, "noise").standard_normal(len(total))
    return (total + mechanism.noise().std * torch.from_numpy(noise).float()) / mechanism.divisor


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("max_groups_at_once", [None, 1])
def test_step_hands_the_optimizer_clipped_sum_and_noise_over_the_divisor(
    num_workers: int, max_groups_at_once: int | None
) -> None:
    model = _model()
    loader = DataLoader(_Records(), batch_size=10, num_workers=num_workers)
    training = _training(model=model, loader=loader, max_groups_at_once=max_groups_at_once)
    num_groups = []
    for step, views in enumerate(training):
        assert isinstance(views, Tensor)
        before, expected = _flat(model), _expected_step(training.mechanism, model, step)
        training.step(views)
        torch.testing.assert_close(before - _flat(model), expected, rtol=1e-4, atol=1e-5)
        num_groups.append(len(views))
    assert training.num_steps_taken == 3
    assert min(num_groups) > 0


def test_group_with_an_empty_slot_is_of_zeros_and_contributes_nothing() -> None:
    model = _model()
    training = _training(_mechanism(num_records_public=NUM_RECORDS + 2, sampling_prob=0.9), model)
    num_incomplete = 0
    for step, views in enumerate(training):
        assert isinstance(views, Tensor)
        num_incomplete += int((views == 0).flatten(1).all(1).sum())
        before, expected = _flat(model), _expected_step(training.mechanism, model, step)
        training.step(views)
        torch.testing.assert_close(before - _flat(model), expected, rtol=1e-4, atol=1e-5)
    assert num_incomplete > 0


def test_empty_draw_is_a_step_of_noise_alone() -> None:
    mechanism = _mechanism(sampling_prob=0.08, num_steps=20)
    model = _model()
    training = _training(mechanism, model)
    shapes = set()
    for step, views in enumerate(training):
        assert isinstance(views, Tensor)
        before = _flat(model)
        training.step(views)
        shapes.add(views.shape[1:])
        if not len(views):
            noise = SeededNonPrivateRandomness(1).generator(step, "noise").standard_normal(len(before))
            expected = torch.from_numpy(noise * mechanism.noise().std).float() / mechanism.divisor
            torch.testing.assert_close(before - _flat(model), expected, rtol=1e-3, atol=1e-4)
            break
    else:
        pytest.fail("no draw was empty")
    assert shapes == {(4, VIEWS, DIM)}


def test_noise_has_the_standard_deviation_of_the_mechanism_and_no_other() -> None:
    """From the default, cryptographic source; half of it is rejected."""
    model = nn.Linear(400, 100, bias=False)
    training = _training(
        _mechanism(num_steps=1),
        model,
        loader=DataLoader(torch.zeros(NUM_RECORDS, VIEWS, 400)),  # type: ignore[arg-type]
        loss=lambda views: model(views).flatten(1).sum(1),  # no gradient where the records are zero
        randomness=None,
    )
    before = _flat(model)
    for views in training:
        training.step(views)
    drawn = (before - _flat(model)) * training.mechanism.divisor
    std = training.mechanism.noise_multiplier * training.mechanism.sensitivity
    share = float(drawn.std()) / std
    assert abs(share - 1) < 5 / math.sqrt(2 * len(drawn))
    assert not abs(share - 0.5) < 5 / math.sqrt(2 * len(drawn))


def test_epsilon_is_the_mechanisms_and_counts_the_steps_taken() -> None:
    training = _training()
    assert training.epsilon() == 0.0
    for taken, views in enumerate(training, start=1):
        training.step(views)
        assert training.epsilon() == training.mechanism.epsilon(taken)
    assert training.epsilon() == training.mechanism.epsilon() > training.epsilon(1)


def test_epsilon_without_noise_is_infinite() -> None:
    training = _training(_mechanism(noise_multiplier=0.0, l2_clip_norm=math.inf))
    for views in training:
        training.step(views)
    assert training.epsilon() == math.inf


def _assert_ended(training: PrivateTraining, model: nn.Module, num_steps: int) -> None:
    """It is charged for all that was drawn, holds no gradient, and neither draws nor steps."""
    before = _flat(model)
    assert training.num_steps_taken == num_steps
    assert training.epsilon() == training.mechanism.epsilon(num_steps)
    assert all(parameter.grad is None for parameter in model.parameters())
    for call in (lambda: next(iter(training)), lambda: training.step(torch.zeros(1, 4, VIEWS, DIM))):
        with pytest.raises(ConfigError, match="has ended with an exception"):
            call()
    assert torch.equal(before, _flat(model))
    assert "ε does not cover the failure itself" in training.statement()


def test_step_that_fails_in_the_optimizer_ends_the_training() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def broken(*_: object) -> None:
        raise RuntimeError("half of the weights moved")

    optimizer.register_step_pre_hook(broken)
    training = _training(model=model, optimizer=optimizer)
    with pytest.raises(RuntimeError, match="half of the weights"):
        training.step(next(iter(training)))
    _assert_ended(training, model, 1)


def test_step_that_fails_in_a_pass_ends_the_training_before_noise_is_drawn() -> None:
    """Otherwise whoever catches the exception drops the draws that hold a record."""
    model, calls = _model(), []

    def losses(views: Tensor) -> Tensor:
        calls.append(views)
        if fails:
            raise RuntimeError("out of memory")
        return _loss(model)(views)

    fails: list[int] = []
    training = _training(model=model, loss=losses)
    draws = iter(training)
    training.step(next(draws))
    views = next(draws)
    fails.append(1)
    model(views.flatten(0, 2)).sum().backward()  # for a log of the loop's author
    before = _flat(model)
    with pytest.raises(RuntimeError, match="out of memory"):
        training.step(views)
    assert torch.equal(before, _flat(model))
    fails.clear()
    _assert_ended(training, model, 2)
    with pytest.raises(ConfigError, match="has ended"):
        next(draws)


class _Broken(_Records):
    def __getitem__(self, row: int) -> Tensor:
        if row:  # the first one is read before anything is drawn
            raise OSError("a file is gone")
        return super().__getitem__(row)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_draw_whose_records_cannot_be_read_ends_the_training(num_workers: int) -> None:
    model = _model()
    training = _training(model=model, loader=DataLoader(_Broken(), batch_size=10, num_workers=num_workers))
    with pytest.raises(OSError, match="a file is gone"):
        next(iter(training))
    _assert_ended(training, model, 1)


def test_two_iterations_draw_no_more_than_all_steps() -> None:
    training = _training()
    first, second = iter(training), iter(training)
    training.step(next(first))
    for views in second:
        training.step(views)
    assert list(first) == []
    assert training.num_steps_taken == 3


def test_draw_is_used_exactly_once() -> None:
    training = _training()
    draws = iter(training)
    views = next(draws)
    training.step(views)
    with pytest.raises(ConfigError, match="each draw allows one step"):
        training.step(views)
    next(draws)
    with pytest.raises(ConfigError, match="followed by exactly one step"):
        next(draws)
    with pytest.raises(ConfigError, match="followed by exactly one step"):
        next(iter(training))


def test_last_draw_without_its_step_is_refused() -> None:
    training = _training(_mechanism(num_steps=1))
    with pytest.raises(ConfigError, match="followed by exactly one step"):
        for _ in training:
            pass


def test_groups_left_out_are_refused_and_the_draw_waits_for_its_step() -> None:
    training = _training()
    views = next(iter(training))
    assert isinstance(views, Tensor)
    with pytest.raises(ConfigError, match="all of them and no others"):
        training.step(views[1:])
    training.step(views)
    assert training.num_steps_taken == 1


def test_iteration_goes_on_after_a_break() -> None:
    training = _training()
    for views in training:
        training.step(views)
        break
    assert sum(training.step(views) is None for views in training) == 2
    assert list(training) == []


def test_steps_augmented_views_of_another_number_are_taken() -> None:
    training = _training()
    views = next(iter(training))
    assert isinstance(views, Tensor)
    training.step(torch.cat([views, views], dim=2))
    assert training.num_steps_taken == 1


@pytest.mark.parametrize("is_trained", [True, False])
def test_optimizer_with_foreign_parameters_is_refused(is_trained: bool) -> None:
    model, other = _model(), nn.Linear(2, 2).requires_grad_(is_trained)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0)
    with pytest.raises(ConfigError, match="not the model's"):
        _training(model=model, optimizer=optimizer)


def test_optimizer_of_a_part_of_the_trained_parameters_is_refused() -> None:
    model = _model()
    with pytest.raises(ConfigError, match="does not hold all trainable"):
        _training(model=model, optimizer=torch.optim.SGD(model[1].parameters(), lr=1.0))


def test_frozen_parameter_with_a_gradient_is_refused_and_without_one_stays() -> None:
    """An ordinary backward pass before the training has left a gradient of private records."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
    _loss(model)(torch.rand(2, 4, VIEWS, DIM)).sum().backward()
    model[0].requires_grad_(False)
    with pytest.raises(ConfigError, match="no private step has made"):
        _training(model=model, optimizer=optimizer)
    optimizer.zero_grad()
    training, before = _training(model=model, optimizer=optimizer), model[0].weight.clone()
    training.step(next(iter(training)))
    assert torch.equal(model[0].weight, before)


def _add_a_layer(optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    optimizer.add_param_group({"params": nn.Linear(3, 3).parameters()})
    return "not the model's"


def _freeze(optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    model[0].requires_grad_(False)  # type: ignore[operator,index]
    return "trainable parameters have changed since the training began"


def _leave_a_gradient(optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    model[0].bias.grad = torch.ones(4)  # type: ignore[operator,index]
    return "no private step has made"


@pytest.mark.parametrize("change", [_add_a_layer, _freeze, _leave_a_gradient])
def test_gradients_that_the_step_did_not_make_are_refused_between_steps(
    change: Callable[[torch.optim.Optimizer, nn.Module], str],
) -> None:
    model = _model()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training = _training(model=model, optimizer=optimizer)
    views, before = next(iter(training)), copy.deepcopy(model.state_dict())
    named = change(optimizer, model)
    with pytest.raises(ConfigError, match=named):
        training.step(views)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("change", [_add_a_layer, _leave_a_gradient])
def test_gradients_that_a_pass_leaves_in_the_optimizer_end_the_training(
    change: Callable[[torch.optim.Optimizer, nn.Module], str],
) -> None:
    model, is_due = _model(), [0]
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def losses(views: Tensor) -> Tensor:
        if is_due[0]:
            is_due[0] = 0
            change(optimizer, model)
        return _loss(model)(views)

    training = _training(model=model, optimizer=optimizer, loss=losses, mixes_no_records=True)
    views, is_due[0] = next(iter(training)), 1
    with pytest.raises(ConfigError, match=r"not the model's|no private step has made"):
        training.step(views)
    _assert_ended(training, model, 1)


def test_gradients_of_the_loops_own_are_replaced() -> None:
    """Such as those of a loss that is computed for a log."""
    model = _model()
    training = _training(model=model)
    for step, views in enumerate(training):
        _loss(model)(views).sum().backward()
        before, expected = _flat(model), _expected_step(training.mechanism, model, step)
        training.step(views)
        torch.testing.assert_close(before - _flat(model), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizer_that_the_step_cannot_serve_is_refused_before_a_draw(kind: Any) -> None:
    model = _model()
    with pytest.raises(ConfigError, match=kind.__name__):
        _training(model=model, optimizer=kind(list(model.parameters())))


class _Writes(nn.Module):
    """Rescales a weight in a forward pass, if an input is large: none that is made up is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, values: Tensor) -> Tensor:
        if values.abs().max() > 1e5:
            self.scale.data = self.scale.data.clamp(max=1.0)
        return values * self.scale


@pytest.mark.parametrize("mixes_no_records", [True, False])
def test_pass_that_writes_a_weight_is_refused_or_leaves_no_trace(mixes_no_records: bool) -> None:
    model = _model(_Writes())
    training = _training(model=model, mixes_no_records=mixes_no_records)
    views = next(iter(training)) * 1e9
    if not mixes_no_records:  # on copies
        training.step(views)
        assert model[1].scale.min() > 1.0 - 3 * training.mechanism.noise().std
        return
    with pytest.raises(ConfigError, match="only the optimizer may change") as raised:
        training.step(views)
    assert "scale" not in str(raised.value)
    _assert_ended(training, model, 1)


def test_pass_that_writes_to_another_network_of_the_loss_is_refused() -> None:
    """What it keeps of one step's records would decide gradients of the next."""
    model, teacher, is_due = _model(), _Remembers(), [0]

    def losses(views: Tensor) -> Tensor:
        keep = teacher(views[..., :4].flatten(0, 2)).mean() if is_due[0] else 1.0
        return _loss(model)(views) * keep

    training = _training(model=model, loss=losses, mixes_no_records=True)
    views, is_due[0] = next(iter(training)), 1
    with pytest.raises(ConfigError, match="only the optimizer may change"):
        training.step(views)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_layer_that_is_known_to_write_its_weights_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match="max_norm"):
        _training(model=_model(kind(4, 4, max_norm=1.0)))


def test_loss_is_tried_again_where_modes_changed() -> None:
    """The call can be mended: no pass has seen the draw."""
    model = _model(nn.Dropout(0.5)).eval()
    training = _training(model=model)
    views = next(iter(training))
    model.train()
    with pytest.raises(ConfigError, match="differs between two calls"):
        training.step(views)
    training.step((model.eval(), views)[1])
    assert training.num_steps_taken == 1


def test_processes_that_come_after_the_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = _training()
    views = next(draws := iter(training))
    for name, value in (
        ("is_initialized", True),
        ("get_rank", 0),
        ("get_world_size", 2),
        ("get_backend", ""),
    ):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    for call in (lambda: training.step(views), lambda: next(iter(training))):
        with pytest.raises(ConfigError, match=r"in which it began, of 1; got one of 2\. Call .*init_process"):
            call()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    training.step(views)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="got one of 2"):
        next(draws)


def test_torchrun_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would draw for itself."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "1")
    _training()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"started 2 processes, .* Call .*init_process_group"):
        _training()


class _Half(DataLoader[Tensor]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(_Records(), batch_size=10, sampler=SubsetRandomSampler(range(30))),
        DataLoader(_Records(), batch_size=10, sampler=SubsetRandomSampler(range(NUM_RECORDS))),
        DataLoader(
            _Records(), batch_size=10, sampler=WeightedRandomSampler(torch.ones(NUM_RECORDS), NUM_RECORDS)
        ),
        DataLoader(_Records(), batch_size=10, sampler=RandomSampler(_Records(), replacement=True)),
        DataLoader(_Records(), batch_size=10, sampler=RandomSampler(_Records(), num_samples=30)),
        DataLoader(_Records(), batch_size=10, sampler=SequentialSampler(range(30))),
        _Half(_Records(), batch_size=10),
    ],
)
def test_loader_that_draws_or_leaves_out_records_is_refused(loader: DataLoader[Any]) -> None:
    with pytest.raises(ConfigError, match="would be ignored"):
        _training(loader=loader)


def test_part_of_the_records_is_trained_on_alone() -> None:
    read = set()

    class Noting(_Records):
        def __getitem__(self, row: int) -> Tensor:
            read.add(row)
            return super().__getitem__(row)

    loader = DataLoader(Subset(Noting(), range(30)), batch_size=10, shuffle=True)
    training = _training(_mechanism(num_records_public=30, sampling_prob=1.0, num_steps=1), loader=loader)
    for views in training:
        training.step(views)
    assert training.mechanism.num_records_public == 30
    assert read
    assert max(read) < 30


def _padded(records: list[Tensor]) -> Tensor:
    longest = max(each.shape[1] for each in records)
    return torch.stack([nn.functional.pad(each, (0, longest - each.shape[1])) for each in records])


def _standardised(records: list[Tensor]) -> Tensor:
    return torch.stack(records) - torch.stack(records).mean(0) + torch.stack(records)[:1].mean()


def test_collation_sees_each_record_alone() -> None:
    """A collation that takes a mean over the batch would move every group."""
    training = _training(loader=DataLoader(_Records(), batch_size=10, collate_fn=_standardised))
    drawn = next(iter(training))
    assert isinstance(drawn, Tensor)
    rows = {round(float(each.mean()), 5) for each in drawn.flatten(0, 1)}
    assert rows <= {round(float(_Records()[row].mean()), 5) for row in range(NUM_RECORDS)}


class _OfTwoLengths(_Records):
    def __getitem__(self, row: int) -> Tensor:
        return super().__getitem__(row)[:, : DIM - (row > 0)]


class _OfTwoKinds(_Records):
    def __getitem__(self, row: int) -> Tensor:
        return super().__getitem__(row).to(torch.float64 if row else torch.float32)


@pytest.mark.parametrize("records", [_OfTwoLengths(), _OfTwoKinds()])
def test_records_of_several_shapes_end_the_training(records: Dataset[Tensor]) -> None:
    model = _model()
    training = _training(model=model, loader=DataLoader(records, batch_size=10, collate_fn=_padded))
    with pytest.raises(ConfigError, match=r"every record, .* must have the shapes and dtypes of the first"):
        next(iter(training))
    _assert_ended(training, model, 1)


def test_incomplete_group_contributes_nothing_though_zeros_have_a_gradient() -> None:
    """Biases: a network has a gradient at inputs of zeros, so they are no mask."""
    model = _model()
    mechanism = _mechanism(num_records_public=NUM_RECORDS + 2, sampling_prob=1.0, num_steps=1)
    training = _training(mechanism, model, loss=lambda views: 100 * model(views).flatten(1).sum(1))
    views = next(iter(training))
    assert isinstance(views, Tensor)
    incomplete = (views == 0).flatten(1).all(1)
    assert 0 < int(incomplete.sum()) < len(views)
    before = _flat(model)
    training.step(views)
    moved = (before - _flat(model)) * mechanism.divisor
    noise = SeededNonPrivateRandomness(1).generator(0, "noise").standard_normal(len(moved))
    total = moved - mechanism.noise().std * torch.from_numpy(noise).float()
    assert float(total.norm()) <= int((~incomplete).sum()) * mechanism.l2_clip_norm


@pytest.mark.parametrize(("sampling", "sensitivity"), [("groups", 0.7), ("records", 1.4)])
def test_noise_of_the_loop_is_that_of_what_is_sampled(sampling: str, sensitivity: float) -> None:
    model = nn.Linear(400, 100, bias=False)
    training = _training(
        _mechanism(num_steps=1, sampling=sampling),
        model,
        loader=DataLoader(torch.zeros(NUM_RECORDS, VIEWS, 400)),  # type: ignore[arg-type]
        loss=lambda views: model(views).flatten(1).sum(1),  # no gradient where the records are zero
        randomness=None,
    )
    before = _flat(model)
    training.step(next(iter(training)))
    drawn = (before - _flat(model)) * training.mechanism.divisor
    assert float(drawn.std()) == pytest.approx(1.5 * sensitivity, rel=5 / math.sqrt(2 * len(drawn)))


def test_statement_names_the_promise_and_the_guarantee() -> None:
    training = _training(mixes_no_records=True)
    assert "keeps every row of a batch in its place" in training.statement()
    assert "0 of 3 steps" in training.statement()
    assert "in its place" not in _training().statement()


def test_batch_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match="BatchNorm1d, which uses statistics across records"):
        _training(model=_model(nn.BatchNorm1d(4)))


def test_dropout_is_refused() -> None:
    with pytest.raises(ConfigError, match="differs between two calls"):
        _training(model=_model(nn.Dropout(0.5)))


class _Remembers(nn.Module):
    """Keeps a running mean without being a norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, values: Tensor) -> Tensor:
        self.mean += values.detach().mean(0)
        return values


def test_written_buffer_is_refused_and_restored() -> None:
    model = _model(_Remembers())
    with pytest.raises(ConfigError, match=r"writes to '1\.mean'"):
        _training(model=model)
    assert not model[1].mean.any()


@pytest.mark.parametrize(
    ("mixing", "named"),
    [
        (lambda own: own - own.roll(1, 0), "changed when another group changed"),
        (lambda own: own.mean().expand(len(own)), "changed when another group changed"),
        (lambda own: own / len(own), "depends on the number of groups"),
        (lambda own: own.sum(), "one number per group"),
    ],
)
def test_loss_that_mixes_groups_is_refused(mixing: Callable[[Tensor], Tensor], named: str) -> None:
    model = _model()
    own = _loss(model)
    with pytest.raises(ConfigError, match=named):
        _training(model=model, loss=lambda views: mixing(own(views)))


class _Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(VIEWS, DIM)])


@pytest.mark.parametrize(
    ("records", "named"),
    [
        (_Stream(), "must have a length"),
        ([], "it is empty"),
        ([{"views": torch.zeros(2, DIM)}] * NUM_RECORDS, "must be a tensor"),
        ([torch.zeros(2, DIM)] * (NUM_RECORDS + 1), "more records than num_records_public"),
        ([torch.zeros(2, DIM)] * 9, "slots are empty"),
    ],
)
def test_records_that_cannot_be_drawn_are_refused(records: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _training(loader=DataLoader(records))


def test_method_without_disjoint_groups_is_refused() -> None:
    mechanism = _mechanism(method="dp_sgd", group_size="batch", batch_cap=40)
    with pytest.raises(ConfigError, match="does not clip one loss per disjoint group"):
        _training(mechanism)


def test_shards_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shards must be 1, .*; got 2\. Use `trainers\.train`"):
        _training(_mechanism(num_shards=2))


class _Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return NUM_RECORDS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return _Records()[row], torch.tensor([[row % 2, 1, 0]])


def test_records_of_two_tensors_come_as_a_tuple() -> None:
    model = _model()

    def losses(pairs: tuple[Tensor, Tensor]) -> Tensor:
        views, tokens = pairs
        return model(views).flatten(1).sum(1) * (1 + tokens.flatten(1).float().mean(1))

    training = _training(model=model, loader=DataLoader(_Pairs(), batch_size=10), loss=losses)
    for views, tokens in training:
        assert views.shape[1:] == (4, VIEWS, DIM)
        assert tokens.shape == (len(views), 4, 1, 3)
        training.step((views, tokens))
    assert training.num_steps_taken == 3


def _make(**changes: Any) -> PrivateTraining:
    model = changes.pop("model", None) or _model()
    numbers = {"group_size": 4, "num_steps": 10, "target_epsilon": 3.0, "target_delta": 1e-3}
    return make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        changes.pop("loader", DataLoader(_Records(), batch_size=12)),
        **{"loss": _loss(model)} | numbers | changes,
    )


def test_make_private_meets_its_target_with_the_loaders_batch_size() -> None:
    mechanism = _make().mechanism
    assert mechanism.expected_batch_size == pytest.approx(12)
    assert 2.9 < mechanism.epsilon() <= 3.0
    assert mechanism.guarantee_label == "proven"


def test_make_private_keeps_a_given_noise_multiplier() -> None:
    assert _make(target_epsilon=None, noise_multiplier=0.8).mechanism.noise_multiplier == 0.8


def test_make_private_declares_a_number_of_records_and_its_delta() -> None:
    mechanism = _make(num_records_public=62, target_delta=None).mechanism
    assert mechanism.sampling_prob == pytest.approx(12 / 62)
    assert mechanism.target_delta == pytest.approx(1 / (62 * np.log(62)))
    assert mechanism.neighboring_relation == ADD_OR_REMOVE_ONE


def test_make_private_without_a_declared_number_protects_against_zeroing_out() -> None:
    assert _make().mechanism.neighboring_relation == ZERO_OUT_ONE


@pytest.mark.parametrize(("sampling", "sensitivity"), [(None, 0.5), ("groups", 0.5), ("records", 1.0)])
def test_make_private_samples_what_is_asked_for(sampling: str | None, sensitivity: float) -> None:
    assert _make(sampling=sampling, l2_clip_norm=0.5).mechanism.sensitivity == sensitivity


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target_epsilon": None}, "one of target_epsilon and noise_multiplier must be set; got None"),
        ({"noise_multiplier": 1.0}, "exactly one of .* must be set; got .* and 1.0"),
        ({"loader": DataLoader(_Records(), batch_size=None)}, "must have a batch_size"),
        ({"max_groups_at_once": 0}, "at least 1"),
        ({"max_groups_at_once": 1.5}, "max_groups_at_once must be a whole number"),
        ({"group_size": 0}, "group_size"),
        ({"num_steps": -8}, "num_steps must be at least 1"),
        ({"num_steps": "8"}, "num_steps must be a whole number; got '8'"),
        ({"num_steps": 2.5}, "num_steps must be a whole number; got 2.5"),
        ({"num_records_public": math.nan}, "num_records_public must be a whole number"),
        ({"target_epsilon": "8"}, "target_epsilon must be a number; got '8'"),
        ({"l2_clip_norm": 1e-25}, "at least 1e-10"),
        ({"num_records_public": 30, "sampling": "records"}, "more records than num_records_public = 30"),
    ],
)
def test_make_private_refuses(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _make(**changes)


def test_whole_batch_is_one_group() -> None:
    training = _training(_mechanism(group_size="batch"))
    for views in training:
        assert isinstance(views, Tensor)
        assert len(views) == 1
        training.step(views)


@pytest.mark.parametrize("num_steps", [3 * 400 / 40, np.int64(30), np.float32(30)])
def test_make_private_takes_whole_numbers_as_arithmetic_leaves_them(num_steps: Any) -> None:
    training = _make(num_steps=num_steps, group_size=np.int32(4), num_records_public=np.float64(NUM_RECORDS))
    assert training.mechanism == _make(num_steps=30, group_size=4, num_records_public=NUM_RECORDS).mechanism
    assert type(training.mechanism.num_steps) is int


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("mixes_no_records", [True, False])
def test_gradient_whose_order_of_adding_follows_all_indices_is_no_mixing(
    mode: str, mixes_no_records: bool
) -> None:
    """`nn.EmbeddingBag` adds the gradient of its table in the order of the whole batch's indices."""
    words = [
        torch.randint(0, 11, (VIEWS, 5), generator=torch.Generator().manual_seed(row)) for row in range(60)
    ]
    model = nn.Sequential(nn.EmbeddingBag(11, 6, mode=mode), nn.Linear(6, 4))
    loader = DataLoader(words, batch_size=12)  # type: ignore[arg-type]
    model_loss = _loss(model)
    training = _make(loader=loader, loss=model_loss, mixes_no_records=mixes_no_records, model=model)
    training.step(next(iter(training)))
    assert training.num_steps_taken == 1


def test_learning_rate_schedule_is_no_closure() -> None:
    """A scheduler wraps the `step` of the optimizer that it is given."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    training = _training(model=model, optimizer=optimizer)
    for views in training:
        training.step(views)
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


class DistributedDataParallel(nn.Module):
    """Has only the name: the class itself needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, values: Tensor) -> Tensor:
        return self.module(values)  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, nn.DataParallel])
@pytest.mark.parametrize("is_in_loss", [True, False])
def test_wrapper_that_sums_gradients_is_refused_by_name(wrapper: Any, is_in_loss: bool) -> None:
    model = _model()
    wrapped = wrapper(model)
    with pytest.raises(
        ConfigError, match=rf"{wrapper.__name__} sums or splits gradients.* network inside it"
    ):
        _training(model=model if is_in_loss else wrapped, loss=_loss(wrapped if is_in_loss else model))


@pytest.mark.parametrize("mixes_no_records", [True, False])
def test_autocast_in_the_loss_takes_the_steps_up_to_its_rounding(
    mixes_no_records: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients in float32, clipped to C; groups pass together although their passes round."""
    sums, is_cast = list[Tensor](), list[bool]()
    for dtype in (torch.float32, torch.bfloat16):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def losses(views: Tensor, model: nn.Module = model, dtype: torch.dtype = dtype) -> Tensor:
            is_on = dtype != torch.float32 and not is_low_precision_off()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                embeddings = model(views.flatten(0, 2)).float()
            is_cast.append(is_on)
            return two_view_group_loss(
                normalize(embeddings.unflatten(0, views.shape[:3]), dim=-1), temperature=0.05
            )

        training = _training(
            _mechanism(noise_multiplier=0.0, l2_clip_norm=0.1),
            model,
            optimizer,
            loss=losses,
            mixes_no_records=mixes_no_records,
        )
        views = next(iter(training))
        before = _flat(model)
        with torch.autocast("cpu", torch.float16):  # around a step it has no effect
            training.step(views)
        sums.append((before - _flat(model)) * training.mechanism.divisor)
        assert float(sums[-1].norm()) <= len(views) * 0.1
        assert any(is_cast) == (dtype == torch.bfloat16)
    assert 0 < float((sums[0] - sums[1]).norm()) < 0.05 * float(sums[0].norm())
    assert not caplog.records  # no way is slower


@pytest.mark.parametrize("mixes_no_records", [True, False])
def test_compiled_model_takes_the_same_steps(mixes_no_records: bool) -> None:
    weights = []
    for is_compiled in (False, True):
        model = _model()
        network = torch.compile(model, backend="aot_eager") if is_compiled else model
        training = _training(model=network, loss=_loss(network), mixes_no_records=mixes_no_records)
        for views in training:
            training.step(views)
        weights.append(_flat(model))
    torch.testing.assert_close(weights[0], weights[1])


def test_accumulated_groups_give_the_sum_of_one_pass() -> None:
    weights = []
    for at_once in (None, 1, 2):
        model = _model()
        training = _training(model=model, mixes_no_records=True, max_groups_at_once=at_once)
        for views in training:
            training.step(views)
        weights.append(_flat(model))
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0])


def test_draw_of_two_threads_has_one_step() -> None:
    model, could_enter = _model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training = _training(model=model, optimizer=optimizer)
    views = next(iter(training))
    with ThreadPoolExecutor(2) as both:
        optimizer.register_step_pre_hook(
            lambda *_: could_enter.append(
                ThreadPoolExecutor(1).submit(training._lock.acquire, False).result()
            )
        )
        calls = [both.submit(training.step, views) for _ in range(2)]
    assert could_enter == [False]
    assert sum(call.exception() is None for call in calls) == 1


class _ReadsAhead(_Records):
    """Takes all rows of a draw at once, and lets them decide about each other."""

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        return [self[row] + len(rows) for row in rows]


def test_records_are_read_one_at_a_time() -> None:
    drawn = next(iter(_training(loader=DataLoader(_ReadsAhead(), batch_size=10))))
    assert isinstance(drawn, Tensor)
    assert drawn.max() <= 1


class _Grows(_Records):
    count = NUM_RECORDS

    def __len__(self) -> int:
        return self.count


def test_data_set_that_grew_beyond_what_is_declared_is_not_drawn_from() -> None:
    records, model = _Grows(), _model()
    loader = DataLoader(records, batch_size=10)
    training = _training(_mechanism(sampling="records"), model, loader=loader)
    records.count += 1
    with pytest.raises(ConfigError, match="more records than num_records_public"):
        next(iter(training))
    _assert_ended(training, model, 1)


def test_batch_sampler_is_refused() -> None:
    loader = DataLoader(_Records(), batch_sampler=[[0, 1]])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no batch_sampler"):
        _training(loader=loader)


class _LowRank(nn.Module):
    """A branch that a zero initialisation hides."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch, self.back = branch, nn.Linear(4, 4, bias=False)
        nn.init.zeros_(self.back.weight)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.back(self.branch(values))


class _Mixes(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0)


@pytest.mark.parametrize(
    ("branch", "named"), [(nn.Dropout(0.5), "differs between two calls"), (_Mixes(), "another group changed")]
)
def test_branch_that_a_zero_initialisation_hides_is_tried(branch: nn.Module, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _training(model=_model(_LowRank(branch)))


def test_buffer_that_changed_between_steps_is_refused_before_a_pass() -> None:
    model = _model(_Remembers()).eval()
    training = _training(model=model, loss=lambda views: _loss(nn.Sequential(model[0], model[2]))(views))
    views = next(iter(training))
    model[1].mean.fill_(1.0)  # type: ignore[operator,union-attr]
    with pytest.raises(ConfigError, match=r"'1\.mean' of the model has changed"):
        training.step(views)
    model[1].mean.zero_()  # type: ignore[operator,union-attr]
    training.step(views)


def test_loss_that_fails_on_made_up_groups_is_named() -> None:
    model = _model()

    def losses(views: Tensor) -> Tensor:
        assert views.min() >= 0, "pixels are not negative"
        return _loss(model)(views)

    with pytest.raises(ConfigError, match="AssertionError: pixels are not negative"):
        _training(model=model, loss=losses)


def test_whole_numbers_that_are_labels_do_not_end_a_training_of_many_words() -> None:
    """The engine's self-check takes numbers of the vocabulary first."""
    words = [(torch.randint(0, 50, (1, 4)), torch.tensor([[row % 2]])) for row in range(NUM_RECORDS)]
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(16, 2))

    def losses(pairs: tuple[Tensor, Tensor]) -> Tensor:
        tokens, labels = pairs
        errors = nn.functional.cross_entropy(model(tokens.flatten(0, 2)), labels.flatten(), reduction="none")
        return errors.unflatten(0, tokens.shape[:2]).sum(1)

    loader = DataLoader(words, batch_size=10)  # type: ignore[arg-type,var-annotated]
    training = _training(model=model, loader=loader, loss=losses, mixes_no_records=True)
    for pairs in training:
        training.step(pairs)
    assert training.num_steps_taken == 3


def test_mechanism_of_a_training_is_not_exchanged() -> None:
    """ε would be stated of one mechanism, and the noise drawn of another."""
    training = _training()
    with pytest.raises(AttributeError):
        training.mechanism = _mechanism()  # type: ignore[misc]
