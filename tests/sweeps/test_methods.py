"""Methods in a sweep: what is refused, what all of them cost together, and how each is tuned."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dashboards.query.trial_frames import load_trials
from dpgcl_core.errors import BudgetExceeded, ConfigError, StorageError
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import ADD_OR_REMOVE_ONE
from dpgcl_core.mechanism.registry import METHODS
from dpgcl_core.release.statement import rounded_up
from sweeps import methods
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.planning.inputs import EarlierSweep
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.points import check_groups
from sweeps.service.planning.sweep_cost import cost_of
from sweeps.service.planning.trials import ChargedSteps, Point
from sweeps.service.privacy.sweep_statement import build_statement
from sweeps.service.running import mlflow_listener
from sweeps.service.running.two_stage_policy import run_tuned_sweep
from tests.sweeps.support import options, plan_of, run_sweep, tracked_runs, without_ray, write_npz
from trainers.config.tree import replace_options
from trainers.tracking.mlflow_server import connect

pytestmark = pytest.mark.ci

QUICK = ("--tiny", "--num-augmentations", "0", "--no-non-private", "--noise-multiplier", "1")
NOT_PLAIN = [name for name, method in METHODS.items() if method.label == "proven" and not method.plain_event]
Refusal = Callable[..., str]


def plan_at(*points: dict[str, Any], arguments: Sequence[str] = QUICK) -> SweepPlan:
    named = [Point(label=f"p{number}", changes=changes) for number, changes in enumerate(points)]
    return plan_of("methods", options(*arguments), named, calibration_folder=None)


def test_unknown_method_is_refused_with_the_valid_ones(refusal: Refusal) -> None:
    message = refusal(*QUICK, "--method", "dp_glc")
    assert "dp_gcl" in message
    assert "logit_dp" in message


def test_method_of_two_views_refuses_augmented_keys(refusal: Refusal) -> None:
    message = refusal("--tiny", "--method", "logit_dp", "--num-augmentations", "1")
    assert "num_augmentations must be 0: logit_dp augments no keys; got 1" in message


def test_method_of_two_views_has_no_augmented_keys_unless_asked() -> None:
    assert options("--tiny", "--method", "logit_dp").objective.num_augmentations == 0
    assert options("--tiny").objective.num_augmentations == 1


def test_groups_are_not_varied_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match="every group size would be the same training"):
        check_groups("logit_dp")


def test_target_below_what_the_accountant_resolves_is_refused(refusal: Refusal) -> None:
    assert "at least 0.001" in refusal("--tiny", "--epsilon", "0.0001")


@pytest.mark.parametrize("method", ["dpcl_simclr", "dpcl_barlow"])
def test_method_as_published_is_refused_for_private_data(
    method: str, refusal: Refusal, tmp_path: Path
) -> None:
    own = write_npz(tmp_path / "own.npz", 200)
    message = refusal(*QUICK, "--dataset", own, "--method", method)
    assert "as-published" in message


@pytest.mark.ci
@pytest.mark.parametrize("method", NOT_PLAIN)
def test_ledger_refuses_steps_that_it_cannot_add_up(
    method: str, tmp_path: Path, empty_database: Path
) -> None:
    shutil.copy(empty_database, tmp_path)
    url = str(tmp_path / "ledger.json")
    own = write_npz(tmp_path / "own.npz", 200)
    with_ledger = Ledger.create(url)
    with_ledger.register("scans", num_records_public=200, cap=Cap(epsilon=100, delta=1e-3))
    chosen = options(*QUICK, "--method", method, "--dataset", own, "--ledger", url, "--dataset-id", "scans")
    chosen = replace_options(chosen, storage=tmp_path, num_records_public=200)
    with pytest.raises(ConfigError, match="a ledger can add up only"):
        run_sweep("methods", chosen, [Point(label="p", changes={})], lambda *_: [])


@pytest.mark.parametrize("method", NOT_PLAIN)
def test_sealed_sweep_refuses_steps_that_its_bounds_do_not_cover(method: str, refusal: Refusal) -> None:
    message = refusal(
        "--tiny", "--num-augmentations", "0", "--noise-multiplier", "1", "--method", method, *SEALED
    )
    assert "Poisson-sampled Gaussian steps" in message


SEALED = ("--release", "sealed", "--evaluate-on", "digits", "--dataset", "digits")


@pytest.mark.parametrize("method", NOT_PLAIN)
def test_noised_snr_is_refused_beside_other_steps(method: str, refusal: Refusal) -> None:
    message = refusal(*QUICK, "--method", method, "--snr-noise-multiplier", "5")
    assert "noised SNR" in message


def test_replacing_a_record_needs_the_declared_number_of_records(refusal: Refusal) -> None:
    message = refusal(*QUICK, "--method", "dpcl_simclr_rigorous", "--num-records-public", "1500")
    assert "must have exactly num_records_public = 1500 records" in message


def test_more_records_than_the_accounting_covers_are_refused(refusal: Refusal) -> None:
    assert "at most" in refusal(*QUICK, "--method", "logit_dp", "--num-records-public", "1300")


def test_private_data_are_not_spent_on_a_total_that_is_not_known(tmp_path: Path) -> None:
    own = write_npz(tmp_path / "own.npz", 200)
    with pytest.raises(ConfigError, match="each relation in a separate sweep"):
        plan_at(
            {"method": "dp_gcl"}, {"method": "dpcl_simclr_rigorous"}, arguments=(*QUICK, "--dataset", own)
        )


def test_group_clipping_needs_a_cap_that_holds_a_group(refusal: Refusal) -> None:
    with pytest.raises(ConfigError, match="must be at least group_size"):
        Mechanism(
            num_records_public=100,
            sampling_prob=0.1,
            group_size=12,
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            num_steps=1,
            target_delta=1e-4,
            method="group_clip",
            batch_cap=11,
        )


def test_statement_says_among_which_data_sets_the_guarantee_holds() -> None:
    statement = build_statement(plan_at({"method": "logit_dp"}), "one")
    assert statement.conditions == ["data sets of at most 1518 records"]
    private = dataclasses.replace(statement, data_are_private=True)
    assert "among data sets of at most 1518 records" in private.headline()
    assert statement.as_dict()["conditions"] == statement.conditions


def test_statement_of_several_group_sizes_holds_where_all_of_them_do() -> None:
    declared = (*QUICK, "--num-records-public", "1445")
    plan = plan_at({"group_size": 4}, {"group_size": 16}, arguments=declared)
    (condition,) = build_statement(plan, "one").conditions
    small, large = (trial.config.mechanism for trial in plan.trials)
    assert condition == large.rules.condition(large)  # larger groups bear fewer empty slots
    assert condition != small.rules.condition(small)


def test_statement_without_conditions_has_none() -> None:
    statement = build_statement(plan_at({"method": "dp_gcl"}), "one")
    assert "among" not in dataclasses.replace(statement, data_are_private=True).headline()


def test_cost_of_two_relations_is_not_accounted() -> None:
    cost = plan_at({"method": "dp_gcl"}, {"method": "dpcl_simclr_rigorous"}).cost
    assert cost is not None
    assert cost.tuned_epsilon is None
    assert "replace one record" in str(cost.reason)


def test_cost_of_replacing_a_record_adds_the_trainings() -> None:
    plan = plan_at({"method": "dpcl_simclr_rigorous"}, {"method": "dpcl_barlow_rigorous"})
    cost = plan.cost
    assert cost is not None
    mechanisms = [trial.config.mechanism for trial in plan.trials]
    halves = [dataclasses.replace(m, target_delta=cost.delta / 2).epsilon() for m in mechanisms]
    assert cost.tuned_epsilon == pytest.approx(sum(halves))
    assert cost.neighboring_relation == "replace one record"


def test_repeated_steps_raise_the_cost_of_replacing_a_record() -> None:
    plan = plan_at({"method": "dpcl_simclr_rigorous"})
    more = cost_of(plan.release, plan.trials, {plan.trials[0].name: ChargedSteps(num_steps=14)})
    assert plan.cost is not None
    assert more is not None
    assert more.tuned_epsilon > plan.cost.tuned_epsilon  # type: ignore[operator]


def test_cost_sets_aside_the_delta_of_every_cap() -> None:
    one = plan_at({"method": "logit_dp", "batch_cap": 120})
    two = plan_at({"method": "logit_dp", "batch_cap": 120}, {"method": "logit_dp", "batch_cap": 120})
    mechanism = one.trials[0].config.mechanism
    added = mechanism.rules.added_delta(mechanism, mechanism.num_steps)
    assert added > 0
    assert one.cost is not None
    assert one.cost.tuned_epsilon == pytest.approx(one.trials[0].config.epsilon(), rel=1e-6)
    assert one.cost.delta == mechanism.target_delta
    assert two.cost is not None
    assert f"{2 * added:.2g}" in two.cost.theorem


def test_statement_names_sampling_and_sensitivity_of_every_method() -> None:
    plan = plan_at({"method": "dp_gcl"}, {"method": "dp_sgd"})
    lines = dict(build_statement(plan, "one").lines())
    assert "DP-GCL: each group of slots joins" in lines["Sampling"]
    assert "DP-SGD: Poisson, truncated" in lines["Sampling"]
    assert "2·cap·C; proof in dpgcl_core/methods/baselines/path_clipping.py" in lines["Sensitivity"]
    assert (
        "changes the clipped sum by at most C; proof in dpgcl_core/sampling/slots.py" in lines["Sensitivity"]
    )


def test_statement_of_the_published_scheme_says_that_records_are_sampled() -> None:
    lines = dict(build_statement(plan_at({"method": "dp_gcl", "sampling": "records"}), "one").lines())
    assert lines["Sampling"].startswith("each record joins")
    assert (
        "by at most 2C (C for groups of one); proof in dpgcl_core/sampling/groups.py" in lines["Sensitivity"]
    )


def test_statement_of_methods_as_published_promises_nothing() -> None:
    statement = build_statement(plan_at({"method": "dp_gcl"}, {"method": "dpcl_simclr"}), "one")
    assert statement.guarantee_label == "as-published"
    assert not statement.promises


class Ray:
    """Stands in for Ray: a trial's score is that of its learning rate."""

    def __init__(self) -> None:
        self.trained: dict[str, Any] = {}

    def run_trials(
        self, session: Any, plan: SweepPlan, folder: Any, trials: Sequence[Any], on_result: Any, *_: Any
    ) -> dict[str, str]:
        for trial in trials:
            self.trained[trial.name] = trial
            rate = trial.config.optimizer.learning_rate
            metrics = {"knn_accuracy": 1 - abs(rate - 0.02), "num_steps_charged": 10, "epsilon": 1.0}
            on_result(trial.name, {"metrics": metrics, "series": {}})
        return {}


