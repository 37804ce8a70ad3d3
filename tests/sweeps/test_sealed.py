"""Sealed sweeps: one run is published, and nothing tells how many there were."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from dpgcl_core.accounting.filters import FILTER_ORDERS
from dpgcl_core.accounting.tuning.bounds import papernot_steinke_rdp
from dpgcl_core.accounting.tuning.laws import TrialCountLaw, TruncatedNegativeBinomial
from dpgcl_core.errors import BudgetExceeded, ConfigError, LedgerError, StorageError, TrackingError
from dpgcl_core.ledger.__main__ import main as ledger_command
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.release.markdown import escaped
from sweeps import SweepBeginning, SweepEnd, TrialResult
from sweeps.group_size import points
from sweeps.service.cluster.interruption import StopRequest
from sweeps.service.console.terminal import name_suffix
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.sealed_charge import rdp_of_best
from sweeps.service.running import prepare
from sweeps.service.running.clock import SystemClock
from sweeps.service.running.sealed_draws import Draw, SealedFolder, choose, draw_trials, trials_of_draws
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps.support import options, run_sweep, without_ray, write_npz
from trainers.files.outcome_file import OUTCOMES_FILE, Outcomes, write_outcomes
from trainers.tracking.mlflow_server import connect
from trainers.tracking.runs import MASKED_TIMES, SEALED_TIME_MS, Tracker

SEALED = ("--tiny", "--noise-multiplier", "1", "--release", "sealed", "--name", "one")
LAW = TruncatedNegativeBinomial.from_mean(20, eta=1)


def drawn(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(TrialCountLaw, "draw", lambda _: number)


@dataclass
class FakeClock(SystemClock):
    """A clock that goes on when it is told to; `on_wait` is called before it jumps to a moment."""

    time: float = 1000.0
    waits: list[float] = field(default_factory=list)
    on_wait: Callable[[], None] = lambda: None

    def now(self) -> float:
        return self.time

    def sleep_until(self, moment: float) -> None:
        assert moment >= self.time
        self.on_wait()
        self.waits.append(moment)
        self.time = moment


class Ray:
    """Stands in for Ray: `stop_after` trials a signal comes; `noised` are the trials' noised scores.

    Each trial takes `seconds` on the clock.
    """

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.at_once = 2
        self.on_start: Callable[[str], None] = lambda name: None
        self.seconds = 1.0
        self.trained: list[str] = []
        self.stop_after: int | None = None
        self.noised: list[float] = []

    def run_trials(
        self, session: Any, plan: SweepPlan, folder: Any, trials: Sequence[Trial], on_result: Any, *_: Any
    ) -> dict[str, str]:
        for trial in trials:
            self.on_start(trial.name)
            folder.mark_start(trial.name)
            attempts = folder.checkpoints(trial.name, every_steps=10)
            attempts.begin_attempt(0, 10)
            self.trained.append(trial.name)
            self.clock.time += self.seconds
            if self.stop_after == len(self.trained):
                raise StopRequest(15)
            metrics = {"epsilon": 1.0, "num_steps_charged": 10, "knn_accuracy": 0.5, "train_seconds": 3.0}
            if self.noised:
                metrics |= {"noised_knn_accuracy": self.noised[len(self.trained) - 1], "knn_accuracy": 0.0}
            on_result(trial.name, {"metrics": metrics, "series": {"snr": [(0, 0.1)]}})
        return {}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    stand_in = Ray()
    without_ray(monkeypatch, stand_in.run_trials)
    monkeypatch.setattr(prepare, "seconds_of_trials", lambda plan: [1.0 for _ in plan.trials])
    monkeypatch.setattr(prepare, "trials_at_once", lambda *_: stand_in.at_once)
    return stand_in


@pytest.fixture
def sweep(tmp_path: Path, empty_database: Path, ray: Ray) -> Callable[..., int]:
    """Runs the sealed sweep `one` in a storage folder."""

    def start(*more: str, storage: str = "a") -> int:
        root = tmp_path / storage
        if not root.exists():
            root.mkdir()
            shutil.copy(empty_database, root)
        chosen = options(*SEALED, "--storage", str(root), *more)
        return run_sweep("group-size", chosen, points(chosen), lambda *_: [], clock=ray.clock)

    return start


class Published:
    """A listener that notes when it was told, and what had been published by then."""

    seen: list[tuple[str, float, bool]]
    clock: FakeClock

    def on_begin(self, sweep: SweepBeginning) -> None:
        self.seen.append(("begin", self.clock.time, False))

    def on_result(self, result: TrialResult) -> None:
        self.seen.append(("result", self.clock.time, False))

    def on_end(self, end: SweepEnd) -> None:
        self.seen.append(("end", self.clock.time, (end.folder / "result.json").exists()))


def test_listener_hears_of_a_sealed_sweep_once_it_is_published(
    sweep: Callable[..., int], ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("team_pager")
    module.Published = Published
    monkeypatch.setitem(sys.modules, "team_pager", module)
    monkeypatch.setattr(Published, "clock", ray.clock, raising=False)
    monkeypatch.setattr(Published, "seen", [], raising=False)
    assert sweep("--listener", "team_pager:Published") == 0
    assert Published.seen == [("end", ray.clock.waits[-1], True)]


def make_ledger(path: Path, *, epsilon: float = 900.0) -> tuple[str, ...]:
    cap = Cap(epsilon=epsilon, delta=5e-5)
    Ledger.create(str(path)).register("scans", cap, num_records_public=1445)
    return ("--ledger", str(path), "--dataset-id", "scans")


def published(root: Path) -> list[Any]:
    client = connect(f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name("dpgcl")
    return list(client.search_runs([experiment.experiment_id]))


def secret(root: Path) -> list[dict[str, int]]:
    return list(json.loads((root / "sweeps/one/trusted/sealed.json").read_text())["draws"])


def everything_readable(root: Path, ledger: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """All that a reader of MLflow, the release folder and the ledger finds, without ids and seeds."""
    (only,) = published(root)
    client = connect(f"sqlite:///{root}/mlflow.db")
    info = [only.info.run_name, only.info.status, only.info.start_time, only.info.end_time]
    history = [
        [(m.value, m.timestamp, m.step) for m in client.get_metric_history(only.info.run_id, name)]
        for name in sorted(only.data.metrics)
    ]
    artifacts = sorted(entry.path for entry in client.list_artifacts(only.info.run_id))
    runs = [info, sorted(only.data.params.items()), sorted(only.data.tags.items()), history, artifacts]
    release = root / "sweeps/one/release"
    files = [(path.name, path.stat().st_mtime, path.read_text()) for path in sorted(release.iterdir())]
    capsys.readouterr()
    ledger_command(["show", "--ledger", str(ledger)])
    text = json.dumps([runs, files, release.stat().st_mtime, capsys.readouterr().out], ensure_ascii=False)
    text = re.sub(r"public_seed\W+\d+", "public_seed", text)
    text = re.sub(r'"dpgcl\.sweep_id", "[0-9a-f]{12}"', "sweep_id", text)  # random
    return re.sub(r"\b[0-9a-f]{16,64}\b", "hash", text)


@pytest.mark.ci
def test_nothing_readable_tells_the_number_of_trials(
    ray: Ray,
    sweep: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = []
    for storage, number in (("a", 2), ("b", 7)):
        drawn(monkeypatch, number)
        given = make_ledger(tmp_path / f"{storage}.db")
        assert sweep(*given, storage=storage) == 0
        texts.append(everything_readable(tmp_path / storage, tmp_path / f"{storage}.db", capsys))
    assert len(ray.trained) == 9
    assert texts[0] == texts[1]


def test_answer_of_a_sealed_sweep_is_released_with_its_run_and_never_before(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path
) -> None:
    before: list[list[Path]] = []
    ray.clock.on_wait = lambda: before.append(list((tmp_path / "a/sweeps/one").glob("[!t]*/answer.json")))
    assert sweep(*make_ledger(tmp_path / "a.db")) == 0
    assert before == [[]]
    kept = json.loads((tmp_path / "a/sweeps/one/release/answer.json").read_text())
    assert len(kept["choices"][0]["settings"]) == kept["num_repeats"] == 1
    assert kept["privacy"]["trainings_remaining"] > 0
    (only,) = published(tmp_path / "a")
    note = only.data.tags["mlflow.note.content"]
    assert note.startswith(escaped(kept["lines"][0]))
    assert escaped(MASKED_TIMES) in note


def test_outcomes_of_a_sealed_sweep_stay_on_the_trusted_side(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path
) -> None:
    trusted = SealedFolder(SweepFolder(tmp_path / "a/sweeps/one")).trusted
    kept = Outcomes(record_ids=np.arange(3, dtype=np.uint64), scores={"knn_accuracy": np.ones(3, np.float32)})
    ray.on_start = lambda name: write_outcomes(trusted.checkpoint_folder(name), kept)
    assert sweep() == 0
    files = list(tmp_path.rglob(OUTCOMES_FILE))
    assert len(files) == len(trusted.outcomes()) == len(ray.trained)
    assert all(path.is_relative_to(trusted.path) for path in files)


def seen_from_outside(root: Path) -> list[Any]:
    """What a reader of the storage folder and of MLflow finds, times of files included."""
    folder = root / "sweeps/one"
    files = [path for path in folder.rglob("*") if "trusted" not in path.relative_to(folder).parts[:-1]]
    times = [(str(path.relative_to(folder)), path.stat().st_mtime_ns) for path in sorted(files)]
    return [times, folder.stat().st_mtime_ns, len(published(root))]


@pytest.mark.ci
@pytest.mark.parametrize("mode", [(), ("--release", "sealed-threshold", "--min-score", "0.7")])
def test_moment_of_publication_depends_on_neither_the_number_nor_the_length_of_trials(
    mode: tuple[str, ...],
    ray: Ray,
    sweep: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Nothing changes outside `trusted/` between the draw and the moment, which is when the sweep ends."""
    started, took = ray.clock.time, []
    for storage, number, seconds in (("a", 1, 1.0), ("b", 7, 20.0)):
        ray.clock.time, ray.seconds = started, seconds
        begun: list[Any] = []
        root = tmp_path / storage

        def draw(_: Any, number: int = number) -> int:
            return number

        def first_trial(name: str, root: Path = root, begun: list[Any] = begun) -> None:
            begun.append(seen_from_outside(root))

        def waiting(root: Path = root, begun: list[Any] = begun) -> None:
            assert seen_from_outside(root) == begun[0]

        monkeypatch.setattr(TrialCountLaw, "draw", draw)
        ray.on_start, ray.clock.on_wait = first_trial, waiting
        assert sweep(*mode, "--publish-after", "600", storage=storage) == 0
        took.append(ray.clock.time - started)
        assert len(published(root)) == 1
    assert len(ray.trained) == 8
    assert took == [600.0, 600.0]


