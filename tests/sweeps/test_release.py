"""Release modes: what each forbids, why, and what to use instead."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import dp_event

from dashboards.query.trial_frames import load_trials
from dpgcl_core.accounting.composition import epsilon_pld, epsilon_rdp
from dpgcl_core.accounting.tuning.cost import TrialClass, open_cost, sealed_cost, sealed_threshold_cost
from dpgcl_core.accounting.tuning.laws import TruncatedNegativeBinomial
from dpgcl_core.errors import ConfigError, LedgerError
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.release.metrics import METRICS, Release
from sweeps.group_size import points
from sweeps.service.options.release_options import MODES
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.sweep_cost import cost_line, cost_of, cost_tags, open_trials, trial_classes
from sweeps.service.planning.trials import ChargedSteps
from sweeps.service.privacy.sweep_statement import _score_text as score_text
from sweeps.service.privacy.sweep_statement import build_statement
from sweeps.service.running import driver
from tests.sweeps.support import check_ledger, options, run_sweep, write_npz
from trainers.config.settings import TrainingOptions
from trainers.config.tree import replace_options
from trainers.training.loop import train
from trainers.training.resolve import training_config

pytestmark = pytest.mark.ci  # trainings and sweeps of seconds each

Plan = Callable[..., SweepPlan]
SEALED = ("--tiny", "--noise-multiplier", "1", "--release", "sealed")
THRESHOLD = ("--tiny", "--noise-multiplier", "1", "--release", "sealed-threshold", "--min-score", "0.5")


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        options(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("choice", ["grid", "independent"])
def test_search_of_a_release_is_refused_with_what_decides_it(choice: str) -> None:
    assert "--release" in refused(*SEALED, "--search", choice)


def test_sealed_sweep_refuses_a_visible_list_of_trials() -> None:
    message = refused(*SEALED, "--repeats", "3")
    assert "--repeats applies only to --release open" in message
    assert "--mean-trials" in message


def test_threshold_needs_its_public_score() -> None:
    assert "--min-score" in refused(*THRESHOLD[:-2])
    assert "--min-score" in refused(*SEALED, "--min-score", "0.5")


def test_score_that_selects_must_be_one() -> None:
    assert "knn_accuracy" in refused(*SEALED, "--select-by", "train_loss")


def test_sealed_sweep_refuses_seeded_trainings() -> None:
    assert "with a guarantee" in refused(*SEALED, "--seeded-non-private")


def test_sealed_sweep_of_private_data_needs_a_public_score(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    dataset = write_npz(tmp_path / "own.npz", 100)
    assert "Set --evaluate-on to a public labelled data set" in refusal(*SEALED, "--dataset", dataset)


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


NO_RESTARTS = ("--restart-steps", "0")
NOISED = ("--tiny", "--noise-multiplier", "1", "--expected-batch-size", "32")
HELD_OUT = ("--evaluate-on", "digits", "--score-on-held-out", "0.3", "--score-noise-multiplier")


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A private data set of 200 records."""
    return "--dataset", write_npz(tmp_path_factory.mktemp("data") / "own.npz", 200)


def steps(plan: SweepPlan, noise: float, num_steps: int) -> dp_event.DpEvent:
    """Written down independently of what the sweep composes."""
    gaussian = dp_event.GaussianDpEvent(noise)
    sampled = dp_event.PoissonSampledDpEvent(plan.trials[0].config.mechanism.sampling_prob, gaussian)
    return dp_event.SelfComposedDpEvent(sampled, num_steps)


def tuned(plan: SweepPlan) -> float:
    assert plan.cost is not None
    assert plan.cost.tuned_epsilon is not None
    return plan.cost.tuned_epsilon


