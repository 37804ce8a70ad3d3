"""Stage 6 with a pairwise sigmoid loss inside one group (SigLIP; Zhai et al. 2023).

Every pair of a query and a key is a separate classification, "same record or not", so no softmax couples
the pairs. Inside groups this changes the optimisation, not the privacy: a group's loss depends only on that
group. The sensitivity, for adding or removing one record, is C if groups are sampled. If records are sampled,
it is 2C for groups of at least two and C for groups of one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def group_sigmoid(
    queries: Tensor,
    keys: Tensor,
    augmented_keys: Tensor | None = None,
    *,
    temperature: float | Tensor,
    bias: float | Tensor,
) -> Tensor:
    """Return L_G = Σ_{i,j∈G} Σ_k −log σ( y_ij·(s^k_ij/τ + b) ), y_ij = 1 for i = j and −1 otherwise.

    s^k_ij is the inner product of query i and candidate k of record j: its key or an augmented copy of it. A
    copy has the label of its key, so copies of a query's own key are positives. (`group_info_nce` has them in
    the denominator; as negatives here they would work against the key.) Without copies the loss is symmetric
    in queries and keys.

    Args:
      queries: `[groups, group_size, dim]` unit embeddings.
      keys: `[groups, group_size, dim]` unit embeddings; key i belongs to query i.
      augmented_keys: `[groups, group_size, num_augmentations, dim]`, or None for none.
      temperature: τ > 0; SigLIP starts at 0.1.
      bias: b; SigLIP starts at −10, because most pairs are negative. Small groups need a smaller |b|: at
        b = −s/τ − ln(S − 1) positives and negatives of similarity s have the same total weight.

    Returns:
      `[groups]`, summed over its pairs.

    >>> z = torch.nn.functional.normalize(torch.randn(3, 4, 8), dim=-1)
    >>> group_sigmoid(z, z, temperature=0.1, bias=-10.0).shape
    torch.Size([3])
    """
    candidates = keys[:, :, None]
    if augmented_keys is not None:
        candidates = torch.cat([candidates, augmented_keys], dim=2)
    logits = torch.einsum("gid,gjkd->gijk", queries, candidates) / temperature + bias
    same = torch.eye(queries.shape[1], dtype=torch.bool, device=queries.device)[None, :, :, None]
    return F.softplus(torch.where(same, -logits, logits)).flatten(1).sum(1)


def two_view_sigmoid_loss(embeddings: Tensor, *, temperature: float | Tensor, bias: float | Tensor) -> Tensor:
    """Return `group_sigmoid` of views embedded by one encoder.

    Args:
      embeddings: `[groups, group_size, 2 + num_augmentations, dim]`: the query, its key, and the key's
        copies.
      temperature: τ > 0.
      bias: b, added to every logit.

    Returns:
      `[groups]`.
    """
    queries, keys, copies = embeddings[:, :, 0], embeddings[:, :, 1], embeddings[:, :, 2:]
    return group_sigmoid(queries, keys, copies, temperature=temperature, bias=bias)
