"""The next settings of a search, by Optuna's ask-and-tell interface."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.samplers import RandomSampler
from optuna.trial import FrozenTrial, TrialState

from sweeps.service.planning.samplers import SAMPLERS
from sweeps.service.planning.search_plan import Observation
from sweeps.service.planning.space import EPSILON, Axis, SearchOptions, Space
from sweeps.service.running.study import direction


class Proposals:
    """Proposes the settings of a search's trials, by an Optuna study in memory.

    The proposal for trial k depends on the public seed, k, and the scores recorded by then. So the random
    sampler always proposes the same settings, and TPE does so if trials run one at a time. `SearchStudy` is
    the stored study, which no proposal depends on.

    Args:
      space: the space of the settings.
      options: sampler, seed, objectives and number of trials.
      observations: settings and metrics of earlier sweeps' trials, which have every objective.
    """

    def __init__(
        self, space: Space, options: SearchOptions, observations: Sequence[Observation] = ()
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space, self._options = space, options
        self._distributions = {axis.option: _distribution(axis) for axis in space.axes}
        directions = [direction(name) for name in options.objectives]
        self._study = optuna.create_study(
            directions=directions, sampler=RandomSampler(seed=options.service.seed)
        )
        self._num_observations = 0
        for number, (values, metrics) in enumerate(observations, start=1):
            self.repeat(values)
            self.record_scores(number, metrics)
        self._num_observations = len(observations)

    @property
    def num_suggestions(self) -> int:
        """The number of trials that were proposed so far."""
        return len(self._study.get_trials(deepcopy=False)) - self._num_observations

    def suggest(self) -> dict[str, Any]:
        """Propose the next trial: return its values by option."""
        entropy = self._options.service.seed, self._num_observations + self.num_suggestions
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        self._study.sampler = SAMPLERS[self._options.sampler](self._options.num_trials, seed)
        return self._values(self._study.ask(self._distributions).params)

    def repeat(self, values: Mapping[str, Any]) -> None:
        """Propose these values, which an earlier process proposed for the same trial.

        Raises:
          ValueError, KeyError: the values are not in this space.
        """
        proposed = {axis.option: axis.proposal(values[axis.option]) for axis in self._space.axes}
        self._study.enqueue_trial(proposed)
        self.suggest()

    def record_scores(self, number: int, metrics: Mapping[str, float] | None) -> None:
        """Record the scores of trial `number`, counted from 1.

        The trial counts as failed if an objective is missing or not finite.
        """
        scores = [(metrics or {}).get(name, math.nan) for name in self._options.objectives]
        if all(map(math.isfinite, scores)):
            self._study.tell(self._num_observations + number - 1, scores)
        else:
            self._study.tell(self._num_observations + number - 1, state=TrialState.FAIL)

    def best(self) -> list[tuple[list[int], dict[str, float]]]:
        """Return the search's own settings that none of them beats in all objectives, sorted by ε.

        Each has the numbers of its trials, and the objectives' means over these trials.
        """
        settings: dict[str, list[FrozenTrial]] = defaultdict(list)
        for trial in self._study.get_trials(deepcopy=False)[self._num_observations :]:
            if trial.state is TrialState.COMPLETE:
                settings[str(self._values(trial.params))].append(trial)
        pooled = optuna.create_study(directions=self._study.directions)
        for trials in settings.values():
            means = np.mean([trial.values for trial in trials], axis=0).tolist()
            numbers = [trial.number + 1 - self._num_observations for trial in trials]
            pooled.add_trial(optuna.trial.create_trial(values=means, user_attrs={"numbers": numbers}))
        front = [
            (trial.user_attrs["numbers"], dict(zip(self._options.objectives, trial.values, strict=True)))
            for trial in pooled.best_trials
        ]
        return sorted(front, key=lambda member: member[1].get(EPSILON, 0.0))

    def _values(self, proposed: Mapping[str, Any]) -> dict[str, Any]:
        return {axis.option: axis.value(proposed[axis.option]) for axis in self._space.axes}


def _distribution(axis: Axis) -> Any:
    """Return an axis's distribution: over the indices of a list, whose order matters, or over a log scale."""
    if axis.choices:
        return optuna.distributions.IntDistribution(0, len(axis.choices) - 1)
    return optuna.distributions.FloatDistribution(axis.low, axis.high, log=True)
