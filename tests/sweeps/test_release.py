"""Release modes: what each forbids, why, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dpgcl_core.errors import ConfigError
from dpgcl_core.selection import TrialClass, sealed_cost, sealed_threshold_cost
from dpgcl_core.selection_laws import TruncatedNegativeBinomial
from sweeps.service.plan import SweepPlan
from sweeps.service.release import MODES, check_search, cost_line, cost_of
from sweeps.service.report import build_statement
from tests.sweeps.support import options, write_npz

Plan = Callable[..., SweepPlan]
SEALED = ("--tiny", "--noise-multiplier", "1", "--release", "sealed")
THRESHOLD = ("--tiny", "--noise-multiplier", "1", "--release", "sealed-threshold", "--min-score", "0.5")


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        options(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("mode", ["sealed", "sealed-threshold"])
@pytest.mark.parametrize(
    ("search", "reason"),
    [
        ("grid", "fixed list of trials"),
        ("tpe", "looking at earlier ones"),
        ("asha", "compares running trials"),
        ("hyperband", "compares running trials"),
        ("median", "compares running trials"),
    ],
)
def test_sealed_modes_refuse_what_breaks_them(mode: str, search: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_search(mode, search)
    assert reason in str(caught.value)
    assert "use --search independent" in str(caught.value)
    assert "--release open" in str(caught.value)


def test_command_line_refuses_a_forbidden_search() -> None:
    assert "fixed list of trials" in refused(*SEALED, "--search", "grid")


def test_sealed_sweep_refuses_a_visible_list_of_trials() -> None:
    message = refused(*SEALED, "--repeats", "3")
    assert "a list of trials that anybody can see" in message
    assert "--mean-trials" in message


def test_open_sweep_has_no_secret_number_of_trials() -> None:
    assert "use --search grid" in refused("--tiny", "--search", "independent")


def test_unknown_search_is_refused_with_the_valid_ones() -> None:
    assert "Valid: auto, grid, independent" in refused("--tiny", "--search", "gird")


def test_threshold_needs_its_public_score() -> None:
    assert "min_score" in refused(*THRESHOLD[:-2])
    assert "min_score" in refused(*SEALED, "--min-score", "0.5")


def test_score_that_selects_must_be_one() -> None:
    assert "knn_accuracy" in refused(*SEALED, "--select-by", "train_loss")


def test_sealed_sweep_refuses_seeded_trainings() -> None:
    assert "with a guarantee" in refused(*SEALED, "--seeded-non-private")


def test_sealed_sweep_of_private_data_needs_a_public_score(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    dataset = write_npz(tmp_path / "own.npz", 100)
    assert "--evaluate-on a public labelled data set" in refusal(*SEALED, "--dataset", dataset)


def test_sealed_candidates_are_the_private_settings_of_the_grid(make_plan: Plan) -> None:
    plan = make_plan(*SEALED, "--group-sizes", "2", "4")
    assert [trial.config.mechanism.group_size for trial in plan.trials] == [2, 4]
    assert all(trial.config.guarantee_label == "proven" for trial in plan.trials)


def one_trial(plan: SweepPlan) -> TrialClass:
    mechanism = plan.trials[0].config.mechanism
    return TrialClass(sampling_prob=mechanism.sampling_prob, noise_multiplier=1.0, num_steps=10)


@pytest.mark.parametrize("bound", ["profile", "ps22"])
def test_sealed_cost_is_that_of_the_law_and_bound(bound: str, make_plan: Plan) -> None:
    plan = make_plan(*SEALED, "--mean-trials", "6", "--bound", bound, "--group-sizes", "2", "4")
    law = TruncatedNegativeBinomial.from_mean(6, eta=1)
    delta = plan.trials[0].config.mechanism.target_delta
    expected = sealed_cost([one_trial(plan)], law=law, delta=delta, bound=bound)
    assert plan.cost is not None
    assert plan.cost.tuned_epsilon == pytest.approx(expected.tuned_epsilon, rel=1e-9)


def test_threshold_cost_is_that_of_the_halting_probability(make_plan: Plan) -> None:
    plan = make_plan(*THRESHOLD, "--halting-prob", "0.2")
    delta = plan.trials[0].config.mechanism.target_delta
    expected = sealed_threshold_cost([one_trial(plan)], halting_prob=0.2, delta=delta)
    assert plan.cost is not None
    assert plan.cost.tuned_epsilon == pytest.approx(expected.tuned_epsilon, rel=1e-9)


def test_noised_releases_are_not_passed_over(make_plan: Plan) -> None:
    plan = make_plan("--tiny", "--noise-multiplier", "1")
    trials = [replace(t, params=t.params | {"snr_noise_multiplier": 5.0}) for t in plan.trials]
    cost = cost_of(plan.options, trials)
    assert cost is not None
    assert not cost.accounted
    assert "snr_noise_multiplier" in str(cost.reason)


def test_repeated_steps_raise_the_cost_of_an_open_sweep(make_plan: Plan) -> None:
    plan = make_plan("--tiny", "--noise-multiplier", "1", "--repeats", "2")
    more = cost_of(plan.options, plan.trials, {plan.trials[0].name: 14})
    assert more is not None
    assert plan.cost is not None
    assert more.tuned_epsilon > plan.cost.tuned_epsilon  # type: ignore[operator]


def test_statement_of_a_sweep_with_loose_trials_promises_nothing(make_plan: Plan) -> None:
    statement = build_statement(make_plan("--tiny", "--noise-multiplier", "1"), "one")
    assert not statement.promises
    assert "1 of 2 trainings have none" in statement.headline()
    assert "private" not in statement.to_markdown().lower()


@pytest.mark.parametrize("mode", MODES)
def test_sweep_without_guarantee_has_no_tuning_cost(mode: str) -> None:
    assert cost_line(mode, None, 3) == "Tuning cost: none, for no trial has a guarantee."
