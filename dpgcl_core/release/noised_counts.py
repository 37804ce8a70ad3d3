"""Noised numbers about private records: a count of correct answers, and the norm behind SNR; what they cost.

**Noised count.** k counts are released, each of how many of m held-out private records a rule answers
correctly, plus N(0, s²). A rule must be a function of the private model, of public data and of **the
scored record alone**: k-NN index, gallery, probe training data, feature standardisation, the list of
classes and the divisor are public, and *all* held-out records are scored, each by itself. Then one record
more or less moves a count by at most 1. It is false for a private index (one record can change every
answer), for "the first 10,000 records by hash" (a new record pushes another one out) and for classes
numbered by their place in the data set's own list (a new class renumbers the others).

**One trial, disjoint split.** Every record goes by a keyed hash of its own id, the same in all trials,
either to training or to scoring. Let D' = D ∪ {r}, the trial's output be (model, counts).
- r goes to training: the scored records are the same, and given the model the counts are a kernel of it
  and of fresh noise: post-processing. The pair of outputs is dominated by that of the training.
- r goes to scoring: the models of D and D' have one law. Given the model, the counts are a Gaussian
  mechanism in R^k whose mean moves by at most √k. The pair of outputs is an average of such pairs over
  the model, and the hockey-stick divergence is jointly convex: dominated by a Gaussian of multiplier s/√k.
So at every ε the trial's δ, in either direction, is at most the larger of the two: the trial costs
max(ε of training, ε of scoring) at δ. Over several trials, adaptive ones included, the case of r is the
same in all of them, so training composes with training and scoring with scoring, and the larger **total**
is the cost (`scoring_event`). With the same records for both, the events of one trial add by adaptive
composition instead.

**Noised norm.** A step releases S + N(0, (σΔ)² I). To release ‖S‖ + N(0, (tΔ)²) of the same sample
besides is to release the vector (S/(σΔ), ‖S‖/(tΔ)) with unit noise. If a record moves S by at most Δ
(under the coupling of `mechanism`), it moves ‖S‖ by at most Δ, by the triangle inequality, and so the
vector by at most √(1/σ² + 1/t²). The step is a Poisson-subsampled Gaussian of multiplier
1/√(1/σ² + 1/t²), and tight. (Two events on samples of their own would cost less, for q < 1: here both
numbers tell of one sample.)
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

from dp_accounting import dp_event

from dpgcl_core.accounting import composition
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.sources import Draws

_CALIBRATION_TRIES = 8


def noised_count(count: int, noise_multiplier: float, generator: Draws, *, num_summed: int = 1) -> int:
    """Return `count` plus Gaussian noise, rounded to a whole number; it may be negative or too large.

    Guarantee: as a Gaussian mechanism of multiplier `noise_multiplier` for adding or removing one record,
    if that moves `count` by at most 1 (see the module). The noise is rounded before it is added, which
    equals rounding the sum, a post-processing, and leaves no floating-point digits that could tell the
    count from its neighbours.

    Args:
      count: correct answers.
      noise_multiplier: s, the noise's standard deviation, for the sensitivity is 1.
      generator: secret.
      num_summed: normals summed for the noise, see `GaussianNoise`.

    Raises:
      ConfigError: `noise_multiplier` is too small to protect anything, or not finite.
    """
    check_noise_multiplier("score_noise_multiplier", noise_multiplier)
    noise = GaussianNoise(std=noise_multiplier, num_summed=num_summed)
    return int(count) + round(float(noise.draw(1, generator)))


def noised_norm(
    norm: float, sensitivity: float, noise_multiplier: float, generator: Draws, *, num_summed: int = 1
) -> float:
    """Return `norm` plus N(0, (noise_multiplier·sensitivity)²), on the noise's grid; it may be negative.

    Args:
      norm: of the clean clipped sum.
      sensitivity: of that sum, hence of its norm.
      noise_multiplier: t.
      generator: secret, of its own: noise shared with the sum's would break the proof.
      num_summed: normals summed for the noise, see `GaussianNoise`.
    """
    check_noise_multiplier("snr_noise_multiplier", noise_multiplier)
    noise = GaussianNoise(std=noise_multiplier * sensitivity, num_summed=num_summed)
    return float(noise.on_grid(noise.draw(1, generator).add_(norm)))


def check_noise_multiplier(name: str, value: float) -> None:
    """Raise ConfigError unless `value` is finite and at least the smallest that protects anything."""
    if not composition.MIN_NOISE_MULTIPLIER <= value < math.inf:
        raise ConfigError(
            f"{name} must be finite and at least {composition.MIN_NOISE_MULTIPLIER}, for less protects "
            f"nothing; got {value}"
        )


def joint_noise_multiplier(noise_multiplier: float, snr_noise_multiplier: float) -> float:
    """Return the multiplier of a step that also releases its noised norm: 1/√(1/σ² + 1/t²).

    >>> round(joint_noise_multiplier(3.0, 4.0), 6)
    2.4
    """
    return 1 / math.hypot(1 / noise_multiplier, 1 / snr_noise_multiplier)


def scoring_event(score_noise_multiplier: float, num_scores: int, num_trials: int = 1) -> dp_event.DpEvent:
    """Return the event of `num_scores` noised counts in each of `num_trials` trials on one scored split."""
    if num_scores * num_trials == 0:
        return dp_event.NoOpDpEvent()
    return dp_event.GaussianDpEvent(score_noise_multiplier / math.sqrt(num_scores * num_trials))


def training_event(
    mechanism: Mechanism,
    *,
    num_steps: int | None = None,
    snr_noise_multiplier: float | None = None,
    num_snr_steps: int = 1,
) -> dp_event.DpEvent:
    """Return the event of `num_steps` charged steps, `num_snr_steps` of which release their noised norm."""
    num_steps = mechanism.num_steps if num_steps is None else num_steps
    if snr_noise_multiplier is None or not mechanism.is_private:
        return mechanism.dp_event(num_steps)
    joint = composition.poisson_gaussian_event(
        sampling_prob=mechanism.sampling_prob,
        noise_multiplier=joint_noise_multiplier(mechanism.noise_multiplier, snr_noise_multiplier),
        num_steps=min(num_snr_steps, num_steps),
    )
    return dp_event.ComposedDpEvent([mechanism.dp_event(max(0, num_steps - num_snr_steps)), joint])


@lru_cache(maxsize=256)
def trial_epsilon(
    mechanism: Mechanism,
    score_noise_multiplier: float | None = None,
    num_scores: int = 0,
    disjoint: bool = True,
    *,
    num_steps: int | None = None,
    snr_noise_multiplier: float | None = None,
    num_snr_steps: int = 1,
) -> float:
    """Return ε of one trial at the mechanism's δ by PLD: its model, noised counts and noised norm together.

    Guarantee: for adding or removing one record, of training or of scoring; see the module for the proof.

    Args:
      mechanism: of the training.
      score_noise_multiplier: s of each noised count; None for none.
      num_scores: k, noised counts.
      disjoint: whether the scored records are not trained on, by record id, the same in all trials. Then
        the larger of the two costs counts, otherwise both together.
      num_steps: charged steps; all of `mechanism` unless given.
      snr_noise_multiplier: t of the noised norm; None for none.
      num_snr_steps: charged releases of a noised norm.

    >>> mechanism = Mechanism(num_records_public=1000, sampling_prob=0.01, group_size=4, l2_clip_norm=1.0,
    ...     noise_multiplier=1.0, num_steps=1000, target_delta=1e-5)
    >>> [round(trial_epsilon(mechanism, 5.0, 2, disjoint), 2) for disjoint in (True, False)]
    [1.83, 2.15]
    """
    if not mechanism.is_private:
        return math.inf
    _check_event(mechanism, score_noise_multiplier, snr_noise_multiplier)
    training = training_event(
        mechanism,
        num_steps=num_steps,
        snr_noise_multiplier=snr_noise_multiplier,
        num_snr_steps=num_snr_steps,
    )
    delta = mechanism.target_delta
    scoring: dp_event.DpEvent = dp_event.NoOpDpEvent()
    if score_noise_multiplier is not None:
        scoring = scoring_event(score_noise_multiplier, num_scores)
    if not disjoint:
        return composition.epsilon_pld(dp_event.ComposedDpEvent([training, scoring]), delta)
    alone = mechanism.epsilon(num_steps) if snr_noise_multiplier is None else None  # remembered
    epsilon = composition.epsilon_pld(training, delta) if alone is None else alone
    return max(epsilon, composition.epsilon_pld(scoring, delta))


def calibrated(
    mechanism: Mechanism,
    target_epsilon: float,
    *,
    score_noise_multiplier: float | None = None,
    num_scores: int = 0,
    snr_noise_multiplier: float | None = None,
    cache_folder: Path | None = None,
) -> Mechanism:
    """Return `mechanism` with the noise that keeps the whole trial, noised releases included, in the target.

    Raises:
      ConfigError: the noised counts alone cost more than the target, or no noise multiplier meets it.
    """
    found = mechanism.calibrated(target_epsilon, cache_folder=cache_folder)
    if not found.is_private:
        return found
    _check_event(mechanism, score_noise_multiplier, snr_noise_multiplier)
    if score_noise_multiplier is not None:
        scoring = composition.epsilon_pld(
            scoring_event(score_noise_multiplier, num_scores), mechanism.target_delta
        )
        if scoring > target_epsilon:
            raise ConfigError(
                f"the noised scores must cost no more than target_epsilon = {target_epsilon:g}; "
                f"{num_scores} counts at score_noise_multiplier = {score_noise_multiplier:g} cost "
                f"{scoring:.3g}: raise it"
            )
    if snr_noise_multiplier is None:
        return found
    share = target_epsilon
    for _ in range(_CALIBRATION_TRIES):
        reached = trial_epsilon(found, snr_noise_multiplier=snr_noise_multiplier)
        if reached <= target_epsilon:
            return found
        share *= (1 - composition.CALIBRATION_TOLERANCE) * target_epsilon / reached
        found = mechanism.calibrated(share, cache_folder=cache_folder)
    raise ConfigError(
        f"no noise multiplier verified for target_epsilon = {target_epsilon:g} with "
        f"snr_noise_multiplier = {snr_noise_multiplier:g}; raise one of them, or leave the SNR out"
    )


def _check_event(mechanism: Mechanism, *noises: float | None) -> None:
    """Refuse noised releases beside steps that the proofs above do not cover."""
    if not mechanism.rules.plain_event and any(noise is not None for noise in noises):
        raise ConfigError(
            "noised scores and a noised SNR are accounted beside Poisson-sampled Gaussian steps for adding "
            f"or removing one record; {mechanism.method} has others: leave them out"
        )


def public_share(noised: int, num_scored_public: int) -> float:
    """Return a noised count over a **public** number of records; noise may take it out of [0, 1].

    >>> public_share(90, 100)
    0.9
    """
    if num_scored_public < 1:
        raise ConfigError(f"num_scored_public must be at least 1; got {num_scored_public}")
    return noised / num_scored_public


def split_public(num_records_public: int, share: float) -> tuple[int, int]:
    """Return the expected, hence public, numbers of records trained on and held out, of all n declared.

    >>> split_public(1000, 0.1)
    (900, 100)
    """
    held = max(1, round(num_records_public * share)) if share else 0
    return num_records_public - held, held
