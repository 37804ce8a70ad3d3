"""Privacy filters: admission at the cap, settling, and the adaptive choice that a PLD total lets through."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from dpgcl_core.accounting.composition import epsilon_pld, epsilon_rdp
from dpgcl_core.accounting.filters import FILTER_ORDERS, QuotaFilter, RdpFilter, StepClass, composed_event
from dpgcl_core.errors import ConfigError

STEPS = StepClass(sampling_prob=0.01, noise_multiplier=1.0)
QUIET = StepClass(sampling_prob=0.02, noise_multiplier=2.0)

# The counterexample: a first Gaussian, then by its output one of two continuations.
CAP = (1.0, 1e-3)
FIRST = StepClass(sampling_prob=1.0, noise_multiplier=1 / 0.25)
FLAT = StepClass(sampling_prob=1.0, noise_multiplier=1 / 0.297)
SPIKED = StepClass(sampling_prob=0.002, noise_multiplier=1 / 3.90)


def _delta_of_subsampled_gaussian(q: float, mu: float, epsilon: np.ndarray) -> np.ndarray:
    """Exact δ(ε) of (1−q)·N(0,1) + q·N(μ,1) against N(0,1), by the threshold where the ratio is e^ε."""
    inside = (np.exp(epsilon) - (1 - q)) / q
    with np.errstate(divide="ignore", invalid="ignore"):
        threshold = np.where(inside > 0, np.log(np.maximum(inside, 1e-300)) / mu + mu / 2, -np.inf)
    return (1 - q) * norm.sf(threshold) + q * norm.sf(threshold - mu) - np.exp(epsilon) * norm.sf(threshold)


def _delta_of_adaptive_choice(*continuations: StepClass) -> float:
    """Exact δ(1) of the first Gaussian and then, for every output, the worse of the continuations."""
    mu = 1 / FIRST.noise_multiplier
    outputs = np.linspace(-12, 12, 400_001)
    left = CAP[0] - (mu * outputs - mu**2 / 2)  # ε that the first output leaves
    deltas = [
        _delta_of_subsampled_gaussian(c.sampling_prob, 1 / c.noise_multiplier, left) for c in continuations
    ]
    return float(np.trapezoid(norm.pdf(outputs - mu) * np.max(deltas, axis=0), outputs))


@pytest.mark.parametrize("second", [FLAT, SPIKED])
def test_pld_total_admits_either_continuation(second: StepClass) -> None:
    assert epsilon_pld(composed_event({FIRST: 1, second: 1}), CAP[1], grid=1e-3) <= CAP[0]
    assert _delta_of_adaptive_choice(second) <= CAP[1]


def test_adaptive_choice_breaks_the_pld_total() -> None:
    assert _delta_of_adaptive_choice(FLAT, SPIKED) == pytest.approx(1.69e-3, abs=1e-5)


def test_rdp_filter_refuses_the_adaptive_choice() -> None:
    for order in (None, 8.0, 12.0, 20.0):
        budget = RdpFilter(*CAP, order)
        spent = budget.cost(FIRST, 1)
        assert budget.admits(0.0, spent)
        assert not all(budget.admits(spent, budget.cost(second, 1)) for second in (FLAT, SPIKED))


@pytest.mark.usefixtures("coarse_losses")
def test_quota_filter_refuses_the_adaptive_choice_at_the_same_cap() -> None:
    with pytest.raises(ConfigError, match="all quotas together reach"):
        QuotaFilter(*CAP, quotas={FIRST: 1, FLAT: 1, SPIKED: 1})


@pytest.mark.usefixtures("coarse_losses")
def test_quota_filter_covers_the_adaptive_choice_at_a_cap_that_pays_for_it() -> None:
    budget = QuotaFilter(epsilon=1.5, delta=CAP[1], quotas={FIRST: 1, FLAT: 1, SPIKED: 1})
    mu, left = 1 / FIRST.noise_multiplier, budget.epsilon_of_quotas
    outputs = np.linspace(-12, 12, 400_001)
    losses = left - (mu * outputs - mu**2 / 2)
    deltas = [
        _delta_of_subsampled_gaussian(c.sampling_prob, 1 / c.noise_multiplier, losses) for c in (FLAT, SPIKED)
    ]
    assert np.trapezoid(norm.pdf(outputs - mu) * np.max(deltas, axis=0), outputs) <= CAP[1]
    assert budget.admits({FIRST: 1}, FLAT, 1)
    assert budget.admits({FIRST: 1}, SPIKED, 1)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.05, 1e-6), (1.0, 1e-5), (8.0, 1e-5), (40.0, 1e-9)])
def test_rdp_budget_converts_to_the_cap_and_not_above(epsilon: float, delta: float) -> None:
    budget = RdpFilter(epsilon, delta)
    assert budget.epsilon(budget.rdp_budget) <= epsilon
    assert budget.epsilon(budget.rdp_budget) == pytest.approx(epsilon, rel=1e-6)
    assert budget.order in FILTER_ORDERS


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_rdp_order_fitted_to_the_steps_loses_nothing_against_rdp_composition(epsilon: float) -> None:
    budget = RdpFilter.for_steps(epsilon, 1e-5, [STEPS])
    admitted = int(budget.rdp_budget / budget.cost(STEPS, 1))
    assert epsilon_rdp(composed_event({STEPS: admitted}), 1e-5) <= epsilon
    assert epsilon_rdp(composed_event({STEPS: admitted + 1}), 1e-5) > 0.999 * epsilon


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("steps", [STEPS, QUIET, StepClass(1.0, 5.0)])
def test_rdp_order_by_default_admits_a_fair_share(epsilon: float, steps: StepClass) -> None:
    default, fitted = RdpFilter(epsilon, 1e-5), RdpFilter.for_steps(epsilon, 1e-5, [steps])
    shares = [each.rdp_budget / each.cost(steps, 1) for each in (default, fitted)]
    assert shares[0] > 0.3 * shares[1]


def test_rdp_order_given_is_kept() -> None:
    assert RdpFilter(8.0, 1e-5, order=4.0).order == 4.0


def test_rdp_cost_is_linear_in_steps_and_never_below_the_accountant() -> None:
    from dp_accounting.rdp import RdpAccountant

    budget = RdpFilter(8.0, 1e-5, order=5.0)
    truth = float(RdpAccountant([5.0]).compose(composed_event({STEPS: 700})).rdp[0])
    assert truth <= budget.cost(STEPS, 700) <= truth * (1 + 1e-9)
    assert budget.cost(STEPS, 0) == 0.0


def test_rdp_admission_is_exact_at_the_budget() -> None:
    budget = RdpFilter(2.0, 1e-5)
    half = budget.rdp_budget / 2
    above = math.nextafter(half, math.inf)
    assert budget.admits(half, budget.rdp_budget - half)
    assert not budget.admits(budget.rdp_budget, 5e-324)  # a float sum would swallow it
    assert not budget.admits(above, above)


def test_rdp_admission_of_many_small_reservations_stays_within_the_cap() -> None:
    budget = RdpFilter(1.0, 1e-5)
    one, spent, count = budget.cost(STEPS, 1), 0.0, 0
    while budget.admits(spent, one):
        spent, count = spent + one, count + 1
    assert epsilon_rdp(composed_event({STEPS: count}), 1e-5) <= 1.0
    assert budget.total_cost({STEPS: count}) == pytest.approx(spent, rel=1e-12)


def test_rdp_settling_frees_exactly_the_unexecuted_steps() -> None:
    budget = RdpFilter(8.0, 1e-5)
    whole = int(budget.rdp_budget / budget.cost(STEPS, 1))
    assert not budget.admits(budget.total_cost({STEPS: whole}), budget.cost(STEPS, 100))
    assert budget.admits(budget.total_cost({STEPS: whole - 100}), budget.cost(STEPS, 100))


def test_rdp_overflow_is_refused() -> None:
    budget = RdpFilter(1.0, 1e-5)
    assert not budget.admits(0.0, math.inf)
    assert budget.epsilon(math.inf) == math.inf


@pytest.mark.parametrize("bad", [math.nan, -1e-9])
def test_rdp_filter_refuses_values_that_are_no_cost(bad: float) -> None:
    budget = RdpFilter(1.0, 1e-5)
    for call in (
        lambda: budget.admits(bad, 0.0),
        lambda: budget.admits(0.0, bad),
        lambda: budget.epsilon(bad),
    ):
        with pytest.raises(ConfigError, match="at least 0"):
            call()


@pytest.mark.parametrize(
    ("epsilon", "delta", "order", "message"),
    [
        (0.0, 1e-5, None, "epsilon must be positive"),
        (math.inf, 1e-5, None, "epsilon must be positive"),
        (math.nan, 1e-5, None, "epsilon must be positive"),
        (1.0, 0.0, None, "delta must be in"),
        (1.0, 1.0, None, "delta must be in"),
        (1.0, math.nan, None, "delta must be in"),
        (1.0, 1e-5, 1.0, "order must be finite"),
        (1.0, 1e-5, math.nan, "order must be finite"),
        (1.0, 1e-5, 2.0, "order 2 leaves no RDP budget for epsilon = 1 "),
    ],
)
def test_rdp_filter_states_what_is_wrong(
    epsilon: float, delta: float, order: float | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RdpFilter(epsilon, delta, order)


def test_quota_filter_keeps_every_class_to_its_own_quota() -> None:
    budget = QuotaFilter(2.0, 1e-5, {STEPS: 300, QUIET: 200})
    assert budget.admits({}, STEPS, 300)
    assert budget.admits({STEPS: 300}, QUIET, 200)
    assert not budget.admits({STEPS: 300}, STEPS, 1)
    assert not budget.admits({QUIET: 0}, STEPS, 301)  # another class's unused steps do not count


def test_quota_filter_refuses_a_class_without_a_quota() -> None:
    budget = QuotaFilter(2.0, 1e-5, {STEPS: 300})
    assert not budget.admits({}, QUIET, 1)
    assert not budget.admits({QUIET: 1}, STEPS, 1)  # nor goes on after one was charged


def test_quota_filter_composes_all_quotas_by_pld() -> None:
    quotas = {STEPS: 300, QUIET: 200}
    expected = epsilon_pld(composed_event(quotas), 1e-5)
    assert QuotaFilter(2.0, 1e-5, quotas).epsilon_of_quotas == pytest.approx(expected, abs=1e-6)
    assert expected > epsilon_pld(composed_event({STEPS: 300}), 1e-5)


def test_quotas_cannot_be_changed_afterwards() -> None:
    quotas = {STEPS: 300}
    budget = QuotaFilter(2.0, 1e-5, quotas)
    quotas[STEPS] = 10**6
    assert not budget.admits({}, STEPS, 301)
    with pytest.raises(TypeError):
        budget.quotas[STEPS] = 10**6  # type: ignore[index]


@pytest.mark.parametrize("bad", [-1, 1.5, True])
def test_steps_must_be_whole_numbers(bad: object) -> None:
    with pytest.raises(ConfigError, match="num_steps must be a whole number"):
        QuotaFilter(2.0, 1e-5, {STEPS: 300}).admits({}, STEPS, bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_steps must be a whole number"):
        RdpFilter(2.0, 1e-5).cost(STEPS, bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("q", "sigma"), [(0.0, 1.0), (1.1, 1.0), (math.nan, 1.0), (0.1, 0.0), (0.1, math.nan), (0.1, math.inf)]
)
def test_step_class_out_of_range_is_refused(q: float, sigma: float) -> None:
    with pytest.raises(ConfigError, match="must be"):
        StepClass(q, sigma)
