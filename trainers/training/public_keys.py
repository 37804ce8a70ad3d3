"""Public negatives: embeddings of public records by the current weights, shared by all groups of a step.

A group's loss compares its records with each other, and S records are few. M public records, embedded once
per step in a pass of their own, are further keys of every query of every group.

Guarantee. The sensitivity is what it was without them. Their embeddings are a function of the released
weights, the public records, the public seed and the step; they take no gradient. So the loss of a group, and
with it its clipped gradient h(G), is a function of G's own records and of constants that are the same for
neighbouring data sets, and one record still touches one group: the proofs of the groups' sensitivity ask for
nothing more (docs/theory/public-records.md). It needs that the public records are chosen without the private
ones and share none with them.

The pass is not one of the clipping engine's: it ends before the engine puts its hooks on the network, changes
no weight, and its result is detached, so no gradient of any group flows through it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from dpgcl_core.clipping.full_precision import full_precision
from dpgcl_core.clipping.types import Objective
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.objective import EmbeddingObjective
from trainers.config.training import TrainingConfig
from trainers.data.dataset import PublicSource
from trainers.models.networks import AnyEncoder
from trainers.tasks.contrastive import ContrastiveTask
from trainers.tasks.task import task_of

_AT_ONCE = 256
"""Records of a pass: a constant, so that no kernel follows the memory that is free."""


def public_keys(
    config: TrainingConfig, encoder: AnyEncoder, source: PublicSource | None, step: int
) -> Tensor | None:
    """Return the step's public keys by the current weights, float32 `[num_public_negatives, views, dim]`.

    Args:
      config: of the training; its number of public negatives, views and public seed.
      encoder: at the released weights of the steps before.
      source: of public records.
      step: of the training.

    Returns:
      Without a gradient: one view of images, image and caption of pairs; None where none are asked for.

    Raises:
      ConfigError: there is no source, or the task has no embeddings.
    """
    number, task = config.public.num_public_negatives, task_of(config)
    if not number:
        return None
    if source is None or not isinstance(task, ContrastiveTask):
        raise ConfigError(f"{number} public negatives need public records and a task with embeddings")
    records = source.records(number, seed=config.public_seed, step=step, purpose="negatives")
    one_draw = dataclasses.replace(config, num_view_draws=1)
    embed, found = task.embed(encoder, config.network), []
    with torch.no_grad(), full_precision(next(encoder.parameters()).device.type):
        for start in range(0, number, _AT_ONCE):
            rows = np.arange(start, min(start + _AT_ONCE, number))[None]
            views = task.inputs(one_draw, encoder, records, rows, step=step, num_augmentations=0)
            assert isinstance(views, Tensor)  # of a task with embeddings
            found.append(embed(views[:, :, : task.fewest_views])[0])
    return torch.cat(found)


def with_public_keys(objective: Objective, config: TrainingConfig, keys: Tensor | None) -> Objective:
    """Return the objective of one draw of the views with `keys` in the loss of every group; itself for None.

    Args:
      objective: made of embeddings.
      config: whose method has the loss.
      keys: as of `public_keys`.
    """
    if keys is None:
        return objective
    assert isinstance(objective, EmbeddingObjective)  # `TrainingConfig` refuses methods of other objectives
    return dataclasses.replace(objective, loss=config.group_loss(keys))
