"""Gradients of many losses through one batch, against one backward pass for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.direct_uses import NotSeparableError
from dpgcl_core.clipping.types import trainable_parameters
from dpgcl_core.methods.baselines import batch_gradients
from dpgcl_core.methods.baselines.batch_gradients import gradients_through_batch
from dpgcl_core.methods.baselines.logit_dp import layers as logit_layers
from dpgcl_core.methods.baselines.logit_dp import norms as logit_norms
from dpgcl_core.methods.baselines.logit_dp.jacobians import by_layer, ranks
from dpgcl_core.methods.baselines.logit_dp.norms import BY_LAYER, Jacobians
from tests.dpgcl_core.adversary import embed_of
from tests.dpgcl_core.models import Convolutions, DirectUse, SharedLayer, TextEncoder, TinyEncoder

NUM_RECORDS, DIM = 7, 4
MANY, FEW = 9, 2
"""Losses: more than the embedding has axes, and fewer."""


def _model(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind()


def _records(seed: int = 0) -> Tensor:
    return torch.randn(NUM_RECORDS, 3, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def _cotangents(num_losses: int, dim: int = DIM) -> Tensor:
    """Of losses that share keys and copies, while each query meets one of them."""
    c = torch.randn(num_losses, NUM_RECORDS, 3, dim, generator=torch.Generator().manual_seed(1))
    own = torch.arange(NUM_RECORDS) % num_losses
    c[:, :, 0] *= (torch.arange(num_losses)[:, None] == own)[:, :, None]
    return c


def _one_by_one(model: nn.Module, records: Tensor, cotangents: Tensor) -> Tensor:
    parameters, z = trainable_parameters(model), embed_of(model)(records[None])[0]
    found = [torch.autograd.grad(z, parameters, c, retain_graph=True) for c in cotangents]
    return torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in found])


def _error(model: nn.Module, records: Tensor, cotangents: Tensor, at_once: int = 256) -> float:
    actual = gradients_through_batch(model, embed_of(model), records, cotangents, max_records_at_once=at_once)
    expected = _one_by_one(model, records, cotangents)
    return float(((actual - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize("kind", [TinyEncoder, Convolutions, DirectUse, SharedLayer])
@pytest.mark.parametrize("num_losses", [MANY, FEW])
def test_gradients_equal_one_pass_per_loss(kind: type[nn.Module], num_losses: int) -> None:
    assert _error(_model(kind), _records(), _cotangents(num_losses)) < 1e-5


@pytest.mark.parametrize("form", [True, False])
def test_both_forms_of_a_layer_give_the_same_gradients(form: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_layers.Part, "is_explicit", lambda self, *_: form)
    for kind in (TinyEncoder, Convolutions):
        assert _error(_model(kind), _records(), _cotangents(MANY)) < 1e-5


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_text_gradients_equal_one_pass_per_loss(padding_idx: int | None) -> None:
    model = _model(lambda: TextEncoder(padding_idx=padding_idx))
    model.positions.requires_grad_(False)
    tokens = torch.randint(11, (NUM_RECORDS, 3, 7), generator=torch.Generator().manual_seed(0))
    dim = embed_of(model)(tokens[None]).shape[-1]
    assert _error(model, tokens, _cotangents(dim + 5, dim)) < 1e-5


def test_many_losses_take_no_pass_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a pass for one loss")

    monkeypatch.setattr(batch_gradients, "_add_passes", refuse)
    assert _error(_model(TinyEncoder), _records(), _cotangents(MANY)) < 1e-5


@pytest.mark.parametrize("num_losses", [MANY, FEW])
def test_smaller_passes_change_no_gradient(num_losses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_norms, "_MAX_ROWS", 4)
    assert _error(_model(TinyEncoder), _records(), _cotangents(num_losses), at_once=1) < 1e-5


def test_rows_that_take_another_way_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network passes the check, and then some inputs go where no rule leads."""
    model, calls = _model(TinyEncoder), 0

    def sometimes(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise NotSeparableError("another way")
        return by_layer(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(logit_norms, "_MAX_ROWS", 4)
    checked = Jacobians(model, embed_of(model), _records()[None, :, :1])
    assert checked.path == BY_LAYER
    monkeypatch.setattr(logit_norms, "_look_at", lambda *_: checked._known)
    monkeypatch.setattr(logit_norms, "by_layer", sometimes)
    assert _error(model, _records(), _cotangents(MANY)) < 1e-5
    assert calls > 2


class _Gated(nn.Module):
    """A row's rank is at most the number of its units that are on."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 8, bias=False), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.normalize(self.head(self.front(images)), dim=-1)


def test_passes_hold_rows_of_similar_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = _model(_Gated), _records().flatten(0, 1)[None, :, None]
    found = ranks(model, trainable_parameters(model), embed_of(model), inputs)
    assert found is not None
    assert len(found.unique()) > 2
    monkeypatch.setattr(logit_norms, "_MAX_ROWS", 4)
    places = [at for at, _ in Jacobians(model, embed_of(model), inputs).of_similar_rank(inputs)]
    assert torch.equal(found[torch.cat(places)], found.sort().values)
    assert torch.equal(torch.cat(places).sort().values, torch.arange(inputs.shape[1]))


def test_rows_come_back_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = _model(_Gated), _records()[None]
    whole = Jacobians(model, embed_of(model), inputs).side()
    monkeypatch.setattr(logit_norms, "_MAX_ROWS", 4)
    by_rank = Jacobians(model, embed_of(model), inputs).side()
    for name in ("z", "gram", "magnitude_bound"):
        torch.testing.assert_close(getattr(by_rank, name), getattr(whole, name), rtol=1e-4, atol=1e-7)
