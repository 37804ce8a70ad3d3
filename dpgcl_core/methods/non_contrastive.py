"""Methods without negatives: BYOL inside disjoint groups, down to groups of one record.

The trained network predicts, from one view of a record, a target network's embedding of another view. The
target is a moving average of iterates that were already released, so at every step it is a fixed function
(`dpgcl_core.losses.byol`), and the loss of a group depends only on the group's records. So the sensitivity is
the same as for any groups: C if groups are sampled; if records are sampled, C for groups of one record and 2C
for larger groups. Without negatives a group of one record has a gradient, so sensitivity C is possible with
both samplings.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpgcl_core.losses.byol import byol_group_loss
from dpgcl_core.mechanism.method import GroupLoss, LossSettings
from dpgcl_core.methods.in_groups import InGroups


@dataclass(frozen=True, kw_only=True)
class Byol(InGroups):
    """BYOL inside disjoint groups; predictions and the target network's embeddings come in one tensor."""

    def loss(self, settings: LossSettings) -> GroupLoss:
        return side_by_side_loss


def side_by_side_loss(embeddings: Tensor) -> Tensor:
    """Return `byol_group_loss` of predictions and targets in one tensor.

    Args:
      embeddings: `[groups, group_size, views, 2·dim]`: unit predictions, then the target's unit embeddings.

    Returns:
      `[groups]`.
    """
    predictions, targets = embeddings.chunk(2, dim=-1)
    return byol_group_loss(predictions, targets)


BYOL_GROUPS = Byol(
    name="byol_groups",
    title="BYOL in groups",
    source="BYOL (Grill et al. 2020), per group",
    clip_unit="group",
    takes_augmented_keys=False,
    takes_temperature=False,
    min_group_size=1,
    needs_target=True,
    takes_pairs=False,
)
