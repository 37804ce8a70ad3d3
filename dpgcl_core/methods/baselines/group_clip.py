"""Groups clipped under negatives of the whole batch (DP-GCL, Eq. 8).

At most M groups contribute, each a vector of norm at most C, so the sum moves by at most 2·M·C, as in
`dpgcl_core.methods.baselines.dp_sgd`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpgcl_core.clipping.clipper import gamma_of
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.method import LossSettings, Method
from dpgcl_core.mechanism.numbers import PublicNumbers
from dpgcl_core.methods.baselines.capped_batch import Capped, OfOneBatch, cap_of
from dpgcl_core.methods.baselines.path_clipping import FullBatchGroupClipping
from dpgcl_core.sampling.groups import BATCH, Grouper


@dataclass(frozen=True, kw_only=True)
class FullBatchGroups(Capped):
    """Groups clipped under negatives of the whole batch (Eq. 8; Eq. 6 with groups of one)."""

    takes_pairs: bool = False
    small_batches: bool = True
    proof: str = "dpgcl_core/methods/baselines/path_clipping.py"

    def check(self, numbers: PublicNumbers) -> None:
        super().check(numbers)
        if numbers.group_size == BATCH:
            raise ConfigError(f'{self.name} needs a numeric group_size; got "batch". Use dp_clip for "batch"')
        if cap_of(numbers) < numbers.group_size:
            raise ConfigError(
                f"batch_cap must be at least group_size = {numbers.group_size}; got {cap_of(numbers)}"
            )

    def sensitivity(self, numbers: PublicNumbers) -> float:
        return 2 * _groups_cap(numbers) * numbers.l2_clip_norm

    def grouper(self, numbers: PublicNumbers) -> Grouper:
        return Method.grouper(self, numbers)

    def divisor(self, numbers: PublicNumbers) -> float:
        return Method.divisor(self, numbers)

    def rule(self, numbers: PublicNumbers, loss: LossSettings) -> OfOneBatch:
        return OfOneBatch(
            inner=FullBatchGroupClipping(
                l2_clip_norm=numbers.l2_clip_norm,
                gamma=gamma_of(numbers.clipping),
                num_groups_cap=_groups_cap(numbers),
                temperature=loss.temperature,
            )
        )


def _groups_cap(numbers: PublicNumbers) -> int:
    return cap_of(numbers) // int(numbers.group_size)


GROUP_CLIP = FullBatchGroups(
    name="group_clip",
    title="Group clipping, batch negatives",
    source="DP-GCL, Eq. 8 (Eq. 6 for groups of one)",
    clip_unit="group, through the whole batch",
    sensitivity_formula="2·⌊cap/S⌋·C",
)
