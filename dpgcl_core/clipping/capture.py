"""Passes that a GPU repeats by itself: one is captured as a CUDA graph, and replayed for every microbatch.

Python takes longer to ask for the many small kernels of a pass than a GPU to run them. All passes of a
training have one shape (`dpgcl_core.clipping.clipper`), so the kernels of one serve for all. A replay runs
what the capture ran, on other inputs: norms, factors and masks are computed anew of what is summed, so every
bound and proof of the clipper holds for it, whatever the inputs are.

What Python decides in a pass is decided once, at the capture. So passes are captured only where network and
objective are the same function at every step: no code of others, no second network, no embeddings of public
records, no basis. Whoever hands over `CapturedPasses` vouches for that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpgcl_core.clipping.types import GroupInputs, GroupReport

logger = logging.getLogger(__name__)

_MOST_CAPTURED = 4
"""Shapes whose kernels are kept: each holds the memory of a pass."""

Pass = Callable[[Tensor, GroupInputs, Tensor], GroupReport]
"""Adds the clipped sum of inputs to a total, where a mask of groups is set."""

_Key = tuple[object, ...]


class CapturedPasses:
    """The captured passes of one objective of one network, whose weights stay where they are in memory.

    The first pass of a shape runs as it is, the second is captured. Where capturing fails, passes run as they
    are from then on.
    """

    def __init__(self) -> None:
        self._seen: set[_Key] = set()
        self._captured: dict[_Key, _Captured] = {}
        self._fails = False

    def take(self, run: Pass, total: Tensor, inputs: GroupInputs, complete: Tensor | None) -> GroupReport:
        """Take a pass: `run(total, inputs, complete)`, by a replay if there is one.

        Args:
          run: as `Pass`; the same function in every call.
          total: float64 `[num_trainable]`, on a GPU.
          inputs: on the same one.
          complete: bool `[groups]`; None: all.
        """
        leaves = (inputs,) if isinstance(inputs, Tensor) else inputs
        if complete is None:
            complete = torch.ones(len(leaves[0]), dtype=torch.bool, device=total.device)
        key: _Key = (total.data_ptr(), *((each.shape, each.dtype) for each in leaves))
        if key not in self._captured and not self._is_captured(key, run, total, inputs, complete):
            return run(total, inputs, complete)
        return self._captured[key].replayed(leaves, complete)

    def _is_captured(
        self, key: _Key, run: Pass, total: Tensor, inputs: GroupInputs, complete: Tensor
    ) -> bool:
        is_first = key not in self._seen
        self._seen.add(key)
        if is_first or self._fails or len(self._captured) == _MOST_CAPTURED:
            return False
        try:
            self._captured[key] = _captured(run, total, inputs, complete)
        except Exception as error:  # whatever cannot be captured
            logger.info("passes are not captured: %s: %s", type(error).__name__, error)
            self._fails = True
            return False
        return True


@dataclass(frozen=True)
class _Captured:
    """The kernels of a pass, what they read and what they write besides the sum."""

    graph: torch.cuda.CUDAGraph
    leaves: tuple[Tensor, ...]
    complete: Tensor
    report: GroupReport

    def replayed(self, leaves: tuple[Tensor, ...], complete: Tensor) -> GroupReport:
        for mine, given in zip(self.leaves, leaves, strict=True):
            mine.copy_(given)
        self.complete.copy_(complete)
        self.graph.replay()
        return copied_report(self.report, complete)


def copied_report(report: GroupReport, complete: Tensor) -> GroupReport:
    """Return a report whose numbers the next pass does not overwrite."""
    return replace(
        report,
        norms=report.norms.clone(),
        losses=report.losses.clone(),
        non_finite=report.non_finite.clone(),
        part_ratios=None if report.part_ratios is None else report.part_ratios.clone(),
        complete=complete,
    )


def _captured(run: Pass, total: Tensor, inputs: GroupInputs, complete: Tensor) -> _Captured:
    """Capture a pass, which is not run by that."""
    leaves = tuple(each.clone() for each in ((inputs,) if isinstance(inputs, Tensor) else inputs))
    mask, graph = complete.clone(), torch.cuda.CUDAGraph()
    # Other threads make views and draw noise meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        report = run(total, leaves[0] if isinstance(inputs, Tensor) else leaves, mask)
    return _Captured(graph, leaves, mask, report)
