"""Methods that clip one gradient per disjoint group of records: DP-GCL, DP-CLIP, and sigmoid loss in groups.

A record is in one group only, and a group's loss depends on nothing else. So the sensitivity of all these
methods depends only on how groups are formed. If groups are sampled (`dpgcl_core.sampling.slots`), it is C.
If records are sampled and then cut into groups (`dpgcl_core.sampling.groups`), it is 2C for groups of at
least two records and for the whole batch, and C for groups of one. The methods differ in their losses, and
the guarantee does not depend on the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from dpgcl_core.clipping.clipper import GroupClipper, gamma_of
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.image_text import image_text_group_loss, image_text_sigmoid_loss
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.losses.sigmoid import two_view_sigmoid_loss
from dpgcl_core.mechanism.method import GroupLoss, LossSettings, Method
from dpgcl_core.mechanism.numbers import GROUPS, RECORDS, PublicNumbers, RecordRange, Sampled
from dpgcl_core.sampling.groups import BATCH
from dpgcl_core.sampling.slots import MOST_BLOCKS_LOST, most_empty


@dataclass(frozen=True, kw_only=True)
class ClippedGroups(Method):
    """A method that clips each disjoint group's gradient to C, whatever the objective of a group is.

    The fields `sensitivity_formula` and `proof` are derived from `samplings`; they are not arguments.
    """

    clips_groups: bool = True
    needs_embeddings: bool = False
    samplings: tuple[Sampled, ...] = (GROUPS, RECORDS)
    sensitivity_formula: str = field(init=False)
    proof: str = field(init=False)

    def __post_init__(self) -> None:
        of_groups = self.samplings[0] == GROUPS or self.one_record_groups
        of_records = "2C (C for groups of one)" if self.takes_group_size else "2C"
        object.__setattr__(self, "sensitivity_formula", "C" if of_groups else of_records)
        module = "slots" if self.samplings[0] == GROUPS else "groups"
        object.__setattr__(self, "proof", f"dpgcl_core/sampling/{module}.py")

    def check(self, numbers: PublicNumbers) -> None:
        super().check(numbers)
        if numbers.sampling == GROUPS:
            self.group_stage(numbers)

    def sensitivity(self, numbers: PublicNumbers) -> float:
        one = numbers.sampling == GROUPS or numbers.group_size == 1
        return numbers.l2_clip_norm * (1 if one else 2)

    def num_records_covered(self, numbers: PublicNumbers) -> RecordRange | None:
        if numbers.sampling != GROUPS or numbers.num_records_from_data:
            return super().num_records_covered(numbers)
        return RecordRange(low=_fewest_records(numbers), high=numbers.num_records_public, in_slots=True)

    def check_records(self, numbers: PublicNumbers, num_records: int) -> None:
        super().check_records(numbers, num_records)
        if numbers.sampling != GROUPS:
            return
        if not numbers.num_records_from_data and num_records < _fewest_records(numbers):
            raise ConfigError(
                f"too many of the {numbers.num_records_public} slots are empty: group_size = "
                f"{numbers.group_size} needs at least {_fewest_records(numbers)} records. With fewer, more "
                f"than {MOST_BLOCKS_LOST:.0%} of the groups have an empty slot and contribute nothing. Lower "
                "group_size, or declare a num_records_public that is closer to the number of records"
            )

    def rule(self, numbers: PublicNumbers, loss: LossSettings) -> GroupClipper:
        return GroupClipper(
            l2_clip_norm=numbers.l2_clip_norm,
            gamma=gamma_of(numbers.clipping),
            parts=loss.parts,
            groups_at_once=loss.groups_at_once,
            isolated=loss.isolated,
            gradient_scale=loss.gradient_scale,
        )


def _fewest_records(numbers: PublicNumbers) -> int:
    """Return the fewest records with which at most a share `MOST_BLOCKS_LOST` of blocks is lost; public."""
    return numbers.num_records_public - most_empty(numbers.num_records_public, int(numbers.group_size))


@dataclass(frozen=True, kw_only=True)
class InGroups(ClippedGroups):
    """InfoNCE inside disjoint groups, each group's gradient clipped."""

    needs_embeddings: bool = True

    def loss(self, settings: LossSettings) -> GroupLoss:
        loss = image_text_group_loss if settings.pairs else two_view_group_loss
        return partial(loss, temperature=settings.temperature)


@dataclass(frozen=True, kw_only=True)
class WholeBatchClipping(InGroups):
    """The whole batch as one group: the Poisson sample, or a group of B slots if groups are sampled.

    If groups are sampled, N slots are cut into K = ⌊N/B⌋ blocks of B = q·N, and each is kept with probability
    q. So a step keeps about one block on average, and none with probability (1 − q)^K.
    """

    samplings: tuple[Sampled, ...] = (RECORDS, GROUPS)

    def check(self, numbers: PublicNumbers) -> None:
        super().check(numbers)
        if numbers.sampling == RECORDS and numbers.group_size != BATCH:
            raise ConfigError(
                f"{self.name} clips the whole batch at once; got group_size = {numbers.group_size}. "
                'Set group_size = "batch"'
            )


@dataclass(frozen=True, kw_only=True)
class SigmoidInGroups(InGroups):
    """The pairwise sigmoid loss inside disjoint groups, each group's gradient clipped."""

    def loss(self, settings: LossSettings) -> GroupLoss:
        loss = image_text_sigmoid_loss if settings.pairs else two_view_sigmoid_loss
        return partial(loss, temperature=settings.temperature, bias=settings.bias)


DP_GCL = InGroups(
    name="dp_gcl",
    title="DP-GCL",
    source="DP-GCL, Eq. 9 and 12",
    clip_unit="group",
)
DP_CLIP = WholeBatchClipping(
    name="dp_clip",
    title="DP-CLIP",
    source="Huang et al. 2023; DP-GCL, section 2.3",
    clip_unit="whole batch",
    takes_group_size=False,
)
SIGLIP_GROUPS = SigmoidInGroups(
    name="siglip_groups",
    title="SigLIP in groups",
    source="Zhai et al. 2023, inside the groups of DP-GCL",
    clip_unit="group",
)