GRID = [{"learning_rate": rate} for rate in (0.01, 0.02, 0.03)]
Tuned = Callable[..., int]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    stand_in = Ray()
    without_ray(monkeypatch, stand_in.run_trials)
    return stand_in


def run_tuned(folder: Path, *more: str) -> int:
    """Runs the tuned sweep `one` of two candidates."""
    chosen = options(*QUICK, "--name", "one", "--storage", str(folder), "--repeats", "2", *more)
    compared = [Point(label=name, changes={"method": name}) for name in ("dp_gcl", "dp_clip")]
    compared.append(Point(label="base", changes={"method": "base", "epsilon": None}))
    return run_tuned_sweep("methods", chosen, compared, GRID, lambda *_: [])


@pytest.fixture
def tuned(tmp_path: Path, empty_database: Path) -> Tuned:
    """`run_tuned` in a new storage folder."""
    shutil.copy(empty_database, tmp_path)
    return partial(run_tuned, tmp_path)


@dataclass
class Done:
    """What a tuned sweep has trained, said and left."""

    code: int
    trained: dict[str, Any]
    said: str
    folder: Path

    def statement(self, sweep: str) -> dict[str, Any]:
        path = self.folder / "sweeps" / sweep / "privacy_statement.json"
        return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Done:
    """The tuned sweep, run once for all that only look at it."""
    folder, stand_in, said = tmp_path_factory.mktemp("tuned"), Ray(), io.StringIO()
    shutil.copy(empty_database, folder)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        without_ray(patch, stand_in.run_trials)
        code = run_tuned(folder)
    return Done(code, stand_in.trained, said.getvalue(), folder)


