"""Tuning cost: reference values, exact best-of-K on small mechanisms, and wrong bounds that are caught."""

from __future__ import annotations

import json
import math
import secrets
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant
from scipy.stats import chisquare

from dpgcl_core.accounting.composition import epsilon_pld, epsilon_rdp
from dpgcl_core.accounting.filters import StepClass, composed_event
from dpgcl_core.accounting.tuning import bounds as selection_bounds
from dpgcl_core.accounting.tuning.bounds import (
    ln_c_star,
    papernot_steinke_bound,
    papernot_steinke_rdp,
    pointwise_bound,
    profile_bound,
    threshold_bound,
)
from dpgcl_core.accounting.tuning.cost import (
    NEIGHBORING_RELATION,
    TrialClass,
    TuningCost,
    not_accounted,
    open_cost,
    sealed_cost,
    sealed_threshold_cost,
)
from dpgcl_core.accounting.tuning.laws import (
    BinomialTrials,
    PoissonTrials,
    TrialCountLaw,
    TruncatedNegativeBinomial,
    TruncatedTrials,
)
from dpgcl_core.accounting.tuning.profile import PrivacyLoss, PrivacyProfile
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.numbers import ADD_OR_REMOVE_ONE
from tests.dpgcl_core import best_of_k as exact

S1 = TrialClass(sampling_prob=0.01, noise_multiplier=1.0, num_steps=1000)
S2 = TrialClass(sampling_prob=2048 / 55_000, noise_multiplier=0.97, num_steps=1200)
DELTAS = {S1: 1e-5, S2: 1 / (55_000 * math.log(55_000))}
GEOMETRIC = TruncatedNegativeBinomial.from_mean(10, eta=1)


def _profile_of(p: np.ndarray, q: np.ndarray) -> PrivacyProfile:
    """The exact profile of a mechanism on finitely many outcomes, with and without the record."""

    def loss(p: np.ndarray, q: np.ndarray) -> PrivacyLoss:
        finite = (p > 0) & (q > 0)
        losses = np.log(p[finite]) - np.log(q[finite])
        return PrivacyLoss.build(losses, p[finite], float(np.sum(p[(p > 0) & (q == 0)])))

    return PrivacyProfile(remove=loss(p, q), add=loss(q, p))


# Every law beside its probabilities, written down independently.
LAWS: dict[str, tuple[TrialCountLaw, np.ndarray]] = {
    "geometric": (GEOMETRIC, exact.negative_binomial_pmf(1.0, 0.1)),
    "logarithmic": (
        TruncatedNegativeBinomial.from_mean(10, eta=0),
        exact.negative_binomial_pmf(0.0, 0.0269182596),
    ),
    "eta -0.5": (
        TruncatedNegativeBinomial(eta=-0.5, gamma=0.05),
        exact.negative_binomial_pmf(-0.5, 0.05),
    ),
    "eta 3": (TruncatedNegativeBinomial(eta=3.0, gamma=0.3), exact.negative_binomial_pmf(3.0, 0.3)),
    "poisson": (PoissonTrials(mean_trials=6.0), exact.poisson_pmf(6.0)),
    "binomial": (BinomialTrials(max_trials=12, prob=0.4), exact.binomial_pmf(12, 0.4)),
    "binomial 0.8": (BinomialTrials(max_trials=6, prob=0.8), np.pad(exact.binomial_pmf(6, 0.8), (0, 9))),
    "capped": (
        TruncatedTrials(law=GEOMETRIC, max_trials=15),
        exact.negative_binomial_pmf(1.0, 0.1, length=15),
    ),
    "capped logarithmic": (
        TruncatedTrials(law=TruncatedNegativeBinomial(eta=0.0, gamma=0.05), max_trials=6),
        np.pad(exact.negative_binomial_pmf(0.0, 0.05, length=6), (0, 9)),
    ),
    "capped at 2": (
        TruncatedTrials(law=TruncatedNegativeBinomial(eta=3.0, gamma=0.3), max_trials=2),
        np.pad(exact.negative_binomial_pmf(3.0, 0.3, length=2), (0, 13)),
    ),
    "capped poisson": (
        TruncatedTrials(law=PoissonTrials(mean_trials=6.0), max_trials=4),
        np.pad(exact.poisson_pmf(6.0, 4) / exact.poisson_pmf(6.0, 4).sum(), (0, 11)),
    ),
}
CAPPED = ("capped", "capped logarithmic", "capped at 2")
MECHANISMS = {
    "gaussian": exact.subsampled_gaussian(1.0, 2.0),
    "subsampled": exact.subsampled_gaussian(0.05, 0.6),
    "response": exact.randomised_response(0.7, 1e-4),
}
# The share of a "trap" is the probability of the best-scored outcomes: those that speak most against the
# record, with the outcomes that speak most for it just below. That is nearly the worst order there is.
TRAPS = (0.1, 0.2, 0.3, 0.5)
SCORES = ("loss grows with score", "loss falls with score", "shuffled", *TRAPS)
SMALL_DELTAS = (1e-2, 1e-4, 1e-6)


