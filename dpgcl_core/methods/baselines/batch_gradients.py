"""Gradients of many losses of one batch, each through every record, for `group_clip`.

With embeddings z_r of the batch's rows (a row is one view of one record), Jacobians J_r = ∂z_r/∂w and
c_gr = ∂L_g/∂z_r, the gradient of loss g is Σ_r J_rᵀ c_gr: one backward pass per loss. Rows that only one
loss uses, as queries, are handled separately: c_gr = 0 for every other g, so the pass of such a loss holds
only its own rows.

The caller clips the tensors that are returned, so no rounding here moves a norm above C.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import flat_gradient
from dpgcl_core.clipping.types import Embed, num_trainable, trainable_parameters


def gradients_through_batch(
    model: nn.Module, embed: Embed, records: Tensor, cotangents: Tensor, *, max_records_at_once: int
) -> Tensor:
    """Return the gradients of several losses of one batch, float32 `[losses, num_trainable]`.

    Loss g has the gradient Σ_r J_rᵀ c_gr over rows r, each one view of one record. J_r is the Jacobian of the
    row's embedding z_r, and c_gr = ∂L_g/∂z_r.

    Args:
      model: the network that `embed` calls; it must not mix records.
      embed: maps inputs `[groups, group_size, views, ...]` to embeddings `[groups, group_size, views, dim]`.
      records: `[records, views, ...]`.
      cotangents: c, `[losses, records, views, dim]`.
      max_records_at_once: the number of records in one pass; it changes no result.
    """
    rows, c = records.flatten(0, 1)[None, :, None], cotangents.flatten(1, 2)
    is_used = (c != 0).any(2)  # by loss and row; nan counts as nonzero
    num_losses, loss_of = is_used.sum(0), is_used.to(torch.uint8).argmax(0)
    alone, shared = (num_losses == 1).nonzero()[:, 0], (num_losses > 1).nonzero()[:, 0]
    at_once = max_records_at_once * records.shape[1]
    gradients = torch.zeros(len(c), num_trainable(model), device=rows.device)
    for loss in range(len(c)):
        for some in torch.split(alone[loss_of[alone] == loss], at_once):
            _add_passes(gradients[loss : loss + 1], model, embed, rows[:, some], c[loss : loss + 1, some])
    for some in torch.split(shared, at_once):
        _add_passes(gradients, model, embed, rows[:, some], c[:, some])
    return gradients


def _add_passes(gradients: Tensor, model: nn.Module, embed: Embed, rows: Tensor, c: Tensor) -> None:
    """Add Σ_r J_rᵀ c_gr over the rows r to the gradient of each loss g, by one backward pass per loss."""
    if not rows.shape[1]:
        return
    parameters = trainable_parameters(model)
    with torch.enable_grad():
        z = embed(rows)[0, :, 0]
    for gradient, cotangent in zip(gradients, c.to(z.dtype), strict=True):
        found = torch.autograd.grad(z, parameters, cotangent, retain_graph=True, allow_unused=True)
        gradient += flat_gradient(list(found), parameters)
