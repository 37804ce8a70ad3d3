"""Noised numbers about private records, and their cost: counts of correct answers, and the norm for SNR.

All costs are for **adding or removing one record**; docs/theory/scores.md has the proofs.

**Noised count.** k counts are released. Each is the number of the m held-out private records that a predictor
answers correctly, plus N(0, s²). The answer must be a function of the private model, of public data and of
**only the scored record**: k-NN index, gallery, probe training data, feature standardisation, the list of
classes and the divisor are public, and *all* held-out records are scored, each separately. Then one record
moves a count by at most 1. This is false for a private index (one record can change every answer), for "the
first 10,000 records by hash" (a new record displaces another record) and for classes numbered by their
position in the data set's own list (a new class renumbers the others).

**One trial, disjoint split.** Its slot in the slot table assigns every record, in the same way in all trials,
either to training or to scoring. Guarantee: the trial costs max(ε of training, ε of scoring) at δ. Sketch: if
the differing record is trained on, the counts are post-processing of the model. If it is scored, the model
has the same distribution on both data sets, and the k counts are dominated by a Gaussian with noise
multiplier s/√k. Over several trials, adaptive ones included, training composes with training and scoring with
scoring, and the larger **total** is the cost (`scoring_event`). If the same records are used for training and
scoring, the events of one trial add by adaptive composition instead.

**Noised norm.** A step releases S + N(0, (σΔ)² I). If it also releases ‖S‖ + N(0, (tΔ)²) of the same sample,
it is a Poisson-subsampled Gaussian with noise multiplier 1/√(1/σ² + 1/t²), since one record moves the vector
(S/(σΔ), ‖S‖/(tΔ)) by at most √(1/σ² + 1/t²).
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import torch
from dp_accounting import dp_event

from dpgcl_core.accounting import composition
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.noise.gaussian import noised
from dpgcl_core.noise.randomness import Draws

_CALIBRATION_TRIES = 8


def noised_count(count: int, noise_multiplier: float, generator: Draws) -> int:
    """Return `count` plus Gaussian noise, rounded to a whole number; it may be negative or too large.

    Guarantee: a Gaussian mechanism with noise multiplier `noise_multiplier` for adding or removing one
    record, if the record moves `count` by at most 1 (see the module). Rounding is post-processing.

    Args:
      count: number of correct answers.
      noise_multiplier: s, the noise's standard deviation, since the sensitivity is 1.
      generator: source of secret draws.

    Raises:
      ConfigError: `noise_multiplier` is too small to protect anything, or not finite.
    """
    check_noise_multiplier("score_noise_multiplier", noise_multiplier)
    return round(float(noised(torch.tensor(count), noise_multiplier, 1.0, generator)))


def noised_norm(norm: float, sensitivity: float, noise_multiplier: float, generator: Draws) -> float:
    """Return `norm` plus N(0, (noise_multiplier·sensitivity)²).

    Args:
      norm: the norm of the clipped sum without noise.
      sensitivity: the sensitivity of that sum, hence of its norm.
      noise_multiplier: t = noise std / sensitivity.
      generator: a separate source of secret draws: noise shared with the sum's noise would break the proof.
    """
    check_noise_multiplier("snr_noise_multiplier", noise_multiplier)
    value = torch.tensor(norm, dtype=torch.float64)
    return float(noised(value, noise_multiplier, sensitivity, generator))


def check_noise_multiplier(name: str, value: float) -> None:
    """Raise ConfigError unless `value` is finite and at least the smallest that gives any protection."""
    if not composition.MIN_NOISE_MULTIPLIER <= value < math.inf:
        raise ConfigError(
            f"{name} must be finite and at least {composition.MIN_NOISE_MULTIPLIER}; got {value}. Smaller "
            "values protect nothing"
        )


def joint_noise_multiplier(noise_multiplier: float, snr_noise_multiplier: float) -> float:
    """Return the noise multiplier of a step that also releases its noised norm: 1/√(1/σ² + 1/t²).

    >>> round(joint_noise_multiplier(3.0, 4.0), 6)
    2.4
    """
    return 1 / math.hypot(1 / noise_multiplier, 1 / snr_noise_multiplier)


def scoring_event(score_noise_multiplier: float, num_scores: int) -> dp_event.DpEvent:
    """Return the event of `num_scores` noised counts on the same held-out records."""
    if num_scores == 0:
        return dp_event.NoOpDpEvent()
    return dp_event.GaussianDpEvent(score_noise_multiplier / math.sqrt(num_scores))


def training_event(
    mechanism: Mechanism,
    *,
    num_steps: int | None = None,
    snr_noise_multiplier: float | None = None,
    num_snr_steps: int = 1,
) -> dp_event.DpEvent:
    """Return the event of `num_steps` steps, of which `num_snr_steps` also release their noised norm.

    `num_steps` is by default the number that `mechanism` charges. Without `snr_noise_multiplier`, no norm is
    released."""
    num_steps = mechanism.num_steps_charged if num_steps is None else num_steps
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
    *,
    num_steps: int | None = None,
    snr_noise_multiplier: float | None = None,
    num_snr_steps: int = 1,
) -> float:
    """Return ε of one trial at the mechanism's δ by PLD: its model, noised counts and noised norm together.

    Guarantee: ε holds for adding or removing one record. Records of training and of scoring are disjoint,
    split by record id in the same way in all trials, so the larger of the two costs counts. See the module.

    Args:
      mechanism: the mechanism of the training.
      score_noise_multiplier: s of each noised count; None without noised counts.
      num_scores: k, the number of noised counts.
      num_steps: number of charged steps; all steps of `mechanism` by default.
      snr_noise_multiplier: t of the noised norm; None without a noised norm.
      num_snr_steps: number of charged releases of a noised norm.

    >>> mechanism = Mechanism(num_records_public=1000, sampling_prob=0.01, group_size=4, l2_clip_norm=1.0,
    ...     noise_multiplier=1.0, num_steps=1000, target_delta=1e-5)
    >>> [round(trial_epsilon(mechanism, noise, 2), 2) for noise in (5.0, 2.0)]
    [1.83, 2.94]
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
    cached_epsilon = mechanism.epsilon(num_steps) if snr_noise_multiplier is None else None
    epsilon = composition.epsilon_pld(training, delta) if cached_epsilon is None else cached_epsilon
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
    """Return `mechanism` with noise that keeps the whole trial, noised releases included, within the target.

    Raises:
      ConfigError: the noised counts by themselves exceed the target, or no noise multiplier meets it.
    """
    trial = mechanism.calibrated(target_epsilon, cache_folder=cache_folder)
    if not trial.is_private:
        return trial
    _check_event(mechanism, score_noise_multiplier, snr_noise_multiplier)
    if score_noise_multiplier is not None:
        scoring_epsilon = composition.epsilon_pld(
            scoring_event(score_noise_multiplier, num_scores), mechanism.target_delta
        )
        if scoring_epsilon > target_epsilon:
            raise ConfigError(
                f"the noised scores must cost no more than target_epsilon = {target_epsilon:g}; "
                f"{num_scores} counts at score_noise_multiplier = {score_noise_multiplier:g} cost "
                f"{scoring_epsilon:.3g}. Raise score_noise_multiplier"
            )
    if snr_noise_multiplier is None:
        return trial
    mechanism_target, num_snr_steps = target_epsilon, 1 + (mechanism.num_restart_steps or 0)
    for _ in range(_CALIBRATION_TRIES):
        epsilon = trial_epsilon(trial, snr_noise_multiplier=snr_noise_multiplier, num_snr_steps=num_snr_steps)
        if epsilon <= target_epsilon:
            return trial
        mechanism_target *= (1 - composition.CALIBRATION_TOLERANCE) * target_epsilon / epsilon
        trial = mechanism.calibrated(mechanism_target, cache_folder=cache_folder)
    raise ConfigError(
        f"no noise multiplier could be verified for target_epsilon = {target_epsilon:g} with "
        f"snr_noise_multiplier = {snr_noise_multiplier:g}; raise one of them, or leave the SNR out"
    )


def _check_event(mechanism: Mechanism, *noises: float | None) -> None:
    """Raise ConfigError if a noised release is requested whose steps the proofs do not cover."""
    if not mechanism.rules.plain_event and any(noise is not None for noise in noises):
        raise ConfigError(
            "noised scores and a noised SNR require Poisson-sampled Gaussian steps, accounted for adding or "
            f"removing one record; {mechanism.method} has other steps. Leave noised scores and SNR out"
        )


def public_share(noised: int, num_scored_public: int) -> float:
    """Return a noised count divided by a **public** number of records; it may be outside [0, 1].

    >>> public_share(90, 100)
    0.9
    """
    if num_scored_public < 1:
        raise ConfigError(f"num_scored_public must be at least 1; got {num_scored_public}")
    return noised / num_scored_public


def split_public(num_records_public: int, share: float) -> tuple[int, int]:
    """Return the public numbers of slots for records to train on and for a share of held-out records.

    >>> split_public(1000, 0.1)
    (900, 100)
    """
    held = max(1, round(num_records_public * share)) if share else 0
    return num_records_public - held, held
