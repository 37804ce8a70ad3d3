"""Gradients of many losses of one batch, each through every record: what `group_clip` clips.

With embeddings z_r of the batch's rows (a row is one view of one record), Jacobians J_r = ∂z_r/∂w and
c_gr = ∂L_g/∂z_r, the gradient of loss g is Σ_r J_rᵀ c_gr. Two ways, of which the cheaper is taken:

- *Passes*: one backward pass per loss. Rows that enter one loss only, as queries do, are handled apart:
  c_gr = 0 for every other g, so a loss's pass holds its own rows alone.
- *Jacobians* (`dpgcl_core.methods.baselines.logit_dp.jacobians`): at most d passes for embeddings of
  dimension d, however many losses there are; then each loss's gradient is a combination of them, one matrix
  product per layer. Rows that enter one loss take one pass along their own cotangent. This needs a network
  whose every layer has a layer rule, and memory for d gradients of a pass's rows.

Either way the caller clips the tensors that are returned, so no rounding here moves a norm above C.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import flat_gradient
from dpgcl_core.clipping.types import Embed, num_trainable, trainable_parameters
from dpgcl_core.methods.baselines.logit_dp.jacobians import Rows
from dpgcl_core.methods.baselines.logit_dp.norms import BY_LAYER, Jacobians, places_of


def gradients_through_batch(
    model: nn.Module, embed: Embed, records: Tensor, cotangents: Tensor, *, max_records_at_once: int
) -> Tensor:
    """Return Σ_r J_rᵀ c_gr for each of several losses g, float32 `[losses, num_trainable]`.

    Args:
      model: the network that `embed` calls; it must not mix records.
      embed: inputs `[groups, group_size, views, ...]` to embeddings `[groups, group_size, views, dim]`.
      records: `[records, views, ...]`.
      cotangents: `[losses, records, views, dim]`.
      max_records_at_once: records in one pass; changes no result.
    """
    rows, c = records.flatten(0, 1)[None, :, None], cotangents.flatten(1, 2)
    meets = (c != 0).any(2)  # nan counts as nonzero
    num_met, loss_of = meets.sum(0), meets.to(torch.uint8).argmax(0)
    alone, shared = (num_met == 1).nonzero()[:, 0], (num_met > 1).nonzero()[:, 0]
    at_once = max_records_at_once * records.shape[1]
    if len(c) > c.shape[2]:
        jacobians = Jacobians(model, embed, rows[:, :at_once])
        if jacobians.path == BY_LAYER:
            return _by_jacobians(jacobians, model, rows, c, (alone, loss_of[alone]), shared)
    gradients = torch.zeros(len(c), num_trainable(model), device=rows.device)
    for loss in range(len(c)):
        for some in torch.split(alone[loss_of[alone] == loss], at_once):
            _add_passes(gradients[loss : loss + 1], model, embed, rows[:, some], c[loss : loss + 1, some])
    for some in torch.split(shared, at_once):
        _add_passes(gradients, model, embed, rows[:, some], c[:, some])
    return gradients


def _add_passes(gradients: Tensor, model: nn.Module, embed: Embed, rows: Tensor, c: Tensor) -> None:
    """Add the contribution of some rows, one backward pass per loss."""
    if not rows.shape[1]:
        return
    parameters = trainable_parameters(model)
    with torch.enable_grad():
        z = embed(rows)[0, :, 0]
    for gradient, cotangent in zip(gradients, c.to(z.dtype), strict=True):
        found = torch.autograd.grad(z, parameters, cotangent, retain_graph=True, allow_unused=True)
        gradient += flat_gradient(list(found), parameters)


def _by_jacobians(
    jacobians: Jacobians,
    model: nn.Module,
    rows: Tensor,
    c: Tensor,
    alone: tuple[Tensor, Tensor],
    shared: Tensor,
) -> Tensor:
    """Return the gradients by Jacobians, given the rows that enter one loss (and which), and the others."""
    places = places_of(trainable_parameters(model))
    gradients = torch.zeros(len(c), num_trainable(model), device=c.device)
    for some, loss_of in zip(*(torch.split(each, jacobians.rows_at_once) for each in alone), strict=True):
        if not len(some):
            continue
        losses, index = loss_of.unique(return_inverse=True)
        found = jacobians.along(rows[:, some], c[loss_of, some])
        ones = F.one_hot(index, len(losses)).T[:, :, None].to(c)
        gradients[losses] += _combined(found, ones, places, gradients.shape[1])
    for some, found in jacobians.of_similar_rank(rows[:, shared]):
        gradients += _combined(found, c[:, shared[some]], places, gradients.shape[1])
    return gradients


def _combined(rows: Rows, coefficients: Tensor, places: dict[Tensor, slice], numbers: int) -> Tensor:
    """Return Σ_r Σ_k c_grk ∇_rk over all parameters, `[losses, numbers]`, for c `[losses, rows, k]`."""
    total = torch.zeros(len(coefficients), numbers, device=coefficients.device)
    for share in rows.shares:
        total[:, places[share.part.parameter]] += share.combined(coefficients)
    return total