def _in_score_order(mechanism: str, score: str | float) -> tuple[np.ndarray, np.ndarray]:
    p, q = MECHANISMS[mechanism]
    with np.errstate(divide="ignore"):
        order = np.argsort(p / q, kind="stable")
    if isinstance(score, float):
        order = np.roll(order, -int(np.searchsorted(np.cumsum(q[order]), score)) - 1)
    elif score == "loss falls with score":
        order = order[::-1]
    elif score == "shuffled":
        order = np.random.default_rng(3).permutation(order)
    return p[order], q[order]


@lru_cache(maxsize=256)
def _best_of_k(mechanism: str, score: str | float, name: str) -> tuple[np.ndarray, np.ndarray]:
    pmf = exact.fixed_pmf(10) if name == "fixed" else LAWS[name][1]
    p, q = _in_score_order(mechanism, score)
    return exact.best_of_k(p, pmf), exact.best_of_k(q, pmf)


def _true_delta(mechanism: str, name: str, epsilon: float) -> float:
    """δ at ε of the best of K under the worst of the scores."""
    return max(exact.exact_delta(*_best_of_k(mechanism, score, name), epsilon) for score in SCORES)


# ---- the reference table --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trial", "expected"), [(S1, 6.18774498), pytest.param(S2, 40.5251183, marks=pytest.mark.ci)]
)
def test_open_cost_matches_reference(trial: TrialClass, expected: float) -> None:
    ten = TrialClass(**{**_fields(trial), "count": 10})
    assert open_cost([ten], delta=DELTAS[trial]).tuned_epsilon == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("trial", "expected"), [(S1, 6.71275666), (S2, 43.3993573)])
def test_open_rdp_figure_matches_reference(trial: TrialClass, expected: float) -> None:
    steps = {StepClass(trial.sampling_prob, trial.noise_multiplier): 10 * trial.num_steps}
    assert epsilon_rdp(composed_event(steps), DELTAS[trial]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("trial", "eta", "bound", "expected", "tolerance"),
    [
        (S1, 1, "ps22", 4.10327066, 1e-6),
        (S2, 1, "ps22", 16.4682822, 1e-6),
        (S1, 0, "profile", 2.704514, 5e-4),
        (S2, 0, "profile", 13.182666, 5e-4),
        (S1, 1, "profile", 2.870965, 5e-4),
        (S2, 1, "profile", 13.801403, 5e-4),
        (S1, 1, "pointwise", 2.7285, 3e-3),
        pytest.param(S2, 1, "pointwise", 13.590, 3e-3, marks=pytest.mark.ci),
    ],
)
def test_sealed_cost_matches_reference(
    trial: TrialClass, eta: float, bound: str, expected: float, tolerance: float
) -> None:
    law = TruncatedNegativeBinomial.from_mean(10, eta=eta)
    cost = sealed_cost([trial], law=law, delta=DELTAS[trial], bound=bound)
    assert cost.tuned_epsilon == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(("trial", "lower"), [(S1, 2.6547), pytest.param(S2, 13.440, marks=pytest.mark.ci)])
