"""An objective made of an embedding and a loss, and what is refused where one of them is missing."""

from __future__ import annotations

import pytest
import torch

from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.objective import EmbeddingObjective, embedding_of


def test_objective_is_the_loss_of_the_embedding() -> None:
    objective = EmbeddingObjective(embed=lambda x: 2 * x, loss=lambda z: z.sum((1, 2, 3)))
    assert objective(torch.ones(3, 4, 2, 5)).tolist() == [80.0] * 3
    assert embedding_of(objective) is objective.embed


def test_loss_of_the_whole_batch_gives_no_group_one() -> None:
    with pytest.raises(ConfigError, match="a group has no loss of its own"):
        EmbeddingObjective(embed=torch.nn.Identity(), loss=None)(torch.zeros(1, 1, 1, 1))


def test_objective_without_an_embedding_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"needs an EmbeddingObjective.*type function"):
        embedding_of(lambda inputs: inputs.sum())