def test_overrun_waits_for_whole_intervals(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn(monkeypatch, 3)
    started, ray.seconds = ray.clock.time, 500.0
    assert sweep("--publish-after", "600") == 0
    assert ray.clock.time - started == 1800.0


def test_resumed_sweep_keeps_its_moment(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn(monkeypatch, 3)
    started, ray.stop_after = ray.clock.time, 2
    assert sweep("--publish-after", "600") == 128 + 15
    ray.clock.time, ray.stop_after = started + 250.0, None
    monkeypatch.setattr(prepare, "seconds_of_trials", lambda plan: [77.0])  # another machine, say
    assert sweep("--resume", "--publish-after", "600") == 0
    assert ray.clock.waits == [started + 600.0]


def test_number_is_drawn_from_the_law_that_is_charged(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    laws: list[Any] = []

    def draw(law: TrialCountLaw) -> int:
        laws.append(law)
        return 1

    monkeypatch.setattr(TrialCountLaw, "draw", draw)
    ray.at_once = 1
    assert sweep("--publish-after", "67") == 0  # 30 to start with, and 12 for each of three trials
    statement = json.loads((tmp_path / "a/sweeps/one/release/privacy_statement.json").read_text())
    assert [law.parameters() for law in laws] == [statement["cost"]["law"]]
    assert statement["cost"]["law"]["max_trials"] == 3
    assert any("Published 67 seconds after its start" in note for note in statement["notes"])


def test_moment_that_leaves_no_time_for_a_trial_is_refused(ray: Ray, sweep: Callable[..., int]) -> None:
    with pytest.raises(ConfigError, match="--publish-after must leave time for a trial, about 42 seconds"):
        sweep("--publish-after", "40")
    assert ray.trained == []


def test_open_sweep_has_no_moment() -> None:
    with pytest.raises(ConfigError, match="an open sweep shows every trial as it ends"):
        options("--tiny", "--publish-after", "600")


def test_sealed_sweep_publishes_exactly_one_run_with_the_tuned_epsilon(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn(monkeypatch, 3)
    assert [sweep(), sweep("--resume")] == [0, 0]
    (only,) = published(tmp_path / "a")
    assert only.data.tags["release_mode"] == "sealed"
    assert float(only.data.tags["tuned_epsilon"]) > 1
    assert set(only.data.metrics) == {"knn_accuracy"}
    assert only.data.params["num_steps_charged"] == "10"


def test_crashed_sweep_resumes_with_the_same_number_and_draws(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn(monkeypatch, 4)
    ray.stop_after = 2
    assert sweep() == 128 + 15
    before = secret(tmp_path / "a")
    drawn(monkeypatch, 9)
    ray.stop_after = None
    assert sweep("--resume") == 0
    assert secret(tmp_path / "a") == before
    assert len(before) == 4
    assert ray.trained == ["draw-0", "draw-1", "draw-2", "draw-3"]


def test_interrupted_trial_counts_as_the_worst_score(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn(monkeypatch, 1)
    ray.stop_after = 1
    sweep()
    ray.stop_after = None
    assert sweep("--resume") == 0
    assert ray.trained == ["draw-0"]
    assert json.loads((tmp_path / "a/sweeps/one/release/result.json").read_text())["outcome"] == "no model"


@pytest.mark.ci
def test_trial_whose_checkpoints_are_lost_is_not_repeated(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn(monkeypatch, 2)
    ray.stop_after = 1
    sweep()
    shutil.rmtree(tmp_path / "a/sweeps/one/trusted/checkpoints")
    ray.stop_after = None
    assert sweep("--resume") == 0
    assert ray.trained == ["draw-0", "draw-1"]


def test_sealed_sweep_that_lost_its_plan_draws_no_other_number(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn(monkeypatch, 2)
    sweep()
    before = secret(tmp_path / "a")
    (tmp_path / "a/sweeps/one/plan.json").unlink()
    with pytest.raises(StorageError, match=r"has no plan\.json"):
        sweep()
    assert secret(tmp_path / "a") == before


def test_released_files_tell_no_time_where_mlflow_fails(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TrackingError("MLflow does not answer")

    drawn(monkeypatch, 1)
    monkeypatch.setattr(Tracker, "log_sealed", fail)
    with pytest.raises(TrackingError):
        sweep()
    release = tmp_path / "a/sweeps/one/release"
    assert {path.stat().st_mtime_ns for path in (*release.iterdir(), release)} == {SEALED_TIME_MS * 10**6}
    assert (release / "result.json").exists()


def test_sweep_that_lost_its_number_is_charged_again_in_full(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn(monkeypatch, 2)
    given = make_ledger(tmp_path / "ledger.db")
    sweep(*given)
    (tmp_path / "a/sweeps/one/trusted/sealed.json").unlink()
    with pytest.raises(StorageError, match="charged in full again"):
        sweep(*given, "--resume")
    assert Ledger.open(str(tmp_path / "ledger.db")).read_charges("scans", with_pld=False).num_sealed == 1


def test_sealed_sweep_is_charged_once_whatever_its_number(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn(monkeypatch, 5)
    sweep(*make_ledger(tmp_path / "ledger.db"))
    kinds = [entry.kind for entry in Ledger.open(str(tmp_path / "ledger.db")).entries()]
    assert kinds == ["ledger", "register", "seal"]


def test_sealed_sweep_that_the_cap_refuses_draws_nothing(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(BudgetExceeded):
        sweep(*make_ledger(tmp_path / "ledger.db", epsilon=0.5))
    assert ray.trained == []
    assert not (tmp_path / "a/sweeps/one/trusted").exists()


def test_default_name_of_a_sealed_sweep_tells_no_time() -> None:
    name = name_suffix(options("--tiny", "--release", "sealed").release)
    assert re.fullmatch(r"sealed-[0-9a-f]{6}", name)


@pytest.fixture(scope="module")
def planned(make_plan: Callable[..., SweepPlan]) -> SweepPlan:
    return make_plan(*SEALED[:-2], "--group-sizes", "2", "4")


def test_draws_follow_the_law_and_take_every_setting() -> None:
    draws = [draw_trials(LAW, 3) for _ in range(400)]
    mean = sum(map(len, draws)) / len(draws)
    assert 15 < mean < 25  # five standard deviations of the mean on either side
    candidates = [draw.candidate for some in draws for draw in some]
    assert all(0.3 < candidates.count(each) / len(candidates) < 0.37 for each in range(3))


def test_drawn_trials_have_their_own_seeds_and_no_place_in_their_params(planned: SweepPlan) -> None:
    draws = [Draw(candidate=1, public_seed=seed, coin=0) for seed in (5, 6)]
    trials = trials_of_draws(planned.trials, draws)
    assert [trial.config.public_seed for trial in trials] == [5, 6]
    assert [trial.params["public_seed"] for trial in trials] == [5, 6]
    assert all(trial.config.mechanism.group_size == 4 and "repeat" not in trial.params for trial in trials)


def chosen(planned: SweepPlan, scores: list[float | None], **threshold: float) -> str | None:
    draws = [Draw(candidate=0, public_seed=n, coin=coin) for n, coin in enumerate((1, 9, 5))]
    trials = trials_of_draws(planned.trials, draws)
    results = {
        trial.name: {"failed": "x"} if score is None else {"metrics": {"knn_accuracy": score}}
        for trial, score in zip(trials, scores, strict=True)
    }
    found = choose(trials, draws, results, select_by="knn_accuracy", min_score=threshold.get("min_score"))
    return found.name if found is not None else None


def test_best_trial_is_chosen(planned: SweepPlan) -> None:
    assert chosen(planned, [0.1, 0.2, 0.3]) == "draw-2"


def test_tie_is_broken_by_the_coins(planned: SweepPlan) -> None:
    assert chosen(planned, [0.3, 0.3, 0.3]) == "draw-1"


@pytest.mark.parametrize("worst", [None, float("nan")])
def test_failed_trial_is_the_worst(planned: SweepPlan, worst: float | None) -> None:
    assert chosen(planned, [worst, worst, 0.0]) == "draw-2"
    assert chosen(planned, [worst, worst, worst]) is None


def test_first_trial_above_the_threshold_is_chosen(planned: SweepPlan) -> None:
    assert chosen(planned, [0.4, 0.6, 0.9], min_score=0.5) == "draw-1"
    assert chosen(planned, [0.4, 0.4, None], min_score=0.5) is None


@pytest.mark.ci
def test_curve_for_the_ledger_meets_the_published_bound(make_plan: Callable[..., SweepPlan]) -> None:
    """Converted at its best order, the curve is the Papernot-Steinke ε of the statement."""
    import math

    plan = make_plan(*SEALED[:-2], "--bound", "ps22")
    curve, cost = rdp_of_best(plan.release, plan.trials, plan.max_trials), plan.cost
    assert cost is not None
    epsilons = [
        curve(order) + math.log1p(-1 / order) - math.log(cost.delta * order) / (order - 1)
        for order in (2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0)
    ]
    assert min(epsilons) == pytest.approx(cost.tuned_epsilon, rel=0.02)


def noised_options(folder: Path, score_noise: str) -> tuple[str, ...]:
    dataset = write_npz(folder / "own.npz", 200)
    held_out = ("--score-on-held-out", "0.3", "--score-noise-multiplier", score_noise)
    data = ("--expected-batch-size", "32", "--dataset", dataset, "--evaluate-on", "digits", *held_out)
    return (*data, "--snr-noise-multiplier", "2", "--select-by", "noised_knn_accuracy")


@pytest.mark.ci
def test_private_sealed_sweep_selects_by_the_noised_score_and_publishes_it(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn(monkeypatch, 3)
    ray.noised = [0.2, 0.9, 0.4]
    assert sweep(*noised_options(tmp_path, "20"), "--no-ledger") == 0
    result = json.loads((tmp_path / "a/sweeps/one/release/result.json").read_text())
    assert result["metrics"] == {"noised_knn_accuracy": 0.9, "knn_accuracy": 0.0, "num_steps_charged": 10}
    statement = json.loads((tmp_path / "a/sweeps/one/release/privacy_statement.json").read_text())
    assert statement["promises"]
    assert "selection by noised_knn_accuracy" in statement["scores"]


@pytest.mark.ci
@pytest.mark.parametrize(("score_noise", "larger"), [("50", "training"), ("0.5", "scoring")])
def test_curve_for_the_ledger_is_the_larger_of_training_and_scoring(
    score_noise: str, larger: str, make_plan: Callable[..., SweepPlan], tmp_path: Path
) -> None:
    plan = make_plan(*SEALED[:-2], *noised_options(tmp_path, score_noise))
    mechanism, orders = plan.trials[0].config.mechanism, np.array(FILTER_ORDERS)
    joint = dp_event.PoissonSampledDpEvent(mechanism.sampling_prob, dp_event.GaussianDpEvent(1.25**-0.5))
    events = {
        "training": dp_event.ComposedDpEvent([mechanism.dp_event(9), joint]),
        "scoring": dp_event.GaussianDpEvent(float(score_noise) / 2**0.5),
    }
    curves = {}
    for name, event in events.items():
        accountant = RdpAccountant(list(FILTER_ORDERS))
        accountant.compose(event)
        law = TruncatedNegativeBinomial.from_mean(10, eta=1)
        rdp = np.where(np.array(accountant.rdp) > 0, accountant.rdp, np.inf)
        curves[name] = float(papernot_steinke_rdp(orders, rdp, law)[FILTER_ORDERS.index(4.0)])
    curve = rdp_of_best(plan.release, plan.trials, plan.max_trials)
    assert curve(4.0) == pytest.approx(curves[larger], rel=1e-9)
    assert curves[larger] == max(curves.values())


def test_sealed_charge_of_other_units_is_refused(ray: Ray, sweep: Callable[..., int], tmp_path: Path) -> None:
    np.savez(
        tmp_path / "own.npz",
        images=np.random.default_rng(0).integers(0, 256, (1440, 8, 8), dtype=np.uint8),
        patient=np.arange(1440),
    )
    given = (
        "--dataset",
        f"npz:{tmp_path / 'own.npz'}",
        "--unit-column",
        "patient",
        "--evaluate-on",
        "digits",
    )
    with pytest.raises(LedgerError, match="with unit 'record'"):
        sweep(*given, *make_ledger(tmp_path / "ledger.db"))
    assert ray.trained == []
