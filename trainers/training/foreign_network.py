"""Networks from outside this package: the check before they see data, and the note in the statement."""

from __future__ import annotations

import torch
from torch import Tensor

from dpgcl_core.clipping.cross_record import PROMISE, refuse_mixed_groups
from dpgcl_core.clipping.types import Objective
from dpgcl_core.losses.objective import embedding_of
from dpgcl_core.mechanism.passes import groups_of_a_pass
from dpgcl_core.sampling.groups import BATCH
from trainers.config.training import TrainingConfig
from trainers.models.task_networks import AnyEncoder
from trainers.tasks.task import task_of
from trainers.training.averaging import target_of

_FEW_GROUPS, _MAX_RECORDS = 3, 256


def refuse_mixing_network(
    config: TrainingConfig, encoder: AnyEncoder, image_shape: tuple[int, ...], max_views: int
) -> None:
    """Test on synthetic inputs whether a user's own network mixes records.

    As many groups pass through it at once as in its training.

    Args:
      config: the training's configuration.
      encoder: the network, on its device.
      image_shape: `(channels, height, width)`.
      max_views: the maximum number of views that pass through the network at once.

    Raises:
      ConfigError: records affect each other's losses, or the network keeps data of a pass.
    """
    if not config.network.is_foreign or not config.mechanism.rules.trains:
        return
    task, rule, size = task_of(config), config.rule(), config.mechanism.group_size
    num_views = task.num_views(config, config.num_augmentations)
    objective = task.objective(config, encoder, target=target_of(config, encoder))
    num_records = max(_FEW_GROUPS, min(_MAX_RECORDS, round(config.mechanism.expected_batch_size)))
    if rule.whole_batch:  # each record is a unit, and all pass through the network together
        groups, group_size, objective = num_records, 1, _sum_embeddings(objective)
    elif size == BATCH:
        groups, group_size = _FEW_GROUPS, min(num_records, max(2, max_views // num_views))
    else:
        fits = max(1, max_views // (int(size) * num_views))
        groups, group_size = groups_of_a_pass(config.mechanism, limit=fits), int(size)
    if config.isolates_groups:
        groups = _FEW_GROUPS
    blank = task.blank_inputs(encoder, image_shape, (max(_FEW_GROUPS, groups), group_size, num_views))
    leaves, generator = (blank,) if isinstance(blank, Tensor) else blank, torch.Generator().manual_seed(0)
    inputs, other_inputs = (tuple(_draw_like(leaf, generator) for leaf in leaves) for _ in range(2))
    refuse_mixed_groups(encoder, objective, inputs, other_inputs)


def foreign_note(config: TrainingConfig) -> str:
    """Return the note on a user's own network, for plan and statement; "" for this package's networks."""
    name = config.network.name
    if not config.network.is_foreign:
        return ""
    if config.network.mixes_no_records:
        return (
            f"The network's author promises that {name} {PROMISE}. The guarantee depends on this promise. It "
            "was tested on synthetic inputs, but no test can prove it."
        )
    return (
        f"The network {name} is not part of this package. Groups pass through it one at a time, on copies of "
        "its weights, buffers and attributes, so that it cannot mix them. The network's author promises that "
        "it keeps no data outside of its modules and their classes."
    )


def _sum_embeddings(objective: Objective) -> Objective:
    embed = embedding_of(objective)
    return lambda inputs: embed(inputs).flatten(1).sum(1)


def _draw_like(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers with another mean for each record; 0 or 1 if `like` holds integers."""
    if not like.is_floating_point():
        return torch.randint(0, 2, like.shape, generator=generator).to(like)
    levels = torch.rand((*like.shape[:2], *(1 for _ in like.shape[2:])), generator=generator) * 2 - 1
    return (levels + torch.rand(like.shape, generator=generator) - 0.5).to(like)
