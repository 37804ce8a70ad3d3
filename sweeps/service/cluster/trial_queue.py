"""The trials of a sweep, one after the other, as the cluster has room for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sweeps.service.cluster.capacity import Capacity
from sweeps.service.planning.trials import Trial


class TrialSource(Protocol):
    """Decide trial after trial what is trained next."""

    def next_trial(self) -> Trial:
        """Return the next trial, which has been written down by then."""

    def note_end(self, name: str) -> None:
        """Note that a trial ended; its result was handed over before, or there is none."""


class ListedTrials:
    """A source of trials that are all known."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials = iter(trials)

    def next_trial(self) -> Trial:
        return next(self._trials)

    def note_end(self, name: str) -> None:
        """No-op: no trial depends on another one's result."""


class TrialQueue:
    """The trials of one sweep: those that are left, and those that have been handed to Ray.

    Args:
      source: of the trials.
      number: of them.
      capacity: how many may be with Ray at once.
      tells_left: whether Ray, whose requests all users of a cluster see, may know how many are left; not of a
        sealed sweep, whose number of trials is secret: it uses nodes that join, and asks for none.
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
        """Return the next trial; None where the cluster has no room for one more."""
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
        """Let the cluster follow what is left.

        Args:
          num_begun: trials that run, of those that have been handed to Ray.
        """
        num_left = self._num_left if self._tells_left else 0
        self._capacity.follow(num_begun, len(self._live) - num_begun, num_left)
