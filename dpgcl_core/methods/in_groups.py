"""Methods that clip one gradient per disjoint group of records: DP-GCL, DP-CLIP, and sigmoid loss in groups.

A record touches one group only and the loss of a group sees nothing else, so all of them have the sensitivity
of `dpgcl_core.sampling.groups`: 2C for groups of at least two records and for the whole batch, C for groups
of one. Their losses differ, and the guarantee does not depend on the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from dpgcl_core.clipping.clipper import GroupClipper, gamma_of
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.image_text import image_text_group_loss, image_text_sigmoid_loss
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.losses.sigmoid import two_view_sigmoid_loss
from dpgcl_core.mechanism.method import GroupLoss, GroupRule, LossSettings, Method
from dpgcl_core.mechanism.numbers import PublicNumbers
from dpgcl_core.sampling.groups import BATCH


@dataclass(frozen=True, kw_only=True)
class ClippedGroups(Method):
    """Each disjoint group's gradient clipped to C, whatever the objective of a group is."""

    needs_embeddings: bool = False

    def sensitivity(self, numbers: PublicNumbers) -> float:
        return numbers.l2_clip_norm * (1 if numbers.group_size == 1 else 2)

    def rule(self, numbers: PublicNumbers, loss: LossSettings) -> GroupRule:
        return GroupRule(
            clipper=GroupClipper(
                l2_clip_norm=numbers.l2_clip_norm,
                gamma=gamma_of(numbers.clipping),
                parts=loss.parts,
                groups_at_once=loss.groups_at_once,
                isolated=loss.isolated,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class InGroups(ClippedGroups):
    """A contrastive loss inside disjoint groups: InfoNCE."""

    needs_embeddings: bool = True

    def loss(self, settings: LossSettings) -> GroupLoss:
        loss = image_text_group_loss if settings.pairs else two_view_group_loss
        return partial(loss, temperature=settings.temperature, public_keys=settings.public_keys)


@dataclass(frozen=True, kw_only=True)
class WholeBatchClipping(InGroups):
    """The whole batch is the one group."""

    def check(self, numbers: PublicNumbers) -> None:
        super().check(numbers)
        if numbers.group_size != BATCH:
            raise ConfigError(
                f'{self.name} clips the whole batch at once: give group_size = "batch"; '
                f"got {numbers.group_size}"
            )


@dataclass(frozen=True, kw_only=True)
class SigmoidInGroups(InGroups):
    """Pairwise sigmoid in place of the softmax."""

    def loss(self, settings: LossSettings) -> GroupLoss:
        loss = image_text_sigmoid_loss if settings.pairs else two_view_sigmoid_loss
        public = settings.public_keys
        return partial(loss, temperature=settings.temperature, bias=settings.bias, public_keys=public)


DP_GCL = InGroups(
    name="dp_gcl",
    title="DP-GCL",
    source="DP-GCL, Eq. 9 and 12",
    clip_unit="group",
    takes_public_keys=True,
    sensitivity_formula="2C (C for groups of one)",
)
DP_CLIP = WholeBatchClipping(
    name="dp_clip",
    title="DP-CLIP",
    source="Huang et al. 2023; DP-GCL, section 2.3",
    clip_unit="whole batch",
    takes_group_size=False,
    takes_public_keys=True,
    sensitivity_formula="2C",
)
SIGLIP_GROUPS = SigmoidInGroups(
    name="siglip_groups",
    title="Sigmoid loss in groups",
    source="Zhai et al. 2023, inside the groups of DP-GCL",
    clip_unit="group",
    takes_public_keys=True,
    sensitivity_formula="2C (C for groups of one)",
)
