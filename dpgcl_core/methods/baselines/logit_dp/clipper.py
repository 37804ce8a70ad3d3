"""Stage 7 of Logit-DP: the gradient of every similarity clipped to B, their weighted sum, its sensitivity.

With similarities Z_ij = ⟨z_i, z'_j⟩ of unit embeddings, clamped to [−1, 1], and the loss Σ_i ℓ_i(Z), the step
takes Σ_ij (∂ℓ_i/∂Z_ij) Clip_B(∇Z_ij) ("Differentially private optimization for non-decomposable objective
functions", Eq. 5). With Jacobians J_i and J'_j of the embeddings, ∇Z_ij = J_iᵀ z'_j + J'_jᵀ z_i. Of the n²
gradients only the *norms* are needed (the module `norms` beside this one): with
λ_ij = (∂ℓ_i/∂Z_ij)·min(1, B/‖∇Z_ij‖) the sum is Σ_i J_iᵀ (Σ_j λ_ij z'_j) + Σ_j J'_jᵀ (Σ_i λ_ij z_i).

Proposition (sensitivity). Neighbouring data sets: add or remove one record. Let a batch of n records have one
vector g_ij of norm ≤ B and one number Z_ij ∈ [−1, 1] for each of its pairs, both functions of records i and j
alone, and let f = Σ_ij c_ij g_ij with c_ij = ∂L/∂Z_ij, where L = −Σ_i log(e^{Z_ii/τ} / Σ_j e^{Z_ij/τ}). Then
removing one record moves f by at most

    Δ(n) = (2B/τ)·(1 + (n−1)·a/(a + n − 1)),   a = e^{2/τ},   increasing in n, with limit (2B/τ)(1 + a).

Proof sketch. With the softmax p_ij of row i, c_ij = (p_ij − [i = j])/τ: the 1/τ is part of the gradient.
Removing record n takes away its row (Σ_j |c_nj| ≤ 2/τ) and its column (c_in = p_in/τ), and rescales the
softmax of every other row (Σ_j |c_ij − c°_ij| = p_in/τ). So f moves by at most (B/τ)(2 + 2 Σ_{i<n} p_in), and
|Z| ≤ 1 bounds p_in by a/(a + n − 1). ∎ The whole proof, how tight it is, and where the paper's Lemma 4.5 is
too small: docs/theory/logit-dp.md. What it says of variants:

- *Symmetric loss*: Δ doubles. *Spread-out loss*: 6B times its weight is added.
- *Records without a direction* (a zero embedding, or Jacobians that are not finite): Z and g are zero in all
  their pairs, which is a function of the record alone, so the proof holds.
- *A cap on the batch*: Δ(cap) holds for batches up to it. Truncating a larger batch can also exchange one
  record for another, which moves f by up to 2Δ(cap): one removal, one addition.
- *A learned temperature* has a gradient that is no sum of clipped ∇Z, and *augmented keys* add rows of
  logits: both are refused.

Floating point. The proof holds for any z and J that are functions of one record each, so for those that were
*computed*, however they are rounded; the step sees to it that they are.

- *What is summed is what was measured.* The very tensors whose norms were computed are multiplied with the
  cotangents, in float64, into a float64 sum. One more backward pass along the combined cotangents would
  overflow or round by these, that is by the other records. Jacobians beyond a bound on memory are computed
  again by the same call on the same pass; a row whose Gram matrix then differs in a single bit adds nothing.
- *A record's z and J do not follow the others*: passes have one shape, the way through the network is decided
  before any record is seen, and a record's rank is its own (`norms`, `jacobians`). Records whose embedding,
  Gram matrix or magnitude bound is not finite in float32 have z and J zero: a decision about them alone.
- *What is left.* Float64 rounding of norms and sum: with N = n·d products the sum is off by at most
  N·2⁻⁵³/`PAIR_NORM_FLOOR` of Σ|∂L/∂Z_ij|·B, below a tenth of the margin in B(1 − 1e-4)/norm at n = 1,000 and
  d = 64 even if all errors agree. And a row's *place* in a pass, where a kernel rounds by place: of tiny_cnn,
  small_cnn and resnet18 on a CPU no bit changes (measured over places and numbers of companions; a test has
  one network). Where a device rounds a place's Jacobian by a share ρ of its magnitude bound, one removed
  record moves each other pair by at most 2ρB/`PAIR_NORM_FLOOR`. A network that is not trusted to be so tame
  takes `isolated`: every row alone, in no place.

Factors are B(1 − 1e-4)/norm, or those of automatic clipping (`dpgcl_core.clipping.clipper.clip_factor`) for
the same norms. Low precision is refused, for a layer's share is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import check_gamma, clip_factor, flat_gradient
from dpgcl_core.clipping.full_precision import full_precision
from dpgcl_core.clipping.types import Embed, GroupInputs, trainable_parameters
from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.methods.baselines.logit_dp.norms import PAIR_NORM_FLOOR, Jacobians, Side, cross_terms

Norms = Literal["exact", "upper_bound"]
_MAX_KEPT_NUMBERS = 2**27
"""512 MiB of Jacobians that are kept from norms to sum; those beyond are computed twice."""

_PARTNERS = 256
"""Rows that a row is taken to meet in cross terms, whatever the batch is."""

_MAX_PLAIN_RECORDS = 128
"""Records in one pass without clipping."""

_TINY = float(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True, kw_only=True)
class LogitReport:
    """By-products of one call, all **private-only** except `paths`.

    Attributes:
      norms: float32 `[n, n]`, the norm by which each pair was clipped; nan where not needed (B = inf).
      losses: float32 `[n]`, each query's term of the contrastive loss.
      non_finite: `[n]`, which records were masked to zero.
      paths: how the Jacobians were computed, by tower.
    """

    norms: Tensor
    losses: Tensor
    non_finite: Tensor
    paths: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LogitClipper:
    """Clips the gradient of every similarity of a batch to `logit_clip_norm`.

    Attributes:
      logit_clip_norm: B > 0; inf for runs without clipping.
      temperature: τ > 0, a public constant.
      norms: "exact", or "upper_bound", which replaces the norm of a pair that shares an encoder by
        ‖J_iᵀ z'_j‖ + ‖J'_jᵀ z_i‖: over-clips, at a cost that grows with n instead of n². Towers that share
        no parameter are exact either way.
      spread_out: weight of the spread-out loss; 0 for none.
      symmetric: whether the loss of keys against queries is added.
      gamma: γ of automatic clipping; None for flat clipping.
      isolated: send every row through the network by itself, for networks whose records may not be together.

    Raises:
      ConfigError: a field is outside its range, or the temperature is learned.
    """

    logit_clip_norm: float
    temperature: float
    norms: Norms = "exact"
    spread_out: float = 0.0
    symmetric: bool = False
    gamma: float | None = None
    isolated: bool = False

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        if not self.logit_clip_norm > 0:
            raise ConfigError(f"logit_clip_norm must be positive; got {self.logit_clip_norm}")
        if isinstance(self.temperature, Tensor):
            raise ConfigError(
                "temperature must be a number for Logit-DP, for the gradient of a learned one is no sum of "
                f"clipped similarities; got a {type(self.temperature).__name__}"
            )
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature must be positive and finite; got {self.temperature}")
        if not (self.spread_out >= 0 and math.isfinite(self.spread_out)):
            raise ConfigError(f"spread_out must be finite and not negative; got {self.spread_out}")
        if self.norms not in get_args(Norms):
            raise ConfigError(unknown_choice("norms", self.norms, get_args(Norms)))

    def sensitivity(self, batch_cap: int | None = None) -> float:
        """Return the sensitivity of the clipped sum of at most `batch_cap` records (see the module).

        Neighbouring data sets: add or remove one record. None stands for batches of any size.

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
        contrastive = 2 / self.temperature * (1 + others) * (2 if self.symmetric else 1)
        spread_out = 6 * self.spread_out if batch_cap != 1 else 0.0
        bound = self.logit_clip_norm * (contrastive + spread_out)
        if not math.isfinite(bound) and math.isfinite(self.logit_clip_norm):
            raise ConfigError(
                f"without a cap on the batch the sensitivity at temperature {self.temperature} is not "
                "finite: give a batch_cap"
            )
        return bound

    def add_clipped_sum(
        self, total: Tensor, model: nn.Module, embed: Embed | tuple[Embed, Embed], inputs: GroupInputs
    ) -> LogitReport:
        """Add Σ_ij (∂L/∂Z_ij) Clip_B(∇Z_ij) over all pairs of the batch to `total`, in place.

        Args:
          total: float64 `[num_trainable(model)]`, in the order of `trainable_parameters`.
          model: the network that the embeds call; it must not mix records.
          embed: one encoder of both views, or one for the queries and one for the keys.
          inputs: `[1, n, 2, ...]`, query and key of each record; with two encoders a pair
            `([1, n, 1, ...], [1, n, 1, ...])`. The batch is one group; it may be empty.

        Returns:
          The pairs' norms and the records' losses, for private-only diagnosis.

        Raises:
          ConfigError: wrong shapes, augmented keys, a network that runs in low precision, or a batch whose
            exact norms would need more memory than there is for Jacobians.
        """
        pairs = _checked_inputs(embed, inputs)
        if not pairs[0][1].shape[1]:
            none = torch.zeros(0, device=total.device)
            return LogitReport(norms=none.view(0, 0), losses=none, non_finite=none.bool())
        with full_precision(total.device.type), _no_low_precision(model):
            if math.isinf(self.logit_clip_norm):
                return self._add_plain(total, model, pairs)
            towers = [
                Jacobians(model, *pair, tower=index, isolated=self.isolated)
                for index, pair in enumerate(pairs)
            ]
            return self._add(total, towers)

    def _add(self, total: Tensor, towers: Sequence[Jacobians]) -> LogitReport:
        sides, batch = _with_norms(towers, self.norms)
        weights, losses = self._weights(batch)
        differs = torch.zeros_like(batch.finite)
        cotangents = _cotangents(weights, batch).chunk(len(towers), dim=1)
        for tower, side, c in zip(towers, sides, cotangents, strict=True):
            differs |= tower.add_products(total, side, c.flatten(0, 1)).view(len(differs), -1).any(1)
        return LogitReport(
            norms=batch.norms.float(),
            losses=losses.float(),
            non_finite=~batch.finite | differs,
            paths=batch.paths,
        )

    def _add_plain(
        self, total: Tensor, model: nn.Module, pairs: Sequence[tuple[Embed, Tensor]]
    ) -> LogitReport:
        """The plain gradient, for runs without clipping: nothing is hidden here."""
        records = torch.split(torch.arange(pairs[0][1].shape[1]), _MAX_PLAIN_RECORDS)
        with torch.no_grad():
            each = [torch.cat([embed(inputs[:, some])[0] for some in records]) for embed, inputs in pairs]
        batch = _plain(torch.cat(each, dim=1))
        weights, losses = self._weights(batch)
        cotangents = _cotangents(weights, batch).chunk(len(pairs), dim=1)
        parameters = trainable_parameters(model)
        for (embed, inputs), c in zip(pairs, cotangents, strict=True):
            for some in records:
                with torch.enable_grad():
                    z = embed(inputs[:, some])[0]
                if z.requires_grad:
                    found = torch.autograd.grad(z, parameters, c[some].to(z), allow_unused=True)
                    flat = flat_gradient(list(found), parameters)
                    total += torch.where(torch.isfinite(flat).all(), flat, torch.zeros_like(flat))
        return LogitReport(norms=batch.norms, losses=losses.float(), non_finite=~batch.finite)

    def _weights(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        """Return λ_ij, float64 `[n, n]`, and each query's loss."""
        z = (batch.queries.double() @ batch.keys.double().T).clamp(-1, 1)
        identity = torch.eye(len(z), dtype=z.dtype, device=z.device)
        logits = z / self.temperature
        coefficients = (logits.softmax(1) - identity) / self.temperature
        losses = logits.logsumexp(1) - logits.diagonal()
        if self.symmetric:
            coefficients = coefficients + (logits.softmax(0) - identity) / self.temperature
            losses = losses + logits.logsumexp(0) - logits.diagonal()
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
    """Embeddings of the batch, zero for masked records, and the norms of its pairs."""

    queries: Tensor
    keys: Tensor
    norms: Tensor
    finite: Tensor
    paths: dict[str, str] = field(default_factory=dict)

    @property
    def usable(self) -> Tensor:
        """`[n, n]`: pairs of two finite records whose embeddings have a direction."""
        query, key = (self.finite & (z != 0).any(1) for z in (self.queries, self.keys))
        return query[:, None] & key[None]


def _checked_inputs(embed: Embed | tuple[Embed, Embed], inputs: GroupInputs) -> list[tuple[Embed, Tensor]]:
    """Return every encoder with its inputs, whose shapes are checked."""
    embeds = embed if isinstance(embed, tuple) else (embed,)
    each = inputs if isinstance(inputs, tuple) else (inputs,)
    shapes = " and ".join(str(list(x.shape)) for x in each)
    if len(embeds) != len(each) or len(each) > 2:
        raise ConfigError(
            f"one encoder takes one tensor, two take a pair (queries, keys); got {len(embeds)} and "
            f"inputs {shapes}"
        )
    views = 2 // len(each)
    if any(x.ndim < 3 or x.shape[2] != views for x in each):
        raise ConfigError(
            f"Logit-DP takes {views} view(s) per record and encoder, for augmented keys would add "
            "logits that its sensitivity does not know: set num_augmentations to 0; got inputs "
            f"{shapes}"
        )
    if any(x.shape[0] != 1 or x.shape[1] != each[0].shape[1] for x in each):
        raise ConfigError(f"the batch is one group, [1, n, views, ...] in every encoder; got inputs {shapes}")
    return list(zip(embeds, each, strict=True))


@contextmanager
def _no_low_precision(model: nn.Module) -> Iterator[None]:
    """Refuse low precision: of parameters at once, of autocast when a layer runs in it."""

    def refuse(module: nn.Module, args: Any) -> None:
        device = next(module.parameters(recurse=False)).device.type
        if torch.is_autocast_enabled(device):
            raise ConfigError(
                f"Logit-DP needs precision float32, in which Jacobians are computed; got "
                f"autocast to {torch.get_autocast_dtype(device)}"
            )

    for parameter in model.parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"Logit-DP needs parameters in float32; got {parameter.dtype}")
    layers = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    handles = [layer.register_forward_pre_hook(refuse) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cotangents(weights: Tensor, batch: _Batch) -> Tensor:
    """Return what meets the Jacobians of each record's query and key, float64 `[n, 2, dim]`.

    Σ_ij λ_ij ⟨z_i, z'_j⟩ is linear in each side: it is Σ_j λ_ij z'_j for z_i, and Σ_i λ_ij z_i for z'_j.
    """
    of_queries, of_keys = weights @ batch.keys.double(), weights.T @ batch.queries.double()
    return torch.stack([of_queries, of_keys], dim=1)


def _with_norms(towers: Sequence[Jacobians], kind: Norms) -> tuple[list[Side], _Batch]:
    shared = bool(towers[0].parameters & towers[-1].parameters)
    crossed = shared and kind == "exact"
    for tower in towers:
        tower.partners = _PARTNERS if crossed else 0
    sides = [tower.side(_MAX_KEPT_NUMBERS // len(towers)) for tower in towers]
    query, key = sides if len(sides) == 2 else (sides[0].every(0, 2), sides[0].every(1, 2))
    # ‖∇Z_ij‖² = ‖J_iᵀ z'_j‖² + ‖J'_jᵀ z_i‖² + 2⟨J_iᵀ z'_j, J'_jᵀ z_i⟩; the last term needs shared parameters.
    of_queries, of_keys = query.squares_along(key.z), key.squares_along(query.z).T
    squares = of_queries + of_keys
    if crossed:
        squares += 2 * _cross(towers, len(query.z))
    elif shared:  # Cauchy and Schwarz
        squares += 2 * (of_queries * of_keys).sqrt()
    floor = PAIR_NORM_FLOOR * (query.magnitude_bound[:, None] + key.magnitude_bound[None])
    finite = query.finite & key.finite
    return sides, _Batch(
        queries=torch.where(finite[:, None], query.z, 0.0),
        keys=torch.where(finite[:, None], key.z, 0.0),
        norms=torch.maximum(squares.clamp_min(0).sqrt(), floor),
        finite=finite,
        paths={name: side.path for name, side in zip(("queries", "keys"), (query, key), strict=True)},
    )


def _cross(towers: Sequence[Jacobians], n: int) -> Tensor:
    """Return the cross terms of all pairs, float64 `[n, n]`."""
    views = 2 // len(towers)
    sides = []
    for tower, view in ((towers[0], 0), (towers[-1], views - 1)):
        if tower.kept is None:
            raise ConfigError(
                "exact norms of towers that share parameters need the Jacobians of a whole batch, more than "
                f'the {_MAX_KEPT_NUMBERS} numbers that are kept: give a smaller batch, or norms="upper_bound"'
            )
        mine = [(at, rows, (at % views == view).nonzero()[:, 0]) for at, rows in tower.kept]
        sides.append([(at[some] // views, rows.at(some)) for at, rows, some in mine if len(some)])
    total = torch.zeros(n, n, dtype=torch.float64, device=towers[0].inputs.device)
    for i, queries in sides[0]:
        for j, keys in sides[1]:
            total[i[:, None], j] = cross_terms(queries, keys)
    return total


def _plain(z: Tensor) -> _Batch:
    finite = torch.isfinite(z).all(2).all(1)
    z = torch.where(finite[:, None, None], z, 0.0)
    norms = torch.full((len(z), len(z)), math.nan, device=z.device)
    return _Batch(queries=z[:, 0], keys=z[:, 1], norms=norms, finite=finite)
