"""Stage 6 for two modalities: both directions of InfoNCE inside one group, with a learned temperature.

A group's image-text pairs are compared in both directions, and each direction has the augmented copies of
*its* keys as further negatives: images against texts and copies of texts, texts against images and copies of
images (Eq. 12 and Eq. 15 of DP-GCL). The temperature is a number, or exp(−`logit_scale`) of a parameter
(`with_learned_temperature`).

Guarantee: for adding or removing one record, an image with all its captions, the sensitivity is C if groups
are sampled, and 2C if records are sampled (C for groups of one). The steps of the proof:

1. A record is in at most one group. The choice of its caption and the augmentation of image and text are
   drawn per record, from its id and the step, and its copies stay in its group. So at most one group
   of a step differs under either coupling (docs/theory/group-sampling.md, docs/theory/groups.md): one more
   group is complete, or one group is exchanged.
2. L_G is a function of only the weights and G's own records: neither direction compares across groups.
3. Both directions are summed *before* clipping, and ∇L_G is the gradient of all trainable weights at once, of
   both towers and of `logit_scale`. So a group contributes one vector of norm at most C: a new group moves
   the sum by at most C, an exchanged group by at most 2C. If the directions were clipped separately, these
   bounds would double. If `logit_scale` were not part of the norm, its gradient would have no bound.
4. All groups share one `logit_scale`, which couples them no more than any other weight does: through its
   value at the start of the step, which is a function of earlier releases. `clamp_logit_scale_` clamps the
   noised weight to public bounds, which is post-processing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.info_nce import symmetric_group_info_nce
from dpgcl_core.losses.sigmoid import group_sigmoid

MIN_LOGIT_SCALE, MAX_LOGIT_SCALE = 0.0, math.log(100.0)
"""Bounds of CLIP's logarithm of 1/τ: τ stays between 1/100 and 1 (Radford et al. 2021). Public constants."""


def interleaved(images: Tensor, texts: Tensor) -> Tensor:
    """Return image and text views in the order that losses of pairs expect: image, text, image, text, …

    Even indices are images and odd indices are texts, whatever the number of copies.

    Args:
      images: `[groups, group_size, views, ...]`: the image, then its copies.
      texts: a tensor of the same shape: the caption, then its copies.

    Returns:
      `[groups, group_size, 2·views, ...]`.

    Raises:
      ConfigError: the shapes differ.

    >>> interleaved(torch.zeros(3, 4, 2, 8), torch.ones(3, 4, 2, 8))[0, 0, :, 0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    if images.shape != texts.shape or images.ndim < 4:
        raise ConfigError(
            "both towers must return embeddings [groups, group_size, 1 + num_augmentations, dim]; got "
            f"{list(images.shape)} for images and {list(texts.shape)} for texts. Use the same number of "
            "augmentations and the same embedding width in both"
        )
    return torch.stack([images, texts], dim=3).flatten(2, 3)


def image_text_group_loss(embeddings: Tensor, *, temperature: float | Tensor) -> Tensor:
    """Return image → text plus text → image InfoNCE of each group, with the augmented copies of the keys.

    With images x, captions y and copies x^m, y^m of G's own records, and s the inner product,

        L_G = Σ_{i∈G} −log( e^{s(x_i,y_i)/τ} / Σ_{j∈G} ( e^{s(x_i,y_j)/τ} + Σ_m e^{s(x_i,y^m_j)/τ} ) )
                      −log( e^{s(y_i,x_i)/τ} / Σ_{j∈G} ( e^{s(y_i,x_j)/τ} + Σ_m e^{s(y_i,x^m_j)/τ} ) )

    (DP-GCL, Eq. 12 in both directions of Eq. 15). For the sensitivity of its clipped sum see the module.

    Args:
      embeddings: `[groups, group_size, 2 + 2·num_augmentations, dim]`, float32 or better, in the order of
        `interleaved`: image, caption, then copies of both.
      temperature: τ > 0; 1 if τ is learned, because the embeddings are then already scaled by 1/√τ.

    Returns:
      `[groups]`, one loss per group, summed over its records.

    Raises:
      ConfigError: the number of views is odd or zero.

    >>> z = torch.nn.functional.normalize(torch.randn(3, 4, 6, 8), dim=-1)
    >>> image_text_group_loss(z, temperature=0.01).shape
    torch.Size([3])
    """
    check_pairs(embeddings)
    return symmetric_group_info_nce(
        embeddings[:, :, 0],
        embeddings[:, :, 1],
        embeddings[:, :, 2::2],
        embeddings[:, :, 3::2],
        temperature=temperature,
    )


def image_text_sigmoid_loss(
    embeddings: Tensor, *, temperature: float | Tensor, bias: float | Tensor
) -> Tensor:
    """Return `group_sigmoid` of images among captions plus captions among images, with augmented copies.

    Args:
      embeddings, temperature: see `image_text_group_loss`.
      bias: b, added to every logit; see `group_sigmoid`.

    Returns:
      `[groups]`.

    Raises:
      ConfigError: the number of views is odd or zero.
    """
    check_pairs(embeddings)
    images, texts = embeddings[:, :, 0::2], embeddings[:, :, 1::2]
    to_texts = group_sigmoid(
        images[:, :, 0], texts[:, :, 0], texts[:, :, 1:], temperature=temperature, bias=bias
    )
    return to_texts + group_sigmoid(
        texts[:, :, 0], images[:, :, 0], images[:, :, 1:], temperature=temperature, bias=bias
    )


def check_pairs(embeddings: Tensor) -> None:
    """Raise ConfigError unless there are as many views of the image as of the text."""
    if (num_views := embeddings.shape[2]) == 0 or num_views % 2:
        raise ConfigError(
            "image-text embeddings must hold as many views of the image as of the text; got "
            f"{num_views} views. Order them with `interleaved`"
        )


def with_learned_temperature(embeddings: Tensor, logit_scale: Tensor) -> Tensor:
    """Return embeddings times 1/√τ, τ = exp(−logit_scale), so a loss at τ = 1 divides inner products by τ.

    Args:
      embeddings: `[groups, group_size, views, dim]`, of unit length.
      logit_scale: ln(1/τ), a scalar parameter *of the model*: only the model's trainable parameters are
        inside the group norm.

    >>> z = torch.nn.functional.normalize(torch.ones(1, 1, 2, 8), dim=-1)
    >>> scaled = with_learned_temperature(z, torch.tensor(MAX_LOGIT_SCALE))
    >>> round((scaled[0, 0, 0] @ scaled[0, 0, 1]).item(), 2)
    100.0
    """
    return embeddings * (0.5 * logit_scale).exp()


def clamp_logit_scale_(logit_scale: Tensor) -> None:
    """Clamp a learned `logit_scale` to its public bounds, in place; call it after each step.

    A clamp inside the loss would have zero gradient outside the bounds: noise may move the parameter there,
    and no gradient would move it back. NaN becomes the lower bound.

    >>> scale = torch.nn.Parameter(torch.tensor(9.0))
    >>> clamp_logit_scale_(scale)
    >>> round(scale.item(), 3)
    4.605
    """
    with torch.no_grad():
        logit_scale.nan_to_num_(nan=MIN_LOGIT_SCALE).clamp_(MIN_LOGIT_SCALE, MAX_LOGIT_SCALE)
