"""What Prometheus may ask of a sweep on a cluster, by `ray.util.metrics`: who scrapes a node reads it.

Nothing of a sealed sweep, and nothing private-only: of private records neither steps per second nor, where
restarts are charged in advance, their number (`dpgcl_core.release.metrics` says why of both). ε counts
trainings whole as soon as they begin, as the charge does, and tells of no training how far it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from sweeps.service.planning.cost import cost_of
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial

STATES = ("pending", "running", "finished", "failed")
TRIALS, EPSILON_RESERVED, EPSILON_SPENT = "dpgcl_trials", "dpgcl_epsilon_reserved", "dpgcl_epsilon_spent"
RESTARTS, STEPS_PER_SECOND = "dpgcl_restarts", "dpgcl_steps_per_second"
MEANINGS = {
    TRIALS: "trainings of the sweep, by state",
    EPSILON_RESERVED: "epsilon of all planned trainings of the sweep together, at its delta, by PLD",
    EPSILON_SPENT: "epsilon of those that have begun, each as planned, repeated steps not counted, likewise",
    RESTARTS: "times that trainings of the sweep were restarted since its driver started",
    STEPS_PER_SECOND: "training steps per second of all trainings, since the sweep's driver started",
}
# Half of Ray's own interval: a node's agent serves what was set since it last looked, and nothing older.
_EVERY_SECONDS = 5.0
_SHARE_OF_TIME = 0.01
"""Most of the driver's time that accounting for what has begun may take."""


class Gauge(Protocol):
    """One number of Ray's metrics."""

    def set(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Replace the value."""


class SweepMetrics:
    """The numbers of one open sweep.

    Args:
      plan: the sweep's.
      sweep: its name, a label of every number.
      before: trials that had ended before this driver started.
      num_trials: all of the sweep.
      gauge: makes a number of Ray's by name, meaning and names of labels.
      clock: seconds.
    """

    def __init__(
        self,
        plan: SweepPlan,
        sweep: str,
        before: Sequence[Trial],
        num_trials: int,
        gauge: Callable[[str, str, tuple[str, ...]], Gauge],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._sweep, self._before, self._clock = plan, sweep, list(before), clock
        self._num_trials, self._gauge = num_trials, gauge
        self._gauges: dict[str, Gauge] = {}
        self._began, self._looked, self._num_counted = clock(), -float("inf"), -1
        self._next_count = -float("inf")
        mechanisms = [trial.config.mechanism for trial in plan.trials]
        self._tells_restarts = all(each.num_restart_steps is None for each in mechanisms)
        self._tells_time = plan.data.train_is_public
        self._epsilons: dict[str, float] = {}
        if plan.cost is not None and plan.cost.tuned_epsilon is not None:
            self._epsilons[EPSILON_RESERVED] = plan.cost.tuned_epsilon

    def look(
        self,
        begun: Sequence[Trial],
        *,
        num_running: int,
        num_finished: int,
        num_failed: int,
        num_steps: int,
        num_restarts: int,
    ) -> None:
        """Tell how the sweep is, every few seconds.

        Args:
          begun: trials that this driver has started.
          num_running, num_finished, num_failed: of these.
          num_steps: that this driver has seen them count.
          num_restarts: since this driver started.
        """
        now = self._clock()
        if now - self._looked < _EVERY_SECONDS:
            return
        self._looked, finished = now, num_finished + len(self._before)
        pending = max(0, self._num_trials - finished - num_running - num_failed)
        for state, number in zip(STATES, (pending, num_running, finished, num_failed), strict=True):
            self._set(TRIALS, number, state=state)
        if self._tells_restarts:
            self._set(RESTARTS, num_restarts)
        if self._tells_time:
            self._set(STEPS_PER_SECOND, num_steps / max(now - self._began, 1e-9))
        self._account([*self._before, *begun], now)
        for name, epsilon in self._epsilons.items():
            self._set(name, epsilon)

    def _account(self, begun: Sequence[Trial], now: float) -> None:
        """Tell ε of what has begun; seldom, where accounting takes long.

        Each as it is planned: a σ or ε that a search has chosen follows scores, and what trainings at chosen
        ones compose to is no guarantee; at the least noise of the search it is.
        """
        if len(begun) == self._num_counted or now < self._next_count:
            return
        names = {trial.name for trial in begun}
        charged = [trial for trial in self._plan.trials if trial.name in names]
        drawn = None
        if (earlier := self._plan.earlier) is not None:
            charged, drawn = [*charged, *earlier.trials], earlier.drawn
        cost = cost_of(self._plan.release, charged, drawn)
        self._num_counted = len(begun)
        self._next_count = self._clock() + (self._clock() - now) / _SHARE_OF_TIME
        if cost is not None and cost.tuned_epsilon is not None:
            self._epsilons[EPSILON_SPENT] = cost.tuned_epsilon

    def _set(self, name: str, value: float, **labels: str) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._gauge(name, MEANINGS[name], ("sweep", *labels))
        self._gauges[name].set(value, {"sweep": self._sweep, **labels})


def ray_gauge(name: str, meaning: str, labels: tuple[str, ...]) -> Gauge:
    """Return a number that every node's agent of this Ray serves on its `/metrics`."""
    from ray.util import metrics

    of_ray: Any = metrics
    made: Gauge = of_ray.Gauge(name, description=meaning, tag_keys=labels)
    return made