def test_sealed_bounds_are_ordered_above_the_certified_lower_bound(trial: TrialClass, lower: float) -> None:
    costs = [
        sealed_cost([trial], law=GEOMETRIC, delta=DELTAS[trial], bound=bound).tuned_epsilon
        for bound in ("pointwise", "profile", "ps22")
    ]
    assert all(low < high for low, high in pairwise([lower, *costs]))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_no_other_split_of_the_profile_has_a_smaller_shift(mechanism: str) -> None:
    """The comparison with Koskela, Redberg and Wang (2024) in docs/theory/tuning.md."""
    profile = _profile_of(*MECHANISMS[mechanism])
    for gamma in (0.02, 0.1, 0.5):
        smallest = selection_bounds.ln_c_star(profile, gamma / (1 - gamma))
        splits = [*np.linspace(0, 5, 501), smallest]
        shifts = [math.log(math.exp(e) + profile.delta(e) * (1 - gamma) / gamma) for e in splits if e < 700]
        assert min(shifts) >= smallest - 1e-9
        assert smallest > 0


@pytest.mark.parametrize(("eta", "gamma"), [(0, 0.0269182596), (0.5, 0.0625), (1, 0.1)])
def test_gamma_of_mean_matches_reference(eta: float, gamma: float) -> None:
    assert TruncatedNegativeBinomial.from_mean(10, eta=eta).gamma == pytest.approx(gamma, abs=5e-11)


# ---- never below the truth ------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", LAWS)
def test_profile_bound_is_never_below_the_truth(name: str, mechanism: str) -> None:
    profile = _profile_of(*MECHANISMS[mechanism])
    for delta in SMALL_DELTAS:
        epsilon = profile_bound(profile, LAWS[name][0], delta)
        assert math.isinf(epsilon) or _true_delta(mechanism, name, epsilon) <= delta * (1 + 1e-6)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", LAWS)
def test_pointwise_bound_is_never_below_the_truth(name: str, mechanism: str) -> None:
    profile = _profile_of(*MECHANISMS[mechanism])
    for delta in SMALL_DELTAS:
        epsilon = pointwise_bound(profile, LAWS[name][0], delta)
        assert math.isinf(epsilon) or _true_delta(mechanism, name, epsilon) <= delta * (1 + 1e-6)


@pytest.mark.parametrize("name", LAWS)
def test_pointwise_bound_is_at_most_the_profile_bound(name: str) -> None:
    law, _ = LAWS[name]
    profile = _profile_of(*MECHANISMS["gaussian"])
    for delta in SMALL_DELTAS:
        assert pointwise_bound(profile, law, delta) <= profile_bound(profile, law, delta) + 0.02


@pytest.mark.parametrize("name", ["geometric", "logarithmic", "eta 3", "capped", "binomial", "poisson"])
def test_pointwise_bound_is_close_to_the_worst_score(name: str) -> None:
    """The truth reaches 97 % of the bound, so a bound that forgets a few percent is caught above."""
    profile = _profile_of(*MECHANISMS["gaussian"])
    bound = pointwise_bound(profile, LAWS[name][0], 1e-4)
    assert _true_delta("gaussian", name, 0.97 * bound) > 1e-4


@pytest.mark.parametrize("mechanism", ["gaussian", "subsampled"])
@pytest.mark.parametrize("name", ["geometric", "logarithmic", "eta -0.5", "eta 3", "poisson", *CAPPED])
def test_papernot_steinke_is_never_below_the_truth(name: str, mechanism: str) -> None:
    p, q = MECHANISMS[mechanism]
    orders = np.array([1.5, 2.0, 3.0, 5.0, 8.0, 16.0, 32.0])
    rdp = np.array([exact.renyi(p, q, order) for order in orders])
    profile = _profile_of(p, q)
    for delta in SMALL_DELTAS:
        epsilon = papernot_steinke_bound(orders, rdp, LAWS[name][0], delta, profile)
        assert math.isfinite(epsilon)
        assert _true_delta(mechanism, name, epsilon) <= delta


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("halting_prob", [0.05, 0.3, 1.0])
def test_threshold_bound_is_never_below_the_truth(halting_prob: float, mechanism: str) -> None:
    profile = _profile_of(*MECHANISMS[mechanism])
    for score in SCORES:
        laws = _in_score_order(mechanism, score)
        for share in (0.25, 0.5, 0.75):
            misses = int(share * len(laws[0]))
            released = [exact.first_above(law, misses, halting_prob) for law in laws]
            for delta in SMALL_DELTAS:
                epsilon = threshold_bound(profile, halting_prob, delta)
                if math.isfinite(epsilon):
                    assert exact.exact_delta(*released, epsilon) <= delta * (1 + 1e-6)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("halting_prob", "max_trials"), [(0.05, 4), (0.05, 60), (0.3, 2)])
