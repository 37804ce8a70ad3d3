"""Defects that an audit must detect: each is a step that differs from the correct step in one respect.

They are planted only by the audits; no other code contains them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import GradientRule, LossSettings
from dpgcl_core.mechanism.numbers import GROUPS
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.randomness import Draws
from dpgcl_core.sampling.fixed_size import FixedSizeSampler
from dpgcl_core.sampling.poisson import PoissonSampler
from dpgcl_core.sampling.slots import SampledGroups, ShardedGroups
from dpgcl_core.sampling.stage import DrawnGroups, GroupStage, SampledRecords

NO_MEMBER = -1
"""Marks a missing member in groups that are too short."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The parts of one step.

    Attributes:
      stage: draws the groups.
      rule: clips and sums.
      noise: maps a step's groups to its noise, which is always the same without a defect.
      divisor: maps a step's groups to its divisor, which is always the same without a defect.
      repeats: (purpose, "steps" or "trials") of draws that repeat at all steps, or in all trials, of a run;
        None without such a defect.
    """

    stage: GroupStage
    rule: GradientRule
    noise: Callable[[DrawnGroups], GaussianNoise]
    divisor: Callable[[DrawnGroups], float]
    repeats: tuple[str, str] | None = None


def step_of(mechanism: Mechanism) -> Step:
    """Return the mechanism's own step."""
    noise, divisor, stage = mechanism.noise(), mechanism.divisor, mechanism.group_stage()
    assert not isinstance(stage, ShardedGroups)
    return Step(
        stage=stage,
        rule=mechanism.rule(LossSettings(temperature=1.0)),
        noise=lambda groups: noise,
        divisor=lambda groups: divisor,
    )


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One deliberate mistake.

    Attributes:
      name: the name in tables.
      plant: makes the wrong step from the correct step.
      breaks_claim: whether the privacy loss exceeds the claim; otherwise only the noise is wrong.
    """

    name: str
    plant: Callable[[Step, Mechanism], Step]
    breaks_claim: bool = True


# The noise


def noise_times(factor: float) -> Callable[[Step, Mechanism], Step]:
    """Return a function that scales the noise's standard deviation."""

    def plant(step: Step, mechanism: Mechanism) -> Step:
        noise = GaussianNoise(std=factor * mechanism.noise().std)
        return dataclasses.replace(step, noise=lambda groups: noise)

    return plant


