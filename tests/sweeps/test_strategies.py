"""`--tuning`: every strategy stays within its total, by an independent composition of all releases."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import pld_privacy_accountant

from dpgcl_core.errors import ConfigError
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from sweeps import classify
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.options.tuning_options import TuningOptions
from sweeps.service.planning.inputs import PlanInputs
from sweeps.service.planning.plan import SweepPlan, planned_trials
from sweeps.service.planning.scaling_rule import agrees_with, scale_rate
from sweeps.service.planning.trials import Point, Trial
from sweeps.service.running import strategies
from sweeps.service.running.strategies import check_strategy, run_with_strategy
from sweeps.service.running.sweep import Outcome
from sweeps.service.running.two_stage_policy import SecondOfTwo
from tests.sweeps.support import loaded, options, without_ray, write_npz
from trainers.config.tree import replace_options

QUICK = ("--tiny", "--num-augmentations", "0", "--no-non-private", "--total-epsilon", "3")
RATES = ("--tuning-rates", "0.005", "0.01", "0.02")
POINTS = [Point(label=f"S{size}", changes={"group_size": size}) for size in (2, 4)]


class Ray:
    """Stands in for Ray: the best learning rate is 0.005 at every ε, and S = 4 is better than S = 2."""

    def __init__(self) -> None:
        self.trained: dict[str, Trial] = {}
        self.stops_at = ""

    def run_trials(
        self, session: Any, plan: SweepPlan, folder: Any, trials: Sequence[Trial], on_result: Any, *_: Any
    ) -> dict[str, str]:
        for trial in trials:
            if self.stops_at and self.stops_at in trial.name:
                raise KeyboardInterrupt
            self.trained[f"{plan.source.dataset} {trial.name}"] = trial
            config = trial.config
            score = 0.5 - config.optimizer.learning_rate + 0.01 * (config.mechanism.group_size == 4)
            on_result(
                trial.name,
                {"metrics": {"knn_accuracy": score, "num_steps_charged": 10, "epsilon": 1.0}, "series": {}},
            )
        return {}


Run = Callable[..., Outcome]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    stand_in = Ray()
    without_ray(monkeypatch, stand_in.run_trials)
    return stand_in


@pytest.fixture(scope="module")
def noises(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The noise multipliers that these tests calibrate, once."""
    return tmp_path_factory.mktemp("noises")


@pytest.fixture
def run(ray: Ray, tmp_path: Path, empty_database: Path, noises: Path) -> Run:
    """A sweep with a strategy, in a new storage folder."""
    shutil.copy(empty_database, tmp_path)
    (tmp_path / "calibration").symlink_to(noises)

    def run_sweep(*arguments: str, points: Sequence[Point] = POINTS) -> Outcome:
        chosen = options(*QUICK, "--name", "one", "--storage", str(tmp_path), *arguments)
        return run_with_strategy("group-size", chosen, points, None)

    return run_sweep


def composed_epsilon(trials: Sequence[Trial], delta: float) -> float:
    """ε of all steps of the trials by dp_accounting alone, which none of our accounting enters."""
    accountant = pld_privacy_accountant.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for trial in trials:
        mechanism = trial.config.mechanism
        noise = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
        step = dp_accounting.PoissonSampledDpEvent(mechanism.sampling_prob, noise)
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, mechanism.num_steps))
    return float(accountant.get_epsilon(delta))


def private_trials(ray: Ray, dataset: str = "digits") -> list[Trial]:
    return [trial for name, trial in ray.trained.items() if name.startswith(f"{dataset} ")]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("strategy", "number", "points"), [("none", 1, POINTS[:1]), ("open", 2, POINTS), ("public", 1, POINTS)]
)
def test_strategy_spends_its_total_and_no_more(
    strategy: str, number: int, points: Sequence[Point], run: Run, ray: Ray
) -> None:
    outcome = run("--tuning", strategy, points=points)
    trials = private_trials(ray)
    assert (outcome.code, len(trials)) == (0, number)
    assert 2.9 < composed_epsilon(trials, trials[0].config.mechanism.target_delta) <= 3.0


@pytest.mark.ci
def test_scaling_spends_its_total_and_no_more(run: Run, ray: Ray) -> None:
    """If the plan forgot a small training, the final one would get more, and exceed the total."""
    outcome = run("--tuning", "scaling", *RATES)
    trials = private_trials(ray)
    *small, final = trials
    assert (outcome.code, len(small)) == (0, 12)
    delta = final.config.mechanism.target_delta
    assert 2.9 < composed_epsilon(trials, delta) <= 3.0
    assert composed_epsilon([final], delta) < 2.95
    assert outcome.statement is not None
    assert outcome.statement.cost is not None
    assert outcome.statement.cost.tuned_epsilon == pytest.approx(composed_epsilon(trials, delta), rel=2e-3)
    assert "The trainings of earlier sweeps alone cost ε = " in outcome.statement.to_markdown()


