"""The reasons why a training has no result, as texts that may be printed and stored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from trainers.failures import NO_ROOM

_SMALLER = (
    "a smaller microbatch takes less memory and gives the same results: use --resume with a lower "
    "--max-views-per-microbatch (for example 32), or with a lower --max-concurrent-trials"
)
# Only messages of Ray's own kills; for every other death its message lists memory as a possible cause.
_RAY_FOUND_NO_MEMORY = re.compile(r"running low on memory|OutOfMemoryError")
_KILLED_FOR_MEMORY = "killed for lack of memory"
_NO_MEMORY = re.compile(
    rf"\b(?:OutOfMemoryError|MemoryError)\b|can't allocate memory|CUDA out of memory|{_KILLED_FOR_MEMORY}"
)


class FailureKind(Enum):
    """The kind of a training's failure, and its consequence. All draws of the training stay charged.

    Attributes:
      RAISED: it raised an exception, and would raise it again, so it is not restarted.
      LOST: its processes died more often than `--max-restarts` allows; `--resume` tries again.
      DISK_FULL: no space was left for its files, so the whole sweep ends, and `--resume` continues it.
      INTERRUPTED: a trial of a sealed sweep had begun when the driver ended; it is never repeated.
    """

    RAISED = auto()
    LOST = auto()
    DISK_FULL = auto()
    INTERRUPTED = auto()


@dataclass(frozen=True, kw_only=True)
class TrialFailure:
    """The reason why a training has no result, in text that may be disclosed (`trainers.failures`).

    Attributes:
      kind: the kind of failure.
      reason: the worker's message if it raised; the reason why its last process died if it was lost.
    """

    kind: FailureKind
    reason: str

    @classmethod
    def of_worker(cls, text: str) -> TrialFailure:
        """Return the failure for a worker's message, which is from `trainers.failures.describe_error`."""
        return cls(kind=FailureKind.DISK_FULL if text == NO_ROOM else FailureKind.RAISED, reason=text)

    def __str__(self) -> str:
        """Return the failure's text for the operator, with a remedy if memory was short.

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
"""The failure of a training that ended without a result and without a message."""
INTERRUPTED = TrialFailure(
    kind=FailureKind.INTERRUPTED, reason="interrupted; a repetition would not be independent"
)


def why_lost(error: object) -> str:
    """Return the reason why a process was lost, from Ray's message on the last process.

    >>> why_lost("Task was killed due to the node running low on memory."), why_lost("maybe the OOM killer")
    ('killed for lack of memory', 'worker lost')
    """
    return _KILLED_FOR_MEMORY if _RAY_FOUND_NO_MEMORY.search(str(error)) else "worker lost"
