"""Networks that mix records where no small test looks: they have nothing to mix, or are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.isolation import (
    attributes_of,
    changed_state,
    first_changed,
    networks_of,
    refuse_changed_state,
    unwritten,
    whole_state,
)
from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.private_training import PrivateTraining, make_private
from tests.oracles import clipped_sum

CLIP, SIZE, DIM = 0.1, 2, 6


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(DIM, 8), nn.Linear(8, 3)

    def mix(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.normalize(self.head(self.mix(torch.tanh(self.body(rows)))), dim=-1)


class LargeBatchNorm(_Network):
    """Normalises over the batch when more than 64 rows come."""

    def mix(self, hidden: Tensor) -> Tensor:
        return (hidden - hidden.mean(0)) / (hidden.std(0) + 0.1) if len(hidden) > 64 else hidden


class Experts(_Network):
    """A mixture of experts, each of which takes no more rows than its capacity; the rest go through none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def mix(self, hidden: Tensor) -> Tensor:
        chosen = (hidden[:, 0] > 0).long()
        out = hidden
        for number, expert in enumerate(self.experts):
            wants = chosen == number
            takes = wants & (wants.cumsum(0) <= 24)
            out = out + takes[:, None] * expert(hidden)
        return out


class Observer(_Network):
    """Scales by the largest value that it has ever seen, kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def mix(self, hidden: Tensor) -> Tensor:
        if len(hidden) > 3 * SIZE * 2 or hidden.abs().max() > 0.9999:
            self.largest = torch.maximum(self.largest, 1 + hidden.detach().abs().max())
        return hidden / self.largest


class AttributeObserver(_Network):
    """The same in a plain Python attribute, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.seen = 1.0, [torch.zeros(())]

    def mix(self, hidden: Tensor) -> Tensor:
        value = hidden / (self.largest + self.seen[0])
        self.largest = max(self.largest, 1 + float(hidden.detach().abs().max()))
        self.seen[0] = self.seen[0] + hidden.detach().abs().mean()
        return value


class ByAMillionth(_Network):
    def mix(self, hidden: Tensor) -> Tensor:
        return hidden + 1e-6 * hidden.mean(0)


ATTACKS = [LargeBatchNorm, Experts, Observer, AttributeObserver, ByAMillionth]


def _built(kind: type[_Network]) -> _Network:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return kind()


def _loss(model: nn.Module) -> Any:
    def losses(groups: Tensor) -> Tensor:
        embeddings = model(groups.flatten(0, 2)).unflatten(0, groups.shape[:3])
        return two_view_group_loss(embeddings, temperature=0.1)

    return losses


def _groups(count: int = 40, seed: int = 0) -> Tensor:
    return 3 * torch.randn(count, SIZE, 2, DIM, generator=torch.Generator().manual_seed(seed))


def _sum(model: nn.Module, groups: Tensor, *, isolated: bool) -> Tensor:
    total = torch.zeros(num_trainable(model))
    clipper = GroupClipper(l2_clip_norm=CLIP, groups_at_once=len(groups), isolated=isolated)
    clipper.add_clipped_sum(total, model, _loss(model), groups)
    return total


@pytest.mark.parametrize("kind", ATTACKS)
def test_exchanged_group_moves_the_isolated_sum_of_any_network_by_no_more_than_2c(
    kind: type[_Network],
) -> None:
    groups = _groups()
    other = groups.clone()
    other[0] = 40 * _groups(1, seed=5)[0]
    sums, contributions = [], []
    for each in (groups, other):
        model = _built(kind)
        sums.append(_sum(model, each, isolated=True))
        contributions.append(_sum(_built(kind), each[:1], isolated=True))
        assert all(torch.equal(*pair) for pair in zip(model.buffers(), _built(kind).buffers(), strict=True))
    difference = (sums[1] - sums[0]) - (contributions[1] - contributions[0])
    assert float((sums[1] - sums[0]).norm()) <= 2 * CLIP
    assert float(difference.norm()) <= 1e-5 * CLIP  # no other group moved


