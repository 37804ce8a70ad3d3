"""`dp_sgd` and `group_clip` against slow oracles, and against their claimed sensitivities."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.methods.baselines import path_clipping
from dpgcl_core.methods.baselines.path_clipping import (
    OWN_PATH,
    FullBatchGroupClipping,
    PathClipping,
    record_info_nce,
)
from tests.dpgcl_core.adversary import LinearEncoder, clip_float64, embed_of, farthest
from tests.dpgcl_core.models import SharedLayer, TinyEncoder

TAU = 0.3
MARGIN = 1 - 1e-4  # of the engine's clip factor


def _model(kind: type[nn.Module] = TinyEncoder) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind()


def _images(*leading: int, seed: int = 0) -> Tensor:
    return torch.randn(*leading, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def _paths(l2_clip_norm: float, *, cap: int = 64) -> PathClipping:
    return PathClipping(l2_clip_norm=l2_clip_norm, batch_cap=cap, temperature=TAU)


def _groups(l2_clip_norm: float, *, cap: int = 64) -> FullBatchGroupClipping:
    return FullBatchGroupClipping(l2_clip_norm=l2_clip_norm, num_groups_cap=cap, temperature=TAU)


def _sum(rule: PathClipping | FullBatchGroupClipping, model: nn.Module, inputs: Tensor) -> Tensor:
    total = torch.zeros(num_trainable(model))
    rule.add_clipped_sum(total, model, embed_of(model), inputs)
    return total.double()


def _flat(gradients: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients])


def _slow_term(z: Tensor, i: int, temperature: float) -> Tensor:
    """ℓ_i of embeddings `[records, views, dim]`, pair by pair."""
    denominator = sum(torch.exp(z[i, 0] @ key / temperature) for j in range(len(z)) for key in z[j, 1:])
    return -torch.log(torch.exp(z[i, 0] @ z[i, 1] / temperature) / denominator)


def _slow_path_sum(model: nn.Module, records: Tensor, l2_clip_norm: float, *, graph: bool = False) -> Tensor:
    """Σ_i Clip_C of the loss's gradient, where the weights embed record i alone and a copy all others."""
    parameters = trainable_parameters(model)
    total = torch.zeros(num_trainable(model), dtype=torch.float64)
    constant = embed_of(copy.deepcopy(model).requires_grad_(False))(records[None])[0]
    for own in range(len(records)):
        z = torch.stack(
            [*constant[:own], embed_of(model)(records[own][None, None])[0, 0], *constant[own + 1 :]]
        )
        loss = sum(_slow_term(z, i, TAU) for i in range(len(records)))
        gradient = _flat(torch.autograd.grad(loss, parameters, create_graph=graph))
        total = total + clip_float64(gradient, l2_clip_norm)
    return total


def _slow_group_sum(
    model: nn.Module, records: Tensor, groups: list[list[int]], l2_clip_norm: float, *, graph: bool = False
) -> Tensor:
    """Σ_G Clip_C(∇ Σ_{i∈G} ℓ_i) through every record, in float64; a group is a list of rows."""
    parameters = trainable_parameters(model)
    total = torch.zeros(num_trainable(model), dtype=torch.float64)
    for group in groups:
        z = embed_of(model)(records[None])[0]
        loss = sum(_slow_term(z, i, TAU) for i in group)
        gradient = _flat(torch.autograd.grad(loss, parameters, create_graph=graph))
        total = total + clip_float64(gradient, l2_clip_norm)
    return total


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_record_terms_sum_to_the_group_loss_of_the_batch() -> None:
    z = nn.functional.normalize(torch.randn(5, 4, 6, dtype=torch.float64), dim=-1)
    expected = two_view_group_loss(z[None], temperature=TAU)[0]
    assert record_info_nce(z, temperature=TAU).sum().item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("kind", [TinyEncoder, SharedLayer])
@pytest.mark.parametrize("l2_clip_norm", [0.3, 100.0])
def test_path_sum_equals_oracle(kind: type[nn.Module], l2_clip_norm: float) -> None:
    model, records = _model(kind), _images(5, 3)
    expected = _slow_path_sum(model.double(), records.double(), l2_clip_norm * MARGIN)
    assert _relative_error(_sum(_paths(l2_clip_norm), model.float(), records[None]), expected) < 1e-4


def test_unclipped_paths_add_up_to_the_gradient_of_the_batch_loss() -> None:
    model, records = _model(), _images(1, 5, 3)
    loss = two_view_group_loss(embed_of(model)(records), temperature=TAU).sum()
    expected = _flat(torch.autograd.grad(loss, trainable_parameters(model))).double()
    for l2_clip_norm in (1e6, math.inf):
        assert _relative_error(_sum(_paths(l2_clip_norm), model, records), expected) < 1e-5


