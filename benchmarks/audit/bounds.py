"""Statistics of the audit: lower bounds on ε, with a stated confidence, from scored runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

Values = NDArray[np.float64]
_NUM_THRESHOLDS = 400


def clopper_pearson_upper(count: Any, total: int, tail: float) -> Any:
    """Return the one-sided upper Clopper-Pearson bound on a probability, at error probability `tail`.

    If this bound were the true probability, at most `count` of `total` would occur with probability `tail`.

    >>> round(float(clopper_pearson_upper(0, 100, 0.05)), 4), float(clopper_pearson_upper(9, 9, 0.05))
    (0.0295, 1.0)
    """
    count = np.asarray(count)
    upper = stats.beta.ppf(1 - tail, count + 1, np.maximum(total - count, 1))
    return np.where(count >= total, 1.0, upper)


def epsilon_lower_bound(fpr: Any, fnr: Any, delta: float) -> Any:
    """Return the smallest ε ≥ 0 at `delta` under which a test can have error rates (fpr, fnr), elementwise.

    For an event E, P'(E) ≤ e^ε P(E) + δ and likewise with P and P' exchanged (Kairouz et al. 2015,
    theorem 2.1); E is the test's answer "the canary was in", or its complement.

    >>> round(float(epsilon_lower_bound(0.1, 0.5, 0.0)), 4), float(epsilon_lower_bound(0.5, 0.5, 0.01))
    (1.6094, 0.0)
    """
    fpr, fnr = np.asarray(fpr, dtype=float), np.asarray(fnr, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        there = np.log(np.maximum(1 - fnr - delta, 0) / fpr)
        back = np.log(np.maximum(1 - fpr - delta, 0) / fnr)
    return np.maximum(0.0, np.fmax(there, back))


def epsilon_if_gaussian(fpr: float, fnr: float, delta: float) -> float:
    """Return ε at δ of the Gaussian mechanism with (fpr, fnr) on its trade-off curve (Dong et al. 2022)."""
    mu = float(stats.norm.isf(fpr) + stats.norm.isf(fnr))
    if mu <= 0 or not math.isfinite(mu):
        return 0.0

    def excess(epsilon: float) -> float:
        upper = stats.norm.cdf(mu / 2 - epsilon / mu)
        return float(upper - math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)) - delta)

    return 0.0 if excess(0.0) <= 0 else float(optimize.brentq(excess, 0.0, mu * (mu + 40)))


def best_threshold(
    negatives: Values, positives: Values, delta: float, confidence: float
) -> tuple[float, float]:
    """Return the threshold with the largest lower bound on these runs, and that bound."""
    grid = np.linspace(0, 1, _NUM_THRESHOLDS)
    thresholds = np.unique(np.concatenate([np.quantile(negatives, grid), np.quantile(positives, grid)]))
    tail = (1 - confidence) / 2
    false_positives = len(negatives) - np.searchsorted(np.sort(negatives), thresholds, side="right")
    false_negatives = np.searchsorted(np.sort(positives), thresholds, side="right")
    bounds = epsilon_lower_bound(
        clopper_pearson_upper(false_positives, len(negatives), tail),
        clopper_pearson_upper(false_negatives, len(positives), tail),
        delta,
    )
    best = int(np.argmax(bounds))
    return float(thresholds[best]), float(bounds[best])
