"""Logit-DP as a method: every similarity's gradient is clipped.

Δ(cap) of `dpgcl_core.methods.baselines.logit_dp.similarity_clipper` is for one record that joins or leaves.
If the sample reaches the cap, a record that joins may push another record out and move the sum by 2Δ. The
probability of that, for data sets of at most `max_records`, is added to δ for the whole run
(`dpgcl_core.accounting.truncation`), so ε is computed for the plain Poisson event at the rest of δ. With a
cap of 1.25·q·n the added amount is negligible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpgcl_core.accounting.truncation import added_delta
from dpgcl_core.clipping.clipper import gamma_of
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.method import LossSettings
from dpgcl_core.mechanism.numbers import PublicNumbers, RecordRange
from dpgcl_core.methods.baselines.capped_batch import Capped, OfOneBatch, cap_of, default_cap
from dpgcl_core.methods.baselines.logit_dp.similarity_clipper import LogitClipper

_MORE_RECORDS = 1.05
"""The largest number of records of a data set that is covered, as a multiple of the declared number."""

_LARGEST_ADDED_SHARE = 0.1
"""The largest share of δ that may be added for batches that reach the cap."""


@dataclass(frozen=True, kw_only=True)
class LogitMethod(Capped):
    """Logit-DP: every similarity's gradient is clipped.

    Attributes:
      spread_out: the weight of the spread-out loss.
    """

    spread_out: float = 0.0
    clip_unit: str = "pair"
    takes_augmented_keys: bool = False
    takes_group_size: bool = False
    takes_pairs: bool = False
    plain_event: bool = False
    small_batches: bool = True
    proof: str = "dpgcl_core/methods/baselines/logit_dp/similarity_clipper.py"

    def check(self, numbers: PublicNumbers) -> None:
        super().check(numbers)
        if numbers.temperature is None:
            raise ConfigError(f"the sensitivity of {self.name} depends on the temperature. Set temperature")
        added = self.added_delta(numbers, numbers.num_steps)
        if added > _LARGEST_ADDED_SHARE * numbers.target_delta:
            raise ConfigError(
                f"batch_cap = {numbers.batch_cap} is reached so often that it would use up {added:.2g} of "
                f"δ = {numbers.target_delta:.2g}. Set batch_cap to at least "
                f"{default_cap(numbers.expected_batch_size)}"
            )

    def num_records_covered(self, numbers: PublicNumbers) -> RecordRange:
        return RecordRange(high=max_records(numbers))

    def check_records(self, numbers: PublicNumbers, num_records: int) -> None:
        if num_records > max_records(numbers):
            raise ConfigError(
                f"{self.name} is accounted for at most {max_records(numbers)} records, 5 % more than "
                "declared; the data set has more. Declare a larger num_records_public"
            )

    def _clipper(self, numbers: PublicNumbers) -> LogitClipper:
        assert numbers.temperature is not None
        return LogitClipper(
            logit_clip_norm=numbers.l2_clip_norm,
            temperature=numbers.temperature,
            spread_out=self.spread_out,
            gamma=gamma_of(numbers.clipping),
        )

    def sensitivity(self, numbers: PublicNumbers) -> float:
        return self._clipper(numbers).sensitivity(cap_of(numbers))

    def rule(self, numbers: PublicNumbers, loss: LossSettings) -> OfOneBatch:
        if loss.temperature != numbers.temperature:
            raise ConfigError(
                f"{self.name} needs the same temperature for loss and sensitivity; got {loss.temperature} "
                f"and {numbers.temperature}"
            )
        return OfOneBatch(inner=self._clipper(numbers))

    def added_delta(self, numbers: PublicNumbers, num_steps: int) -> float:
        return added_delta(
            num_records_public=max_records(numbers),
            sampling_prob=numbers.sampling_prob,
            batch_cap=cap_of(numbers),
            num_steps=num_steps,
        )


def max_records(numbers: PublicNumbers) -> int:
    """Return the most records of a data set for which `logit_dp` is accounted: 5 % more than declared.

    The guarantee covers data sets up to this size; training refuses a larger data set.
    """
    return math.ceil(_MORE_RECORDS * numbers.num_records_public)


LOGIT_DP = LogitMethod(
    name="logit_dp",
    title="Logit-DP",
    source="Logit-DP, Eq. 5, with our bound",
    sensitivity_formula="(2C/τ)(1 + (cap − 1)·a/(a + cap − 1)), a = e^(2/τ)",
)


LOGIT_DP_SPREAD_OUT = LogitMethod(
    name="logit_dp_spread_out",
    title="Logit-DP, spread-out loss",
    source="Logit-DP, Eq. 5 and Lemma 4.6",
    sensitivity_formula="as for logit_dp, plus 6C",
    spread_out=1.0,
)
