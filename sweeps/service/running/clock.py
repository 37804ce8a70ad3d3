"""The clock that times a sealed sweep's publication; tests provide another clock."""

from __future__ import annotations

import time

_LONGEST_NAP_SECONDS = 60.0


class SystemClock:
    """The machine's own clock, which continues while no process runs: a resumed sweep keeps its moment."""

    def now(self) -> float:
        """Return the seconds since the epoch."""
        return time.time()

    def sleep_until(self, moment: float) -> None:
        """Return when `now` has reached `moment`, even if the clock is set in the meantime."""
        while (remaining_seconds := moment - self.now()) > 0:
            time.sleep(min(remaining_seconds, _LONGEST_NAP_SECONDS))
