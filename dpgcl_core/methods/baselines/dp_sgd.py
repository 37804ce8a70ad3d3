"""DP-SGD under a contrastive loss: each record's own path is clipped.

A sum of at most M terms of norm at most C moves by at most 2·M·C however the batch changes, also if
truncation exchanges a record. So the plain Poisson event holds at every number of records (proof in
`dpgcl_core.methods.baselines.path_clipping`).
"""

from __future__ import annotations

from dataclasses import dataclass

from dpgcl_core.clipping.clipper import gamma_of
from dpgcl_core.mechanism.method import LossSettings
from dpgcl_core.mechanism.numbers import PublicNumbers
from dpgcl_core.methods.baselines.capped_batch import Capped, OfOneBatch, cap_of
from dpgcl_core.methods.baselines.path_clipping import PathClipping


@dataclass(frozen=True, kw_only=True)
class PathMethod(Capped):
    """DP-SGD under a contrastive loss: each record's own path is clipped."""

    proof: str = "dpgcl_core/methods/baselines/path_clipping.py"

    def sensitivity(self, numbers: PublicNumbers) -> float:
        return 2 * cap_of(numbers) * numbers.l2_clip_norm

    def rule(self, numbers: PublicNumbers, loss: LossSettings) -> OfOneBatch:
        return OfOneBatch(
            inner=PathClipping(
                l2_clip_norm=numbers.l2_clip_norm,
                gamma=gamma_of(numbers.clipping),
                batch_cap=cap_of(numbers),
                temperature=loss.temperature,
                pairs=loss.pairs,
            )
        )


DP_SGD = PathMethod(
    name="dp_sgd",
    title="DP-SGD",
    source="DP-GCL, section 2.3, as computed by per-sample hooks",
    clip_unit="record's own path",
    takes_group_size=False,
    sensitivity_formula="2·cap·C",
)
