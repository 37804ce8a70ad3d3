"""Scores that know what each scored record contributed to them.

The records that are scored are a sample of those that there might be. So a score has chance in it, however
often the training is repeated. That chance is seen in the score's outcomes: one number for each record, whose
mean is the score. Of a share they are the hits themselves. Of a ratio of two means they are its influence
function (Hampel, 1974), centred on the ratio, whose variance over n is that of the ratio for large n.

Outcomes tell more of the scored records than their mean. They leave a training only where these are public
(`trainers.tasks.scoring.public_outcomes`), and where nobody asks for them a score is a plain number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Score(float):
    """A score and its outcomes; it is pickled and copied as a plain number.

    Attributes:
      outcomes: float64 `[num_records]`, one of each scored record in their order, whose mean is the score.
    """

    outcomes: NDArray[np.float64]

    def __new__(cls, value: float, outcomes: NDArray[np.float64]) -> Score:
        score = super().__new__(cls, value)
        score.outcomes = outcomes
        return score

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[float], tuple[float]]:
        return self.__reduce__()


def mean_score(outcomes: ArrayLike) -> Score:
    """Return the mean of outcomes `[num_records]`, such as whether each record was answered rightly.

    >>> score = mean_score([True, False, True, True])
    >>> float(score), score.outcomes.tolist()
    (0.75, [1.0, 0.0, 1.0, 1.0])
    """
    values = np.asarray(outcomes)
    return Score(float(np.mean(values)), values.astype(np.float64))


def ratio_score(numerators: NDArray[Any], denominators: NDArray[Any]) -> Score:
    """Return the sum of numerators over that of denominators, both `[num_records]`.

    Such is the share of captions that are right, where a record is an image with any number of them. With r
    the ratio and m the mean denominator, record i has the outcome r + (numerator_i − r · denominator_i) / m.

    >>> score = ratio_score(np.array([1.0, 1.0]), np.array([1.0, 3.0]))
    >>> float(score), score.outcomes.tolist()
    (0.5, [0.75, 0.25])
    """
    ratio = float(numerators.sum() / denominators.sum())
    with np.errstate(invalid="ignore"):  # a network that diverged
        outcomes = ratio + (numerators - ratio * denominators) / denominators.mean()
    return Score(ratio, outcomes)


def exp_score(score: Score) -> float:
    """Return exp of a score, with outcomes by the delta method; without where the score is not finite.

    >>> float(exp_score(mean_score([0.0, 0.0]))), exp_score(mean_score([0.0, -np.inf]))
    (1.0, 0.0)
    """
    value = float(np.exp(score))
    return Score(value, value * (1 + score.outcomes - score)) if np.isfinite(score) else value