@pytest.fixture
def again(done: Done, tmp_path: Path) -> Path:
    """A copy of its folder, to be resumed."""
    return Path(shutil.copytree(done.folder, tmp_path / "again"))


@pytest.mark.ci
def test_tuning_trains_the_best_setting_of_each_afresh(done: Done) -> None:
    assert done.code == 0
    shown = {name: t for name, t in done.trained.items() if not name.startswith("tune-")}
    assert sorted(shown) == [f"{name}-r{i}" for name in ("base", "dp_clip", "dp_gcl") for i in (0, 1)]
    assert {shown[f"dp_gcl-r{i}"].config.optimizer.learning_rate for i in (0, 1)} == {0.02}


@pytest.mark.ci
def test_tuning_gives_every_candidate_the_same_grid(done: Done) -> None:
    for name in ("dp_gcl", "dp_clip"):
        tried = [done.trained[f"tune-{name}-{number}-r0"] for number in range(3)]
        assert [t.config.optimizer.learning_rate for t in tried] == [0.01, 0.02, 0.03]


def test_tuning_and_comparison_share_no_seed(done: Done) -> None:
    seeds = {name: trial.config.public_seed for name, trial in done.trained.items()}
    assert not {s for n, s in seeds.items() if n.startswith("tune-")} & {
        s for n, s in seeds.items() if not n.startswith("tune-")
    }


