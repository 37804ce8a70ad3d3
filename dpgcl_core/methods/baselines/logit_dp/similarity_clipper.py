"""Stage 7 of Logit-DP: the gradient of every similarity clipped to B, their weighted sum, its sensitivity.

With similarities Z_ij = ⟨z_i, z'_j⟩ of unit embeddings, clamped to [−1, 1], and the loss Σ_i ℓ_i(Z), the step
takes Σ_ij (∂ℓ_i/∂Z_ij) Clip_B(∇Z_ij) ("Differentially private optimization for non-decomposable objective
functions", Eq. 5). With Jacobians J_i and J'_j of the embeddings, ∇Z_ij = J_iᵀ z'_j + J'_jᵀ z_i. A pair is
clipped by the bound b_ij = ‖J_iᵀ z'_j‖ + ‖J'_jᵀ z_i‖ ≥ ‖∇Z_ij‖. This over-clips, but its cost grows with n
instead of n²: ‖J_iᵀ z'_j‖² = z'_jᵀ (J_i J_iᵀ) z'_j needs one Gram matrix for each row. With
λ_ij = (∂ℓ_i/∂Z_ij)·min(1, B/b_ij) the sum is Σ_i J_iᵀ (Σ_j λ_ij z'_j) + Σ_j J'_jᵀ (Σ_i λ_ij z_i).

Proposition (sensitivity). Neighbouring data sets: add or remove one record. Let a batch of n records have one
vector g_ij of norm ≤ B and one number Z_ij ∈ [−1, 1] for each of its pairs, both functions of only records i
and j, and let f = Σ_ij c_ij g_ij with c_ij = ∂L/∂Z_ij, where L = −Σ_i log(e^{Z_ii/τ} / Σ_j e^{Z_ij/τ}). Then
removing one record moves f by at most

    Δ(n) = (2B/τ)·(1 + (n−1)·a/(a + n − 1)),   a = e^{2/τ},   increasing in n, with limit (2B/τ)(1 + a).

Proof sketch. With the softmax p_ij of row i, c_ij = (p_ij − [i = j])/τ: the 1/τ is part of the gradient.
Removing record n takes away its row (Σ_j |c_nj| ≤ 2/τ) and its column (c_in = p_in/τ), and rescales the
softmax of every other row (Σ_j |c_ij − c°_ij| = p_in/τ). So f moves by at most (B/τ)(2 + 2 Σ_{i<n} p_in), and
|Z| ≤ 1 bounds p_in by a/(a + n − 1). ∎ docs/theory/logit-dp.md has the whole proof, the bound's tightness,
and the case in which the paper's Lemma 4.5 is too small. Variants:

- *Spread-out loss*: 6B times its weight is added.
- *Records without a direction* (a zero embedding, or Jacobians that are not finite): Z and g are zero in all
  their pairs. This depends only on the record, so the proof holds.
- *A cap on the batch*: Δ(cap) holds for batches up to the cap. Truncating a larger batch can also exchange
  one record for another, which moves f by up to 2Δ(cap): one removal, one addition.
- *A learned temperature* has a gradient that is no sum of clipped ∇Z, and *augmented keys* add rows of
  logits. Both variants are refused.

Floating point. The proof holds for any z and J that are functions of one record each, so also for the
*computed* z and J, however they are rounded. The step ensures that they are such functions.

- *The summed tensors are the measured tensors.* The very tensors whose norms were computed are multiplied
  with the cotangents, in float64, into a float64 sum. One more backward pass along the combined cotangents
  would overflow or round depending on these, and so on the other records. Jacobians beyond a bound on memory
  are computed again by the same call on the same pass. A row whose Gram matrix then differs in a single bit
  adds nothing, and the rest of its pairs, one term of two, is within their bounds.
- *A record's z and J do not depend on the others*: passes have one shape, and the path through the network
  is chosen before any record is seen (`jacobians`). Records whose embedding or magnitude bound is not finite
  in float32, or whose Gram matrix is not finite, have z and J zero, a decision that depends only on them.
- *No factor is too large.* Products are float64, and a bound counts as at least `PAIR_NORM_FLOOR` of the
  magnitude bound of both Jacobians, with whose terms rounding grows: no factor exceeds B/(share · bound).
- *Two errors remain.* The first is the float64 rounding of norms and sum: with N = n·d products the sum is
  off by at most N·2⁻⁵³/`PAIR_NORM_FLOOR` of Σ|∂L/∂Z_ij|·B, below a tenth of the margin in B(1 − 1e-4)/norm at
  n = 1,000 and d = 64 even if all errors agree. The second is a row's *place* in a pass, if a kernel's
  rounding depends on it: on a CPU no bit of tiny_cnn, small_cnn and resnet18 changes (measured over places
  and numbers of companions; a test has one network). If a device rounds a place's Jacobian by a share ρ of
  its magnitude bound, one removed record moves each other pair by at most 2ρB/`PAIR_NORM_FLOOR`.

Factors are B(1 − 1e-4)/norm, or the factors of automatic clipping
(`dpgcl_core.clipping.clipper.clip_factor`) for the same norms. Low precision is refused, because a layer's
share is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import check_gamma, clip_factor
from dpgcl_core.clipping.full_precision import full_precision
from dpgcl_core.clipping.types import Embed, GroupReport
from dpgcl_core.errors import ConfigError, require_positive
from dpgcl_core.methods.baselines.logit_dp.jacobians import Jacobians, RowMeasures

_MAX_KEPT_NUMBERS = 2**27
"""512 MiB of Jacobians that are kept from norms to sum; Jacobians beyond this limit are computed twice."""

PAIR_NORM_FLOOR = 1e-3
"""A pair's norm counts as at least this share of the magnitude bound of its two Jacobians."""

