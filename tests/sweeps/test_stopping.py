"""Trainings that a sweep ends: by scores on the way, which costs no more, and when its time is over."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.cluster.stopping import Stopping, TuneRule, stopped_at
from sweeps.service.options.service import ServiceOptions
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.sweep_cost import cost_of
from sweeps.service.planning.trials import ChargedSteps, Trial
from sweeps.service.privacy.budget import SweepBudget, sweep_budget
from sweeps.service.privacy.ledger_choice import account_of
from sweeps.service.privacy.sweep_statement import build_statement, count_draws
from sweeps.service.running import mlflow_listener
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps.support import Driver, environment, given, run
from trainers.files.checkpoint import DrawCounts, write_drawn
from trainers.files.oversight import Oversight

QUICK = ("--tiny", "--noise-multiplier", "1", "--no-non-private", "--no-references")
OF_SCANS = ("--num-records-public", "1445", "--ledger", "unused", "--dataset-id", "scans")
NUM_STEPS = 10
Plan = Callable[..., SweepPlan]


# Rules


def decided(rule: TuneRule, *told: tuple[str, int, float]) -> list[bool]:
    return [rule.goes_on(*each) for each in told]


def test_successive_halving_keeps_the_upper_third_at_every_rung() -> None:
    rule = TuneRule("asha", 1, 10)
    assert decided(rule, ("a", 1, 0.5), ("b", 1, 0.4), ("c", 1, 0.6), ("d", 1, 0.55)) == [
        True,
        False,
        True,
        True,
    ]
    assert decided(rule, ("c", 2, 0.1)) == [True], "no rung"
    assert decided(rule, ("c", 3, 0.7), ("a", 3, 0.6)) == [True, False]


def test_median_rule_ends_what_is_below_the_median_of_the_others() -> None:
    rule = TuneRule("median", 1, 10)
    assert decided(rule, ("a", 1, 0.5), ("b", 1, 0.1), ("c", 1, 0.6)) == [True, True, True], "too few to tell"
    assert decided(rule, ("d", 1, 0.2), ("e", 1, 0.7)) == [False, True]


# The driver's side


@dataclasses.dataclass
class Asking:
    """Trainings of a sweep in one folder, and the driver that answers them, by a clock that a test sets."""

    folder: SweepFolder
    service: ServiceOptions
    now: float = 0.0

    def __post_init__(self) -> None:
        self.driver = Stopping(self.folder, self.service, "image", lambda: self.now)

    def side(self, trial: Trial) -> Oversight:
        """What a training of a worker's has, which shares nothing with the driver but files."""
        found = self.driver.oversight(trial.name)
        assert found is not None
        self.folder.count_file(trial.name).parent.mkdir(parents=True, exist_ok=True)
        return dataclasses.replace(found)

    def answer(self, trial: Trial, step: int, score: float, others: tuple[Trial, ...] = ()) -> bool:
        def look() -> None:
            self.now += 1
            self.driver.update({each.name: each for each in (trial, *others)})

        return self.side(trial).goes_on(step, {"knn_accuracy": score}, look)


def test_private_trainings_are_not_held_against_others_without_noise(make_plan: Plan, tmp_path: Path) -> None:
    plan = make_plan("--tiny", "--noise-multiplier", "1", "--repeats", "2", "--early-stopping", "asha")
    private = [trial for trial in plan.trials if trial.config.guarantee_label == "proven"]
    free = [trial for trial in plan.trials if trial.config.guarantee_label == "none"]
    asking = Asking(SweepFolder(tmp_path), ServiceOptions(early_stopping="asha"))
    assert asking.answer(free[0], 1, 0.9)
    assert asking.answer(private[0], 1, 0.5)
    assert not asking.answer(private[1], 1, 0.4)
    assert not asking.answer(free[1], 1, 0.8)


