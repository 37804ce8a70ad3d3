"""Stage 6, the group loss: InfoNCE inside one group, with augmented copies of the keys as negatives.

All losses take unit embeddings with the leading axes `[groups, group_size]` and return one scalar per
group, `[groups]`; no value of one group enters another's.

*Public keys*, where they are given, are the same constants for all groups: embeddings of public records,
without a gradient. A group's loss is then a function of its own records, the weights and public data, and
nothing in the proofs of a sensitivity asks for more (docs/theory/public-records.md).
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_info_nce(
    queries: Tensor,
    keys: Tensor,
    augmented_keys: Tensor | None = None,
    public_keys: Tensor | None = None,
    *,
    temperature: float | Tensor,
) -> Tensor:
    """Return InfoNCE of each group with its own records' keys as negatives (DP-GCL, Eq. 9 and Eq. 12).

    L_G = Σ_{i∈G} −log( e^{s_ii/τ} / Σ_{j∈G} ( e^{s_ij/τ} + Σ_m e^{s^m_ij/τ} ) ), where s^m_ij compares
    query i with the m-th augmented copy of key j; the sum over j includes j = i, as printed. Public keys p_1,
    …, p_M add Σ_m e^{q_i·p_m/τ} to the denominator of every query.

    Args:
      queries: `[groups, group_size, dim]` unit embeddings.
      keys: `[groups, group_size, dim]` unit embeddings; key i is the positive of query i.
      augmented_keys: `[groups, group_size, num_augmentations, dim]`, or None for none.
      public_keys: `[num_public, dim]` unit embeddings that all groups share, as constants; None for none.
      temperature: τ > 0.

    Returns:
      `[groups]`, one loss per group, summed over its records.

    >>> z = torch.nn.functional.normalize(torch.randn(3, 4, 8), dim=-1)
    >>> group_info_nce(z, z, temperature=0.5).shape
    torch.Size([3])
    """
    candidates = keys
    if augmented_keys is not None and augmented_keys.shape[2]:
        candidates = torch.cat([keys, augmented_keys.flatten(1, 2)], dim=1)
    logits = torch.einsum("gid,gjd->gij", queries, candidates) / temperature
    positives = torch.diagonal(logits, dim1=1, dim2=2)
    if public_keys is not None:
        logits = torch.cat([logits, queries @ public_keys.detach().T / temperature], dim=2)
    return (torch.logsumexp(logits, dim=2) - positives).sum(dim=1)


def symmetric_group_info_nce(
    first: Tensor,
    second: Tensor,
    augmented_first: Tensor | None = None,
    augmented_second: Tensor | None = None,
    public_first: Tensor | None = None,
    public_second: Tensor | None = None,
    *,
    temperature: float | Tensor,
) -> Tensor:
    """Return both directions of `group_info_nce` for two modalities (DP-GCL, Eq. 15), with augmented keys.

    Args:
      first, second: `[groups, group_size, dim]` unit embeddings of the two modalities.
      augmented_first, augmented_second: `[groups, group_size, num_augmentations, dim]`, or None.
      public_first, public_second: `[num_public, dim]`, or None.
      temperature: τ > 0.

    Returns:
      `[groups]`: first → second plus second → first.
    """
    forward = group_info_nce(first, second, augmented_second, public_second, temperature=temperature)
    return forward + group_info_nce(second, first, augmented_first, public_first, temperature=temperature)


def two_view_group_loss(
    embeddings: Tensor, *, temperature: float | Tensor, public_keys: Tensor | None = None
) -> Tensor:
    """Return `group_info_nce` of image views that one encoder embedded together.

    Args:
      embeddings: `[groups, group_size, 2 + num_augmentations, dim]`: the query, its key, and the
        augmented copies of the key.
      temperature: τ > 0.
      public_keys: `[num_public, 1, dim]`, see `group_info_nce`; None for none.

    Returns:
      `[groups]`.
    """
    public = None if public_keys is None else public_keys[:, 0]
    return group_info_nce(
        embeddings[:, :, 0], embeddings[:, :, 1], embeddings[:, :, 2:], public, temperature=temperature
    )