def test_comparison_costs_what_its_tuning_cost_too(done: Done) -> None:
    both, first = done.statement("one"), done.statement("one-tuning")
    assert both["trials"]["planned"] == first["trials"]["planned"] + 6
    assert both["cost"]["tuned_epsilon"] > first["cost"]["tuned_epsilon"]


def test_tuning_tells_the_cost_of_what_follows_in_advance(done: Done) -> None:
    in_advance = done.said.split("cost of both sweeps together:\n")[1].split("sweep:")[0]
    assert f"ε = {rounded_up(done.statement('one')['cost']['tuned_epsilon'], 4)}" in in_advance


def test_statement_of_the_tuning_says_that_a_comparison_follows(done: Done) -> None:
    page = (done.folder / "sweeps/one-tuning/privacy_statement.md").read_text()
    assert "A sweep of 6 more trials follows" in page


@pytest.mark.ci
def test_ledger_that_holds_the_tuning_alone_starts_nothing(
    ray: Ray, tuned: Tuned, tmp_path: Path, empty_database: Path
) -> None:
    url, own = str(tmp_path / "ledger.db"), write_npz(tmp_path / "own.npz", 200)
    ledger = Ledger.create(url)
    both = ("--dataset", own, "--evaluate-on", "npz:" + str(tmp_path / "public.npz"), "--ledger", url)
    both += ("--dataset-id", "scans", "--num-records-public", "200", "--expected-batch-size", "64")
    generator = np.random.default_rng(3)
    images = generator.integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "public.npz", images=images, labels=np.arange(60) % 3)
    ledger.register("scans", num_records_public=200, cap=Cap(epsilon=20, delta=1e-3))
    with pytest.raises(BudgetExceeded, match="nothing was started"):
        tuned(*both)
    assert not ray.trained


def test_comparison_says_its_grid(done: Done) -> None:
    notes = " ".join(done.statement("one")["notes"])
    assert "learning_rate = 0.01; learning_rate = 0.02; learning_rate = 0.03" in notes


