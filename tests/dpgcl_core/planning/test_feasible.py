"""Feasible plans: what is listed keeps every budget, what is recommended, and what relaxing would do."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from dpgcl_core.accounting.composition import epsilon_of_steps
from dpgcl_core.errors import ConfigError
from dpgcl_core.planning import PlanRequest, enough_records, feasible, verified
from dpgcl_core.planning.feasible import WORTH_MORE_STEPS, Plan
from dpgcl_core.planning.root_finding import solve
from dpgcl_core.planning.snr import ENOUGH_TRAINING_SNR


def wanted(**changes: Any) -> PlanRequest:
    """Few points on 60,000 records, some of what is asked for replaced."""
    asked = {
        "num_records_public": 60_000,
        "target_epsilon": 8.0,
        "num_weights": 8280,
        "batch_sizes": (512, 2048),
        "num_steps": (100, 400),
        "group_sizes": (4, 16, 64),
        "records_per_second": 1000.0,
    }
    return PlanRequest(**{**asked, **changes})


def size(plan: Plan) -> int:
    return int(plan.mechanism.group_size)


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, ...]:
    return feasible(wanted()).plans


def test_every_point_of_the_grid_is_listed_once(plans: tuple[Plan, ...]) -> None:
    listed = {(p.mechanism.expected_batch_size, p.mechanism.num_steps, size(p)) for p in plans}
    assert len(listed) == len(plans) == 2 * 2 * 3


@pytest.mark.ci
def test_no_listed_noise_spends_more_than_epsilon_nor_much_less(plans: tuple[Plan, ...]) -> None:
    for plan in (plan for plan in plans if size(plan) == 16):
        mechanism = plan.mechanism
        spent = epsilon_of_steps(
            sampling_prob=mechanism.sampling_prob,
            noise_multiplier=mechanism.noise_multiplier,
            num_steps=mechanism.num_steps,
            delta=mechanism.target_delta,
        )
        assert 8 * 0.95 < spent <= 8


def test_verified_plan_has_the_noise_of_a_training(plans: tuple[Plan, ...]) -> None:
    plan = verified(wanted(), plans[0])
    assert 8 * 0.995 <= plan.mechanism.epsilon() <= 8
    assert plan.mechanism.noise_multiplier <= plans[0].mechanism.noise_multiplier
    assert (plan.is_verified, plans[0].is_verified) == (True, False)


def test_hours_and_epochs_follow_from_records(plans: tuple[Plan, ...]) -> None:
    plan = next(p for p in plans if p.mechanism.num_steps == 400 and p.mechanism.expected_batch_size == 512)
    assert plan.hours == pytest.approx(512 * 400 / 1000 / 3600)
    assert plan.num_epochs == pytest.approx(512 * 400 / 60_000)


def test_recommended_group_is_the_largest_with_enough_snr() -> None:
    answer = feasible(wanted())
    chosen = answer.recommended
    assert chosen is not None
    assert chosen in answer.plans
    assert chosen.snr.over_training >= ENOUGH_TRAINING_SNR
    larger = [plan for plan in answer.plans if size(plan) > size(chosen)]
    assert all(plan.snr.over_training < ENOUGH_TRAINING_SNR for plan in larger)


def test_recommended_has_the_most_steps_of_the_plans_near_the_best() -> None:
    grid = {"group_sizes": (4,), "batch_sizes": (2048, 4096), "num_steps": (100, 200)}
    answer = feasible(wanted(target_epsilon=1.0, **grid))
    chosen = answer.recommended
    assert chosen is not None
    best = max(plan.snr.over_training for plan in answer.plans)
    near = [p for p in answer.plans if p.snr.over_training >= (1 - WORTH_MORE_STEPS) * best]
    assert len(near) > 1
    assert chosen.mechanism.num_steps == max(plan.mechanism.num_steps for plan in near)
    assert answer.plans[0].snr.over_training == best


def test_without_enough_snr_the_group_of_the_best_snr_is_recommended() -> None:
    chosen = feasible(wanted(target_epsilon=0.5, num_weights=10**8)).recommended
    assert chosen is not None
    assert size(chosen) == 4


def test_budget_of_time_leaves_out_what_takes_longer() -> None:
    answer = feasible(wanted(most_hours=0.1))
    assert {plan.mechanism.expected_batch_size * plan.mechanism.num_steps for plan in answer.plans} == {
        512 * 100,
        512 * 400,
        2048 * 100,
    }
    assert answer.refusals == {"takes more hours than the budget": 3}


def test_budget_of_memory_leaves_out_groups_that_take_more() -> None:
    memory = {4: 1e9, 16: 2e9, 64: 3e9}
    answer = feasible(wanted(memory_bytes=memory, most_bytes=2e9))
    assert {size(plan) for plan in answer.plans} == {4, 16}


def test_hours_that_it_says_are_enough_and_the_least() -> None:
    answer = feasible(wanted(most_hours=0.001))
    assert (answer.plans, answer.recommended) == ((), None)
    (sentence,) = answer.relax
    found = re.search(r"Allow ([\d.]+) hours or use ([\d.]+) times the throughput", sentence)
    assert found is not None
    hours, times = map(float, found.groups())
    assert feasible(wanted(most_hours=hours * 1.01)).plans
    assert not feasible(wanted(most_hours=hours * 0.99)).plans
    assert feasible(wanted(most_hours=0.001, records_per_second=1000 * times * 1.01)).plans


def test_memory_and_groups_to_relax_are_told() -> None:
    memory = {4: 2.0 * 2**30, 16: 3.0 * 2**30, 64: 4.0 * 2**30}
    (sentence,) = feasible(wanted(memory_bytes=memory, most_bytes=2**30)).relax
    assert "at least 2 GiB, 2 times the memory that it has" in sentence
    (sentence,) = feasible(wanted(group_sizes=(4096,))).relax
    assert "B = 2048 allows at most 2048" in sentence
    (sentence,) = feasible(wanted(group_sizes=(1024,), sampling="records")).relax
    assert "B = 2048 allows at most 512" in sentence
    assert "B = 4096" in sentence


def test_epsilon_that_no_noise_is_needed_for_is_told() -> None:
    answer = feasible(wanted(target_epsilon=500.0, batch_sizes=(8,), num_steps=(2,), group_sizes=(4,)))
    assert not answer.plans
    assert "Use at most ε = " in answer.relax[0]


def test_records_that_would_be_enough_are_enough() -> None:
    asked = wanted(target_epsilon=0.5, num_weights=2_000_000, group_sizes=(4,), num_steps=(400,))
    plan = feasible(asked).recommended
    assert plan is not None
    assert plan.snr.is_too_small
    number = enough_records(asked, plan)
    assert number is not None
    batch = (plan.mechanism.expected_batch_size,)
    there = feasible(dataclasses.replace(asked, num_records_public=number, batch_sizes=batch)).recommended
    assert there is not None
    assert there.snr.over_training == pytest.approx(0.3, rel=0.05)


def test_method_without_groups_has_one_plan_per_batch() -> None:
    answer = feasible(wanted(method="dp_clip", num_steps=(100,)))
    assert [plan.mechanism.group_size for plan in answer.plans] == ["batch", "batch"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon must be positive"),
        ({"num_records_public": 2}, "num_records_public must be at least 3"),
        ({"num_weights": 0}, "num_weights must be at least 1"),
        ({"batch_sizes": (0,)}, "batch_sizes must be positive"),
        ({"most_hours": -1.0}, "most_hours must be positive"),
        ({"records_per_second": None, "most_hours": 1.0}, "needs a throughput"),
        ({"method": "logit_dp"}, "clip one gradient per disjoint group"),
        ({"method": "dp_gc"}, "unknown method"),
        ({"target_delta": 0.5}, "target_delta must be at most"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wanted(**changes)


@pytest.mark.parametrize("power", [-3.0, -0.2, 0.5, 4.0])
def test_solve_ends_within_the_range(power: float) -> None:
    found = solve(lambda x: x**power, high=5.0, share=0.01, start=1.0, slope=power, lower=1e-4, upper=1e5)
    assert 4.95 <= found**power <= 5.0


def test_solve_stays_below_a_jump() -> None:
    def jumps(x: float) -> float:
        return 10.0 if x < 3 else 1.0

    found = solve(jumps, high=5.0, share=0.01, start=1.0, slope=-1.0, lower=0.1, upper=100.0)
    assert 3 <= found < 3.01


def test_solve_refuses_what_it_cannot_reach() -> None:
    with pytest.raises(ConfigError, match="no value from"):
        solve(lambda x: 7 + 1 / x, high=5.0, share=0.01, start=1.0, slope=-1.0, lower=0.1, upper=100.0)