def test_capped_threshold_bound_is_never_below_the_truth(
    halting_prob: float, max_trials: int, mechanism: str
) -> None:
    profile = _profile_of(*MECHANISMS[mechanism])
    pmf = exact.negative_binomial_pmf(1.0, halting_prob, length=max_trials)
    for score in SCORES:
        laws = _in_score_order(mechanism, score)
        for share in (0.25, 0.5, 0.75):
            misses = int(share * len(laws[0]))
            released = [exact.first_above_of_k(law, misses, pmf) for law in laws]
            for delta in SMALL_DELTAS:
                epsilon = threshold_bound(profile, halting_prob, delta, max_trials)
                if math.isfinite(epsilon):
                    assert exact.exact_delta(*released, epsilon) <= delta * (1 + 1e-6)


@pytest.mark.parametrize("bound", ["profile", "pointwise", "ps22"])
def test_cap_on_the_number_of_trials_costs_nothing(bound: str) -> None:
    capped = TruncatedTrials(law=GEOMETRIC, max_trials=12)
    whole, cut = (sealed_cost([S1], law=law, delta=1e-5, bound=bound) for law in (GEOMETRIC, capped))
    assert cut.tuned_epsilon is not None
    assert cut.tuned_epsilon < whole.tuned_epsilon


# ---- wrong bounds are caught ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAWS)
def test_best_trials_own_epsilon_is_no_bound(name: str) -> None:
    profile = _profile_of(*MECHANISMS["gaussian"])
    assert _true_delta("gaussian", name, profile.epsilon(1e-4)) > 1e-4


@pytest.mark.parametrize("name", LAWS)
def test_delta_over_the_mean_alone_is_no_bound(name: str) -> None:
    profile = _profile_of(*MECHANISMS["gaussian"])
    claimed = profile.epsilon(1e-4 / LAWS[name][0].mean)
    assert _true_delta("gaussian", name, claimed) > 1e-4


def test_bound_of_the_law_given_at_most_m_is_none_for_the_smaller_of_both() -> None:
    """min(K, M) puts the mass beyond M onto M itself: another law, which the bound does not cover."""
    pmf = exact.negative_binomial_pmf(1.0, 0.01)
    smaller = np.append(pmf[:4], pmf[4:].sum())
    law = TruncatedTrials(law=TruncatedNegativeBinomial(eta=1.0, gamma=0.01), max_trials=4)
    mechanism = exact.randomised_response(0.01, 1e-3)
    claimed = profile_bound(_profile_of(*mechanism), law, 2.6e-3)
    released = [exact.best_of_k(each[::-1], smaller) for each in mechanism]
    given = [exact.best_of_k(each[::-1], pmf[:5] / pmf[:5].sum()) for each in mechanism]
    assert exact.exact_delta(*given, claimed) <= 2.6e-3 < exact.exact_delta(*released, claimed)


def test_shift_without_delta_over_the_mean_is_no_bound() -> None:
    mechanism = exact.randomised_response(0.01, 1e-3)
    profile = _profile_of(*mechanism)
    claimed = profile.epsilon(1e-3) + 2 * ln_c_star(profile, 0.1 / 0.9)
    released = [exact.best_of_k(law, LAWS["geometric"][1]) for law in mechanism]
    assert exact.exact_delta(*released, claimed) > 1e-3


@pytest.mark.parametrize("name", ["geometric", "eta 3"])
def test_exponent_one_in_place_of_one_plus_eta_is_no_bound(name: str) -> None:
    law = LAWS[name][0]
    profile = _profile_of(*MECHANISMS["gaussian"])
    claimed = profile.epsilon(1e-4 / law.mean) + ln_c_star(profile, law.gamma / (1 - law.gamma))
    assert _true_delta("gaussian", name, claimed) > 1e-4


def test_fixed_number_of_trials_breaks_the_bound_of_a_random_one() -> None:
    profile = _profile_of(*MECHANISMS["gaussian"])
    assert _true_delta("gaussian", "fixed", profile_bound(profile, GEOMETRIC, 1e-4)) > 1e-4


