"""Several draws of a record's views in one step (augmentation multiplicity; De et al. 2022).

A record's views are drawn K times, and what the draws contribute is averaged: less of a step's gradient is
the accident of one crop, at the same noise.

Sensitivity is that of one draw. *Groups*: the loss of a group is the mean of the losses of its K draws, so
their gradients are averaged **before** clipping. It is still a function of the group's own records, its
gradient is still clipped to C, and one record still touches one group: nothing in the proposition of
`dpgcl_core.sampling.groups` asks what the loss is. *Whole batches*: the K clipped sums f_1, …, f_K are
averaged after clipping. One coupling of sample and groups serves all of them, for a draw decides views alone,
and under it each of them moves by at most Δ. So does their mean: ‖(1/K) Σ_k f_k(B') − (1/K) Σ_k f_k(B)‖ ≤
(1/K) Σ_k ‖f_k(B') − f_k(B)‖ ≤ Δ.

A rule that releases statistics of its own at every call would release K times as many: it is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.types import GroupInputs, GroupReport, Objective
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.objective import EmbeddingObjective, GroupLoss
from dpgcl_core.mechanism.method import GradientRule, GroupRule
from dpgcl_core.noise.sources import Draws


def over_view_draws(rule: GradientRule, num_draws: int) -> GradientRule:
    """Return the rule that averages the clipped sums of K = `num_draws` draws of the views.

    Itself where it clips groups: of those the objective averages, see `objective_over_view_draws`.

    Raises:
      ConfigError: the rule releases statistics at every call.
    """
    if num_draws > 1 and rule.needs_draws:
        raise ConfigError(
            "a method that releases noised statistics of the views would release those of every draw: give "
            f"num_view_draws = 1; got {num_draws}"
        )
    if num_draws == 1 or isinstance(rule, GroupRule):
        return rule
    return _MeanSum(inner=rule, num_draws=num_draws, whole_batch=rule.whole_batch)


def objective_over_view_draws(objective: Objective, num_draws: int) -> Objective:
    """Return the objective whose loss is the mean over K = `num_draws` draws of a group's views.

    Itself for K = 1, and where no group has a loss by itself: there the rule averages.

    Args:
      objective: of one draw. One that is made of embeddings takes the views in the order of `draws_of`;
        any other takes inputs whose views are those of the first draw, the second, and so on.
      num_draws: K.
    """
    if num_draws == 1:
        return objective
    if not isinstance(objective, EmbeddingObjective):
        return _MeanObjective(objective=objective, num_draws=num_draws)
    if objective.loss is None:
        return objective
    return dataclasses.replace(objective, loss=_MeanLoss(loss=objective.loss, num_draws=num_draws))


def draws_of(views: Tensor, num_draws: int) -> Iterator[Tensor]:
    """Yield the views of each draw, `[groups, group_size, 2 + num_augmentations, ...]`.

    The pairs of all draws stand before the copies of all draws, so that the first 2·K views are the same
    ones whatever N_a is.

    Args:
      views: `[groups, group_size, num_draws·(2 + num_augmentations), ...]`, or their embeddings.
      num_draws: K.

    >>> [draw.flatten().tolist() for draw in draws_of(torch.arange(8).view(1, 1, 8), 2)]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    num_copies = views.shape[2] // num_draws - 2
    for draw in range(num_draws):
        start = 2 * num_draws + draw * num_copies
        pair, copies = views[:, :, 2 * draw : 2 * draw + 2], views[:, :, start : start + num_copies]
        yield torch.cat([pair, copies], dim=2)


@dataclass(frozen=True, kw_only=True)
class _MeanLoss:
    """The mean of a group's losses over its draws, whose views were embedded at once."""

    loss: GroupLoss
    num_draws: int

    def __call__(self, embeddings: Tensor) -> Tensor:
        return torch.stack([self.loss(draw) for draw in draws_of(embeddings, self.num_draws)]).mean(0)


@dataclass(frozen=True, kw_only=True)
class _MeanObjective:
    """The mean of a group's losses over its draws, each of which is a group of its own to the objective."""

    objective: Objective
    num_draws: int

    def __call__(self, inputs: GroupInputs) -> Tensor:
        if isinstance(inputs, Tensor):
            losses = self.objective(self._apart(inputs))
        else:
            losses = self.objective(tuple(self._apart(each) for each in inputs))
        return losses.reshape(-1, self.num_draws).mean(1)

    def _apart(self, views: Tensor) -> Tensor:
        """Views `[groups, group_size, K·views, ...]` as `[groups·K, group_size, views, ...]`."""
        groups, group_size, num_views, *view = views.shape
        apart = views.reshape(groups, group_size, self.num_draws, num_views // self.num_draws, *view)
        return apart.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class _MeanSum:
    """The mean of a rule's clipped sums over the draws."""

    inner: GradientRule
    num_draws: int
    whole_batch: bool
    needs_draws: bool = False

    def add_clipped_sum(
        self,
        total: Tensor,
        model: nn.Module,
        objective: Objective,
        inputs: Any,
        generator: Draws | None,
        complete: Tensor | None = None,
    ) -> GroupReport:
        sums = torch.zeros_like(total)
        reports = [
            self.inner.add_clipped_sum(sums, model, objective, draw, generator, complete)
            for draw in draws_of(inputs, self.num_draws)
        ]
        total.add_(sums, alpha=1 / self.num_draws)
        return GroupReport(
            norms=torch.stack([report.norms for report in reports]).mean(0),
            losses=torch.stack([report.losses for report in reports]).mean(0),
            non_finite=torch.stack([report.non_finite for report in reports]).any(0),
            paths=reports[-1].paths,
        )
