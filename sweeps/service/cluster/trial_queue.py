"""The queue of a sweep's trials, handed out one by one as the cluster has room for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sweeps.service.cluster.capacity import Capacity
from sweeps.service.planning.trials import Trial


class TrialSource(Protocol):
    """Hands out a sweep's trials one at a time; a search decides on each by earlier results."""

    def next_trial(self) -> Trial:
        """Return the next trial, whose settings are stored already."""

    def note_end(self, name: str) -> None:
        """Note that a trial has ended; if it has a result, the result is stored already."""


class ListedTrials:
    """A source of trials that are all planned in advance, handed out in their order."""

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
      capacity: decides how many trials Ray may have at once.
      requests_nodes: whether to request nodes for the remaining trials. Not for a sealed sweep, whose number
        of trials is secret: all users of a cluster see its requests. It uses nodes that join anyway.

    Attributes:
      is_closed: whether no more trials are handed out.
    """

    def __init__(
        self, source: TrialSource, number: int, capacity: Capacity, *, requests_nodes: bool = True
    ) -> None:
        self._source, self._capacity, self._requests_nodes = source, capacity, requests_nodes
        self._num_left = number
        self._handed_out: dict[str, Trial] = {}
        self.is_closed = False

    @property
    def running(self) -> dict[str, Trial]:
        """The trials that Ray has and that have not ended, by name."""
        return {trial.name: trial for trial in self._handed_out.values()}

    def close(self) -> None:
        """Hand out no more trials, because the sweep's time is over."""
        self.is_closed = True

    def next_trial(self, trial_id: str) -> Trial | None:
        """Return the next trial; None if the cluster has no room for another trial.

        Args:
          trial_id: the id under which Tune will report the trial's end.
        """
        if len(self._handed_out) >= self._capacity.trials_at_once():
            return None
        trial = self._source.next_trial()
        self._handed_out[trial_id], self._num_left = trial, self._num_left - 1
        return trial

    def note_end(self, trial_id: str) -> None:
        """Note that the trial of this id has ended, and make room for the next trial."""
        self._capacity.let_go()
        self._source.note_end(self._handed_out.pop(trial_id).name)

    def update_requests(self, num_begun: int) -> None:
        """Update the requests for resources by the number of remaining trials.

        Args:
          num_begun: how many of the trials that Ray has are training.
        """
        num_left = self._num_left if self._requests_nodes else 0
        self._capacity.follow(num_begun, len(self._handed_out) - num_begun, num_left)