def test_larger_mean_breaks_the_bound_of_a_smaller_one() -> None:
    profile = _profile_of(*MECHANISMS["gaussian"])
    claimed = profile_bound(profile, TruncatedNegativeBinomial.from_mean(2, eta=1), 1e-4)
    assert _true_delta("gaussian", "geometric", claimed) > 1e-4


def test_threshold_without_its_shift_is_no_bound() -> None:
    claimed = _profile_of(*MECHANISMS["gaussian"]).epsilon(0.05 * 1e-4)
    laws = _in_score_order("gaussian", 0.1)
    truths = [
        exact.exact_delta(*[exact.first_above(law, misses, 0.05) for law in laws], claimed)
        for misses in range(20, 120, 5)
    ]
    assert max(truths) > 1e-4


def test_threshold_without_the_halting_factor_is_no_bound() -> None:
    mechanism = exact.randomised_response(0.01, 1e-3)
    profile = _profile_of(*mechanism)
    released = [exact.first_above(law, 3, 0.05) for law in mechanism]
    claimed = profile.epsilon(1e-3) + ln_c_star(profile, 0.05 / 0.95)
    assert exact.exact_delta(*released, claimed) > 1e-3


# ---- profiles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trial", [S1, TrialClass(sampling_prob=1.0, noise_multiplier=5.0, num_steps=20)])
def test_profile_agrees_with_dp_accounting(trial: TrialClass) -> None:
    distribution = pld.from_gaussian_mechanism(
        trial.noise_multiplier, sampling_prob=trial.sampling_prob, value_discretization_interval=1e-4
    ).self_compose(trial.num_steps)
    profile = PrivacyProfile.from_steps(trial.steps_of_one)
    for epsilon in (0.0, 0.5, 2.0, 4.0):
        expected = float(distribution.get_delta_for_epsilon(epsilon))
        assert profile.delta(epsilon) == pytest.approx(expected, rel=1e-6, abs=1e-13)
    assert profile.epsilon(1e-5) == pytest.approx(distribution.get_epsilon_for_delta(1e-5), abs=1e-6)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_profile_of_a_pair_is_exact(mechanism: str) -> None:
    pair = MECHANISMS[mechanism]
    profile = _profile_of(*pair)
    for epsilon in (0.0, 0.1, 0.69, 2.0):
        assert profile.delta(epsilon) == pytest.approx(exact.exact_delta(*pair, epsilon), abs=1e-12)


@pytest.mark.parametrize("delta", [0.1, 1e-3, 1e-6])
def test_profile_epsilon_inverts_delta(delta: float) -> None:
    profile = _profile_of(*MECHANISMS["gaussian"])
    epsilon = profile.epsilon(delta)
    assert profile.delta(epsilon) <= delta * (1 + 1e-9)
    assert epsilon == 0 or profile.delta(epsilon * (1 - 1e-6)) > delta


def test_profile_below_its_infinite_loss_has_no_epsilon() -> None:
    assert _profile_of(*MECHANISMS["response"]).epsilon(0.99e-4) == math.inf


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_largest_image_bounds_every_event(mechanism: str) -> None:
    profile = _profile_of(*MECHANISMS[mechanism])
    for score in SCORES:
        for first, second in (pair := _in_score_order(mechanism, score), pair[::-1]):
            tails = np.cumsum(first[::-1]), np.cumsum(second[::-1])
            assert np.all(tails[1] <= profile.largest_image(tails[0]) + 1e-12)


def test_candidates_of_different_privacy_have_the_mixture_of_their_profiles() -> None:
    pairs = [MECHANISMS["gaussian"], MECHANISMS["subsampled"]]
    weights = [0.3, 0.7]
    joint = [
        np.concatenate([w * pair[side] for w, pair in zip(weights, pairs, strict=True)]) for side in (0, 1)
    ]
    mixed = PrivacyProfile.mixture([_profile_of(*pair) for pair in pairs], weights)
    for epsilon in (0.0, 0.5, 1.5):
        assert mixed.delta(epsilon) == pytest.approx(exact.exact_delta(*joint, epsilon), abs=1e-12)


