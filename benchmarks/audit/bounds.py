"""Statistics of the audit: lower bounds on ε, with a stated confidence, from scored runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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


# One run with many canaries


def one_run_epsilon(
    num_right: int, num_guesses: int, *, num_canaries: int, delta: float, tail: float
) -> float:
    """Return a lower bound on ε at δ from guesses about the canaries of one run, at error probability `tail`.

    Each of m canaries is in the data or not, by a fair coin. The coins are independent of each other and of
    all else. A mechanism M of the data has the output Y, and Y alone decides which r coins to guess, and how.

    *Theorem* (Steinke, Nasr and Jagielski 2023, theorems 3.1 and 5.2, with another correction for δ). If M is
    (ε, δ)-private for adding or removing any one canary, p = e^ε / (1 + e^ε), and W is the number of right
    guesses, then P(W ≥ v) ≤ P(Binomial(r, p) ≥ v) + mδ for every v.

    *Proof.* Fix the coins before coin i, and let P1 and P0 be the densities of Y if coin i is 1 or 0. They
    are averages over the later coins, and (ε, δ)-close, as the hockey-stick divergence is jointly convex.
    Given Y = y, coin i is 1 with probability P1 / (P0 + P1) ≤ p + (1 − p)·h(y), where
    h = (P1 − e^ε P0)₊ / (P0 + P1): this is an equality where h > 0. Likewise, it is 0 with probability at
    most p + (1 − p)·h'(y), where h' = (P0 − e^ε P1)₊ / (P0 + P1). So a guess of coin i is right no more often
    than if the coin were *marked* with probability h (or h'), and the guess were always right if it is
    marked, and otherwise with probability at most p. The density of Y is (P0 + P1) / 2, so coin i is marked
    with probability at most ½·∫ (P1 − e^ε P0)₊ + ½·∫ (P0 − e^ε P1)₊ ≤ δ, and some coin with probability at
    most mδ. If none is marked, each guess in turn is right with probability at most p, whatever happened
    before, so W is at most a Binomial(r, p) in distribution. ∎

    The theorem has 2mδα in place of mδ, where α < 1 depends on v. For mδ far below `tail`, as it must be for
    any bound, both cost next to nothing. Nothing is assumed of M besides its privacy for one canary: two
    canaries may interact in any way. The bound is the smallest ε with P(Binomial(r, p) ≥ W) + mδ ≥ `tail`.

    Args:
      num_right: W.
      num_guesses: r, fixed before the run.
      num_canaries: m.
      delta: δ.
      tail: probability that the bound may exceed ε.

    >>> [round(one_run_epsilon(k, 500, num_canaries=500, delta=1e-6, tail=0.05), 3) for k in (250, 400, 500)]
    [0.0, 1.198, 5.111]
    """
    rest = tail - num_canaries * delta
    if rest <= 0 or num_right == 0:
        return 0.0
    wrong = float(clopper_pearson_upper(num_guesses - num_right, num_guesses, rest))
    return max(0.0, math.log((1 - wrong) / wrong))


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Guesses about canaries, and the lower bound on ε that they give.

    Attributes:
      num_right: number of right guesses, for the numbers of guesses with the largest bound.
      num_guesses: number of canaries that were guessed.
      epsilon_lower_bound: lower bound on ε.
    """

    num_right: int
    num_guesses: int
    epsilon_lower_bound: float


_GUESSED_SHARES = ((1 / 2, 1 / 2), (1 / 4, 1 / 4), (1 / 8, 1 / 8), (1 / 4, 0), (1 / 8, 0), (1 / 16, 0))
"""Shares of the canaries that are guessed to be in, and to be out. Each pair gets a part of the tail."""


def guess_canaries(scores: Values, coins: NDArray[np.bool_], delta: float, confidence: float) -> Guesses:
    """Guess that the canaries with the highest scores are in and those with the lowest are out.

    Several pairs of numbers of guesses are tried, and the bound holds for all of them together with
    probability `confidence` over coins and mechanism (Bonferroni). All pairs guess a canary alike, if at all,
    so the event that some coin is marked (see `one_run_epsilon`) is the same for all and counts once.

    Args:
      scores: one for each canary, computed without the coins, `[num_canaries]`.
      coins: whether each canary is in, `[num_canaries]`.
      delta: δ.
      confidence: probability that the bound is at most ε.
    """
    num_canaries = len(scores)
    is_in = coins[np.argsort(scores, kind="stable")]

    def count_right(num_in: int, num_out: int) -> int:
        return int(is_in[num_canaries - num_in :].sum() + (~is_in[:num_out]).sum())

    return _best_guesses(count_right, num_canaries, delta, confidence)


def largest_epsilon(num_canaries: int, delta: float, confidence: float) -> float:
    """Return the bound of `guess_canaries` if every guess is right: no audit with m canaries shows more.

    >>> round(largest_epsilon(1000, 1e-6, 0.95), 2), round(math.log(1000 / 5), 2)
    (5.34, 5.3)
    """
    return _best_guesses(int.__add__, num_canaries, delta, confidence).epsilon_lower_bound


def _best_guesses(
    count_right: Callable[[int, int], int], num_canaries: int, delta: float, confidence: float
) -> Guesses:
    """Return the guesses with the largest bound, where `count_right` counts right guesses of in and out."""
    attempts, marked = [], num_canaries * delta
    tail = marked + (1 - confidence - marked) / len(_GUESSED_SHARES)
    for share_in, share_out in _GUESSED_SHARES:
        num_in, num_out = int(share_in * num_canaries), int(share_out * num_canaries)
        num_guesses, num_right = num_in + num_out, count_right(num_in, num_out)
        bound = one_run_epsilon(num_right, num_guesses, num_canaries=num_canaries, delta=delta, tail=tail)
        attempts.append(Guesses(num_right=num_right, num_guesses=num_guesses, epsilon_lower_bound=bound))
    return max(attempts, key=lambda guesses: guesses.epsilon_lower_bound)
