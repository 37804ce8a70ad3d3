"""Full-batch InfoNCE with clipping per record or per group: the baselines `dp_sgd` and `group_clip`.

Both compare every record of the batch with every other one (Eq. 4 of DP-GCL), so every term depends on the
whole batch. One worker must hold the batch: there are no groups to distribute. They differ in what is
clipped:

- `PathClipping` clips the gradient **through one record's own views**. With L = Σ_i ℓ_i over
  embeddings z_i, and c_i = ∂L/∂z_i, record i contributes Clip_C(J_iᵀ c_i), where J_i = ∂z_i/∂w. This is what
  per-sample hooks compute under a contrastive loss. Unclipped, Σ_i J_iᵀ c_i = ∇L. The cotangents c_i come
  from detached embeddings, and ⟨z_i(w), c_i⟩ is a loss of record i only, so `GroupClipper` can clip its
  gradient. This costs one more forward pass.
- `FullBatchGroupClipping` clips Σ_{i∈G} ∇ℓ_i with each ∇ℓ_i taken **through the whole batch** (Eq. 8; with
  groups of one, Eq. 6 as printed). A group's gradient has terms from all n records, so ghost norms do not
  help: `batch_gradients` runs one backward pass per group.

Guarantee: for adding or removing one record, also under truncation to the cap, both have sensitivity 2·M·C,
where M is a public cap on the number of clipped terms of a batch (records for `PathClipping`, groups for
`FullBatchGroupClipping`). With sampling at rate q the Poisson-subsampled Gaussian with q and noise multiplier
std/(2·M·C) dominates; the number of records need not be known.

Proof sketch. Every term has norm at most C whatever the batch is, so ‖f(B)‖ ≤ M·C for every batch within the
cap, and for **any** two batches ‖f(B) − f(B')‖ ≤ ‖f(B)‖ + ‖f(B')‖ ≤ 2·M·C. ∎ A record that joins may push
another record out, and that swap is covered, too. See docs/theory/path-clipping.md.

Records whose embedding is not finite are removed before records are compared: they are no record's negative
and contribute zero. A finite embedding with a derivative that is not finite sets its own term to zero in
`PathClipping` and every term in `FullBatchGroupClipping`; the bound holds nonetheless.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import GroupClipper, check_gamma, clip_factor
from dpgcl_core.clipping.full_precision import full_precision
from dpgcl_core.clipping.one_pass import squares_of
from dpgcl_core.clipping.types import Embed, GroupReport, num_trainable
from dpgcl_core.errors import ConfigError, require_least, require_positive
from dpgcl_core.methods.baselines.batch_gradients import gradients_through_batch

OWN_PATH = "own path"
WHOLE_BATCH = "through the whole batch"

RECORDS_AT_ONCE = 256
"""The number of records in one pass through the network."""
_GRADIENT_NUMBERS = 2**26
"""The largest size of the per-group gradients that are held at a time, in numbers."""


def record_info_nce(
    embeddings: Tensor, *, temperature: float, rows: Tensor | None = None, pairs: bool = False
) -> Tensor:
    """Return each record's term of InfoNCE over a batch, with augmented keys as further negatives (Eq. 4).

    ℓ_i = −log( e^{s_ii/τ} / Σ_j ( e^{s_ij/τ} + Σ_m e^{s^m_ij/τ} ) ), where s_ij is the inner product of query
    i and key j, and s^m_ij of query i and the m-th copy of key j. The sum of the terms is
    `dpgcl_core.losses.info_nce.two_view_group_loss` of the batch as one group. For pairs, a record's term is
    the term of its image among the texts plus the term of its text among the images (Eq. 15).

    Args:
      embeddings: `[records, 2 + num_augmentations, dim]`: query, key and copies of the key; for pairs
        `[records, 2 + 2·num_augmentations, dim]`, in the order of `losses.image_text.interleaved`.
      temperature: τ > 0.
      rows: indices of the records whose terms are returned; None for all.
      pairs: whether the records are pairs of an image and a text.

    Returns:
      `[records]`, or `[len(rows)]`.

    >>> z = torch.nn.functional.normalize(torch.randn(5, 3, 8), dim=-1)
    >>> record_info_nce(z, temperature=0.5).shape
    torch.Size([5])
    """
    rows = torch.arange(len(embeddings), device=embeddings.device) if rows is None else rows
    if not pairs:
        return _terms(embeddings[:, 0], embeddings[:, 1:], rows, temperature)
    images, texts = embeddings[:, 0::2], embeddings[:, 1::2]
    return _terms(images[:, 0], texts, rows, temperature) + _terms(texts[:, 0], images, rows, temperature)


def _terms(queries: Tensor, keys: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """Return InfoNCE of queries `[records, dim]` in `rows` among keys `[records, 1 + copies, dim]`."""
    candidates = keys.transpose(0, 1).flatten(0, 1)  # keys first, then the copies
    logits = queries[rows] @ candidates.T / temperature
    return torch.logsumexp(logits, dim=1) - logits.gather(1, rows[:, None])[:, 0]


@dataclass(frozen=True, kw_only=True)
class PathClipping:
    """`dp_sgd`: full-batch InfoNCE, each record's own-path gradient clipped to `l2_clip_norm`.

    The own path is the way in which the batch's loss depends on the weights through the record's own views.

    Guarantee: for batches of at most `batch_cap` records the sum moves by at most `sensitivity` when one
    record is added or removed, also under truncation to the cap (see the module).

    Attributes:
      l2_clip_norm: C; inf for the plain gradient (non-private).
      batch_cap: public cap on the number of records of a batch.
      temperature: τ, a constant, because a learned τ is on no record's own path.
      gamma: γ of automatic clipping; None for flat clipping.
      pairs: whether records are pairs of an image and a text, see `record_info_nce`.

    Raises:
      ConfigError: a field is outside its range.
    """

    l2_clip_norm: float
    batch_cap: int
    temperature: float
    gamma: float | None = None
    pairs: bool = False

    def __post_init__(self) -> None:
        _check_ranges(self)
        require_least(self, 1, "batch_cap")

    @property
    def sensitivity(self) -> float:
        """2·batch_cap·C, for adding or removing one record."""
        return 2 * self.batch_cap * self.l2_clip_norm

    def add_clipped_sum(self, total: Tensor, model: nn.Module, embed: Embed, inputs: Tensor) -> GroupReport:
        """Add Σ_i Clip_C(J_iᵀ c_i) over records i to `total`, in place.

        J_i is the Jacobian of record i's embeddings z_i, and c_i = ∂L/∂z_i for the batch's InfoNCE L.

        Args:
          total: float64 `[num_trainable(model)]`, in the order of `trainable_parameters`.
          model: the network that `embed` calls; it must not mix records.
          embed: stage 5, the embedding; it keeps the leading axes of its input.
          inputs: `[1, records, 2 + num_augmentations, ...]`, the whole batch; it may be empty.

        Returns:
          For each record its norm, its InfoNCE term, and whether it was removed.

        Raises:
          ConfigError: the batch is larger than the cap.
        """
        with full_precision(total.device.type):
            records = _whole_batch(inputs, self.batch_cap, "batch_cap")
            if not len(records):
                return _empty_report(0, total.device, OWN_PATH)
            embeddings = embed_without_graph(embed, records)
            mask = finite_rows(embeddings)
            leaf = embeddings[mask].requires_grad_()
            with torch.enable_grad():
                losses = record_info_nce(leaf, temperature=self.temperature, pairs=self.pairs)
                (cotangents,) = torch.autograd.grad(losses.sum(), leaf)
            return add_clipped_paths(
                total,
                model,
                embed,
                records,
                cotangents,
                losses=losses.detach(),
                mask=mask,
                clipper=GroupClipper(l2_clip_norm=self.l2_clip_norm, gamma=self.gamma),
                max_at_once=RECORDS_AT_ONCE,
            )


def add_clipped_paths(
    total: Tensor,
    model: nn.Module,
    embed: Embed,
    records: Tensor,
    cotangents: Tensor,
    *,
    losses: Tensor,
    mask: Tensor,
    clipper: GroupClipper,
    max_at_once: int,
) -> GroupReport:
    """Add Σ_i Clip_C(J_iᵀ c_i) over the records i of `mask` to `total`, in place.

    J_i is the Jacobian of record i's embeddings z_i.

    Args:
      total: float64 `[num_trainable(model)]`.
      model: the network that `embed` calls.
      embed: maps inputs to embeddings.
      records: `[records, views, ...]`.
      cotangents: `[records of mask, views, dim]`, the c_i = ∂L/∂z_i of these records.
      losses: `[records of mask]`, for the report.
      mask: `[records]`, which records take part.
      clipper: clips one record's gradient.
      max_at_once: the most records in one pass.

    Returns:
      The report, by record.
    """
    report = GroupReport(
        norms=torch.full((len(records),), math.nan, device=total.device),
        losses=torch.full((len(records),), math.nan, device=total.device),
        non_finite=~mask,
    )
    if not mask.any():
        return report
    report.losses[mask] = losses.to(report.losses)
    reports = []
    for some, their in zip(
        torch.split(records[mask], max_at_once), torch.split(cotangents, max_at_once), strict=True
    ):  # each record is a group of one; its cotangent is passed along with it
        pair = (some[:, None], their[:, None].detach())
        reports.append(clipper.add_clipped_sum(total, model, _on_own_path(embed), pair))
    report.norms[mask] = torch.cat([part.norms for part in reports])
    report.non_finite[mask] = torch.cat([part.non_finite for part in reports])
    return replace(report, paths={"": OWN_PATH} | dict(reports[-1].paths))


def _on_own_path(embed: Embed) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """Return an objective of (records, cotangents) with the losses ⟨z_i(w), c_i⟩ and gradients J_iᵀ c_i."""

    def losses(inputs: tuple[Tensor, Tensor]) -> Tensor:
        records, cotangents = inputs
        return (embed(records) * cotangents).flatten(1).sum(1)

    return losses


@dataclass(frozen=True, kw_only=True)
class FullBatchGroupClipping:
    """`group_clip`: full-batch InfoNCE, the summed terms of each group clipped to `l2_clip_norm` (Eq. 8).

    Guarantee: for batches of at most `num_groups_cap` groups the sum moves by at most `sensitivity` when
    one record is added or removed, also under truncation to the cap (see the module). A sample truncated to
    b records gives at most ⌊b/S⌋ groups of exactly S.

    Attributes:
      l2_clip_norm: C, finite.
      num_groups_cap: public cap on the number of groups of a batch.
      temperature: τ, a constant.
      gamma: γ of automatic clipping; None for flat clipping.

    Raises:
      ConfigError: a field is outside its range.
    """

    l2_clip_norm: float
    num_groups_cap: int
    temperature: float
    gamma: float | None = None

    def __post_init__(self) -> None:
        _check_ranges(self)
        require_least(self, 1, "num_groups_cap")

    @property
    def sensitivity(self) -> float:
        """2·num_groups_cap·C, for adding or removing one record."""
        return 2 * self.num_groups_cap * self.l2_clip_norm

    def add_clipped_sum(self, total: Tensor, model: nn.Module, embed: Embed, inputs: Tensor) -> GroupReport:
        """Add Σ_G Clip_C(Σ_{i∈G} ∇ℓ_i) over groups G to `total`, in place; ℓ_i is record i's InfoNCE term.

        Args:
          total: float64 `[num_trainable(model)]`, in the order of `trainable_parameters`.
          model: the network that `embed` calls; it must not mix records.
          embed: stage 5, the embedding; it keeps the leading axes of its input.
          inputs: `[groups, group_size, 2 + num_augmentations, ...]`, all groups of the batch, or none.

        Returns:
          The report, by group.

        Raises:
          ConfigError: the batch has more groups than the cap.
        """
        with full_precision(total.device.type):
            num_groups = len(inputs)
            _check_count(num_groups, self.num_groups_cap, "num_groups_cap")
            if not num_groups:
                return _empty_report(0, total.device, WHOLE_BATCH)
            records = inputs.flatten(0, 1)
            embeddings = embed_without_graph(embed, records)
            mask = finite_rows(embeddings)
            if not mask.any():
                return _empty_report(num_groups, total.device, WHOLE_BATCH)
            group_of = torch.arange(num_groups, device=inputs.device).repeat_interleave(inputs.shape[1])
            embeddings, group_of = embeddings[mask], group_of[mask]
            terms = record_info_nce(embeddings, temperature=self.temperature)
            losses = torch.zeros(num_groups, dtype=terms.dtype, device=terms.device)
            losses = losses.index_add(0, group_of, terms)
            norms = []
            numbers = max(num_trainable(model), embeddings.numel())
            for groups in torch.split(torch.arange(num_groups), max(1, _GRADIENT_NUMBERS // numbers)):
                gradients = gradients_through_batch(
                    model,
                    embed,
                    records[mask],
                    self._cotangents(embeddings, [(group_of == group).nonzero()[:, 0] for group in groups]),
                    max_records_at_once=RECORDS_AT_ONCE,
                )
                norms.append(_add_clipped(total, gradients, self.l2_clip_norm, self.gamma))
            return GroupReport(
                norms=torch.cat(norms),
                losses=losses,
                non_finite=~torch.isfinite(torch.cat(norms)),
                paths={"": WHOLE_BATCH},
            )

    def _cotangents(self, embeddings: Tensor, members: list[Tensor]) -> Tensor:
        """Return ∂L_G/∂z, `[groups, records, views, dim]`, for groups G given by their members' indices."""
        cotangents, leaf = [], embeddings.detach().requires_grad_()
        with torch.enable_grad():
            for rows in members:
                loss = record_info_nce(leaf, temperature=self.temperature, rows=rows).sum()
                cotangents.append(torch.autograd.grad(loss, leaf)[0])
        return torch.stack(cotangents)


