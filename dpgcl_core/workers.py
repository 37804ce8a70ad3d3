"""The operations that a training loop needs of its workers, whether there is one worker or many.

The distribution of a training does not depend on the number of workers. The first worker draws sample and
permutation for all, and whole groups are distributed. Each worker adds the clipped sum of its groups, then
draws and adds the noise of its share of the coordinates (`dpgcl_core.noise.chunked_draw`). So sums travel
once, and the noisy shares once.

*Failures.* Before every exchange of data the workers exchange whether one of them has failed. A worker that
fails between two exchanges takes part in the next one, with the report of its failure, and in none afterwards
(`failing_together`). So no worker waits for data that never come, and each worker learns of a failure before
it gets the data that depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dpgcl_core.errors import ConfigError, ProcessFailed
from dpgcl_core.noise.chunked_draw import parts_of
from dpgcl_core.sampling.stage import DrawnGroups


class Workers(Protocol):
    """One worker's view of all data-parallel workers of a training."""

    rank: int
    count: int

    def share_groups(self, groups: DrawnGroups | None) -> DrawnGroups:
        """Return the first worker's groups and their mask on every worker; others pass None."""

    def sum_shares(self, values: Tensor) -> None:
        """Sum `values` over the workers in place; outside a worker's share its values become zeros.

        A short vector, up to `dpgcl_core.noise.chunked_draw.PART`, is the first worker's share.
        """

    def gather_shares(self, values: Tensor) -> None:
        """Overwrite `values`, outside the own share, with the values that the other workers have there."""

    def check_failures(self, *, has_failed: bool = False) -> None:
        """Exchange whether any worker has failed; raise ProcessFailed if one has, or if it has ended."""

    def check_agreement(self, facts: dict[str, Any]) -> None:
        """Raise ConfigError on every worker unless all have the same facts, which are named but not shown."""


class SingleWorker:
    """A training on one worker."""

    rank = 0
    count = 1

    def share_groups(self, groups: DrawnGroups | None) -> DrawnGroups:
        assert groups is not None
        return groups

    def sum_shares(self, values: Tensor) -> None:
        pass

    def gather_shares(self, values: Tensor) -> None:
        pass

    def check_failures(self, *, has_failed: bool = False) -> None:
        pass

    def check_agreement(self, facts: dict[str, Any]) -> None:
        pass


class DistributedWorkers:
    """The workers of the current `torch.distributed` process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()
        self._device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def share_groups(self, groups: DrawnGroups | None) -> DrawnGroups:
        self.check_failures()
        shape = torch.tensor([0, 0] if groups is None else groups.rows.shape, device=self._device)
        with _process_failures():
            dist.broadcast(shape, src=0)
        num_groups, group_size = shape.tolist()
        shared = torch.empty((num_groups, group_size + 1), dtype=torch.int64, device=self._device)
        if groups is not None:
            shared[:, :-1].copy_(torch.from_numpy(groups.rows))
            shared[:, -1].copy_(torch.from_numpy(groups.complete))  # the mask, as the last column
        if num_groups:
            with _process_failures():
                dist.broadcast(shared, src=0)
        found = shared.cpu().numpy()
        size = 0 if groups is None else groups.batch_size
        return DrawnGroups(rows=found[:, :-1], complete=found[:, -1].astype(np.bool_), batch_size=size)

    def sum_shares(self, values: Tensor) -> None:
        for owner in range(self.count):
            for part in parts_of(len(values), rank=owner, count=self.count):
                self._in_place(values[part], dist.reduce, dst=owner)
                if owner != self.rank:
                    values[part].zero_()

    def gather_shares(self, values: Tensor) -> None:
        for owner in range(self.count):
            for part in parts_of(len(values), rank=owner, count=self.count):
                self._in_place(values[part], dist.broadcast, src=owner)

    def check_failures(self, *, has_failed: bool = False) -> None:
        num_failed = torch.tensor(int(has_failed), device=self._device)
        with _process_failures():
            dist.all_reduce(num_failed)
        if num_failed.item():
            raise ProcessFailed(_FAILED)

    def check_agreement(self, facts: dict[str, Any]) -> None:
        self.check_failures()
        facts_of_workers: list[dict[str, Any]] = [{} for _ in range(self.count)]
        with _process_failures():
            dist.all_gather_object(facts_of_workers, facts)
        names = [name for name in facts if any(each[name] != facts[name] for each in facts_of_workers)]
        if names:
            raise ConfigError(
                f"all {self.count} processes must have the same {' and '.join(names)}; got different ones. "
                "Run one script in all processes, call torch.manual_seed before it makes model and data, and "
                "sort the records: a Python set has another order in each process"
            )

    def _in_place(self, values: Tensor, operation: Callable[..., object], **ranks: int) -> None:
        """Run a collective operation on the backend's device: NCCL does not accept CPU tensors."""
        self.check_failures()
        device_values = values.to(self._device)
        with _process_failures():
            operation(device_values, **ranks)
        if device_values is not values:
            values.copy_(device_values)


def current_workers() -> Workers:
    """Return the workers of the current process group; one worker if there is none."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return DistributedWorkers()
    return SingleWorker()


_FAILED = (
    "another process of this training has failed, has left the loop, or came later than the process group's "
    "timeout, so this one ends, too. Read that process's own error. If it has none, pass a longer timeout to "
    "init_process_group"
)

# For example "[…/gloo/transport/tcp/pair.cc:547] Connection closed by peer". Other backends' errors have a
# class of their own.
_GLOO_ERROR = re.compile(r"^\[[^\]\n]*gloo/[^\]\n]*\]")


def is_lost_connection(error: BaseException) -> bool:
    """Return whether the error is of the kind that is raised when another worker's process has died."""
    return isinstance(error, ProcessFailed | dist.DistBackendError) or (
        type(error) is RuntimeError and _GLOO_ERROR.match(str(error)) is not None
    )


@contextmanager
def _process_failures() -> Iterator[None]:
    """Turn the error of a lost connection into ProcessFailed."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise ProcessFailed(_FAILED) from error


@contextmanager
def failing_together(workers: Workers) -> Iterator[None]:
    """Run a block that raises on every worker if it raises on one; all workers must enter it.

    An interrupt (KeyboardInterrupt, SystemExit) is not reported, because it can come during an exchange. It
    ends the process, and thereby the others' connections.

    Raises:
      ProcessFailed: another worker's block has raised, or its process has ended.
    """
    try:
        yield
    except ProcessFailed:
        raise
    except Exception:
        with suppress(ProcessFailed):
            workers.check_failures(has_failed=True)
        raise
    workers.check_failures()
