"""One private step, stages 2 to 9: draw, inputs, clipped sum, noise, update.

Both training loops take it: `trainers.training.loop`, and somebody's own (`dpgcl_core.private_training`).
They differ in where inputs come from and in what an update is.

Guarantee. What `take` hands to `update` is one release of the mechanism (`dpgcl_core.mechanism.mechanism`):
the clipped sum of the groups that the mechanism's stage drew in secret, plus one draw of the mechanism's
noise, divided by its public constant; and what a rule with draws of its own releases besides, which its
method accounts for. The caller sees to it that

- the rule is the mechanism's, and each draw of `draw` is taken once, and counted before it is drawn;
- a record's inputs are a function of that record alone, and a group's loss one of that group's inputs and the
  networks; `watch` refuses networks that a pass has changed;
- `update` uses nothing else that was computed of records, and keeps no view of the gradient, whose memory the
  next step may use. Whether a step fails is an output that is not covered.

*Proof.* Stage, noise and divisor are of one mechanism. The first worker draws groups and noise for all.
`share_groups` deals out whole groups, so that each is summed by one worker: every term of the sum is bounded
as on one worker, and `sum_at_first` adds them up where the one noise is added. The other workers' sums, which
have no noise, are zeroed before they take over the first one's. So `update` gets, values and memory, the
noisy sum alone, rounded to float32. ∎ What an observer sees is computed of records and has no noise. It may
keep that of public records, and release of private ones what has noise of its own and is charged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch
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
    drawn_ahead,
    drawn_of,
    drawn_on_gpu,
    in_float32,
)
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.randomness import DrawSource
from dpgcl_core.sampling.stage import DrawnGroups
from dpgcl_core.workers import SingleWorker, Workers

_Part = TypeVar("_Part")
_Made = TypeVar("_Made")

InputsOf = Callable[[slice], GroupInputs]
"""Returns the inputs of some of a worker's groups, `[groups, group_size, views, ...]` each."""


