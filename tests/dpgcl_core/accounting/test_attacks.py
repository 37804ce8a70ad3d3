"""What an attack can gain: the Gaussian's closed form, attacks that are run, and what (ε, δ) alone gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpgcl_core.accounting.attacks import FALSE_POSITIVE_RATE, AttackBounds
from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.accounting.tuning.cost import open_cost, sealed_cost
from dpgcl_core.accounting.tuning.laws import TruncatedNegativeBinomial
from dpgcl_core.accounting.tuning.trial_release import TrialClass


@pytest.mark.parametrize(("noise", "num_steps"), [(1.0, 1), (4.0, 9), (0.5, 1), (40.0, 25)])
def test_without_sampling_the_bounds_are_the_gaussians(noise: float, num_steps: int) -> None:
    mu = math.sqrt(num_steps) / noise
    bounds = AttackBounds.from_steps([{StepClass(1.0, noise): num_steps}])
    advantage = 2 * stats.norm.cdf(mu / 2) - 1
    rate = stats.norm.cdf(stats.norm.ppf(FALSE_POSITIVE_RATE) + mu)
    assert advantage <= bounds.attack_advantage <= advantage + 2e-4 * (1 + num_steps)
    assert rate <= bounds.attack_true_positive_rate <= rate * 1.01
    assert bounds.gaussian_mu == pytest.approx(mu)


def test_several_noises_without_sampling_are_one_gaussian() -> None:
    bounds = AttackBounds.from_steps([{StepClass(1.0, 3.0): 2, StepClass(1.0, 4.0): 4}])
    assert bounds.gaussian_mu == pytest.approx(math.sqrt(2 / 9 + 4 / 16))
    assert AttackBounds.from_steps([{StepClass(1.0, 3.0): 2, StepClass(0.5, 4.0): 4}]).gaussian_mu is None


@pytest.mark.parametrize("is_swapped", [False, True])
def test_the_best_test_of_sampled_steps_reaches_the_bounds_and_does_not_pass_them(is_swapped: bool) -> None:
    q, noise, num_steps, num = 0.2, 0.8, 4, 200_000
    generator = np.random.default_rng(5)
    samples = generator.normal(0, noise, (2, num, num_steps))
    samples[1] += generator.random((num, num_steps)) < q  # the record took part
    ratio = np.log1p(q * np.expm1((2 * samples - 1) / (2 * noise**2))).sum(axis=2)
    out, took_part = (-ratio[1], -ratio[0]) if is_swapped else (ratio[0], ratio[1])
    bounds = AttackBounds.from_steps([{StepClass(q, noise): num_steps}])
    threshold = np.quantile(out, 1 - FALSE_POSITIVE_RATE)
    rate, error = float(np.mean(took_part > threshold)), 4 * math.sqrt(0.2 / num)
    advantage = float(np.mean(took_part > 0) - np.mean(out > 0))
    assert advantage <= bounds.attack_advantage + error
    assert rate <= bounds.attack_true_positive_rate + error
    if not is_swapped:  # the direction of the larger profile
        assert advantage >= bounds.attack_advantage - error
        assert rate >= bounds.attack_true_positive_rate - error


def test_from_epsilon_alone_the_published_region_results() -> None:
    epsilon, delta, t = 1.5, 0.01, FALSE_POSITIVE_RATE
    bounds = AttackBounds.from_epsilon(epsilon, delta)
    assert bounds.attack_advantage == pytest.approx(
        (math.expm1(epsilon) + 2 * delta) / (math.exp(epsilon) + 1)
    )
    assert bounds.attack_true_positive_rate == pytest.approx(math.exp(epsilon) * t + delta)
    assert AttackBounds.from_epsilon(50.0, 1e-6).attack_true_positive_rate <= 1
    assert AttackBounds.from_epsilon(1000.0, 1e-6).attack_advantage == pytest.approx(1)


def test_a_sweep_counts_all_its_trials() -> None:
    trial = TrialClass(sampling_prob=0.01, noise_multiplier=1.0, num_steps=100, count=10)
    bounds = AttackBounds.from_cost(open_cost([trial], delta=1e-5))
    assert bounds == AttackBounds.from_steps([{StepClass(0.01, 1.0): 1000}])
    cost = open_cost([trial], delta=1e-5)
    assert bounds is not None
    assert cost.tuned_epsilon is not None
    assert bounds.attack_advantage < AttackBounds.from_epsilon(cost.tuned_epsilon, 1e-5).attack_advantage


def test_scored_records_are_a_case_of_their_own() -> None:
    trial = TrialClass(
        sampling_prob=0.01, noise_multiplier=4.0, num_steps=10, score_noise_multiplier=1.0, num_scores=1
    )
    bounds = AttackBounds.from_cost(open_cost([trial], delta=1e-5))
    assert bounds is not None
    assert bounds.attack_advantage == pytest.approx(2 * stats.norm.cdf(0.5) - 1, abs=1e-3)
    assert bounds.gaussian_mu is None


def test_a_sealed_sweep_has_the_bounds_of_its_epsilon() -> None:
    trial = TrialClass(sampling_prob=0.01, noise_multiplier=1.0, num_steps=100)
    cost = sealed_cost([trial], law=TruncatedNegativeBinomial.from_mean(5, eta=1.0), delta=1e-5)
    assert cost.tuned_epsilon is not None
    assert AttackBounds.from_cost(cost) == AttackBounds.from_epsilon(cost.tuned_epsilon, 1e-5)


def test_text_rounds_up() -> None:
    bounds = AttackBounds(attack_advantage=0.25301, attack_true_positive_rate=0.0480001)
    assert "by at most 25.4 %; at 1 % false positives at most 4.9 % true positives" in bounds.text()
