"""The (B, σ, T, S) that a budget of privacy, time and memory allows, and the recommended choice among them.

For every batch size and number of steps of a grid, σ is computed from ε by PLD, the number of groups from S,
and the hours from the number of records and the throughput. Nothing is drawn or spent; all numbers are
public.

*Recommendation.* At a fixed ε a larger batch needs more noise, and for large noise the SNR over the training
tends to one limit for all B and T. So the plan with the most steps is taken among the plans whose SNR over
the training is within `WORTH_MORE_STEPS` of the best, since an optimizer needs steps. Of several such plans,
the plan with the smallest batch is taken. S is the largest S whose SNR over the training is at least
`ENOUGH_TRAINING_SNR`, since larger groups have more negatives. If there is none, it is the S of the best SNR.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dpgcl_core.accounting.composition import MIN_NOISE_MULTIPLIER, check_target
from dpgcl_core.errors import ConfigError, require_least, require_positive
from dpgcl_core.grids import GROUP_SIZES, NUM_STEPS
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.numbers import RECORDS, check_delta, default_delta
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.planning.root_finding import solve
from dpgcl_core.planning.snr import (
    ALIGNMENT_SIZE,
    ENOUGH_TRAINING_SNR,
    LEAST_TRAINING_SNR,
    ExpectedSnr,
    clips_groups,
    coarse_epsilon,
    expected_snr,
    names_of_modelled,
)
from dpgcl_core.sampling.groups import BATCH, GroupSize

WORTH_MORE_STEPS = 0.1
_NUM_BATCH_SIZES = 7
_LARGEST_BATCH_SHARE = 0.125
_EPSILON_TOLERANCE = 0.01
_MOST_NOISE = 1e4
_FEWEST_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request for plans: the privacy, the settings that may vary, and the available resources.

    Attributes:
      num_records_public: N, declared public.
      target_epsilon: ε of one training.
      num_weights: d, the number of trained weights.
      target_delta: δ; 1/(N ln N) by default.
      method: the name of a method that clips one gradient per disjoint group.
      sampling: "groups" or "records"; the method's own sampling by default.
      batch_sizes: expected batch sizes B; `batch_sizes_for(N)` by default.
      num_steps: values of T.
      group_sizes: values of S; for a method without groups, the whole batch is the only group.
      alignment_size: S₀, the group size at which two groups' gradients have the cosine 1/2.
      records_per_second: throughput of one core or GPU; None if no time is computed.
      seconds_per_step: time of every step in addition to its records, on the same core or GPU.
      most_hours: limit on the core- or GPU-hours of one training; None for no limit.
      memory_bytes: memory of one worker, by S; empty if it is not known.
      most_bytes: limit on the memory of one worker; None for no limit.

    Raises:
      ConfigError: a number is out of range, or the method does not clip disjoint groups.
    """

    num_records_public: int
    target_epsilon: float
    num_weights: int
    target_delta: float | None = None
    method: str = "dp_gcl"
    sampling: str | None = None
    batch_sizes: Sequence[float] = ()
    num_steps: Sequence[int] = NUM_STEPS
    group_sizes: Sequence[GroupSize] = GROUP_SIZES
    alignment_size: float = ALIGNMENT_SIZE
    records_per_second: float | None = None
    seconds_per_step: float = 0.0
    most_hours: float | None = None
    memory_bytes: Mapping[GroupSize, float] = field(default_factory=dict)
    most_bytes: float | None = None

    def __post_init__(self) -> None:
        check_target(self.target_epsilon)
        method_named(self.method)
        require_positive(self, "records_per_second", "most_hours", "most_bytes")
        require_least(self, 3, "num_records_public")
        require_least(self, 1, "num_weights")
        for name in ("batch_sizes", "num_steps"):
            if any(not 0 < value < math.inf for value in getattr(self, name)):
                raise ConfigError(f"{name} must be positive and finite; got {list(getattr(self, name))}")
        if self.most_hours is not None and self.records_per_second is None:
            raise ConfigError("most_hours needs a throughput; set records_per_second")
        if not clips_groups(self.method):
            raise ConfigError(
                "plans exist only for methods that clip one gradient per disjoint group "
                f"({names_of_modelled()}); got {self.method}"
            )
        check_delta(self.delta, self.num_records_public)

    @property
    def delta(self) -> float:
        """δ of every plan."""
        return default_delta(self.num_records_public) if self.target_delta is None else self.target_delta

    @property
    def sizes(self) -> tuple[GroupSize, ...]:
        """The distinct values of S that are valid for the method."""
        if not method_named(self.method).takes_group_size:
            return (BATCH,)
        return tuple(dict.fromkeys(self.group_sizes))

    def mechanism(self, batch: float, num_steps: int, noise: float, size: GroupSize) -> Mechanism:
        """Return the mechanism of one point of the grid.

        Raises:
          ConfigError: the numbers contradict each other.
        """
        if not method_named(self.method).takes_group_size and self.sampling not in (None, RECORDS):
            size = max(1, round(batch))  # the expected batch is the only group
        return Mechanism(
            method=self.method,
            num_records_public=self.num_records_public,
            sampling_prob=min(1.0, batch / self.num_records_public),
            sampling=None if size == BATCH else self.sampling,
            group_size=size,
            l2_clip_norm=1.0,
            noise_multiplier=noise,
            num_steps=num_steps,
            target_delta=self.delta,
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One feasible plan.

    Attributes:
      mechanism: the mechanism with B = q·N, σ, T and S; C = 1, on which no other number depends.
      snr: the expected SNR.
      hours: core- or GPU-hours of one training; None without a throughput.
      memory_bytes: memory of one worker; None if it is not known.
      is_verified: whether σ was calibrated as precisely as for a training; otherwise σ is at most about two
        per cent larger than necessary, never smaller.
    """

    mechanism: Mechanism
    snr: ExpectedSnr
    hours: float | None
    memory_bytes: float | None
    is_verified: bool = False

    @property
    def num_epochs(self) -> float:
        """T·q, the mean number of times that a record is drawn."""
        return self.mechanism.num_steps * self.mechanism.sampling_prob


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The feasible plans of a request.

    Attributes:
      plans: all feasible plans, the recommended S first, then by S, and for each S by SNR over the training.
      recommended: the recommended plan; None if there is no plan.
      relax: the limits to relax and by how much, one sentence each, if no plan is feasible.
      refusals: numbers of refused points of the grid, by the rule that excludes them.
    """

    plans: tuple[Plan, ...]
    recommended: Plan | None
    relax: tuple[str, ...] = ()
    refusals: Mapping[str, int] = field(default_factory=dict)


def batch_sizes_for(num_records_public: int) -> tuple[int, ...]:
    """Return up to seven powers of two, from an eighth of N downwards, in ascending order.

    >>> batch_sizes_for(60_000)
    (64, 128, 256, 512, 1024, 2048, 4096)
    """
    largest = max(1, math.floor(math.log2(max(2.0, num_records_public * _LARGEST_BATCH_SHARE))))
    return tuple(2**power for power in range(max(1, largest - _NUM_BATCH_SIZES + 1), largest + 1))


def smallest_group(method: str) -> GroupSize:
    """Return the smallest S that a method can have; the whole batch if the method has no groups."""
    rules = method_named(method)
    return max(1, rules.min_group_size) if rules.takes_group_size else BATCH


def feasible(request: PlanRequest) -> Answer:
    """List the feasible plans and recommend one.

    Every σ of the list is computed by PLD on a coarse grid, so it is never too small; `verified` computes σ
    as for a training.
    """
    refusals: Counter[str] = Counter()
    plans: list[Plan] = []
    start = 1.0  # the next point's noise is near the last point's
    for batch, num_steps in _batches_and_steps(request, refusals):
        noise = _noise(request, batch, num_steps, start, refusals)
        if noise is None:
            continue
        start = noise
        for size in request.sizes:
            plan = _plan(request, batch, num_steps, noise, size, refusals)
            if plan is not None:
                plans.append(plan)
    if not plans:
        return Answer(plans=(), recommended=None, relax=_what_to_relax(request), refusals=dict(refusals))
    recommended = _recommended(plans)
    first = recommended.mechanism.group_size

    def rank(plan: Plan) -> tuple[bool, str, float]:
        size = plan.mechanism.group_size
        return size != first, f"{size!s:>9}", -plan.snr.over_training

    return Answer(plans=tuple(sorted(plans, key=rank)), recommended=recommended, refusals=dict(refusals))


def verified(request: PlanRequest, plan: Plan, cache_folder: Path | None = None) -> Plan:
    """Return the plan with its σ calibrated on the fine PLD grid, as for a training."""
    mechanism = plan.mechanism.calibrated(request.target_epsilon, cache_folder=cache_folder)
    snr = expected_snr(mechanism, request.num_weights, request.alignment_size)
    return replace(plan, mechanism=mechanism, snr=snr, is_verified=True)


def hours_of(request: PlanRequest, batch: float, num_steps: float) -> float | None:
    """Return the core- or GPU-hours of one training; None without a throughput."""
    if request.records_per_second is None:
        return None
    return num_steps * (batch / request.records_per_second + request.seconds_per_step) / 3600


def _batches_and_steps(request: PlanRequest, refusals: Counter[str]) -> list[tuple[float, int]]:
    """Return the points (B, T) of the grid within the time limit; count the others in `refusals`."""
    points = []
    for batch in dict.fromkeys(request.batch_sizes or batch_sizes_for(request.num_records_public)):
        for num_steps in dict.fromkeys(request.num_steps):
            hours = hours_of(request, batch, num_steps)
            if batch > request.num_records_public:
                refusals["B is above N"] += len(request.sizes)
            elif hours is not None and request.most_hours is not None and hours > request.most_hours:
                refusals["takes more hours than the budget"] += len(request.sizes)
            else:
                points.append((batch, num_steps))
    return points


def _noise(
    request: PlanRequest, batch: float, num_steps: int, start: float, refusals: Counter[str]
) -> float | None:
    """Return σ of (B, T), never too small, by PLD on a coarse grid; None if no σ meets ε."""
    mechanism = request.mechanism(batch, num_steps, 1.0, smallest_group(request.method))
    try:
        return solve(
            partial(coarse_epsilon, mechanism, scale=request.target_epsilon),
            high=request.target_epsilon,
            share=_EPSILON_TOLERANCE,
            start=start,
            slope=-1.2,
            lower=MIN_NOISE_MULTIPLIER,
            upper=_MOST_NOISE,
        )
    except ConfigError:
        refusals[f"no σ from {MIN_NOISE_MULTIPLIER} to {_MOST_NOISE:g} meets ε"] += len(request.sizes)
        return None


def _plan(
    request: PlanRequest, batch: float, num_steps: int, noise: float, size: GroupSize, refusals: Counter[str]
) -> Plan | None:
    """Return the plan at one point of the grid; None, counted in `refusals`, if a rule excludes it."""
    memory = request.memory_bytes.get(size)
    if memory is not None and request.most_bytes is not None and memory > request.most_bytes:
        refusals["needs more memory than a worker has"] += 1
        return None
    if size != BATCH and size > batch / _groups_per_batch(request):
        refusals["S is too large for B"] += 1
        return None
    try:
        mechanism = request.mechanism(batch, num_steps, noise, size)
    except ConfigError as error:
        refusals[str(error).partition(";")[0]] += 1
        return None
    return Plan(
        mechanism=mechanism,
        snr=expected_snr(mechanism, request.num_weights, request.alignment_size),
        hours=hours_of(request, batch, num_steps),
        memory_bytes=memory,
    )


def _groups_per_batch(request: PlanRequest) -> int:
    """Return the least number of groups in a batch: four if records outside full groups are dropped."""
    default = method_named(request.method).samplings[0]
    return 4 if (request.sampling or default) == RECORDS else 1


def _recommended(plans: Sequence[Plan]) -> Plan:
    """Return the plan that the module's recommendation rule chooses."""

    def size_of(plan: Plan) -> float:
        size = plan.mechanism.group_size
        return math.inf if size == BATCH else float(size)

    enough = [plan for plan in plans if plan.snr.over_training >= ENOUGH_TRAINING_SNR]
    best = max(plans, key=lambda plan: plan.snr.over_training)
    size = max(map(size_of, enough)) if enough else size_of(best)
    of_size = [plan for plan in plans if size_of(plan) == size]
    most = max(plan.snr.over_training for plan in of_size)
    near = [plan for plan in of_size if plan.snr.over_training >= (1 - WORTH_MORE_STEPS) * most]
    if enough:
        near = [plan for plan in near if plan.snr.over_training >= ENOUGH_TRAINING_SNR]
    return max(near, key=lambda plan: (plan.mechanism.num_steps, -plan.mechanism.sampling_prob))


def _what_to_relax(request: PlanRequest) -> tuple[str, ...]:
    """Return advice on time, memory, group size and ε that makes some point of the grid feasible."""
    batches = [
        batch
        for batch in request.batch_sizes or batch_sizes_for(request.num_records_public)
        if batch <= request.num_records_public
    ]
    if not batches:
        return (f"every B of the grid is above N = {request.num_records_public}; use a smaller B",)
    advice = []
    batch, num_steps = min(batches), min(request.num_steps)
    hours = hours_of(request, batch, num_steps)
    if hours is not None and request.most_hours is not None and hours > request.most_hours:
        times = hours / request.most_hours
        steps = math.floor(num_steps / times)
        alternative = f", or set T = {steps}" if steps >= _FEWEST_STEPS else ""
        advice.append(
            f"time: the smallest plan, B = {batch:g} and T = {num_steps}, takes {hours:.3g} hours, "
            f"{times:.3g} times the budget of {request.most_hours:g}. Allow {hours:.3g} hours or use "
            f"{times:.3g} times the throughput{alternative}"
        )
    memory_bytes = [request.memory_bytes[size] for size in request.sizes if size in request.memory_bytes]
    if memory_bytes and request.most_bytes is not None and min(memory_bytes) > request.most_bytes:
        advice.append(
            f"memory: a worker needs at least {min(memory_bytes) / 2**30:.3g} GiB, "
            f"{min(memory_bytes) / request.most_bytes:.3g} times the memory that it has. Use larger workers, "
            "a smaller group or a smaller network"
        )
    sizes = [size for size in request.sizes if size != BATCH]
    largest_size = max(batches) / _groups_per_batch(request)
    if sizes and min(map(int, sizes)) > largest_size:
        advice.append(
            f"groups: the smallest S is {min(map(int, sizes))}, but B = {max(batches):g} allows at most "
            f"{largest_size:g}. Use a group_size of at most {largest_size:g}, or "
            f"B = {min(map(int, sizes)) * _groups_per_batch(request)}"
        )
    return tuple(advice) or (_privacy_to_relax(request, batch, num_steps),)


def _privacy_to_relax(request: PlanRequest, batch: float, num_steps: int) -> str:
    """Return advice on ε: the smallest plan's ε with the least noise, or with the most noise."""
    mechanism = request.mechanism(batch, num_steps, 1.0, smallest_group(request.method))
    largest = coarse_epsilon(mechanism, MIN_NOISE_MULTIPLIER, 1.0)
    if largest <= request.target_epsilon:
        return (
            f"privacy: ε = {request.target_epsilon:g} needs only σ = {MIN_NOISE_MULTIPLIER}, which protects "
            f"nothing. Use at most ε = {largest:.3g}, or a larger B or T"
        )
    smallest = coarse_epsilon(mechanism, _MOST_NOISE, request.target_epsilon)
    return (
        f"privacy: no σ up to {_MOST_NOISE:g} reaches ε = {request.target_epsilon:g}. Use at least "
        f"ε = {smallest:.3g}, fewer steps or a smaller B"
    )


def enough_records(request: PlanRequest, plan: Plan) -> int | None:
    """Return the N at which this plan's B, T and S would have an SNR of `LEAST_TRAINING_SNR` at the same ε.

    Return None if no N up to a million times the requested N is enough.
    """
    noise = plan.mechanism.noise_multiplier * plan.snr.over_training / LEAST_TRAINING_SNR
    if noise < MIN_NOISE_MULTIPLIER:
        return None
    batch, steps = plan.mechanism.expected_batch_size, plan.mechanism.num_steps
    size = plan.mechanism.group_size

    def epsilon(num_records: float) -> float:
        larger = replace(request, num_records_public=math.ceil(num_records))
        return coarse_epsilon(larger.mechanism(batch, steps, noise, size), noise, request.target_epsilon)

    num_public = float(request.num_records_public)
    try:
        return math.ceil(
            solve(
                epsilon,
                high=request.target_epsilon,
                share=0.02,
                start=num_public,
                slope=-1.0,
                lower=num_public,
                upper=1e6 * num_public,
            )
        )
    except ConfigError:
        return None
