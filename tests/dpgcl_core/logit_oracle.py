"""Logit-DP pair by pair, in float64: one gradient for every similarity of a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpgcl_core.methods.baselines.logit_dp.similarity_clipper import LogitClipper

MARGIN = 1 - 1e-4


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Similarities, their gradients `[n, n, num_parameters]`, and what each is clipped by, all float64.

    Attributes:
      bounds: `[n, n]`, ‖J_iᵀ z'_j‖ + ‖J'_jᵀ z_i‖.
    """

    z: Tensor
    gradients: Tensor
    bounds: Tensor


def pairs_of(parameters: list[nn.Parameter], queries: Tensor, keys: Tensor) -> Pairs:
    """Takes one gradient per pair of embeddings `[n, dim]` that still hold their graph."""
    n = len(queries)
    halves = []
    for i in range(n):
        for j in range(n):
            of_query, of_key = queries[i] @ keys[j].detach(), queries[i].detach() @ keys[j]
            halves.append(torch.stack([_gradient(each, parameters) for each in (of_query, of_key)]))
    both = torch.stack(halves).view(n, n, 2, -1)
    z = (queries @ keys.T).detach().double().clamp(-1, 1)
    return Pairs(z=z, gradients=both.sum(2), bounds=both.norm(dim=3).sum(2))


def _gradient(similarity: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    found = torch.autograd.grad(similarity, parameters, retain_graph=True, allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
    return torch.cat([g.flatten().double() for g in flat])


def coefficients(z: Tensor, clipper: LogitClipper) -> Tensor:
    """∂L/∂Z by automatic differentiation of the loss, term by term."""
    z = z.clone().requires_grad_()
    n, tau = len(z), clipper.temperature
    loss = z.new_zeros(())
    for i in range(n):
        loss = loss - torch.log(torch.exp(z[i, i] / tau) / torch.exp(z[i] / tau).sum())
        for j in range(n):
            if j != i and clipper.spread_out:
                loss = loss + clipper.spread_out * z[i, j] ** 2 / (n - 1)
    return torch.autograd.grad(loss, z)[0]


def clipped_sum(pairs: Pairs, clipper: LogitClipper) -> Tensor:
    """Σ (∂L/∂Z_ij) Clip_B(∇Z_ij), float64 `[num_parameters]`."""
    bound = clipper.logit_clip_norm * (MARGIN if math.isfinite(clipper.logit_clip_norm) else 1)
    factor = (bound / pairs.bounds.clamp_min(1e-300)).clamp_max(1)
    return torch.einsum("ij,ijp->p", coefficients(pairs.z, clipper) * factor, pairs.gradients)