class StepObserver(Protocol):
    """Looks at a step from within, at numbers that have no noise; see the module for what it may keep."""

    def on_clipped_sum(self, groups: DrawnGroups, reports: list[GroupReport], total: Tensor) -> None:
        """Look at this worker's groups and their reports, and at the first worker at the clean sum of all."""

    def on_noise(self, norm: float) -> None:
        """Look at the norm of the step's noise, at the first worker alone."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PrivateStep:
    """A mechanism's step on one network.

    Attributes:
      mechanism: what is drawn, how far a record moves the sum, the noise.
      model: the network that is trained, on its device.
      objective: inputs of groups to one loss each.
      rule: of the mechanism; clips and sums.
      groups_at_once: public number of groups that the rule gets at a time; one that takes whole batches gets
        all.
      randomness: secret draws.
      workers: this process among the data-parallel workers.
      watch: enters what refuses, on exit, networks that a pass has changed.
      threads: that make inputs ahead, and draw and add noise, beside the caller's; None for none.
      num_noise_threads: of these, for noise that is drawn while a GPU computes.
      makes_inputs_ahead: whether a thread makes the next inputs meanwhile.
      total: memory of the clipped sum, float64 `[num_trainable(model)]`, for passes that add to one place
        alone; None for fresh memory at every step.
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

    def draw(self, step: int, num_records: int) -> DrawnGroups:
        """Return this worker's share of a step's groups, with their mask: stages 2 and 3.

        The first worker draws for all, in secret; whole groups are dealt out, so no group and no negative
        crosses a worker. An empty draw is a step like any other.

        Args:
          step: from 0.
          num_records: of the data set.
        """
        all_groups = None
        if self.workers.rank == 0:
            stage = self.mechanism.group_stage()
            all_groups = stage.draw(
                num_records,
                sampling=self.randomness.generator(step, "sampling"),
                permutation=self.randomness.generator(step, "permutation"),
            )
            if not stage.yields_incomplete and not all_groups.complete.all():
                raise ConfigError(
                    "a group stage that yields incomplete groups must say so: yields_incomplete"
                )
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
        """Take a step on groups that `draw` returned: stages 4 to 9.

        Args:
          step: from 0, that of the draw.
          groups: this worker's.
          inputs_of: stage 4.
          update: applies the private gradient, float32 `[num_trainable(model)]`, on every worker.
          observer: sees the clean sum and the norm of the noise.
        """
        noise = self.mechanism.noise(num_summed=self.randomness.num_summed_normals)
        total = no_sum(self.model) if self.total is None else self.total.zero_()
        noise_of = self._start_noise(step, noise, total)
        with self.watch():
            reports = self.add_clipped_sum(total, step, groups, inputs_of)
        self.workers.sum_at_first(total)
        if observer is not None:
            observer.on_clipped_sum(groups, reports, total)
        if noise_of is None:
            total.zero_()  # this worker's own sum has no noise; the first one's takes its place
        else:
            threads = self.threads if total.device.type == "cpu" else None  # a GPU adds the parts in turn
            noise_norm = add_in_parts(total, noise, noise_of, beside=threads)
            if observer is not None:
                observer.on_noise(noise_norm)
        noisy = in_float32(total)  # rounded already, where noise was added
        self.workers.share(noisy)
        update(noisy.div_(self.mechanism.divisor))

    def add_clipped_sum(
        self, total: Tensor, step: int, groups: DrawnGroups, inputs_of: InputsOf
    ) -> list[GroupReport]:
        """Add the clipped gradients of groups to `total`, some groups at a time: stages 4 to 7.

        Groups with an empty slot go through the network as zeros, whatever stands in their place, and
        contribute nothing.
        """
        if not groups.rows.size:
            return []
        rule, at_once = self.rule, len(groups) if self.rule.whole_batch else self.groups_at_once
        draws = self.randomness.generator(step, "statistics") if rule.needs_draws else None
        parts = [slice(start, start + at_once) for start in range(0, len(groups), at_once)]
        masks = {part.start: torch.from_numpy(groups.complete[part]) for part in parts}

        def masked_inputs(part: slice) -> GroupInputs:
            return map_inputs(partial(zeros_where_incomplete, complete=masks[part.start]), inputs_of(part))

        made = make_ahead(masked_inputs, parts, self.threads if self.makes_inputs_ahead else None)
        return [
            rule.add_clipped_sum(
                total, self.model, self.objective, inputs, complete=masks[part.start], draws=draws
            )
            for part, inputs in zip(parts, made, strict=True)
        ]

    def _start_noise(self, step: int, noise: GaussianNoise, total: Tensor) -> PartNoise | None:
        """Return how to get the parts of the step's one noise draw; None but at the first worker.

        A GPU draws that of public data itself. Other noise is drawn in threads beside it while it computes
        the gradients, of which it needs nothing. On a CPU the gradients have all threads and most memory, so
        parts are drawn once they are to be added. A step that fails throws its draw away, unreleased.
        """
        if self.workers.rank > 0:
            return None
        if total.device.type == "cuda":
            seed_of = partial(self.randomness.gpu_seed, step)
            if seed_of("noise") is not None:
                return drawn_on_gpu(noise, seed_of, total.device)
        noise_of = drawn_of(noise, partial(self.randomness.generator, step))
        if total.device.type == "cpu" or self.threads is None:
            return noise_of
        return drawn_ahead(noise_of, len(total), self.threads, self.num_noise_threads)


def make_ahead(
    make: Callable[[_Part], _Made], parts: Sequence[_Part], thread: Executor | None
) -> Iterator[_Made]:
    """Yield `make(part)` of each part; in a thread the next one is made while one is used."""
    if thread is None:
        yield from map(make, parts)
        return
    coming: Future[_Made] = thread.submit(make, parts[0])
    for part in parts[1:]:
        made, coming = coming.result(), thread.submit(make, part)
        yield made
    yield coming.result()