def with_earlier(num_steps: int, sweep_id: str = "a") -> SweepPlan:
    tuning = plan_at({"method": "dp_gcl"}).trials
    drawn = {trial.name: ChargedSteps(num_steps=num_steps) for trial in tuning}
    configs = {trial.name: trial.config for trial in tuning}
    earlier = EarlierSweep(sweep="t", sweep_id=sweep_id, configs=configs, draws=drawn, note="", results={})
    chosen, point = options(*QUICK), Point(label="chosen", changes={})
    return plan_of("methods", chosen, [point], calibration_folder=None, earlier=(earlier,))


def test_cost_in_advance_knows_what_the_tuning_has_drawn() -> None:
    planned, repeated = with_earlier(10).cost, with_earlier(40).cost
    assert planned is not None
    assert repeated is not None
    assert repeated.tuned_epsilon > planned.tuned_epsilon  # type: ignore[operator]


def test_comparison_belongs_to_one_tuning() -> None:
    assert with_earlier(10, "a").fingerprint != with_earlier(10, "b").fingerprint


def test_steps_of_lost_starts_are_in_the_epsilon_of_every_method(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_database: Path
) -> None:
    shutil.copy(empty_database, tmp_path)
    monkeypatch.setattr(mlflow_listener, "count_draws_of", lambda *_: ChargedSteps(num_steps=30))
    chosen = options(*QUICK, "--method", "logit_dp", "--name", "one", "--storage", str(tmp_path))
    run_sweep("methods", chosen, [Point(label="p", changes={})], lambda *_: [])
    (shown,) = load_trials(f"sqlite:///{tmp_path}/mlflow.db", "one").itertuples()
    assert shown.num_steps_charged == 30
    assert shown.epsilon == pytest.approx(ray.trained["p-r0"].config.epsilon(30))


def test_tuning_spends_nothing_where_the_name_is_taken(ray: Ray, tuned: Tuned, tmp_path: Path) -> None:
    (tmp_path / "sweeps" / "one").mkdir(parents=True)
    with pytest.raises(StorageError, match="exists already"):
        tuned()
    assert not ray.trained


def test_tuned_sweep_is_resumed_without_training(ray: Ray, again: Path) -> None:
    assert run_tuned(again, "--resume") == 0
    assert not ray.trained


def test_resume_goes_on_where_only_the_tuning_was_done(ray: Ray, again: Path) -> None:
    shutil.rmtree(again / "sweeps" / "one")
    client = connect(f"sqlite:///{again}/mlflow.db")
    for run in tracked_runs(client, "tags.`dpgcl.role` = 'sweep' AND tags.`dpgcl.sweep` = 'one'"):
        client.delete_run(run.info.run_id)  # else it is another sweep of that name
    assert run_tuned(again, "--resume") == 0
    assert ray.trained
    assert not any(name.startswith("tune-") for name in ray.trained)


def test_comparison_needs_an_open_release() -> None:
    with pytest.raises(ConfigError, match="its release must be open"):
        run_tuned_sweep("methods", options("--tiny", *SEALED), [], GRID, lambda *_: [])


def compared(*arguments: str) -> list[Point]:
    chosen = parse_options(methods.MethodsOptions, description="", arguments=arguments)
    return methods.candidates(chosen)


def test_comparison_has_a_row_for_every_method_and_epsilon() -> None:
    labels = {each.label for each in compared("--epsilon-grid", "1", "10")}
    private = {name for name, m in METHODS.items() if m.label != "none" and m.takes_images}
    private -= {name for name, m in METHODS.items() if m.takes_labels}
    assert labels == {f"{name}-eps{e}" for name in private for e in (1, 10)} | {"base", "non_private"}


def test_comparison_of_private_data_has_proven_methods_alone(tmp_path: Path) -> None:
    own = write_npz(tmp_path / "own.npz", 200)
    names = {each.changes["method"] for each in compared("--dataset", own)}
    assert names == {
        name
        for name, method in METHODS.items()
        if method.label == "proven"
        and method.neighboring_relation == ADD_OR_REMOVE_ONE
        and method.takes_images
        and not method.takes_labels
    }


def test_comparison_at_one_noise_has_rows_without_epsilon() -> None:
    assert "dp_gcl" in {each.label for each in compared("--noise-multiplier", "1")}
