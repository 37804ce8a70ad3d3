"""How busy the driver's machine was: MLflow's system metrics of a sweep, where the data are public.

What a machine does while records pass through it tells of them, so private data and sealed sweeps have none.
Samples stay in memory until the sweep ends, and are then written with its last metrics: a server that is away
or slow delays nothing. Sweeps of days are sampled ever more seldom.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

Sample = tuple[int, dict[str, float]]
"""Milliseconds since the epoch, and values by the names that MLflow's pages know."""
MOST_SAMPLES = 400
_SECONDS = 5.0
_MEGABYTE = 1e6


def sample() -> dict[str, float]:
    """Return how much of the machine is taken now, since the call before."""
    import psutil

    memory = psutil.virtual_memory()
    return {
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/system_memory_usage_megabytes": round(memory.used / _MEGABYTE, 1),
        "system/system_memory_usage_percentage": memory.percent,
    }


class MachineWatch:
    """Samples the machine in a thread of its own, while it is entered.

    Args:
      seconds: from one sample to the next, twice as long whenever `most` are there.
      most: samples that are kept.
    """

    def __init__(self, seconds: float = _SECONDS, most: int = MOST_SAMPLES) -> None:
        self._seconds, self._most = seconds, most
        self._samples: list[Sample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="machine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    @property
    def samples(self) -> list[Sample]:
        """What was sampled so far."""
        return list(self._samples)

    def _watch(self) -> None:
        while not self._over.wait(self._seconds):
            self.add(int(time.time() * 1000), sample())

    def add(self, time_ms: int, values: dict[str, float]) -> None:
        """Keep a sample; every second one is dropped where there are too many."""
        self._samples.append((time_ms, values))
        if len(self._samples) > self._most:
            self._samples = self._samples[::2]
            self._seconds *= 2