def _empty_report(count: int, device: torch.device, path: str) -> GroupReport:
    """Return the report of a batch without clipped gradients."""
    nans = torch.full((count,), math.nan, device=device)
    return GroupReport(norms=nans, losses=nans, non_finite=torch.isnan(nans), paths={"": path})


def _add_clipped(total: Tensor, gradients: Tensor, l2_clip_norm: float, gamma: float | None) -> Tensor:
    """Add the clipped rows of `gradients` to `total`, and return their norms; non-finite rows add zero."""
    norms = squares_of(gradients).sqrt().float()
    if math.isinf(l2_clip_norm):
        factor, finite = torch.ones_like(norms), torch.isfinite(norms)
    else:
        factor, finite = clip_factor(norms, l2_clip_norm, gamma)
    for gradient, each, counts in zip(gradients, factor, finite, strict=True):
        total += torch.where(counts, gradient, torch.zeros_like(gradient)) * each
    return norms


def embed_without_graph(embed: Embed, records: Tensor) -> Tensor:
    """Return embeddings `[records, views, dim]` of `[records, views, ...]`, without a graph."""
    with torch.no_grad():
        return torch.cat([embed(some[None])[0] for some in torch.split(records, RECORDS_AT_ONCE)])


def finite_rows(embeddings: Tensor) -> Tensor:
    """Return a mask of the records with a finite embedding in every view, `[records]`."""
    return torch.isfinite(embeddings).flatten(1).all(1)


def _whole_batch(inputs: Tensor, cap: int, name: str) -> Tensor:
    if len(inputs) != 1:
        raise ConfigError(
            f"full-batch negatives require the whole batch as one group, [1, records, views, ...]; got "
            f"{len(inputs)} groups"
        )
    _check_count(inputs.shape[1], cap, name)
    return inputs[0]


def _check_count(count: int, cap: int, name: str) -> None:
    if count > cap:
        raise ConfigError(
            f"the batch must not exceed {name} = {cap}, on which the sensitivity depends. Truncate the "
            "sample (dpgcl_core.sampling.truncated)"
        )


def _check_ranges(rule: PathClipping | FullBatchGroupClipping) -> None:
    check_gamma(rule.gamma)
    if not rule.l2_clip_norm > 0:
        raise ConfigError(f"l2_clip_norm must be positive; got {rule.l2_clip_norm}")
    require_positive(rule, "temperature")
