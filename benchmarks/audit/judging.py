"""Turn released vectors into a verdict: a lower bound on ε, and a test of the noise's distribution.

*The bound.* A quarter of the runs fits scores, and the next quarter chooses one score and a threshold. The
other half, unused until then, gives Clopper-Pearson bounds on both error rates, and so ε ≥ ln((TPR − δ)/FPR).
Score and threshold are fixed before the testing half is used, so the bound always holds; only its tightness
depends on them. Every score is a log-likelihood ratio of two mixtures of Gaussians, for D and for D', with
one component for each noise-free release that the fitting quarter observed:

- *steps*: every step and trial separately, with the claimed noise;
- *trials*: the same for the sum of all trials, which reveals draws that trials share;
- *joint*: all steps and coordinates as one vector, with the noise covariance that the fitting quarter
  observed, which reveals noise that is missing, or repeated across steps or tensors;
- *joint, separate*: the same with separate covariances for D and D', which reveals noise or a divisor that
  depends on the records.

*The noise.* Noise that is too large costs only accuracy, so the bound cannot detect it. So the noise itself
(the release minus the noise-free release) is also tested: its variance on both sides, and the correlations of
all its coordinates, at the same step or at different steps. The probability of a false alarm is below one in
a million.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from benchmarks.audit.bounds import (
    Values,
    best_threshold,
    clopper_pearson_upper,
    epsilon_if_gaussian,
    epsilon_lower_bound,
)
from benchmarks.audit.result import AuditResult

Score = Callable[[Values], Values]
"""Maps releases `[runs, trials, steps, dim]` to `[runs]`; large values indicate the canary."""

_MAX_ATOMS = 256
_MAX_JOINT = 64
_FLOOR = 1e-4  # of the claimed variance; precise enough for noise-free directions
_FALSE_ALARM = 1e-7  # probability for the test of the noise, over all its comparisons


@dataclass(frozen=True)
class Releases:
    """Releases of many runs, with and without noise, `[runs, trials, steps, dim]`."""

    noisy: Values
    clean: Values


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The claim about one run: ε at δ, and the standard deviation of the noise on every coordinate."""

    epsilon: float
    delta: float
    noise_std: float


def judge(
    name: str,
    without: Releases,
    with_canary: Releases,
    claim: Claim,
    *,
    confidence: float,
    defect: str | None = None,
    must_exceed: bool = False,
) -> AuditResult:
    """Return the result of the runs on D and on D'.

    Args:
      name: the name of the row.
      without, with_canary: the releases on D and on D', of equally many runs.
      claim: the claim to test.
      confidence: probability that both error rates are within their bounds.
      defect: the name of the planted defect; None for the code as written.
      must_exceed: whether the defect breaks the claim, and not only the distribution of the noise.
    """
    runs = len(without.noisy)
    quarter, half = runs // 4, runs // 2
    fit_runs, choice_runs = slice(quarter), slice(quarter, half)
    best = -math.inf
    for score in _scores(_part(without, fit_runs), _part(with_canary, fit_runs), claim.noise_std):
        threshold, epsilon = best_threshold(
            score(without.noisy[choice_runs]), score(with_canary.noisy[choice_runs]), claim.delta, confidence
        )
        if epsilon > best:
            best, best_rule = epsilon, (score, threshold)
    score, threshold = best_rule
    negatives, positives = score(without.noisy[half:]), score(with_canary.noisy[half:])
    wrong = int((negatives > threshold).sum()), int((positives <= threshold).sum())
    tail = (1 - confidence) / 2
    fpr, fnr = (
        float(clopper_pearson_upper(k, len(part), tail))
        for k, part in zip(wrong, (negatives, positives), strict=True)
    )
    ratio, correlation, as_claimed = _noise((without, with_canary), claim.noise_std)
    return AuditResult(
        name=name,
        defect=defect,
        must_exceed=must_exceed,
        claimed_epsilon=claim.epsilon,
        delta=claim.delta,
        epsilon_lower_bound=float(epsilon_lower_bound(fpr, fnr, claim.delta)),
        delta_lower_bound=max(
            0.0, 1 - fnr - math.exp(claim.epsilon) * fpr, 1 - fpr - math.exp(claim.epsilon) * fnr
        ),
        epsilon_if_gaussian=epsilon_if_gaussian(fpr, fnr, claim.delta),
        false_positive_rate=wrong[0] / len(negatives),
        false_negative_rate=wrong[1] / len(positives),
        noise_ratio=ratio,
        noise_correlation=correlation,
        noise_as_claimed=as_claimed,
        num_runs=runs,
        confidence=confidence,
    )