@pytest.mark.parametrize("rule", ["asha", "median"])
@pytest.mark.parametrize("new_driver", [False, True])
def test_training_that_was_ended_is_ended_again_at_the_same_step(
    rule: str, new_driver: bool, make_plan: Plan, tmp_path: Path
) -> None:
    """Its worker died before it had a result: neither later scores nor a new driver undo it."""
    given = (*QUICK, "--repeats", "4", "--early-stopping", rule)
    *others, last = make_plan(*given).trials
    service = ServiceOptions(early_stopping=rule)
    asking = Asking(SweepFolder(tmp_path), service)
    for trial in others:
        assert asking.answer(trial, 1, 0.5) or rule == "asha"
    assert not asking.answer(last, 1, 0.1)
    if new_driver:
        asking = Asking(SweepFolder(tmp_path), service)
        asking.driver.begin([last])
    ended = asking.side(last).ended_at()
    assert ended is not None
    assert asking.answer(last, ended - 1, 0.9)
    assert not asking.answer(last, ended, 0.9)
    assert not asking.answer(last, ended + 3, 0.9)


def test_answer_to_an_earlier_attempt_is_none_to_a_later_one(make_plan: Plan, tmp_path: Path) -> None:
    (trial,) = make_plan(*QUICK, "--repeats", "1", "--early-stopping", "asha").trials
    asking = Asking(SweepFolder(tmp_path), ServiceOptions(early_stopping="asha"))
    assert asking.answer(trial, 1, 0.5)
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            asking.now += 1
            asking.driver.update({trial.name: trial})

    assert asking.side(trial).goes_on(1, {"knn_accuracy": 0.4}, look)
    assert len(looks) == 3, "it waited for an answer of its own"


def test_all_that_runs_is_stopped_when_the_time_is_over(make_plan: Plan, tmp_path: Path) -> None:
    first, second = make_plan(*QUICK, "--repeats", "2").trials
    asking = Asking(SweepFolder(tmp_path), ServiceOptions(time_budget=2.0))
    asking.now = 119.0
    asking.driver.update({first.name: first})
    assert (asking.driver.is_over, asking.side(first).must_stop()) == (False, False)
    asking.now = 120.0
    asking.driver.update({first.name: first, second.name: second})
    assert asking.driver.is_over
    assert asking.side(first).must_stop()
    assert asking.side(second).must_stop()
    asking.driver.begin([first, second])
    assert not asking.side(first).must_stop(), "a resume goes on"


# Refusals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"time_budget": 5.0, "release": "sealed"}, "--time-budget out"),
        ({"early_stopping": "asha", "release": "sealed"}, "--early-stopping compares them as they run"),
        ({"time_budget": 0.0}, "time_budget must be a positive number of minutes; got 0"),
    ],
)
def test_what_a_sweep_may_not_be_ended_by_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"must be|sealed sweep") as error:
        given(**changes)
    assert said in str(error.value)


def test_early_stopping_needs_a_score_that_may_be_seen(refusal: Callable[..., str], own: str) -> None:
    private = ("--dataset", own, "--no-ledger", "--num-records-public", "40", "--group-sizes", "2")
    small = ("--expected-batch-size", "20", *QUICK, *private)
    assert "Set --evaluate-on to a public data set" in refusal(*small, "--early-stopping", "asha")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.sweeps.support import write_npz

    return write_npz(tmp_path_factory.mktemp("own") / "own.npz", 40)


# What is charged


