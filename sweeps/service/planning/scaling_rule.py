"""The linear scaling rule: the learning rate for one ε, from the best rates at smaller ε.

Panda, Tang, Sehwag, Mahloujifar and Mittal (2024, "A New Linear Scaling Rule for Private Adaptive
Hyperparameter Optimization") find that the best product of learning rate and steps rises linearly with ε.
They fit a line to the best products at small ε and extrapolate it. Here the number of steps is fixed before
the first training, so the line is one of learning rates, and the result is the nearest candidate rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpgcl_core.errors import ConfigError
from sweeps.service.planning.trials import Point

_RATE = "learning_rate"
Scores = Mapping[tuple[str, float], float]
"""Scores by label of the candidate and ε; nan for a training without a score."""


@dataclass(frozen=True, kw_only=True)
class ScaledChoice:
    """The choice of the scaling rule.

    Attributes:
      point: the candidate whose learning rate is nearest to the line's.
      rate: the line's learning rate at the target ε.
      best_rates: the best learning rate at each small ε.
    """

    point: Point
    rate: float
    best_rates: Mapping[float, float]

    @property
    def holds(self) -> bool:
        """Whether the best rates do not fall with ε, as the rule assumes."""
        rates = [rate for _, rate in sorted(self.best_rates.items())]
        return rates == sorted(rates)


def scale_rate(candidates: Sequence[Point], scores: Scores, target_epsilon: float) -> ScaledChoice:
    """Return the candidate for a target ε by the scores of all candidates at smaller ε.

    Candidates that differ only in their learning rate are one setting. The setting with the highest mean of
    its best scores is chosen, and a line is fitted through its best rates.

    Args:
      candidates: points that set a learning rate.
      scores: the scores at two or more ε.
      target_epsilon: ε of the final training.

    Raises:
      ConfigError: no candidate has a score at one of the ε.

    >>> points = [Point(label=str(rate), changes={"learning_rate": rate}) for rate in (1, 2, 3, 4)]
    >>> scores = {(p.label, e): -abs(p.changes["learning_rate"] - 10 * e) for p in points for e in (0.1, 0.2)}
    >>> choice = scale_rate(points, scores, 0.38)
    >>> choice.point.label, round(choice.rate, 6), choice.holds
    ('4', 3.8, True)
    """
    epsilons = sorted({epsilon for _, epsilon in scores})

    def score(point: Point, epsilon: float) -> float:
        value = scores.get((point.label, epsilon), math.nan)
        return value if math.isfinite(value) else -math.inf

    for epsilon in epsilons:
        if all(score(point, epsilon) == -math.inf for point in candidates):
            raise ConfigError(f"the scaling rule needs scores at every ε; got none at {epsilon:g}")

    def best(points: Sequence[Point], epsilon: float) -> Point:
        return max(points, key=lambda point: score(point, epsilon))  # the first among ties

    settings: dict[str, list[Point]] = {}
    for point in candidates:
        settings.setdefault(_other_changes(point), []).append(point)
    setting = max(
        settings.values(),
        key=lambda points: sum(score(best(points, epsilon), epsilon) for epsilon in epsilons),
    )
    best_rates = {epsilon: float(best(setting, epsilon).changes[_RATE]) for epsilon in epsilons}
    slope, intercept = np.polyfit(epsilons, list(best_rates.values()), 1)
    rate = float(slope * target_epsilon + intercept)
    reachable = max(rate, min(point.changes[_RATE] for point in setting))  # a line may fall below zero
    nearest = min(setting, key=lambda point: abs(math.log(point.changes[_RATE] / reachable)))
    return ScaledChoice(point=nearest, rate=rate, best_rates=best_rates)


def agrees_with(choice: ScaledChoice, candidates: Sequence[Point], best: Point) -> bool:
    """Return whether the rule's rate is that of the best candidate or next to it among all rates."""
    rates = sorted({float(point.changes[_RATE]) for point in candidates})
    return abs(rates.index(choice.point.changes[_RATE]) - rates.index(best.changes[_RATE])) <= 1


def num_rates(candidates: Sequence[Point]) -> int:
    """Return the smallest number of learning rates of one setting."""
    settings: dict[str, set[float]] = {}
    for point in candidates:
        settings.setdefault(_other_changes(point), set()).add(point.changes[_RATE])
    return min(map(len, settings.values()))


def _other_changes(point: Point) -> str:
    changes: dict[str, Any] = {name: value for name, value in point.changes.items() if name != _RATE}
    return str(sorted(changes.items()))
