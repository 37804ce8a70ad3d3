"""Noised counts and norms: how far they move, how much noise they have, what they cost."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from dpgcl_core.accounting.composition import epsilon_pld
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.release.noised_counts import (
    calibrated,
    joint_noise_multiplier,
    noised_count,
    noised_norm,
    public_share,
    scoring_event,
    split_public,
    training_event,
    trial_epsilon,
)

MECHANISM = Mechanism(
    num_records_public=1000,
    sampling_prob=0.05,
    group_size=4,
    l2_clip_norm=1.0,
    noise_multiplier=2.0,
    num_steps=10,
    target_delta=1e-5,
)


def _gaussian_epsilon(multiplier: float, delta: float) -> float:
    """ε of the Gaussian mechanism by its exact formula (Balle and Wang 2018, Theorem 8)."""

    def exact_delta(epsilon: float) -> float:
        a = 1 / (2 * multiplier)
        return float(
            norm.cdf(a - epsilon * multiplier) - math.exp(epsilon) * norm.cdf(-a - epsilon * multiplier)
        )

    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if exact_delta(middle) > delta else (low, middle)
    return high


def test_noised_count_has_the_stated_noise() -> None:
    generator = np.random.default_rng(0)
    noises = np.array([noised_count(50, 5.0, generator) - 50 for _ in range(20_000)])
    std = math.sqrt(25 + 1 / 12)  # of the Gaussian, and of rounding it
    assert abs(noises.mean()) < 5 * std / math.sqrt(len(noises))
    assert abs(noises.std() - std) < 5 * std / math.sqrt(2 * len(noises))
    assert abs(noises.std() - 4.5) > 5 * std / math.sqrt(2 * len(noises))


def test_noise_of_a_count_does_not_depend_on_the_count() -> None:
    """So the released number moves exactly as far as the count does, and has no digits to tell more."""
    drawn = [noised_count(count, 3.0, np.random.default_rng(7)) - count for count in (0, 1, 10**6)]
    assert len(set(drawn)) == 1


def test_noised_norm_has_the_stated_noise() -> None:
    generator = np.random.default_rng(0)
    noises = np.array([noised_norm(3.0, 2.0, 0.7, generator) - 3.0 for _ in range(20_000)])
    assert abs(noises.std() - 1.4) < 5 * 1.4 / math.sqrt(2 * len(noises))


@pytest.mark.parametrize("multiplier", [0.0, 0.05, -1.0, math.inf, math.nan])
def test_noise_that_protects_nothing_is_refused(multiplier: float) -> None:
    with pytest.raises(ConfigError, match=r"score_noise_multiplier must be finite and at least 0.1"):
        noised_count(1, multiplier, np.random.default_rng(0))


def test_public_share_divides_by_the_public_number_alone() -> None:
    assert public_share(30, 120) == 0.25
    with pytest.raises(ConfigError, match="at least 1"):
        public_share(30, 0)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.999])
def test_public_split_loses_no_record(share: float) -> None:
    trained, held = split_public(999, share)
    assert trained + held == 999
    assert held == pytest.approx(999 * share, abs=1)


@pytest.mark.parametrize("num_scores", [1, 2, 20])
def test_counts_cost_what_the_gaussian_formula_says(num_scores: int) -> None:
    exact = _gaussian_epsilon(5.0 / math.sqrt(num_scores), 1e-5)
    reached = epsilon_pld(scoring_event(5.0, num_scores), 1e-5)
    assert exact <= reached + 1e-9
    assert reached == pytest.approx(exact, abs=1e-3)


def test_disjoint_trial_costs_the_larger_of_training_and_scoring() -> None:
    training = MECHANISM.epsilon()
    little, much = trial_epsilon(MECHANISM, 50.0, 2), trial_epsilon(MECHANISM, 3.0, 2)
    assert little == pytest.approx(training, abs=1e-6)
    assert much == pytest.approx(_gaussian_epsilon(3.0 / math.sqrt(2), 1e-5), abs=2e-3)
    assert much > training


def test_trial_without_noised_releases_costs_its_training() -> None:
    assert trial_epsilon(MECHANISM) == MECHANISM.epsilon()
    assert trial_epsilon(MECHANISM, num_steps=70) == MECHANISM.epsilon(70)


def test_trial_without_guarantee_has_no_finite_epsilon() -> None:
    bare = dataclasses.replace(MECHANISM, noise_multiplier=0.0, l2_clip_norm=math.inf)
    assert trial_epsilon(bare, 5.0, 2) == math.inf


def test_noised_norm_of_every_step_is_a_step_with_the_joint_noise() -> None:
    snr = 2.0
    joint = dataclasses.replace(MECHANISM, noise_multiplier=1 / math.sqrt(1 / 4 + 1 / snr**2))
    event = training_event(MECHANISM, snr_noise_multiplier=snr, num_snr_steps=MECHANISM.num_steps)
    assert epsilon_pld(event, 1e-5) == pytest.approx(joint.epsilon(), abs=1e-6)


def test_noised_norm_without_sampling_costs_one_more_step() -> None:
    """At q = 1 and σ = t the joint step costs what two steps cost: sampling hides nothing."""
    whole = dataclasses.replace(MECHANISM, sampling_prob=1.0, noise_multiplier=4.0, num_steps=3)
    apart = whole.epsilon(4)
    assert trial_epsilon(whole, snr_noise_multiplier=4.0) == pytest.approx(apart, abs=1e-3)
    assert whole.epsilon() + 1e-2 < trial_epsilon(whole, snr_noise_multiplier=4.0)


@pytest.mark.usefixtures("coarse_losses")
def test_repeated_first_step_is_charged_again() -> None:
    once, thrice = (trial_epsilon(MECHANISM, snr_noise_multiplier=1.0, num_snr_steps=num) for num in (1, 3))
    assert once + 1e-2 < thrice


def test_gradient_and_norm_move_together_by_no_more_than_the_joint_sensitivity() -> None:
    """(S/(σΔ), ‖S‖/(tΔ)) over pairs of sums at distance Δ, the worst ones along S included."""
    sigma, snr, sensitivity = 1.3, 0.8, 2.0
    generator = np.random.default_rng(1)
    bound = 1 / joint_noise_multiplier(sigma, snr)
    largest = 0.0
    for length, along in itertools.product((0.0, 1.0, 30.0), (True, False)):
        for _ in range(200):
            total = length * generator.normal(size=5)
            step = total + 1e-12 if along else generator.normal(size=5)
            other = total + sensitivity * step / np.linalg.norm(step)
            moved = np.linalg.norm(other - total) / (sigma * sensitivity)
            change = abs(np.linalg.norm(other) - np.linalg.norm(total)) / (snr * sensitivity)
            largest = max(largest, math.hypot(moved, change))
    assert largest <= bound + 1e-9
    assert largest > 0.999 * bound


@pytest.mark.usefixtures("coarse_losses")
def test_calibration_keeps_the_whole_trial_in_the_target() -> None:
    target = MECHANISM.epsilon() * 0.9  # close to the σ at which the search begins: the test is quick
    plain = MECHANISM.calibrated(target)
    found = calibrated(MECHANISM, target, score_noise_multiplier=50.0, num_scores=2, snr_noise_multiplier=2.0)
    reached = trial_epsilon(found, 50.0, 2, snr_noise_multiplier=2.0)
    assert 0.95 * target < reached <= target
    assert trial_epsilon(plain, 50.0, 2, snr_noise_multiplier=2.0) > target


@pytest.mark.usefixtures("coarse_losses")
def test_calibration_refuses_scores_that_cost_more_than_the_target() -> None:
    target = MECHANISM.epsilon() * 0.9
    with pytest.raises(
        ConfigError, match=r"must cost no more than target_epsilon = .*Raise score_noise_multiplier"
    ):
        calibrated(MECHANISM, target, score_noise_multiplier=1.0, num_scores=2)