@pytest.mark.ci
def test_scaling_takes_the_setting_and_the_rate_of_the_line(run: Run, ray: Ray) -> None:
    run("--tuning", "scaling", *RATES)
    final = private_trials(ray)[-1].config
    assert (final.optimizer.learning_rate, final.mechanism.group_size) == (0.005, 4)
    assert final.public_seed == 1


@pytest.mark.ci
def test_public_tunes_on_generated_images_with_the_private_noise(run: Run, ray: Ray) -> None:
    run("--tuning", "public", *RATES)
    (final,) = private_trials(ray)
    proxy = private_trials(ray, "procedural:5000:1x8x8")
    assert len(proxy) == 6
    assert {trial.config.mechanism.noise_multiplier for trial in proxy} == {
        final.config.mechanism.noise_multiplier
    }
    assert {t.config.mechanism.expected_batch_size for t in proxy} == {64}
    assert (final.config.optimizer.learning_rate, final.config.mechanism.group_size) == (0.005, 4)


@pytest.mark.ci
@pytest.mark.parametrize("stops_at", ["lr0.02-eps0.15", "S4-lr0.005-r0"])
def test_scaling_continues_after_a_kill_with_the_same_charges(
    stops_at: str, run: Run, ray: Ray, tmp_path: Path
) -> None:
    arguments = ("--tuning", "scaling", *RATES)
    ray.stops_at = stops_at
    with pytest.raises(KeyboardInterrupt):
        run(*arguments)
    begun = dict(ray.trained)
    ray.stops_at = ""
    assert run(*arguments, "--resume").code == 0
    assert len(private_trials(ray)) == 13
    assert all(ray.trained[name].config == trial.config for name, trial in begun.items())
    trials = private_trials(ray)
    assert composed_epsilon(trials, trials[-1].config.mechanism.target_delta) <= 3.0


@pytest.mark.ci
@pytest.mark.parametrize("stops_at", ["lr0.02", "S4-lr0.005-r0"])
def test_public_continues_after_a_kill_with_one_private_training(stops_at: str, run: Run, ray: Ray) -> None:
    arguments = ("--tuning", "public", *RATES, "--seed", "3")
    ray.stops_at = stops_at
    with pytest.raises(KeyboardInterrupt):
        run(*arguments)
    ray.stops_at = ""
    assert run(*arguments, "--resume").code == 0
    assert [trial.name for trial in private_trials(ray)] == ["S4-lr0.005-r0"]
    assert run(*arguments, "--resume").code == 0
    assert len(private_trials(ray)) == 1


@pytest.mark.ci
def test_ledger_is_charged_for_tuning_and_model(run: Run, ray: Ray, tmp_path: Path) -> None:
    data = write_npz(tmp_path / "scans.npz", 1445)
    url = str(tmp_path / "ledger.db")
    ledger = Ledger.create(url)
    ledger.register("scans", Cap(epsilon=20.0, delta=5e-4), num_records_public=1445)
    private = ("--dataset", data, "--ledger", url, "--dataset-id", "scans")
    outcome = run("--tuning", "scaling", *RATES, *private, "--evaluate-on", "digits")
    assert outcome.code == 0
    spent = ledger.read_charges("scans", with_pld=False)
    assert (spent.num_open, spent.num_settled) == (0, 13)
    charged = {(step_class.noise_multiplier, num) for step_class, num in spent.num_steps.items()}
    trained = private_trials(ray, data)
    assert charged == {(trial.config.mechanism.noise_multiplier, 60) for trial in trained[:-1]} | {
        (trained[-1].config.mechanism.noise_multiplier, 10)
    }


@pytest.mark.ci
def test_proxy_learns_the_registered_number_of_records_alone(run: Run, ray: Ray, tmp_path: Path) -> None:
    """σ, B and q of the proxy's trainings, which are public, must not depend on the number of records."""
    url = str(tmp_path / "ledger.db")
    Ledger.create(url).register("scans", Cap(epsilon=20.0, delta=5e-4), num_records_public=1600)
    data = write_npz(tmp_path / "scans.npz", 1550)
    private = ("--dataset", data, "--ledger", url, "--dataset-id", "scans", "--evaluate-on", "digits")
    assert run("--tuning", "public", *private).code == 0
    (final,) = private_trials(ray, data)
    proxy = private_trials(ray, "procedural:5000:1x8x8")
    assert final.config.mechanism.sampling_prob == 64 / 1600
    assert {trial.config.mechanism.noise_multiplier for trial in proxy} == {
        final.config.mechanism.noise_multiplier
    }
    assert {trial.config.mechanism.expected_batch_size for trial in proxy} == {64}


