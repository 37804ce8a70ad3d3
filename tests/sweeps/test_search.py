"""Adaptive searches: the space, what is proposed, what it costs, and that a resume goes on where it was."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from dashboards.serve.folders import open_folders
from dpgcl_core.accounting import composition
from dpgcl_core.accounting.filters import StepClass, composed_event
from dpgcl_core.errors import BudgetExceeded, ConfigError, DpgclError, StorageError
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.cluster.interruption import StopRequest
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.planning.inputs import PlanInputs
from sweeps.service.planning.search_plan import SearchPlan, plan_search, searched_trial
from sweeps.service.planning.space import SearchOptions, Space
from sweeps.service.planning.sweep_cost import trial_classes
from sweeps.service.planning.trials import Point, Trial
from sweeps.service.running import driver
from sweeps.service.running import sweep as service
from sweeps.service.running.earlier_sweeps import read_charged, store_charged
from sweeps.service.running.proposals import Proposals
from sweeps.service.running.search_policy import SearchPolicy, SearchTrials
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps.support import loaded, plan_of, write_npz
from tests.sweeps.support import options as sweep_options

pytestmark = pytest.mark.ci  # trainings and sweeps of seconds each

SIGMA = ("--noise-multiplier-range", "1", "4")


def options(*arguments: str) -> SearchOptions:
    """The options of a search for a command line."""
    return parse_options(SearchOptions, description="", arguments=arguments)


def plan(*arguments: str, folder: Path | None = None) -> SearchPlan:
    chosen = options("--tiny", *arguments)
    data, notes = loaded(chosen)
    folder = folder or Path("/nonexistent")
    return plan_search(
        PlanInputs(
            question="search", options=chosen, points=(), data=data, notes=notes, calibration_folder=folder
        )
    )


def refusal(*arguments: str) -> str:
    with pytest.raises(DpgclError) as caught:
        plan(*arguments)
    return str(caught.value)


# The space


def test_space_is_what_the_options_give_lists_and_ranges() -> None:
    space = Space.of(options("--group-sizes", "4", "2", "--l2-clip-norm-range", "0.1", "10"))
    assert space.text == "group_size: 4, 2; l2_clip_norm: 0.1 to 10"


def test_space_of_one_value_fixes_the_option() -> None:
    space = Space.of(options("--group-sizes", "4", "--temperature-range", "0.1", "1"))
    assert (space.columns, space.constants) == (["temperature"], {"group_size": 4})


def test_search_without_a_space_has_one_but_for_what_is_fixed() -> None:
    columns = Space.of(options("--learning-rate", "0.01")).columns
    assert "temperature" in columns
    assert "learning_rate" not in columns


def test_values_are_rounded_within_the_range() -> None:
    (each,) = Space.of(options("--learning-rate-range", "0.0012345", "0.0056789")).axes
    assert [each.value(x) for x in (0.0012345, 0.0033333, 0.0056789)] == [0.0012345, 0.00333, 0.0056789]


def test_group_sizes_above_a_quarter_of_the_batch_are_left_out_and_told() -> None:
    found = plan("--noise-multiplier", "1", "--sampling", "records", "--group-sizes", "4", "8", "32")
    assert found.space.axes[0].choices == (4, 8)
    assert any("group_size = 32 is not searched: group_size must be at most" in note for note in found.notes)


def test_list_that_means_nothing_to_a_method_is_left_out_and_told() -> None:
    found = plan("--noise-multiplier", "1", "--method", "dp_clip")
    assert found.space.columns == ["learning_rate"]
    assert "group_size is not searched, because dp_clip takes no group size." in found.notes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--group-sizes", "4", "--learning-rate-range", "0.1", "0.1"), "must vary at least one option"),
        (
            ("--sampling", "records", "--group-sizes", "32", "64"),
            "must be at most a quarter of the expected batch size",
        ),
        (
            ("--sampling", "records", "--group-sizes", "4", "32", "--learning-rate-range", "1", "1"),
            "must vary at least one option",
        ),
        (("--temperature-range", "1", "0.1"), "temperature_range must be a smallest and a largest value"),
        (("--noise-multiplier-range", "0.00001", "1"), "noise_multiplier must be at least"),
        ((*SIGMA, "--epsilon-range", "1", "2"), "set --epsilon-range or --noise-multiplier-range, not both"),
        ((*SIGMA, "--epsilon", "3"), "set epsilon or a range of ε or σ, not both; got epsilon = 3.0"),
        (("--num-trials", "1"), "--num-trials must be at least 2"),
        (("--repeats", "2"), "got --repeats 2. Leave it out"),
        (("--search", "grid"), "--release"),
        (("--release", "sealed"), "a search needs --release open"),
        (("--release", "sealed", "--sampler", "random"), "a search needs --release open"),
        (("--sampler", "grid"), "Valid: random, tpe"),
        (("--sampler", "qmc"), "use --sampler random"),
        (("--objectives", "knn"), "'knn'. Valid: epsilon, knn_accuracy, linear_probe_accuracy"),
        (("--objectives", "noised_knn_accuracy"), "unknown objective 'noised_knn_accuracy'"),
        ((*SIGMA, "--objectives", "epsilon"), "must be one or more different scores"),
        (("--objectives", "knn_accuracy", "knn_accuracy"), "must be one or more different scores"),
        (("--objectives", "knn_accuracy", "epsilon"), "epsilon is the same in all trials"),
        ((*SIGMA, "--objectives", "knn_accuracy", "epsilon", "--seeded-non-private"), "has no ε"),
        (("--method", "logit_dp", "--num-augmentations", "0", *SIGMA), "got logit_dp. Use another method"),
        (("--method", "dp_clip", "--learning-rate-range", "1", "1"), "must vary at least one option"),
    ],
)
def test_search_refuses_bad_input(arguments: tuple[str, ...], words: str) -> None:
    own = () if "range" in str(arguments) and "noise" in str(arguments) else ("--noise-multiplier", "1")
    assert words in refusal(*own, *arguments)


def test_search_of_private_data_without_public_scores_is_refused(tmp_path: Path) -> None:
    data = write_npz(tmp_path / "own.npz", 128)
    assert "objective 'knn_accuracy'. Valid: epsilon" in refusal("--dataset", data, *SIGMA)


# What it costs


def test_cost_is_that_of_all_trials_at_the_least_noise() -> None:
    found = plan(*SIGMA, "--num-trials", "6")
    (planned,) = found.cost.planned
    assert (planned["noise_multiplier"], planned["num_steps"], planned["count"]) == (1.0, 10, 6)


def test_cost_in_advance_dominates_that_of_the_trials() -> None:
    found = plan(*SIGMA, "--num-trials", "2", "--sampler", "random")
    proposals = Proposals(found.space, found.options)
    trials = [searched_trial(found, k, proposals.suggest()) for k in range(1, 3)]
    noises = {trial.config.mechanism.noise_multiplier for trial in trials}
    assert len(noises) == 2
    steps: Counter[StepClass] = Counter()
    for each in trial_classes(trials):
        steps.update(each.steps_of_one)
    spent = composition.epsilon_rdp(composed_event(steps), found.cost.delta)
    assert spent < found.cost.rdp_epsilon


def test_budgeted_noise_is_the_given_end_and_not_a_rounded_one() -> None:
    found = plan("--noise-multiplier-range", "1.236", "4")
    assert found.trials[0].config.mechanism.noise_multiplier == 1.236


@pytest.mark.parametrize("factor", [1, 2, 3])  # of TAN, which must not divide the budgeted noise again
def test_trial_takes_no_less_noise_than_budgeted_where_its_calibration_finds_less(
    factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sloppy(*, target_epsilon: float, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(noise_multiplier=2.0 if target_epsilon == 10 else 1.9)

    monkeypatch.setattr(composition, "calibrate_noise_multiplier", sloppy)
    found = plan("--epsilon-range", "1", "10", "--tan-factor", str(factor))
    trial = searched_trial(found, 1, {"epsilon": 9.9, "group_size": 2, "learning_rate": 1e-3})
    budgeted = found.trials[0].config.mechanism.noise_multiplier
    assert budgeted == pytest.approx(2.0 / factor)
    assert budgeted <= trial.config.mechanism.noise_multiplier < budgeted * (1 + 1e-12)


def test_trials_share_what_their_cost_depends_on_besides_noise() -> None:
    found = plan(*SIGMA, "--l2-clip-norm-range", "0.1", "10", "--temperature-range", "0.1", "1")
    costliest = found.trials[0].config.mechanism
    proposals = Proposals(found.space, found.options)
    for number in range(1, 9):
        mechanism = searched_trial(found, number, proposals.suggest()).config.mechanism
        assert mechanism.noise_multiplier >= costliest.noise_multiplier
        for name in ("sampling_prob", "num_steps", "target_delta", "num_records_public"):
            assert getattr(mechanism, name) == getattr(costliest, name)


def test_plan_of_a_search_tells_no_searched_setting_as_shared() -> None:
    params = plan(*SIGMA).params()
    assert not {"group_size", "learning_rate", "noise_multiplier", "target_epsilon"} & set(params)
    assert (params["searched"], params["num_trials"]) == ("group_size, noise_multiplier, learning_rate", 4)


@pytest.mark.parametrize(
    "other",
    [
        ("--sampler", "random"),
        ("--learning-rate-range", "0.001", "0.02"),
        ("--num-trials", "5"),
        ("--seed", "1"),
    ],
)
def test_fingerprint_tells_searches_apart(other: tuple[str, ...]) -> None:
    assert plan("--noise-multiplier", "1").fingerprint != plan("--noise-multiplier", "1", *other).fingerprint


# What is proposed


def proposed(
    chosen: SearchOptions, number: int, *, after: int = 0, peak: float = 0.3
) -> list[dict[str, Any]]:
    """The values of so many trials, each told at once; those before `after` by an earlier process."""
    first = Proposals(Space.of(chosen), chosen)
    found: list[dict[str, Any]] = []
    for k in range(1, number + 1):
        if k == after + 1 and after:
            first = Proposals(Space.of(chosen), chosen)
            for earlier, values in enumerate(found, start=1):
                first.repeat(values)
                first.record_scores(earlier, score_of(values, peak))
        found.append(first.suggest())
        first.record_scores(k, score_of(found[-1], peak))
    return found


def score_of(values: Mapping[str, Any], peak: float) -> dict[str, float]:
    return {"knn_accuracy": 1 / (1 + abs(math.log(values["temperature"] / peak)))}


SPACE = ("--group-sizes", "2", "4", "8", "--temperature-range", "0.05", "2")
SAMPLERS = pytest.mark.parametrize("sampler", ["tpe", "random"])


@SAMPLERS
def test_proposals_are_in_the_space(sampler: str) -> None:
    for values in proposed(options(*SPACE, "--sampler", sampler), 12):
        assert values["group_size"] in (2, 4, 8)
        assert 0.05 <= values["temperature"] <= 2


@SAMPLERS
def test_proposals_follow_from_the_public_seed(sampler: str) -> None:
    one, again, other = (
        proposed(options(*SPACE, "--sampler", sampler, "--seed", seed), 8) for seed in ("0", "0", "1")
    )
    assert one == again
    assert one != other


@SAMPLERS
def test_proposals_after_a_resume_are_those_without_one(sampler: str) -> None:
    chosen = options(*SPACE, "--sampler", sampler, "--num-trials", "16")
    assert proposed(chosen, 14, after=9) == proposed(chosen, 14)


@SAMPLERS
def test_no_setting_is_proposed_twice(sampler: str) -> None:
    found = [values["temperature"] for values in proposed(options(*SPACE, "--sampler", sampler), 12, after=6)]
    assert len(set(found)) == 12


def test_tpe_goes_where_the_scores_are_high_and_random_does_not() -> None:
    def last_median(sampler: str, peak: float) -> float:
        chosen = options(*SPACE, "--sampler", sampler)
        return float(np.median([values["temperature"] for values in proposed(chosen, 30, peak=peak)[-15:]]))

    assert last_median("tpe", 0.1) < 0.25 < 0.4 < last_median("tpe", 1.0)
    assert last_median("random", 0.1) == last_median("random", 1.0)


def test_best_is_the_pareto_front_of_score_and_epsilon() -> None:
    chosen = options(*SPACE, *SIGMA, "--objectives", "knn_accuracy", "epsilon")
    proposals = Proposals(Space.of(chosen), chosen)
    for k, (score, epsilon) in enumerate([(0.5, 1.0), (0.4, 2.0), (0.7, 4.0), (0.7, 8.0)], start=1):
        proposals.suggest()
        proposals.record_scores(k, {"knn_accuracy": score, "epsilon": epsilon})
    assert [numbers for numbers, _ in proposals.best()] == [[1], [3]]


def test_trainings_of_one_setting_count_by_their_mean() -> None:
    chosen = options("--group-sizes", "2", "4")
    proposals = Proposals(Space.of(chosen), chosen)
    for k, (size, score) in enumerate([(2, 0.9), (2, 0.1), (4, 0.6)], start=1):
        proposals.repeat({"group_size": size})
        proposals.record_scores(k, {"knn_accuracy": score})
    assert proposals.best() == [([3], {"knn_accuracy": 0.6})]
    proposals.repeat({"group_size": 4})
    proposals.record_scores(4, {"knn_accuracy": 0.8})
    assert proposals.best() == [([3, 4], {"knn_accuracy": pytest.approx(0.7)})]


@pytest.mark.parametrize("metrics", [None, {}, {"knn_accuracy": math.nan}])
def test_failed_trials_are_no_best_ones(metrics: dict[str, float] | None) -> None:
    chosen = options(*SPACE)
    proposals = Proposals(Space.of(chosen), chosen)
    for k, told in enumerate([metrics, {"knn_accuracy": 0.1}], start=1):
        proposals.suggest()
        proposals.record_scores(k, told)
    assert [numbers for numbers, _ in proposals.best()] == [[2]]


# A search under way; trials end at once


class Ray:
    """Stands in for Ray: asks for a trial, trains it at once, and tells.

    Attributes:
      trained: the trials, in order.
      stop_before: the search is stopped when this trial was asked for.
      failing: names of trials that fail.
      looks: what was written down of every trial before it started.
      before: called before the first trial.
    """

    def __init__(self) -> None:
        self.trained: list[Trial] = []
        self.stop_before = ""
        self.failing: set[str] = set()
        self.looks: list[Any] = []
        self.before: Callable[[], None] = lambda: None

    def run_trials(
        self,
        session: Any,
        plan: SearchPlan,
        folder: Any,
        trials: Sequence[Trial],
        on_result: Any,
        budget: Any,
        source: SearchTrials,
    ) -> dict[str, str]:
        failed = {}
        self.before()
        for _ in trials:
            trial = source.next_trial()
            path = folder.path / "suggested" / f"{trial.name}.json"
            self.looks.append(json.loads(path.read_text()) if path.exists() else None)
            if trial.name == self.stop_before:
                raise StopRequest(2)
            if trial.name in self.failing:
                failed[trial.name] = "it failed"
                source.note_end(trial.name)
                continue
            self.trained.append(trial)
            rate = trial.config.optimizer.learning_rate
            metrics = {"epsilon": trial.config.epsilon(), "knn_accuracy": rate * 10, "num_steps_charged": 10}
            on_result(trial.name, {"metrics": metrics, "series": {}})
            source.note_end(trial.name)
        return failed

    def settings(self) -> dict[str, tuple[Any, ...]]:
        """What each trial trained with."""
        return {
            trial.name: (trial.config.mechanism.group_size, trial.config.optimizer.learning_rate)
            for trial in self.trained
        }


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    stand_in = Ray()
    monkeypatch.setattr(driver, "ray_session", lambda *_: nullcontext())
    monkeypatch.setattr(driver, "run_trials", stand_in.run_trials)
    return stand_in


@pytest.fixture
def start(tmp_path: Path, empty_database: Path) -> Callable[..., int]:
    """Runs the search `one` of four trials."""
    shutil.copy(empty_database, tmp_path)

    def run(*more: str) -> int:
        own = () if "--noise" in str(more) else ("--noise-multiplier", "1")
        chosen = options("--tiny", *own, "--name", "one", "--storage", str(tmp_path), *more)
        return service.execute("search", chosen, (), lambda *_: [], policy=SearchPolicy()).code

    return run


def test_settings_are_written_down_before_a_trial_starts(ray: Ray, start: Callable[..., int]) -> None:
    assert start() == 0
    written = [(each["group_size"], each["learning_rate"]) for each in ray.looks]
    assert written == list(ray.settings().values())


def test_search_stopped_and_resumed_repeats_no_trial_and_keeps_its_settings(
    ray: Ray, start: Callable[..., int]
) -> None:
    ray.stop_before = "trial-3"
    assert start() == 130
    ray.stop_before = ""
    assert start("--resume") == 0
    assert [trial.name for trial in ray.trained] == ["trial-1", "trial-2", "trial-3", "trial-4"]
    begun, resumed = ray.looks[2], ray.settings()["trial-3"]
    assert (begun["group_size"], begun["learning_rate"]) == resumed


def test_search_goes_on_without_a_trial_that_may_not_be_restarted(
    ray: Ray, start: Callable[..., int], tmp_path: Path
) -> None:
    ray.stop_before = "trial-2"
    assert start("--restart-steps", "4") == 130
    folder = SweepFolder(tmp_path / "sweeps/one")
    folder.mark_start("trial-2")
    for _ in range(2):
        folder.checkpoints("trial-2", every_steps=4).begin_attempt(0, 10)
    ray.stop_before = ""
    assert start("--restart-steps", "4", "--resume") == 0
    assert [trial.name for trial in ray.trained] == ["trial-1", "trial-3", "trial-4"]
    statement = json.loads((folder.path / "privacy_statement.json").read_text())
    assert statement["cost"] == statement["budget"]
    assert [each["num_steps"] for each in statement["cost"]["planned"]] == [10 + 4]


def test_search_stopped_and_resumed_is_the_one_never_stopped(ray: Ray, start: Callable[..., int]) -> None:
    ray.stop_before = "trial-3"
    start("--num-trials", "6")
    ray.stop_before = ""
    start("--num-trials", "6", "--resume")
    resumed = ray.settings()
    ray.trained.clear()
    start("--num-trials", "6", "--name", "never-stopped")
    assert ray.settings() == resumed


def test_finished_search_trains_nothing_when_resumed(
    ray: Ray, start: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    capsys.readouterr()
    assert start("--resume") == 0
    assert len(ray.trained) == 4
    assert "highest knn_accuracy:" in capsys.readouterr().out


def test_failed_trial_is_tried_again_by_a_resume_alone(ray: Ray, start: Callable[..., int]) -> None:
    ray.failing = {"trial-2"}
    assert start() == 1
    ray.failing = set()
    assert start("--resume") == 0
    assert [trial.name for trial in ray.trained] == ["trial-1", "trial-3", "trial-4", "trial-2"]


def test_lost_settings_of_a_begun_trial_stop_a_resume(
    ray: Ray, start: Callable[..., int], tmp_path: Path
) -> None:
    start()
    (tmp_path / "sweeps" / "one" / "suggested" / "trial-2.json").unlink()
    with pytest.raises(StorageError, match="lost or damaged; restore it"):
        start("--resume")


def test_search_with_another_space_does_not_continue_a_search(ray: Ray, start: Callable[..., int]) -> None:
    start()
    with pytest.raises(ConfigError, match="these differ"):
        start("--resume", "--learning-rate-range", "0.001", "0.02")


def test_best_setting_is_said(
    ray: Ray, start: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    best = max(ray.trained, key=lambda trial: trial.config.optimizer.learning_rate)
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.startswith("  trial-") and " with " in line)
    size, rate = best.config.mechanism.group_size, best.config.optimizer.learning_rate
    assert (
        line
        == f"  {best.name}: knn_accuracy {rate * 10:.4g} with group_size = {size}, learning_rate = {rate}"
    )


def test_statement_of_a_search_has_its_budget_and_its_mechanisms(
    ray: Ray, start: Callable[..., int], tmp_path: Path
) -> None:
    start(*SIGMA)
    statement = json.loads((tmp_path / "sweeps" / "one" / "privacy_statement.json").read_text())
    (planned,) = statement["budget"]["planned"]
    assert (planned["noise_multiplier"], planned["count"]) == (1.0, 4)
    assert statement["cost"] == statement["budget"]
    noises = {mechanism["noise_multiplier"] for mechanism in statement["mechanisms"]}
    assert noises == {trial.config.mechanism.noise_multiplier for trial in ray.trained}


def test_dry_run_of_a_search_says_space_trials_and_cost(
    ray: Ray, start: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert start("--dry-run", *SIGMA) == 0
    said = capsys.readouterr().out
    assert "4 trials by tpe for knn_accuracy, over:" in said
    assert "noise_multiplier     1 to 4" in said
    assert "Open release: all 4 trials together ε = " in said
    assert not (tmp_path / "sweeps").exists()


# Private data, charged to a ledger


@pytest.fixture
def charged(start: Callable[..., int], tmp_path: Path) -> Callable[..., int]:
    """Runs a search on private data, scored on public ones; the ledger lets so many steps of σ = 1 pass."""
    data = write_npz(tmp_path / "own.npz", 200)
    sizes = ("--expected-batch-size", "32", "--group-sizes", "2", "4", *SIGMA)

    def run(num_steps: int) -> int:
        url = str(tmp_path / "ledger.db")
        delta = plan("--dataset", data, "--evaluate-on", "digits", *sizes).cost.delta
        cap = Cap(epsilon=200.0, delta=delta, quotas=((StepClass(0.16, 1.0), num_steps),))
        Ledger.create(url).register("mine", cap, num_records_public=200)
        given = ("--dataset", data, "--evaluate-on", "digits", "--dataset-id", "mine", "--ledger", url)
        return start(*given, *sizes)

    return run


def test_ledger_reserves_every_trial_at_the_least_noise_before_the_first_one(
    ray: Ray, charged: Callable[..., int], tmp_path: Path
) -> None:
    held: list[int | None] = []
    ray.before = lambda: held.extend(
        reservation.num_steps if reservation is not None else None
        for k in range(1, 5)
        for reservation in [Ledger.open(str(tmp_path / "ledger.db")).reservation("mine", label(tmp_path, k))]
    )
    assert charged(40) == 0
    assert held == [10] * 4


def label(folder: Path, number: int) -> str:
    sweep_id = json.loads((folder / "sweeps" / "one" / "plan.json").read_text())["sweep_id"]
    return f"one-{sweep_id}/trial-{number}"


@pytest.mark.parametrize("is_public", [True, False])
def test_folder_of_a_sweep_tells_the_dashboard_how_it_ended_and_whether_its_data_are_public(
    ray: Ray, start: Callable[..., int], charged: Callable[..., int], tmp_path: Path, is_public: bool
) -> None:
    assert (start() if is_public else charged(40)) == 0
    (folder,) = open_folders(tmp_path)
    assert (folder.data_are_public, folder.status) == (is_public, "finished")
    assert (folder.num_trials, len(folder.find_finished_trials()), folder.report is not None) == (4, 4, True)


def test_ledger_with_one_step_too_few_starts_no_trial(ray: Ray, charged: Callable[..., int]) -> None:
    with pytest.raises(BudgetExceeded):
        charged(39)
    assert ray.trained == []


def kept_study(storage: BaseStorage) -> list[FrozenTrial]:
    """The trials of the only study of a storage."""
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage).trials


def journal(folder: Path) -> BaseStorage:
    return JournalStorage(JournalFileBackend(str(folder / "sweeps" / "one" / "study.journal")))


def test_kept_study_has_what_mlflow_shows_of_each_trial_and_no_more(
    ray: Ray, start: Callable[..., int], tmp_path: Path
) -> None:
    assert start() == 0
    found = kept_study(journal(tmp_path))
    assert [each.user_attrs["trial"] for each in found] == [trial.name for trial in ray.trained]
    for each, trial in zip(found, ray.trained, strict=True):
        own = each.params["group_size"], each.params["learning_rate"]
        assert own == ray.settings()[trial.name]
        assert each.values == [trial.config.optimizer.learning_rate * 10]
        assert each.state == TrialState.COMPLETE
        shown = {"trial": trial.name, "guarantee_label": "proven", "epsilon": trial.config.epsilon()}
        assert each.user_attrs == shown
        assert each.datetime_start == each.datetime_complete, "no duration, where results tell none"


def test_trial_in_the_kept_study_lasts_as_long_as_its_training(
    ray: Ray, start: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keep = SearchTrials.keep

    def timed(trials: SearchTrials, name: str, result: dict[str, Any]) -> dict[str, Any]:
        return keep(trials, name, result | {"metrics": result["metrics"] | {"train_seconds": 7.0}})

    monkeypatch.setattr(SearchTrials, "keep", timed)
    start()
    assert {each.duration.total_seconds() for each in kept_study(journal(tmp_path)) if each.duration} == {7.0}


@pytest.mark.parametrize("is_lost", [False, True])
def test_resumed_search_continues_its_kept_study(
    ray: Ray, start: Callable[..., int], tmp_path: Path, is_lost: bool
) -> None:
    ray.stop_before = "trial-3"
    start()
    assert [each.user_attrs["trial"] for each in kept_study(journal(tmp_path))] == ["trial-1", "trial-2"]
    if is_lost:
        (tmp_path / "sweeps" / "one" / "study.journal").unlink()
    ray.stop_before = ""
    assert start("--resume") == 0
    names = [each.user_attrs["trial"] for each in kept_study(journal(tmp_path))]
    assert names == ["trial-1", "trial-2", "trial-3", "trial-4"]


def test_kept_study_has_no_trace_of_a_training_that_failed_and_went_on(
    ray: Ray, start: Callable[..., int], tmp_path: Path
) -> None:
    """Failures and restarts may come of the records."""
    ray.failing = {"trial-2"}
    start()
    assert "trial-2" not in {each.user_attrs["trial"] for each in kept_study(journal(tmp_path))}
    ray.failing = set()
    assert start("--resume") == 0
    states = [(each.user_attrs["trial"], each.state) for each in kept_study(journal(tmp_path))]
    assert sorted(states) == [(f"trial-{number}", TrialState.COMPLETE) for number in range(1, 5)]


def test_study_that_is_away_for_a_while_has_all_trials_at_the_end(
    ray: Ray,
    start: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add, calls = Study.add_trial, []

    def away(study: Study, trial: FrozenTrial) -> None:
        calls.append(trial)
        if len(calls) in (2, 3):
            raise OSError("no space left")
        add(study, trial)

    monkeypatch.setattr(Study, "add_trial", away)
    assert start() == 0
    assert len(kept_study(journal(tmp_path))) == 4
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count(" cannot be added to ") == 2


@pytest.mark.parametrize("sizes", [("2", "4"), ("2", "4", "8")])
def test_statement_says_that_repeats_of_a_setting_stay_charged(
    ray: Ray, start: Callable[..., int], tmp_path: Path, sizes: tuple[str, ...]
) -> None:
    given = "--learning-rate-range", "0.002", "0.002", "--sampler", "random", "--group-sizes", *sizes
    start(*given)
    results = (tmp_path / "sweeps" / "one" / "trials").glob("trial-*.json")
    asked = [json.loads(path.read_text())["params"]["group_size"] for path in results]
    assert len(asked) == 4
    statement = json.loads((tmp_path / "sweeps" / "one" / "privacy_statement.json").read_text())
    planned = plan("--noise-multiplier", "1", *given).cost  # of all four
    assert planned is not None
    wanted = f"4 trainings of {len(set(asked))} settings: "
    assert [note.endswith("and all are charged.") for note in statement["notes"] if wanted in note] == [True]
    assert statement["cost"]["tuned_epsilon"] == pytest.approx(planned.tuned_epsilon)


# A search that starts from earlier sweeps


def statement_of(folder: Path, name: str) -> dict[str, Any]:
    """The privacy statement of a sweep."""
    statement: dict[str, Any] = json.loads((folder / "sweeps" / name / "privacy_statement.json").read_text())
    return statement


def epsilon_of(steps: Mapping[float, int], sampling_prob: float, delta: float) -> float:
    """ε of so many steps by noise multiplier, by an accountant of its own."""
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for noise, number in steps.items():
        event = PoissonSampledDpEvent(sampling_prob, GaussianDpEvent(noise))
        accountant.compose(SelfComposedDpEvent(event, number))
    return float(accountant.get_epsilon(delta))


def test_proposals_start_where_the_results_of_earlier_sweeps_are_high() -> None:
    chosen = options(*SPACE)
    generator = np.random.default_rng(0)
    settings = [{"group_size": 4, "temperature": t} for t in np.exp(generator.uniform(-3, 0.7, 40)).tolist()]

    def first_median(peak: float) -> float:
        proposals = Proposals(Space.of(chosen), chosen, [(each, score_of(each, peak)) for each in settings])
        assert proposals.num_suggestions == 0
        return float(np.median([proposals.suggest()["temperature"] for _ in range(9)]))

    assert first_median(0.1) < 0.25 < 0.4 < first_median(1.0)


def test_random_starts_after_few_results_repeat_no_setting_of_the_earlier_search() -> None:
    chosen = options(*SPACE)
    earlier = proposed(chosen, 1)
    later = Proposals(Space.of(chosen), chosen, [(each, score_of(each, 0.1)) for each in earlier])
    assert later.suggest() not in earlier


def test_best_settings_are_those_of_the_search_itself() -> None:
    chosen = options("--group-sizes", "2", "4")
    proposals = Proposals(Space.of(chosen), chosen, [({"group_size": 2}, {"knn_accuracy": 0.9})])
    proposals.repeat({"group_size": 4})
    proposals.record_scores(1, {"knn_accuracy": 0.1})
    assert proposals.best() == [([1], {"knn_accuracy": 0.1})]


def test_earlier_trials_are_not_trained_again_and_stay_in_the_cost(
    ray: Ray, start: Callable[..., int], tmp_path: Path
) -> None:
    start("--noise-multiplier-range", "1", "4")
    file = tmp_path / "sweeps/one/trials/trial-2.json"
    result = json.loads(file.read_text())
    result["metrics"]["num_steps_charged"] = 13  # a restart repeated three steps
    file.write_text(json.dumps(result))
    ray.trained.clear()
    assert start("--noise-multiplier-range", "1.5", "4", "--name", "two", "--earlier", "one") == 0
    assert [trial.name for trial in ray.trained] == ["trial-1", "trial-2", "trial-3", "trial-4"]
    statement, mechanism = statement_of(tmp_path, "two"), ray.trained[0].config.mechanism
    wanted = epsilon_of({1.0: 43, 1.5: 40}, mechanism.sampling_prob, mechanism.target_delta)
    for cost in ("cost", "budget"):
        assert statement[cost]["tuned_epsilon"] == pytest.approx(wanted, rel=1e-3)
    assert (statement["trials"]["planned"], statement["earlier"]) == (8, ["one"])
    assert any("as if all had been planned together" in note for note in statement["notes"])
    assert min(each["noise_multiplier"] for each in statement["mechanisms"]) == 1.0


def test_search_learns_from_the_earlier_results_of_its_space_and_tells_the_others(
    ray: Ray, start: Callable[..., int], tmp_path: Path
) -> None:
    start("--sampler", "random", "--num-trials", "8")
    rates = [rate for _, rate in ray.settings().values()]
    low, high = sorted(rates)[2], sorted(rates)[5]
    space = ("--learning-rate-range", f"{low}", f"{high}")
    start("--name", "two", "--earlier", "one", *space)
    alone = len(ray.trained)
    start("--name", "three", *space)
    found, unlearned = ray.trained[8:alone], ray.trained[alone:]
    assert [t.config.optimizer.learning_rate for t in found] != [
        t.config.optimizer.learning_rate for t in unlearned
    ]
    wanted = "4 results of the sweep one are not used: they are outside the space."
    assert wanted in statement_of(tmp_path, "two")["notes"]


def test_nested_sweeps_count_once(ray: Ray, start: Callable[..., int], tmp_path: Path) -> None:
    start()
    start("--name", "two", "--earlier", "one")
    assert start("--name", "three", "--earlier", "one", "two") == 0
    statement = statement_of(tmp_path, "three")
    assert (statement["trials"]["planned"], sorted(statement["earlier"])) == (12, ["one", "two"])
    (planned,) = statement["cost"]["planned"]
    assert planned["count"] == 12


def test_resumed_search_has_its_earlier_results_even_if_their_sweep_is_gone(
    ray: Ray, start: Callable[..., int], tmp_path: Path
) -> None:
    start()
    start("--name", "never-stopped", "--earlier", "one")
    wanted, whole = ray.settings(), statement_of(tmp_path, "never-stopped")
    ray.stop_before = "trial-3"
    assert start("--name", "two", "--earlier", "one") == 130
    ray.stop_before = ""
    shutil.rmtree(tmp_path / "sweeps/one")
    assert start("--name", "two", "--earlier", "one", "--resume") == 0
    assert ray.settings() == wanted
    statement = statement_of(tmp_path, "two")
    assert (statement["cost"], statement["notes"]) == (whole["cost"], whole["notes"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--test-fraction", "0.3"), "'one' has others .*scored was"),
        (("--num-records-public", "1900"), "num_records_public was 1445, is 1900"),
        (("--num-steps", "12"), "4 results of the sweep one are not used: .*num_steps was 10, is 12"),
        (("--objectives", "linear_probe_accuracy"), "they lack linear_probe_accuracy"),
        (("--learning-rate-range", "0.5", "0.6"), "they are outside the space"),
        (("--sampler", "random"), "got random"),
        (("--total-epsilon", "0.5"), "must exceed the ε of the earlier sweeps"),
        (("--earlier", "two"), "got 'two'. Valid: one"),
        (("--earlier", "sealed"), "must be an open one .*got 'sealed'"),
    ],
)
def test_earlier_sweeps_that_do_not_fit_are_refused(
    ray: Ray, start: Callable[..., int], tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    start()
    SweepFolder(tmp_path / "sweeps/sealed").create({"fingerprint": ""})  # no trial of it may be read
    with pytest.raises(ConfigError, match=words):
        start("--name", "new", *(() if "--earlier" in arguments else ("--earlier", "one")), *arguments)
    assert len(ray.trained) == 4


def test_total_of_a_search_counts_its_earlier_sweeps(
    ray: Ray, start: Callable[..., int], tmp_path: Path
) -> None:
    def total_of(num_trials: int) -> str:
        cost = plan("--noise-multiplier", "1", "--num-trials", str(num_trials)).cost
        return str(cost.tuned_epsilon + 0.001)

    start()
    again = ("--name", "two", "--earlier", "one", "--total-epsilon")
    with pytest.raises(ConfigError, match=r"What would fit: .*--num-trials 3"):
        start(*again, total_of(7))
    assert start(*again, total_of(8)) == 0


def test_ledger_charges_earlier_sweeps_only_once(
    ray: Ray, charged: Callable[..., int], start: Callable[..., int], tmp_path: Path
) -> None:
    assert charged(80) == 0
    given = ("--dataset", f"npz:{tmp_path / 'own.npz'}", "--evaluate-on", "digits", "--dataset-id", "mine")
    given += ("--ledger", str(tmp_path / "ledger.db"), "--expected-batch-size", "32")
    given += ("--group-sizes", "2", "4", *SIGMA, "--name", "two", "--earlier", "one")
    assert start(*given) == 0
    headline = statement_of(tmp_path, "two")["headline"]
    assert "together with sweep one" in headline
    assert "otherwise only the ledger's (ε, δ) covers them together" in headline


@pytest.mark.parametrize(
    "arguments", ["dp_gcl digits", "dp_mae digits", "dp_classifier digits", "dp_cap shapes:400"]
)
def test_folder_gives_back_the_configurations_that_its_cost_depends_on(
    arguments: str, tmp_path: Path
) -> None:
    method, dataset = arguments.split()
    chosen = sweep_options("--noise-multiplier", "1", "--method", method, "--dataset", dataset, "--tiny")
    planned = plan_of("own", chosen, [Point(label="p", changes={"l2_clip_norm": 2.0})])
    folder = SweepFolder(tmp_path / "sweeps/one")
    store_charged(folder, planned, {"account": None})
    assert read_charged(folder).configs == {trial.name: trial.config for trial in planned.trials}