@pytest.mark.parametrize(("num", "size"), [(3, 1), (3, 2), (6, 1), (6, 2)])  # embeddings have 4 numbers
@pytest.mark.parametrize("l2_clip_norm", [0.3, 100.0])
def test_full_batch_group_sum_equals_oracle(num: int, size: int, l2_clip_norm: float) -> None:
    model, groups = _model(), _images(num, size, 3)
    rows = torch.arange(num * size).view(num, size).tolist()
    expected = _slow_group_sum(model.double(), groups.flatten(0, 1).double(), rows, l2_clip_norm * MARGIN)
    assert _relative_error(_sum(_groups(l2_clip_norm), model.float(), groups), expected) < 1e-4


def test_one_group_of_all_records_is_batch_clipping() -> None:
    model, records = _model(), _images(1, 5, 2)
    loss = two_view_group_loss(embed_of(model)(records), temperature=TAU).sum()
    gradient = _flat(torch.autograd.grad(loss, trainable_parameters(model))).double()
    expected = gradient * 0.3 * MARGIN / gradient.norm()
    assert _relative_error(_sum(_groups(0.3), model, records), expected) < 1e-5


def test_path_clipping_microbatch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, records = _model(), _images(1, 7, 3)
    whole = _sum(_paths(0.3), model, records)
    for at_once in (1, 2, 3):
        monkeypatch.setattr(path_clipping, "RECORDS_AT_ONCE", at_once)
        assert _relative_error(_sum(_paths(0.3), model, records), whole) < 1e-5