def _part(releases: Releases, runs: slice) -> Releases:
    return Releases(releases.noisy[runs], releases.clean[runs])


def _scores(without: Releases, with_canary: Releases, std: float) -> Iterator[Score]:
    """Yield the scores fitted to these runs; their choice depends only on the shape of a run."""
    _, trials, steps, dim = without.noisy.shape
    worlds = (without, with_canary)
    yield _ratio(worlds, _each_step, [np.full(dim, std**2)] * 2)
    if trials > 1:
        yield _ratio(worlds, _sum_of_trials, [np.full(dim, trials * std**2)] * 2)
    if trials * steps * dim <= _MAX_JOINT:
        seen = [_whole_run(each.noisy)[:, 0] - _whole_run(each.clean)[:, 0] for each in worlds]
        both = _covariance(np.concatenate(seen))
        yield _ratio(worlds, _whole_run, [both, both], floor=_FLOOR * std**2)
        yield _ratio(worlds, _whole_run, [_covariance(each) for each in seen], floor=_FLOOR * std**2)


def _each_step(values: Values) -> Values:
    return values.reshape(len(values), -1, values.shape[-1])


def _sum_of_trials(values: Values) -> Values:
    summed: Values = values.sum(1)
    return summed


def _whole_run(values: Values) -> Values:
    return values.reshape(len(values), 1, -1)


def _covariance(noise: Values) -> Values:
    found: Values = noise.T @ noise / len(noise)
    return found


def _ratio(
    worlds: tuple[Releases, Releases],
    parts: Callable[[Values], Values],
    covariances: list[Values],
    floor: float = 0.0,
) -> Score:
    """Return a run's log-likelihood ratio, summed over `parts` `[runs, parts, dim]` as if independent."""
    mixtures = []
    for world, covariance in zip(worlds, covariances, strict=True):
        atoms, counts = np.unique(
            np.round(parts(world.clean).reshape(-1, parts(world.clean).shape[-1]), 9),
            axis=0,
            return_counts=True,
        )
        kept = np.argsort(-counts)[:_MAX_ATOMS]
        atoms, logs = atoms[kept], np.log(counts[kept] / counts[kept].sum())
        if covariance.ndim == 1:
            whiten = np.diag(covariance**-0.5)
        else:
            variances, directions = np.linalg.eigh(covariance)
            whiten = directions / np.sqrt(np.maximum(variances, floor))
        mixtures.append((atoms @ whiten, logs + np.linalg.slogdet(whiten)[1], whiten))

    def log_density(points: Values, atoms: Values, logs: Values, whiten: Values) -> Values:
        points = points @ whiten
        squares = (points**2).sum(1)[:, None] - 2 * points @ atoms.T + (atoms**2).sum(1)
        found: Values = special.logsumexp(logs - squares / 2, axis=1)
        return found

    def score(noisy: Values) -> Values:
        outputs = parts(noisy)
        flat = outputs.reshape(-1, outputs.shape[-1])
        ratio = log_density(flat, *mixtures[1]) - log_density(flat, *mixtures[0])
        summed: Values = ratio.reshape(len(noisy), -1).sum(1)
        return summed

    return score


def _noise(worlds: tuple[Releases, Releases], std: float) -> tuple[float, float, bool]:
    """Return the noise's std over the claimed std, its largest correlation, and whether both fit."""
    noise = np.concatenate([_whole_run(each.noisy - each.clean)[:, 0] for each in worlds]) / std
    width = noise.shape[1] if noise.shape[1] <= _MAX_JOINT else 1
    # In standard deviations, with a Bonferroni correction for the variance and all pairs of coordinates.
    bound = float(stats.norm.isf(_FALSE_ALARM / 2 / (1 + width * (width - 1) / 2)))
    square = float(np.mean(noise**2))
    fits = abs(square - 1) <= bound * math.sqrt(2 / noise.size)
    correlation = 0.0
    if width > 1:
        products = np.abs(_covariance(noise) / max(square, _FLOOR))
        correlation = float(np.max(products - np.diag(np.diag(products))))
        fits = fits and correlation <= bound / math.sqrt(len(noise))
    return math.sqrt(square), correlation, fits
