"""Accounting of batches of a fixed size without replacement, for replacing one record."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.rdp import RdpAccountant

from dpgcl_core.accounting import composition as accounting
from dpgcl_core.accounting.composition import check_noise_multiplier, check_target
from dpgcl_core.errors import ConfigError, require_least


@dataclass(frozen=True, kw_only=True)
class FixedSizeGaussians:
    """Accounting of steps that apply Gaussian mechanisms to one sample of fixed size, replacing one record.

    A uniform subset of fixed size m contains the replaced record with probability m/N. The event is
    dp_accounting's `SampledWithoutReplacementDpEvent`, accounted by RDP (Wang, Balle and Kasiviswanathan
    2019); the PLD accountant and the add-or-remove relation refuse it. Several mechanisms on the **same**
    sample must be inside one such event: amplifying each mechanism separately and adding the results gives
    too small an ε. See docs/theory/truncated-poisson.md.

    Attributes:
      num_records: N, public under this relation.
      batch_size: number of records in every sample.
      noise_multiplier: noise std / replace-one sensitivity of every mechanism on the step's sample.
      num_mechanisms: number of mechanisms on one sample.
      num_steps: T.

    Raises:
      ConfigError: a field is outside its range.
    """

    num_records: int
    batch_size: int
    noise_multiplier: float
    num_mechanisms: int
    num_steps: int

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.num_records:
            raise ConfigError(
                f"batch_size must be from 1 to num_records = {self.num_records}; got {self.batch_size}"
            )
        check_noise_multiplier(self.noise_multiplier)
        require_least(self, 1, "num_mechanisms", "num_steps")

    def event(self) -> dp_event.DpEvent:
        """Return the event of all steps; the event of each step contains all its mechanisms."""
        if self.noise_multiplier == 0:
            return dp_event.NonPrivateDpEvent()
        gaussians = [dp_event.GaussianDpEvent(self.noise_multiplier)] * self.num_mechanisms
        step = dp_event.SampledWithoutReplacementDpEvent(
            self.num_records, self.batch_size, dp_event.ComposedDpEvent(gaussians)
        )
        return dp_event.SelfComposedDpEvent(step, self.num_steps)

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on ε at `delta` by RDP, replacing one record.

        >>> FixedSizeGaussians(num_records=60_000, batch_size=512, noise_multiplier=2.0,
        ...     num_mechanisms=3, num_steps=1000).epsilon(1e-5) < 2.56
        True
        """
        return _epsilon_replace_one(self, delta)


@lru_cache(maxsize=256)
def _epsilon_replace_one(mechanism: FixedSizeGaussians, delta: float) -> float:
    event = mechanism.event()
    if isinstance(event, dp_event.NonPrivateDpEvent):
        return math.inf
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    with warnings.catch_warnings(action="ignore"):
        return float(accountant.compose(event).get_epsilon(delta))


def calibrate_fixed_size(
    mechanism: FixedSizeGaussians, *, target_epsilon: float, target_delta: float
) -> FixedSizeGaussians:
    """Search for the smallest noise that meets the target (ε, δ) by RDP, for replacing one record.

    Args:
      mechanism: the steps; their noise multiplier has no effect.
      target_epsilon, target_delta: the target; never exceeded, and met up to `CALIBRATION_TOLERANCE` of ε.

    Returns:
      The steps with that noise.

    Raises:
      ConfigError: the target is not positive, or no noise multiplier in [0.1, 1e5] meets it.
    """
    check_target(target_epsilon)
    with_noise = partial(replace, mechanism)
    low = target_epsilon * (1 - accounting.CALIBRATION_TOLERANCE)
    noise = accounting.search_noise_multiplier(
        lambda noise: with_noise(noise_multiplier=noise).epsilon(target_delta), low, target_epsilon
    )
    return with_noise(noise_multiplier=noise)
