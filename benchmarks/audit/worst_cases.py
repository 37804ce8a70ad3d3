"""Gradients for an audit: one vector for each set of members, the worst that somebody could arrange.

A sensitivity is claimed for *any* function that maps a group's members to a vector of norm ≤ C, so an audit
may take the one that shows most. Each of these was chosen for a class of defects before anything ran. They
give vectors far beyond C, which the real clipper cuts down, or makes zero where a group is not complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

CANARY, NOBODY = -1, -2
"""Members that D has not: the canary, and the missing ones of a group that is too short."""

Members = tuple[int, ...]
"""Of one group, ascending; the records of D are 0, 1, ….."""

GroupGradient = Callable[[Members], NDArray[np.float64]]
"""Maps a group's members to `[dim]`; a norm of 1 stands for far more than C."""

_FAR, _LONGER = 1e3, 1e3


def foreign(members: Members, *, group_size: int | None, dim: int) -> NDArray[np.float64]:
    """Point one way for groups that D can form, the other way, and longer, for all others.

    Others are those with the canary, too short ones, and those in which a record stands twice: nobody but
    the canary should make them occur. Two neighbouring coordinates have opposite signs.

    >>> foreign((3, 5), group_size=2, dim=1), foreign((CANARY, 5), group_size=2, dim=1)
    (array([-1.]), array([1000.]))
    """
    strange = (
        members[0] < 0 or len(set(members)) < len(members) or len(members) != (group_size or len(members))
    )
    direction = np.zeros(dim)
    direction[:2] = (1.0, -1.0)[:dim]
    return (_LONGER if strange else -1.0) * direction / np.linalg.norm(direction)


def newcomer(members: Members, *, group_size: int | None, dim: int) -> NDArray[np.float64]:
    """Point one way for groups with the canary, the other way for all others, complete or not.

    >>> newcomer((3,), group_size=2, dim=1), newcomer((CANARY, 5), group_size=2, dim=1)
    (array([-1.]), array([1.]))
    """
    direction = np.zeros(dim)
    direction[0] = 1.0 if CANARY in members else -1.0
    return direction


def in_order(members: Members, *, group_size: int | None, dim: int) -> NDArray[np.float64]:
    """Point one way for the groups that D gives without a permutation, the other way for all others."""
    first = members[0]
    straight = first >= 0 and first % len(members) == 0 and members[-1] == first + len(members) - 1
    direction = np.zeros(dim)
    direction[0] = -1.0 if straight else 1.0
    return direction


def partners(members: Members, *, group_size: int | None, dim: int) -> NDArray[np.float64]:
    """Point somewhere else for every set of members, as if at random: whoever is exchanged is seen."""
    seed = int.from_bytes(hashlib.sha256(repr(members).encode()).digest()[:8], "little")
    vector = np.random.default_rng(seed).standard_normal(dim)
    return vector / np.linalg.norm(vector)


class Crafted(nn.Module):
    """A linear network without bias, whose group gradients are the sums of its inputs."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the losses `[groups]` of inputs `[groups, group_size, 1, dim]`."""
        losses: Tensor = self.layer(inputs.flatten(0, 2)).reshape(len(inputs), -1).sum(1)
        return losses


def crafted_inputs(groups: NDArray[np.int64], gradient: GroupGradient, *, l2_clip_norm: float) -> Tensor:
    """Return the inputs that give groups their gradients, `[groups, group_size, 1, dim]`.

    Args:
      groups: members `[groups, group_size]`, `NOBODY` where one is missing.
      gradient: of a group; every member has an equal share in it.
      l2_clip_norm: C.
    """
    whole = np.stack([gradient(members_of(group)) for group in groups.tolist()])
    shared = np.repeat(whole[:, None], groups.shape[1], axis=1)
    return torch.from_numpy(_FAR * l2_clip_norm * shared).float()[:, :, None]


def members_of(group: list[int]) -> Members:
    """Return who is there, ascending."""
    return tuple(sorted(each for each in group if each != NOBODY))
