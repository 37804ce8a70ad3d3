"""The public numbers of a training, from which its private mechanism is built."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Final, Literal

from dpgcl_core.accounting.composition import MIN_NOISE_MULTIPLIER, check_noise_multiplier
from dpgcl_core.clipping.clipper import FLAT, check_clip_norm, gamma_of
from dpgcl_core.errors import ConfigError, require_least
from dpgcl_core.sampling.groups import BATCH, GroupSize
from dpgcl_core.sampling.poisson import PoissonSampler

ADD_OR_REMOVE_ONE = "add or remove one record"
ZERO_OUT_ONE = "zero out one record"
"""One of the n records is blank in one of the two data sets and is not used there; n is public."""
REPLACE_ONE = "replace one record"

RECORDS: Final = "records"
GROUPS: Final = "groups"
Sampled = Literal["records", "groups"]
"""What a step samples by Poisson: records, which are then cut into groups, or groups of slots."""


@dataclass(frozen=True, kw_only=True)
class RecordRange:
    """A public range of the number of records, `low` to `high`, in total or in the slots trained on.

    >>> RecordRange(low=895, high=1000, in_slots=True).text
    'data sets with 895 to 1000 records in the slots trained on'
    >>> RecordRange(high=1518).text, RecordRange(low=7, high=7).text
    ('data sets of at most 1518 records', 'data sets of exactly 7 records')
    """

    low: int = 0
    high: int
    in_slots: bool = False

    @property
    def text(self) -> str:
        """The data sets of this range, in words."""
        if self.in_slots:
            return f"data sets with {self.low} to {self.high} records in the slots trained on"
        if self.low == self.high:
            return f"data sets of exactly {self.high} records"
        if self.low:
            return f"data sets of {self.low} to {self.high} records"
        return f"data sets of at most {self.high} records"


def in_all(ranges: Iterable[RecordRange]) -> list[RecordRange]:
    """Return the intersection of the ranges, separately for totals and for records in slots.

    Ranges that do not overlap are returned as they are.

    >>> ranges = [RecordRange(low=n, high=60000, in_slots=True) for n in (58350, 59170)]
    >>> [r.low for r in in_all(ranges)]
    [59170]
    """
    ranges_by_kind: dict[bool, list[RecordRange]] = {}
    for record_range in ranges:
        ranges_by_kind.setdefault(record_range.in_slots, []).append(record_range)
    narrowed: list[RecordRange] = []
    for in_slots, same_kind in ranges_by_kind.items():
        low, high = max(r.low for r in same_kind), min(r.high for r in same_kind)
        overlap = RecordRange(low=low, high=high, in_slots=in_slots)
        narrowed += [overlap] if low <= high else dict.fromkeys(same_kind)
    return narrowed


def whole_number(name: str, value: object) -> int:
    """Return a whole number of any numeric type as Python's `int`.

    Raises:
      ConfigError: `value` is not a whole number; the message begins with `name`.

    >>> whole_number("num_steps", 3 * 400 / 40)
    30
    """
    if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
        whole: int = math.floor(value)  # type: ignore[assignment]
        if whole == value:
            return whole
    raise ConfigError(f"{name} must be a whole number; got {value!r}")


def real_number(name: str, value: object) -> float:
    """Return a real number of any numeric type as Python's `float`.

    Raises:
      ConfigError: `value` is not a real number; the message begins with `name`.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise ConfigError(f"{name} must be a number; got {value!r}")


def default_delta(num_records_public: int) -> float:
    """Return δ = 1/(n ln n) for n records, as in the DP-GCL paper.

    >>> round(default_delta(60_000), 9)
    1.515e-06
    """
    if num_records_public < 3:
        raise ConfigError(f"num_records_public must be at least 3; got {num_records_public}")
    return 1.0 / (num_records_public * math.log(num_records_public))


def check_delta(delta: float, num_records_public: int) -> None:
    """Raise ConfigError unless 0 < δ < 1 and δ ≤ 1/n: a larger δ would allow publishing a random record."""
    if not 0 < delta < 1:
        raise ConfigError(f"target_delta must be in (0, 1); got {delta}")
    if delta > 1 / num_records_public:
        raise ConfigError(
            f"target_delta must be at most 1/num_records_public = {1 / num_records_public:.3g} "
            f"(a larger delta allows publishing a random record); got {delta:g}"
        )