@pytest.mark.parametrize(
    ("score_noise", "larger"), [("20", "training"), pytest.param("0.5", "scoring", marks=pytest.mark.ci)]
)
def test_open_cost_of_noised_trials_is_that_of_the_composed_event(
    score_noise: str, larger: str, make_plan: Plan, private: tuple[str, str]
) -> None:
    """Two trials of ten steps, two counts and one noised SNR each."""
    given = (
        *NOISED,
        *NO_RESTARTS,
        *private,
        *HELD_OUT,
        score_noise,
        "--snr-noise-multiplier",
        "2",
        "--repeats",
        "2",
    )
    plan = make_plan(*given)
    delta = plan.trials[0].config.mechanism.target_delta
    joint = 1 / math.sqrt(1 + 1 / 4)
    events = {
        "training": dp_event.ComposedDpEvent([steps(plan, 1.0, 18), steps(plan, joint, 2)]),
        "scoring": dp_event.GaussianDpEvent(float(score_noise) / math.sqrt(4)),
    }
    epsilons = {name: epsilon_pld(event, delta) for name, event in events.items()}
    assert tuned(plan) == pytest.approx(epsilons[larger], abs=2e-3)
    assert epsilons[larger] == max(epsilons.values())
    assert plan.cost is not None
    rdp = max(epsilon_rdp(event, delta) for event in events.values())
    assert plan.cost.rdp_epsilon == pytest.approx(rdp, rel=1e-9)
    assert epsilons[larger] > epsilon_pld(steps(plan, 1.0, 20), delta) + 0.1  # the SNR is not free


def test_cost_of_one_noised_trial_is_its_own_epsilon(make_plan: Plan, private: tuple[str, str]) -> None:
    for given in (("--snr-noise-multiplier", "2"), (*HELD_OUT, "0.5")):
        plan = make_plan(*NOISED, *private, *given)
        assert tuned(plan) == pytest.approx(plan.trials[0].config.epsilon(), abs=1e-3)


def test_planned_cost_lists_all_that_is_charged(make_plan: Plan, private: tuple[str, str]) -> None:
    given = (
        *NOISED,
        *NO_RESTARTS,
        *private,
        *HELD_OUT,
        "20",
        "--snr-noise-multiplier",
        "2",
        "--repeats",
        "2",
    )
    (planned,) = make_plan(*given).cost.planned  # type: ignore[union-attr]
    assert planned["joint_noise_multiplier"] == pytest.approx(1 / math.sqrt(1.25))
    shown = {name: planned[name] for name in ("count", "num_steps", "num_joint_steps", "num_scores")}
    assert shown == {"count": 2, "num_steps": 10, "num_joint_steps": 1, "num_scores": 2}
    assert planned["score_noise_multiplier"] == 20


def test_first_steps_that_restarts_repeat_are_charged_with_their_release(
    make_plan: Plan, private: tuple[str, str]
) -> None:
    plan = make_plan(*NOISED, *NO_RESTARTS, *private, "--snr-noise-multiplier", "2", "--repeats", "2")
    charged = {plan.trials[0].name: ChargedSteps(num_steps=12, num_first_steps=2)}
    classes = trial_classes(plan.trials, charged)
    assert {(each.num_steps, each.num_joint_steps): each.count for each in classes} == {
        (12, 2): 1,
        (10, 1): 1,
    }


def test_restart_that_may_repeat_the_first_step_raises_the_cost(
    make_plan: Plan, private: tuple[str, str]
) -> None:
    plan = make_plan(*NOISED, *NO_RESTARTS, *private, "--snr-noise-multiplier", "1", "--repeats", "2")
    name = plan.trials[0].name
    steps_alone, both = (
        cost_of(plan.release, plan.trials, {name: ChargedSteps(num_steps=12, num_first_steps=first)})
        for first in (1, 2)
    )
    assert steps_alone is not None
    assert both is not None
    assert both.tuned_epsilon > steps_alone.tuned_epsilon + 0.05  # type: ignore[operator]


def test_scores_drawn_twice_raise_the_cost(make_plan: Plan, private: tuple[str, str]) -> None:
    plan = make_plan(*NOISED, *private, *HELD_OUT, "0.5")
    twice = cost_of(
        plan.release, plan.trials, {plan.trials[0].name: ChargedSteps(num_steps=10, num_scorings=2)}
    )
    assert twice is not None
    expected = epsilon_pld(dp_event.GaussianDpEvent(0.25), twice.delta)
    assert twice.tuned_epsilon == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("mode", ["sealed", "sealed-threshold"])
