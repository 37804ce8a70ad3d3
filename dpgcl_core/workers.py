"""The three operations that the training loop needs of its workers, whether there is one worker or many.

The distribution of a training does not depend on the number of workers. The first worker draws sample,
permutation and noise for all. Whole groups are distributed, and the other workers only add the clipped sum of
their groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dpgcl_core.sampling.stage import DrawnGroups


class Workers(Protocol):
    """One worker's view of all data-parallel workers of a training."""

    rank: int
    count: int

    def share_groups(self, groups: DrawnGroups | None) -> DrawnGroups:
        """Return the first worker's groups and their mask on every worker; others pass None."""

    def sum_at_first(self, values: Tensor) -> None:
        """Sum `values` over the workers into the first worker's tensor, in place."""

    def share(self, values: Tensor) -> None:
        """Overwrite `values` with the first worker's values, in place."""


class SingleWorker:
    """A training on one worker."""

    rank = 0
    count = 1

    def share_groups(self, groups: DrawnGroups | None) -> DrawnGroups:
        assert groups is not None
        return groups

    def sum_at_first(self, values: Tensor) -> None:
        pass

    def share(self, values: Tensor) -> None:
        pass


class DistributedWorkers:
    """The workers of the current `torch.distributed` process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()
        self._device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def share_groups(self, groups: DrawnGroups | None) -> DrawnGroups:
        shape = torch.tensor([0, 0] if groups is None else groups.rows.shape, device=self._device)
        dist.broadcast(shape, src=0)
        num_groups, group_size = shape.tolist()
        shared = torch.empty((num_groups, group_size + 1), dtype=torch.int64, device=self._device)
        if groups is not None:
            shared[:, :-1].copy_(torch.from_numpy(groups.rows))
            shared[:, -1].copy_(torch.from_numpy(groups.complete))  # the mask, as the last column
        if num_groups:
            dist.broadcast(shared, src=0)
        found = shared.cpu().numpy()
        size = 0 if groups is None else groups.batch_size
        return DrawnGroups(rows=found[:, :-1], complete=found[:, -1].astype(np.bool_), batch_size=size)

    def sum_at_first(self, values: Tensor) -> None:
        self._in_place(values, dist.reduce, dst=0)

    def share(self, values: Tensor) -> None:
        self._in_place(values, dist.broadcast, src=0)

    def _in_place(self, values: Tensor, operation: Callable[..., object], **ranks: int) -> None:
        """Run a collective operation on the backend's device: NCCL does not accept CPU tensors."""
        device_values = values.to(self._device)
        operation(device_values, **ranks)
        if device_values is not values:
            values.copy_(device_values)


def current_workers() -> Workers:
    """Return the workers of the current process group; one worker if there is none."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return DistributedWorkers()
    return SingleWorker()
