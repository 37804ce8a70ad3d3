"""DPCL: SimCLR with a noised similarity matrix, Barlow Twins with noised means and variances.

Both draw batches of a fixed size |B| without replacement, with two views of each record. The neighbouring
relation is **replacing one record**. First a statistic that couples the records is released with noise. The
loss is computed from its noised value. Then every **view's** own-path gradient is clipped to C, and the sum
gets separate noise. All of a step's mechanisms use the same sample, so their noise multipliers go into one
event of `dpgcl_core.accounting.fixed_size_accounting.FixedSizeGaussians`.

**The published claim is false.** The paper says that once the statistic is noised the sum of gradients
has sensitivity 4C: two views change, by 2C each. That treats the other records' gradients as unchanged. But
the cotangent of view u is c_u = Σ_v (∂L/∂S_uv + ∂L/∂S_vu) z_v, and it contains z_v of the replaced record,
noised similarity or not. For both methods docs/theory/dpcl.md has a counterexample in which the sum moves by
4(|B| − 1)C. So `as-published` marks runs that no proof covers.

**The proven bound** (`proven`), for replacing one record: the sum moves by at most 4|B|C, because 2|B|
vectors of norm at most C sum to a norm of at most 2|B|C, whatever the batch is. This holds with and without
noise on the statistics.

The statistics' own sensitivities hold for embeddings in the unit ball, onto which embeddings are projected
here: 4·√(2|B| − 1) for the similarities, 2/|B| for the mean and 6 for the sum of squared errors of one view.

A record whose embedding is not finite is compared as the zero vector, and its views contribute zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import GroupClipper, check_gamma
from dpgcl_core.clipping.full_precision import full_precision
from dpgcl_core.clipping.types import Embed, GroupReport
from dpgcl_core.errors import ConfigError, require_choice, require_least, require_positive
from dpgcl_core.methods.baselines.path_clipping import (
    RECORDS_AT_ONCE,
    add_clipped_paths,
    embed_without_graph,
    finite_rows,
)
from dpgcl_core.noise.gaussian import noised
from dpgcl_core.noise.randomness import Draws

AS_PUBLISHED: Literal["as-published"] = "as-published"
PROVEN: Literal["proven"] = "proven"
GuaranteeLabel = Literal["as-published", "proven"]

NUM_VIEWS = 2


@dataclass(frozen=True, kw_only=True)
class _TwoViewRule:
    """What the rules of SimCLR and Barlow Twins have in common: batch size, clipped views and sensitivity.

    Attributes:
      l2_clip_norm: C, the bound on one view's gradient.
      batch_size: |B|, the number of records in every batch.
      guarantee_label: "as-published" for the paper's 4C, "proven" for 4|B|C.
      gamma: γ of automatic clipping; None for flat clipping.
    """

    l2_clip_norm: float
    batch_size: int
    guarantee_label: GuaranteeLabel
    gamma: float | None = None

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        require_positive(self, "l2_clip_norm")
        require_least(self, 2, "batch_size")
        require_choice("guarantee label", self.guarantee_label, (AS_PUBLISHED, PROVEN))

    @property
    def sensitivity(self) -> float:
        """The sensitivity of the sum of gradients, for replacing one record: 4|B|C, or 4C as published.

        The published 4C is **false**.
        """
        return 4 * self.l2_clip_norm * (self.batch_size if self.guarantee_label == PROVEN else 1)

    def _embeddings(self, embed: Embed, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings in the unit ball, float64 `[records, 2, dim]`, and a mask of finite records."""
        if inputs.shape[:1] != (1,) or inputs.shape[1:3] != (self.batch_size, NUM_VIEWS):
            raise ConfigError(
                f"inputs must be [1, batch_size = {self.batch_size}, {NUM_VIEWS} views, ...]; got "
                f"{list(inputs.shape)}"
            )
        embeddings = embed_without_graph(embed, inputs[0]).double()
        finite = finite_rows(embeddings)
        embeddings = torch.where(finite[:, None, None], embeddings, torch.zeros_like(embeddings))
        return embeddings / embeddings.norm(dim=-1, keepdim=True).clamp_min(1), finite

    def _add_clipped_views(
        self,
        total: Tensor,
        model: nn.Module,
        embed: Embed,
        inputs: Tensor,
        loss: tuple[Tensor, Tensor, Tensor],
    ) -> GroupReport:
        """Add each view's clipped gradient; `loss` is (terms by view, embeddings, mask of kept records)."""
        terms, leaf, mask = loss
        (cotangents,) = torch.autograd.grad(terms.sum(), leaf)
        view_mask = mask.repeat_interleave(NUM_VIEWS)
        return add_clipped_paths(
            total,
            model,
            embed,
            inputs[0].flatten(0, 1)[:, None],
            cotangents.flatten(0, 1)[view_mask][:, None].float(),
            losses=terms.detach()[view_mask],
            mask=view_mask,
            clipper=GroupClipper(l2_clip_norm=self.l2_clip_norm, gamma=self.gamma),
            max_at_once=NUM_VIEWS * RECORDS_AT_ONCE,
        )


