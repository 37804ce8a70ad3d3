"""Passes that a GPU replays: a pass is captured as a CUDA graph, and replayed for every microbatch.

Python takes longer to launch the many small kernels of a pass than a GPU takes to run them. All passes of a
training have one shape (`dpgcl_core.clipping.clipper`), so all passes can use the kernels of one pass. A
replay runs the captured kernels on other inputs: norms, factors and masks are computed again from the tensors
that are summed, so every bound and proof of the clipper holds for it, whatever the inputs are.

Passes are captured before any record is seen, on groups of zeros that are marked as not complete. So the
choice of the replayed passes depends on no record, and no other thread uses the GPU meanwhile.

All decisions of Python in a pass are made once, at the capture. So passes are captured only if network and
objective are the same function at every step: no third-party code, no second network. The caller that passes
`CapturedPasses` vouches for that. A pass that waits for a value from the GPU cannot be captured, and runs
without a capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dpgcl_core.clipping.types import GroupBatch, GroupReport, map_inputs

logger = logging.getLogger(__name__)

Pass = Callable[[Tensor, GroupBatch], GroupReport]
"""Adds the clipped sum of the complete groups to a total."""

_Key = tuple[Hashable, ...]


class CapturedPasses:
    """The captured passes of one objective of one network, whose weights keep their addresses in memory."""

    def __init__(self) -> None:
        self._captured: dict[_Key, _Captured] = {}
        self._is_open = False

    @property
    def count(self) -> int:
        """The number of captured passes."""
        return len(self._captured)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture the passes taken in this context, on groups of zeros, before any record is seen."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def take(self, run: Pass, total: Tensor, groups: GroupBatch, kind: Hashable) -> GroupReport:
        """Run `run(total, groups)`, or replay it if a pass of this shape and kind has been captured.

        Args:
          run: the pass; the same function for the same kind.
          total: float64 `[num_trainable]`, on a GPU.
          groups: the groups, on the same GPU.
          kind: a key that distinguishes passes of the same shape, such as network and clipping law.
        """
        if groups.complete is None:
            groups = GroupBatch(groups.inputs, torch.ones(len(groups), dtype=torch.bool, device=total.device))
        key: _Key = (kind, total.data_ptr(), *((leaf.shape, leaf.dtype) for leaf in groups.leaves))
        if self._is_open and key not in self._captured:
            captured = _captured_if_possible(run, total, groups)
            if captured is not None:
                self._captured[key] = captured
        if key not in self._captured:
            return run(total, groups)
        return self._captured[key].replayed(groups)


@dataclass(frozen=True)
class _Captured:
    """The kernels of a pass, the memory that they read inputs from, and their outputs besides the sum."""

    graph: torch.cuda.CUDAGraph
    groups: GroupBatch
    report: GroupReport

    def replayed(self, groups: GroupBatch) -> GroupReport:
        assert self.groups.complete is not None
        assert groups.complete is not None
        for captured_leaf, leaf in zip(self.groups.leaves, groups.leaves, strict=True):
            captured_leaf.copy_(leaf)
        self.groups.complete.copy_(groups.complete)
        self.graph.replay()
        return self.report.mapped(Tensor.clone, groups.complete)  # the next pass overwrites its numbers


def _captured_if_possible(run: Pass, total: Tensor, groups: GroupBatch) -> _Captured | None:
    """Return a captured pass; None if it waits for the GPU, or cannot be captured for another reason."""
    run(total, groups)  # compiles kernels
    try:
        with _no_synchronisation():
            run(total, groups)
    except RuntimeError as error:
        logger.info("passes run without CUDA graphs: %s", error)
        return None
    try:
        return _captured(run, total, groups)
    except Exception as error:
        logger.warning("passes run without CUDA graphs: %s: %s", type(error).__name__, error)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # raises, before any record is seen, if the failure has broken the allocator
        return None


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    """Raise an error for every call that would wait for a value from the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _captured(run: Pass, total: Tensor, groups: GroupBatch) -> _Captured:
    """Capture a pass without running it."""
    assert groups.complete is not None
    copies = GroupBatch(map_inputs(Tensor.clone, groups.inputs), groups.complete.clone())
    graph = torch.cuda.CUDAGraph()
    # The outer context restores the stream even if the inner context fails to end.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        report = run(total, copies)
    return _Captured(graph, copies, report)
