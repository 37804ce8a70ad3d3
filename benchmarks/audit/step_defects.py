"""Defects of a training step that an audit must detect, planted in a mechanism or between workers.

Only this module and `benchmarks.audit.defects` contain such defects.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.audit.defects import Defect, Step, step_of
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import GradientRule, LossSettings
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.randomness import Draws, DrawSource
from dpgcl_core.sampling.stage import DrawnGroups, GroupStage
from dpgcl_core.workers import Workers

# Workers that record sums, with and without defects


class WatchedWorkers:
    """Workers that record the noise-free sum, divided by the divisor, once per step."""

    def __init__(self, inner: Workers, mechanism: Mechanism) -> None:
        self.inner, self.rank, self.count = inner, inner.rank, inner.count
        self.check_failures, self.check_agreement = inner.check_failures, inner.check_agreement
        self.mechanism = mechanism
        self.clean: list[Tensor] = []
        self._waits = True

    def share_groups(self, groups: DrawnGroups | None) -> DrawnGroups:
        self._waits = True
        return self.inner.share_groups(groups)

    def sum_shares(self, values: Tensor) -> None:
        self.inner.sum_shares(values)
        self.note(values)

    def gather_shares(self, values: Tensor) -> None:
        self.inner.gather_shares(values)

    def note(self, shares: Tensor) -> None:
        """Record the first sum of a step; later sums are metrics of public data."""
        if self._waits:
            values = shares.double() / self.mechanism.divisor
            self.inner.gather_shares(values)
            self.clean.append(values)
        self._waits = False


class WithoutNoise(WatchedWorkers):
    """The first worker sends its share of the sum without the noise."""

    def gather_shares(self, values: Tensor) -> None:
        if self.rank == 0:
            values.copy_(self.clean[-1] * self.mechanism.divisor)
        self.inner.gather_shares(values)


class NoiseOverWorkers(WatchedWorkers):
    """The noise is divided by the number of workers."""

    def gather_shares(self, values: Tensor) -> None:
        clean = self.clean[-1] * self.mechanism.divisor
        values.copy_(clean + (values.double() - clean) / self.count)
        self.inner.gather_shares(values)


class NoiseOfEveryWorker(WatchedWorkers):
    """Every worker adds noise to its own sum."""

    def sum_shares(self, values: Tensor) -> None:
        clean = values.clone()
        self.inner.sum_shares(clean)
        if self.rank and self._waits:
            values += torch.randn(len(values)) * self.mechanism.noise().std
        self.inner.sum_shares(values)
        self.note(clean)


class DealtTwice(WatchedWorkers):
    """Every worker gets every group."""

    def share_groups(self, groups: DrawnGroups | None) -> DrawnGroups:
        shared = super().share_groups(groups)
        return DrawnGroups(
            rows=shared.rows.repeat(self.count, axis=0),
            complete=shared.complete.repeat(self.count),
            batch_size=shared.batch_size,
        )


# Defects of the core, in the loop's mechanism


class _PlantedStage:
    """The stage of a wrong step; it passes its last draw to the mechanism."""

    def __init__(self, stage: GroupStage, draws: list[DrawnGroups]) -> None:
        self._stage, self._draws = stage, draws
        self.yields_incomplete = True

    def draw(self, num_records: int, *, sampling: Draws, permutation: Draws) -> DrawnGroups:
        self._draws[:] = [self._stage.draw(num_records, sampling=sampling, permutation=permutation)]
        return self._draws[0]


class _PlantedMechanism(Mechanism):
    """A mechanism with a wrong step, and with the claim of the correct step."""

    wrong: ClassVar[Step]
    draws: ClassVar[list[DrawnGroups]] = []

    def group_stage(self) -> GroupStage:
        return _PlantedStage(self.wrong.stage, self.draws)

    def rule(self, loss: LossSettings) -> GradientRule:
        return self.wrong.rule

    def noise(self, *, num_grid_coordinates: int | None = None) -> GaussianNoise:
        noise = super().noise(num_grid_coordinates=num_grid_coordinates)
        return dataclasses.replace(self.wrong.noise(self.draws[0]), grid=noise.grid) if self.draws else noise

    @property
    def divisor(self) -> float:
        return self.wrong.divisor(self.draws[0]) if self.draws else super().divisor


def planted_mechanism(mechanism: Mechanism, defect: Defect) -> Mechanism:
    """Return the mechanism with a defect; a new class for each one holds its last draw."""
    return as_planted(
        mechanism, _PlantedMechanism, wrong=defect.plant(step_of(mechanism), mechanism), draws=[]
    )


def as_planted(mechanism: Mechanism, kind: type[Mechanism], **attributes: Any) -> Mechanism:
    """Return the mechanism as one of a new class, which has these class attributes."""
    planted: Mechanism = type("_Planted", (kind,), attributes)(**vars(mechanism))
    return planted


@dataclass
class NoiseOfTheRun:
    """A source whose draws for the noise are the same at all steps of a run."""

    inner: DrawSource
    num_steps: int
    run: int = -1
    seed: int = 0

    @property
    def is_exact(self) -> bool:
        return self.inner.is_exact

    def gpu_generators(self, device: torch.device) -> None:
        return None  # draws are stored and reused, which needs them on the CPU

    @property
    def description(self) -> str:
        return self.inner.description

    def generator(self, step: int, purpose: str) -> Draws:
        if purpose != "noise":
            return self.inner.generator(step, purpose)
        if step // self.num_steps != self.run:
            self.run = step // self.num_steps
            self.seed = int(self.inner.generator(step, purpose).random(1)[0] * 2**53)
        return np.random.default_rng(self.seed)
