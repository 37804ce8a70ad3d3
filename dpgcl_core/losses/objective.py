"""Objectives of contrastive learning: an embedding, then a loss of each group's embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dpgcl_core.clipping.types import Embed, Objective
from dpgcl_core.errors import ConfigError

GroupLoss = Callable[[Tensor], Tensor]
"""Maps unit embeddings `[groups, group_size, views, dim]` to losses `[groups]`."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingObjective:
    """Embeds the views of groups, then computes one loss of each group's embeddings.

    Attributes:
      embed: maps views `[groups, group_size, views, ...]` to unit embeddings
        `[groups, group_size, views, dim]`.
      loss: maps embeddings to losses `[groups]`; None if no group has its own loss, because the rule
        decomposes a loss of the whole batch and uses only `embed`.
    """

    embed: Embed
    loss: GroupLoss | None

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the losses `[groups]` of views `[groups, group_size, views, ...]`.

        Raises:
          ConfigError: no group has its own loss.
        """
        if self.loss is None:
            raise ConfigError(
                "this method's loss is computed on the whole batch, so a group has no loss of its own. Use a "
                "rule for whole batches"
            )
        return self.loss(self.embed(inputs))


def embedding_of(objective: Objective) -> Embed:
    """Return the embedding of an objective.

    Raises:
      ConfigError: the objective has no embedding.
    """
    if not isinstance(objective, EmbeddingObjective):
        raise ConfigError(
            "a method that compares the records of a whole batch needs an EmbeddingObjective; got an "
            f"objective of type {type(objective).__name__}. Use a method that clips groups"
        )
    return objective.embed
