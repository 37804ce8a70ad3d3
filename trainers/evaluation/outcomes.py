"""Scores that keep each scored record's contribution.

The scored records are a sample of all possible records. So a score is random, however often the training is
repeated. That randomness is visible in the score's outcomes: one number for each record, whose mean is the
score. The outcomes of a share are the hits themselves. The outcomes of a ratio of two means are its influence
function (Hampel, 1974), centred on the ratio; for large n, their variance over n is the ratio's variance. The
same holds for a balanced accuracy, and for an AUC, whose outcomes are the components of DeLong et al. (1988).

Outcomes disclose more about the scored records than their mean does. They leave a training only if the
records are public (`trainers.tasks.task_scores.public_outcomes`). Unless they are requested, a score is a
plain number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata


class Score(float):
    """A score and its outcomes; it is pickled and copied as a plain number.

    Attributes:
      outcomes: float64 `[num_records]`, one for each scored record in order; their mean is the score.
    """

    outcomes: NDArray[np.float64]

    def __new__(cls, value: float, outcomes: NDArray[np.float64]) -> Score:
        score = super().__new__(cls, value)
        score.outcomes = outcomes
        return score

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


def mean_score(outcomes: ArrayLike) -> Score:
    """Return the mean of outcomes `[num_records]`, such as whether each record was predicted correctly.

    >>> score = mean_score([True, False, True, True])
    >>> float(score), score.outcomes.tolist()
    (0.75, [1.0, 0.0, 1.0, 1.0])
    """
    values = np.asarray(outcomes)
    return Score(float(np.mean(values)), values.astype(np.float64))


def ratio_score(numerators: NDArray[Any], denominators: NDArray[Any]) -> Score:
    """Return the sum of numerators over the sum of denominators, both `[num_records]`.

    An example is the share of right captions, where a record is an image with any number of captions. If r is
    the ratio and m the mean denominator, record i has the outcome r + (numerator_i − r · denominator_i) / m.

    >>> score = ratio_score(np.array([1.0, 1.0]), np.array([1.0, 3.0]))
    >>> float(score), score.outcomes.tolist()
    (0.5, [0.75, 0.25])
    """
    ratio = float(numerators.sum() / denominators.sum())
    with np.errstate(invalid="ignore"):  # the network may have diverged
        outcomes = ratio + (numerators - ratio * denominators) / denominators.mean()
    return Score(ratio, outcomes)


def exp_score(score: Score) -> float:
    """Return exp of a score, with outcomes by the delta method, or without outcomes if it is not finite.

    >>> float(exp_score(mean_score([0.0, 0.0]))), exp_score(mean_score([0.0, -np.inf]))
    (1.0, 0.0)
    """
    value = float(np.exp(score))
    return Score(value, value * (1 + score.outcomes - score)) if np.isfinite(score) else value


def needs_balance(labels: NDArray[np.int64]) -> bool:
    """Return whether there are two classes, or the largest class is at least twice as large as the smallest.

    Then an accuracy alone says little.

    >>> [needs_balance(np.array(labels)) for labels in ([0, 1], [0, 0, 1, 2], [0, 0, 0, 1, 1, 2, 2], [5, 5])]
    [True, True, False, False]
    """
    counts = np.unique(labels, return_counts=True)[1]
    return len(counts) == 2 or bool(counts.max() >= 2 * counts.min() and len(counts) > 1)


def balanced_score(hits: NDArray[Any], labels: NDArray[np.int64]) -> Score:
    """Return the balanced accuracy: the mean over K classes of each class's share of correct predictions.

    A record of class c, with n_c of n records, has the outcome n / (K n_c) · (hit − share of c) + the score.

    Args:
      hits: `[n]`, whether each record was predicted correctly.
      labels: `[n]`.

    >>> float(balanced_score(np.array([1, 1, 1, 0]), np.array([0, 0, 0, 1])))
    0.5
    """
    classes, class_of = np.unique(labels, return_inverse=True)
    counts = np.bincount(class_of)
    shares = np.bincount(class_of, weights=hits) / counts
    score = float(shares.mean())
    weights = len(labels) / (len(classes) * counts)
    return Score(score, weights[class_of] * (hits - shares[class_of]) + score)


def auc_score(margins: NDArray[Any], is_positive: NDArray[np.bool_]) -> Score:
    """Return the area under the ROC curve: how often a positive record has a larger margin than a negative.

    Ties count one half. If n_1 of n records are positive, a positive record has the outcome
    n / n_1 · (V − AUC) + AUC, where V is the share of negatives below it. For a negative record, n − n_1
    takes the place of n_1, and V is the share of positives above it (DeLong et al., 1988).

    Args:
      margins: `[n]`, larger for records that are more likely positive.
      is_positive: `[n]`, true for some records and not for all.

    >>> float(auc_score(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True])))
    0.875
    """
    groups = (is_positive, ~is_positive)
    ranks, shares = rankdata(margins), np.empty(len(margins))
    for own, other in (groups, groups[::-1]):
        shares[own] = (ranks[own] - rankdata(margins[own])) / other.sum()
    shares[~is_positive] = 1 - shares[~is_positive]
    score = float(shares[is_positive].mean())
    size = np.where(is_positive, is_positive.sum(), (~is_positive).sum())
    return Score(score, len(margins) / size * (shares - score) + score)
