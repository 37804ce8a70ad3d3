"""Trials with noised releases: their classes, and the best of K with a score of held-out records, exactly."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
from scipy.stats import norm

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.accounting.tuning.cost import TrialClass, open_cost, sealed_cost, sealed_threshold_cost
from dpgcl_core.accounting.tuning.laws import TruncatedNegativeBinomial
from dpgcl_core.accounting.tuning.trial_release import cases_of
from dpgcl_core.errors import ConfigError
from tests.dpgcl_core import best_of_k as exact

PLAIN = TrialClass(sampling_prob=0.1, noise_multiplier=2.0, num_steps=10)
SNR = {"joint_noise_multiplier": 1.0, "num_joint_steps": 2}
LAW = TruncatedNegativeBinomial.from_mean(10, eta=1)
PMF = exact.negative_binomial_pmf(1.0, 0.1, length=400)  # 1e-18 is left out
DELTA = 1e-3


def _with(**fields: float) -> TrialClass:
    return TrialClass(**{**vars(PLAIN), **fields})  # type: ignore[arg-type]


def test_steps_are_those_of_both_classes() -> None:
    assert PLAIN.steps_of_one == {StepClass(0.1, 2.0): 10}
    assert _with(**SNR).steps_of_one == {StepClass(0.1, 2.0): 8, StepClass(0.1, 1.0): 2}
    assert _with(joint_noise_multiplier=1.0, num_joint_steps=10).steps_of_one == {StepClass(0.1, 1.0): 10}


def test_counts_are_a_case_of_their_own() -> None:
    scored = _with(score_noise_multiplier=3.0, num_scores=2)
    assert scored.steps_of_one == PLAIN.steps_of_one
    assert cases_of([PLAIN, PLAIN]) == [[PLAIN.steps_of_one] * 2]
    assert cases_of([PLAIN, scored]) == [[PLAIN.steps_of_one] * 2, [{}, {StepClass(1.0, 3.0): 2}]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_joint_steps": 1}, "joint_noise_multiplier and num_joint_steps must be set together"),
        ({"joint_noise_multiplier": 1.0}, "joint_noise_multiplier and num_joint_steps must be set together"),
        ({"joint_noise_multiplier": 2.5, "num_joint_steps": 1}, "at most noise_multiplier"),
        (
            {"joint_noise_multiplier": 1.0, "num_joint_steps": 11},
            "num_joint_steps must be at most num_steps = 10; got 11",
        ),
        ({"num_scores": 2}, "score_noise_multiplier and num_scores must be set together"),
        ({"score_noise_multiplier": 0.01, "num_scores": 2}, "at least 0.1"),
        ({"num_scores": -1}, "num_scores must be a whole number of at least 0"),
    ],
)
def test_trial_refuses_half_a_release(fields: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _with(**fields)


@lru_cache(maxsize=4)
def _models_and_scores(case: str) -> tuple[np.ndarray, np.ndarray]:
    """The laws of one trial on neighbouring data sets, over (model, noised count) by ascending count.

    A model is one step's rounded output; the number of held-out records that it answers correctly depends
    on it. The record is one that is trained on, or one that is scored and answered correctly by good models.
    """
    edges = np.linspace(-9, 10, 60)
    middles = (edges[1:] + edges[:-1]) / 2
    without = np.diff(norm.cdf(edges / 2.0))
    sampled = np.diff(0.9 * norm.cdf(edges / 2.0) + 0.1 * norm.cdf((edges - 1) / 2.0))
    models = (sampled, without) if case == "trained on" else (without, without)
    cells = np.linspace(-12, 14, 200)
    laws = []
    for law, more in zip(models, (1.0, 0.0), strict=True):
        counts = np.clip(middles, -2, 2) + (more * (middles > 0) if case == "scored" else 0.0)
        noised = np.diff(norm.cdf((cells[None] - counts[:, None]) / 3.0), axis=1)
        laws.append((law[:, None] * noised).T.reshape(-1))  # [counts, models]: ascending in the count
    return laws[0] / laws[0].sum(), laws[1] / laws[1].sum()


ONE_STEP = TrialClass(
    sampling_prob=0.1, noise_multiplier=2.0, num_steps=1, score_noise_multiplier=3.0, num_scores=1
)


@lru_cache(maxsize=4)
def _best_of_k(case: str) -> list[np.ndarray]:
    return [exact.best_of_k(law, PMF) for law in _models_and_scores(case)]


def _true_delta(case: str, epsilon: float) -> float:
    p, q = _best_of_k(case)
    return max(exact.exact_delta(p, q, epsilon), exact.exact_delta(q, p, epsilon))


@pytest.mark.parametrize("case", ["trained on", "scored"])
@pytest.mark.parametrize("bound", ["profile", "pointwise", "ps22"])
def test_best_of_k_by_a_noised_count_is_never_worse_than_the_bound(bound: str, case: str) -> None:
    cost = sealed_cost([ONE_STEP], law=LAW, delta=DELTA, bound=bound)
    assert cost.tuned_epsilon is not None
    assert _true_delta(case, cost.tuned_epsilon) <= DELTA


@pytest.mark.usefixtures("coarse_losses")
def test_bound_of_training_alone_is_no_bound_for_a_scored_record() -> None:
    forgotten = TrialClass(sampling_prob=0.1, noise_multiplier=2.0, num_steps=1)
    cost = sealed_cost([forgotten], law=LAW, delta=DELTA, bound="pointwise")
    assert cost.tuned_epsilon is not None
    assert _true_delta("scored", cost.tuned_epsilon) > DELTA


@pytest.mark.usefixtures("coarse_losses")
@pytest.mark.parametrize(("score_noise", "name"), [(50.0, "training"), (1.0, "scoring")])
def test_every_cost_is_the_larger_of_the_two_cases(score_noise: float, name: str) -> None:
    both = _with(score_noise_multiplier=score_noise, num_scores=2, **SNR)
    alone = {
        "training": _with(**SNR),
        "scoring": TrialClass(sampling_prob=1.0, noise_multiplier=score_noise, num_steps=2),
    }[name]
    for cost in (
        lambda trial: open_cost([trial], delta=DELTA),
        lambda trial: sealed_cost([trial], law=LAW, delta=DELTA),
        lambda trial: sealed_cost([trial], law=LAW, delta=DELTA, bound="ps22"),
        lambda trial: sealed_threshold_cost([trial], halting_prob=0.2, delta=DELTA),
    ):
        found, expected = cost(both), cost(alone)
        for field in ("tuned_epsilon", "training_epsilon", "rdp_epsilon"):
            values = [getattr(each, field) or 0.0 for each in (found, expected)]  # a threshold has no RDP
            assert values[0] == pytest.approx(values[1], rel=1e-9)
        assert "the larger of the ε for training and the ε for scoring" in found.theorem


@pytest.mark.usefixtures("coarse_losses")
def test_candidate_without_scores_costs_a_scored_record_nothing() -> None:
    """Half of the draws release no count: δ at ε is half of that of a count, at the training's own cost."""
    scored = _with(score_noise_multiplier=0.5, num_scores=1)
    cost = sealed_threshold_cost([PLAIN, scored], halting_prob=0.5, delta=DELTA)
    always = sealed_threshold_cost([scored], halting_prob=0.5, delta=DELTA)
    assert cost.training_epsilon < always.training_epsilon
    gaussian = TrialClass(sampling_prob=1.0, noise_multiplier=0.5, num_steps=1)
    assert cost.training_epsilon == pytest.approx(
        open_cost([gaussian], delta=2 * DELTA).training_epsilon, abs=1e-6
    )


@pytest.mark.usefixtures("coarse_losses")
def test_open_trials_add_up_in_each_case() -> None:
    three = _with(score_noise_multiplier=2.0, num_scores=2, count=3)
    expected = TrialClass(sampling_prob=1.0, noise_multiplier=2.0 / math.sqrt(6), num_steps=1)
    found = open_cost([three], delta=DELTA).tuned_epsilon
    assert found == pytest.approx(open_cost([expected], delta=DELTA).tuned_epsilon, abs=1e-3)
