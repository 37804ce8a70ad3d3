"""DPCL: SimCLR with a noised similarity matrix, Barlow Twins with noised statistics.

Batches have a fixed size and are drawn without replacement. The relation is **replacing one record**, so the
number of records is public. All mechanisms of a step use one sample and one noise multiplier, so they are
accounted together. The paper's 4C for the gradient is no bound
(`dpgcl_core.methods.baselines.dpcl.statistics` has counterexamples), so its methods are `as-published`: only
for research on public data. The `_rigorous` forms scale the noise to 4|B|C, which holds for every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dp_accounting import dp_event

from dpgcl_core.accounting.fixed_size_accounting import FixedSizeGaussians, calibrate_fixed_size
from dpgcl_core.clipping.clipper import gamma_of
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.method import LossSettings, Method
from dpgcl_core.mechanism.numbers import REPLACE_ONE, PublicNumbers, RecordRange
from dpgcl_core.methods.baselines.capped_batch import OfOneBatch
from dpgcl_core.methods.baselines.dpcl.statistics import DpBarlowTwins, DpSimClr
from dpgcl_core.sampling.fixed_size import FixedSizeSampler
from dpgcl_core.sampling.groups import Grouper, WholeBatch

_VARIANCE_FLOOR = 1e-3
_OFF_DIAGONAL_WEIGHT = 5e-3


@dataclass(frozen=True, kw_only=True)
class Dpcl(Method):
    """What DPCL's methods have in common: fixed-size batches, accounted for replacing one record.

    Attributes:
      num_mechanisms: the number of Gaussian mechanisms in one step, including the noised gradient.
    """

    num_mechanisms: int
    clip_unit: str = "view"
    plain_event: bool = False
    takes_augmented_keys: bool = False
    takes_group_size: bool = False
    takes_pairs: bool = False
    proof: str = "dpgcl_core/methods/baselines/dpcl/statistics.py"
    neighboring_relation: ClassVar[str] = REPLACE_ONE
    sampling: ClassVar[str] = "fixed size without replacement"

    def check(self, numbers: PublicNumbers) -> None:
        super().check(numbers)
        if batch_size(numbers) < 2:
            raise ConfigError(
                f"{self.name} compares records, so the expected batch size must be at least 2; got "
                f"{numbers.expected_batch_size:.3g}. Raise sampling_prob"
            )

    def num_records_covered(self, numbers: PublicNumbers) -> RecordRange:
        return RecordRange(low=numbers.num_records_public, high=numbers.num_records_public)

    def check_records(self, numbers: PublicNumbers, num_records: int) -> None:
        if num_records != numbers.num_records_public:
            raise ConfigError(
                f"{self.name} is accounted for replacing one record, so the data set must have exactly "
                f"num_records_public = {numbers.num_records_public} records; its number differs. Leave "
                "num_records_public out, or use a method for adding or removing a record"
            )

    def sensitivity(self, numbers: PublicNumbers) -> float:
        size = batch_size(numbers) if self.label == "proven" else 1
        return 4 * numbers.l2_clip_norm * size

    def sampler(self, numbers: PublicNumbers) -> FixedSizeSampler:
        return FixedSizeSampler(batch_size=batch_size(numbers))

    def grouper(self, numbers: PublicNumbers) -> Grouper:
        return WholeBatch()

    def divisor(self, numbers: PublicNumbers) -> float:
        return float(batch_size(numbers))

    def _accounting(self, numbers: PublicNumbers, num_steps: int) -> FixedSizeGaussians:
        return FixedSizeGaussians(
            num_records=numbers.num_records_public,
            batch_size=batch_size(numbers),
            noise_multiplier=numbers.noise_multiplier,
            num_mechanisms=self.num_mechanisms,
            num_steps=num_steps,
        )

    def dp_event(self, numbers: PublicNumbers, num_steps: int) -> dp_event.DpEvent:
        return self._accounting(numbers, num_steps).event()

    def epsilon(self, numbers: PublicNumbers, num_steps: int) -> float:
        return self._accounting(numbers, num_steps).epsilon(numbers.target_delta)

    def calibrated(
        self, numbers: PublicNumbers, target_epsilon: float, cache_folder: Path | None = None
    ) -> float:
        return calibrate_fixed_size(
            self._accounting(numbers, numbers.num_steps_charged),
            target_epsilon=target_epsilon,
            target_delta=numbers.target_delta,
        ).noise_multiplier


def batch_size(numbers: PublicNumbers) -> int:
    """Return |B|, the expected batch size as a whole number."""
    return round(numbers.expected_batch_size)


@dataclass(frozen=True, kw_only=True)
class DpclSimClr(Dpcl):
    """DPCL with SimCLR; `num_mechanisms` above 1 also noises the similarities."""

    def rule(self, numbers: PublicNumbers, loss: LossSettings) -> OfOneBatch:
        return OfOneBatch(
            needs_draws=True,
            inner=DpSimClr(
                l2_clip_norm=numbers.l2_clip_norm,
                gamma=gamma_of(numbers.clipping),
                batch_size=batch_size(numbers),
                guarantee_label="proven" if self.label == "proven" else "as-published",
                temperature=loss.temperature,
                similarity_noise_multiplier=numbers.noise_multiplier if self.num_mechanisms > 1 else 0.0,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class DpclBarlow(Dpcl):
    """DPCL with Barlow Twins; `num_mechanisms` above 1 also noises the means and variances."""

    takes_temperature: bool = False

    def rule(self, numbers: PublicNumbers, loss: LossSettings) -> OfOneBatch:
        noise = numbers.noise_multiplier if self.num_mechanisms > 1 else 0.0
        return OfOneBatch(
            needs_draws=True,
            inner=DpBarlowTwins(
                l2_clip_norm=numbers.l2_clip_norm,
                gamma=gamma_of(numbers.clipping),
                batch_size=batch_size(numbers),
                guarantee_label="proven" if self.label == "proven" else "as-published",
                mean_noise_multiplier=noise,
                variance_noise_multiplier=noise,
                variance_floor=_VARIANCE_FLOOR,
                off_diagonal_weight=_OFF_DIAGONAL_WEIGHT,
            ),
        )


DPCL_SIMCLR = DpclSimClr(
    name="dpcl_simclr",
    title="DPCL, SimCLR",
    source="DPCL, section 3.2",
    sensitivity_formula="4C as published, which is no bound",
    label="as-published",
    num_mechanisms=2,
)
DPCL_BARLOW = DpclBarlow(
    name="dpcl_barlow",
    title="DPCL, Barlow Twins",
    source="DPCL, section 3.3",
    sensitivity_formula="4C as published, which is no bound",
    label="as-published",
    num_mechanisms=5,
)
DPCL_SIMCLR_RIGOROUS = DpclSimClr(
    name="dpcl_simclr_rigorous",
    title="DPCL, SimCLR, at 4|B|C",
    source="DPCL, section 3.2, with exact similarities",
    sensitivity_formula="4|B|C",
    num_mechanisms=1,
)
DPCL_BARLOW_RIGOROUS = DpclBarlow(
    name="dpcl_barlow_rigorous",
    title="DPCL, Barlow Twins, at 4|B|C",
    source="DPCL, section 3.3, with exact statistics",
    sensitivity_formula="4|B|C",
    num_mechanisms=1,
)