@pytest.mark.ci
def test_resumed_sweep_keeps_its_total(run: Run, ray: Ray, tmp_path: Path) -> None:
    ray.stops_at = "S4-lr0.005-r0"
    arguments = ("--tuning", "scaling", *RATES, "--small-epsilons", "0.15", "0.3")
    with pytest.raises(KeyboardInterrupt):
        run(*arguments)
    ray.stops_at = ""
    chosen = options(*QUICK, "--name", "one", "--storage", str(tmp_path), *arguments)
    changed = replace_options(chosen, resume=True, total_epsilon=5.0)
    with pytest.raises(ConfigError, match="keeps its --total-epsilon, which is 3; got 5"):
        run_with_strategy("group-size", changed, POINTS, None)


def test_plans_above_the_total_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must stay within --total-epsilon 0\.5"):
        second_plan({"learning_rate": 0.02}, tmp_path, total=0.5)


@pytest.mark.ci
def test_score_that_trials_lack_is_refused_before_they_are_charged(run: Run, ray: Ray) -> None:
    with pytest.raises(ConfigError, match="need a score that all of them have"):
        run("--tuning", "scaling", *RATES, "--select-by", "image_to_text_recall_at_10")
    assert ray.trained == {}


def second_plan(changes: Mapping[str, Any], tmp_path: Path, total: float = 3.0) -> SweepPlan:
    chosen = options(*QUICK, "--epsilon", "1")
    points = [Point(label="model", changes=changes)]
    inputs = PlanInputs(
        question="group-size",
        options=chosen,
        points=points,
        data=loaded(chosen)[0],
        calibration_folder=tmp_path,
    )
    planned = planned_trials(
        replace(inputs, points=[Point(label="planned", changes={"learning_rate": 0.01})])
    )
    return SecondOfTwo(planned=planned, total_epsilon=total).plan(inputs)


def test_results_may_choose_what_no_step_costs(tmp_path: Path) -> None:
    changes = {"learning_rate": 0.02, "l2_clip_norm": 0.5, "group_size": 2}
    assert len(second_plan(changes, tmp_path).trials) == 1


@pytest.mark.parametrize("changes", [{"num_steps": 20}, {"expected_batch_size": 32}, {"epsilon": 2.0}])
def test_results_must_not_choose_what_a_step_costs(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="results must not choose"):
        second_plan(changes, tmp_path)


def test_scaling_refuses_candidates_of_different_cost(run: Run) -> None:
    points = [Point(label=f"T{steps}", changes={"num_steps": steps}) for steps in (5, 10)]
    with pytest.raises(ConfigError, match="one sampling probability and number of steps"):
        run("--tuning", "scaling", *RATES, points=points)


def test_unnoised_private_scores_choose_nothing(run: Run, tmp_path: Path) -> None:
    private = ("--dataset", write_npz(tmp_path / "scans.npz", 400), "--no-ledger")
    with pytest.raises(ConfigError, match="--evaluate-on"):
        run("--tuning", "scaling", *RATES, *private)


def test_proxy_of_another_shape_is_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"\(1, 8, 8\).*\(1, 9, 9\)"):
        run("--tuning", "public", "--proxy", "procedural:500:1x9x9")


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("--tuning", "open", "--epsilon", "1"), "decide the noise; got epsilon = 1"),
        (
            ("--tuning", "scaling", *RATES, "--small-epsilons", "1", "5"),
            "must be below --total-epsilon 3; got 5",
        ),
        (("--tuning", "open", "--repeats", "2"), "trains each setting once; got --repeats 2"),
        (("--tuning", "none"), "trains one setting; got 2 settings"),
        (("--tuning", "scaling"), "at least two --tuning-rates"),
        (("--tuning", "open", "--tuning-rates", "0.1", "0.1000001"), "must differ in six digits"),
        (("--tuning", "open", "--method", "dpcl_simclr"), "proven guarantee; got dpcl_simclr"),
        (("--tuning", "open", "--release", "sealed"), "got --release sealed"),
        (("--tuning", "open", "--proxy", "digits"), "proxy applies only to"),
        (("--proxy", "procedural"), "proxy applies only to"),
    ],
)
def test_option_against_a_strategy_is_refused(arguments: Sequence[str], rule: str, run: Run) -> None:
    with pytest.raises(ConfigError, match=rule):
        run(*arguments)


