"""What each strategy of tuning leaves for the model within one total, and what it is expected to gain."""

from __future__ import annotations

import dp_accounting
import pytest
from dp_accounting.pld import pld_privacy_accountant

from dpgcl_core.accounting.composition import calibrate_noise_multiplier
from dpgcl_core.accounting.tuning.cost import TrialClass, sealed_cost
from dpgcl_core.accounting.tuning.laws import TruncatedNegativeBinomial
from dpgcl_core.planning.tuning_strategies import GAINS, SMALL_SHARES, StrategyGains, strategy_outlooks
from tests.dpgcl_core.planning.strategy_gains import STRATEGIES, UNTUNED, cells, gains_of, regret

Q, T, DELTA, TOTAL, NUM_SETTINGS = 0.02, 200, 1e-5, 3.0, 6
SHARES = {"none": 0.0, "open": 1.0, "sealed": 0.9, "public": 0.2, "scaling": 0.8}
EXAMPLE = StrategyGains(tuning=4.0, per_log_epsilon=1.0, shares=SHARES)
TRIAL = TrialClass(sampling_prob=Q, noise_multiplier=1.0, num_steps=T)


@pytest.fixture(scope="module")
def left() -> dict[str, float]:
    """ε of the model's training, by strategy."""
    outlooks = strategy_outlooks(
        TRIAL, total_epsilon=TOTAL, delta=DELTA, num_settings=NUM_SETTINGS, gains=EXAMPLE
    )
    return {outlook.strategy: outlook.model_epsilon for outlook in outlooks}


def noise_at(epsilon: float) -> float:
    return calibrate_noise_multiplier(
        sampling_prob=Q, num_steps=T, target_epsilon=epsilon, target_delta=DELTA
    ).noise_multiplier


def composed_epsilon(*noises: float) -> float:
    """ε of one training at each noise, by dp_accounting alone."""
    accountant = pld_privacy_accountant.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for noise in noises:
        step = dp_accounting.PoissonSampledDpEvent(Q, dp_accounting.GaussianDpEvent(noise))
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, T))
    return float(accountant.get_epsilon(DELTA))


def test_untuned_and_public_leave_the_whole_total(left: dict[str, float]) -> None:
    assert (left["none"], left["public"]) == (TOTAL, TOTAL)


def test_open_trainings_compose_to_the_total(left: dict[str, float]) -> None:
    assert 0.97 * TOTAL < composed_epsilon(*[noise_at(left["open"])] * NUM_SETTINGS) <= 1.005 * TOTAL


def test_small_trainings_and_the_model_compose_to_the_total(left: dict[str, float]) -> None:
    small = [noise_at(share * TOTAL) for share in SMALL_SHARES for _ in range(NUM_SETTINGS)]
    assert 0.97 * TOTAL < composed_epsilon(*small, noise_at(left["scaling"])) <= 1.005 * TOTAL


def test_sealed_choice_costs_the_total(left: dict[str, float]) -> None:
    trial = TrialClass(sampling_prob=Q, noise_multiplier=noise_at(left["sealed"]), num_steps=T)
    law = TruncatedNegativeBinomial.from_mean(float(NUM_SETTINGS), eta=1.0)
    cost = sealed_cost([trial], law=law, delta=DELTA, bound="profile").tuned_epsilon
    assert cost is not None
    assert 0.97 * TOTAL < cost <= 1.005 * TOTAL


def test_gain_weighs_tuning_against_the_epsilon_that_it_takes() -> None:
    assert EXAMPLE.of("public", 1.0) == pytest.approx(0.8)
    assert EXAMPLE.of("open", 1 / 2.718281828) == pytest.approx(3.0)


def test_outlooks_begin_with_the_largest_gain() -> None:
    outlooks = strategy_outlooks(TRIAL, total_epsilon=TOTAL, delta=DELTA, num_settings=2, gains=EXAMPLE)
    gains = [outlook.gain for outlook in outlooks]
    assert gains == sorted(gains, reverse=True)
    assert {outlook.strategy for outlook in outlooks} == set(SHARES)


def test_strategy_that_no_noise_fits_is_left_out() -> None:
    outlooks = strategy_outlooks(TRIAL, total_epsilon=0.005, delta=DELTA, num_settings=50, gains=EXAMPLE)
    assert {outlook.strategy for outlook in outlooks} >= {"none", "public"}
    assert "scaling" not in {outlook.strategy for outlook in outlooks}


def test_constants_are_those_of_the_committed_tables() -> None:
    measured = gains_of(cells())
    assert GAINS.tuning == pytest.approx(measured.tuning, abs=0.005)
    assert GAINS.per_log_epsilon == pytest.approx(measured.per_log_epsilon, abs=0.005)
    assert dict(GAINS.shares) == pytest.approx(measured.shares, abs=0.005)


def test_recommendation_holds_on_a_table_that_it_was_not_calibrated_on() -> None:
    """Docs/planning.md states these regrets: what the recommended strategy loses to the best one."""
    all_cells = cells()
    regrets = {}
    for table in {cell.table for cell in all_cells}:
        others = gains_of([cell for cell in all_cells if cell.table != table])
        held_out = [cell for cell in all_cells if cell.table == table]
        regrets[table] = max(regret(cell, others) for cell in held_out)
        untuned = max(
            max(cell.scores[name] for name in STRATEGIES) - cell.scores[UNTUNED] for cell in held_out
        )
        assert regrets[table] < untuned / 2
    assert max(regrets.values()) < 0.245  # "at most 0.24 points"
