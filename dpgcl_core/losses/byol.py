"""Stage 6 without negatives: regression onto a target network's embedding (BYOL; Grill et al. 2020).

The private network predicts, from one view of a record, the target network's embedding of another view. The
target network is an exponential moving average of the private network's weights at earlier steps: it is
post-processing of released weights, so for the sensitivity of a step it counts as a public function,
and it takes no gradient.

A record's loss then depends only on that record. Neither network may hold statistics across records, so the
original's BatchNorm is omitted (Richemond et al. 2020 show that BYOL works without it). Groups of one record
therefore have **sensitivity C** for adding or removing one record, as in supervised DP-SGD, with the plain
Poisson event: each record adds one vector of norm at most C, or none. Larger groups are allowed, with the
usual sensitivity of groups: C if groups are sampled and 2C if records are sampled. They gain nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError


def byol_group_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return L_G = Σ_{i∈G} Σ_{v≠w} ‖p_iv − t_iw‖², for two views BYOL's symmetric loss.

    p_iv is the prediction from view v of record i, and t_iw the target of its view w. Each term is 2 − 2·cos
    of the angle between them.

    Args:
      predictions: `[groups, group_size, views, dim]`, unit vectors: the predictor's output.
      targets: `[groups, group_size, views, dim]`, unit vectors of the target network; not differentiated.

    Returns:
      `[groups]`.

    >>> z = torch.nn.functional.normalize(torch.randn(3, 1, 2, 8), dim=-1)
    >>> bool(byol_group_loss(z, z.flip(2)).abs().max() < 1e-5)
    True
    """
    distances = 2 - 2 * torch.einsum("gsvd,gswd->gsvw", predictions, targets.detach())
    other_views = ~torch.eye(predictions.shape[2], dtype=torch.bool, device=predictions.device)
    return torch.where(other_views, distances, 0.0).flatten(1).sum(1)


def update_target(target: nn.Module, online: nn.Module, *, decay: float) -> None:
    """Move the target's weights ξ towards the online weights θ: ξ ← decay·ξ + (1 − decay)·θ, in place.

    Call it **after** the private step: θ must hold released weights only. The target is the online network
    without the predictor, so parameters are paired by name.

    Args:
      target: the target network; its parameters take no gradient.
      online: the private network, or the part of it that the target mirrors.
      decay: the share of ξ that is kept, in [0, 1].

    Raises:
      ConfigError: `decay` is outside [0, 1], or the target has a parameter that the online network lacks.
    """
    if not 0 <= decay <= 1:
        raise ConfigError(f"decay must be in [0, 1]; got {decay}")
    weights = dict(online.named_parameters())
    missing = [name for name, _ in target.named_parameters() if name not in weights]
    if missing:
        raise ConfigError(f"the online network must have all parameters of the target; it lacks {missing}")
    with torch.no_grad():
        for name, value in target.named_parameters():
            if value is not weights[name]:  # skip a frozen weight that both networks share
                value.lerp_(weights[name].to(value), 1 - decay)
