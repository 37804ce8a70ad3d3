"""One private step, stages 2 to 9: draw, inputs, clipped sum, noise, update.

Both training loops use it: `trainers.training.loop`, and a user's own loop (`dpgcl_core.private_training`).
They differ in the source of the inputs and in the update.

Guarantee. The gradient that `take` passes to `update` is one release of the mechanism
(`dpgcl_core.mechanism.mechanism`): the clipped sum of the groups that the mechanism's stage drew in secret,
plus one draw of the mechanism's noise, divided by its public constant. If a rule draws random numbers, the
release includes the rule's additional outputs, for which its method accounts. The caller ensures that

- the rule is the mechanism's, and each draw of `draw` is taken once, and counted before it is drawn;
- a record's inputs are a function of only that record, and a group's loss is a function of that group's
  inputs and the networks; `watch` refuses networks that a pass has changed;
- `update` uses nothing else that was computed from records, and keeps no view of the gradient, whose memory
  the next step may reuse. Whether a step fails is an output that is not covered.

*Proof.* Stage, noise and divisor belong to one mechanism. The first worker draws groups for all.
`share_groups` distributes whole groups, so that one worker sums each group: every term of the sum is bounded
as on one worker. With shards, each range of slots is drawn and summed at one worker (`ShardedGroups`). Then
each coordinate has one worker whose share it is in, a public function of the numbers of coordinates and
workers. There `sum_shares` adds the coordinate's terms, and there alone the coordinate's noise is drawn and
added, with a secret key from that worker's own operating system that is never sent. The law is the one of the
whole sum: it has the charge for rounding all coordinates. So the shares' noises are together one draw of the
mechanism's noise (`dpgcl_core.noise.chunked_draw`), of which no worker holds more than its share, and each
noisy coordinate is one worker's, which `gather_shares` sends to all. What a worker has outside its share,
sums without noise, is zeroed before this overwrites it. So `update` gets, in values and memory, only the
noisy sum, rounded to float32. ∎ The numbers that an observer sees are computed from records and have no
noise. It may keep numbers of public records. Of private records it may release only numbers that have their
own noise and are charged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpgcl_core.clipping.types import (
    GroupInputs,
    GroupReport,
    Objective,
    map_inputs,
    no_sum,
    zeros_where_incomplete,
)
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import GradientRule
from dpgcl_core.noise.chunked_draw import (
    PartNoise,
    add_in_parts,
    in_float32,
    part_noise,
    parts_of,
    start_part_noise,
)
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.randomness import DrawSource
from dpgcl_core.sampling.slots import ShardedGroups
from dpgcl_core.sampling.stage import DrawnGroups
from dpgcl_core.workers import SingleWorker, Workers

_Part = TypeVar("_Part")
_Made = TypeVar("_Made")

InputsOf = Callable[[slice], GroupInputs]
"""Returns the inputs `[groups, group_size, views, ...]` of a slice of a worker's groups."""


