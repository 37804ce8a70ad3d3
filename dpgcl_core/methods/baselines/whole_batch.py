"""Methods whose every term depends on the whole batch, so that a public cap on the batch enters the noise.

`dp_sgd` and `group_clip`: the sum of at most M terms of norm C moves by at most 2·M·C whatever happens to the
batch, a record that truncation exchanges included, so the plain Poisson event holds at every number of
records (proof in `dpgcl_core.methods.baselines.path_clipping`).

`logit_dp`: Δ(cap) of `dpgcl_core.methods.baselines.logit_dp.clipper` is for one record that joins or leaves. Where the sample reaches
the cap, a record that joins may push another out and move the sum by 2Δ. The probability of that, for data
sets of at most `max_records`, is added to δ for the whole run (`dpgcl_core.accounting.truncation`, way 2), so that
ε is that of the plain Poisson event at what is left of δ. With a cap of 1.25·q·n nothing noticeable is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from dpgcl_core.accounting.truncation import TruncatedPoissonSampler, Truncation
from dpgcl_core.clipping.clipper import GroupReport, gamma_of
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.method import LossSettings, Method
from dpgcl_core.methods.baselines.logit_dp.clipper import LogitClipper
from dpgcl_core.methods.baselines.path_clipping import Embed, FullBatchGroupClipping, PathClipping
from dpgcl_core.noise.sources import Draws
from dpgcl_core.sampling.groups import BATCH, Grouper, WholeBatch

if TYPE_CHECKING:
    from dpgcl_core.mechanism.mechanism import Mechanism

_MORE_RECORDS = 1.05
_LARGEST_ADDED_SHARE = 0.1
"""Of δ, that a cap may take."""


@dataclass(frozen=True, kw_only=True)
class _OfOneBatch:
    """A rule of the library that takes all of a step's records, without draws of its own."""

    inner: PathClipping | FullBatchGroupClipping | LogitClipper
    whole_batch: bool = True
    needs_draws: bool = False

    def add_clipped_sum(
        self, total: Tensor, model: nn.Module, embed: Embed, inputs: Tensor, generator: Draws | None
    ) -> GroupReport:
        report = self.inner.add_clipped_sum(total, model, embed, inputs)
        if isinstance(report, GroupReport):
            return report
        return GroupReport(
            norms=report.norms.flatten(),
            losses=report.losses,
            non_finite=report.non_finite,
            paths=report.paths,
        )


@dataclass(frozen=True, kw_only=True)
class Capped(Method):
    """A method with a public cap on the batch."""

    def check(self, mechanism: Mechanism) -> None:
        cap = mechanism.batch_cap
        if cap is None:
            raise ConfigError(
                f"{self.name} needs a public cap on the batch, for its sensitivity depends on it: give "
                f"batch_cap, for example {default_cap(mechanism.expected_batch_size)}"
            )
        if cap < mechanism.expected_batch_size:
            raise ConfigError(
                "batch_cap must be at least the expected batch size, or most batches are cut; got "
                f"{cap} with {mechanism.expected_batch_size:g} records expected; from "
                f"{default_cap(mechanism.expected_batch_size)} on it is out of reach"
            )

    @property
    def sampling(self) -> str:
        return "Poisson, truncated to a uniformly random subset at the cap"

    def sampler(self, mechanism: Mechanism) -> TruncatedPoissonSampler:
        return TruncatedPoissonSampler(sampling_prob=mechanism.sampling_prob, batch_cap=cap_of(mechanism))

    def grouper(self, mechanism: Mechanism) -> Grouper:
        return WholeBatch()

    def divisor(self, mechanism: Mechanism) -> float:
        return mechanism.expected_batch_size


def default_cap(expected_batch_size: float) -> int:
    """Returns a cap that samples hardly ever reach: 1.25 times what is expected, and eight deviations.

    >>> default_cap(1024)
    1281
    """
    return int(max(1.25 * expected_batch_size, expected_batch_size + 8 * expected_batch_size**0.5)) + 1


def cap_of(mechanism: Mechanism) -> int:
    """Returns the cap of a checked mechanism."""
    assert mechanism.batch_cap is not None
    return mechanism.batch_cap


@dataclass(frozen=True, kw_only=True)
class PathMethod(Capped):
    """DP-SGD under a contrastive loss: each record's own path is clipped."""

    proof: str = "dpgcl_core/methods/baselines/path_clipping.py"

    def sensitivity(self, mechanism: Mechanism) -> float:
        return 2 * cap_of(mechanism) * mechanism.l2_clip_norm

    def rule(self, mechanism: Mechanism, loss: LossSettings) -> _OfOneBatch:
        return _OfOneBatch(
            inner=PathClipping(
                l2_clip_norm=mechanism.l2_clip_norm,
                gamma=gamma_of(mechanism.clipping),
                batch_cap=cap_of(mechanism),
                temperature=loss.temperature,
                pairs=loss.pairs,
            )
        )