_TINY = float(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True, kw_only=True)
class LogitClipper:
    """Clips the gradient of every similarity of a batch to `logit_clip_norm`.

    Attributes:
      logit_clip_norm: B > 0; inf for runs without clipping.
      temperature: τ > 0, a public constant.
      spread_out: weight of the loss that makes different records' embeddings orthogonal; 0 for none.
      gamma: γ of automatic clipping; None for flat clipping.

    Raises:
      ConfigError: a field is outside its range, or the temperature is learned.
    """

    logit_clip_norm: float
    temperature: float
    spread_out: float = 0.0
    gamma: float | None = None

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        if not self.logit_clip_norm > 0:
            raise ConfigError(f"logit_clip_norm must be positive; got {self.logit_clip_norm}")
        if isinstance(self.temperature, Tensor):
            raise ConfigError(
                f"temperature must be a number for Logit-DP; got a {type(self.temperature).__name__}. The "
                "gradient of a learned temperature is not a sum of clipped similarity gradients"
            )
        require_positive(self, "temperature")
        if not (self.spread_out >= 0 and math.isfinite(self.spread_out)):
            raise ConfigError(f"spread_out must be finite and not negative; got {self.spread_out}")

    def sensitivity(self, batch_cap: int | None = None) -> float:
        """Return the sensitivity of the clipped sum of at most `batch_cap` records (see the module).

        Neighbouring data sets: add or remove one record. `batch_cap=None` means batches of any size.

        >>> round(LogitClipper(logit_clip_norm=1.0, temperature=0.2).sensitivity(200), 2)
        1982.18

        Raises:
          ConfigError: `batch_cap` is below 1, or the bound has no finite value.
        """
        if batch_cap is not None and batch_cap < 1:
            raise ConfigError(f"batch_cap must be at least 1, or None for no cap; got {batch_cap}")
        shrink = math.exp(-2 / self.temperature)
        if batch_cap is not None:  # (n−1)·a/(a + n − 1) without a itself, which overflows at small τ
            others = (batch_cap - 1) / (1 + (batch_cap - 1) * shrink)
        else:
            others = 1 / shrink if shrink else math.inf
        contrastive = 2 / self.temperature * (1 + others)
        spread_out = 6 * self.spread_out if batch_cap != 1 else 0.0
        bound = self.logit_clip_norm * (contrastive + spread_out)
        if not math.isfinite(bound) and math.isfinite(self.logit_clip_norm):
            raise ConfigError(
                f"the sensitivity at temperature {self.temperature} is not finite without a cap on the "
                "batch size. Set batch_cap"
            )
        return bound

    def add_clipped_sum(self, total: Tensor, model: nn.Module, embed: Embed, inputs: Tensor) -> GroupReport:
        """Add Σ_ij (∂L/∂Z_ij) Clip_B(∇Z_ij) over all pairs of the batch to `total`, in place.

        Z_ij is the similarity of query i and key j, and L the contrastive loss.

        Args:
          total: float64 `[num_trainable(model)]`, in the order of `trainable_parameters`.
          model: the network that `embed` calls; it must not mix records.
          embed: the encoder of both views.
          inputs: `[1, n, 2, ...]`, query and key of each record. The batch is one group; it may be empty.

        Returns:
          For each pair the bound on ‖∇Z_ij‖ that was clipped, `[n·n]`, for each query its term of the loss,
          and a mask of the records that were masked to zero.

        Raises:
          ConfigError: the shapes are wrong, there are augmented keys, or the network runs in low precision.
        """
        _check_inputs(inputs)
        if not inputs.shape[1]:
            none = torch.zeros(0, device=total.device)
            return GroupReport(norms=none, losses=none, non_finite=none.bool())
        with full_precision(total.device.type), _no_low_precision(model):
            return self._add(total, Jacobians(model, embed, inputs))

    def _add(self, total: Tensor, jacobians: Jacobians) -> GroupReport:
        """Add the clipped sum of the batch's Jacobians to `total`, and return the report."""
        measures, batch = _with_norms(jacobians)
        weights, losses = self._weights(batch)
        differs = jacobians.add_products(total, measures, _cotangents(weights, batch).flatten(0, 1))
        return GroupReport(
            norms=batch.norms.float().flatten(),
            losses=losses.float(),
            non_finite=~batch.finite | differs.view(-1, 2).any(1),
            paths={"": jacobians.path},
        )

    def _weights(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        """Return λ_ij = ∂L/∂Z_ij times the pair's factor, float64 `[n, n]`, and each query's loss."""
        z = (batch.queries.double() @ batch.keys.double().T).clamp(-1, 1)
        identity = torch.eye(len(z), dtype=z.dtype, device=z.device)
        logits = z / self.temperature
        coefficients = (logits.softmax(1) - identity) / self.temperature
        losses = logits.logsumexp(1) - logits.diagonal()
        if self.spread_out and len(z) > 1:
            coefficients = coefficients + self.spread_out * 2 * z * (1 - identity) / (len(z) - 1)
            losses = losses + self.spread_out * (z.square() * (1 - identity)).sum(1) / (len(z) - 1)
        factor, usable = torch.ones_like(z), batch.usable
        if math.isfinite(self.logit_clip_norm):
            factor, counts = clip_factor(batch.norms, self.logit_clip_norm, self.gamma, tiny=_TINY)
            usable = usable & counts
        return torch.where(usable, coefficients * factor, 0.0), losses


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The batch's embeddings, zero for masked records, and the norms of its pairs."""

    queries: Tensor
    keys: Tensor
    norms: Tensor
    finite: Tensor

    @property
    def usable(self) -> Tensor:
        """The mask `[n, n]` of pairs of two finite records whose embeddings have a direction."""
        query, key = (self.finite & (z != 0).any(1) for z in (self.queries, self.keys))
        return query[:, None] & key[None]


def _check_inputs(inputs: Tensor) -> None:
    if inputs.ndim < 3 or inputs.shape[2] != 2:
        raise ConfigError(
            f"Logit-DP needs exactly two views per record; got inputs {list(inputs.shape)}. Its sensitivity "
            "does not cover the logits of augmented keys. Set num_augmentations to 0"
        )
    if inputs.shape[0] != 1:
        raise ConfigError(f"inputs must be one group, [1, n, views, ...]; got {list(inputs.shape)}")


@contextmanager
def _no_low_precision(model: nn.Module) -> Iterator[None]:
    """Raise ConfigError for parameters in low precision, and when a layer runs under autocast."""

    def check_autocast(module: nn.Module, args: Any) -> None:
        device = next(module.parameters(recurse=False)).device.type
        if torch.is_autocast_enabled(device):
            raise ConfigError(
                f"Logit-DP computes Jacobians in float32; got autocast to "
                f"{torch.get_autocast_dtype(device)}. Set precision to float32"
            )

    for parameter in model.parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"Logit-DP needs parameters in float32; got {parameter.dtype}")
    layers = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    handles = [layer.register_forward_pre_hook(check_autocast) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cotangents(weights: Tensor, batch: _Batch) -> Tensor:
    """Return the cotangents of each record's query and key, float64 `[n, 2, dim]`.

    Σ_ij λ_ij ⟨z_i, z'_j⟩, with `weights` λ, has the gradient Σ_j λ_ij z'_j for query z_i, and Σ_i λ_ij z_i
    for key z'_j.
    """
    of_queries, of_keys = weights @ batch.keys.double(), weights.T @ batch.queries.double()
    return torch.stack([of_queries, of_keys], dim=1)


def _with_norms(jacobians: Jacobians) -> tuple[RowMeasures, _Batch]:
    """Return the measures of all rows, and the batch with the norms of all its pairs."""
    measures = jacobians.measure(_MAX_KEPT_NUMBERS)
    query, key = measures.every(0, 2), measures.every(1, 2)
    bounds = query.lengths_along(key.z) + key.lengths_along(query.z).T
    floor = PAIR_NORM_FLOOR * (query.magnitude_bound[:, None] + key.magnitude_bound[None])
    finite = query.finite & key.finite
    return measures, _Batch(
        queries=torch.where(finite[:, None], query.z, 0.0),
        keys=torch.where(finite[:, None], key.z, 0.0),
        norms=torch.maximum(bounds, floor),
        finite=finite,
    )
