"""The time of a sealed sweep's publication: a moment that is fixed before its number of trials is drawn.

The duration of a sealed sweep would reveal its number of trials. So the moment is public and fixed first: it
is `interval_seconds` after the start, and the law of the number of trials K is cut off at `max_trials`, the
number that fits before the moment with a margin. Given K ≤ `max_trials` the sweep costs no more than without
the cap (`dpgcl_core.accounting.tuning.bounds`). Charge and statement use the law that K is drawn from.

If the trials still take longer, everything waits for a whole number of further intervals. Of an overrun, only
this number is visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from dpgcl_core.accounting.tuning.laws import MAX_TRUNCATED_TRIALS
from dpgcl_core.errors import ConfigError, StorageError
from sweeps.service.options.release_options import ReleaseOptions, trial_law

_MARGIN = 2.0
"""The factor by which a trial may exceed its estimate, on another machine or next to other trials."""
_SECONDS_TO_START = 30.0
_SECONDS_PER_TRIAL = 10.0
"""The time to start a trial's process, probe its network, and score on small data."""
_SHARE_THAT_FITS = 0.95
"""The share of the uncapped law's draws that must fit, if the user sets no moment."""


@dataclass(frozen=True, kw_only=True)
class Publication:
    """The time of a sealed sweep's publication, and the resulting cap on its trials.

    Attributes:
      interval_seconds: time from the sweep's start to the moment, and from one possible moment to the next.
      max_trials: M, at which the law of the number of trials is cut off.
    """

    interval_seconds: float
    max_trials: int

    @classmethod
    def planned(cls, release: ReleaseOptions, trial_seconds: float, at_once: int) -> Self:
        """Plan the publication after the time in the options, by default late enough for most trial numbers.

        Args:
          release: the law of the number of trials, and the time if the user sets one.
          trial_seconds: duration of the longest trial, estimated without private records.
          at_once: number of trials that run in parallel.

        Raises:
          ConfigError: not even one trial fits.
        """
        padded_seconds = _MARGIN * trial_seconds + _SECONDS_PER_TRIAL
        interval_seconds = release.publish_after_seconds
        if interval_seconds is None:
            max_trials = most_trials(release)
            seconds = _SECONDS_TO_START + math.ceil(max_trials / at_once) * padded_seconds
            return cls(interval_seconds=math.ceil(seconds), max_trials=max_trials)
        num_fitting = int((interval_seconds - _SECONDS_TO_START) / padded_seconds) * at_once
        if num_fitting < 1:
            raise ConfigError(
                "--publish-after must leave time for a trial, about "
                f"{_SECONDS_TO_START + padded_seconds:.0f} seconds with a margin; got {interval_seconds:g}"
            )
        return cls(interval_seconds=interval_seconds, max_trials=min(num_fitting, MAX_TRUNCATED_TRIALS))

    @classmethod
    def read(cls, values: Any) -> Self:
        """Return the publication from the values in a sweep's plan.

        Raises:
          StorageError: the values are missing or damaged.
        """
        try:
            return cls(
                interval_seconds=float(values["interval_seconds"]), max_trials=int(values["max_trials"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(
                "this sweep's plan has no valid time of publication: its folder is damaged, or was written "
                "by another version. Choose another --name."
            ) from error

    def note(self) -> str:
        """Return the sentence for the privacy statement."""
        return (
            f"Published {self.interval_seconds:g} seconds after its start, or a multiple of that later, with "
            f"at most {self.max_trials} trials; both were fixed before the number of trials was drawn."
        )

    def text(self, start_time: float | None = None) -> str:
        """Return the line printed before the first trial: the moment and the cap on trials, both public.

        Args:
          start_time: start of the sweep, in seconds since the epoch; None in a dry run.

        >>> Publication(interval_seconds=70, max_trials=6).text()
        'published 70 s after the start, later by multiples of 70 s if trials overrun; at most 6 trials'
        """
        seconds = f"{self.interval_seconds:g} s"
        at = f"{datetime.fromtimestamp(start_time + self.interval_seconds):%H:%M:%S}, " if start_time else ""
        overrun = f"later by multiples of {seconds} if trials overrun"
        trials = "1 trial" if self.max_trials == 1 else f"{self.max_trials} trials"
        return f"published {f'at {at}' if at else ''}{seconds} after the start, {overrun}; at most {trials}"

    def moment(self, start_time: float, now: float) -> float:
        """Return the first possible moment at or after `now`, in seconds, of a sweep begun at `start_time`.

        >>> Publication(interval_seconds=60, max_trials=9).moment(1000, 1059), 1000 + 2 * 60
        (1060, 1120)
        """
        num_intervals = max(1, math.ceil((now - start_time) / self.interval_seconds))
        return start_time + num_intervals * self.interval_seconds


def most_trials(release: ReleaseOptions) -> int:
    """Return the cap on trials that 95 % of the uncapped law's draws do not exceed.

    >>> most_trials(ReleaseOptions(mode="sealed", mean_trials=10))
    29
    """
    law = trial_law(release)
    if law.mean >= MAX_TRUNCATED_TRIALS:
        return MAX_TRUNCATED_TRIALS
    return min(law.quantile(_SHARE_THAT_FITS), MAX_TRUNCATED_TRIALS)
