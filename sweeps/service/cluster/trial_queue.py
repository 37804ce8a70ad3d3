"""The queue of a sweep's trials, handed out one by one as the cluster has room for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sweeps.service.cluster.capacity import Capacity
from sweeps.service.planning.trials import Trial


class TrialSource(Protocol):
    """Decides on the next trial, one trial at a time."""

    def next_trial(self) -> Trial:
        """Return the next trial, after it has been stored."""

    def note_end(self, name: str) -> None:
        """Record that a trial ended; its result was handed over before, or it has none."""


class ListedTrials:
    """A source of trials that are all known in advance."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials = iter(trials)

    def next_trial(self) -> Trial:
        return next(self._trials)

    def note_end(self, name: str) -> None:
        """No-op: no trial depends on another trial's result."""


class TrialQueue:
    """The trials of one sweep: the remaining trials, and the trials that have been handed to Ray.

    Args:
      source: the source of the trials.
      number: the number of trials.
      capacity: the number of trials that may be with Ray at once.
      tells_left: whether Ray, whose requests all users of a cluster see, may get the number of remaining
        trials. Not for a sealed sweep, whose number is secret: it uses nodes that join, but requests none.
    """

    def __init__(
        self, source: TrialSource, number: int, capacity: Capacity, *, tells_left: bool = True
    ) -> None:
        self._source, self._capacity, self._tells_left = source, capacity, tells_left
        self._num_left = number
        self._live: dict[str, Trial] = {}
        self._is_closed = False

    @property
    def running(self) -> dict[str, Trial]:
        """The trials that are with Ray, by name."""
        return {trial.name: trial for trial in self._live.values()}

    @property
    def is_closed(self) -> bool:
        """Whether no more trials are handed out."""
        return self._is_closed

    def close(self) -> None:
        """Hand out no more trials: the sweep's time is over."""
        self._is_closed = True

    def next_trial(self, trial_id: str) -> Trial | None:
        """Return the next trial; None if the cluster has no room for another trial."""
        if len(self._live) >= self._capacity.trials_at_once():
            return None
        trial = self._source.next_trial()
        self._live[trial_id], self._num_left = trial, self._num_left - 1
        return trial

    def note_end(self, trial_id: str) -> None:
        """Make room for the next trial."""
        self._capacity.let_go()
        self._source.note_end(self._live.pop(trial_id).name)

    def look(self, num_begun: int) -> None:
        """Update the capacity's requests with the number of remaining trials.

        Args:
          num_begun: the number of trials handed to Ray that are running.
        """
        num_left = self._num_left if self._tells_left else 0
        self._capacity.follow(num_begun, len(self._live) - num_begun, num_left)
