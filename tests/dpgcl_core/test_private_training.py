"""A private training in a loop of one's own: what a step adds, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.numbers import ADD_OR_REMOVE_ONE, ZERO_OUT_ONE
from dpgcl_core.noise.sources import SeededNonPrivateRandomness
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


def test_step_that_fails_in_the_optimizer_is_charged() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def broken(*_: object) -> None:
        raise RuntimeError("half of the weights moved")

    optimizer.register_step_pre_hook(broken)
    training = _training(model=model, optimizer=optimizer)
    with pytest.raises(RuntimeError, match="half of the weights"):
        training.step(next(iter(training)))
    assert training.num_steps_taken == 1


def test_draw_is_used_exactly_once() -> None:
    training = _training()
    draws = iter(training)
    views = next(draws)
    training.step(views)
    with pytest.raises(ConfigError, match="one draw is for one step"):
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


def test_optimizer_with_foreign_parameters_is_refused() -> None:
    model, other = _model(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0)
    with pytest.raises(ConfigError, match="not the model's"):
        _training(model=model, optimizer=optimizer)


def test_batch_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match="BatchNorm1d, which uses statistics across records"):
        _training(model=_model(nn.BatchNorm1d(4)))


def test_dropout_is_refused() -> None:
    with pytest.raises(ConfigError, match="another one every time"):
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
    with pytest.raises(ConfigError, match=r"writes '1\.mean'"):
        _training(model=model)
    assert not model[1].mean.any()


@pytest.mark.parametrize(
    ("mixing", "named"),
    [
        (lambda own: own - own.roll(1, 0), "moved when another group changed"),
        (lambda own: own.mean().expand(len(own)), "moved when another group changed"),
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
        _training(loader=DataLoader(records, sampler=None if isinstance(records, _Stream) else [0]))


def test_method_without_disjoint_groups_is_refused() -> None:
    mechanism = _mechanism(method="dp_sgd", group_size="batch", batch_cap=40)
    with pytest.raises(ConfigError, match="does not clip disjoint groups"):
        _training(mechanism)


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
    model = _model()
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
        ({"target_epsilon": None}, "target_epsilon or noise_multiplier"),
        ({"noise_multiplier": 1.0}, "not both"),
        ({"loader": DataLoader(_Records(), batch_size=None)}, "must have a batch_size"),
        ({"max_groups_at_once": 0}, "at least 1"),
        ({"group_size": 0}, "group_size"),
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