@pytest.mark.parametrize(("score_noise", "larger"), [("50", "training"), ("0.5", "scoring")])
def test_sealed_cost_of_noised_trials_is_the_larger_tuned_one(
    score_noise: str, larger: str, mode: str, make_plan: Plan, private: tuple[str, str]
) -> None:
    score = ("--min-score", "0.5") if mode == "sealed-threshold" else ()
    select = ("--select-by", "noised_knn_accuracy")
    plan = make_plan(*NOISED, *private, *HELD_OUT, score_noise, "--release", mode, *score, *select)
    mechanism = plan.trials[0].config.mechanism
    law = TruncatedNegativeBinomial.from_mean(10, eta=1)
    of_case = {
        "training": TrialClass(sampling_prob=mechanism.sampling_prob, noise_multiplier=1.0, num_steps=10),
        "scoring": TrialClass(sampling_prob=1.0, noise_multiplier=float(score_noise), num_steps=2),
    }
    found = {
        name: sealed_cost([each], law=law, delta=mechanism.target_delta).tuned_epsilon
        if mode == "sealed"
        else sealed_threshold_cost([each], halting_prob=0.1, delta=mechanism.target_delta).tuned_epsilon
        for name, each in of_case.items()
    }
    assert tuned(plan) == pytest.approx(found[larger], rel=1e-9)
    assert found[larger] == max(found.values())  # type: ignore[type-var]


def test_sealed_sweep_selects_by_a_noised_score_only_where_there_is_one(
    refusal: Callable[..., str], private: tuple[str, str]
) -> None:
    given = (*NOISED, *private, "--release", "sealed", "--select-by", "noised_knn_accuracy")
    assert "Also set --score-on-held-out and --score-noise-multiplier" in refusal(*given)
    assert "Valid:" in refusal(*given[:-1], "noised_snr_first_step")


def test_statement_says_how_private_records_were_scored(make_plan: Plan, private: tuple[str, str]) -> None:
    text = score_text(make_plan(*NOISED, *private, *HELD_OUT, "20"))
    assert "on digits (public data), without noise" in text
    assert "on 0.3 of the private records" in text
    assert "Gaussian noise of standard deviation 20, charged in ε" in text


class InPlace:
    """Stands in for Ray and trains in this process."""

    def __init__(self) -> None:
        self.results: dict[str, dict[str, Any]] = {}

    def run_trials(
        self, session: Any, plan: SweepPlan, folder: Any, trials: Any, on_result: Any, budget: Any, _: Any
    ) -> dict[str, str]:
        for trial in trials:
            folder.mark_start(trial.name)
            attempts = folder.checkpoints(trial.name, every_steps=5, is_paid=budget is not None)
            result = train(trial.config, plan.data, checkpoints=attempts)
            self.results[trial.name] = result.metrics
            on_result(trial.name, {"metrics": result.metrics, "series": result.series})
        return {}


