"""The cost of releasing the best of K trials: the theorems, one function each.

All theorems have this setting. Q is the distribution of one trial's whole output (hyperparameters, model,
score); the K trials are **independent** draws from Q. K is drawn first from a public law and kept secret.
Only the output that is highest in a fixed total order (score, ties by an independent coin) is released. These
break the setting: proposals that depend on earlier trials (TPE, Bayesian search), schedulers that compare
running trials (median stopping, ASHA, Hyperband), noise seeds that trials share, a score computed from
private data without noise, dropping or repeating failed trials (they count as worst-score outputs),
extending the sweep, and a cap on K that the law does not have.

Notation: δ_Q(ε) is the profile of one trial and ε_Q its inverse, f(x) = E[x^K], m = E[K] = f'(1),
p_y = P(≤ y) and q_y = Q(≤ y) for the distributions P, Q of one trial on neighbouring data sets. Best-of-K has
density f'(p_y)·P(dy). All bounds are for **adding or removing one record**. The order of P and Q is
arbitrary, so every bound holds in both directions. docs/theory/tuning.md has the full proofs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from numpy.typing import NDArray

from dpgcl_core.accounting.tuning.laws import (
    BinomialTrials,
    PoissonTrials,
    TrialCountLaw,
    TruncatedNegativeBinomial,
    TruncatedTrials,
)
from dpgcl_core.accounting.tuning.profile import PrivacyLoss, PrivacyProfile
from dpgcl_core.errors import ConfigError

Array = NDArray[np.float64]

_LARGEST_EPSILON = 700.0
_NUM_CELLS = 4000  # of t; outward rounding of this many costs about 0.005 in ε at η = 1, m = 10
_ROUND_UP = 1e-9  # relative; covers the float arithmetic of f' and of the sums


def ln_c_star(profile: PrivacyProfile, odds: float) -> float:
    """Return ln c*, rounded up, where c* ≥ 1 solves δ_Q(ln c) = (c − 1)·odds; `inf` for odds = 0.

    δ_Q is the profile. The left side decreases and the right side increases, so every c ≥ c* has
    δ_Q(ln c) ≤ (c − 1)·odds, which the proofs of the bounds need.
    """
    if odds == 0:
        return math.inf
    return _least_above(lambda ln_c: profile.delta(ln_c) > math.expm1(ln_c) * odds, 1e-9, relative=1e-10)


def _least_above(
    is_too_small: Callable[[float], bool], start: float, *, relative: float = 0.0, absolute: float = 0.0
) -> float:
    """Return the smallest number that is not too small, rounded up by bisection; `inf` if there is none."""
    low, high = 0.0, start
    while is_too_small(high):
        low, high = high, 2 * high
        if high > _LARGEST_EPSILON:
            return math.inf
    while high - low > relative * high + absolute:
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_small(middle) else (low, middle)
    return high


def profile_bound(profile: PrivacyProfile, law: TrialCountLaw, delta: float) -> float:
    """Return ε of the best of K at `delta` from the profile of one trial.

    δ_Q is that profile, ε_Q its inverse, m = E[K], and ln c* is `ln_c_star` at the odds that are named.

    Truncated negative binomial: ε = ε_Q(δ/m) + (1 + η)·ln c*, with odds γ/(1 − γ).
    Binomial(n, p): ε = ε_Q(δ/m) + (n − 1)·ln c*, with odds (1 − p)/p.
    Poisson(μ): ε = ε_Q(δ/μ) + μ·δ_Q(0).
    Any of these given K ≤ M (`TruncatedTrials`): the same term is added as without M, and m = E[K | K ≤ M].

    Proof sketch. P and Q are the distributions of one trial on neighbouring data sets, p_y = P(≤ y) and
    q_y = Q(≤ y) for an output y, f(x) = E[x^K], and δ_A is the profile of the best of K. Suppose
    f'(p_y) ≤ e^s·f'(q_y) for all y. As f' is increasing, f'(p_y) ≤ f'(1) = m, and
      δ_A(ε) = ∫ (f'(p_y)P(dy) − e^ε f'(q_y)Q(dy))₊ ≤ ∫ f'(p_y)·(P(dy) − e^(ε−s)Q(dy))₊ ≤ m·δ_Q(ε − s),
    which is at most δ for ε = ε_Q(δ/m) + s. For each law, s follows from the form of f' and from
    Q(> y) ≤ c·P(> y) + δ_Q(ln c) at c*. Given K ≤ M, (ln f')' is the mean of a law that is cut off above,
    so f' grows by no larger a factor between any two points, and the same s suffices. ∎

    Raises:
      ConfigError: the law has no such bound; the pointwise supremum covers it.
    """
    return profile.epsilon(delta / law.mean) + _shift(profile, law)


def _shift(profile: PrivacyProfile, law: TrialCountLaw) -> float:
    """Return the s of `profile_bound`, with f'(p_y) ≤ e^s·f'(q_y) for all outputs y."""
    if isinstance(law, TruncatedTrials):
        return _shift(profile, law.law)
    if isinstance(law, TruncatedNegativeBinomial):
        odds = law.gamma / (1 - law.gamma) if law.gamma < 1 else math.inf
        return (1 + law.eta) * ln_c_star(profile, odds)
    if isinstance(law, BinomialTrials):
        ln_c = ln_c_star(profile, (1 - law.prob) / law.prob) if law.max_trials > 1 else 0.0
        return (law.max_trials - 1) * ln_c
    if isinstance(law, PoissonTrials):
        return law.mean * profile.total_variation
    raise ConfigError(f'the bound "profile" does not cover {law.parameters()["name"]}; use "pointwise"')


def pointwise_bound(profile: PrivacyProfile, law: TrialCountLaw, delta: float) -> float:
    """Return an upper bound on ε, at `delta`, of releasing the best of K trials; it holds for every law of K.

    P and Q are the distributions of one trial's score on two neighbouring data sets, δ_Q their privacy
    profile, L the privacy loss, f(x) = E[x^K] and A the release of the best. With
    β(t) = inf_ε' (e^ε' t + δ_Q(ε')), at most 1, and t ranging over [0, 1],
      δ_A(ε) ≤ E[ sup_t (f'(1 − t) − e^(ε−L) f'(1 − β(t)))₊ ].

    Proof sketch. With t = P(> y) for a score y, Q(> y) ≤ β(t) and f' is increasing, so the integrand at y is
    at most the supremum. The right side is an f-divergence of (P, Q), which grows when the pair is replaced
    by a dominating one, here the discretised PLD. ∎

    Rounding: [0, 1] is cut into cells. Evaluating f'(1 − t) at a cell's left end and f'(1 − β(t)) at its
    right end can only raise the bound. The upper envelope of these lines in e^(ε−L) is computed once.
    """
    gains, prices = _envelope(profile, law)
    divergences = [_divergence(loss, gains, prices, law.mean) for loss in (profile.remove, profile.add)]
    return _least_epsilon(lambda epsilon: max(each(epsilon) for each in divergences), delta)


def _envelope(profile: PrivacyProfile, law: TrialCountLaw) -> tuple[Array, Array]:
    """Return gains f'(1 − t) and prices f'(1 − β(t)) of the cells of t that are best at some x ≥ 0.

    A cell is best at x if its gain − x·price is the highest.
    """
    edges = np.concatenate(([0.0], np.geomspace(1e-9 / law.mean, 1.0, _NUM_CELLS)))
    gains = law.derivative(1 - edges[:-1]) * (1 + _ROUND_UP)
    prices = law.derivative(1 - profile.largest_image(edges[1:])) * (1 - _ROUND_UP)
    return _upper_hull(gains[::-1], prices[::-1])


def _divergence(loss: PrivacyLoss, gains: Array, prices: Array, mean: float) -> Callable[[float], float]:
    """Return the upper bound on δ_A as a function of ε, for the pair of distributions of `loss`."""
    # Line i is the highest for e^(ε−L) between the slopes of the two hull edges next to it.
    slopes = np.diff(gains) / np.diff(prices)
    keep = loss.masses > 0
    masses, ratios = loss.masses[keep], np.exp(-loss.losses[keep])

    def divergence(epsilon: float) -> float:
        x = math.exp(epsilon) * ratios
        line = np.searchsorted(-slopes, -x, side="left")
        heights = np.maximum(gains[line] - x * prices[line], 0.0)
        return float(masses @ heights + loss.infinity_mass * mean) * (1 + _ROUND_UP)

    return divergence


def _upper_hull(gains: Array, prices: Array) -> tuple[Array, Array]:
    """Return the lines gain − x·price that are highest for some x ≥ 0, by ascending price (and gain).

    Both arguments must be ascending.
    """
    highest: list[tuple[float, float]] = []
    for gain, price in zip(gains.tolist(), prices.tolist(), strict=True):
        if highest and price == highest[-1][1]:
            if gain <= highest[-1][0]:
                continue
            highest.pop()
        while len(highest) > 1 and _is_below(highest[-2], highest[-1], (gain, price)):
            highest.pop()
        if not highest or gain > highest[-1][0]:
            highest.append((gain, price))
    hull = np.array(highest)
    return hull[:, 0], hull[:, 1]


def _is_below(low: tuple[float, float], middle: tuple[float, float], high: tuple[float, float]) -> bool:
    """Return whether the middle point (gain, price) lies on or below the segment between the others."""
    return (middle[0] - low[0]) * (high[1] - low[1]) <= (high[0] - low[0]) * (middle[1] - low[1])


def _least_epsilon(divergence: Callable[[float], float], delta: float) -> float:
    """Return the smallest ε ≥ 0 with a divergence of at most `delta`, rounded up; `inf` if there is none."""
    if divergence(0.0) <= delta:
        return 0.0
    return _least_above(lambda epsilon: divergence(epsilon) > delta, 1.0, absolute=1e-6)


def threshold_bound(
    profile: PrivacyProfile, halting_prob: float, delta: float, max_trials: int | None = None
) -> float:
    """Return ε at `delta` of releasing the first trial with a score of at least s, a public constant.

    After each lower score the sweep halts with probability γ = `halting_prob`, and releases "nothing".
    ε = ε_Q(γδ) + ln c*, with ε_Q the inverse of the profile δ_Q, and odds γ/(1 − γ) in `ln_c_star`. The
    released trial is the first of K trials with score ≥ s, for geometric K. Given K ≤ M (`max_trials`),
    E[K | K ≤ M] replaces the mean 1/γ of K: ε = ε_Q(δ/E[K | K ≤ M]) + ln c*.

    Proof sketch. P and Q are the distributions of one trial on neighbouring data sets, and δ_A is the profile
    of the release. With a = P(score ≥ s) and n(a) = γ + (1 − γ)a, an output y with score ≥ s has density
    P(dy)/n(a) and "nothing" has probability γ(1 − a)/n(a). For b = Q(score ≥ s), n(b) ≤ c*·n(a) as in
    `profile_bound`, so δ_A(ε) is at most δ_Q(ε − ln c*)/n(a) ≤ δ_Q(ε − ln c*)/γ. Given K ≤ M, 1/n(a) becomes
    Σ_j P(K ≥ j)(1 − a)^(j−1) ≤ E[K], which grows by no larger a factor with 1 − a. ∎

    Raises:
      ConfigError: `halting_prob` is outside (0, 1].
    """
    if not 0 < halting_prob <= 1:
        raise ConfigError(f"halting_prob must be in (0, 1]; got {halting_prob}")
    odds = halting_prob / (1 - halting_prob) if halting_prob < 1 else math.inf
    share = halting_prob
    if max_trials is not None:
        share = 1 / halting_law(halting_prob, max_trials).mean
    return profile.epsilon(share * delta) + ln_c_star(profile, odds)


def halting_law(halting_prob: float, max_trials: int) -> TruncatedTrials:
    """Return the geometric law of the number of trials of a threshold sweep, cut off at `max_trials`."""
    geometric = TruncatedNegativeBinomial(eta=1.0, gamma=halting_prob)
    return TruncatedTrials(law=geometric, max_trials=max_trials)


def papernot_steinke_rdp(
    orders: Array, rdp: Array, law: TrialCountLaw, profile: PrivacyProfile | None = None
) -> Array:
    """Return the RDP of the best of K at `orders`, from one trial's RDP (Papernot and Steinke 2022).

    ε(λ) and ε'(λ) are the RDP of one trial and of the best of K at order λ; m = μ = E[K].
    Truncated negative binomial (Theorem 2), for every order λ̂ ≥ 1:
      ε'(λ) = ε(λ) + (1 + η)(1 − 1/λ̂)ε(λ̂) + (1 + η)·ln(1/γ)/λ̂ + ln m/(λ − 1).
    Poisson (Theorem 6): if one trial is (ε̂, δ̂)-DP with e^ε̂ ≤ 1 + 1/(λ − 1),
      ε'(λ) = ε(λ) + μδ̂ + ln μ/(λ − 1).
    Theorem 2 given K ≤ M: use the negative binomial's γ and m = E[K | K ≤ M] (docs/theory/tuning.md).
    RDP never decreases with the order, so a smaller value at a higher order replaces a value at a lower
    order. The result depends on `orders`: it is minimised over λ̂ in the same orders.

    Args:
      orders: λ > 1 `[orders]`, ascending.
      rdp: ε(λ) of one trial `[orders]`.
      law: the law of K.
      profile: one trial's privacy profile, which gives δ̂; needed for Poisson.

    Raises:
      ConfigError: the theorems do not cover the law, or the profile is missing.
    """
    uncapped_law = law.law if isinstance(law, TruncatedTrials) else law
    if isinstance(uncapped_law, TruncatedNegativeBinomial):
        constant = (1 + uncapped_law.eta) * np.min(
            (1 - 1 / orders) * rdp - math.log(uncapped_law.gamma) / orders
        )
        tuned = rdp + constant + math.log(law.mean) / (orders - 1)
    elif isinstance(law, PoissonTrials) and profile is not None:
        deltas = np.array([profile.delta(math.log1p(1 / (order - 1))) for order in orders.tolist()])
        tuned = rdp + law.mean * deltas + math.log(law.mean) / (orders - 1)
    else:
        name = law.parameters()["name"]
        raise ConfigError(f'the bound "ps22" covers the laws tnb and poisson (with a profile); got {name}')
    return np.asarray(np.minimum.accumulate(tuned[::-1])[::-1])


def is_published(law: TrialCountLaw) -> bool:
    """Return whether `papernot_steinke_rdp` covers the law."""
    uncapped_law = law.law if isinstance(law, TruncatedTrials) else law
    return isinstance(uncapped_law, TruncatedNegativeBinomial) or isinstance(law, PoissonTrials)


def papernot_steinke_bound(
    orders: Array, rdp: Array, law: TrialCountLaw, delta: float, profile: PrivacyProfile | None = None
) -> float:
    """Return ε at `delta` of `papernot_steinke_rdp`."""
    return rdp_to_epsilon(orders, papernot_steinke_rdp(orders, rdp, law, profile), delta)


def rdp_to_epsilon(orders: Array, rdp: Array, delta: float) -> float:
    """Return the smallest ε at `delta` over the orders (Canonne, Kamath and Steinke 2020, Proposition 12)."""
    return float(compute_epsilon(orders.tolist(), rdp.tolist(), delta)[0])