def nt_xent(similarities: Tensor, *, temperature: float) -> Tensor:
    """Return each view's term of NT-Xent, divided by the number of views (Eq. 3 and 4 of DPCL).

    Args:
      similarities: `[2·records, 2·records]`; rows 2k and 2k + 1 are the two views of record k. The
        diagonal is not used.
      temperature: τ > 0.

    Returns:
      `[2·records]`; their sum is the loss.

    >>> nt_xent(torch.eye(6), temperature=0.5).shape
    torch.Size([6])
    """
    num_views = len(similarities)
    rows = torch.arange(num_views, device=similarities.device)
    logits = similarities / temperature
    others = logits.masked_fill(torch.eye(num_views, dtype=torch.bool, device=logits.device), -math.inf)
    return (torch.logsumexp(others, dim=1) - logits[rows, rows ^ 1]) / num_views


@dataclass(frozen=True, kw_only=True)
class DpSimClr(_TwoViewRule):
    """SimCLR with DP-similarity (DPCL, 3.2): NT-Xent at the noised similarities of all 2|B| views.

    Guarantee: see the module. With "as-published" there is **none**.

    Attributes:
      temperature: τ > 0.
      similarity_noise_multiplier: noise std / (4·√(2|B| − 1)); 0 uses exact similarities, which only
        "proven" allows (the paper's "original DPSGD").

    Raises:
      ConfigError: a field is outside its range.
    """

    temperature: float
    similarity_noise_multiplier: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "temperature")
        _check_noise(self.guarantee_label, similarity_noise_multiplier=self.similarity_noise_multiplier)

    @property
    def similarity_sensitivity(self) -> float:
        """4·√(2|B| − 1), for replacing one record."""
        return 4 * math.sqrt(2 * self.batch_size - 1)

    def add_clipped_sum(
        self, total: Tensor, model: nn.Module, embed: Embed, inputs: Tensor, *, generator: Draws
    ) -> GroupReport:
        """Add Σ_u Clip_C(J_uᵀ c_u) over views u to `total`, in place.

        J_u is the Jacobian of view u's embedding z_u, and c_u = ∂L/∂z_u for the loss L.

        Args:
          total: float64 `[num_trainable(model)]`, in the order of `trainable_parameters`.
          model: the network that `embed` calls; it must not mix records.
          embed: stage 5, the embedding; it keeps the leading axes of its input.
          inputs: `[1, batch_size, 2, ...]`.
          generator: secret draws for the similarities' noise.

        Returns:
          The report, by view: norms, NT-Xent terms at the noised similarities, which views contributed zero.

        Raises:
          ConfigError: the batch does not have the fixed size.
        """
        with full_precision(total.device.type):
            embeddings, mask = self._embeddings(embed, inputs)
            leaf = embeddings.requires_grad_()
            law = self.similarity_noise_multiplier, self.similarity_sensitivity
            with torch.enable_grad():
                views = leaf.flatten(0, 1)
                exact = views @ views.T
                released = noised(exact.detach(), *law, generator)
                # The value is the released value, but the derivative is that of the exact similarities.
                terms = nt_xent(released + (exact - exact.detach()), temperature=self.temperature)
            return self._add_clipped_views(total, model, embed, inputs, (terms, leaf, mask))