def test_mixture_is_sharper_than_the_worst_candidate() -> None:
    quiet = TrialClass(sampling_prob=0.01, noise_multiplier=2.0, num_steps=100)
    alone = sealed_cost([S1], law=GEOMETRIC, delta=1e-5)
    drawn = sealed_cost([S1, quiet], law=GEOMETRIC, delta=1e-5, probabilities=[0.05, 0.95])
    assert drawn.tuned_epsilon < alone.tuned_epsilon
    assert drawn.training_epsilon < alone.training_epsilon
    assert drawn.rdp_epsilon < alone.rdp_epsilon


def test_rdp_bound_of_a_drawn_candidate_is_above_the_pointwise_one() -> None:
    trials = [S1, TrialClass(sampling_prob=0.01, noise_multiplier=2.0, num_steps=100)]
    tuned = sealed_cost(trials, law=GEOMETRIC, delta=1e-5, bound="ps22", probabilities=[0.5, 0.5])
    assert (
        tuned.tuned_epsilon
        > sealed_cost(
            trials, law=GEOMETRIC, delta=1e-5, bound="pointwise", probabilities=[0.5, 0.5]
        ).tuned_epsilon
    )


@pytest.mark.parametrize("weights", [[0.5], [0.5, 0.6], [1.0, 0.0], [math.nan, 0.5], [1.5, -0.5]])
def test_probabilities_of_candidates_must_be_a_law(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="probabilit"):
        sealed_cost([S1, S2], law=GEOMETRIC, delta=1e-5, probabilities=weights)


# ---- Papernot and Steinke -------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0, 3.0])
def test_papernot_steinke_agrees_with_dp_accounting(eta: float) -> None:
    step = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.0))
    event = RepeatAndSelectDpEvent(dp_event.SelfComposedDpEvent(step, 1000), mean=10, shape=eta)
    law = TruncatedNegativeBinomial.from_mean(10, eta=eta)
    ours = sealed_cost([S1], law=law, delta=1e-5, bound="ps22").tuned_epsilon
    assert ours == pytest.approx(RdpAccountant().compose(event).get_epsilon(1e-5), abs=1e-6)


def test_papernot_steinke_for_poisson_is_tighter_than_dp_accounting() -> None:
    """Its δ̂ comes from the PLD in place of the RDP curve."""
    step = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.0))
    event = RepeatAndSelectDpEvent(dp_event.SelfComposedDpEvent(step, 1000), mean=10, shape=math.inf)
    published = RdpAccountant().compose(event).get_epsilon(1e-5)
    ours = sealed_cost([S1], law=PoissonTrials(mean_trials=10), delta=1e-5, bound="ps22").tuned_epsilon
    assert 0.5 * published < ours < published


def test_papernot_steinke_refuses_laws_without_a_theorem() -> None:
    orders, rdp = np.array([2.0, 4.0]), np.array([0.1, 0.2])
    with pytest.raises(ConfigError, match="covers the laws tnb and poisson"):
        papernot_steinke_rdp(orders, rdp, LAWS["binomial"][0])