@pytest.fixture
def budget(make_plan: Plan, tmp_path: Path) -> Callable[[], SweepBudget]:
    """The budget of three trials of ten steps; called again, that of a resume."""
    plan, url = make_plan(*QUICK, *OF_SCANS, "--repeats", "3"), str(tmp_path / "ledger.db")

    def make() -> SweepBudget:
        mechanism = plan.trials[0].config.mechanism
        if not Path(url).exists():
            quotas = ((StepClass(mechanism.sampling_prob, 1.0), 3 * NUM_STEPS),)
            cap = Cap(epsilon=500.0, delta=mechanism.target_delta, quotas=quotas)
            Ledger.create(url).register("scans", cap, num_records_public=mechanism.num_records_public)
        ledger, folder = Ledger.open(url), SweepFolder(tmp_path / "one")
        found = sweep_budget(plan, ledger, "scans", folder)
        assert found is not None
        if folder.read_plan() is None:
            folder.create({"sweep_id": found.reservations.sweep_id, "account": account_of(ledger, "scans")})
        return found

    return make


def charged(budget: SweepBudget) -> int:
    return sum(budget.ledger.read_charges("scans", with_pld=False).num_steps.values())


def test_unused_steps_of_a_training_ended_by_scores_return_to_the_ledger_alone(
    budget: Callable[[], SweepBudget], make_plan: Plan
) -> None:
    """The ledger has what was drawn; the sweep's own ε has all planned steps."""
    ledger = budget()
    ledger.begin(ledger.trials, None)
    name = ledger.trials[0].name
    ledger.folder.mark_start(name)
    ledger.folder.checkpoints(name, every_steps=5, is_paid=True).begin_attempt(0, NUM_STEPS)
    metrics = {"num_steps_charged": 4.0, "num_steps_done": 4.0}
    ledger.settle(name, metrics)
    assert charged(ledger) == 4 + 2 * NUM_STEPS
    plan = make_plan(*QUICK, *OF_SCANS, "--repeats", "3")
    drawn = count_draws(plan, ledger.folder, {name: {"metrics": metrics}})
    assert drawn == {name: ChargedSteps(num_steps=NUM_STEPS)}
    statement = build_statement(plan, "one", draws=drawn)
    assert statement.cost == plan.cost
    assert stopped_at(plan.trials[0], metrics) == 4


def test_epsilon_of_a_sweep_has_all_steps_of_a_training_ended_by_scores(
    make_plan: Plan, tmp_path: Path
) -> None:
    """Three steps were repeated before it was ended after four: T + 3, whatever the scores had said."""
    plan = make_plan(*QUICK, "--repeats", "3")
    trial, folder = plan.trials[0], SweepFolder(tmp_path / "one")
    assert trial.config.mechanism.num_restart_steps is None
    write_drawn(folder.count_file(trial.name), DrawCounts(num_attempts=2, num_steps=7))
    metrics = {"num_steps_charged": 7.0, "num_steps_done": 4.0}
    drawn = count_draws(plan, folder, {trial.name: {"metrics": metrics}})
    assert drawn[trial.name] == ChargedSteps(num_steps=NUM_STEPS + 3, num_first_steps=2)
    statement = build_statement(plan, "one", draws=drawn)
    assert statement.cost is not None
    assert plan.cost is not None
    expected = cost_of(plan.release, plan.trials, {trial.name: ChargedSteps(num_steps=NUM_STEPS + 3)})
    assert statement.cost == expected
    assert statement.cost.tuned_epsilon > plan.cost.tuned_epsilon
    assert statement.trials is not None
    assert statement.trials.steps_repeated == 3


def test_lost_attempts_of_a_training_ended_by_scores_are_beside_all_planned_steps(make_plan: Plan) -> None:
    trial = make_plan(*QUICK, "--repeats", "3").trials[0]
    metrics = {"num_steps_charged": 7.0, "num_steps_done": 4.0}
    assert (
        mlflow_listener.lost_attempt_metrics(
            trial, ChargedSteps(num_steps=NUM_STEPS + 3, num_first_steps=2), metrics
        )
        == {}
    )
    lost = ChargedSteps(num_steps=2 * NUM_STEPS + 3, num_first_steps=2 + NUM_STEPS, num_scorings=2)
    found = mlflow_listener.lost_attempt_metrics(trial, lost, metrics)
    assert found["num_steps_charged"] == 7 + NUM_STEPS
    assert found["epsilon"] == trial.config.epsilon(2 * NUM_STEPS + 3)