@dataclass(frozen=True, kw_only=True)
class DpBarlowTwins(_TwoViewRule):
    """Barlow Twins with DP-mean and DP-variance (DPCL, 3.3): each view has its own mean and variance.

    The loss uses the released means and variances as constants: no gradient passes through them. Both views'
    means are noised as one vector (sensitivity 2√2/|B|), and so are both sums of squares (6√2). This costs
    the same as releasing them separately: one Gaussian at σ/√2 equals two at σ.

    Guarantee: see the module. With "as-published" there is **none**.

    Attributes:
      mean_noise_multiplier: noise std / (2/|B|), for each of the two means.
      variance_noise_multiplier: noise std / 6, for each of the two sums of squared errors.
      variance_floor: the public positive constant that replaces smaller noised variances.
      off_diagonal_weight: λ of Eq. 5.

    Raises:
      ConfigError: a field is outside its range.
    """

    mean_noise_multiplier: float
    variance_noise_multiplier: float
    variance_floor: float
    off_diagonal_weight: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_noise(
            self.guarantee_label,
            mean_noise_multiplier=self.mean_noise_multiplier,
            variance_noise_multiplier=self.variance_noise_multiplier,
        )
        require_positive(self, "variance_floor", "off_diagonal_weight")

    @property
    def mean_sensitivity(self) -> float:
        """2/|B|, the sensitivity of one view's mean, for replacing one record."""
        return 2 / self.batch_size

    @property
    def squares_sensitivity(self) -> float:
        """6, the sensitivity of one view's sum of squared errors, for replacing one record."""
        return 6.0

    def add_clipped_sum(
        self, total: Tensor, model: nn.Module, embed: Embed, inputs: Tensor, *, generator: Draws
    ) -> GroupReport:
        """Add Σ_u Clip_C(J_uᵀ c_u) over views u to `total`, in place.

        J_u is the Jacobian of view u's embedding z_u, and c_u = ∂L/∂z_u for the loss L.

        Args:
          total: float64 `[num_trainable(model)]`, in the order of `trainable_parameters`.
          model: the network that `embed` calls; it must not mix records.
          embed: stage 5, the embedding; it keeps the leading axes of its input.
          inputs: `[1, batch_size, 2, ...]`.
          generator: secret draws for the noise of means and variances.

        Returns:
          The report, by view: norms, equal shares of the loss, and which views contributed zero.

        Raises:
          ConfigError: the batch does not have the fixed size.
        """
        with full_precision(total.device.type):
            embeddings, mask = self._embeddings(embed, inputs)
            leaf = embeddings.requires_grad_()
            means, variances = self._noised_moments(leaf.detach(), generator)
            with torch.enable_grad():
                first, second = ((leaf - means) / variances.sqrt()).unbind(1)
                correlation = first.T @ second / (self.batch_size - 1)
                loss = barlow_twins(correlation, off_diagonal_weight=self.off_diagonal_weight)
                num_views = NUM_VIEWS * self.batch_size
                terms = (loss / num_views).expand(num_views)
            return self._add_clipped_views(total, model, embed, inputs, (terms, leaf, mask))

    def _noised_moments(self, embeddings: Tensor, generator: Draws) -> tuple[Tensor, Tensor]:
        """Return noised means and floored noised variances, `[2, dim]` each."""
        exact = embeddings.mean(0)
        squares = (embeddings - exact).square().sum(0)
        means = noised(exact, self.mean_noise_multiplier, self.mean_sensitivity, generator)
        errors = noised(squares, self.variance_noise_multiplier, self.squares_sensitivity, generator)
        return means, (errors / (self.batch_size - 1)).clamp_min(self.variance_floor)


def barlow_twins(correlation: Tensor, *, off_diagonal_weight: float) -> Tensor:
    """Return Σ_i (1 − R_ii)² + λ Σ_{i≠j} R_ij² of a cross-correlation R, `[dim, dim]` (Eq. 5 of DPCL).

    λ is `off_diagonal_weight`.

    >>> float(barlow_twins(torch.eye(3), off_diagonal_weight=0.005))
    0.0
    """
    diagonal = torch.diagonal(correlation)
    off_diagonal = correlation.square().sum() - diagonal.square().sum()
    return (1 - diagonal).square().sum() + off_diagonal_weight * off_diagonal


def _check_noise(guarantee_label: GuaranteeLabel, **noise_multipliers: float) -> None:
    for name, value in noise_multipliers.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"{name} must be finite and not negative; got {value}")
        if value == 0 and guarantee_label == AS_PUBLISHED:
            raise ConfigError(
                f"{name} must be positive for {AS_PUBLISHED!r}, which adds noise to its statistics; got 0. "
                f'Use guarantee_label="{PROVEN}" for exact statistics'
            )