@dataclass(frozen=True, kw_only=True)
class PublicNumbers:
    """The declared, public numbers of a private training: none of them depends on a record.

    Attributes:
      num_records_public: public number of records N, from which q, δ and the divisor are computed. If it is
        declared before the data are seen, it is a capacity: data sets of at most N records are protected
        against adding or removing one record.
      num_records_from_data: whether N is instead the data set's own number of records. It is then public,
        and the data set is protected against zeroing out one of its records.
      sampling: the sampled units, "groups" or "records"; by default "records" for group_size "batch", and
        otherwise the method's own sampling.
      sampling_prob: q, the probability that a record, or a group of slots, is drawn at a step.
      group_size: S, or "batch" for the whole realised batch as one group.
      l2_clip_norm: C, the bound on one group's gradient; inf for non-private runs.
      noise_multiplier: σ = noise std / sensitivity; 0 for non-private runs.
      num_steps: T; 0 for a method that trains nothing.
      num_restart_steps: R, the number of steps that may be drawn again after restarts. They are charged in
        advance: ε counts T + R steps, and a restart beyond them is refused. None if a step that is drawn
        again is charged when it is drawn.
      target_delta: δ at which ε is stated.
      method: name in `dpgcl_core.mechanism.registry.METHODS`.
      batch_cap: public cap on the number of records of a step, for methods whose sensitivity depends on it.
      temperature: τ, for methods whose sensitivity depends on it.
      clipping: "flat", or "automatic" for C/(norm + γ) (see `dpgcl_core.clipping.clipper`).
      num_shards: W, the number of ranges of slots in which groups are sampled separately, one for each worker
        (`dpgcl_core.sampling.slots.ShardedGroups`); 1 to sample them from all slots.

    Raises:
      ConfigError: a field is outside its range, or δ exceeds 1/n.
    """

    num_records_public: int
    sampling_prob: float
    group_size: GroupSize
    l2_clip_norm: float
    noise_multiplier: float
    num_steps: int
    target_delta: float
    method: str = "dp_gcl"
    batch_cap: int | None = None
    temperature: float | None = None
    clipping: str = FLAT
    num_restart_steps: int | None = None
    sampling: str | None = None
    num_records_from_data: bool = False
    num_shards: int = 1

    def __post_init__(self) -> None:
        counts = "num_records_public", "num_steps", "batch_cap", "num_restart_steps", "num_shards"
        for name in ("group_size", *counts):
            if getattr(self, name) not in (None, BATCH):
                object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        for name in ("sampling_prob", "l2_clip_norm", "noise_multiplier", "target_delta"):
            object.__setattr__(self, name, real_number(name, getattr(self, name)))
        gamma_of(self.clipping)
        require_least(self, 3, "num_records_public")
        PoissonSampler(sampling_prob=self.sampling_prob)
        if self.group_size != BATCH and not int(self.group_size) >= 1:
            raise ConfigError(f'group_size must be a positive integer or "batch"; got {self.group_size!r}')
        check_clip_norm(self.l2_clip_norm)
        check_noise_multiplier(self.noise_multiplier)
        if 0 < self.noise_multiplier < MIN_NOISE_MULTIPLIER:
            raise ConfigError(
                f"noise_multiplier must be at least {MIN_NOISE_MULTIPLIER} (smaller values protect "
                f"nothing); got {self.noise_multiplier}"
            )
        if self.noise_multiplier > 0 and math.isinf(self.l2_clip_norm):
            raise ConfigError("noise without clipping protects nothing: set a finite l2_clip_norm; got inf")
        check_delta(self.target_delta, self.num_records_public)
        if self.num_restart_steps is not None and self.num_restart_steps < 0:
            raise ConfigError(f"num_restart_steps must not be negative; got {self.num_restart_steps}")
        if self.num_shards < 1:
            raise ConfigError(f"shards must be at least 1; got {self.num_shards}")

    @property
    def num_steps_charged(self) -> int:
        """T + R, the number of steps accounted by default."""
        return self.num_steps + (self.num_restart_steps or 0)

    @property
    def is_private(self) -> bool:
        """Whether noise is added to protect the records."""
        return self.noise_multiplier > 0

    @property
    def expected_batch_size(self) -> float:
        """q·n, a public number."""
        return self.sampling_prob * self.num_records_public