def test_strategy_needs_a_total() -> None:
    with pytest.raises(ConfigError, match="also set --total-epsilon"):
        check_strategy(options("--tiny", "--tuning", "open"), POINTS)


@pytest.mark.parametrize("epsilons", [(0.1,), (0.1, 0.1), (0.1, 0.2, 0.3, 0.4)])
def test_line_needs_two_or_three_small_epsilons(epsilons: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="two or three different values"):
        TuningOptions(strategy="scaling", small_epsilons=epsilons)


def test_sealed_strategy_is_a_sealed_release() -> None:
    chosen: SweepOptions = options(*QUICK, "--tuning", "sealed")
    assert chosen.release.mode == "sealed"
    assert [point.label for point in check_strategy(chosen, POINTS)[1]] == ["S2", "S4"]


@pytest.mark.ci
def test_total_that_nothing_fits_names_what_would(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"must fit within --total-epsilon 0\.0015"):
        run("--tuning", "open", "--total-epsilon", "0.0015")


RATE_POINTS = [Point(label=f"{rate:g}", changes={"learning_rate": rate}) for rate in (1, 2, 3, 4, 5, 6)]


def rate_scores(best: Mapping[float, float]) -> dict[tuple[str, float], float]:
    return {
        (point.label, epsilon): -abs(point.changes["learning_rate"] - rate)
        for epsilon, rate in best.items()
        for point in RATE_POINTS
    }


def test_scaling_rule_fits_a_line_through_the_best_rates() -> None:
    choice = scale_rate(RATE_POINTS, rate_scores({0.1: 1, 0.2: 2}), 0.5)
    assert (choice.rate, choice.point.label, choice.holds) == (pytest.approx(5.0), "5", True)


def test_scaling_rule_warns_of_rates_that_fall() -> None:
    choice = scale_rate(RATE_POINTS, rate_scores({0.1: 3, 0.2: 2}), 0.5)
    assert (choice.point.label, choice.holds) == ("1", False)


@pytest.mark.parametrize("points", [RATE_POINTS, RATE_POINTS[::-1]])
def test_line_below_zero_takes_the_smallest_rate(points: list[Point]) -> None:
    choice = scale_rate(points, rate_scores({0.1: 6, 0.2: 1}), 0.5)
    assert (choice.rate < 0, choice.point.label) == (True, "1")


def test_scaling_rule_needs_scores() -> None:
    with pytest.raises(ConfigError, match=r"got none at 0\.2"):
        scale_rate(RATE_POINTS, rate_scores({0.1: 1}) | {("1", 0.2): math.nan}, 0.5)


def test_total_takes_the_place_of_a_default_axis_of_epsilon() -> None:
    arguments = ("--tiny", "--tuning", "open", "--total-epsilon", "3", "--epsilons")
    chosen = parse_options(classify.ClassifyOptions, description="", arguments=arguments[:-1])
    assert [point.label for point in check_strategy(chosen, classify.points(chosen))[1]] == ["head"]
    chosen = parse_options(classify.ClassifyOptions, description="", arguments=(*arguments, "1", "3"))
    with pytest.raises(ConfigError, match="got epsilon = 1"):
        check_strategy(chosen, classify.points(chosen))


def test_scaling_rule_ignores_failed_trainings() -> None:
    scores = rate_scores({0.1: 1, 0.2: 2}) | {("6", 0.1): math.nan}
    assert scale_rate(RATE_POINTS, scores, 0.5).point.label == "5"


def test_scaling_rule_is_judged_by_neighbouring_rates() -> None:
    choice = scale_rate(RATE_POINTS, rate_scores({0.1: 1, 0.2: 2}), 0.5)
    assert agrees_with(choice, RATE_POINTS, RATE_POINTS[5])
    assert not agrees_with(choice, RATE_POINTS, RATE_POINTS[2])


@pytest.mark.ci
def test_rule_that_fails_on_the_proxy_trains_nothing_private(run: Run, ray: Ray, monkeypatch: Any) -> None:
    monkeypatch.setattr(strategies, "agrees_with", lambda *_: False)
    with pytest.raises(ConfigError, match="the scaling rule fails"):
        run("--tuning", "scaling", *RATES, "--proxy", "procedural:500:1x8x8")
    assert private_trials(ray) == []
    assert len(private_trials(ray, "procedural:500:1x8x8")) == 18