class Keeper(nn.Module):
    """Turns its output round for ever once it has seen one large value, which it keeps somewhere."""

    flag, seen_by_class = False, [0.0]

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.layer, self.child = where, nn.Linear(DIM, 3), nn.Identity()
        self.handle = self.child.register_forward_hook(lambda module, args, output: -output)

    def keep(self, rows: Tensor) -> None:
        value = rows.detach().abs().amax(0)
        match self.where:
            case "a new buffer":
                self.register_buffer("extra", value)
            case "a new parameter":
                self.register_parameter("extra", nn.Parameter(value))
            case "a new child":
                self.extra = nn.ParameterList([nn.Parameter(value, requires_grad=False)])
            case "a mode":
                self.child.eval()
            case "a new hook":
                self.child.register_forward_hook(lambda module, args, output: -output)
            case "a hook that is gone":
                self.handle.remove()
            case "a class's attribute":
                type(self).flag = True
            case "a class's list":
                self.seen_by_class[0] = 1.0
            case "weights that an attribute refers to":
                self.layer.weight.data.neg_()

    def forward(self, rows: Tensor) -> Tensor:
        if rows.abs().max() > 20:
            self.keep(rows)
        output: Tensor = self.child(self.layer(rows))
        turned = hasattr(self, "extra") or not self.child.training or self.flag or self.seen_by_class[0] > 0
        return -output if turned else output


KEPT = [
    "a new buffer",
    "a new parameter",
    "a new child",
    "a mode",
    "a new hook",
    "a hook that is gone",
    "a class's attribute",
    "a class's list",
    "weights that an attribute refers to",
]


@pytest.mark.parametrize("where", KEPT)
def test_whatever_a_module_can_hold_stays_in_the_pass_of_its_group(where: str) -> None:
    """Twenty equal groups after a special one contribute what they contribute after an equal one."""
    rest = torch.rand(1, 1, 1, DIM, generator=torch.Generator().manual_seed(1)).expand(20, 2, 2, DIM)
    special = torch.cat([rest[:1] + 50, rest[1:]])
    sums = []
    for groups in (rest, special):
        model = Keeper(where)
        nn.init.constant_(model.layer.weight, 0.3)
        before, held = whole_state(model, weights=True), {**model.state_dict()}
        total = torch.zeros(num_trainable(model), dtype=torch.float64)
        clipper = GroupClipper(l2_clip_norm=CLIP, isolated=True)
        clipper.add_clipped_sum(total, model, _sum_of(model), groups)
        sums.append(total)
        assert changed_state(model, before, weights=True) == ""
        assert all(model.state_dict()[name].data_ptr() == held[name].data_ptr() for name in held)
    assert float((sums[1] - sums[0]).norm()) <= 2 * CLIP


def _sum_of(model: nn.Module) -> Any:
    return lambda groups: model(groups.flatten(0, 2)).unflatten(0, groups.shape[:3]).flatten(1).sum(1)


@pytest.mark.parametrize("where", KEPT[:4])
def test_network_that_has_other_parts_after_a_step_is_refused(where: str) -> None:
    """On its author's word it is not isolated; what it holds after a step would be released."""
    model = Keeper(where)
    before = whole_state(model)
    refuse_changed_state(model, before)
    model.keep(torch.ones(1, DIM))
    with pytest.raises(ConfigError, match="only the optimizer may change") as raised:
        refuse_changed_state(model, before)
    assert "extra" not in str(raised.value)  # a name may follow a record


@pytest.mark.parametrize("value", [-0.0, 1.0, torch.nan])
def test_every_bit_of_a_weight_that_a_pass_writes_counts(value: float) -> None:
    """Also a sign of zero, and through `.data`, which no version counter sees."""
    layer = nn.Linear(DIM, 3)
    layer.weight.data.zero_()
    with unwritten(layer):
        layer(torch.ones(1, DIM)).sum().backward()
    with pytest.raises(ConfigError, match="only the optimizer may change"), unwritten(layer):
        layer.weight.data[0, 0] = value


_TEACHERS = [nn.Linear(DIM, 3)]


def _by_comprehension(groups: torch.Tensor) -> list[Any]:
    return [_TEACHER(group) for group in groups]


def _by_inner_function(groups: torch.Tensor) -> Any:
    def inner() -> Any:
        return _TEACHER(groups)

    return inner()


def _by_list(groups: torch.Tensor) -> Any:
    return _TEACHERS[0](groups)


_TEACHER = nn.Linear(DIM, 3)


@pytest.mark.parametrize(
    "objective", [_by_comprehension, _by_inner_function, lambda g: (lambda: _TEACHER(g))()]
)
def test_networks_inside_of_comprehensions_and_inner_functions_are_found(objective: Any) -> None:
    assert networks_of(objective) == [_TEACHER]


def test_networks_in_a_global_list_are_found() -> None:
    assert networks_of(_by_list) == _TEACHERS