@pytest.mark.parametrize("noised", [(), ("--snr-noise-multiplier", "5")])
def test_resumes_whose_time_is_over_before_a_draw_charge_nothing(
    noised: tuple[str, ...], make_plan: Plan, tmp_path: Path
) -> None:
    """Each was started, and its process found the time over: nothing was counted."""
    plan = make_plan(*QUICK, *OF_SCANS, *noised, "--repeats", "1")
    (trial,), url = plan.trials, str(tmp_path / "ledger.db")
    delta, folder = trial.config.mechanism.target_delta, SweepFolder(tmp_path / "one")
    Ledger.create(url).register("scans", Cap(epsilon=500.0, delta=delta), num_records_public=1445)

    def resumed() -> SweepBudget:
        found = sweep_budget(plan, Ledger.open(url), "scans", folder)
        assert found is not None
        if folder.read_plan() is None:
            folder.create(
                {"sweep_id": found.reservations.sweep_id, "account": account_of(found.ledger, "scans")}
            )
        found.check()
        found.begin([trial], None)
        return found

    before = charged(resumed())
    for _ in range(5):
        folder.mark_start(trial.name)
        assert folder.checkpoints(trial.name, every_steps=5, is_paid=True).read_counts().num_attempts == 0
        assert charged(resumed()) == before
    folder.mark_start(trial.name)
    folder.checkpoints(trial.name, every_steps=5, is_paid=True).begin_attempt(0, NUM_STEPS)
    after = charged(resumed())
    assert after == before + 5, "now five may have been drawn"
    folder.mark_start(trial.name)
    assert charged(resumed()) == after


# Whole sweeps on Ray


FAULTY = ("--num-steps=12", "--checkpoint-every-steps=4", "--network=tests.sweeps.faulty:network")


def sweep_with_ledger(top: Path, *arguments: str) -> tuple[Any, Path, Ledger]:
    url = str(top / "ledger.db")
    if not Path(url).exists():
        Ledger.create(url).register("digits", Cap(epsilon=100.0, delta=1e-5), num_records_public=1445)
    given = (*QUICK, *FAULTY, "--name=one", "--delta=1e-5", f"--ledger={url}", "--dataset-id=digits")
    more = (f"--storage={top / 'storage'}", "--max-concurrent-trials=1", *arguments)
    code, driver = run(*given, *more, home=top / "home", env={"DPGCL_TEST_FOLDER": str(top)})
    return (code, driver), top / "storage/sweeps/one", Ledger.open(url)


def drawn_in(top: Path) -> list[int]:
    """The draws of every training, counted by the network itself."""
    return [path.stat().st_size for path in sorted(top.glob("journal-*"))]


@pytest.mark.ci
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_ledger_has_what_halved_trainings_drew_and_the_statement_all_their_steps(tmp_path: Path) -> None:
    """Steps that move nothing: the scores are those of the public seeds, and so is who is ended."""
    still = ("--learning-rate=1e-12", "--repeats=5", "--early-stopping=asha")
    (code, driver), folder, ledger = sweep_with_ledger(tmp_path, *still)
    assert code == 0, driver.stdout + driver.stderr
    results = [json.loads(path.read_text())["metrics"] for path in sorted((folder / "trials").glob("*.json"))]
    made = [int(each["num_steps_done"]) for each in results]
    assert min(made) < max(made) == 12, made
    assert sorted(made) == sorted(drawn_in(tmp_path))
    assert sum(ledger.read_charges("digits", with_pld=False).num_steps.values()) == sum(made)
    assert len({each["epsilon"] for each in results}) == 1, "of all planned steps, however many were made"
    assert "ended by its scores after" in driver.stdout
    stated = json.loads((folder / "privacy_statement.json").read_text())
    assert math.isclose(stated["cost"]["tuned_epsilon"], stated["budget"]["tuned_epsilon"])


