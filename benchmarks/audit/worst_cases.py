"""Worst-case gradients for an audit: one vector for each set of members.

A sensitivity is claimed for *any* function that maps a group's members to a vector of norm ≤ C, so an audit
may use the function that reveals most. Each function here was chosen for a class of defects before any run.
The vectors are far longer than C. The real clipper shortens them, and sets them to zero in incomplete groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

CANARY, NOBODY = -1, -2
"""Members that are not in D: the canary, and a missing member of a group that is too short."""

Members = tuple[int, ...]
"""The members of one group, ascending; the records of D are 0, 1, …"""

GroupGradient = Callable[[Members], NDArray[np.float64]]
"""Maps a group's members to `[dim]`; a norm of 1 stands for far more than C."""

_FAR, _LONGER = 1e3, 1e3


def foreign(members: Members, *, group_size: int | None, dim: int) -> NDArray[np.float64]:
    """Return one direction for groups that D can form, and a longer opposite vector for all other groups.

    Other groups are groups with the canary, groups that are too short, and groups with a repeated record:
    only the canary should make them occur. The first two coordinates have opposite signs.

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
    """Return one direction for groups with the canary, and the opposite for all others, complete or not.

    >>> newcomer((3,), group_size=2, dim=1), newcomer((CANARY, 5), group_size=2, dim=1)
    (array([-1.]), array([1.]))
    """
    direction = np.zeros(dim)
    direction[0] = 1.0 if CANARY in members else -1.0
    return direction


def in_order(members: Members, *, group_size: int | None, dim: int) -> NDArray[np.float64]:
    """Return one direction for groups that D gives without a permutation, and the opposite for all others."""
    first = members[0]
    straight = first >= 0 and first % len(members) == 0 and members[-1] == first + len(members) - 1
    direction = np.zeros(dim)
    direction[0] = -1.0 if straight else 1.0
    return direction


def partners(members: Members, *, group_size: int | None, dim: int) -> NDArray[np.float64]:
    """Return a pseudorandom direction for every set of members, which reveals any exchange of members."""
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
      groups: members `[groups, group_size]`; `NOBODY` marks a missing member.
      gradient: maps members to a group's gradient, in which every member has an equal share.
      l2_clip_norm: C.
    """
    whole = np.stack([gradient(members_of(group)) for group in groups.tolist()])
    shared = np.repeat(whole[:, None], groups.shape[1], axis=1)
    return torch.from_numpy(_FAR * l2_clip_norm * shared).float()[:, :, None]


def members_of(group: list[int]) -> Members:
    """Return the members that are not missing, ascending."""
    return tuple(sorted(each for each in group if each != NOBODY))
