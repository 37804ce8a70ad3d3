"""Why a training has no result: one type, from the worker's words to what is printed and kept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from trainers.failures import NO_ROOM

_SMALLER = (
    "a smaller microbatch takes less memory and gives the same results: --resume with "
    "--max-views-per-microbatch, for instance 32, or with fewer --max-concurrent-trials"
)
# Ray's words for its own kill; in those for any death it names memory among other causes.
_RAY_FOUND_NO_MEMORY = re.compile(r"running low on memory|OutOfMemoryError")
_KILLED_FOR_MEMORY = "killed for want of memory"
_NO_MEMORY = re.compile(
    rf"\b(?:OutOfMemoryError|MemoryError)\b|can't allocate memory|CUDA out of memory|{_KILLED_FOR_MEMORY}"
)


class FailureKind(Enum):
    """How a training failed, and what becomes of it. Whatever it drew stays charged.

    Attributes:
      RAISED: it raised an exception, and would again: it is not repeated.
      LOST: its processes died more often than `--max-restarts` allows; `--resume` tries again.
      DISK_FULL: no space was left for what it must save: the whole sweep ends, and `--resume` goes on.
      INTERRUPTED: a trial of a sealed sweep had begun when the driver ended; it is never repeated.
    """

    RAISED = auto()
    LOST = auto()
    DISK_FULL = auto()
    INTERRUPTED = auto()


@dataclass(frozen=True, kw_only=True)
class TrialFailure:
    """Why a training has no result, in words that may be told of it (`trainers.failures`).

    Attributes:
      kind: how it failed.
      reason: what its worker told, where it raised; why its last process died, where it was lost.
    """

    kind: FailureKind
    reason: str

    @classmethod
    def of_worker(cls, text: str) -> TrialFailure:
        """Return the failure that a worker told, by `trainers.failures.describe_error`."""
        return cls(kind=FailureKind.DISK_FULL if text == NO_ROOM else FailureKind.RAISED, reason=text)

    def __str__(self) -> str:
        """Return it for the operator, with what helps where memory was short.

        >>> str(TrialFailure.of_worker("MemoryError"))[:47]
        'MemoryError; a smaller microbatch takes less me'
        """
        parts = [self.reason]
        if self.kind is FailureKind.LOST:
            parts.append("its processes died, or could not be started, more often than --max-restarts allows")
        if _NO_MEMORY.search(self.reason):
            parts.append(_SMALLER)
        return "; ".join(parts)


UNKNOWN = TrialFailure(kind=FailureKind.RAISED, reason="unknown error")
"""Of a training that ended without a result and without words."""
INTERRUPTED = TrialFailure(
    kind=FailureKind.INTERRUPTED, reason="interrupted; a repetition would not be independent"
)


def why_lost(error: object) -> str:
    """Return why a process was lost, by what Ray says of its last one.

    >>> why_lost("Task was killed due to the node running low on memory."), why_lost("maybe the OOM killer")
    ('killed for want of memory', 'worker lost')
    """
    return _KILLED_FOR_MEMORY if _RAY_FOUND_NO_MEMORY.search(str(error)) else "worker lost"
