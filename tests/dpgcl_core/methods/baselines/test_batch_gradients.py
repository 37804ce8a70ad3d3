"""Gradients of many losses through one batch, against one backward pass for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.types import trainable_parameters
from dpgcl_core.methods.baselines.batch_gradients import gradients_through_batch
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


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_text_gradients_equal_one_pass_per_loss(padding_idx: int | None) -> None:
    model = _model(lambda: TextEncoder(padding_idx=padding_idx))
    model.positions.requires_grad_(False)
    tokens = torch.randint(11, (NUM_RECORDS, 3, 7), generator=torch.Generator().manual_seed(0))
    dim = embed_of(model)(tokens[None]).shape[-1]
    assert _error(model, tokens, _cotangents(dim + 5, dim)) < 1e-5


@pytest.mark.parametrize("num_losses", [MANY, FEW])
def test_smaller_passes_change_no_gradient(num_losses: int) -> None:
    assert _error(_model(TinyEncoder), _records(), _cotangents(num_losses), at_once=1) < 1e-5