@dataclass(frozen=True, kw_only=True)
class SameForEveryTensor(GaussianNoise):
    """One draw, repeated for tensors of `width` numbers."""

    width: int = 1

    def draw(self, num_coordinates: int, generator: Draws | torch.Generator, gpu: Any = None) -> Tensor:
        return super().draw(self.width, generator, gpu).repeat(num_coordinates // self.width)


def _same_for_every_tensor(step: Step, mechanism: Mechanism) -> Step:
    noise = SameForEveryTensor(std=mechanism.noise().std)
    return dataclasses.replace(step, noise=lambda groups: noise)


def _none_for_empty_steps(step: Step, mechanism: Mechanism) -> Step:
    noise, nothing = mechanism.noise(), GaussianNoise(std=0.0)
    return dataclasses.replace(step, noise=lambda groups: noise if len(groups) else nothing)


def _repeat_draws(purpose: str, period: str) -> Callable[[Step, Mechanism], Step]:
    return lambda step, mechanism: dataclasses.replace(step, repeats=(purpose, period))


# Sampling and groups


@dataclass(frozen=True, kw_only=True)
class _RestKept:
    """Keeps the records left over after grouping as one more group."""

    sampling_prob: float
    group_size: int
    is_filled: bool = False
    complete: bool = True
    yields_incomplete: bool = True

    def draw(self, num_records: int, *, sampling: Draws, permutation: Draws) -> DrawnGroups:
        sample = PoissonSampler(sampling_prob=self.sampling_prob).sample(num_records, sampling)
        permuted = permutation.permutation(sample)
        num_rest = len(sample) % self.group_size
        missing = self.group_size - num_rest if num_rest else 0
        filling = np.full(missing, NO_MEMBER)
        if self.is_filled and num_rest:
            filling = np.resize(permuted, missing)
        elif not self.complete and num_rest:  # any row that exists
            filling = np.repeat(permuted[-1:], missing)
        rows = np.concatenate([permuted, filling]).reshape(-1, self.group_size)
        complete = np.ones(len(rows), dtype=np.bool_)
        if num_rest:
            complete[-1] = self.complete
        return DrawnGroups(rows=rows, complete=complete, batch_size=len(sample))


def rest_kept(*, is_filled: bool = False, complete: bool = True) -> Callable[[Step, Mechanism], Step]:
    """Return a function that keeps an incomplete group: left-over records, or a block with empty slots.

    Args:
      is_filled: whether it is filled up with copies of records, of other groups or of the block itself.
      complete: whether the group is marked as complete, so that it contributes; False is no defect.
    """

    def plant(step: Step, mechanism: Mechanism) -> Step:
        if mechanism.sampling == GROUPS:
            return dataclasses.replace(step, stage=_wrong_slots(mechanism, is_filled=is_filled))
        stage = _RestKept(
            sampling_prob=mechanism.sampling_prob,
            group_size=int(mechanism.group_size),
            is_filled=is_filled,
            complete=complete,
        )
        return dataclasses.replace(step, stage=stage)

    return plant


@dataclass(frozen=True)
class _InOrder:
    """Cuts the sample into groups without a permutation."""

    group_size: int

    def group(self, sample: NDArray[np.int64], generator: Draws) -> NDArray[np.int64]:
        num_groups = len(sample) // self.group_size
        return sample[: num_groups * self.group_size].reshape(num_groups, self.group_size)


def _not_permuted(step: Step, mechanism: Mechanism) -> Step:
    stage = SampledRecords(sampler=mechanism.sampler(), grouper=_InOrder(int(mechanism.group_size)))
    return dataclasses.replace(step, stage=stage)


@dataclass(frozen=True, kw_only=True)
class _WrongSlots:
    """Draws blocks of slots with a defect.

    Attributes:
      right: the correct stage.
      is_filled: whether a block with an empty slot is filled up with copies of its own records.
      num_kept: number of blocks that are always kept; None for independent bits.
      own_capacity: whether N is the actual number of records.
    """

    right: SampledGroups
    is_filled: bool = False
    num_kept: int | None = None
    own_capacity: bool = False
    yields_incomplete: bool = True

    def draw(self, num_records: int, *, sampling: Draws, permutation: Draws) -> DrawnGroups:
        right = dataclasses.replace(self.right, capacity=num_records) if self.own_capacity else self.right
        if self.num_kept is not None:
            right = dataclasses.replace(right, sampling_prob=1.0)
        slots = right.draw(right.capacity, sampling=sampling, permutation=permutation).rows[: self.num_kept]
        is_record = slots < num_records
        complete: NDArray[np.bool_] = np.logical_and.reduce(is_record, axis=1)
        if self.is_filled:
            any_record = slots.min(axis=1, keepdims=True)
            slots, complete = np.where(is_record, slots, any_record), np.logical_or.reduce(is_record, axis=1)
        rows = np.where(slots < num_records, slots, 0)
        return DrawnGroups(rows=rows, complete=complete, batch_size=rows.size)


def _wrong_slots(mechanism: Mechanism, **wrong: Any) -> _WrongSlots:
    right = mechanism.group_stage()
    assert isinstance(right, SampledGroups)
    return _WrongSlots(right=right, **wrong)


def _own_capacity(step: Step, mechanism: Mechanism) -> Step:
    return dataclasses.replace(step, stage=_wrong_slots(mechanism, own_capacity=True))


def _fixed_size(step: Step, mechanism: Mechanism) -> Step:
    if mechanism.sampling == GROUPS:
        stage = _wrong_slots(mechanism, num_kept=round(mechanism.divisor))
        return dataclasses.replace(step, stage=stage)
    sampler = FixedSizeSampler(batch_size=round(mechanism.expected_batch_size))
    return dataclasses.replace(step, stage=SampledRecords(sampler=sampler, grouper=mechanism.grouper()))


# Clipping


@dataclass(frozen=True)
class _ChangedInputs:
    """A rule that passes changed inputs to the correct rule.

    Attributes:
      right: the correct rule.
      change: maps inputs `[groups, size, dim]` to the inputs that are clipped instead.
      stands_for_all: whether the clipped sum is multiplied by the number of groups.
    """

    right: GradientRule
    change: Callable[[Tensor], Tensor]
    stands_for_all: bool = False
    whole_batch: bool = False
    needs_draws: bool = False

    def add_clipped_sum(
        self,
        total: Tensor,
        model: Any,
        objective: Any,
        inputs: Any,
        *,
        complete: Any = None,
        draws: Any = None,
    ) -> Any:
        changed, part = self.change(inputs), torch.zeros_like(total)
        mask = complete if len(changed) == len(inputs) else None
        report = self.right.add_clipped_sum(part, model, objective, changed, complete=mask, draws=draws)
        total += part * (len(inputs) if self.stands_for_all else 1)
        return report


def _changed_inputs(
    change: Callable[[Tensor, float], Tensor], *, stands_for_all: bool = False
) -> Callable[[Step, Mechanism], Step]:
    """Return a function that makes a step clip changed inputs, a function of the correct inputs and of C."""

    def plant(step: Step, mechanism: Mechanism) -> Step:
        norm = mechanism.l2_clip_norm
        rule: Any = _ChangedInputs(step.rule, lambda inputs: change(inputs, norm), stands_for_all)
        return dataclasses.replace(step, rule=rule)

    return plant


def _each_record(inputs: Tensor, l2_clip_norm: float) -> Tensor:
    """Return every record's share of a group's gradient, so that C bounds a record, not a group."""
    return inputs.flatten(0, 1)[:, None]


def _mean(inputs: Tensor, l2_clip_norm: float) -> Tensor:
    """Return the mean over the groups, which is then clipped instead of each group."""
    return inputs.mean(0, keepdim=True)


def _scaled_by_largest(inputs: Tensor, l2_clip_norm: float) -> Tensor:
    """Return all groups, scaled by the largest group's clip factor."""
    largest: Tensor = inputs.flatten(2).sum(1).norm(dim=1).max()
    return inputs * (l2_clip_norm / largest)


def _batch_normalised(inputs: Tensor, l2_clip_norm: float) -> Tensor:
    """Return inputs normalised over all groups, so that a group's contribution depends on the others."""
    spread = inputs - inputs.mean((0, 1), keepdim=True)
    variance = spread.square().mean((0, 1), keepdim=True) + 1.0
    normal: Tensor = 1e3 * l2_clip_norm * spread / variance.sqrt()
    return normal


@dataclass(frozen=True)
class _NoMask:
    """Draws the groups of a stage, and marks all of them as complete."""

    right: GroupStage
    yields_incomplete: bool = True

    def draw(self, num_records: int, *, sampling: Draws, permutation: Draws) -> DrawnGroups:
        drawn = self.right.draw(num_records, sampling=sampling, permutation=permutation)
        return dataclasses.replace(drawn, complete=np.ones_like(drawn.complete))


def mask_lost(step: Step, mechanism: Mechanism) -> Step:
    """Lose the mask at the draw; later, a training's own padding groups would count as well."""
    return dataclasses.replace(step, stage=_NoMask(step.stage))


def _rest_kept_and_mask_lost(step: Step, mechanism: Mechanism) -> Step:
    return mask_lost(rest_kept(complete=False)(step, mechanism), mechanism)


def _realised_divisor(step: Step, mechanism: Mechanism) -> Step:
    return dataclasses.replace(
        step, divisor=lambda groups: max(1.0, float(np.count_nonzero(groups.complete)))
    )


HALF_NOISE = Defect(name="noise × 0.5", plant=noise_times(0.5))
LESS_NOISE = Defect(name="noise × 0.7", plant=noise_times(0.7))
NO_NOISE = Defect(name="no noise", plant=noise_times(0.0))
DOUBLE_NOISE = Defect(name="noise × 2", plant=noise_times(2.0), breaks_claim=False)
NOISE_OF_STEPS = Defect(name="noise repeated across steps", plant=_repeat_draws("noise", "steps"))
NOISE_OF_TENSORS = Defect(name="noise repeated across tensors", plant=_same_for_every_tensor)
QUIET_EMPTY = Defect(name="no noise in empty steps", plant=_none_for_empty_steps)
SAMPLES_OF_STEPS = Defect(name="same sample at every step", plant=_repeat_draws("sampling", "steps"))
SAMPLES_OF_TRIALS = Defect(name="trials share a sampler seed", plant=_repeat_draws("sampling", "trials"))
FIXED_SIZE = Defect(name="fixed size accounted as Poisson", plant=_fixed_size)
SHORT_GROUP = Defect(name="short group kept", plant=rest_kept())
FILLED_GROUP = Defect(name="short group filled with copies", plant=rest_kept(is_filled=True))
MASK_LOST = Defect(name="incomplete group kept", plant=_rest_kept_and_mask_lost)
OWN_CAPACITY = Defect(name="N taken from each data set", plant=_own_capacity)
NOT_PERMUTED = Defect(name="no permutation", plant=_not_permuted)
RECORDS_CLIPPED = Defect(name="records clipped, not groups", plant=_changed_inputs(_each_record))
MEAN_CLIPPED = Defect(name="clipping after the mean", plant=_changed_inputs(_mean, stands_for_all=True))
LARGEST_CLIPPED = Defect(name="one clip factor for all groups", plant=_changed_inputs(_scaled_by_largest))
BATCH_NORMALISED = Defect(name="batch normalisation", plant=_changed_inputs(_batch_normalised))
REALISED_DIVISOR = Defect(name="divisor is the realised count", plant=_realised_divisor)