@pytest.mark.ci
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_ctrl_c_costs_nothing_and_the_printed_line_goes_on(tmp_path: Path) -> None:
    """The signal goes to all processes of the terminal; the training is in its sixth draw of twelve."""
    url, storage = str(tmp_path / "ledger.db"), tmp_path / "my results #1"
    Ledger.create(url).register("digits", Cap(epsilon=100.0, delta=1e-5), num_records_public=1445)
    (tmp_path / "hold-0").write_text("6")
    given = (*QUICK, *FAULTY, "--name=one", "--delta=1e-5", f"--ledger={url}", "--dataset-id=digits")
    env, home = {"DPGCL_TEST_FOLDER": str(tmp_path)}, tmp_path / "home"
    driver = Driver(*given, "--repeats=1", f"--storage={storage}", home=home, env=env)
    driver.wait_for((tmp_path / "held").exists)
    os.killpg(driver.pid, signal.SIGINT)
    driver.wait_for((storage / "sweeps/one/drawn/S4-Na1-private-r0.stop").exists)
    (tmp_path / "hold-0").unlink()
    assert driver.wait() == 130, driver.stdout + driver.stderr
    assert "a training that has saved its step repeats none" in driver.stdout
    assert drawn_in(tmp_path) == [6]
    (line,) = re.findall("continue with (.*)", driver.stdout)
    shell = environment(home, **env, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    again = subprocess.run(line, shell=True, cwd=home, env=shell, capture_output=True, text=True, timeout=400)
    assert again.returncode == 0, again.stdout + again.stderr
    assert drawn_in(tmp_path) == [12], "all steps, and each once"
    (result,) = (storage / "sweeps/one/trials").glob("*.json")
    assert json.loads(result.read_text())["metrics"]["num_steps_charged"] == 12
    assert sum(Ledger.open(url).read_charges("digits", with_pld=False).num_steps.values()) == 12


@pytest.mark.ci
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_time_that_is_over_stops_and_a_resume_finishes(tmp_path: Path) -> None:
    """The first training waits at its sixth draw until the time is over; the second does not begin."""
    (tmp_path / "hold-0").write_text("6")
    (tmp_path / "clock").write_text("0")
    over = threading.Event()

    def pass_time() -> None:
        stop = tmp_path / "storage/sweeps/one/drawn/S4-Na1-private-r0.stop"
        for there, then in ((tmp_path / "held", tick), (stop, let_go)):
            while not there.exists() and not over.wait(0.1):
                pass
            then()

    def tick() -> None:
        (tmp_path / "clock.part").write_text("60")
        (tmp_path / "clock.part").rename(tmp_path / "clock")

    def let_go() -> None:
        (tmp_path / "hold-0").unlink()

    waiting = threading.Thread(target=pass_time)
    waiting.start()
    (code, driver), folder, ledger = sweep_with_ledger(tmp_path, "--repeats=2", "--time-budget=1")
    over.set()
    waiting.join()
    assert code == 1, driver.stdout + driver.stderr
    assert "1 training stopped and saved, 1 not begun" in driver.stdout
    assert drawn_in(tmp_path) == [6]
    assert not list((folder / "trials").glob("*.json"))
    charged = ledger.read_charges("digits", with_pld=False)
    assert sum(charged.num_steps.values()) == 24, "both keep their charge, for the resume"
    (tmp_path / "clock").unlink()
    (code, driver), folder, ledger = sweep_with_ledger(tmp_path, "--repeats=2", "--resume")
    assert code == 0, driver.stdout + driver.stderr
    assert drawn_in(tmp_path) == [12, 12]
    charged = ledger.read_charges("digits", with_pld=False)
    assert sum(charged.num_steps.values()) == 12 + 12, "a stop that saves repeats nothing"