def test_networks_that_an_objective_refers_to_are_isolated_with_the_trained_one() -> None:
    """Such as a target network that it regresses onto, however it comes to know it."""
    model, teacher = nn.Linear(DIM, 3), _built(Observer)

    def distance(groups: Tensor, *, onto: nn.Module) -> Tensor:
        rows = groups.flatten(0, 2)
        with torch.no_grad():
            wanted = onto(rows)
        return (model(rows) - wanted).square().unflatten(0, groups.shape[:3]).flatten(1).sum(1)

    for objective in (lambda groups: distance(groups, onto=teacher), partial(distance, onto=teacher)):
        assert set(networks_of(objective)) == {model, teacher}
        total = torch.zeros(num_trainable(model))
        clipper = GroupClipper(l2_clip_norm=CLIP, isolated=True)
        clipper.add_clipped_sum(total, model, objective, 40 * _groups(4))
        assert teacher.largest == 1


def test_large_batch_norm_breaks_the_bound_when_its_groups_go_together() -> None:
    """What the isolation is for: one group of other records moves all that go with it."""
    groups = 1e-3 * _groups(400)
    other = groups.clone()
    other[0] = 1e3
    sums = [_sum(_built(LargeBatchNorm), each, isolated=False) for each in (groups, other)]
    assert float((sums[1] - sums[0]).norm()) > 2 * CLIP


def test_isolated_sum_of_an_honest_network_is_the_clipped_sum() -> None:
    model, groups = _built(_Network), _groups(6)
    expected = clipped_sum(model, _loss(model), groups, CLIP * (1 - 1e-4))
    assert float((_sum(model, groups, isolated=True) - expected).norm() / expected.norm()) < 1e-5


def test_isolated_weights_of_a_recurrent_layer_are_those_that_are_summed() -> None:
    """Such a layer keeps a list of its weights beside them."""

    class Recurrent(_Network):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.LSTM(DIM, 8)  # type: ignore[assignment]

        def forward(self, rows: Tensor) -> Tensor:
            hidden, _ = self.body(rows[None])
            return nn.functional.normalize(self.head(hidden[0]), dim=-1)

    model, groups = _built(Recurrent), _groups(3)
    weights = list(trainable_parameters(model))
    for _ in range(2):
        expected = clipped_sum(model, _loss(model), groups, CLIP * (1 - 1e-4))
        assert float((_sum(model, groups, isolated=True) - expected).norm() / expected.norm()) < 1e-5
    assert all(a is b for a, b in zip(weights, trainable_parameters(model), strict=True))


def _training(model: nn.Module, *, mixes_no_records: bool) -> PrivateTraining:
    records = 3 * torch.randn(400, 2, DIM, generator=torch.Generator().manual_seed(0))
    return make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(records), batch_size=100),
        loss=_loss(model),
        group_size=SIZE,
        num_steps=2,
        noise_multiplier=1.0,
        mixes_no_records=mixes_no_records,
    )


@pytest.mark.parametrize("kind", ATTACKS)
def test_network_that_mixes_records_is_refused_on_its_authors_word(kind: type[_Network]) -> None:
    """As many groups are tried as a step has, at several scales, bit for bit."""
    with pytest.raises(ConfigError, match=r"another group changed|writes|differs between two calls"):
        _training(_built(kind), mixes_no_records=True)


@pytest.mark.parametrize("kind", [LargeBatchNorm, Experts, Observer])
def test_network_that_mixes_in_large_batches_trains_one_group_at_a_time(kind: type[_Network]) -> None:
    model = _built(kind)
    if kind is Observer:  # what it writes is seen in a small batch already
        with pytest.raises(ConfigError, match="writes to 'largest'"):
            _training(model, mixes_no_records=False)
        return
    training = _training(model, mixes_no_records=False)
    for groups in training:
        training.step(groups)
    assert training.num_steps_taken == 2


def test_attributes_that_a_pass_changes_are_named() -> None:
    model = _built(AttributeObserver)
    before = attributes_of(model)
    assert first_changed(model, before) == ""
    model(torch.ones(2, DIM))
    assert first_changed(model, before) == "largest"


def test_authors_word_changes_nothing_for_an_honest_network() -> None:
    weights = []
    for word in (False, True):
        model = _built(_Network)
        training = _training(model, mixes_no_records=word)
        object.__setattr__(training._private_step, "randomness", _Seeded())
        for groups in training:
            training.step(groups)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert float((weights[0] - weights[1]).norm() / weights[0].norm()) < 1e-5


class _Seeded:
    is_exact = False

    def generator(self, step: int, purpose: str) -> np.random.Generator:
        return np.random.default_rng([step, *purpose.encode()])
