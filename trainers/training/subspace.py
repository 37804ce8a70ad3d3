"""The public subspace of a training: which directions its steps are taken in, and when they are renewed.

The proof that they change no sensitivity is in `dpgcl_core.clipping.subspace`: it asks that directions are a
function of public records, public randomness and released weights. So they are the leading ones among the
clipped gradients of m groups of public records, made, augmented and compared as the private groups are, at
the weights before the step. They are renewed every so many steps, which is a public schedule.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from dpgcl_core.clipping.subspace import leading_directions
from dpgcl_core.clipping.types import no_sum, num_trainable
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.method import GradientRule, GroupRule
from trainers.config.training import TrainingConfig
from trainers.data.dataset import PublicSource
from trainers.models.networks import AnyEncoder
from trainers.models.precision import gradient_scale
from trainers.tasks.task import task_of
from trainers.training.precision import objective_of


def check_subspace(config: TrainingConfig, encoder: AnyEncoder) -> None:
    """Raise ConfigError if a subspace has more dimensions than the network has trainable weights."""
    dim, num_weights = config.public.subspace_dim, num_trainable(encoder)
    if dim > num_weights:
        raise ConfigError(
            f"subspace_dim must be at most the number of trainable weights, {num_weights}; got {dim}"
        )


def empty_sum(config: TrainingConfig, encoder: AnyEncoder) -> Tensor:
    """Return a clipped sum of nothing, float64, where the network is: of all weights, or of the subspace."""
    total = no_sum(encoder)
    return total.new_zeros(config.public.subspace_dim) if config.public.subspace_dim else total


def is_renewed_at(config: TrainingConfig, step: int) -> bool:
    """Whether a step begins with new directions."""
    return config.public.subspace_dim > 0 and step % config.public.subspace_every_steps == 0


def public_basis(
    config: TrainingConfig,
    encoder: AnyEncoder,
    source: PublicSource | None,
    step: int,
    *,
    max_views: int,
    target: AnyEncoder | None = None,
    public_keys: Tensor | None = None,
) -> Tensor:
    """Return the directions by the current weights, float32 `[subspace_dim, num_trainable(encoder)]`.

    Args:
      config: of the training.
      encoder: at the released weights of the steps before.
      source: of public records.
      step: of the training.
      max_views: that go through the network at once, beside the one group that always does.
      target: as of `trainers.training.precision.objective_of`.
      public_keys: of the step.

    Raises:
      ConfigError: there is no source.
    """
    if source is None:
        raise ConfigError("a subspace is spanned by gradients of public records, and none are given")
    task, size = task_of(config), int(config.mechanism.group_size)
    number, copies = config.public.num_subspace_groups, config.num_augmentations
    records = source.records(number * size, seed=config.public_seed, step=step, purpose="subspace")
    at_once = min(number, max(1, max_views // (size * task.num_views(config, copies))))
    rule = config.rule(at_once)
    assert isinstance(rule, GroupRule)  # `TrainingConfig` refuses the others
    clipper = rule.clipper.scaled(gradient_scale(config.network))
    objective = objective_of(config, encoder, config.network, target, public_keys)
    gradients = []
    for start in range(0, number, at_once):
        groups = np.arange(start * size, min(start + at_once, number) * size).reshape(-1, size)
        inputs = task.inputs(config, encoder, records, groups, step=step, num_augmentations=copies)
        gradients.append(clipper.bounded_gradients(encoder, objective, inputs))
    return leading_directions(torch.cat(gradients), config.public.subspace_dim)


def in_subspace(rule: GradientRule, basis: Tensor | None) -> GradientRule:
    """Return the rule that clips and sums coordinates on `basis`; itself for None."""
    if basis is None:
        return rule
    assert isinstance(rule, GroupRule)
    return dataclasses.replace(rule, clipper=dataclasses.replace(rule.clipper, basis=basis))