class StepObserver(Protocol):
    """Reads numbers of a step before noise is added; the module states which of them it may keep."""

    def on_clipped_sum(self, groups: DrawnGroups, reports: list[GroupReport], total: Tensor) -> None:
        """Read this worker's groups and reports; `total` is the noiseless sum in its share, and else zero."""

    def on_noise(self, norm: float) -> None:
        """Read the norm of the noise in this worker's share."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PrivateStep:
    """A mechanism's step on one network.

    Attributes:
      mechanism: the mechanism, which defines the draw, the sensitivity of the sum and the noise.
      model: the trained network, already on the device that computes.
      objective: a function from the inputs of groups to one loss for each group.
      rule: the mechanism's rule, which clips and sums.
      groups_at_once: number of groups in one call of the rule, public; a rule for whole batches gets all
        groups in one call.
      randomness: source of secret draws.
      workers: this process among the data-parallel workers.
      watch: returns a context manager that raises on exit if a pass has changed a network.
      threads: extra threads that prepare inputs, and draw and add noise; None for none.
      num_noise_threads: the number of `threads` that draw noise while a GPU computes gradients.
      makes_inputs_ahead: whether one of `threads` prepares the next inputs during a pass.
      total: memory of the clipped sum, float64 `[num_trainable(model)]`, for captured GPU passes, which
        always add to the same memory; None for fresh memory at every step.
    """

    mechanism: Mechanism
    model: nn.Module
    objective: Objective
    rule: GradientRule
    groups_at_once: int
    randomness: DrawSource
    workers: Workers = field(default_factory=SingleWorker)
    watch: Callable[[], AbstractContextManager[None]] = nullcontext
    threads: Executor | None = None
    num_noise_threads: int = 1
    makes_inputs_ahead: bool = False
    total: Tensor | None = None

    def draw(
        self, step: int, num_records: int, rows_of_shards: Sequence[NDArray[np.int64]] = ()
    ) -> DrawnGroups:
        """Draw a step's groups in secret and return this worker's share of them (stages 2 and 3).

        The first worker draws for all workers, and whole groups are distributed. With shards, each worker
        draws for its own ranges of slots instead. Either way a record and its negatives are on one worker. A
        step without any group is taken and charged like any other.

        Args:
          step: the step's number, from 0.
          num_records: number of records in the data set; with shards it is not used.
          rows_of_shards: with shards, the rows of the records in each range of slots, from
            `ShardedGroups.rows_of`; only this worker's ranges are read.
        """
        stage, all_groups = self.mechanism.group_stage(), None
        if isinstance(stage, ShardedGroups):
            own_shards = range(self.workers.rank, stage.num_shards, self.workers.count)
            return stage.draw(rows_of_shards, own_shards, partial(self.randomness.generator, step))
        if self.workers.rank == 0:
            all_groups = stage.draw(
                num_records,
                sampling=self.randomness.generator(step, "sampling"),
                permutation=self.randomness.generator(step, "permutation"),
            )
            if not stage.yields_incomplete and not all_groups.complete.all():
                raise ConfigError("a group stage that yields incomplete groups must set yields_incomplete")
        groups = self.workers.share_groups(all_groups)
        return groups.take(slice(self.workers.rank, None, self.workers.count))

    def take(
        self,
        step: int,
        groups: DrawnGroups,
        inputs_of: InputsOf,
        update: Callable[[Tensor], None],
        observer: StepObserver | None = None,
    ) -> None:
        """Take one private step on the groups that `draw` returned (stages 4 to 9).

        Args:
          step: the number of the draw's step, from 0.
          groups: this worker's groups.
          inputs_of: a function that returns the inputs of a slice of `groups` (stage 4).
          update: a function that applies the private gradient, float32 `[num_trainable(model)]`; it is called
            on every worker.
          observer: reads the sum before noise, and the norm of the noise; None for none.
        """
        total = no_sum(self.model) if self.total is None else self.total.zero_()
        noise = self.mechanism.noise(num_grid_coordinates=len(total) if self.randomness.is_exact else None)
        noise_of = self._start_noise(step, noise, total)
        with self.watch():
            reports = self.add_clipped_sum(total, step, groups, inputs_of)
        self.workers.sum_shares(total)
        if observer is not None:
            observer.on_clipped_sum(groups, reports, total)
        threads = self.threads if total.device.type == "cpu" else None  # a GPU adds the parts one by one
        noise_norm = add_in_parts(total, noise, noise_of, self._parts(total), executor=threads)
        if observer is not None:
            observer.on_noise(noise_norm)
        noisy = in_float32(total)  # exact, because `add_in_parts` rounds to float32, and the rest is zero
        self.workers.gather_shares(noisy)
        update(noisy.div_(self.mechanism.divisor))

    def add_clipped_sum(
        self, total: Tensor, step: int, groups: DrawnGroups, inputs_of: InputsOf
    ) -> list[GroupReport]:
        """Add the groups' clipped gradients to `total`, and return one report per call of the rule.

        These are stages 4 to 7. Groups that are not complete pass through the network as zeros, whatever
        their inputs are, and contribute nothing.
        """
        if not groups.rows.size:
            return []
        rule, at_once = self.rule, len(groups) if self.rule.whole_batch else self.groups_at_once
        draws = self.randomness.generator(step, "statistics") if rule.needs_draws else None
        parts = [slice(start, start + at_once) for start in range(0, len(groups), at_once)]
        masks = {part.start: torch.from_numpy(groups.complete[part]) for part in parts}

        def masked_inputs(part: slice) -> GroupInputs:
            return map_inputs(partial(zeros_where_incomplete, complete=masks[part.start]), inputs_of(part))

        inputs_by_part = make_ahead(masked_inputs, parts, self.threads if self.makes_inputs_ahead else None)
        return [
            rule.add_clipped_sum(
                total, self.model, self.objective, inputs, complete=masks[part.start], draws=draws
            )
            for part, inputs in zip(parts, inputs_by_part, strict=True)
        ]

    def _parts(self, total: Tensor) -> list[slice]:
        """Return the parts of this worker's share of the sum."""
        return parts_of(len(total), rank=self.workers.rank, count=self.workers.count)

    def _start_noise(self, step: int, noise: GaussianNoise, total: Tensor) -> PartNoise:
        """Return a function that draws the noise of each part of this worker's share of the sum.

        A GPU draws each part itself when it is added, if the source has generators for it. Otherwise CPU
        threads draw the noise while the GPU computes the gradients, on which the noise does not depend. On a
        CPU the gradients use all threads and most memory, so each part is drawn when it is added. A step that
        fails discards its unreleased noise.
        """
        if total.device.type == "cuda":
            gpu_generator_of = self.randomness.gpu_generators(total.device)
            if gpu_generator_of is not None:
                return part_noise(noise, gpu_generator_of, total.device)
        noise_of = part_noise(noise, partial(self.randomness.generator, step))
        if total.device.type == "cpu" or self.threads is None:
            return noise_of
        return start_part_noise(noise_of, self._parts(total), self.threads, self.num_noise_threads)


def make_ahead(
    make: Callable[[_Part], _Made], parts: Sequence[_Part], thread: Executor | None
) -> Iterator[_Made]:
    """Yield `make(part)` for each part; with a thread, the next result is made while the caller uses one."""
    if thread is None:
        yield from map(make, parts)
        return
    pending: Future[_Made] = thread.submit(make, parts[0])
    for part in parts[1:]:
        made, pending = pending.result(), thread.submit(make, part)
        yield made
    yield pending.result()
