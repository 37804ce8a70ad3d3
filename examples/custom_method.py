"""A loss of your own as a method, swept without editing the package.

    python examples/custom_method.py --method decoupled --tiny
    python examples/custom_method.py --method decoupled --dataset fashion-mnist --epsilon 8

The method is registered by `register`, so it is known to this program, and every worker gets it along with
its training. An installed package offers one without any program, by an entry point in its pyproject.toml,
which every sweep's `--method` then knows:

    [project.entry-points."dpgcl.methods"]
    decoupled = "your_package.losses:DECOUPLED"
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dpgcl_core import GroupLoss, InGroups, LossSettings, register
from dpgcl_core.errors import exit_on_bad_input
from sweeps.group_size import main


def decoupled_loss(embeddings: Tensor, *, temperature: float) -> Tensor:
    """Return InfoNCE without the positive pair in the denominator: unit embeddings → losses `[groups]`.

    Of `[groups, group_size, views, dim]` it takes the first two views; each group's loss sees that group
    alone. Source: Yeh et al. (2022), "Decoupled contrastive learning", one direction of it.
    """
    anchors, keys = embeddings[:, :, 0], embeddings[:, :, 1]
    similarities = anchors @ keys.transpose(1, 2) / temperature  # [groups, S, S]
    positives = similarities.diagonal(dim1=1, dim2=2)
    others = ~torch.eye(similarities.shape[-1], dtype=torch.bool, device=similarities.device)
    negatives = similarities.masked_fill(~others, -torch.inf).logsumexp(dim=2)
    return (negatives - positives).sum(1)


@dataclass(frozen=True, kw_only=True)
class Decoupled(InGroups):
    """`InGroups` clips each group's gradient: sampling, sensitivity C and accounting are those of DP-GCL."""

    takes_augmented_keys: bool = False
    takes_pairs: bool = False

    def loss(self, settings: LossSettings) -> GroupLoss:
        return partial(decoupled_loss, temperature=settings.temperature)


DECOUPLED = register(
    Decoupled(
        name="decoupled",
        title="Decoupled contrastive loss in groups",
        source="Yeh et al. 2022, inside the groups of DP-GCL",
        clip_unit="group",
    )
)

if __name__ == "__main__":
    if "--method" not in sys.argv:
        sys.argv += ["--method", DECOUPLED.name]
    exit_on_bad_input(main)