@dataclass(frozen=True, kw_only=True)
class FullBatchGroups(Capped):
    """Groups clipped under negatives of the whole batch (Eq. 8; Eq. 6 with groups of one)."""

    takes_pairs: bool = False
    small_batches: bool = True
    proof: str = "dpgcl_core/methods/baselines/path_clipping.py"

    def check(self, mechanism: Mechanism) -> None:
        super().check(mechanism)
        if mechanism.group_size == BATCH:
            raise ConfigError(f'{self.name} needs a numeric group_size; with "batch" use dp_clip')
        if cap_of(mechanism) < mechanism.group_size:
            raise ConfigError(
                f"batch_cap must hold a group of {mechanism.group_size} records; got {cap_of(mechanism)}"
            )

    def sensitivity(self, mechanism: Mechanism) -> float:
        return 2 * _groups_cap(mechanism) * mechanism.l2_clip_norm

    def grouper(self, mechanism: Mechanism) -> Grouper:
        return Method.grouper(self, mechanism)

    def divisor(self, mechanism: Mechanism) -> float:
        return Method.divisor(self, mechanism)

    def rule(self, mechanism: Mechanism, loss: LossSettings) -> _OfOneBatch:
        return _OfOneBatch(
            inner=FullBatchGroupClipping(
                l2_clip_norm=mechanism.l2_clip_norm,
                gamma=gamma_of(mechanism.clipping),
                num_groups_cap=_groups_cap(mechanism),
                temperature=loss.temperature,
            )
        )


def _groups_cap(mechanism: Mechanism) -> int:
    return cap_of(mechanism) // int(mechanism.group_size)


@dataclass(frozen=True, kw_only=True)
class LogitMethod(Capped):
    """Logit-DP: every similarity's gradient is clipped.

    Attributes:
      spread_out: weight of the spread-out loss.
    """

    spread_out: float = 0.0
    takes_pairs: bool = False
    plain_event: bool = False
    small_batches: bool = True
    proof: str = "dpgcl_core/methods/baselines/logit_dp/clipper.py"

    def check(self, mechanism: Mechanism) -> None:
        super().check(mechanism)
        if mechanism.temperature is None:
            raise ConfigError(f"the sensitivity of {self.name} depends on the temperature: give one")
        added = self.added_delta(mechanism, mechanism.num_steps)
        if added > _LARGEST_ADDED_SHARE * mechanism.target_delta:
            raise ConfigError(
                f"batch_cap = {mechanism.batch_cap} is reached so often that {added:.2g} of δ = "
                f"{mechanism.target_delta:.2g} would go to it; give at least "
                f"{default_cap(mechanism.expected_batch_size)}"
            )

    def condition(self, mechanism: Mechanism) -> str:
        return f"data sets of at most {max_records(mechanism)} records"

    def check_records(self, mechanism: Mechanism, num_records: int) -> None:
        if num_records > max_records(mechanism):
            raise ConfigError(
                f"{self.name} is accounted for at most {max_records(mechanism)} records, 5 % more than "
                "declared, and these are more: declare a larger num_records_public"
            )

    def _clipper(self, mechanism: Mechanism) -> LogitClipper:
        assert mechanism.temperature is not None
        return LogitClipper(
            logit_clip_norm=mechanism.l2_clip_norm,
            temperature=mechanism.temperature,
            norms="upper_bound",
            spread_out=self.spread_out,
            gamma=gamma_of(mechanism.clipping),
        )

    def sensitivity(self, mechanism: Mechanism) -> float:
        return self._clipper(mechanism).sensitivity(cap_of(mechanism))

    def rule(self, mechanism: Mechanism, loss: LossSettings) -> _OfOneBatch:
        if loss.temperature != mechanism.temperature:
            raise ConfigError(
                f"{self.name} has one temperature for loss and sensitivity; got {loss.temperature} and "
                f"{mechanism.temperature}"
            )
        return _OfOneBatch(inner=self._clipper(mechanism))

    def added_delta(self, mechanism: Mechanism, num_steps: int) -> float:
        return (
            Truncation(
                num_records_public=max_records(mechanism),
                sampling_prob=mechanism.sampling_prob,
                batch_cap=cap_of(mechanism),
                noise_multiplier=mechanism.noise_multiplier,
                num_steps=num_steps,
            ).added_delta
            if num_steps
            else 0.0
        )


def max_records(mechanism: Mechanism) -> int:
    """Returns how many records a data set may hold for `logit_dp` to be accounted: 5 % more than declared.

    The guarantee is one for data sets up to this size; training refuses a larger one.
    """
    return math.ceil(_MORE_RECORDS * mechanism.num_records_public)


DP_SGD = PathMethod(
    name="dp_sgd",
    title="DP-SGD",
    source="DP-GCL, section 2.3, as per-sample hooks compute it",
    clip_unit="record's own path",
    needs_cap=True,
    takes_group_size=False,
    sensitivity_formula="2·cap·C",
)
GROUP_CLIP = FullBatchGroups(
    name="group_clip",
    title="Group clipping, negatives of the whole batch",
    source="DP-GCL, Eq. 8 (Eq. 6 for groups of one)",
    clip_unit="group, through the whole batch",
    needs_cap=True,
    sensitivity_formula="2·⌊cap/S⌋·C",
)
LOGIT_DP = LogitMethod(
    name="logit_dp",
    title="Logit-DP",
    source="Logit-DP, Eq. 5, with our bound",
    clip_unit="pair",
    takes_augmented_keys=False,
    needs_cap=True,
    takes_group_size=False,
    sensitivity_formula="(2C/τ)(1 + (cap − 1)·a/(a + cap − 1)), a = e^(2/τ)",
)
LOGIT_DP_SPREAD_OUT = LogitMethod(
    name="logit_dp_spread_out",
    title="Logit-DP with spread-out loss",
    source="Logit-DP, Eq. 5 and Lemma 4.6",
    clip_unit="pair",
    takes_augmented_keys=False,
    needs_cap=True,
    takes_group_size=False,
    sensitivity_formula="that of logit_dp + 6C",
    spread_out=1.0,
)
