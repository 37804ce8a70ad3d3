"""Exact laws of the best of K trials for mechanisms on finitely many outcomes: slow, obvious, independent.

Outcomes are in score order, the last one is best. Nothing here uses the code under test.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import norm

# ---- one trial: (probabilities with the record, without it) -------------------------------------------


def subsampled_gaussian(q: float, sigma: float, num_bins: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """One step of the subsampled Gaussian, its output rounded to bins; the loss grows with the outcome."""
    edges = np.linspace(-7 * sigma, 7 * sigma + 1, num_bins - 1)
    without = _bins(edges / sigma)
    return (1 - q) * without + q * _bins((edges - 1) / sigma), without


def _bins(edges: np.ndarray) -> np.ndarray:
    """Standard normal probabilities between the edges, from the nearer tail so that none is rounded to 0."""
    below = np.diff(np.concatenate(([0.0], norm.cdf(edges), [1.0])))
    above = -np.diff(np.concatenate(([1.0], norm.sf(edges), [0.0])))
    middle = np.concatenate((edges, [np.inf])) < 0
    return np.where(middle, below, above)


def randomised_response(epsilon: float, delta: float) -> tuple[np.ndarray, np.ndarray]:
    """The worst (ε, δ)-DP mechanism; its first and last outcome tell the data sets apart for sure."""
    likely = (1 - delta) / (1 + math.exp(epsilon))
    without = np.array([delta, math.exp(epsilon) * likely, likely, 0.0])
    return without[::-1].copy(), without


# ---- the law of K, as plain probabilities -------------------------------------------------------------


def negative_binomial_pmf(eta: float, gamma: float, length: int = 1500) -> np.ndarray:
    """P(K = k) for k = 0 … length, normalised by summing."""
    weights = np.zeros(length + 1)
    weights[1] = 1.0
    for k in range(1, length):
        weights[k + 1] = weights[k] * (1 - gamma) * (k + eta) / (k + 1)
    return weights / weights.sum()


def poisson_pmf(mean: float, length: int = 200) -> np.ndarray:
    return np.array([math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(length + 1)])


def binomial_pmf(n: int, prob: float) -> np.ndarray:
    return np.array([math.comb(n, k) * prob**k * (1 - prob) ** (n - k) for k in range(n + 1)])


def fixed_pmf(k: int) -> np.ndarray:
    return np.eye(k + 1)[k]


# ---- releases -----------------------------------------------------------------------------------------


def best_of_k(trial: np.ndarray, pmf: np.ndarray) -> np.ndarray:
    """P(nothing), then P(best of K = y): Σ_k P(k) (F(y)^k − F(y−1)^k)."""
    cdf = np.concatenate(([0.0], np.minimum(np.cumsum(trial), 1.0)))
    below = np.zeros_like(cdf)
    for k in range(1, len(pmf)):
        below += pmf[k] * cdf**k
    return np.concatenate(([pmf[0]], np.diff(below)))


def first_above_of_k(trial: np.ndarray, num_misses: int, pmf: np.ndarray) -> np.ndarray:
    """P(nothing), then P(y) for the outcomes after the first `num_misses`: the first good one of K."""
    miss = trial[:num_misses].sum()
    nothing = sum(prob * miss**k for k, prob in enumerate(pmf))
    first = sum(prob * sum(miss**tries for tries in range(k)) for k, prob in enumerate(pmf))
    return np.concatenate(([nothing], first * trial[num_misses:]))


def first_above(trial: np.ndarray, num_misses: int, halting_prob: float) -> np.ndarray:
    """P(nothing), then P(y) for the outcomes after the first `num_misses`, by playing the rounds."""
    released, nothing, running = np.zeros_like(trial), 0.0, 1.0
    while running > 1e-18:
        released[num_misses:] += running * trial[num_misses:]
        missed = running * trial[:num_misses].sum()
        nothing += halting_prob * missed
        running = (1 - halting_prob) * missed
    return np.concatenate(([nothing], released[num_misses:]))


def exact_delta(first: np.ndarray, second: np.ndarray, epsilon: float) -> float:
    """The larger of both directions' hockey-stick divergence."""
    scale = math.exp(epsilon)
    return max(
        float(np.maximum(first - scale * second, 0).sum()), float(np.maximum(second - scale * first, 0).sum())
    )


def renyi(first: np.ndarray, second: np.ndarray, order: float) -> float:
    """The larger of both directions' Rényi divergence; both laws must have full support."""
    logs = np.log(first), np.log(second)
    return max(
        float(np.logaddexp.reduce(order * a + (1 - order) * b)) / (order - 1) for a, b in (logs, logs[::-1])
    )