@pytest.fixture
def private_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_database: Path, private: tuple[str, str]
) -> Callable[..., InPlace]:
    """Runs a private sweep of two trials with all noised releases from options to statement."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")

    def start(*more: str) -> InPlace:
        in_place = InPlace()
        monkeypatch.setattr(driver, "ray_session", lambda *_: nullcontext())
        monkeypatch.setattr(driver, "run_trials", in_place.run_trials)
        given = (*NOISED, *private, *HELD_OUT, "20", "--snr-noise-multiplier", "2", "--name", "one")
        chosen = options(*given, "--storage", str(tmp_path), "--max-query-records", "50", *more)
        assert run_sweep("group-size", chosen, points(chosen), lambda *_: []) == 0
        return in_place

    return start


def test_private_sweep_releases_noised_numbers_and_no_others(
    private_sweep: Callable[..., InPlace], tmp_path: Path
) -> None:
    done = private_sweep("--repeats", "2", "--no-ledger")
    logged = load_trials(f"sqlite:///{tmp_path}/mlflow.db", "one")
    told = [set(metrics) for metrics in done.results.values()]
    told.append({name for name in METRICS if name in logged and logged[name].notna().any()})
    noised = {"noised_knn_accuracy", "noised_linear_probe_accuracy", "noised_snr_first_step"}
    for names in told:
        assert noised <= names
        assert not [name for name in names if METRICS[name].release is Release.PRIVATE_ONLY]
    assert "epsilon_rdp" in told[-1]
    assert "epsilon_prv" not in told[-1]
    statement = json.loads((tmp_path / "sweeps/one/privacy_statement.json").read_text())
    assert statement["promises"]
    assert statement["cost"]["tuned_epsilon"] > max(logged["epsilon"])


def test_private_sweep_with_a_ledger_is_charged_for_its_noised_numbers(
    private_sweep: Callable[..., InPlace], tmp_path: Path
) -> None:
    url = str(tmp_path / "ledger.db")
    Ledger.create(url).register("scans", Cap(epsilon=20.0, delta=1e-3), num_records_public=200)
    private_sweep("--ledger", url, "--dataset-id", "scans")
    spent = Ledger.open(url).read_charges("scans", with_pld=False)
    assert sorted((c.sampling_prob, c.noise_multiplier, n) for c, n in spent.num_steps.items()) == [
        (pytest.approx(32 / 140), pytest.approx(1 / math.sqrt(1.25)), 1),
        (pytest.approx(32 / 140), 1.0, 9),
        (1.0, 20.0, 2),
    ]
    assert (spent.num_open, spent.num_settled) == (0, 3)


def test_repeated_steps_raise_the_cost_of_an_open_sweep(make_plan: Plan) -> None:
    plan = make_plan("--tiny", "--noise-multiplier", "1", "--repeats", "2")
    more = cost_of(plan.release, plan.trials, {plan.trials[0].name: ChargedSteps(num_steps=14)})
    assert more is not None
    assert plan.cost is not None
    assert more.tuned_epsilon > plan.cost.tuned_epsilon  # type: ignore[operator]


def test_statement_of_a_sweep_with_loose_trials_promises_nothing(make_plan: Plan) -> None:
    statement = build_statement(make_plan("--tiny", "--noise-multiplier", "1"), "one")
    assert not statement.promises
    assert "1 reference without noise" in statement.headline()
    assert "private" not in statement.to_markdown().lower()


@pytest.mark.parametrize("mode", MODES)
def test_sweep_without_guarantee_has_no_tuning_cost(mode: str) -> None:
    assert cost_line(mode, None, open_trials([])) == "Tuning cost: none, because no trial has a guarantee."


@pytest.mark.parametrize("mode", MODES)
def test_tuning_cost_is_rounded_up(mode: str) -> None:
    cost = open_cost([TrialClass(sampling_prob=0.1, noise_multiplier=1.0, num_steps=5)], delta=1.51515e-6)
    cost = replace(cost, tuned_epsilon=3.00001, training_epsilon=2.00001)
    line = cost_line(mode, cost, open_trials([]))
    assert "ε = 3.001 at δ = 1.516e-06" in line
    assert ("one trial alone ε = 2.001" in line) == (mode != "open")


def test_tags_of_the_tuning_cost_are_rounded_up() -> None:
    cost = open_cost([TrialClass(sampling_prob=0.1, noise_multiplier=1.0, num_steps=5)], delta=1.5151511e-6)
    tags = cost_tags(options("--tiny").release, [], replace(cost, tuned_epsilon=3.0000001))
    assert (tags["tuned_epsilon"], tags["tuned_delta"]) == ("3.00001", "1.51516e-06")


@pytest.mark.parametrize("share", ["0", "0.9"])
def test_delta_is_held_against_all_declared_records(share: str) -> None:
    setting = replace_options(
        TrainingOptions(),
        noise_multiplier=1.0,
        delta=0.0011,
        num_records_public=1000,
        expected_batch_size=50,
        score_on_held_out=float(share),
        score_noise_multiplier=10.0 if float(share) else None,
    )
    with pytest.raises(ConfigError, match=r"at most 1/num_records_public = 0\.001 "):
        training_config(setting, num_records=1000, public_seed=0)


@pytest.mark.parametrize("more", [(), ("--ledger", "ledger.db", "--dataset-id", "own")])
def test_charged_data_are_no_public_data_to_evaluate_on(more: tuple[str, ...], tmp_path: Path) -> None:
    dataset = write_npz(tmp_path / "own.npz", 60)
    ledger = Ledger.create(str(tmp_path / "ledger.db"))
    ledger.register("scans", Cap(epsilon=8.0, delta=1e-3), num_records_public=60)
    ledger.bind("scans", tmp_path / "own.npz")
    for scored in ("--evaluate-on", "--probe-datasets"):
        with pytest.raises(LedgerError, match="private, charged as data set 'scans'"):
            check_ledger(options("--tiny", scored, dataset, *more))


@pytest.mark.parametrize("more", [(), ("--ledger", "ledger.db", "--dataset-id", "own")])
def test_charged_data_are_no_public_data_to_train_on(more: tuple[str, ...], tmp_path: Path) -> None:
    dataset = write_npz(tmp_path / "own.npz", 60)
    ledger = Ledger.create(str(tmp_path / "ledger.db"))
    ledger.register("scans", Cap(epsilon=8.0, delta=1e-3), num_records_public=60)
    ledger.bind("scans", tmp_path / "own.npz")
    with pytest.raises(LedgerError, match="Leave out --data-is public"):
        check_ledger(options("--tiny", "--dataset", dataset, "--data-is", "public", *more))
