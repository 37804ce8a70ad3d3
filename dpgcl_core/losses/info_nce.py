"""Stage 6, the group loss: InfoNCE inside one group, with augmented copies of the keys as negatives.

All losses take unit embeddings with the leading axes `[groups, group_size]` and return one scalar per
group, `[groups]`. No group's loss depends on another group's values.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_info_nce(
    queries: Tensor,
    keys: Tensor,
    augmented_keys: Tensor | None = None,
    *,
    temperature: float | Tensor,
) -> Tensor:
    """Return InfoNCE of each group with its own records' keys as negatives (DP-GCL, Eq. 9 and Eq. 12).

    L_G = Σ_{i∈G} −log( e^{s_ii/τ} / Σ_{j∈G} ( e^{s_ij/τ} + Σ_m e^{s^m_ij/τ} ) ), where s_ij is the inner
    product of query i and key j, and s^m_ij of query i and the m-th augmented copy of key j. The sum over j
    includes j = i, as printed in the paper.

    Args:
      queries: `[groups, group_size, dim]` unit embeddings.
      keys: `[groups, group_size, dim]` unit embeddings; key i is the positive of query i.
      augmented_keys: `[groups, group_size, num_augmentations, dim]`, or None for none.
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
    return (torch.logsumexp(logits, dim=2) - positives).sum(dim=1)


def symmetric_group_info_nce(
    first: Tensor,
    second: Tensor,
    augmented_first: Tensor | None = None,
    augmented_second: Tensor | None = None,
    *,
    temperature: float | Tensor,
) -> Tensor:
    """Return both directions of `group_info_nce` for two modalities (DP-GCL, Eq. 15), with augmented keys.

    Args:
      first, second: `[groups, group_size, dim]` unit embeddings of the two modalities.
      augmented_first, augmented_second: `[groups, group_size, num_augmentations, dim]`, or None.
      temperature: τ > 0.

    Returns:
      `[groups]`: first → second plus second → first.
    """
    forward = group_info_nce(first, second, augmented_second, temperature=temperature)
    return forward + group_info_nce(second, first, augmented_first, temperature=temperature)


def two_view_group_loss(embeddings: Tensor, *, temperature: float | Tensor) -> Tensor:
    """Return `group_info_nce` of image views embedded by one encoder.

    Args:
      embeddings: `[groups, group_size, 2 + num_augmentations, dim]`: the query, its key, and the
        augmented copies of the key.
      temperature: τ > 0.

    Returns:
      `[groups]`.
    """
    return group_info_nce(
        embeddings[:, :, 0], embeddings[:, :, 1], embeddings[:, :, 2:], temperature=temperature
    )