@pytest.mark.parametrize("performance", [{"RECORDS_AT_ONCE": 2}, {"_GRADIENT_NUMBERS": 1}])
@pytest.mark.parametrize("num", [3, 6])
def test_full_batch_group_microbatch_changes_nothing(
    num: int, performance: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, groups = _model(), _images(num, 2, 3)
    whole = _sum(_groups(0.3), model, groups)
    for name, value in performance.items():
        monkeypatch.setattr(path_clipping, name, value)
    assert _relative_error(_sum(_groups(0.3), model, groups), whole) < 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_record_leaves_the_path_sum_of_the_others(bad: float) -> None:
    model, records = _model(), _images(5, 3)
    poisoned = records.clone()
    poisoned[2, 1, 0, 0, 0] = bad
    total = torch.zeros(num_trainable(model))
    report = _paths(0.3).add_clipped_sum(total, model, embed_of(model), poisoned[None])
    assert report.non_finite.tolist() == [False, False, True, False, False]
    others = _sum(_paths(0.3), model, records[[0, 1, 3, 4]][None])
    assert _relative_error(total.double(), others) < 1e-5


def test_non_finite_record_leaves_the_other_terms_of_its_group_and_no_negative() -> None:
    model, groups = _model(), _images(3, 2, 3)
    records = groups.flatten(0, 1)[[0, 1, 3, 4, 5]].double()
    expected = _slow_group_sum(model.double(), records, [[0, 1], [2], [3, 4]], 0.3 * MARGIN)
    groups[1, 0, 2] = math.nan
    assert _relative_error(_sum(_groups(0.3), model.float(), groups), expected) < 1e-4


@pytest.mark.parametrize("rule", [_paths(0.3), _groups(0.3)])
def test_batch_without_a_finite_record_adds_zero(rule: PathClipping | FullBatchGroupClipping) -> None:
    model = _model()
    total = torch.zeros(num_trainable(model))
    report = rule.add_clipped_sum(total, model, embed_of(model), torch.full((1, 3, 2, 3, 8, 8), math.nan))
    assert report.non_finite.all()
    assert not total.any()


@pytest.mark.parametrize(("rule", "leading"), [(_paths(0.3), (1, 0)), (_groups(0.3), (0, 2))])
def test_empty_batch_adds_zero_and_asks_the_network_nothing(
    rule: PathClipping | FullBatchGroupClipping, leading: tuple[int, int]
) -> None:
    def embed(inputs: Tensor) -> Tensor:
        raise AssertionError("some networks crash on an empty batch")

    model = _model()
    total = torch.zeros(num_trainable(model))
    report = rule.add_clipped_sum(total, model, embed, _images(*leading, 2))
    assert report.norms.shape == report.losses.shape == report.non_finite.shape == (0,)
    assert not total.any()


def test_own_paths_are_separated_in_one_pass() -> None:
    model = _model()
    total = torch.zeros(num_trainable(model))
    report = _paths(0.3).add_clipped_sum(total, model, embed_of(model), _images(1, 6, 2))
    assert report.paths[""] == OWN_PATH
    assert set(report.paths) > {"layers.0", "layers.3", "layers.8"}


class _SquareRoot(nn.Module):
    """Finite at 0, with a derivative that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.second(self.first(x).abs().sqrt() + 0.1), dim=-1)


def test_record_with_infinite_derivative_costs_its_own_path_alone() -> None:
    model = _model(_SquareRoot)
    records = torch.randn(1, 4, 2, 3, generator=torch.Generator().manual_seed(0))
    records[0, 1] = 0
    total = torch.zeros(num_trainable(model))
    report = _paths(0.1).add_clipped_sum(total, model, embed_of(model), records)
    assert report.non_finite.tolist() == [False, True, False, False]
    assert torch.isfinite(total).all()
    assert total.any()


def test_path_report_has_the_terms_of_the_loss() -> None:
    model, records = _model(), _images(1, 4, 2)
    total = torch.zeros(num_trainable(model))
    report = _paths(0.3).add_clipped_sum(total, model, embed_of(model), records)
    expected = two_view_group_loss(embed_of(model)(records), temperature=TAU)
    assert report.losses.sum().item() == pytest.approx(expected.item(), rel=1e-5)
    assert report.norms.shape == (4,)


CLIP = 1e-3  # small, so that every term is clipped and counts in full


def _path_distance(x: Tensor, *, swap: bool) -> Tensor:
    model = LinearEncoder(3).double()
    more, fewer = x[1:], (x[:-1] if swap else x[1:-1])
    slow = [_slow_path_sum(model, batch, CLIP, graph=True) for batch in (more, fewer)]
    return (slow[0] - slow[1]).norm() / CLIP


def _group_distance(x: Tensor, *, swap: bool) -> Tensor:
    model = LinearEncoder(3).double()
    more, fewer = x[1:], (x[:-1] if swap else x[1:-1])
    slow = [
        _slow_group_sum(model, batch, [[i] for i in range(len(batch))], CLIP, graph=True)
        for batch in (more, fewer)
    ]
    return (slow[0] - slow[1]).norm() / CLIP


@pytest.mark.parametrize("swap", [False, True])
def test_path_sensitivity_holds_for_the_worst_neighbours_found(swap: bool) -> None:
    """x holds one record to leave, two that stay, one that joins; batches of three with a cap of three."""
    least = 4.2 if swap else 2.7  # neither the 2C of disjoint groups nor (cap + 1)·C would do
    x = farthest(lambda x: _path_distance(x, swap=swap), (4, 2, 3), enough=least)
    model, rule = LinearEncoder(3), _paths(CLIP, cap=3)
    more, fewer = x[1:].float()[None], (x[:-1] if swap else x[1:-1]).float()[None]
    shift = float((_sum(rule, model, more) - _sum(rule, model, fewer)).norm())
    assert shift <= rule.sensitivity
    assert shift > least * CLIP


@pytest.mark.parametrize("swap", [False, True])
def test_full_batch_group_sensitivity_holds_for_the_worst_neighbours_found(swap: bool) -> None:
    least = 4.2 if swap else 2.7
    x = farthest(lambda x: _group_distance(x, swap=swap), (4, 2, 3), enough=least)
    model, rule = LinearEncoder(3), _groups(CLIP, cap=3)
    more, fewer = x[1:, None].float(), (x[:-1, None] if swap else x[1:-1, None]).float()
    shift = float((_sum(rule, model, more) - _sum(rule, model, fewer)).norm())
    assert shift <= rule.sensitivity
    assert shift > least * CLIP


def test_sensitivities_are_twice_the_cap() -> None:
    assert (_paths(0.5, cap=7).sensitivity, _groups(0.5, cap=7).sensitivity) == (7.0, 7.0)


def test_batches_above_the_cap_are_refused() -> None:
    model = _model()
    with pytest.raises(ConfigError, match="batch_cap = 3"):
        _sum(_paths(1.0, cap=3), model, _images(1, 4, 2))
    with pytest.raises(ConfigError, match="num_groups_cap = 1"):
        _sum(_groups(1.0, cap=1), model, _images(2, 2, 2))


def test_path_clipping_of_several_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="whole batch as one group"):
        _sum(_paths(1.0), _model(), _images(2, 2, 2))


@pytest.mark.parametrize("field", ["l2_clip_norm", "batch_cap", "temperature"])
def test_path_clipping_fields_must_be_positive(field: str) -> None:
    fields: dict[str, float] = {"l2_clip_norm": 1.0, "batch_cap": 2, "temperature": 1.0}
    with pytest.raises(ConfigError, match=field):
        PathClipping(**(fields | {field: 0}))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["l2_clip_norm", "num_groups_cap", "temperature"])
def test_full_batch_group_fields_must_be_positive(field: str) -> None:
    fields: dict[str, float] = {"l2_clip_norm": 1.0, "num_groups_cap": 2, "temperature": 1.0}
    with pytest.raises(ConfigError, match=field):
        FullBatchGroupClipping(**(fields | {field: 0}))  # type: ignore[arg-type]