# ---- laws of K ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAWS)
def test_law_has_the_probabilities_of_its_definition(name: str) -> None:
    law, pmf = LAWS[name]
    assert [law.pmf(k) for k in range(13)] == pytest.approx(list(pmf[:13]), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", LAWS)
def test_law_has_the_slope_and_mean_of_its_generating_function(name: str) -> None:
    law, pmf = LAWS[name]
    x, counts = np.linspace(0, 1, 7), np.arange(len(pmf))
    slopes = x[:, None] ** np.maximum(counts - 1, 0) @ (counts * pmf)
    assert law.derivative(x) == pytest.approx(slopes, rel=1e-6)
    assert law.mean == pytest.approx(float(counts @ pmf), rel=1e-6)


@pytest.mark.parametrize("eta", [-0.9, -0.5, 0.0, 1e-6, 0.5, 1.0, 7.0, 100.0])
@pytest.mark.parametrize("mean", [1.0, 1.001, 2.0, 37.5, 1e5])
def test_mean_is_met(eta: float, mean: float) -> None:
    assert TruncatedNegativeBinomial.from_mean(mean, eta=eta).mean == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("name", LAWS)
def test_quantile_inverts_the_cumulated_probabilities(name: str) -> None:
    law, pmf = LAWS[name]
    for k in (0, 1, 3, 7):
        below = float(np.sum(pmf[:k]))
        for uniform in (below + 0.01 * pmf[k], below + 0.99 * pmf[k]):
            if pmf[k] > 0:
                assert law._quantile(int(uniform * 2**60) << 196) == k


@pytest.mark.parametrize("name", LAWS)
def test_draws_follow_the_law(name: str) -> None:
    """Fails by chance once in ten million runs; a law with a mean off by a tenth fails nearly always."""
    law, pmf = LAWS[name]
    num_draws, num_cells = 3000, 10
    draws = np.minimum([law.draw() for _ in range(num_draws)], num_cells)
    expected = np.append(pmf[:num_cells], pmf[num_cells:].sum()) * num_draws
    observed = np.bincount(draws, minlength=num_cells + 1)
    possible = expected > 0
    assert not observed[~possible].any()
    scaled = expected[possible] * num_draws / expected[possible].sum()
    assert chisquare(observed[possible], scaled).pvalue > 1e-7


def test_draw_uses_the_operating_systems_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(secrets, "randbits", lambda bits: asked.append(bits) or 0)
    assert GEOMETRIC.draw() == 1
    assert asked == [256]


def test_largest_draw_ends() -> None:
    assert 500 < GEOMETRIC._quantile(2**256 - 1) < 5000
    assert LAWS["capped"][0]._quantile(2**256 - 1) == 15


def test_mean_one_is_a_single_trial_at_its_own_cost() -> None:
    law = TruncatedNegativeBinomial.from_mean(1, eta=1)
    cost = sealed_cost([S1], law=law, delta=1e-5)
    assert law.draw() == 1
    assert cost.tuned_epsilon == pytest.approx(cost.training_epsilon, abs=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TruncatedNegativeBinomial.from_mean(0.99, eta=1), "mean number of trials"),
        (lambda: TruncatedNegativeBinomial.from_mean(math.nan, eta=1), "mean number of trials"),
        (lambda: TruncatedNegativeBinomial.from_mean(1e7, eta=1), "mean number of trials"),
        (lambda: TruncatedNegativeBinomial.from_mean(10, eta=-1), "eta must be"),
        (lambda: TruncatedNegativeBinomial.from_mean(10, eta=math.nan), "eta must be"),
        (lambda: TruncatedNegativeBinomial(eta=1, gamma=0.0), "gamma must be"),
        (lambda: TruncatedNegativeBinomial(eta=1, gamma=1.5), "gamma must be"),
        (lambda: TruncatedNegativeBinomial(eta=1, gamma=1e-9), "mean number of trials"),
        (lambda: PoissonTrials(mean_trials=0.5), "mean number of trials"),
        (lambda: BinomialTrials(max_trials=10, prob=0.05), "mean number of trials"),
        (lambda: BinomialTrials(max_trials=10, prob=1.0), "a fixed K has no discount"),
        (lambda: BinomialTrials(max_trials=0, prob=0.5), "max_trials must be"),
        (lambda: TruncatedTrials(law=GEOMETRIC, max_trials=0), "max_trials must be"),
        (lambda: TruncatedTrials(law=PoissonTrials(mean_trials=1), max_trials=1), "mean number of trials"),
    ],
)
def test_law_out_of_range_is_refused(build, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        build()


# ---- records of the cost --------------------------------------------------------------------------------


def test_open_cost_of_different_trials_is_their_composition() -> None:
    quiet = TrialClass(sampling_prob=0.02, noise_multiplier=2.0, num_steps=100, count=3)
    cost = open_cost([S1, quiet], delta=1e-5)
    steps = {StepClass(0.01, 1.0): 1000, StepClass(0.02, 2.0): 300}
    assert cost.tuned_epsilon == pytest.approx(epsilon_pld(composed_event(steps), 1e-5), abs=1e-6)
    assert cost.rdp_epsilon == pytest.approx(epsilon_rdp(composed_event(steps), 1e-5), abs=1e-9)
    assert cost.training_epsilon == pytest.approx(1.82824365, abs=5e-4)


def test_open_cost_depends_on_the_cap_alone_however_it_is_split() -> None:
    split = [TrialClass(sampling_prob=0.01, noise_multiplier=1.0, num_steps=n) for n in (600, 400)]
    assert open_cost(split, delta=1e-5).tuned_epsilon == pytest.approx(1.82824365, abs=5e-4)


def test_sealed_threshold_cost_reports_its_law() -> None:
    cost = sealed_threshold_cost([S1], halting_prob=0.1, delta=1e-5)
    assert cost.law == {"name": "halting after a miss", "halting_prob": 0.1, "max_mean": 10.0}
    assert cost.training_epsilon < cost.tuned_epsilon < 2.870965


def test_cost_names_the_relation_of_the_mechanism() -> None:
    assert NEIGHBORING_RELATION == ADD_OR_REMOVE_ONE


def test_cost_is_plain_data_and_holds_no_draw() -> None:
    record = json.loads(json.dumps(sealed_cost([S1], law=GEOMETRIC, delta=1e-5).as_dict(), allow_nan=False))
    assert record["mode"] == "sealed"
    assert record["law"] == {"name": "tnb", "eta": 1, "gamma": 0.1, "mean": pytest.approx(10)}
    assert record["planned"][0]["probability"] == 1.0


def test_unaccounted_cost_carries_the_reason() -> None:
    cost = not_accounted("sealed", reason="the search was adaptive", delta=1e-5, training_epsilon=1.8)
    assert (cost.accounted, cost.tuned_epsilon, cost.reason) == (False, None, "the search was adaptive")


@pytest.mark.parametrize(
    "change", [{"reason": "some"}, {"accounted": False}, {"tuned_epsilon": None}], ids=lambda c: next(iter(c))
)
def test_cost_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    fields = {
        "mode": "open",
        "delta": 1e-5,
        "training_epsilon": 1.0,
        "tuned_epsilon": 2.0,
        "theorem": "t",
        "rdp_epsilon": None,
        "planned": (),
    }
    with pytest.raises(ConfigError, match="cost"):
        TuningCost(**{**fields, **change})


def test_cost_without_a_finite_epsilon_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a finite tuned_epsilon; got inf"):
        open_cost([S1], delta=1e-300)
    with pytest.raises(ConfigError, match="needs a finite tuned_epsilon; got inf"):
        sealed_cost([S1], law=GEOMETRIC, delta=1e-16)


def test_cost_that_needs_gigabytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="epsilon must stay below 1000"):
        open_cost([TrialClass(**{**_fields(S1), "count": 10**9})], delta=1e-5)
    with pytest.raises(ConfigError, match="epsilon must stay below 1000"):
        sealed_cost([TrialClass(**{**_fields(S1), "num_steps": 10**9})], law=GEOMETRIC, delta=1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_delta_out_of_range_is_refused(delta: float) -> None:
    with pytest.raises(ConfigError, match="delta must be in"):
        open_cost([S1], delta=delta)
    with pytest.raises(ConfigError, match="delta must be in"):
        sealed_cost([S1], law=GEOMETRIC, delta=delta)
    with pytest.raises(ConfigError, match="delta must be in"):
        sealed_threshold_cost([S1], halting_prob=0.1, delta=delta)


@pytest.mark.parametrize("halting_prob", [0.0, 1.1, -0.5, math.nan])
def test_halting_probability_out_of_range_is_refused(halting_prob: float) -> None:
    with pytest.raises(ConfigError, match="halting_prob must be"):
        sealed_threshold_cost([S1], halting_prob=halting_prob, delta=1e-5)


@pytest.mark.parametrize("field", ["num_steps", "count"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_trial_counts_must_be_whole_and_positive(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be a whole number"):
        TrialClass(**{**_fields(S1), field: value})


def test_unknown_bound_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'profile'"):
        sealed_cost([S1], law=GEOMETRIC, delta=1e-5, bound="profil")


def test_candidates_are_not_counted() -> None:
    with pytest.raises(ConfigError, match="count must be 1"):
        sealed_cost([TrialClass(**{**_fields(S1), "count": 2})], law=GEOMETRIC, delta=1e-5)


def test_coarser_cells_only_raise_the_pointwise_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = _profile_of(*MECHANISMS["gaussian"])
    fine = pointwise_bound(profile, GEOMETRIC, 1e-4)
    monkeypatch.setattr(selection_bounds, "_NUM_CELLS", 60)
    assert pointwise_bound(profile, GEOMETRIC, 1e-4) > fine


def _fields(trial: TrialClass) -> dict[str, float]:
    return {
        name: getattr(trial, name) for name in ("sampling_prob", "noise_multiplier", "num_steps", "count")
    }
